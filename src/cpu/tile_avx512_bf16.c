/* SPDX-License-Identifier: Apache-2.0
 * The tile kernel for x86-64 with AVX-512 BF16, for Q, K and V of bf16: both products are sums of two bf16 products,
 * added to fp32 (vdpbf16ps, which takes subnormal elements and sums as 0).  Weights are rounded to bf16 before P.V, as
 * on tensor cores; their sum is not.
 *
 * In P.V two tokens go together: the words of their rows of V are interleaved, which leaves 32 elements as two vectors
 * in another order.  acc keeps that order until the tile's end. */
#include "cpu/tile_avx512.h"

#include "cpu/tile_avx2.h" /* a panel is half of a vector */

#include "cpu/tile_softmax.h"

enum { STEP = 32 }; /* elements of a vector */

TILE_INLINE vec dot_pairs(vec sum, __m512i a, __m512i b)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* ---- Q.K --------------------------------------------------------------------------------------------- */

/* Rows and tokens that share registers: 16 accumulators. */
enum { DOT_ROWS = 4, DOT_TOKENS = 4 };

/* p[t][r] = q[r] . k[t] for tokens [t, t + tokens). */
TILE_INLINE void dots_at(const int32_t rows, const int32_t tokens, const uint16_t *restrict q, const char *const *row,
                         int32_t t, int32_t head_dim, float *restrict p, tile_fetch *fetch)
{
    vec acc[DOT_TOKENS][DOT_ROWS];
#pragma GCC unroll 4
    for (int32_t i = 0; i < tokens; i++)
#pragma GCC unroll 4
        for (int32_t r = 0; r < DOT_ROWS; r++)
            acc[i][r] = (vec){ 0 };
    tile_cursor cursor = fetch->cursor;
    for (int32_t d = 0; d < head_dim; d += STEP) {
        tile_fetch_step(fetch, &cursor);
        __m512i k[DOT_TOKENS];
#pragma GCC unroll 4
        for (int32_t i = 0; i < tokens; i++)
            k[i] = load_words((const uint16_t *)(const void *)row[t + i] + d);
#pragma GCC unroll 4
        for (int32_t r = 0; r < rows; r++) {
            const __m512i query = load_words(q + r * head_dim + d);
#pragma GCC unroll 4
            for (int32_t i = 0; i < tokens; i++)
                acc[i][r] = dot_pairs(acc[i][r], query, k[i]);
        }
    }
    fetch->cursor = cursor;
#pragma GCC unroll 4
    for (int32_t i = 0; i < tokens; i++) {
        const __m128 sums = vec_sums(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
        if (rows == DOT_ROWS)
            _mm_storeu_ps(p + (t + i) * PANEL, sums);
        else
            _mm_store_ss(p + (t + i) * PANEL, sums);
    }
}

TILE_INLINE void dots_of(const int32_t rows, const uint16_t *q, const char *const *row, int32_t n, int32_t head_dim,
                         float *p, tile_fetch *fetch)
{
    int32_t t = 0;
    for (; t + DOT_TOKENS <= n; t += DOT_TOKENS)
        dots_at(rows, DOT_TOKENS, q, row, t, head_dim, p, fetch);
    for (; t < n; t++)
        dots_at(rows, 1, q, row, t, head_dim, p, fetch);
}

/* ---- P.V --------------------------------------------------------------------------------------------- */

/* Weights of tokens 2i and 2i + 1 as pairs of bf16: pairs[i][r].  p: [n][PANEL]; behind the last token there is 0. */
static inline void round_weights(const float *p, int32_t n, int32_t *pairs)
{
    for (int32_t t = 0; t < n; t += 2) {
        const panel zero = { 0 };
        const __m128i even = (__m128i)_mm256_cvtneps_pbh(panel_load(p + t * PANEL));
        const __m128i odd = (__m128i)_mm256_cvtneps_pbh(t + 1 < n ? panel_load(p + (t + 1) * PANEL) : zero);
        __m128i *to = (__m128i *)(void *)(pairs + t / 2 * PANEL);
        _mm_storeu_si128(to, _mm_unpacklo_epi16(even, odd));
        _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(even, odd));
    }
}

