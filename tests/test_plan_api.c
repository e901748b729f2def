/* SPDX-License-Identifier: Apache-2.0
 * The public functions on plans: what they refuse and how, what they leave alone, what an update costs. */
#include "counting_allocator.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static counting_allocator allocator;
static ekv_context *context;
static const int32_t lengths[] = { 5000, 0, 700, 16 };
enum { REQUESTS = 4 };

/* A plan's arguments, valid as make() leaves them. */
typedef struct arguments {
    ekv_batch batch;
    ekv_device device;
    ekv_plan_options options;
} arguments;

static arguments make(void)
{
    arguments a = { EKV_BATCH_INIT, EKV_DEVICE_INIT, EKV_PLAN_OPTIONS_INIT };
    a.batch.batch_size = REQUESTS;
    a.batch.kv_len = lengths;
    a.batch.q_heads = 32;
    a.batch.kv_heads = 4;
    a.batch.head_dim = 128;
    assert_int_equal(ekv_device_find("h200", &a.device), EKV_OK);
    return a;
}

static ekv_plan *create(const char *planner, const arguments *a)
{
    ekv_plan *plan = NULL;
    if (ekv_plan_create(context, planner, &a->batch, &a->device, &a->options, &plan))
        fail_msg("%s: %s", planner, ekv_last_error());
    return plan;
}

static void expect(ekv_status status, ekv_status expected, const char *name, const char *text)
{
    if (status != expected || !strstr(ekv_last_error(), text))
        fail_msg("%s: got %s '%s', not %s '%s'", name, ekv_status_name(status), ekv_last_error(),
                 ekv_status_name(expected), text);
}

/* ---- Creation ---------------------------------------------------------------------------------------- */

#define INVALID EKV_ERROR_INVALID_ARGUMENT
#define UNSUPPORTED EKV_ERROR_UNSUPPORTED

