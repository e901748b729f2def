/* SPDX-License-Identifier: Apache-2.0
 * FlashAttention-3's planners by hand; what the original itself planned is in test_golden_plans. */
#include "base/rng.h"
#include "one_context.h"
#include "plan/fa3_rule.h"
#include "plan/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { H200_SMS = 132, BLOCK = 128 };

/* 8 query heads a KV head, head_dim 128, pages of 16. */
static ekv_batch batch_of(int32_t kv_heads, const int32_t *kv_len, int32_t batch_size)
{
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = batch_size;
    batch.kv_len = kv_len;
    batch.q_heads = 8 * kv_heads;
    batch.kv_heads = kv_heads;
    batch.head_dim = 128;
    return batch;
}

static ekv_plan *create(const char *planner, const ekv_batch *batch, int32_t num_sms, const ekv_plan_options *options)
{
    ekv_device device = EKV_DEVICE_INIT;
    device.num_sms = num_sms;
    ekv_plan *plan = NULL;
    if (ekv_plan_create(context, planner, batch, &device, options, &plan) || ekv_plan_check(plan))
        fail_msg("%s", ekv_last_error());
    return plan;
}

static ekv_plan *create_simple(const char *planner, int32_t kv_heads, const int32_t *kv_len, int32_t batch_size)
{
    const ekv_batch batch = batch_of(kv_heads, kv_len, batch_size);
    return create(planner, &batch, H200_SMS, NULL);
}

/* ---- The rule ---------------------------------------------------------------------------------------- */

static void splits_follow_blocks_per_sm(void **state)
{
    (void)state;
    assert_int_equal(ekv_fa3_num_splits(8, 16, 29), 1);
    assert_int_equal(ekv_fa3_num_splits(80, 16, 29), 5);
    assert_int_equal(ekv_fa3_num_splits(81, 16, 29), 6);
    assert_int_equal(ekv_fa3_num_splits(80, 16, 3), 3);
    assert_int_equal(ekv_fa3_num_splits(0, 16, 29), 1);
    assert_int_equal(ekv_fa3_blocks_per_sm(480, 4, H200_SMS), 16); /* 480 * 1.1 * 4 / 132 */
    assert_int_equal(ekv_fa3_blocks_per_sm(481, 4, H200_SMS), 17);
    assert_int_equal(ekv_fa3_blocks_per_sm(0, 4, H200_SMS), 1);
    /* In float32 360 * 1.1f is 396 = 3 * 132 exactly; in double 1.1f and 1.1 both exceed 1.1. */
    assert_int_equal(ekv_fa3_blocks_per_sm(360, 1, H200_SMS), 3);
    assert_int_equal(ekv_fa3_blocks_per_sm(1320, 1, H200_SMS), 11);
}

static void bound_is_the_smallest_efficient_number(void **state)
{
    (void)state;
    const int64_t wide = 2048, small = 1 << 20, large = 60 << 20;
    assert_int_equal(ekv_fa3_num_splits_bound(1, 1, wide, small, H200_SMS, 0), 109); /* 109 / 128 >= 0.85 */
    assert_int_equal(ekv_fa3_num_splits_bound(4, 1, wide, small, H200_SMS, 0), 29);  /* 116 / 132, 33 fills it */
    assert_int_equal(ekv_fa3_num_splits_bound(8, 1, wide, small, H200_SMS, 0), 15);
    assert_int_equal(ekv_fa3_num_splits_bound(4, 1, 4, small, H200_SMS, 0), 1);
    assert_int_equal(ekv_fa3_num_splits_bound(4, 1, 5, small, H200_SMS, 0), 5);
    /* 17 splits have exactly 85 % of the use that 20 have; the roundings of float32 decide. */
    assert_int_equal(ekv_fa3_num_splits_bound(1, 1, 20, small, 24, 0), 18);
    assert_int_equal(ekv_fa3_num_splits_bound(1, 1, 20, small, 29, 0), 17);
    assert_int_equal(ekv_fa3_num_splits_bound(106, 1, wide, large, H200_SMS, 0), 1); /* 106 >= 0.8 * 132 = 105.6 */
    /* 105 tiles use 0.795 of a wave, and so do 2, 3 and 4 times as many of 2, 3 and 4; 525 use 0.994 of four. */
    assert_int_equal(ekv_fa3_num_splits_bound(105, 1, wide, large, H200_SMS, 0), 5);
    assert_int_equal(ekv_fa3_num_splits_bound(1, 2 * H200_SMS, wide, large, H200_SMS, 0), 2);
    assert_int_equal(ekv_fa3_num_splits_bound(1, 2 * H200_SMS, wide, large, H200_SMS, 1), 1);
    assert_int_equal(ekv_fa3_num_splits_bound(1, 2 * H200_SMS - 1, wide, large, H200_SMS, 0), 1);
    assert_int_equal(ekv_fa3_num_splits_bound(1, 2 * H200_SMS, wide, (int64_t)1 << 40, H200_SMS, 0), 128);
}

