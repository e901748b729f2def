/* SPDX-License-Identifier: Apache-2.0
 * FlashInfer's three grids against plans worked out by hand; test_golden_plans.c has those of the original code.
 * Any lengths for all four FlashInfer planners; BatchAttention by hand is in test_planners_batch_attention.c. */
#include "base/rng.h"
#include "planner_tests.h"

/* ---- CUDA-core --------------------------------------------------------------------------------------- */

/* Splits (3, 1, 2): chunks of 128 tokens and a budget of 12 / 2 = 6 work items. */
static void splits_3_1_2_flatten(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 300, 100, 200 };
    setup s = hopper(12, 16, 2);
    s.options.resident_ctas = 1;
    ekv_plan *plan = make_plan(&s, CUDA_CORE, kv_len, 3);
    assert_sound(plan);
    assert_grid(plan, 6, 2, 1);
    assert_true(plan->split_kv);
    assert_int_equal(plan->kv_chunk_tokens, 128);
    assert_int_equal(plan->num_work_items, 6);
    assert_int_equal(plan->num_tiles, 12);
    for (int32_t head = 0; head < 2; head++) {
        int64_t first = 6 * head;
        assert_tile(plan, first + 0, tile(0, 0, 0, 128, 0 + head, head));
        assert_tile(plan, first + 1, tile(0, 1, 128, 256, 2 + head, head));
        assert_tile(plan, first + 2, tile(0, 2, 256, 300, 4 + head, head));
        assert_tile(plan, first + 3, tile(1, 0, 0, 100, 6 + head, head)); /* one split, yet through a partial */
        assert_tile(plan, first + 4, tile(2, 0, 0, 128, 8 + head, head));
        assert_tile(plan, first + 5, tile(2, 1, 128, 200, 10 + head, head));
    }
    assert_int_equal(plan->num_merges, 3);
    assert_int_equal(plan->merges[1].num_splits, 1);
    assert_int_equal(plan->merges[2].slot_first, 8);
    ekv_plan_free(plan);
}

/* The same with room for 5 work items: 19, 7 and 13 pages make 6 pieces of 9 pages, but 2 + 1 + 2 of 10. */
static void cuda_core_takes_the_smallest_chunk_that_fits(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 300, 100, 200 };
    setup s = hopper(11, 16, 2);
    s.options.resident_ctas = 1;
    ekv_plan *plan = make_plan(&s, CUDA_CORE, kv_len, 3);
    assert_sound(plan);
    assert_int_equal(plan->kv_chunk_tokens, 10 * 16);
    assert_int_equal(plan->num_work_items, 5);
    ekv_plan_free(plan);
}

/* Under a graph the rule shows exactly: split below the threshold, whatever the lengths. */
static void cuda_core_stops_splitting_at_its_threshold(void **state)
{
    (void)state;
    const struct {
        int32_t sms, threshold, splits_below;
    } devices[] = {
        { H200_SMS, 297, 2 }, /* 1,188 / 4: one work item is left for the long request at B = 296 */
        { H20_SMS, 176, 1 },  /* 702 / 4 = 175.5: none is left at B = 175 */
    };
    for (int i = 0; i < 2; i++)
        for (int graph = 0; graph < 2; graph++) {
            setup s = hopper(devices[i].sms, 32, 4);
            s.options.cuda_graph = graph;
            const int32_t threshold = devices[i].threshold, splits = devices[i].splits_below;
            ekv_plan *below = make_skewed(&s, CUDA_CORE, 400000, 16, threshold - 1);
            assert_int_equal(below->split_kv, graph || splits > 1);
            assert_int_equal(below->num_splits[0], splits);
            assert_int_equal(below->resident_ctas, 9);
            ekv_plan_free(below);
            ekv_plan *at = make_skewed(&s, CUDA_CORE, 400000, 16, threshold);
            assert_false(at->split_kv);
            assert_int_equal(at->kv_chunk_tokens, 400000);
            assert_int_equal(at->num_merges, 0);
            assert_grid(at, threshold, 4, 1);
            ekv_plan_free(at);
        }
}

