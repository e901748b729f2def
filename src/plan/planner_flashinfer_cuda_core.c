/* SPDX-License-Identifier: Apache-2.0
 * flashinfer-cuda-core: BatchDecodeWithPagedKVCacheKernel, one CTA per (work item, KV head).
 * Rule: BatchDecodeWithPagedKVCacheWorkEstimationDispatched and DecodePlan in FlashInfer's
 * include/flashinfer/attention/scheduler.cuh (commit fb28d72). */
#include "base/half.h"
#include "base/status.h"
#include "plan/split_grid.h"

#include <inttypes.h>
#include <stdio.h>

/* What cudaOccupancyMaxActiveBlocksPerMultiprocessor says of the kernel, which decides when splitting stops. */
typedef struct occupancy {
    int32_t sm_arch;
    int32_t head_dim;
    int32_t kv_bytes; /* of an element of K and V */
    int32_t group;
    int32_t resident_ctas;
    bool measured;
} occupancy;

static const occupancy occupancies[] = {
    { 90, 128, 2, 8, 9, true }, /* H200: 128 threads of 56 registers, 9,216 bytes of shared memory */
    { 90, 128, 2, 4, 8, true }, /* H200 */
    /* 36,864 bytes of shared memory and 1,024 reserved, of the SM's 233,472; registers may allow fewer. */
    { 90, 128, 2, 1, 6, false },
};

static const occupancy *find_occupancy(const ekv_plan *plan)
{
    for (size_t i = 0; i < sizeof occupancies / sizeof occupancies[0]; i++) {
        const occupancy *o = &occupancies[i];
        if (o->sm_arch == plan->device.sm_arch && o->head_dim == plan->batch.head_dim &&
            o->kv_bytes == ekv_dtype_size(plan->batch.kv_dtype) && o->group == plan->group)
            return o;
    }
    return NULL;
}

static int64_t max_grid(const ekv_plan *plan)
{
    return (int64_t)plan->num_sms * plan->resident_ctas;
}

static ekv_status cuda_core_capacity(ekv_plan *plan, ekv_plan_capacity *capacity)
{
    const occupancy *known = find_occupancy(plan);
    if (plan->batch.q_len != 1)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "q_len is %d; FlashInfer's decode kernel takes 1", plan->batch.q_len);
    if (!plan->options.resident_ctas && !known) {
        char where[16] = "the cpu";
        if (plan->device.sm_arch)
            snprintf(where, sizeof where, "sm_%d", plan->device.sm_arch);
        return ekv_fail(EKV_ERROR_UNSUPPORTED,
                        "nobody knows how many CTAs of FlashInfer's decode kernel an SM holds for head_dim %d, "
                        "%d-byte K and V, group %d on %s; give --resident-ctas (resident_ctas)",
                        plan->batch.head_dim, ekv_dtype_size(plan->batch.kv_dtype), plan->group, where);
    }
    ekv_plan_pack_rows(plan, plan->group);
    plan->cut_tokens = plan->batch.page_size;
    plan->resident_ctas = plan->options.resident_ctas ? plan->options.resident_ctas : known->resident_ctas;

    /* Unsplit: B items.  Else B <= budget, the search leaves at most `budget` items with tokens, and the empty
     * requests, at most B, come on top. */
    const int64_t budget = max_grid(plan) / plan->heads, batch_size = plan->batch.batch_size;
    const int64_t split_items = budget + ekv_min(batch_size, budget);
    capacity->tiles = ekv_max(batch_size, split_items) * plan->heads;
    capacity->slots = split_items * plan->heads;
    capacity->merges = ekv_min(batch_size, budget);
    capacity->scratch_size = (size_t)batch_size * sizeof(int32_t);
    return EKV_OK;
}

/* The search counts no piece for an empty request but the final count does, so that under graph padding there can
 * be more work items than slots; FlashInfer then writes past its arrays and leaves outputs unwritten. */
static void pad_for_graph(ekv_plan *plan)
{
    plan->max_work_items = plan->split_kv ? max_grid(plan) / plan->heads : plan->batch.batch_size;
    if (plan->num_work_items > plan->max_work_items)
        ekv_plan_warn(plan,
                      "FlashInfer's graph padding fault: %" PRId64 " work items for %" PRId64
                      " slots, because empty requests are not counted",
                      plan->num_work_items, plan->max_work_items);
}

static void cuda_core_build(ekv_plan *plan)
{
    const int64_t batch_size = plan->batch.batch_size;
    if (batch_size * plan->heads >= max_grid(plan)) {
        ekv_split_grid_cut(plan, ekv_split_grid_longest(plan), false);
    } else {
        ekv_split_grid_cut(plan, ekv_split_grid_chunk(plan, max_grid(plan) / plan->heads, false), true);
        plan->split_kv = plan->options.cuda_graph || plan->num_work_items != batch_size;
    }
    if (plan->options.cuda_graph)
        pad_for_graph(plan);
    plan->dispatch = EKV_DISPATCH_GRID;
    plan->grid[0] = (int32_t)plan->max_work_items;
    plan->grid[1] = plan->heads;
    plan->grid[2] = 1;
    ekv_split_grid_emit(plan);
    const occupancy *known = find_occupancy(plan);
    if (!plan->options.resident_ctas && !known->measured)
        ekv_plan_warn(plan, "%d resident CTAs is what shared memory allows, not a measurement; see --resident-ctas",
                      plan->resident_ctas);
}

const ekv_planner ekv_planner_flashinfer_cuda_core = {
    .name = "flashinfer-cuda-core",
    .summary = "FlashInfer's CUDA-core decode grid: one chunk size, no split from B*Hkv >= SMs * resident CTAs on",
    .capacity = cuda_core_capacity,
    .build = cuda_core_build,
    .system = EKV_SYSTEM_FLASHINFER_CUDA_CORE,
};