/* name, planner, what is done to valid arguments, status, what the error says */
#define REFUSALS(X)                                                                                                 \
    X(no_requests, "even", a->batch.batch_size = 0, INVALID, "batch_size is 0; it must be 1..")                     \
    X(requests_negative, "even", a->batch.batch_size = -4, INVALID, "batch_size is -4")                             \
    X(requests_too_many, "even", a->batch.batch_size = INT32_MAX, INVALID, "batch_size is 2147483647")              \
    X(no_lengths, "even", a->batch.kv_len = NULL, INVALID, "batch.kv_len is NULL")                                  \
    X(no_q_heads, "even", a->batch.q_heads = 0, INVALID, "q_heads is 0")                                            \
    X(no_kv_heads, "even", a->batch.kv_heads = 0, INVALID, "kv_heads is 0")                                         \
    X(kv_heads_negative, "even", a->batch.kv_heads = -4, INVALID, "kv_heads is -4")                                 \
    X(kv_heads_too_many, "even", a->batch.kv_heads = 65536, INVALID, "kv_heads is 65536")                           \
    X(heads_not_divisible, "even", a->batch.kv_heads = 5, INVALID, "q_heads 32 is not a multiple of kv_heads 5")    \
    X(more_kv_heads, "even", a->batch.kv_heads = 64, INVALID, "q_heads 32 is not a multiple of kv_heads 64")        \
    X(no_head_dim, "even", a->batch.head_dim = 0, INVALID, "head_dim is 0")                                         \
    X(head_dim_negative, "even", a->batch.head_dim = -128, INVALID, "head_dim is -128")                             \
    X(no_page, "even", a->batch.page_size = 0, INVALID, "page_size is 0")                                           \
    X(page_negative, "even", a->batch.page_size = -16, INVALID, "page_size is -16")                                 \
    X(no_queries, "even", a->batch.q_len = 0, INVALID, "q_len is 0")                                                \
    X(too_many_rows, "even", (a->batch.q_len = 65536, a->batch.q_heads = 32768), EKV_ERROR_OVERFLOW,                \
      "q_len 65536 times q_heads 32768")                                                                            \
    X(q_dtype_unknown, "even", a->batch.q_dtype = (ekv_dtype)99, INVALID, "q_dtype 99")                             \
    X(kv_dtype_unknown, "even", a->batch.kv_dtype = (ekv_dtype)-1, INVALID, "kv_dtype -1")                          \
    X(layout_unknown, "even", a->batch.layout = (ekv_layout)7, INVALID, "layout 7")                                 \
    X(window_too_small, "even", a->batch.window_left = -2, INVALID, "window_left is -2")                            \
    X(soft_cap_negative, "even", a->batch.soft_cap = -1, INVALID, "soft_cap is -1")                                 \
    X(soft_cap_nan, "even", a->batch.soft_cap = NAN, INVALID, "soft_cap is")                                        \
    X(soft_cap_infinite, "even", a->batch.soft_cap = INFINITY, INVALID, "soft_cap is inf")                          \
    X(no_sms, "even", a->device.num_sms = 0, INVALID, "device.num_sms is 0")                                        \
    X(sms_too_many, "even", a->device.num_sms = 65537, INVALID, "device.num_sms is 65537")                          \
    X(no_ctas, "even", a->device.ctas_per_sm = 0, INVALID, "device.ctas_per_sm is 0")                               \
    X(cost_negative, "even", a->device.request_cost_tokens = -1, INVALID, "device.request_cost_tokens is -1")       \
    X(resident_negative, "none", a->options.resident_ctas = -1, INVALID, "resident_ctas is -1")                     \
    X(resident_too_many, "none", a->options.resident_ctas = 65, INVALID, "resident_ctas is 65")                     \
    X(width_negative, "fa3", a->options.table_width = -1, INVALID, "table_width is -1")                             \
    X(width_too_small, "fa3", a->options.table_width = 4999, INVALID, "kv_len[0] is 5000; table_width is 4999")     \
    X(margin_negative, "even", a->options.sm_margin = -1, INVALID, "sm_margin is -1")                               \
    X(margin_all_sms, "even", a->options.sm_margin = 132, INVALID, "sm_margin is 132; it must be 0..131")           \
    X(ctas_per_sm_too_many, "even", a->options.ctas_per_sm = 65, INVALID, "ctas_per_sm is 65")                      \
    X(heads_per_tile_too_many, "even", a->options.heads_per_tile = 5, INVALID, "heads_per_tile is 5")               \
    X(heads_per_tile_no_divisor, "even", a->options.heads_per_tile = 3, INVALID,                                    \
      "heads_per_tile 3 does not divide kv_heads 4")                                                                \
    X(block_too_large, "even", a->options.block_tokens = 65537, INVALID, "block_tokens is 65537")                   \
    X(request_cost_too_small, "even", a->options.request_cost = -2, INVALID, "request_cost is -2")                  \
    X(chunk_negative, "even-invariant", a->options.chunk_tokens = -1, INVALID, "chunk_tokens is -1")                \
    X(dispatch_unknown, "even", a->options.dispatch = (ekv_dispatch)4, INVALID, "dispatch is 4")                    \
    X(total_negative, "even", a->options.max_total_tokens = -1, INVALID, "max_total_tokens is -1")                  \
    X(total_too_small, "even-invariant", a->options.max_total_tokens = 256, EKV_ERROR_CAPACITY, "max_total_tokens") \
    X(on_device_unknown, "even", a->options.on_device = 2, INVALID, "on_device is 2")                               \
    X(on_device_alone, "even", a->options.on_device = 1, INVALID, "on_device is 1 and cuda is 0")                   \
    X(on_device_none, "none", a->options.on_device = a->options.cuda = 1, UNSUPPORTED, "planner none")              \
    X(cuda_core_unmeasured, "flashinfer-cuda-core", a->batch.head_dim = 64, UNSUPPORTED, "resident_ctas")           \
    X(cuda_core_queries, "flashinfer-cuda-core", a->batch.q_len = 2, UNSUPPORTED, "q_len is 2")                     \
    X(fa3_head_dim, "fa3", a->batch.head_dim = 264, UNSUPPORTED, "head_dim is 264")                                 \
    X(planner_unknown, "evn", (void)a, EKV_ERROR_NOT_FOUND, "no planner is called 'evn'")                           \
    X(planner_empty, "", (void)a, EKV_ERROR_NOT_FOUND, "no planner is called ''")