/* Below the threshold, yet nothing is longer than the smallest chunk. */
static void cuda_core_leaves_short_requests_whole(void **state)
{
    (void)state;
    setup s = hopper(H200_SMS, 32, 4);
    ekv_plan *plan = make_skewed(&s, CUDA_CORE, 128, 5, 7);
    assert_false(plan->split_kv);
    assert_int_equal(plan->kv_chunk_tokens, 128);
    assert_int_equal(plan->num_slots, 0);
    ekv_plan_free(plan);
    s.batch.page_size = 16000; /* the smallest chunk is one page */
    plan = make_skewed(&s, CUDA_CORE, 16001, 5, 7);
    assert_true(plan->split_kv);
    assert_int_equal(plan->kv_chunk_tokens, 16000);
    assert_int_equal(plan->num_splits[0], 2);
    ekv_plan_free(plan);
}

static void cuda_core_resident_ctas(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 5000 };
    ekv_plan *plan = NULL;
    setup s = hopper(H200_SMS, 4, 1);
    plan = make_plan(&s, CUDA_CORE, kv_len, 1);
    assert_int_equal(plan->resident_ctas, 8);
    assert_int_equal(plan->num_warnings, 0);
    ekv_plan_free(plan);

    s = hopper(H200_SMS, 1, 1); /* an upper bound, and the plan says so */
    plan = make_plan(&s, CUDA_CORE, kv_len, 1);
    assert_int_equal(plan->resident_ctas, 6);
    assert_int_equal(plan->num_warnings, 1);
    assert_non_null(strstr(plan->warnings[0], "--resident-ctas"));
    ekv_plan_free(plan);

    setup unknown[4];
    for (int i = 0; i < 4; i++)
        unknown[i] = hopper(H200_SMS, 8, 1);
    unknown[0].batch.q_heads = 2;
    unknown[1].batch.head_dim = 64;
    unknown[2].device.sm_arch = 80;
    unknown[3].batch.kv_dtype = EKV_DTYPE_FP8_E4M3;
    for (int i = 0; i < 4; i++) {
        plan = NULL;
        assert_int_equal(try_plan(&unknown[i], CUDA_CORE, kv_len, 1, &plan), EKV_ERROR_UNSUPPORTED);
        assert_non_null(strstr(ekv_last_error(), "--resident-ctas"));
        assert_null(plan);
        unknown[i].options.resident_ctas = 5;
        plan = make_plan(&unknown[i], CUDA_CORE, kv_len, 1);
        assert_int_equal(plan->resident_ctas, 5);
        ekv_plan_free(plan);
    }
    s.batch.q_len = 2;
    plan = NULL;
    assert_int_equal(try_plan(&s, CUDA_CORE, kv_len, 1, &plan), EKV_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ekv_last_error(), "q_len is 2"));
}

static void cuda_core_under_a_graph(void **state)
{
    (void)state;
    setup s = hopper(H200_SMS, 32, 4);
    s.options.cuda_graph = 1;
    ekv_plan *plan = make_skewed(&s, CUDA_CORE, 16, 16, 2); /* always split, in 1,188 / 4 slots */
    assert_true(plan->split_kv);
    assert_int_equal(plan->num_work_items, 2);
    assert_int_equal(plan->max_work_items, 297);
    assert_int_equal(plan->num_merges, 2);
    assert_int_equal(plan->num_tiles, 8);
    assert_grid(plan, 297, 4, 1);
    ekv_plan_free(plan);
    plan = make_skewed(&s, CUDA_CORE, 400000, 16, 297); /* the same switch-off */
    assert_false(plan->split_kv);
    assert_int_equal(plan->max_work_items, 297);
    ekv_plan_free(plan);
}

/* 264 / 8 = 33 slots; 4,096 pages in chunks of 125 are 33 pieces, and 15 empty requests come on top. */
static void cuda_core_graph_padding_fault(void **state)
{
    (void)state;
    int32_t kv_len[16] = { 0 };
    kv_len[15] = 65536;
    setup s = hopper(H200_SMS, 64, 8);
    s.options.cuda_graph = 1;
    s.options.resident_ctas = 2;
    ekv_plan *plan = make_plan(&s, CUDA_CORE, kv_len, 16);
    assert_int_equal(plan->kv_chunk_tokens, 125 * 16);
    assert_int_equal(plan->num_splits[15], 33);
    assert_int_equal(plan->num_work_items, 48);
    assert_int_equal(plan->max_work_items, 33);
    assert_grid(plan, 33, 8, 1);
    assert_int_equal(plan->num_warnings, 1);
    assert_non_null(strstr(plan->warnings[0], "48 work items for 33 slots"));
    assert_int_equal(ekv_plan_check(plan), EKV_ERROR_PLAN_INVALID);
    assert_non_null(strstr(ekv_last_error(), "48"));

    for (int32_t b = 0; b < 15; b++) /* counted requests: no fault */
        kv_len[b] = 1;
    assert_int_equal(ekv_plan_update(plan, kv_len, 16), EKV_OK);
    assert_int_equal(plan->num_warnings, 0);
    assert_true(plan->num_work_items <= 33);
    assert_sound(plan);
    ekv_plan_free(plan);
}

