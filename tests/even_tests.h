/* SPDX-License-Identifier: Apache-2.0
 * What the tests of even and of even-invariant share. */
#ifndef EVENKV_TESTS_EVEN_TESTS_H
#define EVENKV_TESTS_EVEN_TESTS_H

#include "base/rng.h"
#include "plan/even_invariant_rule.h"
#include "plan/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { BALANCE_BATCHES = 2000, WALK_BATCHES = 1000, LARGEST_BATCH = 1500 };

/* ---- Plans ------------------------------------------------------------------------------------------- */

typedef struct setting {
    const char *planner;
    int32_t num_sms, ctas_per_sm, kv_heads;
    ekv_plan_options options;
} setting;

static ekv_context *context;
static int64_t allocations;

static inline void *count_alloc(size_t size, void *user)
{
    (void)user;
    allocations++;
    return malloc(size);
}

static inline void count_free(void *pointer, void *user)
{
    (void)user;
    free(pointer);
}

static inline int create_context(void **state)
{
    (void)state;
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.num_threads = 1;
    options.alloc = count_alloc;
    options.free = count_free;
    return ekv_context_create(&options, &context);
}

static inline int free_context(void **state)
{
    (void)state;
    ekv_context_free(context);
    return 0;
}

static inline setting setting_of(const char *planner, int32_t num_sms, int32_t kv_heads, int32_t block,
                                 int32_t request_cost)
{
    setting s = { planner, num_sms, 1, kv_heads, EKV_PLAN_OPTIONS_INIT };
    if (!strcmp(planner, "even"))
        s.options.block_tokens = block;
    else
        s.options.chunk_tokens = block;
    s.options.request_cost = request_cost;
    s.options.snap_tokens = 0;
    s.options.least_share = 0;
    return s;
}

static inline ekv_status try_create(const setting *s, const int32_t *kv_len, int32_t batch_size, ekv_plan **plan)
{
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = batch_size;
    batch.kv_len = kv_len;
    batch.kv_heads = s->kv_heads;
    batch.q_heads = s->kv_heads;
    batch.head_dim = 128;
    ekv_device device = EKV_DEVICE_INIT;
    device.num_sms = s->num_sms;
    device.ctas_per_sm = s->ctas_per_sm;
    device.request_cost_tokens = 12;
    return ekv_plan_create(context, s->planner, &batch, &device, &s->options, plan);
}

static inline ekv_plan *create(const setting *s, const int32_t *kv_len, int32_t batch_size)
{
    ekv_plan *plan = NULL;
    if (try_create(s, kv_len, batch_size, &plan))
        fail_msg("%s", ekv_last_error());
    return plan;
}

static inline ekv_plan *create_checked(const setting *s, const int32_t *kv_len, int32_t batch_size)
{
    ekv_plan *plan = create(s, kv_len, batch_size);
    if (ekv_plan_check(plan))
        fail_msg("%s", ekv_last_error());
    return plan;
}

static inline void expect_tile(const ekv_plan *plan, int64_t index, int32_t request, int32_t head, int32_t split,
                               int32_t kv_begin, int32_t kv_end, int32_t slot)
{
    assert_true(index < plan->num_tiles);
    const ekv_tile *tile = &plan->tiles[index];
    assert_int_equal(tile->request, request);
    assert_int_equal(tile->m_block, 0);
    assert_int_equal(tile->head, head);
    assert_int_equal(tile->split, split);
    assert_int_equal(tile->kv_begin, kv_begin);
    assert_int_equal(tile->kv_end, kv_end);
    assert_int_equal(tile->slot, slot);
    assert_int_equal(tile->flags, slot < 0 ? 0 : EKV_TILE_PARTIAL);
}

static inline void expect_ranges(const ekv_plan *plan, const int64_t *cta_begin)
{
    for (int64_t i = 0; i <= ekv_plan_num_ctas(plan); i++)
        assert_int_equal(plan->cta_begin[i], cta_begin[i]);
}

/* ---- Random batches ---------------------------------------------------------------------------------- */

static int32_t random_length(ekv_rng *rng, int64_t kind, int32_t block)
{
    switch (kind) {
    case 0: return (int32_t)ekv_rng_below(rng, 4096);
    case 1: return (int32_t)ekv_rng_below(rng, 3);
    case 2: return block;
    case 3: return block * (int32_t)ekv_rng_below(rng, 20) + (int32_t)ekv_rng_below(rng, 3) - (int32_t)1;
    case 4: return ekv_rng_below(rng, 50) ? (int32_t)ekv_rng_below(rng, 100) : 100000;
    case 5: return (int32_t)1 << ekv_rng_below(rng, 14);
    default: return 777;
    }
}

