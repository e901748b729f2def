/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cuda_prepare.h"

#include "base/arena.h"
#include "base/status.h"
#include "cuda/cuda_plan.h"
#include "cuda/kernels/prepare.h"
#include "plan/planner_even.h"
#include "plan/planner_fa3.h"

/* CTAs of an emit kernel an SM, at most: beyond that they only take turns. */
enum { EMIT_CTAS_PER_SM = 16 };

/* ---- Memory ---------------------------------------------------------------------------------------------- */

typedef struct planning_memory {
    int32_t *bound;
    /* even, even-invariant */
    int32_t *kv_len;
    int64_t *cost;
    int32_t *partial, *cut;
    ekv_even_mark *marks;
    /* fa3 */
    ekv_fa3_work *works;
} planning_memory;

/* Device pointers; with a NULL base it only counts. */
static planning_memory lay_out(ekv_arena *arena, const ekv_plan *plan)
{
    const size_t requests = (size_t)plan->max_batch_size;
    const ekv_device_rule rule = plan->planner->device_rule;
    planning_memory m = { .bound = ekv_arena_take(arena, requests * sizeof *m.bound) };
    if (rule == EKV_DEVICE_RULE_FA3) {
        m.works = ekv_arena_take(arena, requests * sizeof *m.works);
        return m;
    }
    const size_t ctas = (size_t)plan->num_sms * (size_t)plan->resident_ctas;
    m.kv_len = ekv_arena_take(arena, requests * sizeof *m.kv_len);
    m.cost = ekv_arena_take(arena, (requests + 1) * sizeof *m.cost);
    m.marks = ekv_arena_take(arena, (ctas + 1) * sizeof *m.marks);
    if (rule == EKV_DEVICE_RULE_EVEN_INVARIANT) {
        m.partial = ekv_arena_take(arena, (requests + 1) * sizeof *m.partial);
        m.cut = ekv_arena_take(arena, (requests + 1) * sizeof *m.cut);
    }
    return m;
}

static planning_memory memory_of(const ekv_plan *plan)
{
    const ekv_cuda_plan *p = plan->cuda;
    ekv_arena arena = { (unsigned char *)(uintptr_t)p->planning, 0 };
    return lay_out(&arena, plan);
}

/* On a stream of its own: the default one would meddle with captures that go on elsewhere. */
static ekv_status copy_bounds(const ekv_plan *plan, ekv_cuda *cuda, CUdeviceptr bound)
{
    CUstream stream;
    ekv_status status = EKV_CUDA_CALL(cuda, cuStreamCreate, (&stream, CU_STREAM_NON_BLOCKING));
    if (status)
        return status;
    const size_t size = (size_t)plan->max_batch_size * sizeof *plan->kv_len;
    status = EKV_CUDA_CALL(cuda, cuMemcpyAsync, (bound, (CUdeviceptr)(uintptr_t)plan->kv_len, size, stream));
    if (!status)
        status = EKV_CUDA_CALL(cuda, cuStreamSynchronize, (stream));
    cuda->driver.cuStreamDestroy(stream);
    return status;
}

ekv_status ekv_cuda_prepare_create(ekv_plan *plan)
{
    ekv_cuda_plan *p = plan->cuda;
    ekv_arena arena = { NULL, 0 };
    lay_out(&arena, plan);
    ekv_status status = EKV_CUDA_CALL(p->cuda, cuMemAlloc, (&p->planning, arena.used));
    return status ? status : copy_bounds(plan, p->cuda, (CUdeviceptr)(uintptr_t)memory_of(plan).bound);
}

/* ---- Launches -------------------------------------------------------------------------------------------- */

/* The second kernel may start while the first one runs; it waits by itself.  emit_ctas 0: there is none. */
static ekv_status launch(ekv_cuda *cuda, int32_t prepare, int64_t prepare_ctas, int32_t emit, int64_t emit_ctas,
                         uint32_t emit_threads, CUstream stream, void *params)
{
    const int64_t most = (int64_t)cuda->num_sms * EMIT_CTAS_PER_SM;
    const ekv_cuda_launch first = { .grid = { (uint32_t)prepare_ctas, 1, 1 },
                                    .threads = EKV_PREPARE_THREADS,
                                    .stream = stream };
    const ekv_cuda_launch second = {
        .grid = { (uint32_t)ekv_min(emit_ctas, most), 1, 1 }, .threads = emit_threads, .stream = stream, .overlap = true
    };
    ekv_status status = ekv_cuda_launch_kernel(cuda, prepare, &first, &params);
    return status || !emit_ctas ? status : ekv_cuda_launch_kernel(cuda, emit, &second, &params);
}

