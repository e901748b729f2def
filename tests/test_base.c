/* SPDX-License-Identifier: Apache-2.0 */
#include "base/context.h"
#include "base/half.h"
#include "base/pool.h"
#include "base/status.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void every_half_survives_a_round_trip(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        float f16 = ekv_f16_to_f32((uint16_t)bits), bf16 = ekv_bf16_to_f32((uint16_t)bits);
        if (isnan(f16))
            assert_true(isnan(ekv_f16_to_f32(ekv_f32_to_f16(f16))));
        else
            assert_int_equal(ekv_f32_to_f16(f16), bits);
        if (isnan(bf16))
            assert_true(isnan(ekv_bf16_to_f32(ekv_f32_to_bf16(bf16))));
        else
            assert_int_equal(ekv_f32_to_bf16(bf16), bits);
    }
}

/* Halfway cases and their neighbours, between all pairs of finite fp16 neighbours. */
static void f16_rounds_to_nearest_even(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x7BFF; bits++) {
        float low = ekv_f16_to_f32((uint16_t)bits), high = ekv_f16_to_f32((uint16_t)(bits + 1));
        float middle = low + (high - low) / 2;
        assert_int_equal(ekv_f32_to_f16(middle), bits + (bits & 1));
        assert_int_equal(ekv_f32_to_f16(nextafterf(middle, 0)), bits);
        assert_int_equal(ekv_f32_to_f16(nextafterf(middle, 1e9f)), bits + 1);
    }
    assert_int_equal(ekv_f32_to_f16(65519.996f), 0x7BFF);
    assert_int_equal(ekv_f32_to_f16(65520.0f), 0x7C00);
    assert_int_equal(ekv_f32_to_f16(-INFINITY), 0xFC00);
}

static void statuses_have_names_and_texts(void **state)
{
    (void)state;
    assert_string_equal(ekv_status_name(EKV_OK), "EKV_OK");
    assert_string_equal(ekv_status_name(EKV_ERROR_BUSY), "EKV_ERROR_BUSY");
    assert_string_equal(ekv_status_name((ekv_status)-999), "EKV_ERROR_UNKNOWN");
    assert_int_equal(ekv_fail(EKV_ERROR_IO, "value %d", 7), EKV_ERROR_IO);
    assert_string_equal(ekv_last_error(), "value 7");
    ekv_fail(EKV_ERROR_IO, "again: %s", ekv_last_error());
    assert_string_equal(ekv_last_error(), "again: value 7");
}

/* A result of three members to callers that know two, three and four of them. */
static void results_go_to_structs_of_any_version(void **state)
{
    (void)state;
    const size_t result[] = { 3 * sizeof(size_t), 5, 6 }, word = sizeof(size_t);
    size_t older[] = { 2 * word, 71, 72 }, same[] = { 3 * word, 71, 72, 73 }, newer[] = { 4 * word, 71, 72, 73, 74 };
    assert_int_equal(ekv_struct_write(older, result, sizeof result, 2 * word, "s"), EKV_OK);
    assert_memory_equal(older, ((size_t[]){ 2 * word, 5, 72 }), sizeof older);
    assert_int_equal(ekv_struct_write(same, result, sizeof result, 2 * word, "s"), EKV_OK);
    assert_memory_equal(same, ((size_t[]){ 3 * word, 5, 6, 73 }), sizeof same);
    assert_int_equal(ekv_struct_write(newer, result, sizeof result, 2 * word, "s"), EKV_OK);
    assert_memory_equal(newer, ((size_t[]){ 4 * word, 5, 6, 0, 74 }), sizeof newer);

    size_t refused[] = { 2 * word - 1, 71, 72 }; /* the smallest allowed is 2 words */
    assert_int_equal(ekv_struct_write(refused, result, sizeof result, 2 * word, "s"), EKV_ERROR_INVALID_ARGUMENT);
    refused[0] = SIZE_MAX;
    assert_int_equal(ekv_struct_write(refused, result, sizeof result, 2 * word, "s"), EKV_ERROR_INVALID_ARGUMENT);
    assert_true(refused[1] == 71 && refused[2] == 72);
    assert_int_equal(ekv_struct_write(NULL, result, sizeof result, 2 * word, "s"), EKV_ERROR_INVALID_ARGUMENT);
    assert_string_equal(ekv_last_error(), "s is NULL");
}

