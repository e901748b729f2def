/* SPDX-License-Identifier: Apache-2.0
 * Shape of the mma kernels, for the kernel and for the host that launches it. */
#ifndef EVENKV_CUDA_KERNELS_MMA_SHAPE_H
#define EVENKV_CUDA_KERNELS_MMA_SHAPE_H

#include "base/portable.h"

enum {
    EKV_MMA_MAX_WARPS = 8,    /* of any kernel, that compute; one more scouts */
    EKV_MMA_ROUNDS = 8,       /* of the ring between the scout and the others, a power of two */
    EKV_MMA_QUEUE_ROUNDS = 3, /* of it that a CTA under queue dispatch uses */
    EKV_MMA_MOST_BLOCKS = 16, /* that a round describes */
    EKV_MMA_LEAST_BLOCKS = 4,
    EKV_MMA_STAGES = 3, /* of a warp's ring, where they fit; at most 4 */
    EKV_MMA_FAN_IN = 16 /* partial results that are merged at a time */
};

/* Warps that compute, at most.  At head_dim 256 Q and O take up to 192 registers of a thread. */
#define EKV_MMA_WARPS_AT(head_dim) ((head_dim) > 128 ? EKV_MMA_MAX_WARPS / 2 : EKV_MMA_MAX_WARPS)

/* The most warps a head, a power of two: each has at least 16 columns of a result.  0: not even one fits a CTA. */
EKV_INLINE EKV_HD int32_t ekv_mma_warps_per_head(int32_t head_dim, int32_t tile_heads)
{
    int32_t warps = EKV_MMA_WARPS_AT(head_dim);
    while (warps > head_dim / 16 || warps * tile_heads > EKV_MMA_WARPS_AT(head_dim))
        warps /= 2;
    return warps;
}

/* Tokens that a warp loads, waits for and computes at a time: a block.  8 KB of K and V, 16 KB at head_dim 256. */
EKV_INLINE EKV_HD int32_t ekv_mma_block_tokens(int32_t head_dim)
{
    return head_dim >= 128 ? 16 : 32;
}

EKV_INLINE EKV_HD int32_t ekv_mma_stage_bytes(int32_t head_dim)
{
    return 2 * ekv_mma_block_tokens(head_dim) * head_dim * 2;
}

/* Stages of a warp's ring, at most 4.  Latency x bandwidth is about 64 KB an SM on an H200, and 8 warps with 2 stages
 * have 128 KB in flight; what is in flight beyond need waits in the memory's queues, and all other accesses (page
 * tables, Q, partial results) wait behind it.  A plan of one CTA an SM has few, long tiles, which end alone: 3 stages
 * let a lone CTA read faster. */
EKV_INLINE EKV_HD int32_t ekv_mma_stages(int32_t resident_ctas)
{
    return resident_ctas > 1 ? 2 : 3;
}

enum { EKV_MMA_HEADER_BYTES = 64 };

/* A round of so many tokens: a header and, for each token, page and place in it. */
EKV_INLINE EKV_HD int32_t ekv_mma_round_bytes(int32_t round_tokens)
{
    return EKV_MMA_HEADER_BYTES + round_tokens * 8;
}

/* Eight rows of an output, on their way. */
EKV_INLINE EKV_HD int32_t ekv_mma_output_bytes(int32_t head_dim)
{
    return 8 * head_dim * 2;
}

/* Dynamic shared memory of a CTA: for each computing warp its ring of stages and its Q; for each head, eight rows of
 * its output; the rounds and two barriers of each; the header of one more; when a tile began; for each warp the largest
 * score and the sum of each row, and the place of its result. rows: 8 or 16, the n of the variant. */
EKV_INLINE EKV_HD int32_t ekv_mma_shared_bytes(int32_t head_dim, int32_t rows, int32_t heads, int32_t warps_per_head,
                                               int32_t stages, int32_t round_tokens)
{
    const int32_t warps = heads * warps_per_head;
    return warps * (stages * ekv_mma_stage_bytes(head_dim) + rows * head_dim * 2) +
           heads * ekv_mma_output_bytes(head_dim) + EKV_MMA_ROUNDS * (ekv_mma_round_bytes(round_tokens) + 16) +
           EKV_MMA_HEADER_BYTES + 8 + warps * (rows * 8 + 4);
}

#endif
