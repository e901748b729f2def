/* SPDX-License-Identifier: Apache-2.0
 * Shape of the mma kernels, for the kernel and for the host that launches it. */
#ifndef EVENKV_CUDA_KERNELS_MMA_SHAPE_H
#define EVENKV_CUDA_KERNELS_MMA_SHAPE_H

#include "base/portable.h"

enum {
    EKV_MMA_MAX_WARPS = 8,  /* 255 registers a thread x 256 threads fill the register file of an SM */
    EKV_MMA_TILE_RING = 16, /* tiles that a warp has records of */
    EKV_MMA_LOOK_AHEAD = 4  /* tiles whose records are fetched before they are needed */
};

/* Tokens that a warp loads, waits for and computes at a time.  8 KB of K and V, 16 KB at head_dim 256. */
EKV_INLINE EKV_HD int32_t ekv_mma_stage_tokens(int32_t head_dim)
{
    return head_dim >= 128 ? 16 : 32;
}

EKV_INLINE EKV_HD int32_t ekv_mma_stage_bytes(int32_t head_dim)
{
    return 2 * ekv_mma_stage_tokens(head_dim) * head_dim * 2;
}

/* Stages of a warp's ring.  8 warps with 2 stages have 128 KB in flight on an SM.  Latency x bandwidth is about 64 KB
 * an SM on an H200; what is in flight beyond that waits in the memory's queues, and all other accesses (page tables, Q,
 * instructions) wait behind it: with 3 stages many short requests took 8 % longer there.  A plan of one CTA an SM has
 * few, long tiles, which end alone: 3 stages let a lone CTA read faster. */
EKV_INLINE EKV_HD int32_t ekv_mma_stages(int32_t resident_ctas)
{
    return resident_ctas > 1 ? 2 : 3;
}

/* Dynamic shared memory of a CTA: for each warp its ring of stages and its Q; the ring of tile numbers; for each
 * warp its ring of tile records, the largest score and the sum of each row, and the place of its result.  rows: 8 or
 * 16, the n of the variant. */
EKV_INLINE EKV_HD int32_t ekv_mma_shared_bytes(int32_t head_dim, int32_t rows, int32_t warps, int32_t stages)
{
    return warps *
               (stages * ekv_mma_stage_bytes(head_dim) + rows * head_dim * 2 + EKV_MMA_TILE_RING * 32 + rows * 8 + 4) +
           EKV_MMA_TILE_RING * 8;
}

#endif
