/* SPDX-License-Identifier: Apache-2.0
 * even-invariant: cases by hand, balance, the host's walk against the pure functions, and that a request is cut alike
 * in any company. */
#include "even_tests.h"

/* ---- By hand -------------------------------------------------------------------------- */

/* The chunks of three requests, each costing its tokens and 100, end at 356, 712, 900, 1050 and 1150 of a line of 1150
 * cut at 575. */
static void invariant_chunks_by_hand(void **state)
{
    (void)state;
    const setting s = setting_of("even-invariant", 2, 2, 256, 100);
    ekv_plan *plan = create_checked(&s, (int32_t[]){ 600, 50, 0 }, 3);
    assert_int_equal(plan->num_tiles, 5);
    expect_tile(plan, 0, 0, 0, 0, 0, 256, 0);
    expect_tile(plan, 1, 0, 0, 1, 256, 512, 2);
    expect_tile(plan, 2, 0, 0, 2, 512, 600, 4);
    expect_tile(plan, 3, 1, 0, 0, 0, 50, -1);
    expect_tile(plan, 4, 2, 0, 0, 0, 0, -1);
    expect_ranges(plan, (int64_t[]){ 0, 1, 5 });
    assert_int_equal(plan->num_merges, 1);
    assert_int_equal(plan->merges[0].num_splits, 3);
    assert_int_equal(plan->num_slots, 6);
    assert_int_equal(plan->kv_chunk_tokens, 256);
    assert_int_equal(plan->num_splits[0], 3);
    ekv_plan_free(plan);
}

static void invariant_capacity_is_enforced(void **state)
{
    (void)state;
    setting s = setting_of("even-invariant", 4, 1, 64, 0);
    ekv_plan *plan =
        create_checked(&s, (int32_t[]){ 640, 640 }, 2); /* room for 2,560 tokens: 40 chunks and a rest each */
    assert_int_equal(ekv_plan_update(plan, (int32_t[]){ 2559, 1 }, 2), EKV_OK);
    assert_int_equal(ekv_plan_update(plan, (int32_t[]){ 1281, 1279 }, 2), EKV_OK);
    ekv_plan_info before = EKV_PLAN_INFO_INIT, after = EKV_PLAN_INFO_INIT;
    assert_int_equal(ekv_plan_info_get(plan, &before), EKV_OK);
    assert_int_equal(ekv_plan_update(plan, (int32_t[]){ 10000, 1 }, 2), EKV_ERROR_CAPACITY);
    assert_non_null(strstr(ekv_last_error(), " 157 "));
    assert_non_null(strstr(ekv_last_error(), " 42 "));
    assert_int_equal(ekv_plan_info_get(plan, &after), EKV_OK);
    assert_int_equal(after.total_tokens, before.total_tokens);
    ekv_plan_free(plan);

    s.options.max_total_tokens = 1 << 20;
    plan = create_checked(&s, (int32_t[]){ 1, 1 }, 2);
    assert_int_equal(ekv_plan_update(plan, (int32_t[]){ 1 << 19, 1 << 19 }, 2), EKV_OK);
    assert_int_equal(ekv_plan_check(plan), EKV_OK);
    ekv_plan_free(plan);

    plan = NULL;
    s.options.max_total_tokens = 100;
    assert_int_equal(try_create(&s, (int32_t[]){ 1000 }, 1, &plan), EKV_ERROR_CAPACITY);
    s.options.max_total_tokens = INT64_MAX;
    assert_int_equal(try_create(&s, (int32_t[]){ 1000 }, 1, &plan), EKV_ERROR_OVERFLOW);
    assert_non_null(strstr(ekv_last_error(), "max_total_tokens is 9223372036854775807"));
    assert_null(plan);
}

/* 60,000 heads: (2^30 - 1) / 60,000 = 17,895 partial chunks are supported.  Twice the batch of 10,000 chunks would pass
 * that, twice one of 20,000 and that batch itself too. */
static void invariant_default_room_ends_at_what_is_supported(void **state)
{
    (void)state;
    setting s = setting_of("even-invariant", 4, 60000, 16, 0);
    s.options.heads_per_tile = 60000;
    ekv_plan *plan = create(&s, (int32_t[]){ 10000 * 16 }, 1);
    assert_int_equal(plan->num_tiles, 10000);
    assert_int_equal(ekv_plan_update(plan, (int32_t[]){ 17895 * 16 }, 1), EKV_OK);
    assert_int_equal(plan->num_tiles, 17895);
    assert_true(plan->num_slots <= plan->capacity.slots);
    assert_int_equal(ekv_plan_update(plan, (int32_t[]){ 17896 * 16 }, 1), EKV_ERROR_CAPACITY);
    ekv_plan_free(plan);

    plan = NULL;
    assert_int_equal(try_create(&s, (int32_t[]){ 20000 * 16 }, 1, &plan), EKV_ERROR_OVERFLOW);
    assert_non_null(strstr(ekv_last_error(), "1200000000 partial results; at most 1073741823 are supported"));
    assert_null(plan);
}

