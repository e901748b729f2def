/* SPDX-License-Identifier: Apache-2.0
 * Two passes on the thread pool.  The first runs the plan's tiles as its dispatch says: a tile writes its output
 * or a partial result.  The second merges partial results, each output by one thread in split order.  What a
 * tile or a merge computes does not depend on who runs it, so outputs have the same bits for any number of
 * threads. */
#include "cpu/cpu_backend.h"

#include "base/arena.h"
#include "base/status.h"
#include "cpu/convert.h"
#include "cpu/expf.h"
#include "cpu/tile_kernel.h"
#include "plan/tensors.h"

#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum { MIN_HEAD_DIM = 32, MAX_HEAD_DIM = 256, HEAD_DIM_STEP = 8 };

/* One thread's own memory. */
typedef struct scratch {
    float *q;       /* [slot_rows][head_dim] */
    float *block;   /* [EKV_TILE_BLOCK][head_dim] */
    float *p;       /* [slot_rows][EKV_TILE_BLOCK] */
    float *acc;     /* [slot_rows][head_dim] */
    float *max_sum; /* [2][slot_rows] */
} scratch;

/* The workspace.  Partial results are those of ekv_cpu_tile: not normalised, with maximum and sum. */
typedef struct workspace {
    float *acc;         /* [slots][slot_rows][head_dim] */
    float *max;         /* [slots][slot_rows] */
    float *sum;         /* [slots][slot_rows] */
    unsigned char *own; /* [threads][own_size], what lay_out_scratch makes a scratch of */
    size_t own_size;
} workspace;

typedef struct decode_run {
    const ekv_plan *plan;
    const ekv_tensors *tensors;
    workspace workspace;
    int32_t slot_rows;
    float scale;     /* |sm_scale| */
    float q_sign;    /* of sm_scale; goes into Q, so that the largest dot is the largest logit */
    double lse_unit; /* 1, or log2(e) for an LSE of base 2 */
    ekv_cpu_tile_kernel *kernel;
    _Atomic int64_t next_tile;   /* tile or, for range, CTA */
    _Atomic int64_t next_output; /* unit of the second pass */
} decode_run;

/* ---- Workspace --------------------------------------------------------------------------------------- */

static scratch lay_out_scratch(ekv_arena *arena, const ekv_plan *plan)
{
    const size_t rows = (size_t)ekv_plan_slot_rows(plan), dim = (size_t)plan->batch.head_dim;
    return (scratch){ .q = ekv_arena_take(arena, rows * dim * sizeof(float)),
                      .block = ekv_arena_take(arena, EKV_TILE_BLOCK * dim * sizeof(float)),
                      .p = ekv_arena_take(arena, rows * EKV_TILE_BLOCK * sizeof(float)),
                      .acc = ekv_arena_take(arena, rows * dim * sizeof(float)),
                      .max_sum = ekv_arena_take(arena, 2 * rows * sizeof(float)) };
}

/* With a NULL base it only counts. */
static workspace lay_out(ekv_arena *arena, const ekv_plan *plan)
{
    const size_t rows = (size_t)plan->capacity.slots * (size_t)ekv_plan_slot_rows(plan);
    ekv_arena own = { NULL, 0 };
    lay_out_scratch(&own, plan);
    own.used = (own.used + EKV_ARENA_ALIGN - 1) / EKV_ARENA_ALIGN * EKV_ARENA_ALIGN;
    const size_t threads = (size_t)ekv_pool_num_threads(plan->context->pool);
    return (workspace){ .acc = ekv_arena_take(arena, rows * (size_t)plan->batch.head_dim * sizeof(float)),
                        .max = ekv_arena_take(arena, rows * sizeof(float)),
                        .sum = ekv_arena_take(arena, rows * sizeof(float)),
                        .own = ekv_arena_take(arena, threads * own.used),
                        .own_size = own.used };
}

