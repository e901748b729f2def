/* SPDX-License-Identifier: Apache-2.0
 * none: one tile a (request, head), as the textbook kernel has it.  With no_pack_gqa one a query head, which
 * reads K and V once for each query head of a group. */
#include "plan/plan.h"

enum { RESIDENT_CTAS = 2 }; /* as ours run; another kernel's by the option */

static ekv_status none_capacity(ekv_plan *plan, ekv_plan_capacity *capacity)
{
    ekv_plan_pack_rows(plan, plan->batch.q_len * plan->group);
    if (plan->options.no_pack_gqa) {
        plan->heads = plan->batch.q_heads;
        plan->rows = plan->block_m = plan->padded_rows = plan->batch.q_len;
    }
    plan->cut_tokens = 0;
    plan->resident_ctas = plan->options.resident_ctas ? plan->options.resident_ctas : RESIDENT_CTAS;
    capacity->tiles = (int64_t)plan->batch.batch_size * plan->heads;
    return EKV_OK;
}

static void none_build(ekv_plan *plan)
{
    const int32_t batch_size = plan->batch.batch_size;
    plan->dispatch = EKV_DISPATCH_GRID;
    plan->grid[0] = batch_size;
    plan->grid[1] = plan->heads;
    plan->grid[2] = 1;
    plan->split_kv = false;
    plan->num_work_items = plan->max_work_items = batch_size;
    for (int32_t b = 0; b < batch_size; b++) {
        plan->num_splits[b] = 1;
        plan->batch_order[b] = b;
    }
    for (int32_t h = 0; h < plan->heads; h++)
        for (int32_t b = 0; b < batch_size; b++)
            ekv_plan_add_tile(
                plan, (ekv_tile){
                          .request = b, .kv_end = plan->kv_len[b], .slot = -1, .head = (uint16_t)h, .head_count = 1 });
}

const ekv_planner ekv_planner_none = {
    .name = "none",
    .summary = "one tile a (request, KV head), never split; with --no-pack-gqa one a query head",
    .capacity = none_capacity,
    .build = none_build,
    .system = EKV_SYSTEM_EVENKV,
};