/* ---- Random batches ---------------------------------------------------------------------------------- */

static void invariant_is_balanced(void **state)
{
    (void)state;
    for_random_batches("even-invariant", BALANCE_BATCHES, check_balance);
}

static void check_invariant_walk(const setting *s, const int32_t *kv_len, int32_t batch_size, const char *where)
{
    ekv_plan *plan = create(s, kv_len, batch_size);
    int64_t *cost = calloc((size_t)batch_size + 1, sizeof *cost), tiles = 0, merges = 0;
    int32_t *partial = calloc((size_t)batch_size + 1, sizeof *partial);
    assert_non_null(cost);
    assert_non_null(partial);
    for (int32_t b = 0; b < batch_size; b++) {
        const int32_t n = (int32_t)ekv_max(1, ekv_ceil_div(kv_len[b], s->options.chunk_tokens));
        cost[b + 1] = cost[b] + kv_len[b] + (int64_t)n * plan->options.request_cost;
        partial[b + 1] = partial[b] + (n > 1 ? n : 0);
    }
    const ekv_even_chunks chunks = { line_of(plan, cost), partial };
    for (int32_t cta = 0; cta < chunks.line.num_ctas; cta++) {
        assert_int_equal(plan->cta_begin[cta], tiles);
        const ekv_even_place end = ekv_even_chunk_begin(&chunks, cta + 1);
        ekv_even_place at = ekv_even_chunk_begin(&chunks, cta);
        for (; ekv_even_before(at, end); at = ekv_even_chunk_next(&chunks.line, at)) {
            const ekv_merge merge = ekv_even_chunk_merge(&chunks, at);
            const ekv_tile tile = ekv_even_chunk_tile(&chunks, at, &merge);
            const int64_t pair = cost[at.request + 1] - cost[at.request];
            const int64_t z = chunks.line.groups * cost[at.request] + at.group * pair + tile.kv_end +
                              (int64_t)(tile.split + 1) * plan->options.request_cost;
            if (!owns(&chunks.line, cta, z))
                fail_msg("%s: chunk %d of request %d is in CTA %d", where, tile.split, tile.request, cta);
            expect_same_tile(plan, tiles++, tile, where);
            if (tile.flags & EKV_TILE_PARTIAL && tile.split == 0)
                expect_same_merge(plan, merges++, merge, where);
        }
    }
    assert_int_equal(tiles, plan->num_tiles);
    assert_int_equal(merges, plan->num_merges);
    free(cost);
    free(partial);
    ekv_plan_free(plan);
}

static void invariant_walk_is_the_pure_function(void **state)
{
    (void)state;
    for_random_batches("even-invariant", WALK_BATCHES, check_invariant_walk);
}

/* What a request's output depends on: its tiles' tokens and heads in split order, the same alone and in the batch. */
static void check_independence(const setting *s, const int32_t *kv_len, int32_t batch_size, const char *where)
{
    ekv_plan *batch = create(s, kv_len, batch_size);
    setting other = *s; /* another device, other shares */
    other.num_sms = 7;
    const int32_t request = (int32_t)(kv_len[0] % batch_size);
    ekv_plan *alone = create(&other, &kv_len[request], 1);
    int64_t i = 0;
    for (int64_t k = 0; k < batch->num_tiles; k++) {
        const ekv_tile *t = &batch->tiles[k], *a = &alone->tiles[i];
        if (t->request != request)
            continue;
        if (i++ >= alone->num_tiles || t->kv_begin != a->kv_begin || t->kv_end != a->kv_end || t->split != a->split ||
            t->head != a->head || t->head_count != a->head_count || t->flags != a->flags)
            fail_msg("%s: tile %lld of request %d differs alone", where, (long long)k, request);
    }
    assert_int_equal(i, alone->num_tiles);
    assert_int_equal(batch->num_splits[request], alone->num_splits[0]);
    ekv_plan_free(alone);
    ekv_plan_free(batch);
}

static void invariant_cuts_depend_on_the_request_alone(void **state)
{
    (void)state;
    for_random_batches("even-invariant", WALK_BATCHES, check_independence);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(invariant_chunks_by_hand),
        cmocka_unit_test(invariant_capacity_is_enforced),
        cmocka_unit_test(invariant_default_room_ends_at_what_is_supported),
        cmocka_unit_test(invariant_is_balanced),
        cmocka_unit_test(invariant_walk_is_the_pure_function),
        cmocka_unit_test(invariant_cuts_depend_on_the_request_alone),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
