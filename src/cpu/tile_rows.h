/* SPDX-License-Identifier: Apache-2.0
 * What the tile kernels of all instruction sets share: where the rows of K and V lie, block by block, how the next
 * ones get into the caches meanwhile, and how query rows are grouped.
 *
 * A *unit* is one block of one head, a *stride* the units of a block that are computed in one go.  Meanwhile the next
 * stride is fetched: random pages are nothing that a hardware prefetcher foresees. */
#ifndef EVENKV_CPU_TILE_ROWS_H
#define EVENKV_CPU_TILE_ROWS_H

#include "base/half.h"
#include "base/portable.h"
#include "cpu/convert.h"
#include "cpu/tile_kernel.h"

#include <math.h>

#define TILE_INLINE static inline __attribute__((always_inline))

enum { CACHE_LINE = 64, FETCH_BYTES = 2 * CACHE_LINE };

/* Query rows whose dots and weights lie side by side, [EKV_TILE_BLOCK][PANEL]: softmax then goes down the tokens, with
 * a row a lane.  Lanes without a row hold numbers that nobody reads. */
enum { PANEL = EKV_TILE_PANEL };

/* The running state of the rows of a panel. */
typedef struct tile_state {
    float max[PANEL];
    float sum[PANEL];
} tile_state;

/* ---- Rows -------------------------------------------------------------------------------------------- */

/* The tokens of a block: rows of one head. */
typedef struct tile_rows {
    int32_t first;
    int32_t n; /* tokens; 0 behind the last block */
    const char *k[EKV_TILE_BLOCK];
    const char *v[EKV_TILE_BLOCK];
} tile_rows;

/* The block that begins at token `first`, of the first head. */
static inline void tile_find_rows(const ekv_cpu_tile *tile, int32_t first, tile_rows *rows)
{
    const int64_t size = ekv_dtype_size(tile->kv_dtype);
    const int32_t left = tile->kv_end - first;
    rows->first = first;
    rows->n = left < EKV_TILE_BLOCK ? left : EKV_TILE_BLOCK;
    int32_t page = first / tile->page_size, token = first % tile->page_size;
    for (int32_t t = 0; t < rows->n; t++) {
        const int64_t at = tile->pages[page];
        rows->k[t] = (const char *)tile->k + (at * tile->k_stride_page + token * tile->k_stride_token) * size;
        rows->v[t] = (const char *)tile->v + (at * tile->v_stride_page + token * tile->v_stride_token) * size;
        if (++token == tile->page_size) {
            token = 0;
            page++;
        }
    }
}

/* The same tokens of the head that is so many bytes further. */
static inline void tile_shift_rows(const tile_rows *from, int64_t k_bytes, int64_t v_bytes, tile_rows *rows)
{
    rows->first = from->first;
    rows->n = from->n;
    for (int32_t t = 0; t < from->n; t++) {
        rows->k[t] = from->k[t] + k_bytes;
        rows->v[t] = from->v[t] + v_bytes;
    }
}

/* ---- Fetching ---------------------------------------------------------------------------------------- */

/* A walk over the rows of a stride as they lie in memory, run by run: a run is a row, or the rows of all heads of a
 * token where those are next to each other. */
typedef struct tile_walk {
    const tile_rows *rows;  /* of the stride's first head */
    int32_t heads;          /* runs of a token */
    bool heads_first;       /* heads of a token are closer to each other than tokens of a head */
    bool in_v;              /* K is through */
    int64_t k_head, v_head; /* bytes from head to head */
    int32_t token, head;    /* of the next run */
} tile_walk;

static inline const char *tile_walk_next(tile_walk *w)
{
    const char *run = w->in_v ? w->rows->v[w->token] + w->head * w->v_head : w->rows->k[w->token] + w->head * w->k_head;
    int32_t *inner = w->heads_first ? &w->head : &w->token, *outer = w->heads_first ? &w->token : &w->head;
    const int32_t inner_end = w->heads_first ? w->heads : w->rows->n;
    const int32_t outer_end = w->heads_first ? w->rows->n : w->heads;
    if (++*inner == inner_end) {
        *inner = 0;
        if (++*outer == outer_end) {
            *outer = 0;
            w->in_v = true;
        }
    }
    return run;
}

/* Runs that a unit can fetch: more than one head's, where fewer heads follow than are computed. */
enum { FETCH_RUNS = 4 * EKV_TILE_BLOCK };

/* Where a unit's fetching is; inner loops take a copy, for the compiler to keep in registers. */
typedef struct tile_cursor {
    const char *at, *end; /* next FETCH_BYTES, end of their run */
    int32_t due;          /* what is left until the next ones, times steps; below 0 they are due */
} tile_cursor;

