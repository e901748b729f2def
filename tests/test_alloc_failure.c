/* SPDX-License-Identifier: Apache-2.0
 * Every function that allocates, with an allocator that fails at the first call, then at the second, and so on until
 * the function succeeds: each failure is OUT_OF_MEMORY, leaves the output alone and leaks nothing. */
#include "counting_allocator.h"
#include "sim/calibrate.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { MOST_ALLOCATIONS = 100 };

static const int32_t kv_len[] = { 70000, 17, 0, 300, 4096, 1 };

static ekv_batch make_batch(void)
{
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = sizeof kv_len / sizeof kv_len[0];
    batch.kv_len = kv_len;
    batch.q_heads = 32;
    batch.kv_heads = 4;
    batch.head_dim = 128;
    return batch;
}

static void expect_out_of_memory(const char *what, ekv_status status, int64_t live, int64_t live_before)
{
    if (status != EKV_ERROR_OUT_OF_MEMORY)
        fail_msg("%s: %s (%s)", what, ekv_status_name(status), ekv_last_error());
    if (live != live_before)
        fail_msg("%s: %d blocks leak", what, (int)(live - live_before));
    assert_non_null(strstr(ekv_last_error(), "no memory"));
}

static void context_create(void **state)
{
    (void)state;
    counting_allocator a;
    ekv_context_options options = counting_options(&a);
    options.num_threads = 4;
    ekv_context *context = NULL;
    ekv_status status = EKV_ERROR_OUT_OF_MEMORY;
    int64_t failures = 0;
    for (; failures < MOST_ALLOCATIONS; failures++) {
        a.calls = 0;
        a.fail_at = failures;
        status = ekv_context_create(&options, &context);
        if (!status)
            break;
        expect_out_of_memory("ekv_context_create", status, a.live, 0);
        assert_null(context);
    }
    assert_int_equal(status, EKV_OK);
    assert_true(failures >= 1);
    assert_int_equal(a.calls, failures);
    ekv_context_free(context);
    assert_int_equal(a.live, 0);
}

static void plan_create_and_check(void **state)
{
    (void)state;
    counting_allocator a;
    ekv_context_options context_options = counting_options(&a);
    ekv_context *context;
    assert_int_equal(ekv_context_create(&context_options, &context), EKV_OK);
    const int64_t live = a.live;
    ekv_device device = EKV_DEVICE_INIT;
    assert_int_equal(ekv_device_find("h200", &device), EKV_OK);
    const ekv_batch batch = make_batch();

    for (int32_t p = 0; ekv_planner_name(p); p++) {
        ekv_plan *plan = NULL;
        ekv_status status = EKV_ERROR_OUT_OF_MEMORY;
        int64_t failures = 0;
        for (; status && failures < MOST_ALLOCATIONS; failures++) {
            a.calls = 0;
            a.fail_at = failures;
            status = ekv_plan_create(context, ekv_planner_name(p), &batch, &device, NULL, &plan);
            if (status) {
                expect_out_of_memory(ekv_planner_name(p), status, a.live, live);
                assert_null(plan);
            }
        }
        assert_int_equal(status, EKV_OK);
        assert_true(failures >= 2);

        const int64_t live_with_plan = a.live;
        for (failures = 0, status = EKV_ERROR_OUT_OF_MEMORY; status && failures < MOST_ALLOCATIONS; failures++) {
            a.calls = 0;
            a.fail_at = failures;
            status = ekv_plan_check(plan);
            if (status)
                expect_out_of_memory("ekv_plan_check", status, a.live, live_with_plan);
        }
        assert_int_equal(status, EKV_OK);
        assert_true(failures >= 2);
        assert_int_equal(a.live, live_with_plan);
        a.fail_at = -1;
        ekv_plan_free(plan);
        assert_int_equal(a.live, live);
    }
    ekv_context_free(context);
    assert_int_equal(a.live, 0);
}

static void simulate(void **state)
{
    (void)state;
    counting_allocator a;
    ekv_context_options context_options = counting_options(&a);
    ekv_context *context;
    assert_int_equal(ekv_context_create(&context_options, &context), EKV_OK);
    ekv_device device = EKV_DEVICE_INIT;
    assert_int_equal(ekv_device_find("h200", &device), EKV_OK);
    const ekv_batch batch = make_batch();
    ekv_plan *plan;
    assert_int_equal(ekv_plan_create(context, "fa3", &batch, &device, NULL, &plan), EKV_OK);
    const int64_t live = a.live;
    ekv_timeline *timeline = NULL;
    ekv_status status = EKV_ERROR_OUT_OF_MEMORY;
    int64_t failures = 0;
    for (; status && failures < MOST_ALLOCATIONS; failures++) {
        a.calls = 0;
        a.fail_at = failures;
        status = ekv_simulate(plan, NULL, NULL, &timeline);
        if (status) {
            expect_out_of_memory("ekv_simulate", status, a.live, live);
            assert_null(timeline);
        }
    }
    assert_int_equal(status, EKV_OK);
    assert_true(failures >= 2);
    a.fail_at = -1;
    ekv_timeline_free(timeline);
    assert_int_equal(a.live, live);

    /* Fitting too. */
    enum { ROWS = 6 };
    ekv_sim_row rows[ROWS];
    for (int i = 0; i < ROWS; i++)
        rows[i] = (ekv_sim_row){ plan, 100.0 + i };
    for (failures = 0, status = EKV_ERROR_OUT_OF_MEMORY; status && failures < MOST_ALLOCATIONS; failures++) {
        ekv_device fitted = device;
        a.calls = 0;
        a.fail_at = failures;
        status = ekv_sim_calibrate(context, rows, ROWS, EKV_SYSTEM_FA3, &fitted);
        if (status) {
            expect_out_of_memory("ekv_sim_calibrate", status, a.live, live);
            assert_memory_equal(&fitted, &device, sizeof device);
        }
    }
    assert_int_equal(status, EKV_OK);
    assert_true(failures >= 2);
    a.fail_at = -1;
    ekv_plan_free(plan);
    ekv_context_free(context);
    assert_int_equal(a.live, 0);
}

static void free_takes_null(void **state)
{
    (void)state;
    ekv_plan_free(NULL);
    ekv_timeline_free(NULL);
    ekv_context_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(context_create),
        cmocka_unit_test(plan_create_and_check),
        cmocka_unit_test(simulate),
        cmocka_unit_test(free_takes_null),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
