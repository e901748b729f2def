/* SPDX-License-Identifier: Apache-2.0
 * Execution on the GPU of the context.  Memory is taken once, for the largest batch: K and V are pages in random
 * order, and a batch takes the first of them. */
#include "base/context.h"
#include "base/half.h"
#include "base/rng.h"
#include "base/status.h"
#include "cuda/cuda_bench.h"
#include "cuda/cuda_prepare.h"
#include "execution.h"
#include "plan/tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    GUARD_BYTES = 1024, /* before, between and after O and LSE */
    POISON = 0xFF,      /* a NaN in every dtype */
    SPARE_PAGES = 3,    /* which no request uses */
    ALIGN = 256
};

static const float q_range = 4.0f; /* as in cpu/random_cache.h */

typedef struct cuda_state {
    ekv_tensors tensors;
    ekv_reference reference; /* arrays on the host */
    int64_t num_pages;
    size_t kv_size; /* bytes of K, and of V */
    /* One allocation: K, V, Q, then the outputs: guard, O, guard, LSE, guard, as long as the batch needs. */
    unsigned char *block;
    unsigned char *q, *outputs;
    size_t o_size, lse_size; /* of the batch */
    int32_t *tables;         /* device: indptr [requests + 1], kv_len [requests], pages [num_pages] */
    int32_t *indptr;         /* host, [requests + 1] */
    unsigned char *host;     /* [outputs of the largest batch] */
    void *stream;
    void *sink; /* of plain reads */
    ekv_cuda_clock *clock;
} cuda_state;

/* ---- Memory ------------------------------------------------------------------------------------------ */

static size_t align_up(size_t size)
{
    return (size + ALIGN - 1) / ALIGN * ALIGN;
}

static int64_t num_rows(const cli_execution *execution, int32_t requests)
{
    return (int64_t)requests * execution->batch.q_heads;
}

static size_t row_bytes(const cli_execution *execution)
{
    return (size_t)execution->batch.head_dim * (size_t)ekv_dtype_size(execution->batch.q_dtype);
}

static size_t outputs_size(const cuda_state *state)
{
    return align_up(state->o_size) + align_up(state->lse_size) + (size_t)3 * GUARD_BYTES;
}

static void size_outputs(const cli_execution *execution, int32_t requests, cuda_state *state)
{
    const size_t rows = (size_t)num_rows(execution, requests);
    state->o_size = rows * row_bytes(execution);
    state->lse_size = rows * sizeof(float);
}

/* Pages in random order: those that a batch has are the first of the list. */
static ekv_status upload_pages(cli_execution *execution)
{
    cuda_state *state = execution->state;
    int32_t *pages = cli_alloc((size_t)state->num_pages * sizeof *pages);
    for (int64_t i = 0; i < state->num_pages; i++)
        pages[i] = (int32_t)i;
    ekv_rng rng = { (uint64_t)execution->cli->options.seed ^ 0x70616765 };
    for (int64_t i = state->num_pages - 1; i > 0; i--) {
        const int64_t j = ekv_rng_below(&rng, i + 1);
        const int32_t page = pages[i];
        pages[i] = pages[j];
        pages[j] = page;
    }
    ekv_status status =
        ekv_cuda_copy(execution->cli->context, state->tables + 2 * (int64_t)execution->limits.requests + 1, pages,
                      (size_t)state->num_pages * sizeof *pages);
    free(pages);
    return status;
}

static ekv_status allocate(cli_execution *execution)
{
    cuda_state *state = execution->state;
    ekv_context *context = execution->cli->context;
    const cli_limits *limits = &execution->limits;
    const ekv_batch *batch = &execution->batch;
    const size_t rows = (size_t)num_rows(execution, limits->requests);
    state->num_pages = limits->pages + SPARE_PAGES;
    if (state->num_pages > INT32_MAX)
        return ekv_fail(EKV_ERROR_OVERFLOW, "%lld pages of %d tokens are too many", (long long)state->num_pages,
                        batch->page_size);
    state->kv_size = (size_t)state->num_pages * (size_t)batch->page_size * (size_t)batch->kv_heads *
                     (size_t)batch->head_dim * (size_t)ekv_dtype_size(batch->kv_dtype);
    size_outputs(execution, limits->requests, state);
    const size_t q_begin = 2 * align_up(state->kv_size), o_begin = q_begin + align_up(state->o_size);
    const size_t tables = (2 * (size_t)limits->requests + 1 + (size_t)state->num_pages) * sizeof(int32_t);
    void *memory = NULL;
    ekv_status status;
    if ((status = ekv_cuda_alloc(context, o_begin + outputs_size(state), &memory)))
        return status;
    state->block = memory;
    state->q = state->block + q_begin;
    state->outputs = state->block + o_begin;
    if ((status = ekv_cuda_alloc(context, tables, &memory)))
        return status;
    state->tables = memory;
    state->indptr = cli_alloc(((size_t)limits->requests + 1) * sizeof *state->indptr);
    state->host = cli_alloc(outputs_size(state));
    if (limits->with_reference) {
        state->reference.o = cli_alloc(rows * (size_t)batch->head_dim * sizeof(double));
        state->reference.lse = cli_alloc(rows * sizeof(double));
        state->reference.scale = cli_alloc(rows * sizeof(ekv_row_scale));
    }
    return ekv_cuda_alloc(context, sizeof(uint32_t), &state->sink);
}

