/* SPDX-License-Identifier: Apache-2.0
 * even-invariant: what does CTA i do, as a pure function of i and of prefix sums over the requests, for host and
 * device.
 *
 * A request is cut into chunks at absolute multiples of its own tokens, so what is computed and in which order it is
 * merged depends on nothing but the request.  Only who computes a chunk depends on the batch: the chunks of all
 * (request, head group) pairs form one line as in even_rule.h, each costing its tokens and request_cost, and a chunk
 * belongs to the CTA whose share contains its last unit.  A request of one chunk writes its output itself; the
 * chunks of the others have the partial slots of their place among such chunks. */
#ifndef EVENKV_PLAN_EVEN_INVARIANT_RULE_H
#define EVENKV_PLAN_EVEN_INVARIANT_RULE_H

#include "plan/even_rule.h"

typedef struct ekv_even_chunks {
    ekv_even_line line;
    const int32_t *partial; /* [batch_size + 1]: chunks, of one head group, that are partial, of requests before b */
} ekv_even_chunks;

/* Chunks of a request and head group, at least one. */
EKV_INLINE EKV_HD int32_t ekv_even_num_chunks(int32_t kv_len, int32_t chunk_tokens)
{
    uint32_t chunks = ((uint32_t)kv_len + (uint32_t)chunk_tokens - 1u) / (uint32_t)chunk_tokens;
    return chunks ? (int32_t)chunks : 1;
}

EKV_INLINE EKV_HD int64_t ekv_even_chunks_cost(int32_t kv_len, int32_t num_chunks, int32_t request_cost)
{
    return kv_len + (int64_t)num_chunks * request_cost;
}

/* Where the CTA begins whose share begins at x, a coordinate of `request`: at the chunk that contains x. */
EKV_INLINE EKV_HD ekv_even_place ekv_even_chunk_locate(const ekv_even_chunks *chunks, int32_t request, int64_t x)
{
    const ekv_even_line *line = &chunks->line;
    const int64_t pair = line->cost[request + 1] - line->cost[request];
    const int64_t offset = x - line->groups * line->cost[request];
    const int64_t group = offset / pair;
    const int64_t chunk = (offset - group * pair) / (line->block_tokens + line->request_cost);
    ekv_even_place at = { request, (int32_t)group, (int32_t)(chunk * line->block_tokens) };
    return at;
}

/* Where CTA i begins and CTA i - 1 ends, 0 <= i <= num_ctas. */
EKV_INLINE EKV_HD ekv_even_place ekv_even_chunk_begin(const ekv_even_chunks *chunks, int32_t i)
{
    const ekv_even_line *line = &chunks->line;
    ekv_even_place first = { 0, 0, 0 }, end = { line->batch_size, 0, 0 };
    if (i == 0)
        return first;
    const int64_t x = ekv_even_share(line, i);
    return x < line->total ? ekv_even_chunk_locate(chunks, ekv_even_request(line, x), x) : end;
}

EKV_INLINE EKV_HD ekv_even_place ekv_even_chunk_next(const ekv_even_line *line, ekv_even_place at)
{
    if (line->kv_len[at.request] - at.token <= line->block_tokens)
        return ekv_even_next_pair(line, at);
    at.token += line->block_tokens;
    return at;
}

/* How the pair of `at` is merged; num_splits is 1 where it is not. */
EKV_INLINE EKV_HD ekv_merge ekv_even_chunk_merge(const ekv_even_chunks *chunks, ekv_even_place at)
{
    const ekv_even_line *line = &chunks->line;
    const int32_t heads = line->heads_per_tile;
    const int32_t n = ekv_even_num_chunks(line->kv_len[at.request], line->block_tokens);
    const int32_t slot = (chunks->partial[at.request] * line->groups + at.group * n) * heads;
    ekv_merge merge = { at.request, 0, n, slot, slot + heads, heads, (uint16_t)(at.group * heads), (uint16_t)heads, 0 };
    return merge;
}

/* The chunk that begins at `at`.  merge: of its pair. */
EKV_INLINE EKV_HD ekv_tile ekv_even_chunk_tile(const ekv_even_chunks *chunks, ekv_even_place at, const ekv_merge *merge)
{
    const int32_t chunk_tokens = chunks->line.block_tokens;
    ekv_tile tile = ekv_even_whole(&chunks->line, at);
    if (merge->num_splits > 1) {
        tile.kv_begin = at.token;
        if (tile.kv_end - at.token > chunk_tokens)
            tile.kv_end = at.token + chunk_tokens;
        tile.split = (int32_t)((uint32_t)at.token / (uint32_t)chunk_tokens);
        tile.slot = (int32_t)ekv_merge_slot(merge, tile.split);
        tile.flags = EKV_TILE_PARTIAL;
    }
    return tile;
}

#endif