static ekv_status cpu_workspace_size(const ekv_plan *plan, size_t *size)
{
    int64_t floats;
    if (__builtin_mul_overflow(plan->capacity.slots, (int64_t)ekv_plan_slot_rows(plan), &floats) ||
        __builtin_mul_overflow(floats, (int64_t)plan->batch.head_dim + 2, &floats) || floats > INT64_MAX / 16)
        return ekv_fail(EKV_ERROR_OVERFLOW, "%" PRId64 " partial results of %d rows of %d floats are too large",
                        plan->capacity.slots, ekv_plan_slot_rows(plan), plan->batch.head_dim);
    ekv_arena arena = { NULL, 0 };
    lay_out(&arena, plan);
    *size = arena.used;
    return EKV_OK;
}

/* ---- Outputs ----------------------------------------------------------------------------------------- */

/* Normalises acc (in place) and writes row `q_head` of O and LSE.  sum 0: no tokens. */
static void write_row(const decode_run *run, int32_t request, int32_t q_head, float *acc, float max, float sum)
{
    const ekv_batch *batch = &run->plan->batch;
    const ekv_tensors *t = run->tensors;
    const float inverse = sum == 0 ? 0 : 1 / sum;
    for (int32_t d = 0; d < batch->head_dim; d++)
        acc[d] *= inverse;
    const int64_t at = request * t->o_stride_request + q_head * t->o_stride_head;
    ekv_row_from_f32(acc, batch->head_dim, batch->q_dtype, ekv_element_mutable(t->o, batch->q_dtype, at));
    if (t->lse) {
        const double lse = ((double)max * run->scale + log((double)sum)) * run->lse_unit;
        t->lse[request * t->lse_stride_request + q_head * t->lse_stride_head] = sum == 0 ? -INFINITY : (float)lse;
    }
}

/* Rows of a head that fall into m_block. */
static int32_t rows_of(const ekv_plan *plan, int32_t m_block)
{
    return (int32_t)ekv_min(plan->block_m, plan->rows - m_block * plan->block_m);
}

/* Query head of a row; decode has one query token, so rows are the query heads of a group. */
static int32_t q_head_of(const ekv_plan *plan, int32_t head, int32_t m_block, int32_t row)
{
    return head * plan->rows + m_block * plan->block_m + row;
}

/* ---- First pass: tiles ------------------------------------------------------------------------------- */

static scratch own_scratch(const decode_run *run, int32_t thread)
{
    ekv_arena arena = ekv_arena_over(run->workspace.own + (size_t)thread * run->workspace.own_size);
    return lay_out_scratch(&arena, run->plan);
}

static void load_queries(const decode_run *run, int32_t request, int32_t first_head, int32_t rows, float *q)
{
    const ekv_batch *batch = &run->plan->batch;
    const ekv_tensors *t = run->tensors;
    for (int32_t r = 0; r < rows; r++, q += batch->head_dim) {
        const int64_t at = request * t->q_stride_request + (first_head + r) * t->q_stride_head;
        ekv_row_to_f32(ekv_element(t->q, batch->q_dtype, at), batch->q_dtype, batch->head_dim, q);
        for (int32_t d = 0; d < batch->head_dim; d++)
            q[d] *= run->q_sign;
    }
}

