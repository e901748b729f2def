/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cuda_decode.h"

#include "base/arena.h"
#include "base/status.h"
#include "cuda/cuda_prepare.h"
#include "cuda/kernels/merge_shape.h"
#include "cuda/kernels/mma_shape.h"
#include "cuda/kernels/simt_shape.h"

#include <inttypes.h>
#include <math.h>

enum {
    MAX_GROUP = 16,
    VECTOR = 16, /* bytes of a load: rows and base pointers are aligned to it */
};

/* ---- Which kernel, in which shape ------------------------------------------------------------------------ */

typedef struct variant {
    ekv_kernel kernel;
    ekv_dtype dtype;
    int32_t head_dim;
    int32_t rows;
} variant;

/* In the order of variants.def, whose decode kernels come first. */
static const variant variants[] = {
#define DTYPE(bf16) (bf16 ? EKV_DTYPE_BF16 : EKV_DTYPE_F16)
#define EKV_MMA_KERNEL(name, bf16, head_dim, rows) { EKV_KERNEL_MMA, DTYPE(bf16), head_dim, rows },
#define EKV_SIMT_KERNEL(name, bf16, head_dim, rows) { EKV_KERNEL_SIMT, DTYPE(bf16), head_dim, rows },
#include "cuda/variants.def"
#undef DTYPE
};

enum { NUM_VARIANTS = sizeof variants / sizeof variants[0] };

/* Rows of Q that a tile has for each of its heads. */
static int32_t tile_rows(const ekv_plan *plan)
{
    return plan->heads == plan->batch.kv_heads ? plan->group : 1;
}

/* Pages hold whole groups of 16 tokens, and tiles begin with one. */
static bool pages_aligned(const ekv_plan *plan)
{
    return plan->batch.page_size % 16 == 0 && plan->cut_tokens % 16 == 0;
}

static ekv_status find_variant(const ekv_plan *plan, ekv_kernel kernel, int32_t *index)
{
    const int32_t rows = kernel == EKV_KERNEL_MMA ? (tile_rows(plan) <= 8 ? 8 : 16) : ekv_simt_rows(tile_rows(plan));
    for (int32_t i = 0; i < NUM_VARIANTS; i++)
        if (variants[i].kernel == kernel && variants[i].dtype == plan->batch.kv_dtype &&
            variants[i].head_dim == plan->batch.head_dim && variants[i].rows == rows) {
            *index = i;
            return EKV_OK;
        }
    return ekv_fail(EKV_ERROR_UNSUPPORTED, "no CUDA kernel for head_dim %d and group %d", plan->batch.head_dim,
                    tile_rows(plan));
}

/* Whether so many CTAs of this shape fit an SM.  Fills in the rest of the shape; the rounds take what is left of the
 * shared memory.  Of pages that blocks do not fit the scout looks up 128 tokens at a time, and that is whole rounds. */
static bool fits_sm(const ekv_plan *plan, int32_t ctas, int32_t per_head, int32_t stages, ekv_cuda_shape *shape)
{
    const ekv_cuda *cuda = ((const ekv_cuda_plan *)plan->cuda)->cuda;
    const int32_t head_dim = plan->batch.head_dim, block = ekv_mma_block_tokens(head_dim);
    const int32_t heads = ((const ekv_cuda_plan *)plan->cuda)->tile_heads, warps = heads * per_head;
    if (ctas * (warps + 1) > cuda->resident_warps[shape->index])
        return false;
    for (int32_t blocks = EKV_MMA_MOST_BLOCKS; blocks >= EKV_MMA_LEAST_BLOCKS; blocks /= 2) {
        const int32_t tokens = (int32_t)ekv_min(blocks * block, pages_aligned(plan) ? 512 : 128);
        const int32_t shared =
            ekv_mma_shared_bytes(head_dim, variants[shape->index].rows, heads, per_head, stages, tokens);
        if (shared > cuda->cta_shared || (int64_t)ctas * (shared + cuda->shared_of_cta) > cuda->sm_shared)
            continue;
        shape->round_tokens = tokens;
        shape->stages = stages;
        shape->threads = (warps + 1) * 32;
        shape->shared_bytes = shared;
        shape->resident_ctas = ctas;
        return true;
    }
    return false;
}

