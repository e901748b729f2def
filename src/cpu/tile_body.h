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
 *     TOKENS(rows), CHUNKS(rows)                accumulators of `rows` query rows: for so many tokens in Q.K, for so
 *                                               many vectors of head_dim in P.V.  Enough of them hide the latency of
 *                                               an addition, few enough stay in registers.
 *
 * Query rows go through K and V in passes of 4, 2 or 1.  The first pass of 4 leaves 16-bit elements as floats in
 * tile->block, for the passes behind it: each is converted once for the group.
 * Two neighbours of bf16 make a 32-bit word, of which a shift and a mask leave two floats: no shuffle is needed if
 * floats are kept in that order, so with bf16 each 2 * LANES elements of q, block and acc have the even ones first.
 * A dot is a sum of LANES partial sums in the order of head_dim, an output a sum in the order of the tokens, whichever
 * rows and tokens share the registers. */
#include "cpu/tile_softmax.h"

typedef float quad __attribute__((vector_size(16)));

enum { MOST_ROWS = 4 }; /* of a pass */

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

/* What a pass reads: rows in the cache, in their dtype, or a block of floats. */
typedef enum source { FROM_F32, FROM_F16, FROM_BF16, FROM_BLOCK } source;

/* Which floats a vector from element d on has: LANES in their order, or for FROM_BF16 the two halves of a pair. */
typedef enum half { IN_ORDER, EVEN, ODD } half;

/* Token t; row: [tokens], block: [tokens][head_dim]. */
TILE_INLINE vec read_elements(const source from, const half which, const char *const *row, const float *block,
                              int32_t t, int32_t d, int32_t head_dim)
{
    if (from == FROM_BLOCK)
        return vec_load(block + t * head_dim + d);
    if (from == FROM_F32)
        return vec_load((const float *)(const void *)row[t] + d);
    const uint16_t *halves = (const uint16_t *)(const void *)row[t] + d;
    if (from == FROM_F16)
        return vec_from_f16(halves);
    return which == EVEN ? vec_from_even(halves) : which == ODD ? vec_from_odd(halves - LANES) : vec_from_bf16(halves);
}

/* Whether a pass leaves floats in the block. */
TILE_INLINE bool keeps(const int32_t rows, const source from)
{
    return rows == MOST_ROWS && (from == FROM_F16 || from == FROM_BF16);
}

/* ---- Q.K --------------------------------------------------------------------------------------------- */

/* acc[i][r] += q[r] * k[i] for LANES elements. */
TILE_INLINE void add_dots(const int32_t rows, const int32_t tokens, const source from, const half which,
                          const float *restrict q, const char *const *row, float *restrict block, int32_t d,
                          int32_t head_dim, vec acc[TOKENS(1)][MOST_ROWS])
{
    vec k[TOKENS(1)];
#pragma GCC unroll 16
    for (int32_t i = 0; i < tokens; i++) {
        k[i] = read_elements(from, which, row, block, i, d, head_dim);
        if (keeps(rows, from))
            vec_store(block + i * head_dim + d, k[i]);
    }
#pragma GCC unroll 4
    for (int32_t r = 0; r < rows; r++) {
        const vec query = vec_load(q + r * head_dim + d);
#pragma GCC unroll 16
        for (int32_t i = 0; i < tokens; i++)
            acc[i][r] = vec_fma(query, k[i], acc[i][r]);
    }
}

