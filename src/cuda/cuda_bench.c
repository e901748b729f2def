/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cuda_bench.h"

#include "base/half.h"
#include "base/status.h"
#include "cuda/cuda_decode.h"
#include "cuda/kernels/args.h"

#include <string.h>

/* The body of a function that makes driver calls: enters, computes status by the expression, leaves. */
#define IN_CONTEXT(cuda, expression)                          \
    do {                                                      \
        bool entered_;                                        \
        ekv_status status_ = ekv_cuda_enter(cuda, &entered_); \
        if (status_)                                          \
            return status_;                                   \
        status_ = (expression);                               \
        ekv_cuda_leave(cuda, entered_);                       \
        return status_;                                       \
    } while (0)

static CUdeviceptr address(const void *pointer)
{
    return (CUdeviceptr)(uintptr_t)pointer;
}

/* ---- Memory ---------------------------------------------------------------------------------------------- */

static ekv_status allocate(ekv_cuda *cuda, size_t size, void **device)
{
    CUdeviceptr pointer;
    ekv_status status = EKV_CUDA_CALL(cuda, cuMemAlloc, (&pointer, size ? size : 1));
    if (!status)
        *device = (void *)(uintptr_t)pointer;
    return status;
}

ekv_status ekv_cuda_alloc(ekv_context *context, size_t size, void **device)
{
    IN_CONTEXT(context->cuda, allocate(context->cuda, size, device));
}

void ekv_cuda_free(ekv_context *context, void *device)
{
    ekv_cuda *cuda = context->cuda;
    bool entered;
    if (!device || ekv_cuda_enter(cuda, &entered))
        return;
    cuda->driver.cuMemFree(address(device));
    ekv_cuda_leave(cuda, entered);
}

static ekv_status copy(ekv_cuda *cuda, void *target, const void *source, size_t size)
{
    ekv_status status;
    if ((status = EKV_CUDA_CALL(cuda, cuCtxSynchronize, ())) ||
        (status = EKV_CUDA_CALL(cuda, cuMemcpyAsync, (address(target), address(source), size, NULL))))
        return status;
    return EKV_CUDA_CALL(cuda, cuStreamSynchronize, (NULL));
}

ekv_status ekv_cuda_copy(ekv_context *context, void *target, const void *source, size_t size)
{
    IN_CONTEXT(context->cuda, copy(context->cuda, target, source, size));
}

static ekv_status fill(ekv_cuda *cuda, void *device, uint8_t byte, size_t size)
{
    ekv_status status = EKV_CUDA_CALL(cuda, cuMemsetD8Async, (address(device), byte, size, NULL));
    return status ? status : EKV_CUDA_CALL(cuda, cuCtxSynchronize, ());
}

ekv_status ekv_cuda_fill(ekv_context *context, void *device, uint8_t byte, size_t size)
{
    IN_CONTEXT(context->cuda, fill(context->cuda, device, byte, size));
}

static ekv_status fill_random(ekv_cuda *cuda, void *device, ekv_dtype dtype, int64_t count, uint64_t seed, float range)
{
    int32_t type = (int32_t)dtype;
    void *parameters[] = { &device, &type, &count, &seed, &range };
    const ekv_cuda_launch launch = { .grid = { (uint32_t)cuda->num_sms * 8, 1, 1 }, .threads = 256 };
    ekv_status status = ekv_cuda_launch_kernel(cuda, EKV_CUDA_KERNEL_ekv_fill_random, &launch, parameters);
    return status ? status : EKV_CUDA_CALL(cuda, cuCtxSynchronize, ());
}

ekv_status ekv_cuda_fill_random(ekv_context *context, void *device, ekv_dtype dtype, int64_t count, uint64_t seed,
                                float range)
{
    IN_CONTEXT(context->cuda, fill_random(context->cuda, device, dtype, count, seed, range));
}