static void contexts_refuse_bad_options(void **state)
{
    (void)state;
    ekv_context *context = NULL;
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.num_threads = -3;
    assert_int_equal(ekv_context_create(&options, &context), EKV_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(ekv_last_error(), "-3"));
    options = (ekv_context_options)EKV_CONTEXT_OPTIONS_INIT;
    options.struct_size = 1;
    assert_int_equal(ekv_context_create(&options, &context), EKV_ERROR_INVALID_ARGUMENT);
    setenv("EKV_NUM_THREADS", "many", 1);
    assert_int_equal(ekv_context_create(NULL, &context), EKV_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(ekv_last_error(), "many"));
    unsetenv("EKV_NUM_THREADS");
    assert_null(context);
}

static void add_one(void *argument, int32_t thread)
{
    atomic_int *counts = argument;
    atomic_fetch_add(&counts[thread], 1);
}

static void pool_runs_each_thread_once(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 16; threads++) {
        ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
        options.num_threads = threads;
        ekv_context *context;
        assert_int_equal(ekv_context_create(&options, &context), EKV_OK);
        ekv_pool *pool;
        assert_int_equal(ekv_pool_create(context, threads, &pool), EKV_OK);
        atomic_int counts[16] = { 0 };
        for (int run = 0; run < 200; run++)
            ekv_pool_run(pool, add_one, counts);
        for (int32_t i = 0; i < 16; i++)
            assert_int_equal(counts[i], i < threads ? 200 : 0);
        ekv_pool_free(pool);
        ekv_context_free(context);
    }
}

/* Work of a shared run: units from a counter, as a decode takes them. */
typedef struct shared_work {
    atomic_int next, done, inside;
    int units;
} shared_work;

static void take_units(void *argument, int32_t thread)
{
    (void)thread;
    shared_work *work = argument;
    atomic_fetch_add(&work->inside, 1);
    while (atomic_fetch_add(&work->next, 1) < work->units)
        atomic_fetch_add(&work->done, 1);
    atomic_fetch_sub(&work->inside, 1);
}

/* When a shared run returns all units are done and no thread is left in it, however few units there are; the memory of
 * the work is gone then.  Runs of all threads in between are still once on each. */
static void pool_shares_work(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 16; threads += 3) {
        ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
        options.num_threads = threads;
        ekv_context *context;
        assert_int_equal(ekv_context_create(&options, &context), EKV_OK);
        atomic_int counts[16] = { 0 };
        for (int run = 0; run < 500; run++) {
            shared_work work = { .units = run % 40 };
            ekv_pool_share(context->pool, take_units, &work, run % 3 > 0);
            assert_int_equal(work.done, work.units);
            assert_int_equal(work.inside, 0);
            if (run % 5 == 0)
                ekv_pool_run(context->pool, add_one, counts);
            memset(&work, 0xFF, sizeof work); /* a thread that came too late would find nonsense */
        }
        for (int32_t i = 0; i < 16; i++)
            assert_int_equal(counts[i], i < threads ? 100 : 0);
        ekv_context_free(context);
    }
}

static void *share_often(void *argument)
{
    ekv_pool *pool = argument;
    for (int run = 0; run < 300; run++) {
        shared_work work = { .units = 7 };
        ekv_pool_share(pool, take_units, &work, run % 2 > 0);
        if (work.done != 7 || work.inside)
            return pool;
    }
    return NULL;
}

static void callers_of_one_pool_take_turns(void **state)
{
    (void)state;
    enum { CALLERS = 4 };
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.num_threads = 3;
    ekv_context *context;
    pthread_t callers[CALLERS];
    assert_int_equal(ekv_context_create(&options, &context), EKV_OK);
    for (int i = 0; i < CALLERS; i++)
        assert_int_equal(pthread_create(&callers[i], NULL, share_often, context->pool), 0);
    for (int i = 0; i < CALLERS; i++) {
        void *failed;
        assert_int_equal(pthread_join(callers[i], &failed), 0);
        assert_null(failed);
    }
    ekv_context_free(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_half_survives_a_round_trip),
        cmocka_unit_test(f16_rounds_to_nearest_even),
        cmocka_unit_test(statuses_have_names_and_texts),
        cmocka_unit_test(contexts_refuse_bad_options),
        cmocka_unit_test(results_go_to_structs_of_any_version),
        cmocka_unit_test(pool_runs_each_thread_once),
        cmocka_unit_test(pool_shares_work),
        cmocka_unit_test(callers_of_one_pool_take_turns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
