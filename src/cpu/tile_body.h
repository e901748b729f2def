/* SPDX-License-Identifier: Apache-2.0
 * A tile kernel in fp32: the body of a file that defines what tile_softmax.h wants, and
 *
 *     LANES, vec                                floats of a vector, its type
 *     vec_fma(a, b, c)                          a * b + c
 *     vec_from_f16(from), vec_from_bf16(from)   LANES elements as floats
 *     vec_from_even(from), vec_from_odd(from)   those of even or odd index of 2 * LANES bf16
 *     vec_split(&a, &b)                         the even elements of both in a, the odd ones in b; vec_join: back
 *     vec_sums(a, b, c, d)                      the sum over the lanes of each, the order of additions being the same
 *                                               in all four places
 *     MOST_ROWS                                 query rows of the largest pass, 4 or 8
 *     TOKENS(rows), CHUNKS(rows)                accumulators of `rows` query rows: for so many tokens in Q.K, for so
 *                                               many vectors of head_dim in P.V.  Enough of them hide the latency of
 *                                               an addition, few enough stay in registers.
 *
 * Query rows go through K and V in passes of MOST_ROWS or a smaller power of 2.  Each pass converts 16-bit elements
 * anew: that was faster than to keep floats, whose stores and second reads cost more (bench/cpu_tile.c).
 * Two neighbours of bf16 make a 32-bit word, of which a shift and a mask leave two floats: no shuffle is needed if
 * floats are kept in that order, so with bf16 each 2 * LANES elements of q and acc have the even ones first.
 * A dot is a sum of LANES partial sums in the order of head_dim, an output a sum in the order of the tokens, whichever
 * rows and tokens share the registers. */
#include "cpu/tile_softmax.h"

typedef float quad __attribute__((vector_size(16)));

TILE_INLINE vec vec_load(const float *from)
{
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

TILE_INLINE void vec_store(float *to, vec value)
{
    memcpy(to, &value, sizeof value);
}

TILE_INLINE vec vec_splat(float value)
{
    return value - (vec){ 0 };
}

/* Which floats a vector from element d on has: LANES in their order, or those of even or odd index of the 2 * LANES
 * that begin at element d or, for ODD, end behind its vector. */
typedef enum half { IN_ORDER, EVEN, ODD } half;

TILE_INLINE vec read_elements(const ekv_dtype dtype, const half which, const char *row, int32_t d)
{
    if (dtype == EKV_DTYPE_F32)
        return vec_load((const float *)(const void *)row + d);
    const uint16_t *halves = (const uint16_t *)(const void *)row + d;
    if (dtype == EKV_DTYPE_F16)
        return vec_from_f16(halves);
    return which == EVEN ? vec_from_even(halves) : which == ODD ? vec_from_odd(halves - LANES) : vec_from_bf16(halves);
}

/* ---- Q.K --------------------------------------------------------------------------------------------- */

/* acc[i][r] += q[r] * k[i] for LANES elements. */
TILE_INLINE void add_dots(const int32_t rows, const int32_t tokens, const ekv_dtype dtype, const half which,
                          const float *restrict q, const char *const *row, int32_t d, int32_t head_dim,
                          vec acc[TOKENS(1)][MOST_ROWS])
{
    vec k[TOKENS(1)];
#pragma GCC unroll 16
    for (int32_t i = 0; i < tokens; i++)
        k[i] = read_elements(dtype, which, row[i], d);
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; r++) {
        const vec query = vec_load(q + r * head_dim + d);
#pragma GCC unroll 16
        for (int32_t i = 0; i < tokens; i++)
            acc[i][r] = vec_fma(query, k[i], acc[i][r]);
    }
}

/* p[t][r] = q[r] . k[t] for tokens [t, t + tokens). */
TILE_INLINE void dots_at(const int32_t rows, const int32_t tokens, const ekv_dtype dtype, const float *restrict q,
                         const char *const *row, int32_t t, int32_t head_dim, float *restrict p, tile_fetch *fetch)
{
    vec acc[TOKENS(1)][MOST_ROWS];
#pragma GCC unroll 16
    for (int32_t i = 0; i < tokens; i++)
#pragma GCC unroll 8
        for (int32_t r = 0; r < rows; r++)
            acc[i][r] = (vec){ 0 };
    const char *near[TOKENS(1)]; /* rows of these tokens, where stores cannot change them */
#pragma GCC unroll 16
    for (int32_t i = 0; i < tokens; i++)
        near[i] = row[t + i];
    int32_t d = 0;
    tile_cursor cursor = fetch->cursor;
    const bool pairs = dtype == EKV_DTYPE_BF16;
    for (; d + 2 * LANES <= head_dim; d += 2 * LANES) {
        tile_fetch_step(fetch, &cursor);
        add_dots(rows, tokens, dtype, pairs ? EVEN : IN_ORDER, q, near, d, head_dim, acc);
        add_dots(rows, tokens, dtype, pairs ? ODD : IN_ORDER, q, near, d + LANES, head_dim, acc);
    }
    if (d < head_dim)
        add_dots(rows, tokens, dtype, IN_ORDER, q, near, d, head_dim, acc);
    fetch->cursor = cursor;
    const int32_t dots = rows * tokens;
#pragma GCC unroll 16
    for (int32_t first = 0; first < dots; first += 4) {
        vec four[4];
#pragma GCC unroll 4
        for (int32_t i = 0; i < 4; i++)
            four[i] = first + i < dots ? acc[(first + i) / rows][(first + i) % rows] : (vec){ 0 };
        const quad sums = vec_sums(four[0], four[1], four[2], four[3]);
        if (rows % 4 == 0) {
            memcpy(p + (t + first / rows) * PANEL + first % rows, &sums, sizeof sums);
            continue;
        }
#pragma GCC unroll 4
        for (int32_t i = 0; i < 4; i++)
            if (first + i < dots)
                p[(t + (first + i) / rows) * PANEL + (first + i) % rows] = sums[i];
    }
}