static void tiles_depend_on_head_dim_and_type(void **state)
{
    (void)state;
    static const int32_t cases[][4] = { /* head_dim, bytes, BLOCK_M, BLOCK_N */
                                        { 64, 2, 192, 128 },  { 96, 2, 192, 128 }, { 128, 2, 128, 128 },
                                        { 192, 2, 128, 96 },  { 256, 2, 128, 80 }, { 72, 2, 192, 128 },
                                        { 64, 1, 192, 160 },  { 96, 1, 192, 128 }, { 128, 1, 128, 160 },
                                        { 192, 1, 128, 160 }, { 256, 1, 128, 128 }
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ekv_batch batch = batch_of(1, (int32_t[]){ 1000 }, 1);
        batch.head_dim = cases[i][0];
        batch.kv_dtype = cases[i][1] == 1 ? EKV_DTYPE_FP8_E4M3 : EKV_DTYPE_BF16;
        ekv_plan *plan = create("fa3", &batch, H200_SMS, NULL);
        assert_int_equal(plan->padded_rows, cases[i][2]);
        assert_int_equal(plan->block_tokens, cases[i][3]);
        ekv_plan_free(plan);
    }
    ekv_batch batch = batch_of(1, (int32_t[]){ 1000 }, 1);
    batch.head_dim = 264;
    ekv_device device = EKV_DEVICE_INIT;
    device.num_sms = H200_SMS;
    ekv_plan *plan = NULL;
    assert_int_equal(ekv_plan_create(context, "fa3", &batch, &device, NULL, &plan), EKV_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ekv_last_error(), "264"));
    assert_null(plan);
}

/* ---- Plans ------------------------------------------------------------------------------------------- */

/* 12 blocks on 8 SMs: 2 blocks an SM, so splits 3, 1, 2. */
static void splits_flatten_in_order(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 6 * BLOCK, 2 * BLOCK, 4 * BLOCK - 1 };
    const ekv_batch batch = batch_of(1, kv_len, 3);
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.no_sort = 1;
    ekv_plan *plan = create("fa3", &batch, 8, &options);
    static const int32_t items[][2] = { { 0, 0 }, { 0, 1 }, { 0, 2 }, { 1, 0 }, { 2, 0 }, { 2, 1 } };
    assert_int_equal(plan->num_work_items, 6);
    assert_int_equal(plan->num_tiles, 6);
    for (int32_t i = 0; i < 6; i++) {
        const ekv_tile *tile = &plan->tiles[i];
        assert_int_equal(tile->request, items[i][0]);
        assert_int_equal(tile->split, items[i][1]);
        assert_int_equal(tile->kv_begin, 2 * BLOCK * tile->split);
        assert_int_equal(tile->kv_end, ekv_min(2 * BLOCK * (tile->split + 1), kv_len[tile->request]));
        assert_int_equal(tile->flags, tile->request == 1 ? 0 : EKV_TILE_PARTIAL);
    }
    assert_int_equal(plan->num_merges, 2);
    assert_true(plan->split_kv);
    assert_int_equal(plan->dispatch, EKV_DISPATCH_QUEUE);
    assert_int_equal(plan->grid[0], 8);
    assert_int_equal(plan->resident_ctas, 1);
    ekv_plan_free(plan);
}

/* Tiles: KV head, then split, then m_block.  Blocks count once for each m_block: 6 blocks of 3 m_blocks and 2 heads on
 * 22 SMs are 1.8 blocks an SM, so 3 splits. */
static void m_blocks_are_innermost(void **state)
{
    (void)state;
    ekv_batch batch = batch_of(2, (int32_t[]){ 6 * BLOCK }, 1);
    batch.q_len = 40; /* 320 rows: 3 m_blocks of 128 */
    ekv_plan *plan = create("fa3", &batch, 22, NULL);
    assert_int_equal(plan->m_blocks, 3);
    assert_int_equal(plan->num_splits[0], 3);
    assert_int_equal(plan->num_tiles, 18);
    assert_int_equal(plan->num_work_items, 9);
    for (int32_t i = 0; i < 18; i++) {
        assert_int_equal(plan->tiles[i].head, i / 9);
        assert_int_equal(plan->tiles[i].split, i / 3 % 3);
        assert_int_equal(plan->tiles[i].m_block, i % 3);
    }
    ekv_plan_free(plan);
}