/* p[t][r] = q[r] . k[t] for tokens [t, t + tokens). */
TILE_INLINE void dots_at(const int32_t rows, const int32_t tokens, const source from, const float *restrict q,
                         const char *const *row, float *restrict block, int32_t t, int32_t head_dim, float *restrict p)
{
    vec acc[TOKENS(1)][MOST_ROWS];
#pragma GCC unroll 16
    for (int32_t i = 0; i < tokens; i++)
#pragma GCC unroll 4
        for (int32_t r = 0; r < rows; r++)
            acc[i][r] = (vec){ 0 };
    const char *near[TOKENS(1)]; /* rows of these tokens, where stores cannot change them */
#pragma GCC unroll 16
    for (int32_t i = 0; i < tokens; i++)
        near[i] = from == FROM_BLOCK ? NULL : row[t + i];
    block += t * head_dim;
    int32_t d = 0;
    for (; from == FROM_BF16 && d + 2 * LANES <= head_dim; d += 2 * LANES) {
        add_dots(rows, tokens, from, EVEN, q, near, block, d, head_dim, acc);
        add_dots(rows, tokens, from, ODD, q, near, block, d + LANES, head_dim, acc);
    }
    for (; d < head_dim; d += LANES)
        add_dots(rows, tokens, from, IN_ORDER, q, near, block, d, head_dim, acc);
    const int32_t dots = rows * tokens;
#pragma GCC unroll 16
    for (int32_t first = 0; first < dots; first += 4) {
        vec four[4];
#pragma GCC unroll 4
        for (int32_t i = 0; i < 4; i++)
            four[i] = first + i < dots ? acc[(first + i) / rows][(first + i) % rows] : (vec){ 0 };
        const quad sums = vec_sums(four[0], four[1], four[2], four[3]);
        if (rows == 4) {
            memcpy(p + (t + first / 4) * PANEL, &sums, sizeof sums);
            continue;
        }
#pragma GCC unroll 4
        for (int32_t i = 0; i < 4; i++)
            if (first + i < dots)
                p[(t + (first + i) / rows) * PANEL + (first + i) % rows] = sums[i];
    }
}

TILE_INLINE void dots_of(const int32_t rows, const source from, const float *q, const char *const *row, float *block,
                         int32_t n, int32_t head_dim, float *p, tile_fetch *fetch)
{
    int32_t t = 0;
    for (; t + TOKENS(rows) <= n; t += TOKENS(rows)) {
        tile_fetch_step(fetch);
        dots_at(rows, TOKENS(rows), from, q, row, block, t, head_dim, p);
    }
    for (; TOKENS(rows) > 2 && t + 2 <= n; t += 2)
        dots_at(rows, 2, from, q, row, block, t, head_dim, p);
    for (; t < n; t++)
        dots_at(rows, 1, from, q, row, block, t, head_dim, p);
}

/* ---- P.V --------------------------------------------------------------------------------------------- */