static ekv_status fill(cli_execution *execution)
{
    cuda_state *state = execution->state;
    ekv_context *context = execution->cli->context;
    const ekv_batch *batch = &execution->batch;
    const uint64_t seed = (uint64_t)execution->cli->options.seed;
    const int64_t rows = num_rows(execution, execution->limits.requests);
    ekv_status status =
        ekv_cuda_fill_random(context, state->q, batch->q_dtype, rows * batch->head_dim, seed + 2, q_range);
    if (status || execution->limits.poison)
        return status;
    const int64_t elements = (int64_t)state->kv_size / ekv_dtype_size(batch->kv_dtype);
    if ((status = ekv_cuda_fill_random(context, state->block, batch->kv_dtype, elements, seed, 1.0f)))
        return status;
    return ekv_cuda_fill_random(context, state->block + align_up(state->kv_size), batch->kv_dtype, elements, seed + 1,
                                1.0f);
}

static ekv_status create(cli_execution *execution)
{
    const ekv_batch *batch = &execution->batch;
    if (batch->kv_dtype != batch->q_dtype || (batch->kv_dtype != EKV_DTYPE_BF16 && batch->kv_dtype != EKV_DTYPE_F16))
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "kv_dtype %d: the CUDA backend has kernels for bf16 and fp16",
                        (int)batch->kv_dtype);
    ekv_context *context = execution->cli->context;
    cuda_state *state = cli_alloc(sizeof *state);
    *state = (cuda_state){ 0 };
    execution->state = state;
    if (execution->cold)
        snprintf(execution->flush, sizeof execution->flush, "write256MiB"); /* what ekv_cuda_clock_time does */
    const int32_t driver = ekv_cuda_driver_version(context);
    snprintf(execution->driver, sizeof execution->driver, "%d.%d", driver / 1000, driver % 1000 / 10);
    ekv_status status;
    if ((status = ekv_cuda_stream_create(context, &state->stream)) ||
        (status = ekv_cuda_clock_create(context, &state->clock)) || (status = allocate(execution)) ||
        (status = upload_pages(execution)) || (status = fill(execution)))
        return status;
    return EKV_OK;
}

static void destroy(cli_execution *execution)
{
    cuda_state *state = execution->state;
    ekv_context *context = execution->cli->context;
    if (!state)
        return;
    ekv_cuda_clock_free(state->clock);
    ekv_cuda_stream_free(context, state->stream);
    ekv_cuda_free(context, state->block);
    ekv_cuda_free(context, state->tables);
    ekv_cuda_free(context, state->sink);
    free(state->indptr);
    free(state->host);
    free(state->reference.o);
    free(state->reference.lse);
    free(state->reference.scale);
    free(state);
}

/* ---- Batch ------------------------------------------------------------------------------------------- */

/* Device, [batch_size]. */
static int32_t *lengths(const cli_execution *execution)
{
    const cuda_state *state = execution->state;
    return state->tables + execution->limits.requests + 1;
}

static void set_tensors(cli_execution *execution)
{
    cuda_state *state = execution->state;
    ekv_tensors *t = &state->tensors;
    *t = (ekv_tensors)EKV_TENSORS_INIT;
    t->q = state->q;
    t->k = state->block;
    t->v = state->block + align_up(state->kv_size);
    t->o = state->outputs + GUARD_BYTES;
    t->lse = (float *)(void *)(state->outputs + GUARD_BYTES + align_up(state->o_size) + GUARD_BYTES);
    t->page_indptr = state->tables;
    t->page_indices = state->tables + 2 * (int64_t)execution->limits.requests + 1;
    t->num_pages = state->num_pages;
    if (execution->cli->options.plan.on_device)
        t->kv_len = lengths(execution);
    ekv_tensors_set_defaults(&execution->batch, t);
    execution->tensors = t;
}

