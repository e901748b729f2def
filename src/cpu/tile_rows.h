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

/* A walk over the rows of a stride as they lie in memory, so that what it begins the hardware's prefetchers
 * go on with. */
typedef struct tile_walk {
    const tile_rows *rows;  /* of its first head */
    int64_t k_head, v_head; /* bytes from head to head */
    int32_t heads;
    bool heads_first; /* heads of a token are next to each other, else tokens of a head */
    bool v;           /* K is through */
    int32_t token, head;
} tile_walk;

static inline const char *tile_walk_next(tile_walk *w)
{
    const char *row = w->v ? w->rows->v[w->token] + w->head * w->v_head : w->rows->k[w->token] + w->head * w->k_head;
    int32_t *inner = w->heads_first ? &w->head : &w->token, *outer = w->heads_first ? &w->token : &w->head;
    const int32_t inner_end = w->heads_first ? w->heads : w->rows->n;
    const int32_t outer_end = w->heads_first ? w->rows->n : w->heads;
    if (++*inner == inner_end) {
        *inner = 0;
        if (++*outer == outer_end) {
            *outer = 0;
            w->v = true;
        }
    }
    return row;
}

/* Rows that a unit can fetch: more than one head's, where fewer heads follow than are computed. */
enum { FETCH_ROWS = 4 * EKV_TILE_BLOCK };

/* Where a unit's fetching is; inner loops take a copy, for the compiler to keep in registers. */
typedef struct tile_cursor {
    const char *at, *end; /* next FETCH_BYTES, end of their row */
    int32_t due;          /* what is left until the next ones, times steps; below 0 they are due */
} tile_cursor;

/* What is fetched during a unit. */
typedef struct tile_fetch {
    tile_cursor cursor;
    const char **next, **last; /* row; the last stays */
    int32_t row_bytes;
    int32_t pieces, steps; /* a step fetches pieces / steps times FETCH_BYTES on average */
    const char *rows[FETCH_ROWS];
} tile_fetch;

/* The next n rows; returns n. */
static inline int32_t tile_fetch_unit(tile_fetch *f, tile_walk *walk, int32_t n)
{
    n = n < FETCH_ROWS ? n : FETCH_ROWS;
    f->pieces = n * (int32_t)ekv_ceil_div(f->row_bytes, FETCH_BYTES);
    f->cursor.due = 0;
    if (n == 0)
        return 0;
    for (int32_t i = 0; i < n; i++)
        f->rows[i] = tile_walk_next(walk);
    f->last = f->rows + n - 1;
    f->next = f->rows + (n > 1);
    f->cursor.at = f->rows[0];
    f->cursor.end = f->rows[0] + f->row_bytes;
    return n;
}

/* Called evenly throughout a unit: loads in flight are few, and a burst of them would hold up the computation. */
TILE_INLINE void tile_fetch_step(tile_fetch *f, tile_cursor *cursor)
{
    for (cursor->due -= f->pieces; cursor->due < 0; cursor->due += f->steps) {
        __builtin_prefetch(cursor->at, 0, 3);
        __builtin_prefetch(cursor->at + CACHE_LINE, 0, 3); /* of the next row, where a row ends before */
        cursor->at += FETCH_BYTES;
        if (cursor->at >= cursor->end) {
            cursor->at = *f->next;
            cursor->end = cursor->at + f->row_bytes;
            f->next += f->next < f->last;
        }
    }
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
    tile_fetch fetch = { .row_bytes = row_bytes, .steps = steps };
    tile_begin(tile);
    tile_find_rows(tile, tile->kv_begin, &blocks[0]);
    strides[0] = blocks[0];
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
        tile_walk walk = { .rows = next,
                           .k_head = k_head,
                           .v_head = v_head,
                           .heads = next_heads,
                           .heads_first = tile->k_stride_head < tile->k_stride_token };
        int32_t left = 2 * next->n * next_heads;
        for (int32_t h = 0; h < heads; h++) {
            left -= tile_fetch_unit(&fetch, &walk, left / (heads - h));
            tile_shift_rows(&strides[stride], h * k_head, h * v_head, &rows);
            unit(tile, head + h, &rows, &fetch);
        }
        head = next_head;
        stride ^= 1;
    }
    tile_end(tile);
}

#endif