/* ---- Tensor-core ------------------------------------------------------------------------------------- */

static void tensor_core_stops_splitting_at_its_budget(void **state)
{
    (void)state;
    const struct {
        int32_t sms, budget;
    } devices[] = { { H200_SMS, 66 }, { H20_SMS, 39 } };
    for (int i = 0; i < 2; i++) {
        setup s = hopper(devices[i].sms, 32, 4);
        const int32_t budget = devices[i].budget;
        ekv_plan *below = make_skewed(&s, TENSOR_CORE, 400000, 16, budget - 1);
        assert_true(below->split_kv);
        assert_int_equal(below->num_splits[0], 2);
        assert_int_equal(below->kv_chunk_tokens, 200000);
        assert_grid(below, budget, 1, 4);
        ekv_plan_free(below);
        ekv_plan *at = make_skewed(&s, TENSOR_CORE, 400000, 16, budget);
        assert_false(at->split_kv);
        assert_int_equal(at->kv_chunk_tokens, 400000);
        assert_int_equal(at->resident_ctas, 2);
        ekv_plan_free(at);
    }
}

/* Empty requests count as one piece in the search: 2 * 6 / 2 = 6 items for 2 empty requests and 1,000 tokens. */
static void tensor_core_counts_empty_requests(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 0, 1000, 0 };
    setup s = hopper(6, 16, 2);
    ekv_plan *plan = make_plan(&s, TENSOR_CORE, kv_len, 3);
    assert_sound(plan);
    assert_int_equal(plan->kv_chunk_tokens, 16 * 16); /* 63 pages in 4 pieces */
    assert_int_equal(plan->num_work_items, 6);
    assert_tile(plan, 1, tile(1, 0, 0, 256, 2, 0));
    assert_tile(plan, 4, tile(1, 3, 768, 1000, 8, 0));
    assert_tile(plan, 5, tile(2, 0, 0, 0, 10, 0));
    assert_tile(plan, 6, tile(0, 0, 0, 0, 1, 1));
    ekv_plan_free(plan);
}

static void tensor_core_under_a_graph(void **state)
{
    (void)state;
    setup s = hopper(H200_SMS, 32, 4);
    s.options.cuda_graph = 1;
    ekv_plan *plan = make_skewed(&s, TENSOR_CORE, 16, 16, 3);
    assert_true(plan->split_kv);
    assert_int_equal(plan->num_work_items, 3);
    assert_int_equal(plan->max_work_items, 66);
    assert_grid(plan, 66, 1, 4);
    ekv_plan_free(plan);
    plan = make_skewed(&s, TENSOR_CORE, 400000, 16, 200); /* ceil(200 * 8 / 16) + 199 */
    assert_true(plan->split_kv);
    assert_int_equal(plan->num_work_items, 200);
    assert_int_equal(plan->num_merges, 200);
    assert_int_equal(plan->max_work_items, 299);
    ekv_plan_free(plan);
}