TILE_INLINE void dots_of(const int32_t rows, const ekv_dtype dtype, const float *q, const char *const *row, int32_t n,
                         int32_t head_dim, float *p, tile_fetch *fetch)
{
    int32_t t = 0;
    for (; t + TOKENS(rows) <= n; t += TOKENS(rows))
        dots_at(rows, TOKENS(rows), dtype, q, row, t, head_dim, p, fetch);
    for (; TOKENS(rows) > 2 && t + 2 <= n; t += 2)
        dots_at(rows, 2, dtype, q, row, t, head_dim, p, fetch);
    for (; t < n; t++)
        dots_at(rows, 1, dtype, q, row, t, head_dim, p, fetch);
}

/* ---- P.V --------------------------------------------------------------------------------------------- */

/* Tokens from one step of fetching to the next. */
enum { FETCH_TOKENS = 4 };

/* sum[r] += p[r] * v for `chunks` vectors from d on. */
TILE_INLINE void add_weighed(const int32_t rows, const int32_t chunks, const ekv_dtype dtype, const float *restrict p,
                             const char *row, int32_t d, vec sum[MOST_ROWS][CHUNKS(1)])
{
    vec v[CHUNKS(1)];
#pragma GCC unroll 16
    for (int32_t c = 0; c < chunks; c++)
        v[c] = read_elements(dtype, chunks == 1 ? IN_ORDER : c % 2 ? ODD : EVEN, row, d + c * LANES);
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; r++) {
        const vec weight = vec_splat(p[r]);
#pragma GCC unroll 16
        for (int32_t c = 0; c < chunks; c++)
            sum[r][c] = vec_fma(weight, v[c], sum[r][c]);
    }
}

/* acc[r] = acc[r] * alpha[r] + sum over n tokens of p[t][r] v[t], for `chunks` vectors from d on. */
TILE_INLINE void weigh_at(const int32_t rows, const int32_t chunks, const ekv_dtype dtype, const float *restrict p,
                          const char *const *row, int32_t n, int32_t d, int32_t head_dim, const float *restrict alpha,
                          float *restrict acc, tile_fetch *fetch)
{
    vec sum[MOST_ROWS][CHUNKS(1)];
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int32_t c = 0; c < chunks; c++)
            sum[r][c] = (vec){ 0 };
    tile_cursor cursor = fetch->cursor;
    int32_t t = 0;
    for (; t + FETCH_TOKENS <= n; t += FETCH_TOKENS) {
        tile_fetch_step(fetch, &cursor);
#pragma GCC unroll 4
        for (int32_t i = 0; i < FETCH_TOKENS; i++)
            add_weighed(rows, chunks, dtype, p + (t + i) * PANEL, row[t + i], d, sum);
    }
    for (; t < n; t++)
        add_weighed(rows, chunks, dtype, p + t * PANEL, row[t], d, sum);
    fetch->cursor = cursor;
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int32_t c = 0; c < chunks; c++) {
            float *out = acc + r * head_dim + d + c * LANES;
            vec_store(out, vec_fma(vec_load(out), vec_splat(alpha[r]), sum[r][c]));
        }
}

TILE_INLINE void weigh_of(const int32_t rows, const ekv_dtype dtype, const float *p, const char *const *row, int32_t n,
                          int32_t head_dim, const float *alpha, float *acc, tile_fetch *fetch)
{
    const int32_t step = CHUNKS(rows) * LANES;
    int32_t d = 0;
    for (; d + step <= head_dim; d += step)
        weigh_at(rows, CHUNKS(rows), dtype, p, row, n, d, head_dim, alpha, acc, fetch);
    for (; d + 2 * LANES <= head_dim; d += 2 * LANES)
        weigh_at(rows, 2, dtype, p, row, n, d, head_dim, alpha, acc, fetch);
    for (; d < head_dim; d += LANES)
        weigh_at(rows, 1, dtype, p, row, n, d, head_dim, alpha, acc, fetch);
}

/* ---- Passes ------------------------------------------------------------------------------------------ */

