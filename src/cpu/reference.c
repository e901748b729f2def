/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu/reference.h"

#include "base/arena.h"
#include "base/portable.h"
#include "base/status.h"
#include "cpu/convert.h"
#include "plan/tensors.h"

#include <math.h>
#include <stdatomic.h>

enum { LANES = 4 }; /* head_dim is a multiple of 8 */

typedef struct reference_run {
    ekv_reference *reference;
    const ekv_tensors *tensors; /* resolved */
    float *rows;                /* [threads][2][head_dim] */
    double *weights;            /* [threads][longest kv_len] */
    int64_t longest;
    _Atomic int64_t next;
} reference_run;

/* Offset of a token of a request in K or V. */
static int64_t token_offset(const ekv_batch *batch, const int32_t *pages, int64_t token, int64_t stride_page,
                            int64_t stride_token)
{
    return pages[token / batch->page_size] * stride_page + token % batch->page_size * stride_token;
}

/* Sums of q_d k_d and of |q_d k_d|, in LANES interleaved parts, which is quicker than one after the other. */
static double dot(const float *restrict q, const float *restrict k, int32_t head_dim, double *magnitude)
{
    double sum[LANES] = { 0 }, absolute[LANES] = { 0 };
    for (int32_t d = 0; d < head_dim; d += LANES)
        for (int32_t i = 0; i < LANES; i++) {
            const double product = (double)q[d + i] * k[d + i];
            sum[i] += product;
            absolute[i] += fabs(product);
        }
    *magnitude = absolute[0] + absolute[1] + absolute[2] + absolute[3];
    return sum[0] + sum[1] + sum[2] + sum[3];
}

/* Fills weights with the logit of each token. */
static void logits(const ekv_batch *batch, const ekv_tensors *t, int32_t request, int32_t q_head, float *row,
                   float *query, double *weights, ekv_row_scale *scale)
{
    const int32_t *pages = ekv_tensors_pages(t, request);
    const int64_t head = (int64_t)(q_head / (batch->q_heads / batch->kv_heads)) * t->k_stride_head;
    double magnitude;
    ekv_row_to_f32(ekv_element(t->q, batch->q_dtype, request * t->q_stride_request + q_head * t->q_stride_head),
                   batch->q_dtype, batch->head_dim, query);
    for (int64_t token = 0; token < batch->kv_len[request]; token++) {
        const int64_t offset = head + token_offset(batch, pages, token, t->k_stride_page, t->k_stride_token);
        ekv_row_to_f32(ekv_element(t->k, batch->kv_dtype, offset), batch->kv_dtype, batch->head_dim, row);
        weights[token] = t->sm_scale * dot(query, row, batch->head_dim, &magnitude);
        scale->logit = fmax(scale->logit, fabs((double)t->sm_scale) * magnitude);
    }
}

/* Logits to softmax weights; returns the LSE. */
static double softmax(double *weights, int64_t n, ekv_row_scale *scale)
{
    double largest = -INFINITY, sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++)
        largest = fmax(largest, weights[i]);
    for (int64_t i = 0; i < n; i++) {
        weights[i] = exp(weights[i] - largest);
        sum += weights[i];
    }
    for (int64_t i = 0; i < n; i++) {
        weights[i] /= sum;
        squares += weights[i] * weights[i];
    }
    scale->p_norm = sqrt(squares);
    return n ? largest + log(sum) : -INFINITY;
}

