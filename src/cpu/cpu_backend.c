/* SPDX-License-Identifier: Apache-2.0
 * One pass on the thread pool: threads take the plan's units of work, as its dispatch cuts them, from a counter.  A
 * tile writes its output or a partial result; whoever writes the last partial result of an output merges them, in split
 * order.  What a tile or a merge computes does not depend on who runs it, so outputs have the same bits for any number
 * of threads, and no thread waits for another before the end. */
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

/* Requests of a unit that looks for empty ones. */
enum { EMPTY_REQUESTS = 64 };

/* K and V that the caller is done with before a sleeping thread would have come (base/pool.h): 8 us at 8 GB/s. */
enum { ALONE_BYTES = 64 << 10 };

/* One thread's own memory. */
typedef struct scratch {
    void *q;      /* room for [heads][panels][EKV_TILE_PANEL][head_dim] floats */
    float *p;     /* [panels][EKV_TILE_BLOCK][EKV_TILE_PANEL] */
    float *state; /* [heads][panels][2][EKV_TILE_PANEL] */
    float *acc;   /* [heads][slot_rows][head_dim] */
    float *max;   /* [heads][slot_rows] */
    float *sum;   /* [heads][slot_rows] */
} scratch;

/* Partial results of an output (request, m_block, head) that are still to come. */
typedef struct arrival {
    _Atomic int32_t missing;
    int32_t merge; /* index in plan->merges */
} arrival;

/* The workspace.  Partial results are those of ekv_cpu_tile: not normalised, with maximum and sum. */
typedef struct workspace {
    float *acc;          /* [slots][slot_rows][head_dim] */
    float *max;          /* [slots][slot_rows] */
    float *sum;          /* [slots][slot_rows] */
    arrival *arrivals;   /* [max_batch_size][m_blocks][heads], set where an output is merged; none without slots */
    _Atomic bool *taken; /* [threads]: unit t is thread t's first, unless another was there before */
    unsigned char *own;  /* [threads][own_size], what lay_out_scratch makes a scratch of */
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
    const ekv_cpu_kernel *kernel;
    int64_t num_units;  /* CTAs of a range, else tiles; then groups of requests, if some are empty */
    int64_t tile_units; /* of them */
    _Atomic int64_t next_unit;
} decode_run;

/* ---- Workspace --------------------------------------------------------------------------------------- */

static scratch lay_out_scratch(ekv_arena *arena, const ekv_plan *plan)
{
    const size_t rows = (size_t)ekv_plan_slot_rows(plan), dim = (size_t)plan->batch.head_dim;
    const size_t tile_rows = (size_t)plan->heads * rows; /* no tile has more */
    const size_t lanes = (rows + EKV_TILE_PANEL - 1) / EKV_TILE_PANEL * EKV_TILE_PANEL;
    return (scratch){ .q = ekv_arena_take(arena, (size_t)plan->heads * lanes * dim * sizeof(float)),
                      .p = ekv_arena_take(arena, lanes * EKV_TILE_BLOCK * sizeof(float)),
                      .state = ekv_arena_take(arena, (size_t)plan->heads * 2 * lanes * sizeof(float)),
                      .acc = ekv_arena_take(arena, tile_rows * dim * sizeof(float)),
                      .max = ekv_arena_take(arena, tile_rows * sizeof(float)),
                      .sum = ekv_arena_take(arena, tile_rows * sizeof(float)) };
}

