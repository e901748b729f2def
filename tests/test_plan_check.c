/* SPDX-License-Identifier: Apache-2.0
 * A plan made by hand, which is valid, and one corruption for each thing that can be wrong with it. */
#include "one_context.h"
#include "plan/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { REQUESTS = 3, TILES = 13, MERGES = 3, SLOTS = 12, CTAS = 4, FIRST_WHOLE_TILE = 9 };

typedef struct fixture {
    ekv_plan plan;
    int32_t kv_len[REQUESTS], num_splits[REQUESTS], batch_order[REQUESTS];
    ekv_tile tiles[TILES];
    ekv_merge merges[MERGES];
    int64_t cta_begin[CTAS + 1];
} fixture;

/* 2 KV heads of 4 query rows in 2 m_blocks.  Request 0 has 40 tokens in 3 splits: both heads together in m_block 0
 * (tiles 0..2), each head alone in m_block 1 (3..5 and 6..8).  Request 1 has 7 tokens, uncut (9, 10).  Request 2 has
 * none (11, 12).  Four CTAs own three tiles each, the last one four. */
static void make_valid(fixture *f)
{
    static const int32_t cuts[] = { 0, 16, 32, 40 };
    memset(f, 0, sizeof *f);
    int64_t n = 0;
    for (int32_t s = 0; s < 3; s++)
        f->tiles[n++] = (ekv_tile){ 0, 0, s, cuts[s], cuts[s + 1], 2 * s, 0, 2, EKV_TILE_PARTIAL };
    for (uint16_t h = 0; h < 2; h++)
        for (int32_t s = 0; s < 3; s++)
            f->tiles[n++] = (ekv_tile){ 0, 1, s, cuts[s], cuts[s + 1], 6 + 3 * h + s, h, 1, EKV_TILE_PARTIAL };
    for (int32_t b = 1; b < 3; b++)
        for (int32_t m = 0; m < 2; m++)
            f->tiles[n++] = (ekv_tile){ b, m, 0, 0, b == 1 ? 7 : 0, -1, 0, 2, 0 };
    f->merges[0] = (ekv_merge){ 0, 0, 3, 0, 2, 2, 0, 2, 0 };
    f->merges[1] = (ekv_merge){ 0, 1, 3, 6, 7, 1, 0, 1, 0 };
    f->merges[2] = (ekv_merge){ 0, 1, 3, 9, 10, 1, 1, 1, 0 };
    memcpy(f->kv_len, (int32_t[]){ 40, 7, 0 }, sizeof f->kv_len);
    memcpy(f->num_splits, (int32_t[]){ 3, 1, 1 }, sizeof f->num_splits);
    memcpy(f->batch_order, (int32_t[]){ 0, 1, 2 }, sizeof f->batch_order);
    memcpy(f->cta_begin, (int64_t[]){ 0, 3, 6, 9, 13 }, sizeof f->cta_begin);

    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = REQUESTS;
    batch.kv_len = f->kv_len;
    batch.q_heads = 8;
    batch.kv_heads = 2;
    batch.head_dim = 128;
    f->plan = (ekv_plan){ .context = context,
                          .batch = batch,
                          .capacity = { TILES, MERGES, SLOTS, CTAS, 0 },
                          .max_batch_size = REQUESTS,
                          .kv_len = f->kv_len,
                          .group = 4,
                          .num_sms = 2,
                          .heads = 2,
                          .rows = 4,
                          .block_m = 2,
                          .m_blocks = 2,
                          .padded_rows = 2,
                          .resident_ctas = 2,
                          .block_tokens = 16,
                          .cut_tokens = 1,
                          .request_cost = -1,
                          .dispatch = EKV_DISPATCH_RANGE,
                          .grid = { CTAS, 1, 1 },
                          .split_kv = true,
                          .num_work_items = 10,
                          .max_work_items = 10,
                          .num_splits = f->num_splits,
                          .batch_order = f->batch_order,
                          .num_tiles = TILES,
                          .tiles = f->tiles,
                          .num_merges = MERGES,
                          .merges = f->merges,
                          .num_slots = SLOTS,
                          .cta_begin = f->cta_begin };
}

static void swap_tiles(ekv_plan *p, int i, int j)
{
    ekv_tile t = p->tiles[i];
    p->tiles[i] = p->tiles[j];
    p->tiles[j] = t;
}