/* o = sum of w_t v_t. */
static void weigh_values(const ekv_batch *batch, const ekv_tensors *t, int32_t request, int32_t q_head,
                         float *restrict row, float *restrict magnitude, const double *weights, double *restrict o,
                         ekv_row_scale *scale)
{
    const int32_t *pages = ekv_tensors_pages(t, request), dim = batch->head_dim;
    const int64_t head = (int64_t)(q_head / (batch->q_heads / batch->kv_heads)) * t->v_stride_head;
    for (int32_t d = 0; d < dim; d++)
        o[d] = magnitude[d] = 0;
    for (int64_t token = 0; token < batch->kv_len[request]; token++) {
        const int64_t offset = head + token_offset(batch, pages, token, t->v_stride_page, t->v_stride_token);
        const double weight = weights[token];
        ekv_row_to_f32(ekv_element(t->v, batch->kv_dtype, offset), batch->kv_dtype, dim, row);
        for (int32_t d = 0; d < dim; d++)
            o[d] += weight * row[d];
        for (int32_t d = 0; d < dim; d++)
            magnitude[d] += (float)weight * fabsf(row[d]);
    }
    for (int32_t d = 0; d < dim; d++)
        scale->value = fmax(scale->value, magnitude[d]);
}

static void work(void *argument, int32_t thread)
{
    reference_run *run = argument;
    const ekv_batch *batch = &run->reference->batch;
    const int64_t num_rows = (int64_t)batch->batch_size * batch->q_heads;
    float *row = run->rows + 2 * (int64_t)thread * batch->head_dim, *other = row + batch->head_dim;
    double *weights = run->weights + thread * run->longest;
    for (int64_t i; (i = atomic_fetch_add(&run->next, 1)) < num_rows;) {
        const int32_t request = (int32_t)(i / batch->q_heads), q_head = (int32_t)(i % batch->q_heads);
        ekv_row_scale *scale = &run->reference->scale[i];
        *scale = (ekv_row_scale){ 0, 0, 0 };
        logits(batch, run->tensors, request, q_head, row, other, weights, scale);
        run->reference->lse[i] = softmax(weights, batch->kv_len[request], scale);
        weigh_values(batch, run->tensors, request, q_head, row, other, weights, run->reference->o + i * batch->head_dim,
                     scale);
    }
}

/* The reference and the run's buffers in one block; with a NULL base it only counts. */
static ekv_reference *lay_out(ekv_arena *arena, const ekv_batch *batch, int64_t threads, reference_run *run)
{
    const size_t rows = (size_t)batch->batch_size * (size_t)batch->q_heads;
    ekv_reference *reference = ekv_arena_take(arena, sizeof *reference);
    double *o = ekv_arena_take(arena, rows * (size_t)batch->head_dim * sizeof *o);
    double *lse = ekv_arena_take(arena, rows * sizeof *lse);
    ekv_row_scale *scale = ekv_arena_take(arena, rows * sizeof *scale);
    run->rows = ekv_arena_take(arena, 2 * (size_t)threads * (size_t)batch->head_dim * sizeof *run->rows);
    run->weights = ekv_arena_take(arena, (size_t)(threads * run->longest) * sizeof *run->weights);
    if (reference)
        *reference = (ekv_reference){ .batch = *batch, .o = o, .lse = lse, .scale = scale };
    return reference;
}

ekv_status ekv_reference_create(ekv_context *context, const ekv_batch *batch, const ekv_tensors *tensors,
                                ekv_reference **reference)
{
    ekv_tensors resolved = *tensors;
    ekv_tensors_set_defaults(batch, &resolved);
    reference_run run = { .tensors = &resolved };
    for (int32_t b = 0; b < batch->batch_size; b++)
        run.longest = ekv_max(run.longest, batch->kv_len[b]);
    const int32_t threads = ekv_pool_num_threads(context->pool);
    ekv_arena arena = { NULL, 0 };
    lay_out(&arena, batch, threads, &run);
    void *memory = ekv_alloc(context, arena.used);
    if (!memory)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a reference of %zu bytes", arena.used);
    arena = (ekv_arena){ memory, 0 };
    run.reference = lay_out(&arena, batch, threads, &run);
    run.reference->context = context;
    ekv_pool_run(context->pool, work, &run);
    *reference = run.reference;
    return EKV_OK;
}

void ekv_reference_free(ekv_reference *reference)
{
    if (reference)
        ekv_release(reference->context, reference); /* the block begins with it */
}
