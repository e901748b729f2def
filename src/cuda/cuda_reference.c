/* SPDX-License-Identifier: Apache-2.0
 * Runs the reference kernels: chunks of every request, then their merge. */
#include "base/arena.h"
#include "base/status.h"
#include "cuda/cuda_bench.h"
#include "cuda/cuda_decode.h"
#include "cuda/kernels/args.h"

#include <math.h>
#include <string.h>

/* Long enough that partial results are little beside K and V, short enough that a single request fills a GPU. */
enum { CHUNK_TOKENS = 2048 };

typedef struct reference_run {
    ekv_cuda *cuda;
    const ekv_batch *batch;
    int64_t num_chunks;
    size_t rows;                 /* batch_size * q_heads */
    ekv_reference_chunk *chunks; /* host, [num_chunks], then first_chunk */
    int32_t *first_chunk;        /* host, [batch_size + 1] */
    void *device;
    size_t lists_size; /* bytes of the lists, at the beginning of the device memory */
    ekv_reference_params params;
} reference_run;

/* Lists first, as on the host; with a NULL base it only counts. */
static void lay_out(ekv_arena *arena, reference_run *run)
{
    const ekv_batch *batch = run->batch;
    ekv_reference_params *p = &run->params;
    p->chunks = ekv_arena_take(arena, (size_t)run->num_chunks * sizeof *p->chunks);
    p->first_chunk = ekv_arena_take(arena, ((size_t)batch->batch_size + 1) * sizeof *p->first_chunk);
    run->lists_size = arena->used;
    p->parts = ekv_arena_take(arena, (size_t)run->num_chunks * (size_t)batch->q_heads *
                                         (size_t)(EKV_REFERENCE_O + 2 * batch->head_dim) * sizeof(double));
    p->o = ekv_arena_take(arena, run->rows * (size_t)batch->head_dim * sizeof(double));
    p->lse = ekv_arena_take(arena, run->rows * sizeof(double));
    p->scale = ekv_arena_take(arena, run->rows * 3 * sizeof(double));
}

static void list_chunks(reference_run *run)
{
    const ekv_batch *batch = run->batch;
    int32_t n = 0;
    for (int32_t b = 0; b < batch->batch_size; b++) {
        run->first_chunk[b] = n;
        for (int64_t begin = 0; begin < batch->kv_len[b]; begin += CHUNK_TOKENS)
            run->chunks[n++] = (ekv_reference_chunk){ .request = b,
                                                      .begin = (int32_t)begin,
                                                      .end = (int32_t)ekv_min(begin + CHUNK_TOKENS, batch->kv_len[b]) };
    }
    run->first_chunk[batch->batch_size] = n;
}

static ekv_status launch(reference_run *run, int32_t kernel, int64_t columns, uint32_t threads)
{
    const ekv_cuda_launch launch = { .grid = { (uint32_t)columns, (uint32_t)run->batch->q_heads, 1 },
                                     .threads = threads };
    return columns ? ekv_cuda_launch_kernel(run->cuda, kernel, &launch, (void *[]){ &run->params }) : EKV_OK;
}

static ekv_status execute(reference_run *run, double *o, double *lse, double *scale)
{
    ekv_context *context = run->cuda->context;
    const bool bf16 = run->batch->kv_dtype == EKV_DTYPE_BF16;
    ekv_status status;
    if ((status = ekv_cuda_copy(context, run->device, run->chunks, run->lists_size)) ||
        (status = launch(run, bf16 ? EKV_CUDA_KERNEL_ekv_reference_bf16 : EKV_CUDA_KERNEL_ekv_reference_f16,
                         run->num_chunks, 128)) ||
        (status = launch(run, EKV_CUDA_KERNEL_ekv_reference_merge, run->batch->batch_size, 32)) ||
        (status = ekv_cuda_copy(context, o, run->params.o, run->rows * (size_t)run->batch->head_dim * sizeof *o)) ||
        (status = ekv_cuda_copy(context, lse, run->params.lse, run->rows * sizeof *lse)) ||
        (status = ekv_cuda_copy(context, scale, run->params.scale, run->rows * 3 * sizeof *scale)))
        return status;
    return EKV_OK;
}

static ekv_status check(const ekv_batch *batch)
{
    if (batch->head_dim > EKV_REFERENCE_MAX_DIM)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "head_dim %d: the GPU reference takes at most %d", batch->head_dim,
                        EKV_REFERENCE_MAX_DIM);
    if (batch->q_dtype != batch->kv_dtype || (batch->kv_dtype != EKV_DTYPE_BF16 && batch->kv_dtype != EKV_DTYPE_F16))
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "q_dtype %d, kv_dtype %d: the GPU reference takes bf16 or fp16",
                        (int)batch->q_dtype, (int)batch->kv_dtype);
    return EKV_OK;
}

static void set_params(reference_run *run, const ekv_tensors *t)
{
    const ekv_plan plan = { .batch = *run->batch, .group = run->batch->q_heads / run->batch->kv_heads };
    ekv_cuda_tensor_params(&plan, t, &run->params.tensors);
    run->params.sm_scale = t->sm_scale;
    run->params.q_heads = run->batch->q_heads;
}

ekv_status ekv_cuda_reference(ekv_context *context, const ekv_batch *batch, const ekv_tensors *tensors, double *o,
                              double *lse, double *scale)
{
    reference_run run = { .cuda = context->cuda,
                          .batch = batch,
                          .rows = (size_t)batch->batch_size * (size_t)batch->q_heads };
    ekv_status status = check(batch);
    if (status)
        return status;
    for (int32_t b = 0; b < batch->batch_size; b++)
        run.num_chunks += ekv_ceil_div(batch->kv_len[b], CHUNK_TOKENS);
    ekv_arena arena = { NULL, 0 };
    lay_out(&arena, &run);
    unsigned char *lists = ekv_alloc(context, run.lists_size);
    if (!lists)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for %zu bytes of reference chunks", run.lists_size);
    ekv_arena host = { lists, 0 };
    run.chunks = ekv_arena_take(&host, (size_t)run.num_chunks * sizeof *run.chunks);
    run.first_chunk = ekv_arena_take(&host, ((size_t)batch->batch_size + 1) * sizeof *run.first_chunk);
    list_chunks(&run);
    bool entered;
    if (!(status = ekv_cuda_alloc(context, arena.used, &run.device)) &&
        !(status = ekv_cuda_enter(run.cuda, &entered))) {
        arena = (ekv_arena){ run.device, 0 };
        lay_out(&arena, &run);
        set_params(&run, tensors);
        status = execute(&run, o, lse, scale);
        ekv_cuda_leave(run.cuda, entered);
    }
    ekv_cuda_free(context, run.device);
    ekv_release(context, lists);
    return status;
}
