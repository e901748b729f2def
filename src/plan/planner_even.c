/* SPDX-License-Identifier: Apache-2.0
 * even: each CTA owns an equal share of the batch's cost, whatever the lengths.  The rule is in even_rule.h; this is
 * a walk over the CTAs that finds in passing what ekv_even_begin searches for. */
#include "plan/planner_even.h"

#include "base/status.h"

#include <inttypes.h>

/* KV heads that one CTA reads together by default: on an H200, at 32/4/128 bf16 and 2,048 requests, 4 heads of a token
 * range in one CTA took 278 us and one head a CTA 330 us, as pages are then read as one piece.  With more heads, or
 * with more than 2 of head_dim 256, the mma kernel's CTA of one warp a head leaves no room for a second one on the SM.
 */
static int32_t most_heads_per_tile(const ekv_plan *plan)
{
    return plan->batch.head_dim > 128 ? 2 : 4;
}

/* least_share by default, in tokens of one head: 256 KB of bf16 at head_dim 128, which a lone CTA of an H200 reads in
 * about the time that a cut costs.  16,384 tokens of 4 heads in 128 equal requests took 20.9 us with 512, 28.9 with 0.
 */
enum { LEAST_SHARE = 512 };

void ekv_even_resolve(ekv_plan *plan)
{
    ekv_plan_options *options = &plan->options;
    if (!options->heads_per_tile) {
        options->heads_per_tile = (int32_t)ekv_min(plan->batch.kv_heads, most_heads_per_tile(plan));
        while (plan->batch.kv_heads % options->heads_per_tile)
            options->heads_per_tile--;
    }
    if (!options->ctas_per_sm)
        options->ctas_per_sm = plan->device.ctas_per_sm;
    if (options->request_cost < 0)
        options->request_cost = (int32_t)ekv_ceil_div(plan->device.request_cost_tokens, options->heads_per_tile);
    if (options->snap_tokens < 0)
        options->snap_tokens = EKV_EVEN_SNAP_TOKENS;
    if (options->least_share < 0)
        options->least_share = plan->device.sm_arch ? (int32_t)ekv_ceil_div(LEAST_SHARE, options->heads_per_tile) : 0;
    ekv_plan_pack_rows(plan, plan->batch.q_len * plan->group);
    plan->resident_ctas = options->ctas_per_sm;
}

ekv_status ekv_even_fit_line(const ekv_plan *plan, int64_t group_cost)
{
    const int64_t groups = plan->heads / plan->options.heads_per_tile;
    const int64_t ctas = (int64_t)plan->num_sms * plan->resident_ctas;
    if (group_cost > INT64_MAX / (groups * ctas))
        return ekv_fail(EKV_ERROR_OVERFLOW,
                        "a line of %" PRId64 " head groups, each of cost %" PRId64 ", in %" PRId64
                        " shares does not fit 64 bits",
                        groups, group_cost, ctas);
    return EKV_OK;
}

ekv_even_line ekv_even_line_of(const ekv_plan *plan)
{
    return (ekv_even_line){ .kv_len = plan->kv_len,
                            .batch_size = plan->batch.batch_size,
                            .groups = plan->heads / plan->options.heads_per_tile,
                            .heads_per_tile = plan->options.heads_per_tile,
                            .num_ctas = plan->num_sms * plan->resident_ctas,
                            .block_tokens = plan->block_tokens,
                            .request_cost = plan->options.request_cost,
                            .snap_tokens = plan->options.snap_tokens,
                            .least_share = plan->options.least_share };
}

ekv_even_line ekv_even_start(ekv_plan *plan, const int64_t *cost)
{
    ekv_even_line line = ekv_even_line_of(plan);
    line.cost = cost;
    plan->dispatch = EKV_DISPATCH_RANGE;
    plan->grid[0] = line.num_ctas;
    plan->grid[1] = plan->grid[2] = 1;
    plan->split_kv = false;
    plan->num_work_items = line.batch_size;
    for (int32_t b = 0; b < line.batch_size; b++) {
        plan->num_splits[b] = 1;
        plan->batch_order[b] = b;
    }
    return line;
}

void ekv_even_add_merge(ekv_plan *plan, ekv_merge merge)
{
    int32_t *num_splits = &plan->num_splits[merge.request];
    ekv_plan_add_merge(plan, merge);
    plan->split_kv = true;
    if (merge.num_splits > *num_splits) { /* head groups of a request may be cut differently */
        plan->num_work_items += merge.num_splits - *num_splits;
        *num_splits = merge.num_splits;
    }
}