/* With a NULL base it only counts. */
static workspace lay_out(ekv_arena *arena, const ekv_plan *plan)
{
    const size_t rows = (size_t)plan->capacity.slots * (size_t)ekv_plan_slot_rows(plan);
    const size_t outputs =
        plan->capacity.slots ? (size_t)plan->max_batch_size * (size_t)plan->m_blocks * (size_t)plan->heads : 0;
    ekv_arena own = { NULL, 0 };
    lay_out_scratch(&own, plan);
    own.used = (own.used + EKV_ARENA_ALIGN - 1) / EKV_ARENA_ALIGN * EKV_ARENA_ALIGN;
    const size_t threads = (size_t)ekv_pool_num_threads(plan->context->pool);
    return (workspace){ .acc = ekv_arena_take(arena, rows * (size_t)plan->batch.head_dim * sizeof(float)),
                        .max = ekv_arena_take(arena, rows * sizeof(float)),
                        .sum = ekv_arena_take(arena, rows * sizeof(float)),
                        .arrivals = ekv_arena_take(arena, outputs * sizeof(arrival)),
                        .taken = ekv_arena_take(arena, threads * sizeof(_Atomic bool)),
                        .own = ekv_arena_take(arena, threads * own.used),
                        .own_size = own.used };
}

static ekv_status cpu_workspace_size(const ekv_plan *plan, size_t *size)
{
    int64_t floats, outputs;
    if (__builtin_mul_overflow(plan->capacity.slots, (int64_t)ekv_plan_slot_rows(plan), &floats) ||
        __builtin_mul_overflow(floats, (int64_t)plan->batch.head_dim + 2, &floats) || floats > INT64_MAX / 16)
        return ekv_fail(EKV_ERROR_OVERFLOW, "%" PRId64 " partial results of %d rows of %d floats are too large",
                        plan->capacity.slots, ekv_plan_slot_rows(plan), plan->batch.head_dim);
    if (__builtin_mul_overflow((int64_t)plan->max_batch_size * plan->m_blocks, (int64_t)plan->heads, &outputs) ||
        outputs > INT64_MAX / 32)
        return ekv_fail(EKV_ERROR_OVERFLOW, "%d requests of %d heads in %d blocks of rows are too many outputs",
                        plan->max_batch_size, plan->heads, plan->m_blocks);
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
    const int64_t at = request * t->o_stride_request + q_head * t->o_stride_head;
    run->kernel->write(acc, sum == 0 ? 0 : 1 / sum, batch->head_dim, batch->q_dtype,
                       ekv_element_mutable(t->o, batch->q_dtype, at));
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

/* ---- Merges ------------------------------------------------------------------------------------------ */

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

static arrival *arrival_of(const decode_run *run, int32_t request, int32_t m_block, int32_t head)
{
    const ekv_plan *plan = run->plan;
    return &run->workspace.arrivals[((int64_t)request * plan->m_blocks + m_block) * plan->heads + head];
}

static void expect_arrivals(const decode_run *run)
{
    for (int64_t i = 0; i < run->plan->num_merges; i++) {
        const ekv_merge *merge = &run->plan->merges[i];
        for (int32_t h = 0; h < merge->head_count; h++) {
            arrival *a = arrival_of(run, merge->request, merge->m_block, merge->head + h);
            atomic_init(&a->missing, merge->num_splits);
            a->merge = (int32_t)i;
        }
    }
}

/* The tile's partial results are written: where they were the last ones, merges. */
static void arrive(const decode_run *run, const ekv_tile *tile, const scratch *own)
{
    for (int32_t head = tile->head; head < tile->head + tile->head_count; head++) {
        arrival *a = arrival_of(run, tile->request, tile->m_block, head);
        if (atomic_fetch_sub_explicit(&a->missing, 1, memory_order_acq_rel) > 1)
            continue;
        const ekv_merge *merge = &run->plan->merges[a->merge];
        for (int32_t r = 0; r < rows_of(run->plan, tile->m_block); r++)
            merge_row(run, merge, head - merge->head, r, own->acc);
    }
}

/* ---- Tiles ------------------------------------------------------------------------------------------- */

static scratch own_scratch(const decode_run *run, int32_t thread)
{
    ekv_arena arena = ekv_arena_over(run->workspace.own + (size_t)thread * run->workspace.own_size);
    return lay_out_scratch(&arena, run->plan);
}

/* Queries [first, first + n) of a request in the kernel's q_dtype, which is F32 or the batch's. */
static void load_queries(const decode_run *run, int32_t request, int32_t first, int32_t n, void *to)
{
    const ekv_batch *batch = &run->plan->batch;
    const ekv_tensors *t = run->tensors;
    const int32_t dim = batch->head_dim;
    for (int32_t r = 0; r < n; r++) {
        const int64_t at = request * t->q_stride_request + (first + r) * t->q_stride_head;
        const void *from = ekv_element(t->q, batch->q_dtype, at);
        if (run->kernel->q_dtype != EKV_DTYPE_F32) {
            uint16_t *halves = (uint16_t *)to + (int64_t)r * dim;
            memcpy(halves, from, (size_t)dim * sizeof *halves);
            for (int32_t d = 0; d < dim && run->q_sign < 0; d++)
                halves[d] ^= 0x8000u;
            continue;
        }
        float *floats = (float *)to + (int64_t)r * dim;
        ekv_row_to_f32(from, batch->q_dtype, dim, floats);
        for (int32_t d = 0; d < dim; d++)
            floats[d] *= run->q_sign;
    }
}

/* Heads [head, head + heads) of the tile, whose KV heads follow each other. */
static void run_heads(const decode_run *run, const ekv_tile *tile, int32_t head, int32_t heads, const scratch *own)
{
    const ekv_plan *plan = run->plan;
    const ekv_tensors *t = run->tensors;
    const int32_t kv_head = ekv_plan_kv_head(plan, head), rows = rows_of(plan, tile->m_block);
    const bool partial = tile->flags & EKV_TILE_PARTIAL;
    const int64_t slot_row = (tile->slot + (int64_t)(head - tile->head)) * run->slot_rows;
    const ekv_cpu_tile work = {
        .q = own->q,
        .heads = heads,
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
        .k_stride_head = t->k_stride_head,
        .v_stride_page = t->v_stride_page,
        .v_stride_token = t->v_stride_token,
        .v_stride_head = t->v_stride_head,
        .p = own->p,
        .state = own->state,
        .acc = partial ? run->workspace.acc + slot_row * plan->batch.head_dim : own->acc,
        .max = partial ? run->workspace.max + slot_row : own->max,
        .sum = partial ? run->workspace.sum + slot_row : own->sum,
        .stride_acc = (int64_t)run->slot_rows * plan->batch.head_dim,
        .stride_state = run->slot_rows,
    };
    for (int32_t h = 0; h < heads; h++)
        load_queries(run, tile->request, q_head_of(plan, head + h, tile->m_block, 0), rows,
                     ekv_element_mutable(own->q, run->kernel->q_dtype, (int64_t)h * rows * work.head_dim));
    run->kernel->run(&work);
    for (int32_t h = 0; h < heads && !partial; h++)
        for (int32_t r = 0; r < rows; r++)
            write_row(run, tile->request, q_head_of(plan, head + h, tile->m_block, r),
                      work.acc + h * work.stride_acc + (int64_t)r * work.head_dim, work.max[h * work.stride_state + r],
                      work.sum[h * work.stride_state + r]);
}

static void run_tile(const decode_run *run, int64_t index, const scratch *own)
{
    const ekv_tile *tile = &run->plan->tiles[index];
    if (run->plan->kv_len[tile->request] == 0)
        return; /* outputs of empty requests are written apart: they need no tile */
    const bool packed = run->plan->heads == run->plan->batch.kv_heads;
    const int32_t step = packed ? tile->head_count : 1; /* not packed: heads share a KV head */
    for (int32_t h = 0; h < tile->head_count; h += step)
        run_heads(run, tile, tile->head + h, step, own);
    if (tile->flags & EKV_TILE_PARTIAL)
        arrive(run, tile, own);
}

static void write_empty_requests(const decode_run *run, int32_t first, float *acc)
{
    const ekv_plan *plan = run->plan;
    const int32_t end = (int32_t)ekv_min((int64_t)first + EMPTY_REQUESTS, plan->batch.batch_size);
    memset(acc, 0, (size_t)plan->batch.head_dim * sizeof *acc);
    for (int32_t b = first; b < end; b++)
        for (int32_t h = 0; h < plan->batch.q_heads && plan->kv_len[b] == 0; h++)
            write_row(run, b, h, acc, -INFINITY, 0);
}

static void run_unit(const decode_run *run, int64_t unit, const scratch *own)
{
    const ekv_plan *plan = run->plan;
    if (unit >= run->tile_units)
        write_empty_requests(run, (int32_t)(unit - run->tile_units) * EMPTY_REQUESTS, own->acc);
    else if (plan->dispatch == EKV_DISPATCH_RANGE) /* threads take CTAs, a CTA runs its range */
        for (int64_t i = plan->cta_begin[unit]; i < plan->cta_begin[unit + 1]; i++)
            run_tile(run, i, own);
    else
        run_tile(run, unit, own);
}

/* Whether nobody has the unit yet.  A thread begins with the unit of its own number: where a cache is decoded again
 * and again, as at every step of a model, the thread's second-level cache may still have the tokens of the last time.
 */
static bool take(const decode_run *run, int64_t unit)
{
    return unit >= ekv_pool_num_threads(run->plan->context->pool) ||
           !atomic_exchange_explicit(&run->workspace.taken[unit], true, memory_order_relaxed);
}

static void take_units(void *argument, int32_t thread)
{
    decode_run *run = argument;
    if (run->plan->dispatch == EKV_DISPATCH_QUEUE && thread >= ekv_plan_num_ctas(run->plan))
        return; /* a persistent CTA is one taker */
    const scratch own = own_scratch(run, thread);
    if (thread < run->num_units && take(run, thread))
        run_unit(run, thread, &own);
    for (int64_t unit; (unit = atomic_fetch_add_explicit(&run->next_unit, 1, memory_order_relaxed)) < run->num_units;)
        if (take(run, unit))
            run_unit(run, unit, &own);
}

/* ---- Operations -------------------------------------------------------------------------------------- */

static ekv_status cpu_supports(const ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options)
{
    const int32_t dim = plan->batch.head_dim;
    if (dim < MIN_HEAD_DIM || dim > MAX_HEAD_DIM || dim % HEAD_DIM_STEP)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "head_dim %d: the CPU backend does %d to %d in steps of %d", dim,
                        MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP);
    if (options->stream)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "stream: the CPU backend has none");
    if (plan->options.on_device)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "on_device: the CPU backend cannot read lengths on a GPU");
    if (tensors && tensors->kv_len)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "tensors.kv_len: the CPU backend takes lengths from the plan");
    const ekv_cpu_kernel *kernel;
    return ekv_cpu_kernel_choose(&plan->batch, options->kernel, &kernel);
}

