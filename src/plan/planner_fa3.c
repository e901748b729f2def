/* SPDX-License-Identifier: Apache-2.0
 * fa3, fa3-nosplit, fa3-vllm: FlashAttention-3's paged decode.  A prepare kernel chooses the splits of each request
 * and sorts the requests by the length of a split; persistent CTAs, one an SM, then draw tiles from a counter.  The
 * numbers are in fa3_rule.h; the order of tiles is that of hopper/tile_scheduler.hpp
 * (VarlenDynamicPersistentTileScheduler). */
#include "plan/planner_fa3.h"

#include "base/half.h"
#include "base/status.h"

#include <inttypes.h>
#include <string.h>

enum { VLLM_MAX_SPLITS = 32 }; /* vLLM's VLLM_FLASH_ATTN_MAX_NUM_SPLITS_FOR_CUDA_GRAPH, its default */

typedef struct fa3_scratch {
    int32_t *partial_base; /* [max_batch_size] */
    int32_t *split_blocks; /* [max_batch_size], blocks of a split */
    int32_t *sorted;       /* [EKV_FA3_PREPARE_REQUESTS] */
} fa3_scratch;

static fa3_scratch fa3_scratch_of(const ekv_plan *plan)
{
    int32_t *memory = plan->scratch;
    return (fa3_scratch){ memory, memory + plan->max_batch_size, memory + 2 * (int64_t)plan->max_batch_size };
}

/* K and V are fetched as 16-bit elements or FP8; FP32, which FlashAttention-3 lacks, is planned as the former. */
static int32_t fa3_kv_bytes(const ekv_plan *plan)
{
    return ekv_dtype_size(plan->batch.kv_dtype) == 1 ? 1 : 2;
}

/* What any lengths can need.  Let x = SMs / (Hkv * m_blocks).  blocks_per_sm is the float32 of 1.1 * sum(blocks) / x
 * rounded up, and its few roundings of 2^-24 are far below the margin of a tenth: blocks_per_sm > sum(blocks) / x.  A
 * request has more than one split only if blocks > blocks_per_sm, so fewer than x requests have; a split request has
 * less than blocks / blocks_per_sm + 1 splits, so those together have less than x and one a split request. */
static ekv_status fa3_capacity(ekv_plan *plan, ekv_plan_capacity *capacity)
{
    if (plan->batch.head_dim > 256)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "head_dim is %d; FlashAttention-3 has kernels up to 256",
                        plan->batch.head_dim);
    const ekv_fa3_tile_size tile = ekv_fa3_tile(plan->batch.head_dim, fa3_kv_bytes(plan));
    ekv_plan_pack_rows(plan, tile.block_m);
    plan->resident_ctas = 1;
    plan->block_tokens = plan->cut_tokens = tile.block_n;
    plan->empty_splits = true;

    const int64_t mblocks = (int64_t)plan->heads * plan->m_blocks, batch_size = plan->batch.batch_size;
    const int64_t split_requests = ekv_min(plan->num_sms / mblocks, batch_size);
    const int64_t splits = plan->num_sms / mblocks + split_requests;
    capacity->tiles = (batch_size + splits) * mblocks;
    capacity->merges = split_requests * plan->m_blocks;
    capacity->slots = splits * mblocks;
    capacity->scratch_size = (2 * (size_t)batch_size + EKV_FA3_PREPARE_REQUESTS) * sizeof(int32_t);
    return EKV_OK;
}

static ekv_status fa3_nosplit_capacity(ekv_plan *plan, ekv_plan_capacity *capacity)
{
    ekv_status status = fa3_capacity(plan, capacity);
    if (status)
        return status;
    capacity->tiles = (int64_t)plan->batch.batch_size * plan->heads * plan->m_blocks;
    capacity->merges = capacity->slots = 0;
    return EKV_OK;
}

static ekv_status fa3_vllm_capacity(ekv_plan *plan, ekv_plan_capacity *capacity)
{
    plan->options.no_sort = 1;
    return fa3_capacity(plan, capacity);
}

static ekv_status fa3_fits(const ekv_plan *plan, const int32_t *kv_len, int32_t batch_size)
{
    const int64_t width = plan->options.table_width;
    for (int32_t b = 0; width && b < batch_size; b++)
        if (kv_len[b] > width)
            return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "kv_len[%d] is %d; table_width is %" PRId64 " tokens", b,
                            kv_len[b], width);
    return EKV_OK;
}

/* ---- Build ------------------------------------------------------------------------------------------- */

static int32_t fa3_bound(const ekv_plan *plan)
{
    int64_t width = plan->options.table_width;
    for (int32_t b = 0; !plan->options.table_width && b < plan->batch.batch_size; b++)
        width = ekv_max(width, plan->kv_len[b]);
    width = ekv_round_up(width, plan->batch.page_size);
    const int64_t head_bytes = width * 2 * plan->batch.head_dim * fa3_kv_bytes(plan);
    /* Queries of one step of decode do not look ahead; one alone has nothing to mask. */
    return ekv_fa3_num_splits_bound(plan->heads, plan->m_blocks, ekv_ceil_div(width, plan->block_tokens), head_bytes,
                                    plan->num_sms, plan->batch.q_len > 1);
}

ekv_fa3_shape ekv_fa3_shape_of(const ekv_plan *plan)
{
    return (ekv_fa3_shape){ .batch_size = plan->batch.batch_size,
                            .heads = plan->heads,
                            .m_blocks = plan->m_blocks,
                            .block_tokens = plan->block_tokens,
                            .num_sms = plan->num_sms,
                            .bound = plan->num_splits_bound,
                            .sort = !plan->options.no_sort };
}