static ekv_status fill_cache(ekv_cuda *cuda, const ekv_batch *batch, const ekv_tensors *t, const int32_t *kv_len,
                             uint64_t seed)
{
    ekv_fill_params k = { .data = (void *)(uintptr_t)t->k,
                          .stride_page = t->k_stride_page,
                          .stride_token = t->k_stride_token,
                          .stride_head = t->k_stride_head,
                          .page_indptr = t->page_indptr,
                          .page_indices = t->page_indptr ? t->page_indices : t->block_table,
                          .table_rows = t->block_table_rows,
                          .table_stride = t->block_table_stride,
                          .kv_len = kv_len,
                          .batch_size = batch->batch_size,
                          .page_size = batch->page_size,
                          .heads = batch->kv_heads,
                          .head_dim = batch->head_dim,
                          .dtype = (int32_t)batch->kv_dtype,
                          .range = 1,
                          .seed = seed };
    ekv_fill_params v = k;
    v.data = (void *)(uintptr_t)t->v;
    v.stride_page = t->v_stride_page;
    v.stride_token = t->v_stride_token;
    v.stride_head = t->v_stride_head;
    v.seed = ~seed;
    const uint32_t requests = (uint32_t)ekv_min(batch->batch_size, 256);
    const ekv_cuda_launch launch = { .grid = { 4096 / requests, requests, 1 }, .threads = 256 };
    ekv_status status = ekv_cuda_launch_kernel(cuda, EKV_CUDA_KERNEL_ekv_fill_tokens, &launch, (void *[]){ &k });
    if (!status)
        status = ekv_cuda_launch_kernel(cuda, EKV_CUDA_KERNEL_ekv_fill_tokens, &launch, (void *[]){ &v });
    return status ? status : EKV_CUDA_CALL(cuda, cuCtxSynchronize, ());
}

ekv_status ekv_cuda_fill_cache(ekv_context *context, const ekv_batch *batch, const ekv_tensors *tensors,
                               const int32_t *kv_len, uint64_t seed)
{
    IN_CONTEXT(context->cuda, fill_cache(context->cuda, batch, tensors, kv_len, seed));
}

/* ---- Streams and graphs ---------------------------------------------------------------------------------- */

ekv_status ekv_cuda_stream_create(ekv_context *context, void **stream)
{
    ekv_cuda *cuda = context->cuda;
    CUstream created = NULL;
    bool entered;
    ekv_status status = ekv_cuda_enter(cuda, &entered);
    if (status)
        return status;
    status = EKV_CUDA_CALL(cuda, cuStreamCreate, (&created, CU_STREAM_NON_BLOCKING));
    ekv_cuda_leave(cuda, entered);
    if (!status)
        *stream = created;
    return status;
}

void ekv_cuda_stream_free(ekv_context *context, void *stream)
{
    ekv_cuda *cuda = context->cuda;
    if (stream)
        cuda->driver.cuStreamDestroy(stream);
}

ekv_status ekv_cuda_stream_wait(ekv_context *context, void *stream)
{
    ekv_cuda *cuda = context->cuda;
    IN_CONTEXT(cuda, EKV_CUDA_CALL(cuda, cuStreamSynchronize, (stream)));
}

static ekv_status order(ekv_cuda *cuda, CUstream first, CUstream second)
{
    CUevent event;
    ekv_status status = EKV_CUDA_CALL(cuda, cuEventCreate, (&event, CU_EVENT_DISABLE_TIMING));
    if (status)
        return status;
    if (!(status = EKV_CUDA_CALL(cuda, cuEventRecord, (event, first))))
        status = EKV_CUDA_CALL(cuda, cuStreamWaitEvent, (second, event, 0));
    cuda->driver.cuEventDestroy(event);
    return status;
}

ekv_status ekv_cuda_stream_order(ekv_context *context, void *first, void *second)
{
    IN_CONTEXT(context->cuda, order(context->cuda, first, second));
}