/* Of K and V. */
static int64_t kv_bytes(const ekv_plan *plan)
{
    int64_t tokens = 0;
    for (int32_t b = 0; b < plan->batch.batch_size; b++)
        tokens += plan->kv_len[b];
    return 2 * tokens * plan->batch.kv_heads * plan->batch.head_dim * ekv_dtype_size(plan->batch.kv_dtype);
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
                       .lse_unit = options->lse_base == EKV_LSE_BASE2 ? 1.44269504088896340736 : 1 };
    ekv_status status = ekv_cpu_kernel_choose(&plan->batch, options->kernel, &run.kernel);
    if (status)
        return status;
    run.tile_units = plan->dispatch == EKV_DISPATCH_RANGE ? ekv_plan_num_ctas(plan) : plan->num_tiles;
    run.num_units = run.tile_units + (any_empty(plan) ? ekv_ceil_div(plan->batch.batch_size, EMPTY_REQUESTS) : 0);
    expect_arrivals(&run);
    for (int32_t t = 0; t < ekv_pool_num_threads(plan->context->pool); t++)
        atomic_init(&run.workspace.taken[t], false);
    if (run.num_units > 1)
        ekv_pool_share(plan->context->pool, take_units, &run, kv_bytes(plan) > ALONE_BYTES);
    else
        take_units(&run, 0);
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
