/* SPDX-License-Identifier: Apache-2.0
 * even: cases by hand, the promises of balance over random batches, and the host's walk against the pure functions and
 * against the rule's sentence, block by block. */
#include "even_tests.h"

/* ---- By hand ------------------------------------------------------------------------------------ */

/* A line of 96 in two shares of 48: the cut is at token 48 of request 0. */
static void even_cuts_at_the_share(void **state)
{
    (void)state;
    const setting s = setting_of("even", 2, 1, 16, 0);
    ekv_plan *plan = create_checked(&s, (int32_t[]){ 64, 32 }, 2);
    assert_int_equal(plan->num_tiles, 3);
    expect_tile(plan, 0, 0, 0, 0, 0, 48, 2);  /* begun by CTA 0 of 2: unit 2 + 0 */
    expect_tile(plan, 1, 0, 0, 1, 48, 64, 1); /* continued by CTA 1 */
    expect_tile(plan, 2, 1, 0, 0, 0, 32, -1);
    expect_ranges(plan, (int64_t[]){ 0, 1, 3 });
    assert_int_equal(plan->num_merges, 1);
    assert_int_equal(plan->merges[0].num_splits, 2);
    assert_int_equal(plan->merges[0].slot_first, 2);
    assert_int_equal(plan->merges[0].slot_next, 1);
    assert_int_equal(plan->merges[0].slot_stride, 1);
    assert_int_equal(plan->num_splits[0], 2);
    assert_int_equal(plan->num_splits[1], 1);
    assert_int_equal(plan->num_work_items, 3);
    assert_int_equal(plan->dispatch, EKV_DISPATCH_RANGE);
    assert_int_equal(plan->grid[0], 2);
    ekv_plan_free(plan);
}

/* Three blocks of 16 + 4: the middle one, [20, 40), ends in the second share, [30, 60). */
static void even_gives_a_block_to_the_share_of_its_end(void **state)
{
    (void)state;
    const setting s = setting_of("even", 2, 1, 16, 4);
    ekv_plan *plan = create_checked(&s, (int32_t[]){ 16, 10, 1 }, 3);
    assert_int_equal(plan->num_tiles, 3);
    assert_int_equal(plan->num_merges, 0);
    assert_int_equal(plan->num_slots, 0);
    expect_tile(plan, 1, 1, 0, 0, 0, 10, -1);
    expect_ranges(plan, (int64_t[]){ 0, 1, 3 });
    ekv_plan_free(plan);
}

/* 64 units in 8 shares of half a block: every block is a piece, and the pieces end in shares 1, 3, 5 and 7. */
static void even_makes_every_block_a_piece_where_shares_are_short(void **state)
{
    (void)state;
    const setting s = setting_of("even", 8, 1, 16, 0);
    ekv_plan *plan = create_checked(&s, (int32_t[]){ 60 }, 1);
    assert_int_equal(plan->num_tiles, 4);
    for (int32_t i = 0; i < 4; i++)
        expect_tile(plan, i, 0, 0, i, 16 * i, i < 3 ? 16 * i + 16 : 60, i);
    expect_ranges(plan, (int64_t[]){ 0, 0, 1, 1, 2, 2, 3, 3, 4 });
    assert_int_equal(plan->merges[0].num_splits, 4);
    ekv_plan_free(plan);
}

/* Two head groups of four heads: the line is request 0 group 0, request 0 group 1, and the cut lies between them. */
static void even_keeps_head_groups_together(void **state)
{
    (void)state;
    setting s = setting_of("even", 2, 8, 16, 0);
    s.options.heads_per_tile = 4;
    ekv_plan *plan = create_checked(&s, (int32_t[]){ 160 }, 1);
    assert_int_equal(plan->num_tiles, 2);
    expect_tile(plan, 0, 0, 0, 0, 0, 160, -1);
    expect_tile(plan, 1, 0, 4, 0, 0, 160, -1);
    assert_int_equal(plan->tiles[1].head_count, 4);
    ekv_plan_free(plan);

    s = setting_of("even", 3, 8, 16, 0); /* 320 in 3 shares: cuts at 96 of each group */
    s.options.heads_per_tile = 4;
    plan = create_checked(&s, (int32_t[]){ 160 }, 1);
    assert_int_equal(plan->num_tiles, 4);
    expect_tile(plan, 0, 0, 0, 0, 0, 96, 3 * 4);
    expect_tile(plan, 1, 0, 0, 1, 96, 160, 1 * 4);
    expect_tile(plan, 2, 0, 4, 0, 0, 48, (3 + 1) * 4);
    expect_tile(plan, 3, 0, 4, 1, 48, 160, 2 * 4);
    assert_int_equal(plan->num_splits[0], 2);
    assert_int_equal(plan->num_work_items, 2);
    ekv_plan_free(plan);
}

