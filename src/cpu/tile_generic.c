/* SPDX-License-Identifier: Apache-2.0
 * The portable tile kernel.  Its inner loops run over LANES neighbouring elements of head_dim, each with its own
 * accumulator, in the vector type that GCC and Clang map to any machine's registers: the order of every sum is
 * written here and no compiler option changes it. */
#include "cpu/convert.h"
#include "cpu/expf.h"
#include "cpu/tile_kernel.h"

#include <math.h>

typedef float quad __attribute__((vector_size(16)));

enum {
    QUADS = 2, /* quads of an accumulator */
    LANES = 4 * QUADS,
    ROWS = 4 /* query rows that share a load of K or V; 4 x 2 accumulators fill half of 16 vector registers */
};

static inline quad load_quad(const float *from)
{
    quad value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* Tokens [first, first + n) of K or V as floats, [n][head_dim] in tile->block. */
static void load_block(const ekv_cpu_tile *tile, const void *base, int64_t stride_page, int64_t stride_token,
                       int32_t first, int32_t n)
{
    int32_t page = first / tile->page_size, offset = first % tile->page_size;
    for (int32_t t = 0; t < n; t++) {
        const int64_t at = tile->pages[page] * stride_page + offset * stride_token;
        ekv_row_to_f32(ekv_element(base, tile->kv_dtype, at), tile->kv_dtype, tile->head_dim,
                       tile->block + (int64_t)t * tile->head_dim);
        if (++offset == tile->page_size) {
            offset = 0;
            page++;
        }
    }
}

/* p[r][t] = q[r] . k[t] for `rows` rows and n tokens; rows is a constant where this is inlined. */
static inline void dots(const int32_t rows, const float *restrict q, const float *restrict k, int32_t n,
                        int32_t head_dim, float *restrict p)
{
    for (int32_t t = 0; t < n; t++, k += head_dim) {
        quad acc[ROWS][QUADS] = { { { 0 } } };
        for (int32_t d = 0; d < head_dim; d += LANES)
            for (int32_t r = 0; r < rows; r++)
                for (int32_t i = 0; i < QUADS; i++)
                    acc[r][i] += load_quad(q + r * head_dim + d + 4 * i) * load_quad(k + d + 4 * i);
        for (int32_t r = 0; r < rows; r++) {
            const quad sum = acc[r][0] + acc[r][1];
            p[r * EKV_TILE_BLOCK + t] = (sum[0] + sum[2]) + (sum[1] + sum[3]);
        }
    }
}

/* acc[r] = acc[r] * alpha[r] + sum over n tokens of p[r][t] v[t]. */
static inline void weigh(const int32_t rows, const float *restrict p, const float *restrict v, int32_t n,
                         int32_t head_dim, const float *restrict alpha, float *restrict acc)
{
    for (int32_t d = 0; d < head_dim; d += LANES) {
        quad sum[ROWS][QUADS] = { { { 0 } } };
        for (int32_t t = 0; t < n; t++)
            for (int32_t r = 0; r < rows; r++)
                for (int32_t i = 0; i < QUADS; i++)
                    sum[r][i] += p[r * EKV_TILE_BLOCK + t] * load_quad(v + t * head_dim + d + 4 * i);
        for (int32_t r = 0; r < rows; r++)
            for (int32_t i = 0; i < QUADS; i++) {
                float *out = acc + r * head_dim + d + 4 * i;
                const quad value = load_quad(out) * alpha[r] + sum[r][i];
                memcpy(out, &value, sizeof value);
            }
    }
}

/* Turns the dots of a row into weights against the new maximum; returns what old sums are to be scaled by. */
static float rescale(float scale, float *restrict p, int32_t n, float *max, float *sum)
{
    float largest = *max;
    for (int32_t t = 0; t < n; t++)
        largest = p[t] > largest ? p[t] : largest;
    const float from = largest == -INFINITY ? 0 : largest; /* -inf - -inf is NaN; so these weights are 0 */
    for (int32_t t = 0; t < n; t++)
        p[t] = ekv_exp_nonpositive((p[t] - from) * scale);
    float total = 0;
    for (int32_t t = 0; t < n; t++)
        total += p[t];
    const float alpha = ekv_exp_nonpositive((*max - from) * scale);
    *max = largest;
    *sum = *sum * alpha + total;
    return alpha;
}

/* The tokens of one block, first those of K, then those of V through the same buffer. */
static void run_block(const ekv_cpu_tile *tile, int32_t first, int32_t n)
{
    const int32_t dim = tile->head_dim;
    load_block(tile, tile->k, tile->k_stride_page, tile->k_stride_token, first, n);
    int32_t r = 0;
    for (; r + ROWS <= tile->rows; r += ROWS)
        dots(ROWS, tile->q + (int64_t)r * dim, tile->block, n, dim, tile->p + (int64_t)r * EKV_TILE_BLOCK);
    for (; r < tile->rows; r++)
        dots(1, tile->q + (int64_t)r * dim, tile->block, n, dim, tile->p + (int64_t)r * EKV_TILE_BLOCK);

    load_block(tile, tile->v, tile->v_stride_page, tile->v_stride_token, first, n);
    for (r = 0; r < tile->rows;) {
        const int32_t step = r + ROWS <= tile->rows ? ROWS : 1;
        float *p = tile->p + (int64_t)r * EKV_TILE_BLOCK, *acc = tile->acc + (int64_t)r * dim;
        float alpha[ROWS];
        for (int32_t i = 0; i < step; i++)
            alpha[i] = rescale(tile->scale, p + i * EKV_TILE_BLOCK, n, &tile->max[r + i], &tile->sum[r + i]);
        if (step == ROWS)
            weigh(ROWS, p, tile->block, n, dim, alpha, acc);
        else
            weigh(1, p, tile->block, n, dim, alpha, acc);
        r += step;
    }
}

void ekv_tile_kernel_generic(const ekv_cpu_tile *tile)
{
    for (int32_t r = 0; r < tile->rows; r++) {
        tile->max[r] = -INFINITY;
        tile->sum[r] = 0;
    }
    memset(tile->acc, 0, (size_t)tile->rows * (size_t)tile->head_dim * sizeof *tile->acc);
    for (int32_t first = tile->kv_begin, n; first < tile->kv_end; first += n) {
        n = tile->kv_end - first < EKV_TILE_BLOCK ? tile->kv_end - first : EKV_TILE_BLOCK;
        run_block(tile, first, n);
    }
}