#define REFUSAL_FUNCTION(name, planner, change, status, text) \
    static void name(arguments *a)                            \
    {                                                         \
        (void)(change);                                       \
    }
REFUSALS(REFUSAL_FUNCTION)

static const struct {
    const char *name, *planner;
    void (*change)(arguments *a);
    ekv_status status;
    const char *text;
} refusals[] = {
#define REFUSAL_ENTRY(name, planner, change, status, text) { #name, planner, name, status, text },
    REFUSALS(REFUSAL_ENTRY)
};

static void creation_refuses_bad_arguments(void **state)
{
    (void)state;
    const int64_t live = allocator.live;
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        arguments a = make();
        refusals[i].change(&a);
        ekv_plan *const untouched = (ekv_plan *)&a, *plan = untouched;
        expect(ekv_plan_create(context, refusals[i].planner, &a.batch, &a.device, &a.options, &plan),
               refusals[i].status, refusals[i].name, refusals[i].text);
        assert_ptr_equal(plan, untouched);
        assert_int_equal(allocator.live, live);
    }
}

static void creation_refuses_null(void **state)
{
    (void)state;
    arguments a = make();
    ekv_plan *plan = NULL;
    expect(ekv_plan_create(NULL, "even", &a.batch, &a.device, NULL, &plan), INVALID, "context", "context is NULL");
    expect(ekv_plan_create(context, NULL, &a.batch, &a.device, NULL, &plan), INVALID, "planner", "planner is NULL");
    expect(ekv_plan_create(context, "even", NULL, &a.device, NULL, &plan), INVALID, "batch", "batch is NULL");
    expect(ekv_plan_create(context, "even", &a.batch, NULL, NULL, &plan), INVALID, "device", "device is NULL");
    expect(ekv_plan_create(context, "even", &a.batch, &a.device, NULL, NULL), INVALID, "plan", "plan is NULL");
    assert_null(plan);
    assert_int_equal(ekv_plan_create(context, "even", &a.batch, &a.device, NULL, &plan), EKV_OK);
    ekv_plan_free(plan);
}

static void lengths_are_checked(void **state)
{
    (void)state;
    arguments a = make();
    ekv_plan *plan = NULL;
    int32_t negative[REQUESTS] = { 5, 6, -7, -8 };
    a.batch.kv_len = negative;
    expect(ekv_plan_create(context, "even", &a.batch, &a.device, NULL, &plan), INVALID, "negative", "kv_len[2] is -7");

    enum { MANY = 513 }; /* 512 * (2^31 - 1) < 2^40 < 513 * (2^31 - 1) */
    static int32_t huge[MANY];
    for (int i = 0; i < MANY; i++)
        huge[i] = INT32_MAX;
    a.batch.kv_len = huge;
    a.batch.batch_size = MANY;
    expect(ekv_plan_create(context, "none", &a.batch, &a.device, NULL, &plan), EKV_ERROR_OVERFLOW, "sum",
           "the sum of kv_len is 1101659110911");
    a.batch.batch_size = MANY - 1;
    for (int32_t p = 0; ekv_planner_name(p); p++) {
        if (!strcmp(ekv_planner_name(p), "even-invariant"))
            a.options.chunk_tokens = 1 << 24;
        plan = create(ekv_planner_name(p), &a);
        if (ekv_plan_check(plan))
            fail_msg("%s: %s", ekv_planner_name(p), ekv_last_error());
        ekv_plan_free(plan);
    }
}

static void records_that_pass_31_bits_are_refused(void **state)
{
    (void)state;
    enum { MANY = 32768 };
    int32_t *zeros = calloc(MANY, sizeof *zeros);
    assert_non_null(zeros);
    arguments a = make();
    a.batch.kv_len = zeros;
    a.batch.batch_size = MANY;
    a.batch.q_heads = a.batch.kv_heads = UINT16_MAX;
    ekv_plan *plan = NULL;
    expect(ekv_plan_create(context, "none", &a.batch, &a.device, NULL, &plan), EKV_ERROR_OVERFLOW, "tiles",
           "planner none may make 2147450880 tiles");
    assert_null(plan);
    free(zeros);
}