/* The instance of `function` for a number of rows and a dtype. */
#define FOR_DTYPE(function, rows, dtype, ...)                                   \
    switch (dtype) {                                                            \
    case EKV_DTYPE_F32: function##_of(rows, EKV_DTYPE_F32, __VA_ARGS__); break; \
    case EKV_DTYPE_F16: function##_of(rows, EKV_DTYPE_F16, __VA_ARGS__); break; \
    default: function##_of(rows, EKV_DTYPE_BF16, __VA_ARGS__); break;           \
    }
#define FOR_ROWS(function, rows, dtype, ...)               \
    if (MOST_ROWS == 8 && (rows) == 8)                     \
        FOR_DTYPE(function, MOST_ROWS, dtype, __VA_ARGS__) \
    else if ((rows) == 4)                                  \
        FOR_DTYPE(function, 4, dtype, __VA_ARGS__)         \
    else if ((rows) == 2)                                  \
        FOR_DTYPE(function, 2, dtype, __VA_ARGS__)         \
    else                                                   \
        FOR_DTYPE(function, 1, dtype, __VA_ARGS__)

/* Arguments as of dots_of and weigh_of. */
static void dots(int32_t rows, ekv_dtype dtype, const float *q, const char *const *row, int32_t n, int32_t head_dim,
                 float *p, tile_fetch *fetch)
{
    FOR_ROWS(dots, rows, dtype, q, row, n, head_dim, p, fetch)
}

static void weigh(int32_t rows, ekv_dtype dtype, const float *p, const char *const *row, int32_t n, int32_t head_dim,
                  const float *alpha, float *acc, tile_fetch *fetch)
{
    FOR_ROWS(weigh, rows, dtype, p, row, n, head_dim, alpha, acc, fetch)
}

/* Rows of the pass that begins at row r.  Passes do not cross panels. */
static int32_t pass_rows(int32_t rows, int32_t r)
{
    return rows - r >= MOST_ROWS ? MOST_ROWS : rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
}

static void run_unit(const ekv_cpu_tile *tile, void *own, int32_t head, const tile_rows *rows, tile_fetch *fetch)
{
    (void)own;
    const int32_t dim = tile->head_dim, n = rows->n;
    const float *q = (const float *)tile->q + (int64_t)head * tile->rows * dim;
    float *acc = tile->acc + head * tile->stride_acc;
    tile_state *states = tile_states(tile, head);
    for (int32_t r = 0, step; r < tile->rows; r += step) {
        float *p = tile->p + r / PANEL * PANEL * EKV_TILE_BLOCK + r % PANEL;
        step = pass_rows(tile->rows, r);
        dots(step, tile->kv_dtype, q + (int64_t)r * dim, rows->k, n, dim, p, fetch);
    }
    float alpha[PANEL];
    for (int32_t r = 0, step; r < tile->rows; r += step) {
        float *p = tile->p + r / PANEL * PANEL * EKV_TILE_BLOCK;
        step = pass_rows(tile->rows, r);
        if (r % PANEL == 0)
            to_weights(tile->scale, n, p, &states[r / PANEL], alpha);
        weigh(step, tile->kv_dtype, p + r % PANEL, rows->v, n, dim, alpha + r % PANEL, acc + (int64_t)r * dim, fetch);
    }
}

/* Steps of fetching in a unit of a whole block, or a few less. */
static int32_t steps_of(const ekv_cpu_tile *tile)
{
    int32_t steps = 0;
    for (int32_t r = 0, step; r < tile->rows; r += step) {
        step = pass_rows(tile->rows, r);
        steps += EKV_TILE_BLOCK / TOKENS(step) * (tile->head_dim / (2 * LANES));
        steps += EKV_TILE_BLOCK / FETCH_TOKENS * (tile->head_dim / (CHUNKS(step) * LANES));
    }
    return steps;
}

/* Rows of `count` times head_dim floats, in place: the order of bf16 pairs from that of head_dim, or back. */
static void change_order(float *rows, int64_t count, int32_t head_dim, bool back)
{
    for (int64_t i = 0; i < count; i++, rows += head_dim)
        for (int32_t d = 0; d + 2 * LANES <= head_dim; d += 2 * LANES) {
            vec first = vec_load(rows + d), second = vec_load(rows + d + LANES);
            if (back)
                vec_join(&first, &second);
            else
                vec_split(&first, &second);
            vec_store(rows + d, first);
            vec_store(rows + d + LANES, second);
        }
}

static void run_tile(const ekv_cpu_tile *tile)
{
    const bool pairs = tile->kv_dtype == EKV_DTYPE_BF16;
    if (pairs)
        change_order(tile->q, (int64_t)tile->heads * tile->rows, tile->head_dim, false);
    tile_for_units(tile, run_unit, NULL, steps_of(tile));
    tile_end(tile);
    for (int32_t h = 0; h < tile->heads && pairs; h++)
        change_order(tile->acc + h * tile->stride_acc, tile->rows, tile->head_dim, true);
}