/* As many warps a head as fit, powers of two, while the plan's resident CTAs still fit an SM, rather with fewer
 * stages than with fewer warps; where even one warp a head is too much for that, as many CTAs as fit. */
static ekv_status shape_mma(const ekv_plan *plan, ekv_cuda_shape *shape)
{
    const ekv_cuda_plan *p = plan->cuda;
    for (int32_t ctas = plan->resident_ctas; ctas >= 1; ctas--)
        for (int32_t per_head = p->most_warps_per_head; per_head >= 1; per_head /= 2)
            for (int32_t stages = ekv_mma_stages(ctas); stages >= 1; stages--)
                if (fits_sm(plan, ctas, per_head, stages, shape)) {
                    shape->warps_per_head = per_head;
                    return EKV_OK;
                }
    return ekv_fail(EKV_ERROR_UNSUPPORTED,
                    "%d heads a tile of head_dim %d: a CTA has at most %d warps and %d bytes of shared memory; "
                    "heads_per_tile sets the heads",
                    p->tile_heads, plan->batch.head_dim, EKV_MMA_WARPS_AT(plan->batch.head_dim), p->cuda->cta_shared);
}

ekv_status ekv_cuda_shape_of(const ekv_plan *plan, ekv_kernel kernel, ekv_cuda_shape *shape)
{
    *shape = (ekv_cuda_shape){ .kernel = kernel == EKV_KERNEL_AUTO ? EKV_KERNEL_MMA : kernel };
    ekv_status status = find_variant(plan, shape->kernel, &shape->index);
    if (status)
        return status;
    if (shape->kernel == EKV_KERNEL_MMA)
        return shape_mma(plan, shape);
    const int32_t tile_heads = ((const ekv_cuda_plan *)plan->cuda)->tile_heads;
    if (tile_heads != 1)
        return ekv_fail(EKV_ERROR_UNSUPPORTED,
                        "%d heads a tile: the simt kernels do one; heads_per_tile sets the heads", tile_heads);
    shape->warps_per_head = 1;
    shape->threads = EKV_SIMT_THREADS;
    shape->resident_ctas = plan->resident_ctas;
    return EKV_OK;
}

/* ---- What is supported ----------------------------------------------------------------------------------- */

static ekv_status check_plan(const ekv_plan *plan)
{
    const ekv_batch *batch = &plan->batch;
    if (!plan->cuda)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "the plan was made without options.cuda");
    if (batch->kv_dtype != EKV_DTYPE_BF16 && batch->kv_dtype != EKV_DTYPE_F16)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "kv_dtype %d: the CUDA backend has kernels for bf16 and fp16",
                        (int)batch->kv_dtype);
    if (batch->q_dtype != batch->kv_dtype)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "q_dtype %d with kv_dtype %d: the CUDA backend wants them equal",
                        (int)batch->q_dtype, (int)batch->kv_dtype);
    if (batch->head_dim != 64 && batch->head_dim != 128 && batch->head_dim != 256)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "head_dim %d: the CUDA backend has kernels for 64, 128 and 256",
                        batch->head_dim);
    if (tile_rows(plan) > MAX_GROUP)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "%d query heads a KV head: the CUDA backend packs at most %d",
                        tile_rows(plan), MAX_GROUP);
    if (plan->m_blocks != 1)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "%d m_blocks: the CUDA backend does one", plan->m_blocks);
    return EKV_OK;
}

static ekv_status check_base(const void *pointer, const char *name)
{
    if ((uintptr_t)pointer % VECTOR)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "tensors.%s is %p; the CUDA backend wants it aligned to %d bytes", name,
                        pointer, VECTOR);
    return EKV_OK;
}