static void struct_sizes_are_checked(void **state)
{
    (void)state;
    arguments a = make();
    ekv_plan *plan = NULL;
    a.batch.struct_size--;
    expect(ekv_plan_create(context, "even", &a.batch, &a.device, NULL, &plan), INVALID, "batch",
           "ekv_batch.struct_size is");
    a = make();
    a.device.struct_size = 0;
    expect(ekv_plan_create(context, "even", &a.batch, &a.device, NULL, &plan), INVALID, "device",
           "ekv_device.struct_size is 0");
    a = make();
    a.options.struct_size = (size_t)-1;
    expect(ekv_plan_create(context, "even", &a.batch, &a.device, &a.options, &plan), INVALID, "options",
           "ekv_plan_options.struct_size is");

    /* A newer program: members that this library does not know must be 0. */
    struct {
        ekv_plan_options options;
        int64_t newer;
    } later = { EKV_PLAN_OPTIONS_INIT, 0 };
    a = make();
    later.options.struct_size = sizeof later;
    assert_int_equal(ekv_plan_create(context, "even", &a.batch, &a.device, &later.options, &plan), EKV_OK);
    ekv_plan_free(plan);
    plan = NULL;
    later.newer = 1;
    expect(ekv_plan_create(context, "even", &a.batch, &a.device, &later.options, &plan), UNSUPPORTED, "newer",
           "ekv_plan_options has members newer than evenkv");
    assert_null(plan);
}

static void arguments_are_copied(void **state)
{
    (void)state;
    int32_t own[REQUESTS];
    memcpy(own, lengths, sizeof own);
    arguments a = make();
    a.batch.kv_len = own;
    ekv_plan *plan = create("even", &a);
    memset(own, 0xFF, sizeof own);
    memset(&a, 0xFF, sizeof a);
    assert_int_equal(ekv_plan_check(plan), EKV_OK);
    assert_int_equal(ekv_plan_update(plan, lengths, REQUESTS), EKV_OK);
    assert_int_equal(ekv_plan_check(plan), EKV_OK);
    ekv_plan_free(plan);
}

/* ---- Updates ----------------------------------------------------------------------------------------- */

static void updates_do_not_allocate(void **state)
{
    (void)state;
    static const int32_t other[REQUESTS] = { 0, 9000, 1, 31 };
    arguments a = make();
    for (int32_t p = 0; ekv_planner_name(p); p++) {
        ekv_plan *plan = create(ekv_planner_name(p), &a);
        ekv_plan_info info = EKV_PLAN_INFO_INIT;
        const int64_t calls = allocator.calls;
        for (int32_t count = 1; count <= REQUESTS; count++)
            assert_int_equal(ekv_plan_update(plan, other, count), EKV_OK);
        assert_int_equal(ekv_plan_info_get(plan, &info), EKV_OK);
        assert_int_equal(allocator.calls, calls);
        assert_int_equal(info.total_tokens, 9032);
        ekv_plan_free(plan);
    }
}

/* The plan's block as it is before and after; a plan is one block of the allocator. */
static void expect_update_refused(const char *planner, const arguments *a, const int32_t *kv_len, int32_t count,
                                  ekv_status status, const char *text)
{
    ekv_plan *plan = create(planner, a);
    assert_ptr_equal(plan, allocator.last);
    const size_t size = allocator.last_size;
    void *before = malloc(size);
    assert_non_null(before);
    memcpy(before, (const void *)plan, size);
    expect(ekv_plan_update(plan, kv_len, count), status, planner, text);
    assert_memory_equal(before, (const void *)plan, size);
    free(before);
    ekv_plan_free(plan);
}