static void tensor_core_tiles_of_several_query_tokens(void **state)
{
    (void)state;
    const struct {
        int32_t q_len, head_dim, graph, batch_size, block_m, m_blocks;
    } cases[] = {
        { 1, 128, 0, 2, 16, 1 },  { 2, 128, 0, 2, 16, 1 },  { 3, 128, 0, 2, 64, 1 },
        { 8, 128, 0, 2, 64, 1 },  { 9, 128, 0, 2, 128, 1 }, { 20, 128, 0, 2, 128, 2 },
        { 20, 256, 0, 2, 64, 3 }, { 5, 128, 1, 2, 128, 1 }, /* (2 * 5 - 2 + 1) * 8 = 72 rows may fall on one request */
        { 1, 128, 1, 9, 16, 1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup s = hopper(H200_SMS, 32, 4);
        s.batch.q_len = cases[i].q_len;
        s.batch.head_dim = cases[i].head_dim;
        s.options.cuda_graph = cases[i].graph;
        ekv_plan *plan = make_skewed(&s, TENSOR_CORE, 5000, 70, cases[i].batch_size);
        assert_int_equal(plan->block_m, cases[i].block_m);
        assert_int_equal(plan->padded_rows, cases[i].block_m);
        assert_int_equal(plan->m_blocks, cases[i].m_blocks);
        ekv_plan_free(plan);
    }
    /* 66 work items are 22 pieces of 3 m_blocks: 4,096 pages in chunks of 187. */
    setup s = hopper(H200_SMS, 32, 4);
    s.batch.q_len = 20;
    s.batch.head_dim = 256;
    ekv_plan *plan = make_skewed(&s, TENSOR_CORE, 65536, 0, 1);
    assert_int_equal(plan->kv_chunk_tokens, 187 * 16);
    assert_int_equal(plan->num_work_items, 66);
    assert_int_equal(plan->tiles[22].m_block, 1);
    assert_int_equal(plan->tiles[22].split, 0);
    ekv_plan_free(plan);
}

/* ---- XQA --------------------------------------------------------------------------------------------- */

/* 132 / 8 = 16 splits of both requests: 40 units of 256 in eight parts of 3 and eight of 2; 2 units in two parts. */
static void xqa_splits_all_requests_alike(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 10000, 300 };
    setup s = hopper(H200_SMS, 32, 4);
    ekv_plan *plan = make_plan(&s, XQA, kv_len, 2);
    assert_sound(plan);
    assert_grid(plan, 16, 4, 2);
    assert_int_equal(plan->num_work_items, 32);
    assert_int_equal(plan->num_tiles, 128);
    assert_tile(plan, 0, tile(0, 0, 0, 768, 0, 0));
    assert_tile(plan, 7, tile(0, 7, 5376, 6144, 28, 0));
    assert_tile(plan, 8, tile(0, 8, 6144, 6656, 32, 0));
    assert_tile(plan, 15, tile(0, 15, 9728, 10000, 60, 0));
    assert_tile(plan, 16, tile(0, 0, 0, 768, 1, 1));
    assert_tile(plan, 64, tile(1, 0, 0, 256, 64, 0));
    assert_tile(plan, 65, tile(1, 1, 256, 300, 68, 0));
    assert_tile(plan, 66, tile(1, 2, 300, 300, 72, 0));
    ekv_plan_free(plan);
}

