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

/* One thread's buffers: a token's K or V is converted once for the query heads of a group. */
typedef struct buffers {
    float *row;        /* [head_dim], a row as read */
    double *token;     /* [head_dim], K or V of one token */
    double *absolute;  /* [head_dim], |V| of one token */
    double *queries;   /* [group][head_dim] */
    double *magnitude; /* [group][head_dim], sums of w |v| */
    double *weights;   /* [group][longest kv_len] */
} buffers;

typedef struct reference_run {
    ekv_reference *reference;
    const ekv_tensors *tensors; /* resolved */
    int32_t group;
    int64_t longest;
    unsigned char *own; /* [threads][own_size], what lay_out_buffers makes buffers of */
    size_t own_size;
    _Atomic int64_t next;
} reference_run;

/* The output rows of one request and KV head. */
typedef struct rows {
    const ekv_batch *batch;
    const ekv_tensors *tensors;
    const int32_t *pages;
    int32_t request, kv_head, group;
    int64_t kv_len;
    int64_t longest; /* stride of the weights of a query head */
    double *o;       /* [group][head_dim] */
    double *lse;     /* [group] */
    ekv_row_scale *scale;
} rows;

static void load_row(const void *base, ekv_dtype dtype, int64_t offset, int32_t head_dim, float *row,
                     double *restrict out)
{
    ekv_row_to_f32(ekv_element(base, dtype, offset), dtype, head_dim, row);
    for (int32_t d = 0; d < head_dim; d++)
        out[d] = row[d];
}

/* Offset of a token of the request in K or V. */
static int64_t token_offset(const rows *r, int64_t token, int64_t stride_page, int64_t stride_token,
                            int64_t stride_head)
{
    const int32_t page_size = r->batch->page_size;
    return r->pages[token / page_size] * stride_page + token % page_size * stride_token + r->kv_head * stride_head;
}

/* Sums of q_d k_d and of |q_d k_d|, in LANES interleaved parts, which is quicker than one after the other. */
static double dot(const double *restrict q, const double *restrict k, int32_t head_dim, double *magnitude)
{
    double sum[LANES] = { 0 }, absolute[LANES] = { 0 };
    for (int32_t d = 0; d < head_dim; d += LANES)
        for (int32_t i = 0; i < LANES; i++) {
            sum[i] += q[d + i] * k[d + i];
            absolute[i] += fabs(q[d + i] * k[d + i]);
        }
    *magnitude = absolute[0] + absolute[1] + absolute[2] + absolute[3];
    return sum[0] + sum[1] + sum[2] + sum[3];
}