/* One head of a tile. */
static void run_head(const decode_run *run, const ekv_tile *tile, int32_t index, const scratch *own)
{
    const ekv_plan *plan = run->plan;
    const ekv_tensors *t = run->tensors;
    const int32_t head = tile->head + index, kv_head = ekv_plan_kv_head(plan, head);
    const int32_t rows = rows_of(plan, tile->m_block), q_head = q_head_of(plan, head, tile->m_block, 0);
    const bool partial = tile->flags & EKV_TILE_PARTIAL;
    const int64_t slot_row = (tile->slot + (int64_t)index) * run->slot_rows;
    const ekv_cpu_tile work = {
        .q = own->q,
        .rows = rows,
        .head_dim = plan->batch.head_dim,
        .scale = run->scale,
        .kv_dtype = plan->batch.kv_dtype,
        .k = ekv_element(t->k, plan->batch.kv_dtype, kv_head * t->k_stride_head),
        .v = ekv_element(t->v, plan->batch.kv_dtype, kv_head * t->v_stride_head),
        .pages = ekv_tensors_pages(t, tile->request),
        .page_size = plan->batch.page_size,
        .kv_begin = tile->kv_begin,
        .kv_end = tile->kv_end,
        .k_stride_page = t->k_stride_page,
        .k_stride_token = t->k_stride_token,
        .v_stride_page = t->v_stride_page,
        .v_stride_token = t->v_stride_token,
        .block = own->block,
        .p = own->p,
        .acc = partial ? run->workspace.acc + slot_row * plan->batch.head_dim : own->acc,
        .max = partial ? run->workspace.max + slot_row : own->max_sum,
        .sum = partial ? run->workspace.sum + slot_row : own->max_sum + run->slot_rows,
    };
    load_queries(run, tile->request, q_head, rows, own->q);
    run->kernel(&work);
    if (!partial)
        for (int32_t r = 0; r < rows; r++)
            write_row(run, tile->request, q_head + r, work.acc + (int64_t)r * work.head_dim, work.max[r], work.sum[r]);
}

static void run_tile(const decode_run *run, int64_t index, const scratch *own)
{
    const ekv_tile *tile = &run->plan->tiles[index];
    if (run->plan->kv_len[tile->request] == 0)
        return; /* the second pass writes the outputs of empty requests, which need no tile */
    for (int32_t h = 0; h < tile->head_count; h++)
        run_head(run, tile, h, own);
}

static void tile_pass(void *argument, int32_t thread)
{
    decode_run *run = argument;
    const ekv_plan *plan = run->plan;
    const scratch own = own_scratch(run, thread);
    if (plan->dispatch == EKV_DISPATCH_RANGE) { /* threads take CTAs, a CTA runs its range */
        for (int64_t cta; (cta = atomic_fetch_add(&run->next_tile, 1)) < ekv_plan_num_ctas(plan);)
            for (int64_t i = plan->cta_begin[cta]; i < plan->cta_begin[cta + 1]; i++)
                run_tile(run, i, &own);
        return;
    }
    if (plan->dispatch == EKV_DISPATCH_QUEUE && thread >= ekv_plan_num_ctas(plan))
        return; /* a persistent CTA is one taker */
    for (int64_t i; (i = atomic_fetch_add(&run->next_tile, 1)) < plan->num_tiles;)
        run_tile(run, i, &own);
}

/* ---- Second pass: merges and empty requests ---------------------------------------------------------- */

/* One row, from the partial results of all splits in order. */
static void merge_row(const decode_run *run, const ekv_merge *merge, int32_t index, int32_t row, float *acc)
{
    const workspace *w = &run->workspace;
    const int32_t dim = run->plan->batch.head_dim;
    float max = -INFINITY, sum = 0;
    for (int32_t s = 0; s < merge->num_splits; s++) {
        const float m = w->max[(ekv_merge_slot(merge, s) + index) * run->slot_rows + row];
        max = m > max ? m : max;
    }
    memset(acc, 0, (size_t)dim * sizeof *acc);
    for (int32_t s = 0; s < merge->num_splits; s++) {
        const int64_t at = (ekv_merge_slot(merge, s) + index) * run->slot_rows + row;
        const float *part = w->acc + at * dim;
        if (w->sum[at] == 0)
            continue; /* no tokens */
        const float weight = ekv_exp_nonpositive((w->max[at] - max) * run->scale);
        sum += weight * w->sum[at];
        for (int32_t d = 0; d < dim; d++)
            acc[d] += weight * part[d];
    }
    const int32_t q_head = q_head_of(run->plan, merge->head + index, merge->m_block, row);
    write_row(run, merge->request, q_head, acc, max, sum);
}

