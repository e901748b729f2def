/* SPDX-License-Identifier: Apache-2.0
 * even-invariant: requests are cut at multiples of their own tokens only, so that an output does not depend on the
 * rest of the batch; the chunks are shared out as evenly as they allow.  The rule is in even_invariant_rule.h. */
#include "plan/even_invariant_rule.h"
#include "plan/planner_even.h"

#include "base/status.h"

#include <inttypes.h>

/* Of a chunk, by default: its partial results in float32 are then G / 1024 of its bytes in 16-bit KV.  Measured on one
 * H200, 524,288 tokens, 32/4/128: uniform lengths took 274 us at 4, 128 and 992 requests, against 315, 328 and 347 us
 * with chunks of 256 tokens. */
enum { CHUNK_TOKENS = 1024 };

/* Of lengths: their sum and the chunks, of one head group, that are partial. */
typedef struct demand {
    int64_t tokens, partial;
} demand;

static demand demand_of(const int32_t *kv_len, int32_t batch_size, int32_t chunk_tokens)
{
    demand d = { 0, 0 };
    for (int32_t b = 0; b < batch_size; b++) {
        const int32_t chunks = ekv_even_num_chunks(kv_len[b], chunk_tokens);
        d.tokens += kv_len[b];
        d.partial += chunks > 1 ? chunks : 0;
    }
    return d;
}

/* Partial chunks, of one head group, of any lengths of this sum.  A request of length L > S has ceil(L / S) <=
 * floor((L - 1) / S) + 1 of them and there are at most total / S such requests: together at most
 * total / S + min(total / S, batch_size). */
static int64_t partial_bound(const ekv_plan *plan, int64_t total)
{
    const int64_t largest = (int64_t)1 << 40; /* the largest sum of lengths that a plan accepts */
    const int64_t chunks = ekv_min(total, largest) / plan->options.chunk_tokens;
    return chunks + ekv_min(chunks, plan->batch.batch_size);
}

/* Room for partial chunks of one head group: for max_total_tokens, or else for twice the batch as far as that is
 * supported. */
static ekv_status partial_room(const ekv_plan *plan, int64_t groups, int64_t *room)
{
    const int64_t given = plan->options.max_total_tokens;
    const int64_t supported =
        ekv_min(EKV_PLAN_MAX_RECORDS / plan->heads, EKV_PLAN_MAX_RECORDS / groups - plan->batch.batch_size);
    if (given) {
        *room = partial_bound(plan, given);
        if (*room > supported)
            return ekv_fail(EKV_ERROR_OVERFLOW,
                            "max_total_tokens is %" PRId64 ", up to %" PRId64 " partial chunks of %d tokens; of %d "
                            "heads and %d requests at most %" PRId64 " are supported",
                            given, *room, plan->options.chunk_tokens, plan->heads, plan->batch.batch_size,
                            ekv_max(supported, 0));
        return EKV_OK;
    }
    const demand own = demand_of(plan->batch.kv_len, plan->batch.batch_size, plan->options.chunk_tokens);
    const int32_t factor = plan->options.on_device ? 1 : 2; /* on the device lengths are upper bounds already */
    *room = ekv_max(own.partial, ekv_min(partial_bound(plan, factor * own.tokens), supported));
    return EKV_OK;
}

static ekv_status even_invariant_capacity(ekv_plan *plan, ekv_plan_capacity *capacity)
{
    if (!plan->options.chunk_tokens)
        plan->options.chunk_tokens = CHUNK_TOKENS;
    ekv_even_resolve(plan);
    plan->options.least_share = 0; /* how a request is cut must not depend on the others */
    plan->block_tokens = plan->cut_tokens = plan->options.chunk_tokens;

    const int64_t groups = plan->heads / plan->options.heads_per_tile;
    int64_t partial;
    ekv_status status = partial_room(plan, groups, &partial);
    if (status)
        return status;
    capacity->tiles = (partial + plan->batch.batch_size) * groups;
    capacity->merges = ekv_min(partial / 2, plan->batch.batch_size) * groups;
    capacity->slots = partial * plan->heads;
    capacity->ctas = (int64_t)plan->num_sms * plan->resident_ctas;
    capacity->scratch_size = ((size_t)plan->batch.batch_size + 1) * (sizeof(int64_t) + sizeof(int32_t));
    return EKV_OK;
}