/* acc[r] = acc[r] * alpha[r] + sum over n tokens of p[t][r] v[t], for `chunks` vectors from d on. */
TILE_INLINE void weigh_at(const int32_t rows, const int32_t chunks, const source from, const float *restrict p,
                          const char *const *row, float *restrict block, int32_t n, int32_t d, int32_t head_dim,
                          const float *restrict alpha, float *restrict acc)
{
    vec sum[MOST_ROWS][CHUNKS(1)];
#pragma GCC unroll 4
    for (int32_t r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int32_t c = 0; c < chunks; c++)
            sum[r][c] = (vec){ 0 };
    for (int32_t t = 0; t < n; t++) {
        vec v[CHUNKS(1)];
#pragma GCC unroll 16
        for (int32_t c = 0; c < chunks; c++) {
            const half which = chunks == 1 ? IN_ORDER : c % 2 ? ODD : EVEN;
            v[c] = read_elements(from, which, row, block, t, d + c * LANES, head_dim);
            if (keeps(rows, from))
                vec_store(block + t * head_dim + d + c * LANES, v[c]);
        }
#pragma GCC unroll 4
        for (int32_t r = 0; r < rows; r++) {
            const vec weight = vec_splat(p[t * PANEL + r]);
#pragma GCC unroll 16
            for (int32_t c = 0; c < chunks; c++)
                sum[r][c] = vec_fma(weight, v[c], sum[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int32_t r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int32_t c = 0; c < chunks; c++) {
            float *out = acc + r * head_dim + d + c * LANES;
            vec_store(out, vec_fma(vec_load(out), vec_splat(alpha[r]), sum[r][c]));
        }
}

TILE_INLINE void weigh_of(const int32_t rows, const source from, const float *p, const char *const *row, float *block,
                          int32_t n, int32_t head_dim, const float *alpha, float *acc, tile_fetch *fetch)
{
    const int32_t step = CHUNKS(rows) * LANES;
    int32_t d = 0;
    for (; d + step <= head_dim; d += step) {
        tile_fetch_step(fetch);
        weigh_at(rows, CHUNKS(rows), from, p, row, block, n, d, head_dim, alpha, acc);
    }
    for (; d + 2 * LANES <= head_dim; d += 2 * LANES)
        weigh_at(rows, 2, from, p, row, block, n, d, head_dim, alpha, acc);
    for (; d < head_dim; d += LANES)
        weigh_at(rows, 1, from, p, row, block, n, d, head_dim, alpha, acc);
}

/* ---- Passes ------------------------------------------------------------------------------------------ */

/* The instance of `function` for a number of rows and a source. */
#define FOR_SOURCE(function, rows, from, ...)                             \
    switch (from) {                                                       \
    case FROM_F32: function##_of(rows, FROM_F32, __VA_ARGS__); break;     \
    case FROM_F16: function##_of(rows, FROM_F16, __VA_ARGS__); break;     \
    case FROM_BF16: function##_of(rows, FROM_BF16, __VA_ARGS__); break;   \
    case FROM_BLOCK: function##_of(rows, FROM_BLOCK, __VA_ARGS__); break; \
    }
#define FOR_ROWS(function, rows, from, ...)        \
    if ((rows) == 4)                               \
        FOR_SOURCE(function, 4, from, __VA_ARGS__) \
    else if ((rows) == 2)                          \
        FOR_SOURCE(function, 2, from, __VA_ARGS__) \
    else                                           \
        FOR_SOURCE(function, 1, from, __VA_ARGS__)

/* Arguments as of dots_of and weigh_of. */
static void dots(int32_t rows, source from, const float *q, const char *const *row, float *block, int32_t n,
                 int32_t head_dim, float *p, tile_fetch *fetch)
{
    FOR_ROWS(dots, rows, from, q, row, block, n, head_dim, p, fetch)
}

static void weigh(int32_t rows, source from, const float *p, const char *const *row, float *block, int32_t n,
                  int32_t head_dim, const float *alpha, float *acc, tile_fetch *fetch)
{
    FOR_ROWS(weigh, rows, from, p, row, block, n, head_dim, alpha, acc, fetch)
}

/* Rows of the pass that begins at row r.  Passes do not cross panels. */
static int32_t pass_rows(int32_t rows, int32_t r)
{
    return rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
}

static source first_source(ekv_dtype dtype)
{
    return dtype == EKV_DTYPE_F32 ? FROM_F32 : dtype == EKV_DTYPE_F16 ? FROM_F16 : FROM_BF16;
}

static void run_unit(const ekv_cpu_tile *tile, int32_t head, const tile_rows *rows, tile_fetch *fetch)
{
    const int32_t dim = tile->head_dim, n = rows->n;
    const float *q = (const float *)tile->q + (int64_t)head * tile->rows * dim;
    float *acc = tile->acc + head * tile->stride_acc;
    tile_state *states = tile_states(tile, head);
    source from = first_source(tile->kv_dtype);
    for (int32_t r = 0, step; r < tile->rows; r += step) {
        float *p = tile->p + r / PANEL * PANEL * EKV_TILE_BLOCK + r % PANEL;
        step = pass_rows(tile->rows, r);
        dots(step, from, q + (int64_t)r * dim, rows->k, tile->block, n, dim, p, fetch);
        from = keeps(step, from) ? FROM_BLOCK : from;
    }
    from = first_source(tile->kv_dtype);
    float alpha[PANEL];
    for (int32_t r = 0, step; r < tile->rows; r += step) {
        float *p = tile->p + r / PANEL * PANEL * EKV_TILE_BLOCK;
        step = pass_rows(tile->rows, r);
        if (r % PANEL == 0)
            to_weights(tile->scale, n, p, &states[r / PANEL], alpha);
        weigh(step, from, p + r % PANEL, rows->v, tile->block, n, dim, alpha + r % PANEL, acc + (int64_t)r * dim,
              fetch);
        from = keeps(step, from) ? FROM_BLOCK : from;
    }
}

/* Steps of fetching in a unit, of whole blocks. */
static int32_t steps_of(const ekv_cpu_tile *tile)
{
    int32_t steps = 0;
    for (int32_t r = 0, step; r < tile->rows; r += step) {
        step = pass_rows(tile->rows, r);
        steps += EKV_TILE_BLOCK / TOKENS(step) + tile->head_dim / (CHUNKS(step) * LANES);
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
    tile_for_units(tile, run_unit, steps_of(tile));
    for (int32_t h = 0; h < tile->heads && pairs; h++)
        change_order(tile->acc + h * tile->stride_acc, tile->rows, tile->head_dim, true);
}
