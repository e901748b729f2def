/* SPDX-License-Identifier: Apache-2.0
 * The chunk search follows PartitionPagedKVCacheBinarySearchMinNumPagePerBatch and PrefillBinarySearchKVChunkSize
 * of FlashInfer's include/flashinfer/attention/scheduler.cuh (commit fb28d72). */
#include "plan/split_grid.h"

/* Both FlashInfer searches start at max(128 / page_size, 1) pages. */
enum { MIN_CHUNK_TOKENS = 128 };

/* ceil(ceil(a / P) / n) = ceil(a / (n P)), so pages need not be counted first. */
static int64_t count_pieces(const ekv_plan *plan, int64_t chunk_tokens, bool count_empty, int64_t enough)
{
    int64_t pieces = 0;
    for (int32_t b = 0; b < plan->batch.batch_size && pieces <= enough; b++)
        pieces += plan->kv_len[b] ? ekv_ceil_div(plan->kv_len[b], chunk_tokens) : count_empty;
    return pieces;
}

int64_t ekv_split_grid_longest(const ekv_plan *plan)
{
    int64_t longest = 1;
    for (int32_t b = 0; b < plan->batch.batch_size; b++)
        longest = ekv_max(longest, plan->kv_len[b]);
    return ekv_round_up(longest, plan->batch.page_size);
}

int64_t ekv_split_grid_chunk(const ekv_plan *plan, int64_t budget, bool count_empty)
{
    const int64_t page = plan->batch.page_size;
    const int64_t longest = ekv_split_grid_longest(plan);
    int64_t low = ekv_max(MIN_CHUNK_TOKENS / page, 1), high = longest / page;
    /* No chunk does better than whole requests: the search would only climb to `high`. */
    if (low < high && count_pieces(plan, longest, count_empty, budget) > budget)
        return longest;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (count_pieces(plan, middle * page, count_empty, budget) > budget)
            low = middle + 1;
        else
            high = middle;
    }
    return low * page;
}

void ekv_split_grid_cut(ekv_plan *plan, int64_t chunk_tokens, bool split_kv)
{
    int64_t pieces = 0;
    for (int32_t b = 0; b < plan->batch.batch_size; b++) {
        plan->num_splits[b] = (int32_t)ekv_max(ekv_ceil_div(plan->kv_len[b], chunk_tokens), 1);
        plan->batch_order[b] = b;
        pieces += plan->num_splits[b];
    }
    plan->split_kv = split_kv;
    plan->kv_chunk_tokens = chunk_tokens;
    plan->num_work_items = plan->max_work_items = pieces * plan->m_blocks;
}

/* The tiles of one head of one request; split 0 of m_block 0 has partial slot `slot`. */
static void emit_request(ekv_plan *plan, int32_t b, int32_t head, int32_t slot)
{
    const int64_t kv_len = plan->kv_len[b], chunk = plan->kv_chunk_tokens;
    for (int32_t m = 0; m < plan->m_blocks; m++)
        for (int32_t split = 0; split < plan->num_splits[b]; split++) {
            ekv_plan_add_tile(plan, (ekv_tile){ .request = b,
                                                .m_block = m,
                                                .split = split,
                                                .kv_begin = (int32_t)(split * chunk),
                                                .kv_end = (int32_t)ekv_min((split + 1) * chunk, kv_len),
                                                .slot = plan->split_kv ? slot : -1,
                                                .head = (uint16_t)head,
                                                .head_count = 1,
                                                .flags = plan->split_kv ? EKV_TILE_PARTIAL : 0 });
            slot += plan->heads;
        }
}

void ekv_split_grid_emit(ekv_plan *plan)
{
    int32_t *partial_base = plan->scratch;
    if (plan->split_kv)
        ekv_plan_add_split_merges(plan, true, partial_base);
    for (int32_t head = 0; head < plan->heads; head++)
        for (int32_t b = 0; b < plan->batch.batch_size; b++)
            emit_request(plan, b, head, plan->split_kv ? partial_base[b] * plan->heads + head : -1);
}