static void xqa_split_counts(void **state)
{
    (void)state;
    const struct {
        int32_t first, batch_size, splits;
    } cases[] = {
        { 0, 1, 1 },        { 256, 1, 1 },      { 257, 1, 2 },      { 1 << 20, 1, 33 },
        { 1 << 20, 2, 16 }, { 1 << 20, 16, 2 }, { 1 << 20, 17, 1 }, { 1 << 20, 100, 1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup s = hopper(H200_SMS, 32, 4);
        ekv_plan *plan = make_skewed(&s, XQA, cases[i].first, 0, cases[i].batch_size);
        assert_int_equal(plan->num_splits[0], cases[i].splits);
        assert_int_equal(plan->split_kv, cases[i].splits > 1);
        assert_int_equal(plan->padded_rows, 16);
        ekv_plan_free(plan);
    }
    setup s = hopper(H200_SMS, 32, 4);
    s.batch.q_len = 9; /* 72 rows: three blocks of 32 */
    ekv_plan *plan = make_skewed(&s, XQA, 1 << 20, 0, 1);
    assert_grid(plan, 33, 12, 1);
    assert_int_equal(plan->tiles[33].m_block, 1);
    assert_int_equal(plan->tiles[33].head, 0);
    ekv_plan_free(plan);
}

/* ---- Any lengths ------------------------------------------------------------------------------------- */

static int32_t random_length(ekv_rng *rng)
{
    switch (ekv_rng_below(rng, 8)) {
    case 0: return 0;
    case 1: return 1;
    case 2: return INT32_MAX - (int32_t)ekv_rng_below(rng, 1000);
    default: return (int32_t)ekv_rng_below(rng, (int64_t)1 << ekv_rng_below(rng, 24));
    }
}

static setup random_setup(ekv_rng *rng)
{
    const int32_t groups[] = { 1, 2, 4, 8, 16 }, pages[] = { 1, 2, 3, 16, 64, 100, 16000 };
    const int32_t kv_heads = (int32_t)ekv_rng_below(rng, 2) ? 1 << ekv_rng_below(rng, 8) : 1;
    setup s = hopper((int32_t)ekv_rng_below(rng, 200) + 1, kv_heads * groups[ekv_rng_below(rng, 5)], kv_heads);
    s.batch.page_size = pages[ekv_rng_below(rng, 7)];
    s.batch.head_dim = ekv_rng_below(rng, 4) ? 128 : 256;
    s.batch.q_len = ekv_rng_below(rng, 3) ? 1 : (int32_t)ekv_rng_below(rng, 40) + 1;
    s.options.resident_ctas = (int32_t)ekv_rng_below(rng, 12) + 1;
    s.options.cuda_graph = ekv_rng_below(rng, 2) == 0;
    return s;
}

/* Creation with one batch, then updates to others, stays sound and within the capacity; only BatchAttention's limit
 * and the known fault may show. */
static void updates_stay_sound(void **state)
{
    (void)state;
    const char *planners[] = { CUDA_CORE, TENSOR_CORE, BATCH_ATTENTION, XQA };
    static int32_t kv_len[300];
    for (uint64_t seed = 1; seed <= 400; seed++) {
        ekv_rng rng = { seed };
        setup s = random_setup(&rng);
        const char *planner = planners[seed % 4];
        if (planner == planners[0])
            s.batch.q_len = 1;
        const int32_t batch_size = (int32_t)ekv_rng_below(&rng, (int64_t)1 << ekv_rng_below(&rng, 9)) + 1;
        ekv_plan *plan = NULL;
        for (int round = 0; round < 6; round++) {
            const int32_t size = round ? (int32_t)ekv_rng_below(&rng, batch_size) + 1 : batch_size;
            for (int32_t b = 0; b < size; b++)
                kv_len[b] = random_length(&rng);
            ekv_status status =
                round ? ekv_plan_update(plan, kv_len, size) : try_plan(&s, planner, kv_len, size, &plan);
            if (planner == planners[2] && status == EKV_ERROR_UNSUPPORTED) {
                if (!plan)
                    break;
                continue;
            }
            if (!status)
                status = ekv_plan_check(plan);
            bool fault = plan && plan->num_work_items > plan->max_work_items;
            if (fault && (planner != planners[0] || !s.options.cuda_graph || status != EKV_ERROR_PLAN_INVALID))
                fail_msg("seed %d, round %d: %s: a fault where there is none", (int)seed, round, planner);
            if (!fault && status)
                fail_msg("seed %d, round %d: %s: %s", (int)seed, round, planner, ekv_last_error());
        }
        ekv_plan_free(plan);
    }
}

static void all_empty_batches_plan(void **state)
{
    (void)state;
    const char *planners[] = { CUDA_CORE, TENSOR_CORE, BATCH_ATTENTION, XQA };
    for (int i = 0; i < 4; i++)
        for (int graph = 0; graph < 2; graph++) {
            setup s = hopper(H200_SMS, 32, 4);
            s.options.cuda_graph = graph;
            ekv_plan *plan = make_skewed(&s, planners[i], 0, 0, 20);
            assert_int_equal(plan->num_work_items, 20);
            assert_int_equal(plan->num_splits[19], 1);
            ekv_plan_free(plan);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(splits_3_1_2_flatten),
        cmocka_unit_test(cuda_core_takes_the_smallest_chunk_that_fits),
        cmocka_unit_test(cuda_core_stops_splitting_at_its_threshold),
        cmocka_unit_test(cuda_core_leaves_short_requests_whole),
        cmocka_unit_test(cuda_core_resident_ctas),
        cmocka_unit_test(cuda_core_under_a_graph),
        cmocka_unit_test(cuda_core_graph_padding_fault),
        cmocka_unit_test(tensor_core_stops_splitting_at_its_budget),
        cmocka_unit_test(tensor_core_counts_empty_requests),
        cmocka_unit_test(tensor_core_under_a_graph),
        cmocka_unit_test(tensor_core_tiles_of_several_query_tokens),
        cmocka_unit_test(xqa_splits_all_requests_alike),
        cmocka_unit_test(xqa_split_counts),
        cmocka_unit_test(updates_stay_sound),
        cmocka_unit_test(all_empty_batches_plan),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