static ekv_status check_stride(int64_t stride, const char *name)
{
    if (stride % (VECTOR / 2))
        return ekv_fail(EKV_ERROR_UNSUPPORTED,
                        "tensors.%s is %" PRId64 "; the CUDA backend wants a multiple of %d elements", name, stride,
                        VECTOR / 2);
    return EKV_OK;
}

static ekv_status check_tensors(const ekv_plan *plan, const ekv_tensors *t)
{
    const ekv_cuda_plan *p = plan->cuda;
    ekv_status status;
    if ((status = check_base(t->q, "q")) || (status = check_base(t->k, "k")) || (status = check_base(t->v, "v")) ||
        (status = check_base(t->o, "o")) || (status = check_stride(t->q_stride_request, "q_stride_request")) ||
        (status = check_stride(t->q_stride_head, "q_stride_head")) ||
        (status = check_stride(t->k_stride_page, "k_stride_page")) ||
        (status = check_stride(t->k_stride_token, "k_stride_token")) ||
        (status = check_stride(t->k_stride_head, "k_stride_head")) ||
        (status = check_stride(t->v_stride_page, "v_stride_page")) ||
        (status = check_stride(t->v_stride_token, "v_stride_token")) ||
        (status = check_stride(t->v_stride_head, "v_stride_head")) ||
        (status = check_stride(t->o_stride_request, "o_stride_request")) ||
        (status = check_stride(t->o_stride_head, "o_stride_head")))
        return status;
    if (t->kv_len && !plan->options.on_device)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "tensors.kv_len: lengths on the device go with an on-device plan");
    if ((uintptr_t)t->kv_len % sizeof *t->kv_len)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "tensors.kv_len is %p; it must be aligned to %zu bytes",
                        (const void *)t->kv_len, sizeof *t->kv_len);
    const int64_t pages = ekv_ceil_div(p->max_kv_len, plan->batch.page_size);
    if (t->block_table && pages > t->block_table_width)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                        "block_table_width is %d; kv_len %d needs %" PRId64 " pages of %d tokens", t->block_table_width,
                        p->max_kv_len, pages, plan->batch.page_size);
    return EKV_OK;
}

ekv_status ekv_cuda_supports(const ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options)
{
    ekv_cuda_shape shape;
    ekv_status status;
    if ((status = check_plan(plan)) || (status = ekv_cuda_shape_of(plan, options->kernel, &shape)))
        return status;
    return tensors ? check_tensors(plan, tensors) : EKV_OK;
}

/* ---- Workspace ------------------------------------------------------------------------------------------- */

typedef struct partials {
    float *part_o;
    float *part_ml;
} partials;

/* Of mma kernels and the others alike: the kernel is not known when the caller asks for the size. */
static partials lay_out_workspace(ekv_arena *arena, const ekv_plan *plan)
{
    const size_t slots = (size_t)plan->capacity.slots, rows = tile_rows(plan) <= 8 ? 8 : 16;
    const size_t warps_per_head = (size_t)((const ekv_cuda_plan *)plan->cuda)->most_warps_per_head;
    partials w;
    w.part_o = ekv_arena_take(arena, slots * rows * (size_t)plan->batch.head_dim * sizeof *w.part_o);
    w.part_ml = ekv_arena_take(arena, slots * warps_per_head * rows * 2 * sizeof *w.part_ml);
    return w;
}

ekv_status ekv_cuda_workspace_size(const ekv_plan *plan, size_t *size)
{
    ekv_arena arena = { NULL, 0 };
    lay_out_workspace(&arena, plan);
    *size = arena.used;
    return EKV_OK;
}

/* ---- Launches -------------------------------------------------------------------------------------------- */