static void a_refused_update_leaves_the_plan(void **state)
{
    (void)state;
    static const int32_t negative[REQUESTS] = { 1, -2, 3, 4 }, long_one[REQUESTS] = { 100000, 1, 1, 1 };
    arguments a = make();
    for (int32_t p = 0; ekv_planner_name(p); p++) {
        const char *planner = ekv_planner_name(p);
        expect_update_refused(planner, &a, NULL, REQUESTS, INVALID, "kv_len is NULL");
        expect_update_refused(planner, &a, lengths, 0, INVALID, "batch_size is 0; this plan takes 1..4");
        expect_update_refused(planner, &a, lengths, -1, INVALID, "batch_size is -1");
        expect_update_refused(planner, &a, lengths, REQUESTS + 1, INVALID, "batch_size is 5; this plan takes 1..4");
        expect_update_refused(planner, &a, negative, REQUESTS, INVALID, "kv_len[1] is -2; lengths must be >= 0");
    }
    assert_int_equal(ekv_plan_update(NULL, lengths, REQUESTS), INVALID);
    expect_update_refused("even-invariant", &a, long_one, REQUESTS, EKV_ERROR_CAPACITY, "max_total_tokens");
    a.options.table_width = 8000;
    expect_update_refused("fa3", &a, long_one, REQUESTS, INVALID, "kv_len[0] is 100000; table_width is 8000");
}

static void batch_attention_refuses_what_flashinfer_refuses(void **state)
{
    (void)state;
    enum { MANY = 16385 }; /* 4 heads: 65,540 works */
    int32_t *ones = malloc(MANY * sizeof *ones);
    assert_non_null(ones);
    for (int i = 0; i < MANY; i++)
        ones[i] = 1;
    arguments a = make();
    ekv_plan *plan = NULL;
    a.batch.kv_len = ones;
    a.batch.batch_size = MANY;
    expect(ekv_plan_create(context, "flashinfer-batch-attention", &a.batch, &a.device, NULL, &plan), UNSUPPORTED,
           "works", "65540 works");
    a.batch.batch_size = MANY - 1;
    plan = create("flashinfer-batch-attention", &a);
    assert_int_equal(ekv_plan_check(plan), EKV_OK);
    ekv_plan_free(plan);
    free(ones);
}

/* ---- Inspection -------------------------------------------------------------------------------------- */

static void planners_are_listed_once(void **state)
{
    (void)state;
    int32_t count = 0;
    for (; ekv_planner_name(count); count++) {
        assert_non_null(ekv_planner_summary(ekv_planner_name(count)));
        for (int32_t other = 0; other < count; other++)
            assert_string_not_equal(ekv_planner_name(count), ekv_planner_name(other));
    }
    assert_true(count >= 10);
    assert_null(ekv_planner_name(-1));
    assert_null(ekv_planner_name(INT32_MAX));
    assert_null(ekv_planner_summary("evn"));
    assert_null(ekv_planner_summary(NULL));
}

static void info_describes_the_plan(void **state)
{
    (void)state;
    arguments a = make();
    ekv_plan *plan = create("none", &a);
    ekv_plan_info info = EKV_PLAN_INFO_INIT;
    assert_int_equal(ekv_plan_info_get(plan, &info), EKV_OK);
    assert_string_equal(info.planner, "none");
    assert_int_equal(info.dispatch, EKV_DISPATCH_GRID);
    assert_int_equal(info.num_ctas, 16);
    assert_int_equal(info.num_tiles, 16);
    assert_int_equal(info.num_work_items, 4);
    assert_int_equal(info.batch_size, 4);
    assert_int_equal(info.total_tokens, 5716);
    assert_int_equal(info.max_cta_tokens, 5000);
    assert_int_equal(info.kv_chunk_tokens, -1);
    assert_int_equal(info.num_splits_bound, -1);
    assert_int_equal(info.split_kv, 0);

    ekv_plan_info old = EKV_PLAN_INFO_INIT;
    old.struct_size--;
    old.num_tiles = 77;
    expect(ekv_plan_info_get(plan, &old), INVALID, "info", "ekv_plan_info.struct_size is");
    assert_int_equal(old.num_tiles, 77);
    expect(ekv_plan_info_get(plan, NULL), INVALID, "info", "ekv_plan_info is NULL");

    /* A newer program gets 0 for what this library does not know. */
    struct later_info {
        ekv_plan_info info;
        int64_t newer, beyond;
    } later = { EKV_PLAN_INFO_INIT, 77, 78 };
    later.info.struct_size = offsetof(struct later_info, beyond);
    assert_int_equal(ekv_plan_info_get(plan, &later.info), EKV_OK);
    assert_int_equal(later.info.struct_size, offsetof(struct later_info, beyond));
    assert_int_equal(later.info.total_tokens, 5716);
    assert_true(later.newer == 0 && later.beyond == 78);
    expect(ekv_plan_info_get(NULL, &info), INVALID, "info", "plan is NULL");
    ekv_plan_free(plan);
}