/* Sets num_splits and the blocks of a split. */
static void choose_splits(ekv_plan *plan, const ekv_fa3_shape *shape, int32_t *split_blocks)
{
    int64_t total = 0;
    for (int32_t b = 0; ekv_fa3_may_split(shape) && b < shape->batch_size; b++)
        total += ekv_fa3_blocks(shape, plan->kv_len[b]);
    const int64_t target = ekv_fa3_split_target(shape, total);
    for (int32_t b = 0; b < shape->batch_size; b++) {
        const ekv_fa3_work work = ekv_fa3_split(shape, b, plan->kv_len[b], target);
        plan->num_splits[b] = work.num_splits;
        split_blocks[b] = work.split_blocks;
    }
}

/* Merge sort of at most EKV_FA3_PREPARE_REQUESTS requests by descending split_blocks, stable (the original leaves the
 * order of ties open). */
static void sort_requests(int32_t *order, int32_t count, const int32_t *split_blocks, int32_t *sorted)
{
    for (int32_t run = 1; run < count; run *= 2) {
        for (int32_t begin = 0; begin < count; begin += 2 * run) {
            const int32_t middle = (int32_t)ekv_min(begin + run, count);
            const int32_t end = (int32_t)ekv_min(begin + 2 * run, count);
            for (int32_t left = begin, right = middle, i = begin; i < end; i++) {
                const bool from_right =
                    left == middle || (right < end && split_blocks[order[right]] > split_blocks[order[left]]);
                sorted[i] = order[from_right ? right++ : left++];
            }
        }
        memcpy(order, sorted, (size_t)count * sizeof *order);
    }
}

/* The tiles of one request: by KV head, then split, then m_block. */
static void add_tiles(ekv_plan *plan, const ekv_fa3_shape *shape, const ekv_fa3_work *work)
{
    for (int32_t h = 0; h < shape->heads; h++)
        for (int32_t s = 0; s < work->num_splits; s++)
            for (int32_t m = 0; m < shape->m_blocks; m++)
                ekv_plan_add_tile(plan, ekv_fa3_tile_of(shape, work, h, s, m));
}

static void fa3_build_with(ekv_plan *plan, int32_t bound)
{
    const int32_t batch_size = plan->batch.batch_size;
    const fa3_scratch scratch = fa3_scratch_of(plan);
    plan->dispatch = EKV_DISPATCH_QUEUE;
    plan->grid[0] = plan->num_sms;
    plan->grid[1] = plan->grid[2] = 1;
    plan->num_splits_bound = bound;
    const ekv_fa3_shape shape = ekv_fa3_shape_of(plan);
    choose_splits(plan, &shape, scratch.split_blocks);
    for (int32_t b = 0; b < batch_size; b++)
        plan->batch_order[b] = b;
    for (int32_t b = 0; shape.sort && b < batch_size; b += EKV_FA3_PREPARE_REQUESTS)
        sort_requests(plan->batch_order + b, (int32_t)ekv_min(batch_size - b, EKV_FA3_PREPARE_REQUESTS),
                      scratch.split_blocks, scratch.sorted);
    ekv_plan_add_split_merges(plan, false, scratch.partial_base);
    plan->split_kv = plan->num_merges > 0;
    for (int32_t i = 0; i < batch_size; i++) {
        const int32_t request = plan->batch_order[i];
        const ekv_fa3_work work = { .request = request,
                                    .kv_len = plan->kv_len[request],
                                    .num_splits = plan->num_splits[request],
                                    .split_blocks = scratch.split_blocks[request],
                                    .partial_base = scratch.partial_base[request] };
        add_tiles(plan, &shape, &work);
    }
    plan->num_work_items = plan->max_work_items = plan->num_tiles / plan->heads;
}

static void fa3_build(ekv_plan *plan)
{
    fa3_build_with(plan, fa3_bound(plan));
}

static void fa3_nosplit_build(ekv_plan *plan)
{
    fa3_build_with(plan, 1);
}

static void fa3_vllm_build(ekv_plan *plan)
{
    fa3_build_with(plan, (int32_t)ekv_min(fa3_bound(plan), VLLM_MAX_SPLITS));
}

const ekv_planner ekv_planner_fa3 = {
    .name = "fa3",
    .summary = "FlashAttention-3, splits chosen on the device, tiles drawn from a counter (hopper/)",
    .capacity = fa3_capacity,
    .fits = fa3_fits,
    .build = fa3_build,
    .system = EKV_SYSTEM_FA3,
    .device_rule = EKV_DEVICE_RULE_FA3,
};

const ekv_planner ekv_planner_fa3_nosplit = {
    .name = "fa3-nosplit",
    .summary = "FlashAttention-3 with num_splits = 1",
    .capacity = fa3_nosplit_capacity,
    .fits = fa3_fits,
    .build = fa3_nosplit_build,
    .system = EKV_SYSTEM_FA3,
    .device_rule = EKV_DEVICE_RULE_FA3,
};

const ekv_planner ekv_planner_fa3_vllm = {
    .name = "fa3-vllm",
    .summary = "FlashAttention-3 as in vLLM's fork under CUDA graphs: requests not sorted, at most 32 splits",
    .capacity = fa3_vllm_capacity,
    .fits = fa3_fits,
    .build = fa3_vllm_build,
    .system = EKV_SYSTEM_FA3,
    .device_rule = EKV_DEVICE_RULE_FA3,
};