static ekv_prepare_io io_of(const ekv_plan *plan, const planning_memory *memory, const int32_t *kv_len)
{
    const ekv_cuda_records records = ekv_cuda_records_of(plan);
    const bool ranges = plan->dispatch == EKV_DISPATCH_RANGE;
    return (ekv_prepare_io){ .kv_len = kv_len,
                             .bound = memory->bound,
                             .header = records.header,
                             .tiles = records.tiles,
                             .merges = records.merges,
                             .ctas = ranges ? records.ctas : NULL,
                             .num_ctas = ranges ? (int32_t)ekv_plan_num_ctas(plan) : 0 };
}

static ekv_status prepare_even(ekv_plan *plan, const int32_t *kv_len, CUstream stream)
{
    const planning_memory m = memory_of(plan);
    ekv_prepare_even_params params = { .io = io_of(plan, &m, kv_len),
                                       .line = ekv_even_line_of(plan),
                                       .kv_len = m.kv_len,
                                       .cost = m.cost,
                                       .partial = m.partial,
                                       .cut = m.cut,
                                       .marks = m.marks,
                                       .emit = plan->batch.batch_size <= EKV_EMIT_ALONE_REQUESTS };
    params.emit = params.emit && params.line.num_ctas <= EKV_EMIT_ALONE_CTAS;
    params.line.kv_len = NULL; /* the host's */
    const bool invariant = plan->planner->device_rule == EKV_DEVICE_RULE_EVEN_INVARIANT;
    return launch(((ekv_cuda_plan *)plan->cuda)->cuda,
                  invariant ? EKV_CUDA_KERNEL_ekv_prepare_even_invariant : EKV_CUDA_KERNEL_ekv_prepare_even, 1,
                  invariant ? EKV_CUDA_KERNEL_ekv_emit_even_invariant : EKV_CUDA_KERNEL_ekv_emit_even,
                  params.emit ? 0 : params.line.num_ctas, EKV_EMIT_EVEN_THREADS, stream, &params);
}

static ekv_status prepare_fa3(ekv_plan *plan, const int32_t *kv_len, CUstream stream)
{
    const planning_memory m = memory_of(plan);
    ekv_prepare_fa3_params params = { .io = io_of(plan, &m, kv_len),
                                      .shape = ekv_fa3_shape_of(plan),
                                      .works = m.works };
    const int64_t requests = plan->batch.batch_size;
    return launch(((ekv_cuda_plan *)plan->cuda)->cuda, EKV_CUDA_KERNEL_ekv_prepare_fa3,
                  ekv_ceil_div(requests, EKV_FA3_PREPARE_REQUESTS), EKV_CUDA_KERNEL_ekv_emit_fa3,
                  ekv_ceil_div(requests * 32, EKV_EMIT_FA3_THREADS), EKV_EMIT_FA3_THREADS, stream, &params);
}

ekv_status ekv_cuda_prepare(ekv_plan *plan, const int32_t *kv_len, void *stream)
{
    return plan->planner->device_rule == EKV_DEVICE_RULE_FA3 ? prepare_fa3(plan, kv_len, stream)
                                                             : prepare_even(plan, kv_len, stream);
}

ekv_status ekv_cuda_prepare_alone(ekv_plan *plan, const int32_t *kv_len, void *stream)
{
    ekv_cuda *cuda = ((ekv_cuda_plan *)plan->cuda)->cuda;
    bool entered;
    ekv_status status = ekv_cuda_enter(cuda, &entered);
    if (status)
        return status;
    status = ekv_cuda_prepare(plan, kv_len, stream);
    ekv_cuda_leave(cuda, entered);
    return status;
}

ekv_cuda_records ekv_cuda_records_of(const ekv_plan *plan)
{
    const ekv_cuda_plan *p = plan->cuda;
    char *records = (char *)(uintptr_t)p->records;
    return (ekv_cuda_records){ .size = p->layout.size,
                               .header = (ekv_plan_header *)(void *)records,
                               .tiles = (ekv_tile *)(void *)(records + p->layout.tiles),
                               .merges = (ekv_merge *)(void *)(records + p->layout.merges),
                               .ctas = (ekv_cta_record *)(void *)(records + p->layout.ctas) };
}