/* name, what is done to the valid plan p, what the error says */
#define BREACHES(X)                                                                                                  \
    /* 1: coverage */                                                                                                \
    X(request_negative, p->tiles[9].request = -1, "tile 9 (request -1,")                                             \
    X(request_too_large, p->tiles[9].request = 3, "the batch has 3 requests")                                        \
    X(m_block_negative, p->tiles[9].m_block = -1, "a head has 2 m_blocks")                                           \
    X(m_block_too_large, p->tiles[9].m_block = 2, "a head has 2 m_blocks")                                           \
    X(no_heads, p->tiles[9].head_count = 0, "the batch has 2 heads")                                                 \
    X(head_too_large, p->tiles[9].head = 1, "heads 1+2")                                                             \
    X(begin_negative, p->tiles[9].kv_begin = -1, "the request has tokens [0, 7)")                                    \
    X(end_before_begin, p->tiles[0].kv_begin = 17, "tokens [17, 16)")                                                \
    X(end_past_length, p->tiles[9].kv_end = 8, "the request has tokens [0, 7)")                                      \
    X(gap_between_splits, p->tiles[1].kv_begin = 17, "splits of head 0 before this one end at token 16")             \
    X(overlap_of_splits, p->tiles[1].kv_begin = 15, "splits of head 0 before this one end at token 16")              \
    X(first_token_missing, p->tiles[9].kv_begin = 1, "splits of head 0 before this one end at token 0")              \
    X(last_token_missing, p->tiles[9].kv_end = 6, "request 1, m_block 0, head 0: 1 tiles cover 6 of 7 tokens")       \
    X(one_head_missing, p->tiles[9].head_count = 1, "request 1, m_block 0, head 1: 0 tiles cover 0 of 7")            \
    X(m_block_missing, (p->num_tiles--, p->cta_begin[CTAS]--), "request 2, m_block 1, head 0: 0 tiles cover 0 of 0") \
    X(tile_twice, p->tiles[10] = p->tiles[9], "head 0 has 1 splits before this one")                                 \
    X(empty_request_twice, p->tiles[12].m_block = 0, "head 0 has 1 splits before this one")                          \
    X(split_negative, p->tiles[9].split = -1, "outside the plan's 13 tiles")                                         \
    X(split_too_large, p->tiles[9].split = 13, "outside the plan's 13 tiles")                                        \
    X(split_skipped, p->tiles[2].split = 3, "head 0 has 2 splits before this one")                                   \
    X(split_repeated, p->tiles[2].split = 1, "head 0 has 2 splits before this one")                                  \
    X(splits_not_in_token_order, (p->tiles[0].split = 1, p->tiles[1].split = 0), "end at token 0")                   \
    X(cut_elsewhere, p->cut_tokens = 3, "cuts at multiples of 3 tokens")                                             \
    X(cut_where_none_is_made, p->cut_tokens = 0, "this planner does not cut requests")                               \
    X(empty_tile, (p->tiles[2].kv_begin = 40, p->tiles[1].kv_end = 40), "makes no empty tiles")                      \
    X(unknown_flag, p->tiles[9].flags = 2, "flags 0x2 are unknown")                                                  \
    /* 2: slots and merges */                                                                                        \
    X(whole_tile_with_slot, p->tiles[9].slot = 0, "writes the output and has a partial slot")                        \
    X(slot_negative, p->tiles[0].slot = -1, "the plan has 12 partial slots")                                         \
    X(slot_too_large, p->tiles[8].slot = 12, "the plan has 12 partial slots")                                        \
    X(slots_of_last_head_too_large, p->tiles[2].slot = 11, "the plan has 12 partial slots")                          \
    X(slot_shared, (p->tiles[6].slot = 6, p->merges[2].slot_first = 6), "another tile writes slot 6 too")            \
    X(slot_not_that_of_merge, p->tiles[1].slot = 4, "merge 0 takes head 0 from slot 2")                              \
    X(slots_of_splits_swapped, (p->tiles[0].slot = 2, p->tiles[1].slot = 0), "merge 0 takes head 0 from slot 0")     \
    X(merge_of_wrong_first, p->merges[1].slot_first = 5, "merge 1 takes head 0 from slot 5")                         \
    X(merge_of_wrong_next, p->merges[1].slot_next = 6, "merge 1 takes head 0 from slot 6")                           \
    X(merge_of_wrong_stride, p->merges[1].slot_stride = 2, "merge 1 takes head 0 from slot 9")                       \
    X(partial_without_merge, p->num_merges = 2, "no merge takes head 1")                                             \
    X(merge_twice, p->merges[1] = p->merges[2], "merge 1 writes head 1 too")                                         \
    X(merge_too_short, p->merges[0].num_splits = 2, "head 0 has 3 splits")                                           \
    X(merge_too_long, p->merges[0].num_splits = 4, "head 0 has 3 splits")                                            \
    X(merge_of_nothing, p->merges[0].num_splits = 0, "nothing to merge")                                             \
    X(merge_request_negative, p->merges[0].request = -1, "the batch has 3 requests")                                 \
    X(merge_request_too_large, p->merges[0].request = 3, "the batch has 3 requests")                                 \
    X(merge_m_block_too_large, p->merges[0].m_block = 2, "a head has 2 m_blocks")                                    \
    X(merge_head_too_large, p->merges[0].head = 1, "the batch has 2 heads")                                          \
    X(merge_without_heads, p->merges[0].head_count = 0, "the batch has 2 heads")                                     \
    X(merge_reserved, p->merges[0].reserved = 9, "reserved is 9")                                                    \
    X(merge_of_a_whole_tile, p->merges[2] = ((ekv_merge){ 1, 0, 1, 0, 0, 0, 0, 2, 0 }), "no merge takes head 1")     \
    X(whole_tile_and_merge, (p->tiles[9].flags = 1, p->tiles[9].slot = 0), "no merge takes head 0")                  \
    X(whole_tile_of_a_cut_request, (p->tiles[8].flags = 0, p->tiles[8].slot = -1),                                   \
      "writes the output of head 1, which has 3 splits and a merge")                                                 \
    X(merges_without_split, p->split_kv = false, "3 merges in a plan that says split_kv false")                      \
    /* 3: promised sizes and summary numbers */                                                                      \
    X(too_many_requests, p->max_batch_size = 2, "3 requests; creation promised at most 2")                           \
    X(too_many_tiles, p->capacity.tiles = 12, "13 tiles; creation promised at most 12")                              \
    X(too_many_merges, p->capacity.merges = 2, "3 merges; creation promised at most 2")                              \
    X(too_many_slots, p->capacity.slots = 11, "12 partial slots; creation promised at most 11")                      \
    X(too_many_ctas, p->capacity.ctas = 3, "4 CTAs; creation promised at most 3")                                    \
    X(no_grid, p->grid[1] = 0, "the grid is 4 x 0 x 1")                                                              \
    X(grid_padding_fault, p->max_work_items = 9, "10 work items, but the captured grid has room for 9")              \
    X(grid_too_small, p->dispatch = EKV_DISPATCH_GRID, "a grid of 4 CTAs for 13 tiles")                              \
    X(ctas_not_resident, p->resident_ctas = 1, "4 persistent CTAs; 2 SMs hold 2")                                    \
    X(range_begins_late, p->cta_begin[0] = 1, "CTA 0 begins at tile 1")                                              \
    X(range_ends_early, p->cta_begin[CTAS] = 12, "end at tile 12 of 13")                                             \
    X(range_goes_back, p->cta_begin[2] = 2, "CTA 1 owns tiles [3, 2)")                                               \
    X(heads_of_nothing, p->heads = 3, "tiles run over 3 heads")                                                      \
    X(rows_wrong, p->rows = 5, "a head has 4")                                                                       \
    X(m_blocks_wrong, p->m_blocks = 3, "3 m_blocks of 2 rows for 4 packed rows")                                     \
    X(num_splits_wrong, p->num_splits[0] = 2, "num_splits[0] is 2; the tiles of the request have 3")                 \
    X(work_items_wrong, p->num_work_items = 9, "num_work_items is 9; the tiles are 10 work items")                   \
    X(order_repeats, p->batch_order[2] = 0, "batch_order[2] is 0, which is there twice")                             \
    X(order_out_of_range, p->batch_order[1] = 3, "batch_order[1] is 3, which is no request")