/* 29 blocks, one an SM, but at most 25 splits: of 2 blocks each, so that 10 of them have none. */
static void trailing_splits_may_be_empty(void **state)
{
    (void)state;
    ekv_plan *plan = create_simple("fa3", 4, (int32_t[]){ 29 * BLOCK - 5 }, 1);
    assert_int_equal(plan->num_splits_bound, 25);
    assert_int_equal(plan->num_splits[0], 25);
    for (int32_t s = 0; s < 25; s++) {
        const int32_t tokens = plan->tiles[s].kv_end - plan->tiles[s].kv_begin;
        assert_int_equal(tokens, s < 14 ? 2 * BLOCK : s == 14 ? BLOCK - 5 : 0);
    }
    assert_true(plan->empty_splits);
    ekv_plan_free(plan);
}

static void above_992_requests_nothing_is_split(void **state)
{
    (void)state;
    static int32_t kv_len[2000];
    kv_len[500] = 400000;
    kv_len[992] = 500000;
    ekv_plan *plan = create_simple("fa3", 4, kv_len, 992);
    assert_int_equal(plan->num_splits_bound, 29);
    assert_int_equal(plan->num_splits[500], 29);
    assert_int_equal(plan->batch_order[0], 500);
    ekv_plan_free(plan);

    plan = create_simple("fa3", 4, kv_len, 993);
    assert_int_equal(plan->num_splits_bound, 29);
    assert_int_equal(plan->num_merges, 0);
    assert_int_equal(plan->num_tiles, 4 * 993);
    assert_int_equal(plan->num_splits[500], 1);
    assert_int_equal(plan->batch_order[0], 500); /* each 992 are sorted apart: 992 is the longest, but of the second */
    assert_int_equal(plan->batch_order[992], 992);
    assert_int_equal(ekv_plan_update(plan, kv_len, 992), EKV_OK); /* and split again with fewer */
    assert_int_equal(plan->num_splits[500], 29);
    assert_int_equal(ekv_plan_check(plan), EKV_OK);
    ekv_plan_free(plan);

    kv_len[1983] = 7;
    kv_len[1984] = 6;
    kv_len[1999] = 600;
    plan = create_simple("fa3", 1, kv_len, 2000);
    assert_int_equal(plan->batch_order[992], 992);
    assert_int_equal(plan->batch_order[993], 1983);
    assert_int_equal(plan->batch_order[994], 993);
    assert_int_equal(plan->batch_order[1984], 1999);
    assert_int_equal(plan->batch_order[1985], 1984);
    ekv_plan_free(plan);
}

static void requests_are_sorted_by_split_length(void **state)
{
    (void)state;
    /* 299 * 1.1 / 8 = 41.1, so 42 blocks an SM: 100 become 3 of 34 and 80 two of 40; ties keep their order. */
    const int32_t kv_len[] = { 100 * BLOCK, 39 * BLOCK, 80 * BLOCK, 0, 41 * BLOCK, 39 * BLOCK - 1 };
    const int32_t by_split[] = { 4, 2, 1, 5, 0, 3 }, by_length[] = { 0, 2, 4, 1, 5, 3 };
    const ekv_batch batch = batch_of(1, kv_len, 6);
    ekv_plan *plan = create("fa3", &batch, 8, NULL);
    assert_int_equal(plan->num_splits[0], 3);
    assert_int_equal(plan->num_splits[2], 2);
    assert_int_equal(plan->num_splits[4], 1);
    for (int32_t i = 0; i < 6; i++)
        assert_int_equal(plan->batch_order[i], by_split[i]);
    ekv_plan_free(plan);
    plan = create("fa3-nosplit", &batch, 8, NULL);
    for (int32_t i = 0; i < 6; i++) {
        assert_int_equal(plan->num_splits[i], 1);
        assert_int_equal(plan->batch_order[i], by_length[i]);
    }
    assert_int_equal(plan->num_splits_bound, 1);
    ekv_plan_free(plan);
}

