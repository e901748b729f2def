/* SPDX-License-Identifier: Apache-2.0
 * flashinfer-tensor-core: decode through the prefill kernel (BatchPrefillWithPagedKVCacheKernel), which packs the
 * query rows of a KV head into tensor-core tiles.
 * Rule: PrefillPlan, PrefillSplitQOKVIndptr and PrefillBinarySearchKVChunkSize in FlashInfer's
 * include/flashinfer/attention/scheduler.cuh, FA2DetermineCtaTileQ in include/flashinfer/utils.cuh
 * (commit fb28d72). */
#include "plan/split_grid.h"

/* PrefillPlan budgets two CTAs an SM whatever the kernel's occupancy is. */
enum { CTAS_PER_SM = 2 };

/* FA2DetermineCtaTileQ on sm_80 and later. */
static int32_t cta_tile_q(int64_t packed_rows, int32_t head_dim)
{
    if (packed_rows > 64 && head_dim < 256)
        return 128;
    return packed_rows > 16 ? 64 : 16;
}

static int64_t budget(const ekv_plan *plan)
{
    return (int64_t)CTAS_PER_SM * plan->num_sms / plan->heads;
}

static ekv_status tensor_core_capacity(ekv_plan *plan, ekv_plan_capacity *capacity)
{
    const int64_t batch_size = plan->batch.batch_size;
    /* A captured graph may be replayed with any division of its query rows over its requests, each of which has
     * at least one; FlashInfer then chooses the tile for the longest that this allows. */
    int64_t longest_q = plan->batch.q_len;
    if (plan->options.cuda_graph)
        longest_q = batch_size * plan->batch.q_len - batch_size + 1;
    ekv_plan_pack_rows(plan, cta_tile_q(longest_q * plan->group, plan->batch.head_dim));
    plan->cut_tokens = plan->batch.page_size;
    plan->resident_ctas = plan->options.resident_ctas ? plan->options.resident_ctas : CTAS_PER_SM;

    /* Either the search found a chunk within the budget, or every request stays whole. */
    const int64_t whole = batch_size * plan->m_blocks;
    capacity->tiles = ekv_max(budget(plan), whole) * plan->heads;
    /* Without a graph partial results exist only where a chunk within the budget was found. */
    const int64_t split_items = plan->options.cuda_graph ? ekv_max(budget(plan), whole) : budget(plan);
    capacity->slots = split_items * plan->heads;
    capacity->merges = ekv_min(whole, split_items);
    capacity->scratch_size = (size_t)batch_size * sizeof(int32_t);
    return EKV_OK;
}

/* Slots of a captured graph: total_num_tiles_q of PrefillSplitQOKVIndptr bounds the m_blocks of any division of
 * the rows over the requests. */
static int64_t graph_slots(const ekv_plan *plan)
{
    const int64_t batch_size = plan->batch.batch_size;
    return ekv_max(budget(plan), ekv_ceil_div(batch_size * plan->rows, plan->block_m) + batch_size - 1);
}

static void tensor_core_build(ekv_plan *plan)
{
    const int64_t chunk = ekv_split_grid_chunk(plan, budget(plan) / plan->m_blocks, true);
    const bool graph = plan->options.cuda_graph;
    ekv_split_grid_cut(plan, chunk, graph || chunk < ekv_split_grid_longest(plan));
    if (graph)
        plan->max_work_items = graph_slots(plan);
    plan->dispatch = EKV_DISPATCH_GRID;
    plan->grid[0] = (int32_t)plan->max_work_items;
    plan->grid[1] = 1;
    plan->grid[2] = plan->heads;
    ekv_split_grid_emit(plan);
}

const ekv_planner ekv_planner_flashinfer_tensor_core = {
    .name = "flashinfer-tensor-core",
    .summary = "FlashInfer's tensor-core decode grid (its prefill kernel): one chunk size, 2*SMs/Hkv work items",
    .capacity = tensor_core_capacity,
    .build = tensor_core_build,
    .system = EKV_SYSTEM_FLASHINFER_TENSOR_CORE,
};