static ekv_status even_invariant_fits(const ekv_plan *plan, const int32_t *kv_len, int32_t batch_size)
{
    const demand d = demand_of(kv_len, batch_size, plan->block_tokens);
    const int64_t room = plan->capacity.slots / plan->heads;
    if (d.partial > room)
        return ekv_fail(EKV_ERROR_CAPACITY,
                        "kv_len needs %" PRId64 " partial chunks of %d tokens; the plan has room for %" PRId64
                        " (max_total_tokens)",
                        d.partial, plan->block_tokens, room);
    return ekv_even_fit_line(plan, d.tokens + (d.partial + batch_size) * plan->options.request_cost);
}

/* Appends the chunks of a CTA, which begins at `at` and ends at `end`. */
static void add_chunks(ekv_plan *plan, const ekv_even_chunks *chunks, ekv_even_place at, ekv_even_place end)
{
    ekv_tile *tile = plan->tiles + plan->num_tiles;
    while (ekv_even_before(at, end)) {
        const ekv_merge merge = ekv_even_chunk_merge(chunks, at);
        const int32_t request = at.request, group = at.group;
        if (merge.num_splits > 1 && at.token == 0)
            ekv_even_add_merge(plan, merge);
        for (; at.request == request && at.group == group && ekv_even_before(at, end);
             at = ekv_even_chunk_next(&chunks->line, at))
            *tile++ = ekv_even_chunk_tile(chunks, at, &merge);
    }
    plan->num_tiles = tile - plan->tiles;
}

static void even_invariant_build(ekv_plan *plan)
{
    int64_t *cost = plan->scratch;
    int32_t *partial = (int32_t *)(cost + plan->batch.batch_size + 1);
    ekv_even_chunks chunks = { ekv_even_start(plan, cost), partial };
    ekv_even_line *line = &chunks.line;
    cost[0] = partial[0] = 0;
    for (int32_t b = 0; b < line->batch_size; b++) {
        const int32_t n = ekv_even_num_chunks(line->kv_len[b], line->block_tokens);
        cost[b + 1] = cost[b] + ekv_even_chunks_cost(line->kv_len[b], n, line->request_cost);
        partial[b + 1] = partial[b] + (n > 1 ? n : 0);
    }
    line->total = line->groups * cost[line->batch_size];

    ekv_even_place at = { 0, 0, 0 };
    int32_t request = 0;
    for (int32_t cta = 0; cta < line->num_ctas; cta++) {
        ekv_even_place end = { line->batch_size, 0, 0 };
        const int64_t x = ekv_even_share(line, cta + 1);
        if (ekv_even_advance(line, x, &request))
            end = ekv_even_chunk_locate(&chunks, request, x);
        plan->cta_begin[cta] = plan->num_tiles;
        add_chunks(plan, &chunks, at, end);
        at = end;
    }
    plan->cta_begin[line->num_ctas] = plan->num_tiles;
    plan->max_work_items = plan->num_work_items;
    plan->kv_chunk_tokens = line->block_tokens;
    plan->num_slots = (int64_t)partial[line->batch_size] * plan->heads;
}

const ekv_planner ekv_planner_even_invariant = {
    .name = "even-invariant",
    .summary = "as even, but requests are cut at multiples of their own tokens: outputs do not depend on the batch",
    .capacity = even_invariant_capacity,
    .fits = even_invariant_fits,
    .build = even_invariant_build,
    .system = EKV_SYSTEM_EVENKV,
    .device_rule = EKV_DEVICE_RULE_EVEN_INVARIANT,
};