static void an_empty_batch_has_one_tile_a_head(void **state)
{
    (void)state;
    static const int32_t kv_len[300];
    static const char *const planners[] = { "fa3", "fa3-nosplit", "fa3-vllm" };
    for (size_t i = 0; i < sizeof planners / sizeof planners[0]; i++) {
        ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
        options.table_width = 4096; /* captured: the bound is 29 although no request has a token */
        const ekv_batch batch = batch_of(4, kv_len, 300);
        ekv_plan *plan = create(planners[i], &batch, H200_SMS, &options);
        assert_int_equal(plan->num_tiles, 1200);
        assert_int_equal(plan->num_merges, 0);
        ekv_plan_free(plan);
    }
}

static void vllm_keeps_order_and_caps_splits(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 10, 200000, 500 };
    ekv_plan *plan = create_simple("fa3", 1, kv_len, 3);
    assert_int_equal(plan->num_splits_bound, 109);
    assert_int_equal(plan->num_splits[1], 109);
    ekv_plan_free(plan);
    plan = create_simple("fa3-vllm", 1, kv_len, 3);
    assert_int_equal(plan->num_splits_bound, 32);
    assert_int_equal(plan->num_splits[1], 32);
    for (int32_t i = 0; i < 3; i++)
        assert_int_equal(plan->batch_order[i], i);
    ekv_plan_free(plan);
}

static void table_width_sets_the_bound(void **state)
{
    (void)state;
    ekv_batch batch = batch_of(4, (int32_t[]){ 1000, 600 }, 2);
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    ekv_plan *plan = create("fa3", &batch, H200_SMS, &options);
    assert_int_equal(plan->num_splits_bound, 7); /* of 8 blocks */
    ekv_plan_free(plan);
    options.table_width = 131072;
    plan = create("fa3", &batch, H200_SMS, &options);
    assert_int_equal(plan->num_splits_bound, 29);
    assert_int_equal(ekv_plan_update(plan, (int32_t[]){ 1, 131073 }, 2), EKV_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(ekv_last_error(), "kv_len[1] is 131073"));
    assert_non_null(strstr(ekv_last_error(), "131072"));
    assert_int_equal(plan->kv_len[1], 600);
    ekv_plan_free(plan);
    options.table_width = 0;
    batch.page_size = 16000; /* one page holds 125 blocks */
    plan = create("fa3", &batch, H200_SMS, &options);
    assert_int_equal(plan->num_splits_bound, 29);
    ekv_plan_free(plan);
}

/* Whatever lengths come, the capacity that creation promised holds: ekv_plan_check compares the two. */
static void updates_stay_within_capacity(void **state)
{
    (void)state;
    int32_t kv_len[1200];
    for (uint64_t seed = 1; seed <= 300; seed++) {
        ekv_rng rng = { seed };
        const int32_t batch_size = 1 + (int32_t)ekv_rng_below(&rng, ekv_rng_below(&rng, 10) ? 60 : 1200);
        memset(kv_len, 0, sizeof kv_len);
        ekv_batch batch = batch_of(1 + (int32_t)ekv_rng_below(&rng, 12), kv_len, batch_size);
        batch.q_len = 1 + (int32_t)ekv_rng_below(&rng, 3) * 20;
        ekv_plan *plan = create("fa3", &batch, 1 + (int32_t)ekv_rng_below(&rng, 150), NULL);
        for (int32_t update = 0; update < 8; update++) {
            const int32_t count = 1 + (int32_t)ekv_rng_below(&rng, batch_size);
            const int64_t longest = (int64_t)1 << ekv_rng_below(&rng, 22);
            for (int32_t b = 0; b < count; b++)
                kv_len[b] = (int32_t)(update % 2 ? longest : ekv_rng_below(&rng, longest));
            if (ekv_plan_update(plan, kv_len, count) || ekv_plan_check(plan))
                fail_msg("seed %llu: %s", (unsigned long long)seed, ekv_last_error());
        }
        ekv_plan_free(plan);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(splits_follow_blocks_per_sm),
        cmocka_unit_test(bound_is_the_smallest_efficient_number),
        cmocka_unit_test(tiles_depend_on_head_dim_and_type),
        cmocka_unit_test(splits_flatten_in_order),
        cmocka_unit_test(m_blocks_are_innermost),
        cmocka_unit_test(trailing_splits_may_be_empty),
        cmocka_unit_test(above_992_requests_nothing_is_split),
        cmocka_unit_test(requests_are_sorted_by_split_length),
        cmocka_unit_test(an_empty_batch_has_one_tile_a_head),
        cmocka_unit_test(vllm_keeps_order_and_caps_splits),
        cmocka_unit_test(table_width_sets_the_bound),
        cmocka_unit_test(updates_stay_within_capacity),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