static void tiles_and_ranges_have_bounds(void **state)
{
    (void)state;
    arguments a = make();
    ekv_plan *grid = create("none", &a), *range = create("even", &a);
    ekv_tile tile = { .request = 77 };
    expect(ekv_plan_tile_get(grid, -1, &tile), INVALID, "tile", "tile index is -1; the plan has 16 tiles");
    expect(ekv_plan_tile_get(grid, 16, &tile), INVALID, "tile", "tile index is 16");
    expect(ekv_plan_tile_get(grid, 0, NULL), INVALID, "tile", "tile is NULL");
    expect(ekv_plan_tile_get(NULL, 0, &tile), INVALID, "tile", "plan is NULL");
    assert_int_equal(tile.request, 77);
    assert_int_equal(ekv_plan_tile_get(grid, 2, &tile), EKV_OK);
    assert_int_equal(tile.request, 2);
    assert_int_equal(tile.kv_end, 700);

    int64_t begin = 77, end = 78, next = 0;
    expect(ekv_plan_cta_range(grid, 0, &begin, &end), INVALID, "range", "planner none does not dispatch by range");
    expect(ekv_plan_cta_range(range, -1, &begin, &end), INVALID, "range", "cta is -1; the plan has 264");
    expect(ekv_plan_cta_range(range, 264, &begin, &end), INVALID, "range", "cta is 264");
    expect(ekv_plan_cta_range(range, 0, NULL, &end), INVALID, "range", "begin is NULL");
    expect(ekv_plan_cta_range(range, 0, &begin, NULL), INVALID, "range", "end is NULL");
    expect(ekv_plan_cta_range(NULL, 0, &begin, &end), INVALID, "range", "plan is NULL");
    assert_true(begin == 77 && end == 78);
    for (int64_t cta = 0; cta < 264; cta++, next = end) {
        assert_int_equal(ekv_plan_cta_range(range, cta, &begin, &end), EKV_OK);
        assert_int_equal(begin, next);
    }
    ekv_plan_info info = EKV_PLAN_INFO_INIT;
    assert_int_equal(ekv_plan_info_get(range, &info), EKV_OK);
    assert_int_equal(end, info.num_tiles);
    ekv_plan_free(grid);
    ekv_plan_free(range);
}

static int set_up(void **state)
{
    (void)state;
    ekv_context_options options = counting_options(&allocator);
    return ekv_context_create(&options, &context);
}

static int tear_down(void **state)
{
    (void)state;
    ekv_context_free(context);
    return allocator.live != 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(creation_refuses_bad_arguments),
        cmocka_unit_test(creation_refuses_null),
        cmocka_unit_test(lengths_are_checked),
        cmocka_unit_test(records_that_pass_31_bits_are_refused),
        cmocka_unit_test(struct_sizes_are_checked),
        cmocka_unit_test(arguments_are_copied),
        cmocka_unit_test(updates_do_not_allocate),
        cmocka_unit_test(a_refused_update_leaves_the_plan),
        cmocka_unit_test(batch_attention_refuses_what_flashinfer_refuses),
        cmocka_unit_test(planners_are_listed_once),
        cmocka_unit_test(info_describes_the_plan),
        cmocka_unit_test(tiles_and_ranges_have_bounds),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
