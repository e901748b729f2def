/* SPDX-License-Identifier: Apache-2.0
 * fa3 written by many threads at once, for host and device: what a request's tiles and merges are, each by itself.
 *
 * At most EKV_FA3_PREPARE_REQUESTS requests are one work list; more are several, nothing is then split, and the
 * lists do not depend on each other. */
#ifndef EVENKV_PLAN_FA3_EMIT_H
#define EVENKV_PLAN_FA3_EMIT_H

#include "plan/fa3_rule.h"
#include "plan/record.h"

/* What does not depend on the lengths. */
typedef struct ekv_fa3_shape {
    int32_t batch_size;
    int32_t heads;
    int32_t m_blocks;     /* of one KV head */
    int32_t block_tokens; /* BLOCK_N */
    int32_t num_sms;
    int32_t bound; /* ekv_fa3_num_splits_bound */
    int32_t sort;  /* 1: by descending split_blocks, ties by request; 0: by request */
} ekv_fa3_shape;

/* A request at its place in the order. */
typedef struct ekv_fa3_work {
    int32_t request;
    int32_t kv_len;
    int32_t num_splits;
    int32_t split_blocks; /* blocks of a split */
    int32_t partial_base; /* partial slots of the requests before it, by number, over heads */
    int32_t merge_begin;  /* merges of the requests before it, by number */
    int32_t tile_begin;   /* tiles of the requests before it, by order */
    int32_t reserved;     /* 0 */
} ekv_fa3_work;

EKV_INLINE EKV_HD int ekv_fa3_may_split(const ekv_fa3_shape *shape)
{
    return shape->bound > 1 && shape->batch_size <= EKV_FA3_PREPARE_REQUESTS;
}

EKV_INLINE EKV_HD int32_t ekv_fa3_blocks(const ekv_fa3_shape *shape, int32_t kv_len)
{
    return (int32_t)(((uint32_t)kv_len + (uint32_t)shape->block_tokens - 1u) / (uint32_t)shape->block_tokens);
}

/* total_blocks: of all requests. */
EKV_INLINE EKV_HD int64_t ekv_fa3_split_target(const ekv_fa3_shape *shape, int64_t total_blocks)
{
    return ekv_fa3_blocks_per_sm(total_blocks * shape->m_blocks, shape->heads, shape->num_sms);
}

/* All but the three places, which are sums over other requests.  target: ekv_fa3_split_target; not looked at where
 * nothing may be split. */
EKV_INLINE EKV_HD ekv_fa3_work ekv_fa3_split(const ekv_fa3_shape *shape, int32_t request, int32_t kv_len,
                                             int64_t target)
{
    const int32_t blocks = ekv_fa3_blocks(shape, kv_len);
    ekv_fa3_work work = { request, kv_len, 1, blocks, 0, 0, 0, 0 };
    if (ekv_fa3_may_split(shape)) {
        work.num_splits = ekv_fa3_num_splits(blocks, target, shape->bound);
        work.split_blocks = (int32_t)ekv_ceil_div(blocks, work.num_splits);
    }
    return work;
}

/* What the request adds to partial_base and merge_begin. */
EKV_INLINE EKV_HD int32_t ekv_fa3_num_partials(const ekv_fa3_shape *shape, const ekv_fa3_work *work)
{
    return work->num_splits > 1 ? work->num_splits * shape->m_blocks : 0;
}

EKV_INLINE EKV_HD int32_t ekv_fa3_num_merges(const ekv_fa3_shape *shape, const ekv_fa3_work *work)
{
    return work->num_splits > 1 ? shape->m_blocks : 0;
}

/* ... and to tile_begin. */
EKV_INLINE EKV_HD int32_t ekv_fa3_num_tiles(const ekv_fa3_shape *shape, const ekv_fa3_work *work)
{
    return shape->heads * work->num_splits * shape->m_blocks;
}

/* Ascending keys are the order of requests; `index` is the request's in its list.  All keys differ. */
EKV_INLINE EKV_HD uint64_t ekv_fa3_key(const ekv_fa3_shape *shape, const ekv_fa3_work *work, int32_t index)
{
    const uint32_t shorter = shape->sort ? (uint32_t)(INT32_MAX - work->split_blocks) : 0;
    return (uint64_t)shorter << 32 | (uint32_t)index;
}

EKV_INLINE EKV_HD ekv_tile ekv_fa3_tile_of(const ekv_fa3_shape *shape, const ekv_fa3_work *work, int32_t head,
                                           int32_t split, int32_t m_block)
{
    const int64_t split_tokens = (int64_t)work->split_blocks * shape->block_tokens;
    const int32_t begin = (int32_t)ekv_min(split * split_tokens, work->kv_len);
    const int32_t end = (int32_t)ekv_min((split + 1) * split_tokens, work->kv_len);
    ekv_tile tile = { work->request, m_block, split, begin, end, -1, (uint16_t)head, 1, 0 };
    if (work->num_splits > 1) {
        tile.slot = (work->partial_base + m_block * work->num_splits + split) * shape->heads + head;
        tile.flags = EKV_TILE_PARTIAL;
    }
    return tile;
}

/* Tile k of the request, in the order KV head, split, m_block, as ekv_device_tile has it. */
EKV_INLINE EKV_HD ekv_tile ekv_fa3_piece(const ekv_fa3_shape *shape, const ekv_fa3_work *work, int32_t k)
{
    const int32_t unit = k / shape->m_blocks, m_block = k % shape->m_blocks;
    const ekv_tile tile = ekv_fa3_tile_of(shape, work, unit / work->num_splits, unit % work->num_splits, m_block);
    return ekv_device_tile(tile, work->num_splits > 1 ? work->merge_begin + m_block : -1);
}

/* The merge of m_block, where there are several splits. */
EKV_INLINE EKV_HD ekv_merge ekv_fa3_merge(const ekv_fa3_shape *shape, const ekv_fa3_work *work, int32_t m_block)
{
    const int32_t slot = (work->partial_base + m_block * work->num_splits) * shape->heads, heads = shape->heads;
    ekv_merge merge = { work->request, m_block, work->num_splits, slot, slot + heads, heads, 0, (uint16_t)heads, 0 };
    return merge;
}

/* Tile `index` of the plan.  works: [batch_size], in order. */
EKV_INLINE EKV_HD ekv_tile ekv_fa3_find(const ekv_fa3_shape *shape, const ekv_fa3_work *works, int32_t index)
{
    int32_t low = 0, high = shape->batch_size - 1;
    while (low < high) { /* the last that begins at or before index: every request has a tile */
        const int32_t middle = low + (high - low + 1) / 2;
        if (works[middle].tile_begin <= index)
            low = middle;
        else
            high = middle - 1;
    }
    return ekv_fa3_piece(shape, &works[low], index - works[low].tile_begin);
}

#endif