/* ---- The planner ------------------------------------------------------------------------------------- */

/* A CTA begins in at most one pair that an earlier one began: tiles are pairs and num_ctas - 1 cuts, and as many pairs
 * at most are cut. */
static ekv_status even_capacity(ekv_plan *plan, ekv_plan_capacity *capacity)
{
    ekv_plan_options *options = &plan->options;
    if (!options->block_tokens) /* whole pages, where a page is a sensible block of an attention kernel */
        options->block_tokens = plan->batch.page_size >= 16 && plan->batch.page_size <= 64 ? plan->batch.page_size : 16;
    ekv_even_resolve(plan);
    plan->block_tokens = plan->cut_tokens = options->block_tokens;
    plan->request_cost = options->request_cost;

    const int64_t ctas = (int64_t)plan->num_sms * plan->resident_ctas;
    const int64_t pairs = (int64_t)plan->batch.batch_size * (plan->heads / options->heads_per_tile);
    capacity->tiles = pairs + ctas - 1;
    capacity->merges = ekv_min(pairs, ctas);
    capacity->slots = ctas > 1 ? 2 * ctas * options->heads_per_tile : 0;
    capacity->ctas = ctas;
    capacity->scratch_size = ((size_t)plan->batch.batch_size + 1) * sizeof(int64_t);
    return EKV_OK;
}

static ekv_status even_fits(const ekv_plan *plan, const int32_t *kv_len, int32_t batch_size)
{
    int64_t tokens = 0;
    for (int32_t b = 0; b < batch_size; b++)
        tokens += kv_len[b];
    return ekv_even_fit_line(plan, tokens + (int64_t)batch_size * (plan->block_tokens + plan->request_cost));
}

/* The pair that was cut last: the one that the next CTA continues. */
typedef struct last_cut {
    ekv_merge merge;
    int32_t first_cta;
} last_cut;

/* Appends the pieces of CTA cta, which begins at `at` and ends at `end`: the rest of a pair, whole pairs, and the
 * begin of a pair. */
static void add_pieces(ekv_plan *plan, const ekv_even_line *line, int32_t cta, ekv_even_place at, ekv_even_place end,
                       last_cut *cut)
{
    ekv_tile *tile = plan->tiles + plan->num_tiles;
    if (at.token > 0 && ekv_even_before(at, end)) {
        *tile++ = ekv_even_part(line, cta, at, end, &cut->merge, cut->first_cta);
        at = ekv_even_next_pair(line, at);
    }
    for (; at.request < end.request || (at.request == end.request && at.group < end.group);
         at = ekv_even_next_pair(line, at))
        *tile++ = ekv_even_whole(line, at);
    if (ekv_even_before(at, end)) {
        *cut = (last_cut){ ekv_even_merge(line, at, cta), cta };
        ekv_even_add_merge(plan, cut->merge);
        *tile++ = ekv_even_part(line, cta, at, end, &cut->merge, cta);
    }
    plan->num_tiles = tile - plan->tiles;
}

static void even_build(ekv_plan *plan)
{
    int64_t *cost = plan->scratch;
    ekv_even_line line = ekv_even_start(plan, cost);
    cost[0] = 0;
    for (int32_t b = 0; b < line.batch_size; b++)
        cost[b + 1] = cost[b] + ekv_even_cost(line.kv_len[b], line.block_tokens, line.request_cost);
    ekv_even_sum(&line);

    ekv_even_place at = { 0, 0, 0 };
    last_cut cut = { 0 };
    int32_t request = 0;
    const int32_t num_ctas = plan->grid[0];
    for (int32_t cta = 0; cta < num_ctas; cta++) {
        ekv_even_place end = { line.batch_size, 0, 0 };
        const int64_t x = ekv_even_share(&line, cta + 1);
        if (ekv_even_advance(&line, x, &request))
            end = ekv_even_locate(&line, request, x);
        plan->cta_begin[cta] = plan->num_tiles;
        add_pieces(plan, &line, cta, at, end, &cut);
        at = end;
    }
    plan->cta_begin[num_ctas] = plan->num_tiles;
    plan->max_work_items = plan->num_work_items;
    plan->num_slots = plan->split_kv ? plan->capacity.slots : 0;
}

const ekv_planner ekv_planner_even = {
    .name = "even",
    .summary = "every CTA an equal share of the batch's cost, requests cut where a share ends",
    .capacity = even_capacity,
    .fits = even_fits,
    .build = even_build,
    .system = EKV_SYSTEM_EVENKV,
    .device_rule = EKV_DEVICE_RULE_EVEN,
};