#define BREACH_FUNCTION(name, change, text) \
    static void name(ekv_plan *p)           \
    {                                       \
        (void)(change);                     \
    }
BREACHES(BREACH_FUNCTION)

static const struct {
    const char *name;
    void (*change)(ekv_plan *plan);
    const char *text;
} breaches[] = {
#define BREACH_ENTRY(name, change, text) { #name, name, text },
    BREACHES(BREACH_ENTRY)
};

static void a_valid_plan_passes(void **state)
{
    (void)state;
    fixture f;
    make_valid(&f);
    if (ekv_plan_check(&f.plan))
        fail_msg("%s", ekv_last_error());
}

static void every_breach_is_found_and_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof breaches / sizeof breaches[0]; i++) {
        fixture f;
        make_valid(&f);
        breaches[i].change(&f.plan);
        ekv_status status = ekv_plan_check(&f.plan);
        if (status != EKV_ERROR_PLAN_INVALID)
            fail_msg("%s: %s", breaches[i].name, ekv_status_name(status));
        if (!strstr(ekv_last_error(), breaches[i].text))
            fail_msg("%s: '%s' is not in '%s'", breaches[i].name, breaches[i].text, ekv_last_error());
    }
}

/* What other planners do and the hand-made plan does not. */
static void legal_variants_pass(void **state)
{
    (void)state;
    fixture f;
    make_valid(&f);
    swap_tiles(&f.plan, 0, 2); /* any dispatch order */
    swap_tiles(&f.plan, 1, 12);
    assert_int_equal(ekv_plan_check(&f.plan), EKV_OK);

    make_valid(&f);
    f.plan.empty_splits = true; /* a trailing split without tokens */
    for (int i = 0; i < 9; i += 3)
        f.tiles[i + 1].kv_end = f.tiles[i + 2].kv_begin = 40;
    assert_int_equal(ekv_plan_check(&f.plan), EKV_OK);

    make_valid(&f);
    f.plan.dispatch = EKV_DISPATCH_GRID; /* padded */
    f.plan.grid[0] = 7;
    f.plan.grid[1] = 2;
    f.plan.max_work_items = 14;
    assert_int_equal(ekv_plan_check(&f.plan), EKV_OK);

    make_valid(&f);
    f.plan.dispatch = EKV_DISPATCH_QUEUE;
    assert_int_equal(ekv_plan_check(&f.plan), EKV_OK);
}