/* Fills the weights with the logit of each token. */
static void logits(const rows *r, const buffers *own)
{
    const ekv_tensors *t = r->tensors;
    const int32_t dim = r->batch->head_dim;
    for (int32_t g = 0; g < r->group; g++) {
        const int64_t q_head = (int64_t)r->kv_head * r->group + g;
        load_row(t->q, r->batch->q_dtype, r->request * t->q_stride_request + q_head * t->q_stride_head, dim, own->row,
                 own->queries + g * dim);
    }
    for (int64_t token = 0; token < r->kv_len; token++) {
        load_row(t->k, r->batch->kv_dtype,
                 token_offset(r, token, t->k_stride_page, t->k_stride_token, t->k_stride_head), dim, own->row,
                 own->token);
        for (int32_t g = 0; g < r->group; g++) {
            double magnitude;
            own->weights[g * r->longest + token] =
                t->sm_scale * dot(own->queries + g * dim, own->token, dim, &magnitude);
            r->scale[g].logit = fmax(r->scale[g].logit, fabs((double)t->sm_scale) * magnitude);
        }
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

/* out += weight * values */
static void add_scaled(double *restrict out, double weight, const double *restrict values, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        out[i] += weight * values[i];
}

/* o = sum of w_t v_t. */
static void weigh_values(const rows *r, const buffers *own)
{
    const ekv_tensors *t = r->tensors;
    const int32_t dim = r->batch->head_dim;
    for (int32_t i = 0; i < r->group * dim; i++)
        r->o[i] = own->magnitude[i] = 0;
    for (int64_t token = 0; token < r->kv_len; token++) {
        load_row(t->v, r->batch->kv_dtype,
                 token_offset(r, token, t->v_stride_page, t->v_stride_token, t->v_stride_head), dim, own->row,
                 own->token);
        for (int32_t d = 0; d < dim; d++)
            own->absolute[d] = fabs(own->token[d]);
        for (int32_t g = 0; g < r->group; g++) {
            const double weight = own->weights[g * r->longest + token];
            add_scaled(r->o + g * dim, weight, own->token, dim);
            add_scaled(own->magnitude + g * dim, weight, own->absolute, dim);
        }
    }
    for (int32_t i = 0; i < r->group * dim; i++)
        r->scale[i / dim].value = fmax(r->scale[i / dim].value, own->magnitude[i]);
}

static buffers lay_out_buffers(ekv_arena *arena, const ekv_batch *batch, int32_t group, int64_t longest)
{
    const size_t dim = (size_t)batch->head_dim, heads = (size_t)group;
    return (buffers){ .row = ekv_arena_take(arena, dim * sizeof(float)),
                      .token = ekv_arena_take(arena, dim * sizeof(double)),
                      .absolute = ekv_arena_take(arena, dim * sizeof(double)),
                      .queries = ekv_arena_take(arena, heads * dim * sizeof(double)),
                      .magnitude = ekv_arena_take(arena, heads * dim * sizeof(double)),
                      .weights = ekv_arena_take(arena, heads * (size_t)longest * sizeof(double)) };
}

/* Threads take (request, KV head) pairs. */
static void work(void *argument, int32_t thread)
{
    reference_run *run = argument;
    const ekv_reference *reference = run->reference;
    const ekv_batch *batch = &reference->batch;
    ekv_arena arena = ekv_arena_over(run->own + (size_t)thread * run->own_size);
    const buffers own = lay_out_buffers(&arena, batch, run->group, run->longest);
    for (int64_t i; (i = atomic_fetch_add(&run->next, 1)) < (int64_t)batch->batch_size * batch->kv_heads;) {
        const int32_t request = (int32_t)(i / batch->kv_heads);
        const int32_t *pages = ekv_tensors_pages(run->tensors, request);
        const rows r = { .batch = batch,
                         .tensors = run->tensors,
                         .pages = pages,
                         .request = request,
                         .kv_head = (int32_t)(i % batch->kv_heads),
                         .group = run->group,
                         .kv_len = pages ? batch->kv_len[request] : 0, /* no table: a batch without tokens */
                         .longest = run->longest,
                         .o = reference->o + i * run->group * batch->head_dim,
                         .lse = reference->lse + i * run->group,
                         .scale = reference->scale + i * run->group };
        for (int32_t g = 0; g < r.group; g++)
            r.scale[g] = (ekv_row_scale){ 0, 0, 0 };
        logits(&r, &own);
        for (int32_t g = 0; g < r.group; g++)
            r.lse[g] = softmax(own.weights + g * r.longest, r.kv_len, &r.scale[g]);
        weigh_values(&r, &own);
    }
}

/* The reference and the run's buffers in one block, the reference first; with a NULL base it only counts. */
static void lay_out(ekv_arena *arena, int32_t threads, reference_run *run, ekv_reference *reference)
{
    const ekv_batch *batch = &reference->batch;
    const size_t num_rows = (size_t)batch->batch_size * (size_t)batch->q_heads;
    ekv_arena own = { NULL, 0 };
    lay_out_buffers(&own, batch, run->group, run->longest);
    run->own_size = (own.used + EKV_ARENA_ALIGN - 1) / EKV_ARENA_ALIGN * EKV_ARENA_ALIGN;
    ekv_arena_take(arena, sizeof *reference);
    reference->o = ekv_arena_take(arena, num_rows * (size_t)batch->head_dim * sizeof *reference->o);
    reference->lse = ekv_arena_take(arena, num_rows * sizeof *reference->lse);
    reference->scale = ekv_arena_take(arena, num_rows * sizeof *reference->scale);
    run->own = ekv_arena_take(arena, (size_t)threads * run->own_size);
}

ekv_status ekv_reference_create(ekv_context *context, const ekv_batch *batch, const ekv_tensors *tensors,
                                ekv_reference **reference)
{
    ekv_tensors resolved = *tensors;
    ekv_tensors_set_defaults(batch, &resolved);
    ekv_reference draft = { .context = context, .batch = *batch };
    reference_run run = { .tensors = &resolved, .group = batch->q_heads / batch->kv_heads };
    for (int32_t b = 0; b < batch->batch_size; b++)
        run.longest = ekv_max(run.longest, batch->kv_len[b]);
    const int32_t threads = ekv_pool_num_threads(context->pool);
    ekv_arena arena = { NULL, 0 };
    lay_out(&arena, threads, &run, &draft);
    void *memory = ekv_alloc(context, arena.used);
    if (!memory)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a reference of %zu bytes", arena.used);
    arena = ekv_arena_over(memory);
    lay_out(&arena, threads, &run, &draft);
    run.reference = memory;
    *run.reference = draft;
    ekv_pool_run(context->pool, work, &run);
    *reference = run.reference;
    return EKV_OK;
}

void ekv_reference_free(ekv_reference *reference)
{
    if (reference)
        ekv_release(reference->context, reference); /* the block begins with it */
}
