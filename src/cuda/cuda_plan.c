/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cuda_plan.h"

#include "base/arena.h"
#include "base/status.h"
#include "cuda/cuda_prepare.h"
#include "cuda/kernels/args.h"
#include "cuda/kernels/mma_shape.h"

#include <stdint.h>
#include <string.h>

/* ---- Records --------------------------------------------------------------------------------------------- */

/* Offset of an array behind what has been laid out so far. */
static size_t take(size_t *used, int64_t count, size_t size)
{
    const size_t begin = (*used + EKV_ARENA_ALIGN - 1) / EKV_ARENA_ALIGN * EKV_ARENA_ALIGN;
    *used = begin + (size_t)count * size;
    return begin;
}

static ekv_records_layout lay_out_records(const ekv_plan *plan)
{
    const ekv_plan_capacity *c = &plan->capacity;
    size_t used = sizeof(ekv_plan_header);
    ekv_records_layout layout = { .ranges = c->ctas > 0 };
    layout.tiles = take(&used, c->tiles, sizeof(ekv_tile));
    layout.merges = take(&used, c->merges, sizeof(ekv_merge));
    layout.ctas = take(&used, layout.ranges ? c->ctas : 0, sizeof(ekv_cta_record));
    layout.size = take(&used, 0, 0);
    return layout;
}

/* The tiles as ekv_device_tile has them.  A tile's slot says which merge is its own. */
static void write_tiles(const ekv_plan *plan, int32_t *merge_of_slot, ekv_tile *tiles)
{
    for (int32_t m = 0; m < (int32_t)plan->num_merges; m++) {
        const ekv_merge *merge = &plan->merges[m];
        for (int32_t s = 0; s < merge->num_splits; s++)
            for (int32_t h = 0; h < merge->head_count; h++)
                merge_of_slot[ekv_merge_slot(merge, s) + h] = m;
    }
    for (int64_t i = 0; i < plan->num_tiles; i++) {
        const ekv_tile tile = plan->tiles[i];
        tiles[i] = ekv_device_tile(tile, tile.flags & EKV_TILE_PARTIAL ? merge_of_slot[tile.slot] : -1);
    }
}

static void write_records(const ekv_plan *plan, const ekv_cuda_plan *p, unsigned char *host)
{
    const ekv_records_layout *layout = &p->layout;
    const int64_t ctas = ekv_plan_num_ctas(plan);
    const bool ranges = plan->dispatch == EKV_DISPATCH_RANGE;
    const ekv_plan_header header = { .num_tiles = (int32_t)plan->num_tiles,
                                     .num_merges = (int32_t)plan->num_merges,
                                     .num_ctas = ranges ? (int32_t)ctas : 0,
                                     .batch_size = plan->batch.batch_size };
    memcpy(host, &header, sizeof header);
    ekv_tile *tiles = (ekv_tile *)(void *)(host + layout->tiles);
    write_tiles(plan, p->merge_of_slot, tiles);
    if (plan->num_merges)
        memcpy(host + layout->merges, plan->merges, (size_t)plan->num_merges * sizeof *plan->merges);
    ekv_cta_record *records = (ekv_cta_record *)(void *)(host + layout->ctas);
    for (int64_t i = 0; ranges && i < ctas; i++) {
        const int64_t begin = plan->cta_begin[i], end = plan->cta_begin[i + 1];
        records[i] = (ekv_cta_record){ .tile_begin = (int32_t)begin, .tile_end = (int32_t)end };
        if (begin < end)
            records[i].first = tiles[begin];
    }
}

static void set_max_kv_len(const ekv_plan *plan, ekv_cuda_plan *p)
{
    p->max_kv_len = 0;
    for (int32_t b = 0; b < plan->batch.batch_size; b++)
        p->max_kv_len = plan->kv_len[b] > p->max_kv_len ? plan->kv_len[b] : p->max_kv_len;
}

/* ---- Creation and end ------------------------------------------------------------------------------------ */

static void release(ekv_cuda_plan *p)
{
    ekv_cuda *cuda = p->cuda;
    bool entered = false;
    if (!ekv_cuda_enter(cuda, &entered)) {
        for (int32_t i = 0; i < EKV_NUM_STAGING; i++)
            if (p->staging[i].copied)
                cuda->driver.cuEventDestroy(p->staging[i].copied);
        if (p->transferred)
            cuda->driver.cuEventDestroy(p->transferred);
        if (p->records)
            cuda->driver.cuMemFree(p->records); /* waits for the kernels that use it */
        if (p->counters)
            cuda->driver.cuMemFree(p->counters);
        if (p->planning)
            cuda->driver.cuMemFree(p->planning);
        if (p->staging[0].host)
            cuda->driver.cuMemFreeHost(p->staging[0].host);
        ekv_cuda_leave(cuda, entered);
    }
    ekv_release(cuda->context, p->merge_of_slot);
    ekv_release(cuda->context, p);
}