static void even_shares_out_empty_requests(void **state)
{
    (void)state;
    setting s = setting_of("even", 3, 1, 16, 5);
    ekv_plan *plan = create_checked(&s, (int32_t[]){ 0, 0, 0 }, 3);
    assert_int_equal(plan->num_tiles, 3);
    expect_ranges(plan, (int64_t[]){ 0, 1, 2, 3 });
    ekv_plan_free(plan);
    s = setting_of("even", 3, 1, 16, 0); /* without cost there is nothing to share */
    plan = create_checked(&s, (int32_t[]){ 0, 0, 0 }, 3);
    expect_ranges(plan, (int64_t[]){ 0, 3, 3, 3 });
    ekv_plan_free(plan);
    plan = create_checked(&s, (int32_t[]){ 0, 1, 0 }, 3); /* the last goes to the CTA of the unit before it */
    assert_int_equal(plan->num_tiles, 3);
    ekv_plan_free(plan);
}

static void even_resolves_its_options(void **state)
{
    (void)state;
    static const int32_t heads[][2] = { { 1, 1 },  { 2, 2 },  { 4, 4 },  { 8, 4 },
                                        { 16, 4 }, { 12, 4 }, { 11, 1 }, { 10, 2 } };
    const int32_t kv_len[] = { 1000, 10 };
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        const setting s = { "even", 4, 2, heads[i][0], EKV_PLAN_OPTIONS_INIT };
        ekv_plan *plan = create_checked(&s, kv_len, 2);
        assert_int_equal(plan->tiles[0].head_count, heads[i][1]);
        assert_int_equal(plan->block_tokens, 16);
        assert_int_equal(plan->request_cost, (12 + heads[i][1] - 1) / heads[i][1]); /* 12 of one head */
        assert_int_equal(plan->grid[0], 8);
        assert_int_equal(plan->resident_ctas, 2);
        ekv_plan_free(plan);
    }
    static const int32_t pages[][2] = { { 1, 16 },  { 15, 16 }, { 16, 16 },   { 32, 32 },
                                        { 64, 64 }, { 65, 16 }, { 16000, 16 } };
    for (size_t i = 0; i < sizeof pages / sizeof pages[0]; i++) {
        ekv_batch batch = EKV_BATCH_INIT;
        batch.batch_size = 2;
        batch.kv_len = kv_len;
        batch.q_heads = 8;
        batch.kv_heads = 1;
        batch.head_dim = 64;
        batch.page_size = pages[i][0];
        ekv_device device = EKV_DEVICE_INIT;
        device.num_sms = 5;
        ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
        options.request_cost = 1000;
        options.ctas_per_sm = 3;
        ekv_plan *plan = NULL;
        assert_int_equal(ekv_plan_create(context, "even", &batch, &device, &options, &plan), EKV_OK);
        assert_int_equal(plan->block_tokens, pages[i][1]);
        assert_int_equal(plan->request_cost, 1000);
        assert_int_equal(plan->grid[0], 15);
        ekv_plan_free(plan);
    }
}

/* As many CTAs as get a share of 100 tokens, or one for each request where they are more: fewer would read them one
 * after the other, and save no cut. */
static void even_takes_fewer_ctas_for_a_small_batch(void **state)
{
    (void)state;
    setting s = setting_of("even", 16, 1, 16, 0);
    s.options.least_share = 100;
    const int32_t one[] = { 1000 }, short_ones[] = { 64, 64, 64, 64 };
    ekv_plan *plan = create_checked(&s, one, 1);
    assert_int_equal(plan->num_tiles, 10);
    assert_int_equal(plan->cta_begin[10], 10);
    ekv_plan_free(plan);
    plan = create_checked(&s, short_ones, 4);
    assert_int_equal(plan->num_tiles, 4);
    assert_int_equal(plan->num_merges, 0);
    for (int32_t cta = 0; cta <= 16; cta++)
        assert_int_equal(plan->cta_begin[cta], ekv_min(cta, 4));
    ekv_plan_free(plan);
}

static void even_refuses_a_line_beyond_64_bits(void **state)
{
    (void)state;
    ekv_plan *plan = NULL;
    setting s = { "even", 65536, 64, 65521, EKV_PLAN_OPTIONS_INIT }; /* a prime number of heads */
    assert_int_equal(try_create(&s, (int32_t[]){ INT32_MAX }, 1, &plan), EKV_ERROR_OVERFLOW);
    assert_non_null(strstr(ekv_last_error(), "65521"));
    assert_null(plan);
}