void ekv_cuda_tensor_params(const ekv_plan *plan, const ekv_tensors *t, ekv_kernel_params *params)
{
    *params = (ekv_kernel_params){
        .q = t->q,
        .k = t->k,
        .v = t->v,
        .o = t->o,
        .lse = t->lse,
        .q_stride_request = t->q_stride_request,
        .q_stride_head = t->q_stride_head,
        .k_stride_page = t->k_stride_page,
        .k_stride_token = t->k_stride_token,
        .k_stride_head = t->k_stride_head,
        .v_stride_page = t->v_stride_page,
        .v_stride_token = t->v_stride_token,
        .v_stride_head = t->v_stride_head,
        .o_stride_request = t->o_stride_request,
        .o_stride_head = t->o_stride_head,
        .lse_stride_request = t->lse_stride_request,
        .lse_stride_head = t->lse_stride_head,
        .page_indptr = t->page_indptr,
        .page_indices = t->page_indptr ? t->page_indices : t->block_table,
        .table_rows = t->block_table_rows,
        .table_stride = t->block_table_stride,
        .page_size = plan->batch.page_size,
        .head_dim = plan->batch.head_dim,
        .group = plan->group,
    };
}

static void fill_params(const ekv_plan *plan, const ekv_tensors *t, const ekv_decode_options *options,
                        const ekv_cuda_shape *shape, const partials *w, ekv_kernel_params *params)
{
    const ekv_cuda_plan *p = plan->cuda;
    const char *records = (const char *)(uintptr_t)p->records;
    ekv_cuda_tensor_params(plan, t, params);
    params->header = (const ekv_plan_header *)(const void *)records;
    params->tiles = (const ekv_tile *)(const void *)(records + p->layout.tiles);
    params->merges = (const ekv_merge *)(const void *)(records + p->layout.merges);
    params->ctas = (const ekv_cta_record *)(const void *)(records + p->layout.ctas);
    params->queue = (uint32_t *)(uintptr_t)p->counters;
    params->arrivals = params->queue + 1;
    params->part_o = w->part_o;
    params->part_ml = w->part_ml;
    params->scale_log2 = (float)(fabs((double)t->sm_scale) * M_LOG2E);
    params->q_signs = t->sm_scale < 0 ? 0x80008000u : 0;
    params->lse_factor = options->lse_base == EKV_LSE_BASE2 ? 1.0f : (float)M_LN2;
    params->dispatch = plan->dispatch;
    params->query_heads_tiled = plan->heads != plan->batch.kv_heads;
    params->slot_rows = ekv_plan_slot_rows(plan);
    params->merge_heads = plan->heads;
    params->warps_per_head = shape->warps_per_head;
    params->stages = shape->stages;
    params->round_tokens = shape->round_tokens;
    params->pages_aligned = pages_aligned(plan);
}

/* largest: for all that the plan can become, not for what it is.  overlap: mma kernels may take their places while the
 * kernel before runs, and wait for it by themselves. */
static ekv_status launch_tiles(ekv_plan *plan, const ekv_cuda_shape *shape, CUstream stream, bool largest, bool overlap,
                               ekv_kernel_params *params)
{
    ekv_cuda *cuda = ((ekv_cuda_plan *)plan->cuda)->cuda;
    const int64_t tiles = largest ? plan->capacity.tiles : plan->num_tiles;
    const int64_t ctas = plan->dispatch == EKV_DISPATCH_GRID ? tiles : ekv_plan_num_ctas(plan);
    const ekv_cuda_launch launch = { .grid = { (uint32_t)ctas, 1, 1 },
                                     .threads = (uint32_t)shape->threads,
                                     .shared_bytes = (uint32_t)shape->shared_bytes,
                                     .stream = stream,
                                     .overlap = overlap };
    return ekv_cuda_launch_kernel(cuda, shape->index, &launch, (void *[]){ params });
}