static ekv_status upload_lengths(cli_execution *execution)
{
    cuda_state *state = execution->state;
    ekv_context *context = execution->cli->context;
    const ekv_batch *batch = &execution->batch;
    const size_t requests = (size_t)batch->batch_size;
    state->indptr[0] = 0;
    for (size_t b = 0; b < requests; b++)
        state->indptr[b + 1] = state->indptr[b] + (int32_t)ekv_ceil_div(batch->kv_len[b], batch->page_size);
    ekv_status status = ekv_cuda_copy(context, state->tables, state->indptr, (requests + 1) * sizeof *state->indptr);
    return status ? status
                  : ekv_cuda_copy(context, lengths(execution), batch->kv_len, requests * sizeof *batch->kv_len);
}

static ekv_status poison_and_fill(cli_execution *execution)
{
    cuda_state *state = execution->state;
    ekv_context *context = execution->cli->context;
    ekv_status status = ekv_cuda_fill(context, state->block, POISON, 2 * align_up(state->kv_size));
    return status ? status
                  : ekv_cuda_fill_cache(context, &execution->batch, &state->tensors, lengths(execution),
                                        (uint64_t)execution->cli->options.seed);
}

static ekv_status set_batch(cli_execution *execution)
{
    cuda_state *state = execution->state;
    execution->reference = NULL;
    size_outputs(execution, execution->batch.batch_size, state);
    set_tensors(execution);
    ekv_status status = upload_lengths(execution);
    if (!status && execution->limits.poison)
        status = poison_and_fill(execution);
    if (status || !execution->limits.with_reference)
        return status;
    ekv_reference *reference = &state->reference;
    reference->batch = execution->batch;
    status = ekv_cuda_reference(execution->cli->context, &execution->batch, &state->tensors, reference->o,
                                reference->lse, (double *)reference->scale);
    if (!status)
        execution->reference = reference;
    return status;
}

/* ---- Jobs -------------------------------------------------------------------------------------------- */

typedef struct work {
    cli_execution *execution;
    cli_job *job;
    const ekv_cuda_read_shape *shape;
} work;

static ekv_status enqueue_decode(void *argument, void *stream)
{
    const work *w = argument;
    w->job->options.stream = stream;
    return ekv_decode(w->job->plan, w->execution->tensors, &w->job->options, w->job->workspace, w->job->workspace_size);
}

static ekv_status enqueue(void *argument, void *stream)
{
    const work *w = argument;
    if (w->job->graph)
        return ekv_cuda_graph_launch(w->execution->cli->context, w->job->graph, stream);
    return enqueue_decode(argument, stream);
}

static ekv_status prepare(cli_execution *execution, cli_job *job)
{
    cuda_state *state = execution->state;
    ekv_context *context = execution->cli->context;
    ekv_cuda_launch_info info;
    ekv_status status;
    if ((status = ekv_cuda_launch_info_get(job->plan, job->options.kernel, &info)) ||
        (status = ekv_cuda_alloc(context, job->workspace_size, &job->workspace)) ||
        (status = ekv_cuda_fill(context, job->workspace, POISON, job->workspace_size)))
        return status;
    job->kernel = info.kernel;
    job->threads = info.threads;
    job->shared_bytes = info.shared_bytes;
    job->resident_ctas = info.resident_ctas;
    job->p_dtype = job->options.kernel == EKV_KERNEL_SIMT ? EKV_DTYPE_F32 : execution->batch.kv_dtype;
    work w = { .execution = execution, .job = job };
    return execution->cli->options.graph
               ? ekv_cuda_graph_create(context, state->stream, enqueue_decode, &w, &job->graph)
               : EKV_OK;
}

static void release(cli_execution *execution, cli_job *job)
{
    ekv_context *context = execution->cli->context;
    ekv_cuda_graph_free(context, job->graph);
    ekv_cuda_free(context, job->workspace);
}