static ekv_status allocate_staging(ekv_cuda_plan *p)
{
    ekv_cuda *cuda = p->cuda;
    void *host = NULL;
    CUdeviceptr mapped = 0;
    ekv_status status;
    if ((status =
             EKV_CUDA_CALL(cuda, cuMemHostAlloc, (&host, EKV_NUM_STAGING * p->layout.size, CU_MEMHOSTALLOC_DEVICEMAP))))
        return status;
    p->staging[0].host = host;
    if ((status = EKV_CUDA_CALL(cuda, cuMemHostGetDevicePointer, (&mapped, host, 0))) ||
        (status = EKV_CUDA_CALL(cuda, cuEventCreate, (&p->transferred, CU_EVENT_DISABLE_TIMING))))
        return status;
    for (size_t i = 0; i < EKV_NUM_STAGING; i++) {
        p->staging[i].host = (unsigned char *)host + i * p->layout.size;
        p->staging[i].mapped = mapped + i * p->layout.size;
        if ((status = EKV_CUDA_CALL(cuda, cuEventCreate, (&p->staging[i].copied, CU_EVENT_DISABLE_TIMING))))
            return status;
    }
    return EKV_OK;
}

/* Set to 0 on a stream of its own: the default one would meddle with captures that go on elsewhere. */
static ekv_status allocate_counters(ekv_plan *plan)
{
    ekv_cuda_plan *p = plan->cuda;
    ekv_cuda *cuda = p->cuda;
    const size_t count = 1 + (size_t)plan->capacity.slots * (size_t)ekv_max(p->most_warps_per_head, 1);
    CUstream stream;
    ekv_status status;
    if ((status = EKV_CUDA_CALL(cuda, cuMemAlloc, (&p->counters, count * sizeof(uint32_t)))) ||
        (status = EKV_CUDA_CALL(cuda, cuStreamCreate, (&stream, CU_STREAM_NON_BLOCKING))))
        return status;
    status = EKV_CUDA_CALL(cuda, cuMemsetD32Async, (p->counters, 0, count, stream));
    if (!status)
        status = EKV_CUDA_CALL(cuda, cuStreamSynchronize, (stream));
    cuda->driver.cuStreamDestroy(stream);
    return status;
}

static ekv_status allocate(ekv_plan *plan)
{
    ekv_cuda_plan *p = plan->cuda;
    ekv_status status = EKV_CUDA_CALL(p->cuda, cuMemAlloc, (&p->records, p->layout.size));
    if (status || (status = allocate_counters(plan)))
        return status;
    return plan->options.on_device ? ekv_cuda_prepare_create(plan) : allocate_staging(p);
}

static ekv_status create(ekv_plan *plan)
{
    ekv_cuda *cuda = plan->context->cuda;
    ekv_cuda_plan *p = ekv_alloc(plan->context, sizeof *p);
    if (!p)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a plan's GPU copy of %zu bytes", sizeof *p);
    memset(p, 0, sizeof *p);
    p->cuda = cuda;
    p->layout = lay_out_records(plan);
    p->tile_heads = plan->tiles[0].head_count;
    p->most_warps_per_head = ekv_mma_warps_per_head(plan->batch.head_dim, p->tile_heads);
    const size_t slots_size = (size_t)ekv_max(plan->capacity.slots, 1) * sizeof *p->merge_of_slot;
    if (!plan->options.on_device && !(p->merge_of_slot = ekv_alloc(plan->context, slots_size))) {
        ekv_release(plan->context, p);
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for an index of partial slots of %zu bytes", slots_size);
    }
    plan->cuda = p;
    bool entered;
    ekv_status status = ekv_cuda_enter(cuda, &entered);
    if (!status) {
        status = allocate(plan);
        ekv_cuda_leave(cuda, entered);
    }
    if (status) {
        plan->cuda = NULL;
        release(p);
        return status;
    }
    if (!plan->options.on_device)
        write_records(plan, p, p->staging[0].host);
    set_max_kv_len(plan, p);
    return EKV_OK;
}

static void destroy(ekv_plan *plan)
{
    release(plan->cuda);
    plan->cuda = NULL;
}

/* ---- Update ---------------------------------------------------------------------------------------------- */