/* What is fetched during a unit. */
typedef struct tile_fetch {
    tile_cursor cursor;
    const char **next, **last; /* run; the last stays */
    int32_t run_bytes;
    int32_t pieces, steps; /* a step fetches pieces / steps times FETCH_BYTES on average */
    const char *runs[FETCH_RUNS];
} tile_fetch;

/* The next n runs; returns n. */
static inline int32_t tile_fetch_unit(tile_fetch *f, tile_walk *walk, int32_t n)
{
    n = n < FETCH_RUNS ? n : FETCH_RUNS;
    f->pieces = n * (int32_t)ekv_ceil_div(f->run_bytes, FETCH_BYTES);
    f->cursor.due = 0;
    if (n == 0)
        return 0;
    for (int32_t i = 0; i < n; i++)
        f->runs[i] = tile_walk_next(walk);
    f->last = f->runs + n - 1;
    f->next = f->runs + (n > 1);
    f->cursor.at = f->runs[0];
    f->cursor.end = f->runs[0] + f->run_bytes;
    return n;
}

/* The next FETCH_BYTES, into the second-level cache: more of its loads can be under way than of the first level's, and
 * that one is too small for a stride (bench/cpu_tile.c). */
TILE_INLINE void tile_fetch_piece(tile_fetch *f, tile_cursor *cursor)
{
    __builtin_prefetch(cursor->at, 0, 2);
    __builtin_prefetch(cursor->at + CACHE_LINE, 0, 2); /* of the next run, where one ends before */
    cursor->at += FETCH_BYTES;
    if (cursor->at >= cursor->end) {
        cursor->at = *f->next;
        cursor->end = cursor->at + f->run_bytes;
        f->next += f->next < f->last;
    }
}

/* Called evenly throughout a unit: loads in flight are few, and a burst of them would hold up the computation. */
TILE_INLINE void tile_fetch_step(tile_fetch *f, tile_cursor *cursor)
{
    for (cursor->due -= f->pieces; cursor->due < 0; cursor->due += f->steps)
        tile_fetch_piece(f, cursor);
}

/* ---- Tiles ------------------------------------------------------------------------------------------- */

/* One block of one head.  own: the kernel's; fetch: of a later stride, to be stepped on. */
typedef void tile_unit(const ekv_cpu_tile *tile, void *own, int32_t head, const tile_rows *rows, tile_fetch *fetch);

static inline tile_state *tile_states(const ekv_cpu_tile *tile, int32_t head)
{
    const int64_t panels = ekv_ceil_div(tile->rows, PANEL);
    return (tile_state *)(void *)tile->state + head * panels;
}

static inline void tile_begin(const ekv_cpu_tile *tile)
{
    const int32_t panels = (int32_t)ekv_ceil_div(tile->rows, PANEL);
    memset(tile->p, 0, (size_t)panels * PANEL * EKV_TILE_BLOCK * sizeof *tile->p);
    for (int32_t h = 0; h < tile->heads; h++) {
        memset(tile->acc + h * tile->stride_acc, 0, (size_t)tile->rows * (size_t)tile->head_dim * sizeof *tile->acc);
        for (int32_t i = 0; i < panels; i++)
            for (int32_t r = 0; r < PANEL; r++) {
                tile_states(tile, h)[i].max[r] = -INFINITY;
                tile_states(tile, h)[i].sum[r] = 0;
            }
    }
}

/* As ekv_cpu_kernel.write: a plain loop, which every kernel's file compiles for its own instructions. */
static void tile_write(float *acc, float factor, int32_t n, ekv_dtype dtype, void *row)
{
    for (int32_t i = 0; i < n; i++)
        acc[i] *= factor;
    ekv_row_from_f32(acc, n, dtype, row);
}

static inline void tile_end(const ekv_cpu_tile *tile)
{
    for (int32_t h = 0; h < tile->heads; h++)
        for (int32_t r = 0; r < tile->rows; r++) {
            const tile_state *state = &tile_states(tile, h)[r / PANEL];
            tile->max[h * tile->stride_state + r] = state->max[r % PANEL];
            tile->sum[h * tile->stride_state + r] = state->sum[r % PANEL];
        }
}

/* K and V of a stride at most, if it has more than one head: all heads of a token in one run where that can be.  It and
 * what is fetched ahead have to stay in a second-level cache of 512 KiB beside what else is in it. */
enum { STRIDE_BYTES = 128 << 10 };