/* Fills kv_len and returns the number of requests. */
static int32_t random_batch(ekv_rng *rng, int32_t block, int32_t longest, int32_t *kv_len)
{
    static const int32_t largest[] = { 4, 40, 400, LARGEST_BATCH };
    const int64_t size = ekv_rng_below(rng, 20);
    const int32_t batch_size = 1 + (int32_t)ekv_rng_below(rng, largest[size < 8    ? 0
                                                                       : size < 15 ? 1
                                                                       : size < 19 ? 2
                                                                                   : 3]);
    const int64_t kind = ekv_rng_below(rng, 8);
    for (int32_t b = 0; b < batch_size; b++)
        kv_len[b] = (int32_t)ekv_max(0, random_length(rng, kind == 7 ? ekv_rng_below(rng, 7) : kind, block));
    if (ekv_rng_below(rng, 8) == 0) /* one giant */
        kv_len[ekv_rng_below(rng, batch_size)] = 1 + (int32_t)ekv_rng_below(rng, longest);
    return batch_size;
}

static inline setting random_setting(ekv_rng *rng, const char *planner)
{
    static const int32_t sms[] = { 1, 2, 3, 8, 78, 108, 132 }, heads[] = { 1, 2, 4, 6, 8, 16, 20 };
    static const int32_t blocks[] = { 1, 2, 16, 16, 24, 64, 100, 256 }; /* chunks of 1 would make millions of tiles */
    const int32_t block = blocks[strcmp(planner, "even") ? 3 + ekv_rng_below(rng, 5) : ekv_rng_below(rng, 8)];
    setting s = setting_of(planner, sms[ekv_rng_below(rng, 7)], heads[ekv_rng_below(rng, 7)], block,
                           (int32_t)ekv_rng_below(rng, 4 * block + 1));
    if (ekv_rng_below(rng, 3) == 0)
        s.options.request_cost = 0;
    if (ekv_rng_below(rng, 2) == 0)
        s.options.snap_tokens = (int32_t)ekv_rng_below(rng, 1 << ekv_rng_below(rng, 14));
    if (ekv_rng_below(rng, 2) == 0)
        s.options.least_share = (int32_t)ekv_rng_below(rng, 1 << ekv_rng_below(rng, 12));
    if (ekv_rng_below(rng, 3) == 0)
        s.options.heads_per_tile = s.kv_heads % 2 ? 1 : 2;
    s.ctas_per_sm = 1 + (int32_t)ekv_rng_below(rng, 3);
    s.options.max_total_tokens = (int64_t)1 << 32;
    if (!strcmp(planner, "even-invariant"))
        s.options.max_total_tokens = 0;
    return s;
}

static inline void for_random_batches(const char *planner, int32_t batches,
                                      void (*check)(const setting *s, const int32_t *kv_len, int32_t batch_size,
                                                    const char *where))
{
    int32_t *kv_len = malloc(LARGEST_BATCH * sizeof *kv_len);
    assert_non_null(kv_len);
    for (uint64_t seed = 1; seed <= (uint64_t)batches; seed++) {
        char where[64];
        ekv_rng rng = { seed };
        const setting s = random_setting(&rng, planner);
        const int32_t block = s.options.block_tokens + s.options.chunk_tokens;
        const int32_t longest = s.options.chunk_tokens ? 200000 : 4000000; /* chunks are as many as tokens allow */
        const int32_t batch_size = random_batch(&rng, block, longest, kv_len);
        snprintf(where, sizeof where, "%s, seed %llu", planner, (unsigned long long)seed);
        check(&s, kv_len, batch_size, where);
    }
    free(kv_len);
}

/* Largest cost of a CTA and, in *total, that of all, in tokens of one head. */
static int64_t largest_cost(const ekv_plan *plan, int64_t *total)
{
    const bool chunks = plan->request_cost < 0; /* even-invariant: every chunk has the constant, and no rounding */
    int64_t largest = 0;
    *total = 0;
    for (int64_t cta = 0; cta < ekv_plan_num_ctas(plan); cta++) {
        int64_t cost = 0;
        for (int64_t i = plan->cta_begin[cta]; i < plan->cta_begin[cta + 1]; i++) {
            const ekv_tile *t = &plan->tiles[i];
            const int64_t tokens = t->kv_end - t->kv_begin;
            cost += t->head_count * (chunks ? tokens : ekv_round_up(tokens, plan->block_tokens));
            if (chunks || t->kv_begin == 0)
                cost += t->head_count * plan->options.request_cost;
        }
        largest = ekv_max(largest, cost);
        *total += cost;
    }
    return largest;
}

