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

/* Where the fetching of a stride is; inner loops take a copy, for the compiler to keep in registers. */
typedef struct tile_cursor {
    const char *at, *end; /* next FETCH_BYTES, end of their run */
    int32_t due;          /* what is left until the next ones, times steps; below 0 they are due */
} tile_cursor;

/* A walk over the rows of a stride as they lie in memory, run by run: a run is a row, or the rows of all heads of a
 * token if those are next to each other. */
typedef struct tile_fetch {
    tile_cursor cursor;
    int32_t pieces, steps; /* a step fetches pieces / steps times FETCH_BYTES on average */
    const tile_rows *rows; /* of the stride's first head */
    int32_t heads;         /* runs of a token */
    int32_t run_bytes;
    bool heads_first;       /* heads of a token are closer to each other than tokens of a head */
    int64_t k_head, v_head; /* bytes from head to head */
    bool in_v;              /* K is through */
    int32_t token, head;    /* of the next run */
    const char *run;        /* the one before */
} tile_fetch;

/* Where the next run begins; behind the last one fetching stops, and that is the one before. */
static __attribute__((noinline)) const char *tile_next_run(tile_fetch *f)
{
    int32_t *inner = f->heads_first ? &f->head : &f->token, *outer = f->heads_first ? &f->token : &f->head;
    const int32_t inner_end = f->heads_first ? f->heads : f->rows->n;
    const int32_t outer_end = f->heads_first ? f->rows->n : f->heads;
    if (*outer == outer_end) {
        if (f->in_v) {
            f->pieces = 0;
            return f->run;
        }
        f->in_v = true;
        *outer = 0;
    }
    f->run = f->in_v ? f->rows->v[f->token] + f->head * f->v_head : f->rows->k[f->token] + f->head * f->k_head;
    if (++*inner == inner_end) {
        *inner = 0;
        ++*outer;
    }
    return f->run;
}

TILE_INLINE void tile_begin_run(tile_fetch *f, tile_cursor *cursor)
{
    cursor->at = tile_next_run(f);
    cursor->end = cursor->at + f->run_bytes;
}

/* Begins to fetch the stride of `heads` heads; returns the pieces that it has. */
static inline int32_t tile_fetch_stride(tile_fetch *f, const tile_rows *rows, int32_t heads, int32_t row_bytes)
{
    const bool adjacent = f->heads_first && f->k_head == row_bytes && f->v_head == row_bytes;
    f->rows = rows;
    f->heads = adjacent ? 1 : heads;
    f->run_bytes = adjacent ? heads * row_bytes : row_bytes;
    f->in_v = false;
    f->token = f->head = 0;
    f->cursor = (tile_cursor){ 0 };
    f->pieces = 0;
    if (rows->n > 0)
        tile_begin_run(f, &f->cursor);
    return 2 * rows->n * f->heads * (int32_t)ekv_ceil_div(f->run_bytes, FETCH_BYTES);
}

/* The next FETCH_BYTES, into the second-level cache: more of its loads can be under way than of the first level's, and
 * that one is too small for a stride (bench/cpu_tile.c). */
TILE_INLINE void tile_fetch_piece(tile_fetch *f, tile_cursor *cursor)
{
    __builtin_prefetch(cursor->at, 0, 2);
    __builtin_prefetch(cursor->at + CACHE_LINE, 0, 2); /* of the next run, where one ends before */
    cursor->at += FETCH_BYTES;
    if (cursor->at >= cursor->end)
        tile_begin_run(f, cursor);
}

/* Called evenly throughout a unit: loads in flight are few, and a burst of them would hold up the computation. */
TILE_INLINE void tile_fetch_step(tile_fetch *f, tile_cursor *cursor)
{
    for (cursor->due -= f->pieces; cursor->due < 0; cursor->due += f->steps)
        tile_fetch_piece(f, cursor);
}

/* ---- Tiles ------------------------------------------------------------------------------------------- */

/* One block of one head.  fetch: of the next stride, to be stepped on. */
typedef void tile_unit(const ekv_cpu_tile *tile, int32_t head, const tile_rows *rows, tile_fetch *fetch);

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

/* K and V of a stride, if it has more than one head.  Two at once, the one that is computed and the next one, have to
 * stay in a second-level cache of 256 KiB beside what else is in it. */
enum { STRIDE_BYTES = 64 << 10 };

/* Calls `unit` for every block and, within it, every head.  steps: how often a unit of a whole block calls
 * tile_fetch_step. */
static inline void tile_for_units(const ekv_cpu_tile *tile, tile_unit *unit, int32_t steps)
{
    const int64_t size = ekv_dtype_size(tile->kv_dtype);
    const int64_t k_head = tile->k_stride_head * size, v_head = tile->v_stride_head * size;
    const int32_t row_bytes = (int32_t)(tile->head_dim * size);
    const int32_t most = (int32_t)ekv_max(STRIDE_BYTES / (2 * EKV_TILE_BLOCK * row_bytes), 1);
    tile_rows blocks[2], strides[2], rows;
    tile_fetch fetch = {
        .steps = steps, .heads_first = tile->k_stride_head < tile->k_stride_token, .k_head = k_head, .v_head = v_head
    };
    tile_begin(tile);
    tile_find_rows(tile, tile->kv_begin, &blocks[0]);
    strides[0] = blocks[0];
    int32_t pieces = tile_fetch_stride(&fetch, &blocks[0], (int32_t)ekv_min(most, tile->heads), row_bytes);
    for (; pieces > 0; pieces--)
        tile_fetch_piece(&fetch, &fetch.cursor);
    int32_t block = 0, stride = 0, head = 0;
    while (strides[stride].n > 0) {
        const int32_t heads = (int32_t)ekv_min(most, tile->heads - head);
        int32_t next_head = head + heads;
        if (head == 0)
            tile_find_rows(tile, blocks[block].first + blocks[block].n, &blocks[block ^ 1]);
        if (next_head == tile->heads) {
            next_head = 0;
            block ^= 1;
        }
        tile_rows *next = &strides[stride ^ 1];
        tile_shift_rows(&blocks[block], next_head * k_head, next_head * v_head, next);
        const int32_t next_heads = (int32_t)ekv_min(most, tile->heads - next_head);
        fetch.pieces = (int32_t)ekv_ceil_div(tile_fetch_stride(&fetch, next, next_heads, row_bytes), heads);
        for (int32_t h = 0; h < heads; h++) {
            tile_shift_rows(&strides[stride], h * k_head, h * v_head, &rows);
            unit(tile, head + h, &rows, &fetch);
        }
        head = next_head;
        stride ^= 1;
    }
    tile_end(tile);
}

#endif
