/* SPDX-License-Identifier: Apache-2.0
 * flashinfer-xqa: one split count for the whole batch, grid (splits, KV heads x m_blocks, requests).
 * Rule: launchMHAFlashInfer in FlashInfer's csrc/xqa/mha.cu (commit fb28d72).  There split s of a request takes
 * every splits-th unit of 256 tokens from the s-th on; here it takes as many, contiguous ones.  A request with
 * fewer units than splits has trailing splits without tokens, as there. */
#include "base/status.h"
#include "plan/plan.h"

enum {
    UNIT_TOKENS = 256,  /* ctaTile.x: four warps of 64 tokens */
    SPEC_DEC_ROWS = 32, /* M_TILESIZE: rows of an m_block where a request has several query tokens */
    ROW_MULTIPLE = 16,  /* warpTile.y: rows are padded to that for the tensor cores */
    /* At head_dim 64 to 256 in 16 bits on sm_80 and sm_90 a CTA takes 64 KiB for K, 64 for V and more for Q, of
     * the 228 KiB of an SM. */
    RESIDENT_CTAS = 1
};

static int64_t request_units(int32_t kv_len)
{
    return ekv_ceil_div(kv_len, UNIT_TOKENS);
}

static ekv_status xqa_capacity(ekv_plan *plan, ekv_plan_capacity *capacity)
{
    ekv_plan_pack_rows(plan, plan->batch.q_len == 1 ? plan->group : SPEC_DEC_ROWS);
    plan->padded_rows = (int32_t)ekv_round_up(plan->block_m, ROW_MULTIPLE);
    plan->cut_tokens = UNIT_TOKENS;
    plan->resident_ctas = plan->options.resident_ctas ? plan->options.resident_ctas : RESIDENT_CTAS;
    plan->empty_splits = true;

    /* splits <= max(1, SMs / (B * heads)), so B * heads * splits <= max(B * heads, SMs); splits > 1 only where
     * 2 * B * heads <= SMs. */
    const int64_t batch_size = plan->batch.batch_size;
    capacity->tiles = ekv_max(batch_size * plan->heads, plan->num_sms) * plan->m_blocks;
    capacity->slots = (int64_t)plan->num_sms * plan->m_blocks;
    capacity->merges = ekv_min(batch_size, plan->num_sms / (2 * plan->heads)) * plan->m_blocks;
    capacity->scratch_size = (size_t)batch_size * sizeof(int32_t);
    return EKV_OK;
}

static int32_t batch_splits(const ekv_plan *plan)
{
    int64_t most_units = 1;
    for (int32_t b = 0; b < plan->batch.batch_size; b++)
        most_units = ekv_max(most_units, request_units(plan->kv_len[b]));
    int64_t share = plan->num_sms / ((int64_t)plan->batch.batch_size * plan->heads);
    return (int32_t)ekv_min(ekv_max(share, 1), most_units);
}

/* First token of a split: the units that do not divide evenly go one each to the first splits. */
static int32_t split_begin(int32_t kv_len, int32_t splits, int32_t split)
{
    int64_t units = request_units(kv_len);
    int64_t unit = split * (units / splits) + ekv_min(split, units % splits);
    return (int32_t)ekv_min(unit * UNIT_TOKENS, kv_len);
}

static void add_output(ekv_plan *plan, int32_t b, int32_t head, int32_t m_block, int32_t partial_base)
{
    const int32_t splits = plan->num_splits[b];
    for (int32_t split = 0; split < splits; split++)
        ekv_plan_add_tile(
            plan, (ekv_tile){ .request = b,
                              .m_block = m_block,
                              .split = split,
                              .kv_begin = split_begin(plan->kv_len[b], splits, split),
                              .kv_end = split_begin(plan->kv_len[b], splits, split + 1),
                              .slot = splits > 1 ? (partial_base + m_block * splits + split) * plan->heads + head : -1,
                              .head = (uint16_t)head,
                              .head_count = 1,
                              .flags = splits > 1 ? EKV_TILE_PARTIAL : 0 });
}

static void xqa_build(ekv_plan *plan)
{
    const int32_t batch_size = plan->batch.batch_size, splits = batch_splits(plan);
    int32_t *partial_base = plan->scratch;
    plan->dispatch = EKV_DISPATCH_GRID;
    plan->grid[0] = splits;
    plan->grid[1] = plan->heads * plan->m_blocks;
    plan->grid[2] = batch_size;
    plan->split_kv = splits > 1;
    plan->num_work_items = plan->max_work_items = (int64_t)batch_size * plan->m_blocks * splits;
    for (int32_t b = 0; b < batch_size; b++) {
        plan->num_splits[b] = splits;
        plan->batch_order[b] = b;
    }
    ekv_plan_add_split_merges(plan, false, partial_base);
    for (int32_t b = 0; b < batch_size; b++)
        for (int32_t head = 0; head < plan->heads; head++)
            for (int32_t m = 0; m < plan->m_blocks; m++)
                add_output(plan, b, head, m, partial_base[b]);
}

const ekv_planner ekv_planner_flashinfer_xqa = {
    .name = "flashinfer-xqa",
    .summary = "FlashInfer's XQA: one split count for all requests, what fills the SMs, at least 256 tokens each",
    .capacity = xqa_capacity,
    .build = xqa_build,
    .system = EKV_SYSTEM_FLASHINFER_XQA,
};
