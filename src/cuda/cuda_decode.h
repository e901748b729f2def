/* SPDX-License-Identifier: Apache-2.0
 * Decode on the GPU: what is supported, the workspace, the launches. */
#ifndef EVENKV_CUDA_CUDA_DECODE_H
#define EVENKV_CUDA_CUDA_DECODE_H

#include "cuda/cuda_context.h"
#include "cuda/cuda_plan.h"
#include "plan/backend.h"

/* How the decode kernel of a plan is launched; what does not depend on the lengths. */
typedef struct ekv_cuda_shape {
    ekv_kernel kernel; /* SIMT or MMA */
    int32_t index;     /* of the kernel table */
    int32_t warps_per_head;
    int32_t stages, round_tokens; /* mma */
    int32_t threads;
    int32_t shared_bytes;
    int32_t resident_ctas; /* that fit an SM by their shared memory; at most what the plan counts on for mma */
} ekv_cuda_shape;

/* plan: made with options.cuda and supported.  kernel: as in ekv_decode_options.  Errors: UNSUPPORTED. */
ekv_status ekv_cuda_shape_of(const ekv_plan *plan, ekv_kernel kernel, ekv_cuda_shape *shape);

/* ekv_backend_ops. */
ekv_status ekv_cuda_supports(const ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options);
ekv_status ekv_cuda_workspace_size(const ekv_plan *plan, size_t *size);
ekv_status ekv_cuda_decode(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options,
                           void *workspace);

/* ekv_cuda_decode that also writes a stamp for each tile and merge.  stamps: device memory,
 * [num_tiles + num_merges * heads], or NULL. */
ekv_status ekv_cuda_decode_stamped(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options,
                                   void *workspace, ekv_stamp *stamps);

/* The members of kernel parameters that describe tensors and batch. */
void ekv_cuda_tensor_params(const ekv_plan *plan, const ekv_tensors *tensors, ekv_kernel_params *params);

#endif
