/* SPDX-License-Identifier: Apache-2.0
 * FlashInfer's BatchAttention against plans worked out by hand. */
#include "base/rng.h"
#include "planner_tests.h"

enum { MANY = 65536 };

/* 612 tokens on 4 workers: 153 each, so requests are cut at 256.  The works cost 288, 288, 32, 132 in this order.
 * All workers are idle at first; GCC's heap then offers them as 0, 2, 3, 1. */
static void batch_attention_deals_to_the_least_loaded(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 512, 0, 100 };
    setup s = hopper(2, 8, 1);
    ekv_plan *plan = make_plan(&s, BATCH_ATTENTION, kv_len, 3);
    assert_sound(plan);
    assert_int_equal(plan->dispatch, EKV_DISPATCH_RANGE);
    assert_int_equal(plan->resident_ctas, 2);
    assert_grid(plan, 4, 1, 1);
    assert_int_equal(plan->kv_chunk_tokens, 256);
    assert_int_equal(plan->num_work_items, 4);
    for (int64_t worker = 0; worker <= 4; worker++)
        assert_int_equal(plan->cta_begin[worker], worker);
    assert_tile(plan, 0, tile(0, 0, 0, 256, 0, 0));
    assert_tile(plan, 1, tile(2, 0, 0, 100, -1, 0));
    assert_tile(plan, 2, tile(0, 1, 256, 512, 1, 0));
    assert_tile(plan, 3, tile(1, 0, 0, 0, -1, 0));
    assert_int_equal(plan->num_merges, 1);
    ekv_plan_free(plan);

    const int32_t longer[] = { 512, 0, 100, 50, 1 }; /* 50 goes to worker 3 (32), 1 to worker 3 (114 < 132) */
    plan = make_plan(&s, BATCH_ATTENTION, longer, 5);
    assert_sound(plan);
    assert_int_equal(plan->cta_begin[3], 3);
    assert_tile(plan, 3, tile(1, 0, 0, 0, -1, 0));
    assert_tile(plan, 4, tile(3, 0, 0, 50, -1, 0));
    assert_tile(plan, 5, tile(4, 0, 0, 1, -1, 0));
    ekv_plan_free(plan);
}

/* Two workers: 60 tokens cost 92, three times 10 cost 126, so the next goes to the former. */
static void batch_attention_counts_a_constant_a_work(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 60, 10, 10, 10, 7 };
    setup s = hopper(1, 8, 1);
    ekv_plan *plan = make_plan(&s, BATCH_ATTENTION, kv_len, 5);
    assert_sound(plan);
    assert_int_equal(plan->cta_begin[1], 2);
    assert_tile(plan, 0, tile(0, 0, 0, 60, -1, 0));
    assert_tile(plan, 1, tile(4, 0, 0, 7, -1, 0));
    ekv_plan_free(plan);
}

static void batch_attention_limits(void **state)
{
    (void)state;
    const struct {
        int32_t kv_len, q_len, head_dim, kv_heads, limit;
    } cases[] = {
        { 0, 1, 128, 1, 128 },      { 512, 1, 128, 1, 128 },   { 513, 1, 128, 1, 256 },
        { 1024, 1, 128, 1, 256 },   { 1025, 1, 128, 1, 512 },  { 256, 1, 128, 2, 128 },
        { 257, 1, 128, 2, 256 },    { 257, 1, 256, 1, 256 },   { 256, 1, 256, 1, 128 }, /* one worker an SM */
        { 4096, 4, 128, 1, 1024 },  { 4096, 4, 128, 2, 1024 }, /* 128-row works: half for two heads or more */
        { 4096, 20, 128, 2, 2048 },                            /* both m_blocks count: 160 rows */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup s = hopper(2, 8 * cases[i].kv_heads, cases[i].kv_heads);
        s.batch.q_len = cases[i].q_len;
        s.batch.head_dim = cases[i].head_dim;
        ekv_plan *plan = make_skewed(&s, BATCH_ATTENTION, cases[i].kv_len, 0, 1);
        if (plan->kv_chunk_tokens != cases[i].limit)
            fail_msg("case %d: limit is %d, not %d", (int)i, (int)plan->kv_chunk_tokens, cases[i].limit);
        ekv_plan_free(plan);
    }
}

static void batch_attention_refuses_too_many_works(void **state)
{
    (void)state;
    static int32_t kv_len[MANY + 1];
    setup s = hopper(H200_SMS, 8, 1);
    ekv_plan *plan = make_plan(&s, BATCH_ATTENTION, kv_len, MANY);
    assert_sound(plan);
    assert_int_equal(plan->num_tiles, MANY);
    kv_len[7] = 129; /* 128 tokens a work */
    assert_int_equal(ekv_plan_update(plan, kv_len, MANY), EKV_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ekv_last_error(), "65537"));
    assert_int_equal(ekv_plan_update(plan, kv_len, MANY - 1), EKV_OK);
    assert_sound(plan);
    ekv_plan_free(plan);
    plan = NULL;
    assert_int_equal(try_plan(&s, BATCH_ATTENTION, kv_len, MANY, &plan), EKV_ERROR_UNSUPPORTED);
    kv_len[7] = 0;
    assert_int_equal(try_plan(&s, BATCH_ATTENTION, kv_len, MANY + 1, &plan), EKV_ERROR_UNSUPPORTED);
    assert_null(plan);
}

/* Dealing to the least loaded leaves no worker ahead of another by more than one work. */
static void batch_attention_is_balanced(void **state)
{
    (void)state;
    static int32_t kv_len[1000];
    ekv_rng rng = { 7 };
    setup s = hopper(H200_SMS, 32, 4);
    for (int32_t b = 0; b < 1000; b++)
        kv_len[b] = (int32_t)(16 << ekv_rng_below(&rng, 9)) - 3;
    ekv_plan *plan = make_plan(&s, BATCH_ATTENTION, kv_len, 1000);
    assert_sound(plan);
    int64_t least = INT64_MAX, most = 0;
    for (int64_t cta = 0; cta < ekv_plan_num_ctas(plan); cta++) {
        int64_t cost = 0;
        for (int64_t i = plan->cta_begin[cta]; i < plan->cta_begin[cta + 1]; i++)
            cost += 32 + plan->tiles[i].kv_end - plan->tiles[i].kv_begin;
        least = ekv_min(least, cost);
        most = ekv_max(most, cost);
    }
    assert_true(most - least <= 32 + plan->kv_chunk_tokens);
    ekv_plan_free(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(batch_attention_deals_to_the_least_loaded),
        cmocka_unit_test(batch_attention_counts_a_constant_a_work),
        cmocka_unit_test(batch_attention_limits),
        cmocka_unit_test(batch_attention_refuses_too_many_works),
        cmocka_unit_test(batch_attention_is_balanced),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