/* Invariants 5, 6 and 7 of docs/planners.md. */
static inline void check_balance(const setting *s, const int32_t *kv_len, int32_t batch_size, const char *where)
{
    ekv_plan *plan = create_checked(s, kv_len, batch_size);
    const int64_t ctas = ekv_plan_num_ctas(plan);
    int64_t total, other_total;
    const int64_t largest = largest_cost(plan, &total), heads = plan->options.heads_per_tile;
    const int64_t least = plan->request_cost < 0 ? 0 : plan->options.least_share;
    const bool few = least > 0 && total / heads / least < ctas;
    const int64_t pairs = (int64_t)batch_size * (plan->heads / heads);
    const int64_t sharing = few ? ekv_max(total / heads / least, ekv_min(pairs, ctas)) : ctas;
    const int64_t snap =
        plan->request_cost < 0 ? 0 : ekv_min(total / heads / sharing * (few ? 6 : 1) / 8, plan->options.snap_tokens);
    const int64_t block = heads * (plan->block_tokens + plan->options.request_cost + 2 * snap);
    if ((largest - block) * sharing >= total && total > 0)
        fail_msg("%s: the largest cost is %lld of %lld over %lld CTAs, a block %lld", where, (long long)largest,
                 (long long)total, (long long)sharing, (long long)block);
    for (int64_t cta = 0; cta < ctas && plan->request_cost >= 0; cta++) {
        int32_t cut = 0;
        for (int64_t i = plan->cta_begin[cta]; i < plan->cta_begin[cta + 1]; i++)
            cut += plan->tiles[i].flags & EKV_TILE_PARTIAL ? 1 : 0;
        if (cut > 2)
            fail_msg("%s: CTA %lld has %d cut pieces", where, (long long)cta, cut);
    }
    int32_t *shuffled = malloc((size_t)batch_size * sizeof *shuffled);
    assert_non_null(shuffled);
    memcpy(shuffled, kv_len, (size_t)batch_size * sizeof *shuffled);
    ekv_rng rng = { (uint64_t)batch_size };
    for (int32_t b = batch_size - 1; b > 0; b--) {
        const int64_t other = ekv_rng_below(&rng, b + 1);
        const int32_t swap = shuffled[b];
        shuffled[b] = shuffled[other];
        shuffled[other] = swap;
    }
    const int64_t before = allocations;
    assert_int_equal(ekv_plan_update(plan, shuffled, batch_size), EKV_OK);
    assert_int_equal(allocations, before);
    const int64_t other = largest_cost(plan, &other_total);
    assert_int_equal(other_total, total);
    if (llabs(other - largest) > block)
        fail_msg("%s: the largest cost is %lld, in another order %lld", where, (long long)largest, (long long)other);
    free(shuffled);
    ekv_plan_free(plan);
}

/* ---- The pure functions ------------------------------------------------------------------------------ */

static inline ekv_even_line line_of(const ekv_plan *plan, int64_t *cost)
{
    ekv_even_line line = { .cost = cost,
                           .kv_len = plan->kv_len,
                           .batch_size = plan->batch.batch_size,
                           .groups = plan->heads / plan->options.heads_per_tile,
                           .heads_per_tile = plan->options.heads_per_tile,
                           .num_ctas = plan->grid[0],
                           .block_tokens = plan->block_tokens,
                           .request_cost = plan->options.request_cost,
                           .snap_tokens = plan->options.snap_tokens,
                           .least_share = plan->options.least_share };
    ekv_even_sum(&line);
    return line;
}

static inline void expect_same_tile(const ekv_plan *plan, int64_t index, ekv_tile tile, const char *where)
{
    if (index >= plan->num_tiles || memcmp(&plan->tiles[index], &tile, sizeof tile))
        fail_msg("%s: tile %lld is not that of the pure function", where, (long long)index);
}

static inline void expect_same_merge(const ekv_plan *plan, int64_t index, ekv_merge merge, const char *where)
{
    if (index >= plan->num_merges || memcmp(&plan->merges[index], &merge, sizeof merge))
        fail_msg("%s: merge %lld is not that of the pure function", where, (long long)index);
}

/* Whether the share of the CTA contains unit z - 1; a block at the begin of the line without cost has none. */
static inline bool owns(const ekv_even_line *line, int32_t cta, int64_t z)
{
    const int64_t unit = ekv_max(z, 1) - 1;
    return (cta == 0 && z == 0) ||
           (cta * line->total / line->num_ctas <= unit && unit < (cta + 1) * line->total / line->num_ctas);
}

#endif
