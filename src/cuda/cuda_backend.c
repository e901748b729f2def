/* SPDX-License-Identifier: Apache-2.0
 * The backend's table, and the merging of attention states. */
#include "cuda/cuda_backend.h"

#include "cuda/cuda_decode.h"
#include "cuda/kernels/args.h"

#include <math.h>

enum { STATES_THREADS = 128, STATES_CTAS_PER_SM = 16 };

static int32_t states_kernel(ekv_dtype part_dtype)
{
    switch (part_dtype) {
    case EKV_DTYPE_F16: return EKV_CUDA_KERNEL_ekv_merge_states_f16;
    case EKV_DTYPE_BF16: return EKV_CUDA_KERNEL_ekv_merge_states_bf16;
    default: return EKV_CUDA_KERNEL_ekv_merge_states_f32;
    }
}

static ekv_status merge_states(ekv_context *context, const ekv_merge_args *args)
{
    ekv_cuda *cuda = context->cuda;
    ekv_states_params params = { .o_parts = args->o_parts,
                                 .part_stride_state = args->part_stride_state,
                                 .part_stride_row = args->part_stride_row,
                                 .lse_parts = args->lse_parts,
                                 .lse_stride_state = args->lse_stride_state,
                                 .lse_stride_row = args->lse_stride_row,
                                 .o = args->o,
                                 .lse = args->lse,
                                 .rows = args->rows,
                                 .num_states = args->num_states,
                                 .head_dim = args->head_dim,
                                 .o_dtype = args->o_dtype,
                                 .log2_factor = args->lse_base == EKV_LSE_BASE2 ? 1.0f : (float)M_LOG2E };
    const int64_t ctas =
        ekv_min(ekv_ceil_div(args->rows, STATES_THREADS / 32), (int64_t)cuda->num_sms * STATES_CTAS_PER_SM);
    const ekv_cuda_launch launch = { .grid = { (uint32_t)ctas, 1, 1 },
                                     .threads = STATES_THREADS,
                                     .stream = args->stream };
    bool entered;
    ekv_status status = ekv_cuda_enter(cuda, &entered);
    if (status)
        return status;
    status = ekv_cuda_launch_kernel(cuda, states_kernel(args->part_dtype), &launch, (void *[]){ &params });
    ekv_cuda_leave(cuda, entered);
    return status;
}

const ekv_backend_ops ekv_cuda_backend = {
    .host_tensors = false,
    .supports = ekv_cuda_supports,
    .workspace_size = ekv_cuda_workspace_size,
    .decode = ekv_cuda_decode,
    .merge_states = merge_states,
    .detect = ekv_cuda_detect,
};
