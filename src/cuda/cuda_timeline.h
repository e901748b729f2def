/* SPDX-License-Identifier: Apache-2.0
 * When and where each tile and merge of a decode ran, as the GPU's own clock has it. */
#ifndef EVENKV_CUDA_CUDA_TIMELINE_H
#define EVENKV_CUDA_CUDA_TIMELINE_H

#include "cuda/kernels/params.h"
#include "plan/plan.h"

typedef struct ekv_cuda_timeline {
    int64_t num_tiles;
    int64_t num_merges; /* (merge, head): entry m * heads + h, kind 0 where merge m has no head h */
    int32_t heads;
    ekv_stamp *stamps; /* [num_tiles + num_merges], owned */
} ekv_cuda_timeline;

/* Decodes once, waits, and reads the stamps.  Arguments as those of ekv_decode, tensors and options resolved. */
ekv_status ekv_cuda_timeline_record(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options,
                                    void *workspace, ekv_cuda_timeline *timeline);
void ekv_cuda_timeline_free(ekv_context *context, ekv_cuda_timeline *timeline);

#endif