/* Two CTAs, shares of 1,056 tokens, which may begin 132 from their place. */
static void even_leaves_requests_whole_where_little_is_cut(void **state)
{
    (void)state;
    static const struct {
        int32_t kv_len[3], snap_tokens, cut;
    } cases[] = {
        { { 1008, 1104, 0 }, -1, 0 },    { { 1008, 1104, 0 }, 0, 1056 },  { { 1008, 1104, 0 }, 48, 1056 },
        { { 1008, 1104, 0 }, 49, 0 },    { { 1104, 1008, 0 }, 48, 0 },    { { 1104, 1008, 0 }, 47, 1056 },
        { { 1184, 928, 0 }, 256, 0 },    { { 1200, 912, 0 }, 256, 1056 }, { { 928, 1184, 0 }, 256, 0 },
        { { 912, 1200, 0 }, 256, 1056 }, { { 1040, 48, 1024 }, -1, 0 },   { { 2112, 0, 0 }, 65536, 1056 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setting s = setting_of("even", 2, 1, 16, 0);
        s.options.snap_tokens = cases[i].snap_tokens;
        ekv_plan *plan = create_checked(&s, cases[i].kv_len, 3);
        int32_t token = 0;
        for (int64_t t = 0; t < plan->num_tiles; t++)
            if (plan->tiles[t].kv_begin > 0)
                token = plan->tiles[t].kv_begin + (plan->tiles[t].request == 1 ? cases[i].kv_len[0] : 0);
        if (token != cases[i].cut || (plan->num_merges > 0) != (cases[i].cut > 0))
            fail_msg("case %zu is cut at token %d, %lld merges", i, token, (long long)plan->num_merges);
        ekv_plan_free(plan);
    }
}

/* ---- Random batches ---------------------------------------------------------------------------------- */

static void even_is_even(void **state)
{
    (void)state;
    for_random_batches("even", BALANCE_BATCHES, check_balance);
}

/* Every block of the plan lies in the CTA that the rule's sentence names. */
static void check_owners(const ekv_plan *plan, const ekv_even_line *line, const char *where)
{
    for (int32_t cta = 0; cta < line->num_ctas; cta++)
        for (int64_t i = plan->cta_begin[cta]; i < plan->cta_begin[cta + 1]; i++) {
            const ekv_tile *t = &plan->tiles[i];
            const int64_t pair = line->cost[t->request + 1] - line->cost[t->request];
            const int64_t begin = line->groups * line->cost[t->request] + t->head / line->heads_per_tile * pair;
            int32_t token = t->kv_begin;
            do { /* the blocks of the tile */
                const int64_t z = ekv_min(begin + line->request_cost + token + line->block_tokens, begin + pair);
                if (!owns(line, cta, z))
                    fail_msg("%s: token %d of request %d is in CTA %d", where, token, t->request, cta);
                token += line->block_tokens;
            } while (token < t->kv_end);
        }
}

static void check_even_walk(const setting *s, const int32_t *kv_len, int32_t batch_size, const char *where)
{
    ekv_plan *plan = create(s, kv_len, batch_size);
    int64_t *cost = calloc((size_t)batch_size + 1, sizeof *cost), tiles = 0, merges = 0;
    assert_non_null(cost);
    for (int32_t b = 0; b < batch_size; b++)
        cost[b + 1] = cost[b] + ekv_round_up(kv_len[b], s->options.block_tokens) + plan->request_cost;
    const ekv_even_line line = line_of(plan, cost);
    for (int32_t cta = 0; cta < line.num_ctas; cta++) {
        assert_int_equal(plan->cta_begin[cta], tiles);
        const ekv_even_place end = ekv_even_begin(&line, cta + 1);
        ekv_even_place at = ekv_even_begin(&line, cta);
        for (; ekv_even_before(at, end); at = ekv_even_next_pair(&line, at)) {
            const int32_t first = ekv_even_first_cta(&line, at);
            const ekv_merge merge = ekv_even_merge(&line, at, first);
            if (ekv_even_is_part(at, end)) {
                expect_same_tile(plan, tiles++, ekv_even_part(&line, cta, at, end, &merge, first), where);
                if (at.token == 0)
                    expect_same_merge(plan, merges++, merge, where);
            } else {
                expect_same_tile(plan, tiles++, ekv_even_whole(&line, at), where);
                assert_int_equal(merge.num_splits, 1);
            }
            if (at.token == 0)
                assert_int_equal(first, cta);
        }
    }
    assert_int_equal(tiles, plan->num_tiles);
    assert_int_equal(merges, plan->num_merges);
    if (line.total < 200000 && line.snap == 0)
        check_owners(plan, &line, where);
    free(cost);
    ekv_plan_free(plan);
}

static void even_walk_is_the_pure_function(void **state)
{
    (void)state;
    for_random_batches("even", WALK_BATCHES, check_even_walk);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(even_cuts_at_the_share),
        cmocka_unit_test(even_gives_a_block_to_the_share_of_its_end),
        cmocka_unit_test(even_makes_every_block_a_piece_where_shares_are_short),
        cmocka_unit_test(even_keeps_head_groups_together),
        cmocka_unit_test(even_shares_out_empty_requests),
        cmocka_unit_test(even_resolves_its_options),
        cmocka_unit_test(even_leaves_requests_whole_where_little_is_cut),
        cmocka_unit_test(even_takes_fewer_ctas_for_a_small_batch),
        cmocka_unit_test(even_refuses_a_line_beyond_64_bits),
        cmocka_unit_test(even_is_even),
        cmocka_unit_test(even_walk_is_the_pure_function),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
