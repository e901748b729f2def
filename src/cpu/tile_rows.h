/* SPDX-License-Identifier: Apache-2.0
 * What the tile kernels of all instruction sets share: where the rows of K and V lie, block by block, how the next
 * ones get into the caches meanwhile, and how query rows are grouped.
 *
 * A *unit* is one block of one head.  While the units of a block are computed the next block is fetched: random pages
 * are nothing that a hardware prefetcher foresees. */
#ifndef EVENKV_CPU_TILE_ROWS_H
#define EVENKV_CPU_TILE_ROWS_H

#include "base/half.h"
#include "base/portable.h"
#include "cpu/tile_kernel.h"

#include <math.h>

#define TILE_INLINE static inline __attribute__((always_inline))

enum { CACHE_LINE = 64 };

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

/* A walk over the rows of a block, all heads, as they lie in memory, so that what it begins the hardware's prefetchers
 * go on with.  Each unit fetches as many of them as it has itself. */
typedef struct tile_walk {
    const tile_rows *rows;  /* of the first head */
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

/* What is fetched during a unit. */
typedef struct tile_fetch {
    const char *line, *end; /* next line, end of its row */
    const char **next;      /* row; the last stays */
    int32_t row_bytes;
    int32_t lines, steps; /* a step fetches lines / steps lines on average */
    int32_t due;          /* 1 / steps of a line */
    const char **last;
    const char *rows[2 * EKV_TILE_BLOCK];
} tile_fetch;

static inline void tile_fetch_unit(tile_fetch *f, tile_walk *walk)
{
    const int32_t n = 2 * walk->rows->n;
    for (int32_t i = 0; i < n; i++)
        f->rows[i] = tile_walk_next(walk);
    f->last = f->rows + n - 1;
    f->line = f->rows[0];
    f->end = f->line + f->row_bytes;
    f->next = f->rows + 1;
    f->due = 0;
}

/* Called evenly throughout a unit: loads in flight are few, and a burst of them would hold up the computation. */
TILE_INLINE void tile_fetch_step(tile_fetch *f)
{
    for (f->due += f->lines; f->due >= f->steps; f->due -= f->steps) {
        __builtin_prefetch(f->line, 0, 3);
        f->line += CACHE_LINE;
        if (f->line >= f->end) {
            f->line = *f->next;
            f->end = f->line + f->row_bytes;
            f->next += f->next < f->last;
        }
    }
}

/* ---- Tiles ------------------------------------------------------------------------------------------- */

/* One block of one head.  fetch: of the next block, to be stepped on. */
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

/* Calls `unit` for every block and, within it, every head.  steps: how often a unit of a whole
 * block calls tile_fetch_step. */
static inline void tile_for_units(const ekv_cpu_tile *tile, tile_unit *unit, int32_t steps)
{
    const int64_t size = ekv_dtype_size(tile->kv_dtype);
    const int64_t k_head = tile->k_stride_head * size, v_head = tile->v_stride_head * size;
    const int64_t k_token = tile->k_stride_token * size;
    tile_rows blocks[2], unit_rows;
    tile_fetch fetch = { .row_bytes = (int32_t)(tile->head_dim * size), .steps = steps };
    tile_begin(tile);
    tile_find_rows(tile, tile->kv_begin, &blocks[0]);
    for (int32_t i = 0; blocks[i].n > 0; i ^= 1) {
        const tile_rows *next = &blocks[i ^ 1];
        tile_find_rows(tile, blocks[i].first + blocks[i].n, &blocks[i ^ 1]);
        tile_walk walk = {
            .rows = next, .k_head = k_head, .v_head = v_head, .heads = tile->heads, .heads_first = k_head < k_token
        };
        fetch.lines = 2 * next->n * (int32_t)ekv_ceil_div(fetch.row_bytes, CACHE_LINE);
        for (int32_t h = 0; h < tile->heads; h++) {
            if (next->n)
                tile_fetch_unit(&fetch, &walk);
            tile_shift_rows(&blocks[i], h * k_head, h * v_head, &unit_rows);
            unit(tile, h, &unit_rows, &fetch);
        }
    }
    tile_end(tile);
}

#endif