/* As many strides are fetched ahead as have AHEAD_BYTES, from one to MOST_AHEAD. */
enum { AHEAD_BYTES = 64 << 10, MOST_AHEAD = 4 };

/* The units of heads [head, head + heads) in a block. */
typedef struct tile_stride {
    tile_rows rows; /* of the first head */
    int32_t head, heads;
} tile_stride;

/* All strides of a tile, in their order. */
typedef struct tile_strides {
    const ekv_cpu_tile *tile;
    int32_t row_bytes, most; /* most heads of a stride */
    int64_t k_head, v_head;  /* bytes from head to head */
    tile_rows block;         /* of the next stride, of the tile's first head */
    int32_t head;
} tile_strides;

/* rows.n is 0 behind the last one. */
static inline void tile_next_stride(tile_strides *s, tile_stride *next)
{
    next->head = s->head;
    next->heads = (int32_t)ekv_min(s->most, s->tile->heads - s->head);
    tile_shift_rows(&s->block, s->head * s->k_head, s->head * s->v_head, &next->rows);
    s->head += next->heads;
    if (s->head == s->tile->heads) {
        s->head = 0;
        tile_find_rows(s->tile, s->block.first + s->block.n, &s->block);
    }
}

/* Begins to fetch the stride; returns its runs. */
static inline int32_t tile_fetch_stride(const tile_strides *s, const tile_stride *stride, tile_fetch *fetch,
                                        tile_walk *walk)
{
    const bool heads_first = s->tile->k_stride_head < s->tile->k_stride_token;
    const bool adjacent = heads_first && s->k_head == s->row_bytes && s->v_head == s->row_bytes;
    *walk = (tile_walk){ .rows = &stride->rows,
                         .heads = adjacent ? 1 : stride->heads,
                         .heads_first = heads_first,
                         .k_head = s->k_head,
                         .v_head = s->v_head };
    fetch->run_bytes = adjacent ? stride->heads * s->row_bytes : s->row_bytes;
    return 2 * stride->rows.n * walk->heads;
}

/* Fetches it in one go. */
static inline void tile_fetch_now(const tile_strides *s, const tile_stride *stride, tile_fetch *fetch)
{
    tile_walk walk;
    for (int32_t left = tile_fetch_stride(s, stride, fetch, &walk); left > 0;) {
        left -= tile_fetch_unit(fetch, &walk, left);
        for (int32_t piece = 0; piece < fetch->pieces; piece++)
            tile_fetch_piece(fetch, &fetch->cursor);
    }
}

/* Calls `unit` for every block and, within it, every head; tile_end is the caller's.  steps: how often a unit of a
 * whole block calls tile_fetch_step. */
static inline void tile_for_units(const ekv_cpu_tile *tile, tile_unit *unit, void *own, int32_t steps)
{
    const int32_t size = ekv_dtype_size(tile->kv_dtype), unit_bytes = 2 * EKV_TILE_BLOCK * tile->head_dim * size;
    tile_strides strides = { .tile = tile,
                             .row_bytes = tile->head_dim * size,
                             .most = (int32_t)ekv_max(STRIDE_BYTES / unit_bytes, 1),
                             .k_head = tile->k_stride_head * size,
                             .v_head = tile->v_stride_head * size };
    const int64_t heads = ekv_min(strides.most, tile->heads);
    const int32_t ahead = (int32_t)ekv_max(ekv_min(AHEAD_BYTES / (heads * unit_bytes), MOST_AHEAD), 1);
    tile_stride ring[MOST_AHEAD + 1];
    tile_fetch fetch = { .steps = steps };
    tile_rows rows;
    tile_begin(tile);
    tile_find_rows(tile, tile->kv_begin, &strides.block);
    for (int32_t i = 0; i < ahead; i++) {
        tile_next_stride(&strides, &ring[i]);
        tile_fetch_now(&strides, &ring[i], &fetch);
    }
    for (int32_t i = 0; ring[i].rows.n > 0; i = (i + 1) % (MOST_AHEAD + 1)) {
        const tile_stride *now = &ring[i];
        tile_stride *later = &ring[(i + ahead) % (MOST_AHEAD + 1)];
        tile_walk walk;
        tile_next_stride(&strides, later);
        int32_t left = tile_fetch_stride(&strides, later, &fetch, &walk);
        for (int32_t h = 0; h < now->heads; h++) {
            left -= tile_fetch_unit(&fetch, &walk, (int32_t)ekv_ceil_div(left, now->heads - h));
            tile_shift_rows(&now->rows, h * strides.k_head, h * strides.v_head, &rows);
            unit(tile, own, now->head + h, &rows, &fetch);
        }
    }
}

#endif