/* An uncut request that still goes through a merge of one, as FlashInfer's captured graphs have it. */
static void a_merge_of_one_split_passes(void **state)
{
    (void)state;
    fixture f;
    make_valid(&f);
    ekv_merge merges[MERGES + 1];
    memcpy(merges, f.merges, sizeof f.merges);
    merges[MERGES] = (ekv_merge){ 1, 0, 1, SLOTS, 0, 0, 0, 2, 0 };
    f.tiles[FIRST_WHOLE_TILE].flags = EKV_TILE_PARTIAL;
    f.tiles[FIRST_WHOLE_TILE].slot = SLOTS;
    f.plan.merges = merges;
    f.plan.num_merges = f.plan.capacity.merges = MERGES + 1;
    f.plan.num_slots = f.plan.capacity.slots = SLOTS + 2;
    assert_int_equal(ekv_plan_check(&f.plan), EKV_OK);
    f.tiles[FIRST_WHOLE_TILE].flags = 0;
    f.tiles[FIRST_WHOLE_TILE].slot = -1;
    assert_int_equal(ekv_plan_check(&f.plan), EKV_ERROR_PLAN_INVALID);
    assert_non_null(strstr(ekv_last_error(), "writes the output of head 0, which has 1 splits and a merge"));
}

/* One head; request 0 has 48 tokens in three splits of a block, request 1 one block.  A request costs 8 tokens, so
 * the mean of two CTAs is 40 and a block at most 24. */
static void balance_is_checked_where_it_is_promised(void **state)
{
    (void)state;
    fixture f;
    make_valid(&f);
    for (int32_t s = 0; s < 3; s++)
        f.tiles[s] = (ekv_tile){ 0, 0, s, 16 * s, 16 * s + 16, s, 0, 1, EKV_TILE_PARTIAL };
    f.tiles[3] = (ekv_tile){ 1, 0, 0, 0, 16, -1, 0, 1, 0 };
    f.merges[0] = (ekv_merge){ 0, 0, 3, 0, 1, 1, 0, 1, 0 };
    f.kv_len[0] = 48;
    f.kv_len[1] = 16;
    ekv_plan *p = &f.plan;
    p->batch.batch_size = 2;
    p->batch.q_heads = 4;
    p->batch.kv_heads = p->heads = p->m_blocks = 1;
    p->block_m = p->rows;
    p->num_tiles = p->num_work_items = 4;
    p->num_merges = 1;
    p->grid[0] = 2;
    p->request_cost = 8;
    static const struct {
        int64_t second; /* tile at which CTA 1 begins */
        const char *text;
    } cases[] = {
        { 1, NULL }, /* 24 and 56 */
        { 2, NULL }, /* 40 and 40 */
        { 3, "CTA 0 has 3 pieces of cut requests" },
        { 4, "CTA 0 costs 80 tokens; the mean is 40 and a block and what shares may move cost 24" },
        { 0, "CTA 1 costs 80 tokens" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        memcpy(f.cta_begin, (int64_t[]){ 0, cases[i].second, 4 }, 3 * sizeof(int64_t));
        p->request_cost = 8;
        assert_int_equal(ekv_plan_check(p), cases[i].text ? EKV_ERROR_PLAN_INVALID : EKV_OK);
        if (cases[i].text)
            assert_non_null(strstr(ekv_last_error(), cases[i].text));
        p->request_cost = -1;
        assert_int_equal(ekv_plan_check(p), EKV_OK);
    }
}

static void null_is_refused(void **state)
{
    (void)state;
    assert_int_equal(ekv_plan_check(NULL), EKV_ERROR_INVALID_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_valid_plan_passes),
        cmocka_unit_test(every_breach_is_found_and_named),
        cmocka_unit_test(legal_variants_pass),
        cmocka_unit_test(a_merge_of_one_split_passes),
        cmocka_unit_test(balance_is_checked_where_it_is_promised),
        cmocka_unit_test(null_is_refused),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