/* An event that was never recorded counts as over. */
static ekv_status begin_update(ekv_plan *plan)
{
    ekv_cuda_plan *p = plan->cuda;
    bool entered;
    ekv_status status = ekv_cuda_enter(p->cuda, &entered);
    if (status)
        return status;
    /* Records that no decode has asked for are overwritten in place. */
    const int32_t next = p->uploaded ? 1 - p->latest : p->latest;
    status = EKV_CUDA_CALL(p->cuda, cuEventSynchronize, (p->staging[next].copied));
    if (!status && p->captured)
        status = EKV_CUDA_CALL(p->cuda, cuEventSynchronize, (p->staging[EKV_STAGING_CAPTURED].copied));
    ekv_cuda_leave(p->cuda, entered);
    if (status)
        return status;
    p->latest = next;
    p->uploaded = false;
    return EKV_OK;
}

static void end_update(ekv_plan *plan)
{
    ekv_cuda_plan *p = plan->cuda;
    write_records(plan, p, p->staging[p->latest].host);
    if (p->captured)
        write_records(plan, p, p->staging[EKV_STAGING_CAPTURED].host);
    set_max_kv_len(plan, p);
}

const ekv_plan_copies ekv_cuda_plan_copies = {
    .create = create,
    .free = destroy,
    .begin_update = begin_update,
    .end_update = end_update,
};

/* ---- Transfer -------------------------------------------------------------------------------------------- */

static ekv_status enqueue_transfer(ekv_cuda_plan *p, const ekv_staging *staging, CUstream stream)
{
    ekv_upload_params params = { .source = (const void *)(uintptr_t)staging->mapped,
                                 .target = (void *)(uintptr_t)p->records,
                                 .tiles_offset = (int64_t)p->layout.tiles,
                                 .merges_offset = (int64_t)p->layout.merges,
                                 .ctas_offset = p->layout.ranges ? (int64_t)p->layout.ctas : -1 };
    /* 64 x 256 threads ask for 256 KB at once, enough for a PCIe link. */
    const ekv_cuda_launch launch = { .grid = { 64, 1, 1 }, .threads = 256, .stream = stream };
    void *parameters[] = { &params };
    return ekv_cuda_launch_kernel(p->cuda, EKV_CUDA_KERNEL_ekv_plan_upload, &launch, parameters);
}

/* Outside a capture: once for each update, on the first stream that comes; the others wait for that. */
static ekv_status transfer_now(ekv_cuda_plan *p, CUstream stream)
{
    ekv_cuda *cuda = p->cuda;
    const ekv_staging *staging = &p->staging[p->latest];
    unsigned long long id;
    ekv_status status = EKV_CUDA_CALL(cuda, cuStreamGetId, (stream, &id));
    if (status)
        return status;
    if (p->uploaded)
        return id == p->upload_stream ? EKV_OK : EKV_CUDA_CALL(cuda, cuStreamWaitEvent, (stream, staging->copied, 0));
    if ((status = enqueue_transfer(p, staging, stream)) ||
        (status = EKV_CUDA_CALL(cuda, cuEventRecord, (staging->copied, stream))))
        return status;
    p->uploaded = true;
    p->upload_stream = id;
    return EKV_OK;
}

/* In a capture: once for each capture.  `copied` becomes an event node, which each replay records anew. */
static ekv_status transfer_captured(ekv_plan *plan, CUstream stream, cuuint64_t capture)
{
    ekv_cuda_plan *p = plan->cuda;
    ekv_cuda *cuda = p->cuda;
    const ekv_staging *staging = &p->staging[EKV_STAGING_CAPTURED];
    ekv_status status;
    if (p->captured && capture == p->capture)
        return stream == p->origin ? EKV_OK : EKV_CUDA_CALL(cuda, cuStreamWaitEvent, (stream, p->transferred, 0));
    if (!p->captured)
        write_records(plan, p, staging->host);
    if ((status = enqueue_transfer(p, staging, stream)) ||
        (status = EKV_CUDA_CALL(cuda, cuEventRecordWithFlags, (staging->copied, stream, CU_EVENT_RECORD_EXTERNAL))) ||
        (status = EKV_CUDA_CALL(cuda, cuEventRecord, (p->transferred, stream))))
        return status;
    p->captured = true;
    p->capture = capture;
    p->origin = stream;
    return EKV_OK;
}

ekv_status ekv_cuda_plan_transfer(ekv_plan *plan, CUstream stream, bool *capturing)
{
    ekv_cuda_plan *p = plan->cuda;
    CUstreamCaptureStatus capture_status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t capture = 0;
    ekv_status status = ekv_driver_status(
        &p->cuda->driver, p->cuda->driver.stream_capture_info(stream, &capture_status, &capture, NULL, NULL, NULL),
        "cuStreamGetCaptureInfo");
    if (status)
        return status;
    if (capture_status == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
        return ekv_fail(EKV_ERROR_DRIVER, "the capture of the stream was invalidated before");
    *capturing = capture_status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return *capturing ? transfer_captured(plan, stream, capture) : transfer_now(p, stream);
}