/* What simt kernels leave to merge; mma kernels do it themselves. */
static ekv_status launch_merges(ekv_plan *plan, CUstream stream, bool largest, ekv_kernel_params *params)
{
    ekv_cuda *cuda = ((ekv_cuda_plan *)plan->cuda)->cuda;
    const int64_t merges = largest ? plan->capacity.merges : plan->num_merges;
    if (!merges)
        return EKV_OK;
    const int64_t units = merges * params->merge_heads * params->slot_rows;
    const int64_t ctas = ekv_min(units, (int64_t)plan->num_sms * EKV_MERGE_CTAS_PER_SM);
    const ekv_cuda_launch launch = {
        .grid = { (uint32_t)ctas, 1, 1 }, .threads = EKV_MERGE_THREADS, .stream = stream, .overlap = true
    };
    const int32_t kernel =
        plan->batch.q_dtype == EKV_DTYPE_BF16 ? EKV_CUDA_KERNEL_ekv_merge_bf16 : EKV_CUDA_KERNEL_ekv_merge_f16;
    return ekv_cuda_launch_kernel(cuda, kernel, &launch, (void *[]){ params });
}

/* A stream of another context cannot reach this one's memory. */
static ekv_status check_stream(ekv_cuda *cuda, CUstream stream)
{
    if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
        return EKV_OK;
    CUcontext context;
    ekv_status status = EKV_CUDA_CALL(cuda, cuStreamGetCtx, (stream, &context));
    if (!status && context != cuda->current)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "stream %p belongs to another CUDA context than the plan",
                        (void *)stream);
    return status;
}

/* Without lengths, the records that an earlier decode wrote are used again. */
static ekv_status plan_on_device(ekv_plan *plan, const int32_t *kv_len, CUstream stream)
{
    ekv_cuda_plan *p = plan->cuda;
    if (!kv_len)
        return p->planned ? EKV_OK
                          : ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                                     "tensors.kv_len is NULL; the first decode of an on-device plan needs lengths");
    ekv_status status = ekv_cuda_prepare(plan, kv_len, stream);
    p->planned = p->planned || !status;
    return status;
}

/* kv_len: of the tensors.  Launches must be as large as the plan can become where its records change without the
 * launch: in a graph, and where a GPU writes them. */
static ekv_status enqueue(ekv_plan *plan, const ekv_cuda_shape *shape, const int32_t *kv_len, CUstream stream,
                          ekv_kernel_params *params)
{
    ekv_cuda_plan *p = plan->cuda;
    bool largest = true;
    ekv_status status = check_stream(p->cuda, stream);
    if (!status)
        status = plan->options.on_device ? plan_on_device(plan, kv_len, stream)
                                         : ekv_cuda_plan_transfer(plan, stream, &largest);
    if (!status)
        status = launch_tiles(plan, shape, stream, largest,
                              plan->options.on_device && kv_len && shape->kernel == EKV_KERNEL_MMA, params);
    return status || shape->kernel == EKV_KERNEL_MMA ? status : launch_merges(plan, stream, largest, params);
}

ekv_status ekv_cuda_decode_stamped(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options,
                                   void *workspace, ekv_stamp *stamps)
{
    ekv_cuda_plan *p = plan->cuda;
    ekv_cuda_shape shape;
    ekv_status status = ekv_cuda_shape_of(plan, options->kernel, &shape);
    if (status)
        return status;
    ekv_arena arena = { workspace, 0 };
    const partials w = lay_out_workspace(&arena, plan);
    ekv_kernel_params params;
    fill_params(plan, tensors, options, &shape, &w, &params);
    params.stamps = stamps;
    bool entered;
    if ((status = ekv_cuda_enter(p->cuda, &entered)))
        return status;
    status = enqueue(plan, &shape, tensors->kv_len, options->stream, &params);
    ekv_cuda_leave(p->cuda, entered);
    return status;
}

ekv_status ekv_cuda_decode(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options,
                           void *workspace)
{
    return ekv_cuda_decode_stamped(plan, tensors, options, workspace, NULL);
}
