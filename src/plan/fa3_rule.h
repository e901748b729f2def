/* SPDX-License-Identifier: Apache-2.0
 * FlashAttention-3's rules of splitting paged decode, for host and device.  Facts of its hopper/ sources:
 * tile_size.h (tile_size_fwd_sm90), heuristics.h (num_splits_heuristic), flash_api.cpp (get_num_splits) and
 * flash_prepare_scheduler.cu (the number of splits of each request).
 *
 * Results follow the original's float32 roundings.  They need IEEE division and no reordering (no -ffast-math, no
 * nvcc --use_fast_math); there is no a * b + c that a compiler could contract, so no __fmul_rn is needed. */
#ifndef EVENKV_PLAN_FA3_RULE_H
#define EVENKV_PLAN_FA3_RULE_H

#include "base/portable.h"

#include <math.h>

enum {
    /* Requests that one CTA of the prepare kernel takes: 32 warps of 31.  Above, there are several CTAs, each sorts
     * its own requests, and nothing is split. */
    EKV_FA3_PREPARE_REQUESTS = 992,
    EKV_FA3_MAX_SPLITS = 128
};

typedef struct ekv_fa3_tile_size {
    int32_t block_m; /* packed query rows */
    int32_t block_n; /* KV tokens */
} ekv_fa3_tile_size;

/* For paged KV fetched without TMA, as decode does.  head_dim: 1..256; kv_bytes: of an element, 1 for FP8. */
EKV_INLINE EKV_HD ekv_fa3_tile_size ekv_fa3_tile(int32_t head_dim, int32_t kv_bytes)
{
    const int fp8 = kv_bytes == 1;
    ekv_fa3_tile_size tile = { head_dim <= 96 ? 192 : 128, 0 };
    if (head_dim <= 64)
        tile.block_n = fp8 ? 160 : 128;
    else if (head_dim <= 96)
        tile.block_n = 128;
    else if (head_dim <= 128)
        tile.block_n = fp8 ? 160 : 128;
    else if (head_dim <= 192)
        tile.block_n = fp8 ? 160 : 96;
    else
        tile.block_n = fp8 ? 128 : 80;
    return tile;
}

/* Share of the SMs that are busy over the waves of total_mblocks * splits tiles. */
EKV_INLINE EKV_HD float ekv_fa3_efficiency(int32_t total_mblocks, int32_t splits, int32_t num_sms)
{
    const float waves = (float)(total_mblocks * splits) / (float)num_sms;
    return waves / ceilf(waves);
}

/* The bound on the splits of any request, found as if the batch were one request of the page table's width: the
 * smallest number of splits within 85 % of the best use of the SMs.  m_blocks: of one KV head; n_blocks: of the table's
 * width; head_bytes: K and V of one head at that width. */
EKV_INLINE EKV_HD int32_t ekv_fa3_num_splits_bound(int32_t kv_heads, int32_t m_blocks, int64_t n_blocks,
                                                   int64_t head_bytes, int32_t num_sms, int causal)
{
    const int64_t l2_bytes = 50 * 1024 * 1024;
    const int64_t total_mblocks = (int64_t)kv_heads * m_blocks;
    if ((float)total_mblocks >= 0.8f * (float)num_sms) {
        if (head_bytes > l2_bytes && m_blocks >= 2 * num_sms && !causal)
            return (int32_t)ekv_min(ekv_ceil_div(head_bytes, l2_bytes), EKV_FA3_MAX_SPLITS);
        return 1;
    }
    if (n_blocks <= 4)
        return 1;
    const int32_t largest = (int32_t)ekv_min(ekv_min(EKV_FA3_MAX_SPLITS, num_sms), n_blocks);
    float best = 0.0f;
    for (int32_t splits = 1; splits <= largest; splits++)
        best = fmaxf(best, ekv_fa3_efficiency((int32_t)total_mblocks, splits, num_sms));
    int32_t splits = 1;
    while (ekv_fa3_efficiency((int32_t)total_mblocks, splits, num_sms) < 0.85 * best)
        splits++;
    return splits;
}

/* Blocks that a split is to have.  total_blocks: of all requests and m_blocks.  The original divides by 0 where the
 * batch is empty. */
EKV_INLINE EKV_HD int64_t ekv_fa3_blocks_per_sm(int64_t total_blocks, int32_t kv_heads, int32_t num_sms)
{
    const float margin = (float)total_blocks * 1.1f;
    const float blocks = ceilf(margin * (float)kv_heads / (float)num_sms);
    return blocks < 1.0f ? 1 : (int64_t)blocks;
}

/* Splits of a request of `blocks` blocks. */
EKV_INLINE EKV_HD int32_t ekv_fa3_num_splits(int32_t blocks, int64_t blocks_per_sm, int32_t bound)
{
    return (int32_t)ekv_max(ekv_min(ekv_ceil_div(blocks, blocks_per_sm), bound), 1);
}

#endif