static ekv_status time_decode(cli_execution *execution, cli_job *job, double *us)
{
    cuda_state *state = execution->state;
    work w = { .execution = execution, .job = job };
    return ekv_cuda_clock_time(state->clock, state->stream, execution->cold, enqueue, &w, us);
}

typedef struct plan_work {
    ekv_plan *plan;
    const int32_t *kv_len;
} plan_work;

static ekv_status enqueue_plan(void *argument, void *stream)
{
    const plan_work *w = argument;
    return ekv_cuda_prepare_alone(w->plan, w->kv_len, stream);
}

static ekv_status time_plan(cli_execution *execution, ekv_plan *plan, double *us)
{
    cuda_state *state = execution->state;
    plan_work w = { plan, lengths(execution) };
    return ekv_cuda_clock_time(state->clock, state->stream, execution->cold, enqueue_plan, &w, us);
}

static bool is_poison(const unsigned char *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (bytes[i] != POISON)
            return false;
    return true;
}

/* All but O and LSE is as it was, the bytes that round their sizes up included. */
static bool guards_intact(const cuda_state *state)
{
    const unsigned char *o = state->host + GUARD_BYTES;
    const unsigned char *lse = o + align_up(state->o_size) + GUARD_BYTES;
    const unsigned char *o_end = o + state->o_size, *lse_end = lse + state->lse_size;
    return is_poison(state->host, GUARD_BYTES) && is_poison(o_end, (size_t)(lse - o_end)) &&
           is_poison(lse_end, (size_t)(state->host + outputs_size(state) - lse_end));
}

static ekv_status decode(cli_execution *execution, cli_job *job, cli_outputs *outputs)
{
    cuda_state *state = execution->state;
    ekv_context *context = execution->cli->context;
    work w = { .execution = execution, .job = job };
    ekv_status status;
    if ((status = ekv_cuda_fill(context, state->outputs, POISON, outputs_size(state))) ||
        (status = enqueue(&w, state->stream)) || (status = ekv_cuda_stream_wait(context, state->stream)) ||
        (status = ekv_cuda_copy(context, state->host, state->outputs, outputs_size(state))))
        return status;
    *outputs =
        (cli_outputs){ .o = state->host + GUARD_BYTES,
                       .lse = (float *)(void *)(state->host + GUARD_BYTES + align_up(state->o_size) + GUARD_BYTES),
                       .guards_intact = guards_intact(state) };
    return EKV_OK;
}

static ekv_status nothing(void *argument, void *stream)
{
    (void)argument, (void)stream;
    return EKV_OK;
}

static ekv_status timeline(cli_execution *execution, cli_job *job, ekv_cuda_timeline *recorded)
{
    cuda_state *state = execution->state;
    double us;
    ekv_status status =
        execution->cold ? ekv_cuda_clock_time(state->clock, state->stream, true, nothing, NULL, &us) : EKV_OK;
    job->options.stream = state->stream;
    return status ? status
                  : ekv_cuda_timeline_record(job->plan, execution->tensors, &job->options, job->workspace, recorded);
}

/* ---- Plain read -------------------------------------------------------------------------------------- */

static bool read_shape(const cli_execution *execution, int32_t shape, char *text, size_t size)
{
    (void)execution;
    const ekv_cuda_read_shape *shapes;
    if (shape >= ekv_cuda_read_shapes(&shapes))
        return false;
    snprintf(text, size, "%d threads x %d CTAs an SM x %d loads", shapes[shape].threads, shapes[shape].ctas_per_sm,
             shapes[shape].loads);
    return true;
}

static ekv_status enqueue_read(void *argument, void *stream)
{
    const work *w = argument;
    cuda_state *state = w->execution->state;
    return ekv_cuda_read(w->execution->cli->context, w->shape, state->block, (size_t)w->execution->bytes, state->sink,
                         stream);
}

static ekv_status read_once(cli_execution *execution, int32_t shape, double *us)
{
    cuda_state *state = execution->state;
    work w = { .execution = execution };
    ekv_cuda_read_shapes(&w.shape);
    w.shape += shape;
    return ekv_cuda_clock_time(state->clock, state->stream, execution->cold, enqueue_read, &w, us);
}

const cli_backend cli_backend_cuda = {
    .name = "cuda",
    .create = create,
    .free = destroy,
    .set_batch = set_batch,
    .prepare = prepare,
    .release = release,
    .time = time_decode,
    .time_plan = time_plan,
    .decode = decode,
    .read_shape = read_shape,
    .read = read_once,
    .timeline = timeline,
};