static ekv_status capture(ekv_cuda *cuda, CUstream stream, ekv_status (*work)(void *argument, void *stream),
                          void *argument, void **graph)
{
    CUgraph captured = NULL;
    CUgraphExec executable = NULL;
    ekv_status status = EKV_CUDA_CALL(cuda, cuStreamBeginCapture, (stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    if (status)
        return status;
    ekv_status work_status = work(argument, stream);
    /* An error of the work is what the caller wants to hear of. */
    status = work_status ? (ekv_status)(cuda->driver.cuStreamEndCapture(stream, &captured), work_status)
                         : EKV_CUDA_CALL(cuda, cuStreamEndCapture, (stream, &captured));
    if (!status)
        status = EKV_CUDA_CALL(cuda, cuGraphInstantiate, (&executable, captured, 0));
    if (captured)
        cuda->driver.cuGraphDestroy(captured);
    if (!status)
        *graph = executable;
    return status;
}

ekv_status ekv_cuda_graph_create(ekv_context *context, void *stream, ekv_status (*work)(void *argument, void *stream),
                                 void *argument, void **graph)
{
    IN_CONTEXT(context->cuda, capture(context->cuda, stream, work, argument, graph));
}

ekv_status ekv_cuda_graph_launch(ekv_context *context, void *graph, void *stream)
{
    ekv_cuda *cuda = context->cuda;
    IN_CONTEXT(cuda, EKV_CUDA_CALL(cuda, cuGraphLaunch, (graph, stream)));
}

void ekv_cuda_graph_free(ekv_context *context, void *graph)
{
    ekv_cuda *cuda = context->cuda;
    if (graph)
        cuda->driver.cuGraphExecDestroy(graph);
}

ekv_status ekv_cuda_occupy(ekv_context *context, void *stream, int32_t sms, int64_t ns)
{
    ekv_cuda *cuda = context->cuda;
    const ekv_cuda_launch launch = {
        .grid = { (uint32_t)sms, 1, 1 }, .threads = 32, .shared_bytes = (uint32_t)cuda->cta_shared, .stream = stream
    };
    IN_CONTEXT(cuda, ekv_cuda_launch_kernel(cuda, EKV_CUDA_KERNEL_ekv_occupy, &launch, (void *[]){ &ns }));
}

/* ---- The clock ------------------------------------------------------------------------------------------- */

enum { FLUSH_BYTES = 256 << 20 };

struct ekv_cuda_clock {
    ekv_context *context;
    void *flush; /* [FLUSH_BYTES] */
    uint8_t byte;
    CUevent begin, end;
};

static ekv_status start_clock(ekv_cuda_clock *clock)
{
    ekv_cuda *cuda = clock->context->cuda;
    ekv_status status;
    if ((status = allocate(cuda, FLUSH_BYTES, &clock->flush)) ||
        (status = EKV_CUDA_CALL(cuda, cuEventCreate, (&clock->begin, CU_EVENT_DEFAULT))) ||
        (status = EKV_CUDA_CALL(cuda, cuEventCreate, (&clock->end, CU_EVENT_DEFAULT))))
        return status;
    return EKV_OK;
}

ekv_status ekv_cuda_clock_create(ekv_context *context, ekv_cuda_clock **clock)
{
    ekv_cuda_clock *created = ekv_alloc(context, sizeof *created);
    if (!created)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a clock of %zu bytes", sizeof *created);
    *created = (ekv_cuda_clock){ .context = context };
    bool entered;
    ekv_status status = ekv_cuda_enter(context->cuda, &entered);
    if (!status) {
        status = start_clock(created);
        ekv_cuda_leave(context->cuda, entered);
    }
    if (status) {
        ekv_cuda_clock_free(created);
        return status;
    }
    *clock = created;
    return EKV_OK;
}

void ekv_cuda_clock_free(ekv_cuda_clock *clock)
{
    if (!clock)
        return;
    ekv_cuda *cuda = clock->context->cuda;
    if (clock->begin)
        cuda->driver.cuEventDestroy(clock->begin);
    if (clock->end)
        cuda->driver.cuEventDestroy(clock->end);
    ekv_cuda_free(clock->context, clock->flush);
    ekv_release(clock->context, clock);
}

static ekv_status time_work(ekv_cuda_clock *clock, CUstream stream, bool flush,
                            ekv_status (*work)(void *argument, void *stream), void *argument, double *us)
{
    ekv_cuda *cuda = clock->context->cuda;
    float ms = 0;
    ekv_status status;
    if ((flush && (status = EKV_CUDA_CALL(cuda, cuMemsetD8Async,
                                          (address(clock->flush), clock->byte++, FLUSH_BYTES, stream)))) ||
        (status = EKV_CUDA_CALL(cuda, cuEventRecord, (clock->begin, stream))) || (status = work(argument, stream)) ||
        (status = EKV_CUDA_CALL(cuda, cuEventRecord, (clock->end, stream))) ||
        (status = EKV_CUDA_CALL(cuda, cuEventSynchronize, (clock->end))) ||
        (status = EKV_CUDA_CALL(cuda, cuEventElapsedTime, (&ms, clock->begin, clock->end))))
        return status;
    *us = (double)ms * 1e3;
    return EKV_OK;
}

ekv_status ekv_cuda_clock_time(ekv_cuda_clock *clock, void *stream, bool flush,
                               ekv_status (*work)(void *argument, void *stream), void *argument, double *us)
{
    IN_CONTEXT(clock->context->cuda, time_work(clock, stream, flush, work, argument, us));
}

/* ---- Plain read ------------------------------------------------------------------------------------------ */

static const ekv_cuda_read_shape read_shapes[] = {
    { 128, 8, 8 }, { 128, 8, 16 }, { 256, 4, 8 }, { 256, 8, 4 },
    { 256, 8, 8 }, { 512, 2, 8 },  { 512, 4, 4 }, { 1024, 2, 4 },
};

int32_t ekv_cuda_read_shapes(const ekv_cuda_read_shape **shapes)
{
    *shapes = read_shapes;
    return (int32_t)(sizeof read_shapes / sizeof read_shapes[0]);
}

ekv_status ekv_cuda_read(ekv_context *context, const ekv_cuda_read_shape *shape, const void *device, size_t size,
                         void *sink, void *stream)
{
    ekv_cuda *cuda = context->cuda;
    const int32_t kernel = shape->loads == 4   ? EKV_CUDA_KERNEL_ekv_read_4
                           : shape->loads == 8 ? EKV_CUDA_KERNEL_ekv_read_8
                                               : EKV_CUDA_KERNEL_ekv_read_16;
    int64_t count = (int64_t)(size / 16);
    const ekv_cuda_launch launch = { .grid = { (uint32_t)(cuda->num_sms * shape->ctas_per_sm), 1, 1 },
                                     .threads = (uint32_t)shape->threads,
                                     .stream = stream };
    IN_CONTEXT(cuda, ekv_cuda_launch_kernel(cuda, kernel, &launch, (void *[]){ &device, &count, &sink }));
}

/* ---- Launches of a plan ---------------------------------------------------------------------------------- */

static ekv_status launch_info(const ekv_plan *plan, ekv_kernel kernel, ekv_cuda_launch_info *info)
{
    ekv_cuda *cuda = plan->context->cuda;
    ekv_cuda_shape shape;
    ekv_status status = ekv_cuda_shape_of(plan, kernel, &shape);
    if (status)
        return status;
    int resident = 0;
    if ((status = EKV_CUDA_CALL(cuda, cuOccupancyMaxActiveBlocksPerMultiprocessor,
                                (&resident, cuda->kernels[shape.index], shape.threads, (size_t)shape.shared_bytes))))
        return status;
    *info = (ekv_cuda_launch_info){ .kernel = ekv_cuda_kernel_name(shape.index),
                                    .warps_per_head = shape.warps_per_head,
                                    .threads = shape.threads,
                                    .shared_bytes = shape.shared_bytes,
                                    .resident_ctas = resident };
    return EKV_OK;
}

ekv_status ekv_cuda_launch_info_get(const ekv_plan *plan, ekv_kernel kernel, ekv_cuda_launch_info *info)
{
    IN_CONTEXT(plan->context->cuda, launch_info(plan, kernel, info));
}

int32_t ekv_cuda_driver_version(ekv_context *context)
{
    int version = 0;
    ((ekv_cuda *)context->cuda)->driver.cuDriverGetVersion(&version);
    return version;
}