static void write_empty_request(const decode_run *run, int32_t request, float *acc)
{
    for (int32_t h = 0; h < run->plan->batch.q_heads; h++) {
        memset(acc, 0, (size_t)run->plan->batch.head_dim * sizeof *acc);
        write_row(run, request, h, acc, -INFINITY, 0);
    }
}

/* Units: (merge, head) for all merges, then requests. */
static void output_pass(void *argument, int32_t thread)
{
    decode_run *run = argument;
    const ekv_plan *plan = run->plan;
    const int64_t heads = plan->heads, merge_units = plan->num_merges * heads;
    const scratch own = own_scratch(run, thread);
    for (int64_t i; (i = atomic_fetch_add(&run->next_output, 1)) < merge_units + plan->batch.batch_size;) {
        if (i >= merge_units) {
            if (plan->kv_len[i - merge_units] == 0)
                write_empty_request(run, (int32_t)(i - merge_units), own.acc);
            continue;
        }
        const ekv_merge *merge = &plan->merges[i / heads];
        const int32_t index = (int32_t)(i % heads);
        if (index >= merge->head_count || plan->kv_len[merge->request] == 0)
            continue;
        for (int32_t r = 0; r < rows_of(plan, merge->m_block); r++)
            merge_row(run, merge, index, r, own.acc);
    }
}

/* ---- Operations -------------------------------------------------------------------------------------- */

static ekv_status cpu_supports(const ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options)
{
    const int32_t dim = plan->batch.head_dim;
    if (dim < MIN_HEAD_DIM || dim > MAX_HEAD_DIM || dim % HEAD_DIM_STEP)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "head_dim %d: the CPU backend does %d to %d in steps of %d", dim,
                        MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP);
    if (options->kernel != EKV_KERNEL_AUTO)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "kernel %d is one of the CUDA backend", (int)options->kernel);
    if (options->stream)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "stream: the CPU backend has none");
    if (plan->options.on_device)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "on_device: the CPU backend cannot read lengths on a GPU");
    if (tensors && tensors->kv_len)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "tensors.kv_len: the CPU backend takes lengths from the plan");
    return EKV_OK;
}

static bool any_empty(const ekv_plan *plan)
{
    for (int32_t b = 0; b < plan->batch.batch_size; b++)
        if (plan->kv_len[b] == 0)
            return true;
    return false;
}

static ekv_status cpu_decode(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options,
                             void *memory)
{
    ekv_arena arena = ekv_arena_over(memory);
    decode_run run = { .plan = plan,
                       .tensors = tensors,
                       .workspace = lay_out(&arena, plan),
                       .slot_rows = ekv_plan_slot_rows(plan),
                       .scale = fabsf(tensors->sm_scale),
                       .q_sign = tensors->sm_scale < 0 ? -1.0f : 1.0f,
                       .lse_unit = options->lse_base == EKV_LSE_BASE2 ? 1.44269504088896340736 : 1,
                       .kernel = ekv_tile_kernel_generic };
    ekv_pool_run(plan->context->pool, tile_pass, &run);
    if (plan->num_merges || any_empty(plan))
        ekv_pool_run(plan->context->pool, output_pass, &run);
    return EKV_OK;
}

static ekv_status cpu_detect(ekv_context *context, ekv_device *device)
{
    ekv_status status = ekv_device_find("cpu", device);
    if (!status)
        device->num_sms = ekv_pool_num_threads(context->pool);
    return status;
}

const ekv_backend_ops ekv_cpu_backend = {
    .host_tensors = true,
    .supports = cpu_supports,
    .workspace_size = cpu_workspace_size,
    .decode = cpu_decode,
    .merge_states = ekv_cpu_merge_states,
    .detect = cpu_detect,
};