/* acc[r] = acc[r] * alpha[r] + sum over n tokens of p[t][r] v[t], for `chunks` times STEP elements from d on. */
TILE_INLINE void weigh_at(const int32_t rows, const int32_t chunks, const int32_t *pairs, const char *const *row,
                          int32_t n, int32_t d, int32_t head_dim, const float *alpha, float *acc, tile_fetch *fetch)
{
    static const uint16_t zeros[4 * STEP]; /* the partner of the last token of an odd number */
    vec sum[8][8];
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int32_t c = 0; c < 2 * chunks; c++)
            sum[r][c] = (vec){ 0 };
    tile_cursor cursor = fetch->cursor;
    for (int32_t t = 0; t < n; t += 2) {
        tile_fetch_step(fetch, &cursor);
        const uint16_t *even = (const uint16_t *)(const void *)row[t] + d;
        const uint16_t *odd = t + 1 < n ? (const uint16_t *)(const void *)row[t + 1] + d : zeros;
        __m512i v[8];
#pragma GCC unroll 4
        for (int32_t c = 0; c < chunks; c++) {
            const __m512i a = load_words(even + c * STEP), b = load_words(odd + c * STEP);
            v[2 * c] = _mm512_unpacklo_epi16(a, b);
            v[2 * c + 1] = _mm512_unpackhi_epi16(a, b);
        }
#pragma GCC unroll 8
        for (int32_t r = 0; r < rows; r++) {
            const __m512i weights = _mm512_set1_epi32(pairs[t / 2 * PANEL + r]);
#pragma GCC unroll 8
            for (int32_t c = 0; c < 2 * chunks; c++)
                sum[r][c] = dot_pairs(sum[r][c], weights, v[c]);
        }
    }
    fetch->cursor = cursor;
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int32_t c = 0; c < 2 * chunks; c++) {
            float *out = acc + r * head_dim + d + c * LANES;
            _mm512_storeu_ps(out, vec_fma(_mm512_loadu_ps(out), _mm512_set1_ps(alpha[r]), sum[r][c]));
        }
}

TILE_INLINE void weigh_of(const int32_t rows, const int32_t chunks, const int32_t *pairs, const char *const *row,
                          int32_t n, int32_t head_dim, const float *alpha, float *acc, tile_fetch *fetch)
{
    int32_t d = 0;
    for (; d + chunks * STEP <= head_dim; d += chunks * STEP)
        weigh_at(rows, chunks, pairs, row, n, d, head_dim, alpha, acc, fetch);
    for (; d < head_dim; d += STEP)
        weigh_at(rows, 1, pairs, row, n, d, head_dim, alpha, acc, fetch);
}

/* ---- Tiles ------------------------------------------------------------------------------------------- */

/* Rows [0, rows) of a panel. */
static void weigh(int32_t rows, const int32_t *pairs, const char *const *row, int32_t n, int32_t head_dim,
                  const float *alpha, float *acc, tile_fetch *fetch)
{
    if (rows == 8) {
        weigh_of(8, 1, pairs, row, n, head_dim, alpha, acc, fetch);
        return;
    }
    int32_t r = 0;
    for (; r + 4 <= rows; r += 4)
        weigh_of(4, 2, pairs + r, row, n, head_dim, alpha + r, acc + r * head_dim, fetch);
    for (; r < rows; r++)
        weigh_of(1, 4, pairs + r, row, n, head_dim, alpha + r, acc + r * head_dim, fetch);
}

static void run_unit(const ekv_cpu_tile *tile, void *own, int32_t head, const tile_rows *rows, tile_fetch *fetch)
{
    (void)own;
    const int32_t dim = tile->head_dim, n = rows->n;
    const uint16_t *q = (const uint16_t *)tile->q + (int64_t)head * tile->rows * dim;
    float *acc = tile->acc + head * tile->stride_acc;
    tile_state *states = tile_states(tile, head);
    for (int32_t r = 0; r < tile->rows; r += PANEL) {
        const int32_t step = (int32_t)ekv_min(tile->rows - r, PANEL);
        float *p = tile->p + r * EKV_TILE_BLOCK, alpha[PANEL];
        int32_t pairs[EKV_TILE_BLOCK / 2 * PANEL];
        int32_t i = 0;
        for (; i + DOT_ROWS <= step; i += DOT_ROWS)
            dots_of(DOT_ROWS, q + (int64_t)(r + i) * dim, rows->k, n, dim, p + i, fetch);
        for (; i < step; i++)
            dots_of(1, q + (int64_t)(r + i) * dim, rows->k, n, dim, p + i, fetch);
        to_weights(tile->scale, n, p, &states[r / PANEL], alpha);
        round_weights(p, n, pairs);
        weigh(step, pairs, rows->v, n, dim, alpha, acc + (int64_t)r * dim, fetch);
    }
}

/* Steps of fetching in a unit of a whole block, or a few less. */
static int32_t steps_of(const ekv_cpu_tile *tile)
{
    const int32_t vectors = tile->head_dim / STEP;
    int32_t steps = 0;
    for (int32_t r = 0; r < tile->rows; r += PANEL) {
        const int32_t step = (int32_t)ekv_min(tile->rows - r, PANEL);
        steps += (step / 4 + step % 4) * EKV_TILE_BLOCK / DOT_TOKENS * vectors;
        steps += EKV_TILE_BLOCK / 2 * (step == PANEL ? vectors : step / 4 * (vectors / 2) + step % 4 * (vectors / 4));
    }
    return steps;
}

static void run_tile(const ekv_cpu_tile *tile)
{
    tile_for_units(tile, run_unit, NULL, steps_of(tile));
    tile_end(tile);
    put_tile_in_order(tile);
}

const ekv_cpu_kernel ekv_cpu_kernel_avx512_bf16 = {
    .name = "avx512-bf16",
    .id = EKV_KERNEL_AVX512_BF16,
    .head_dim_step = STEP,
    .q_dtype = EKV_DTYPE_BF16,
    .bf16_only = true,
    .p_dtype = EKV_DTYPE_BF16,
    .run = run_tile,
    .write = tile_write,
    .exp2 = panel_exp2_all,
};
