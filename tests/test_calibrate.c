/* SPDX-License-Identifier: Apache-2.0
 * Fitting finds the constants that made the times. */
#include "one_context.h"
#include "sim/calibrate.h"
#include "sim/even_cost.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ROWS = 36, LARGEST = 300 };

typedef struct table {
    int32_t kv_len[ROWS][LARGEST];
    ekv_sim_row rows[ROWS];
    ekv_device device; /* that makes the times */
} table;

/* Batches of many sizes and skews; their times by the device's constants. */
static void make_table(table *t, const char *planner, ekv_system system)
{
    ekv_timeline timeline = { .context = context };
    for (int32_t i = 0; i < ROWS; i++) {
        const int32_t batch_size = (int32_t[]){ 3, 20, 70, LARGEST }[i % 4];
        const int32_t tokens = (int32_t[]){ 8192, 131072, 524288 }[i / 4 % 3];
        const int32_t percent = (int32_t[]){ 0, 40, 80 }[i / 12];
        t->kv_len[i][0] = percent ? tokens / 100 * percent : tokens / batch_size;
        for (int32_t b = 1; b < batch_size; b++)
            t->kv_len[i][b] = (tokens - t->kv_len[i][0]) / (batch_size - 1);
        ekv_batch batch = EKV_BATCH_INIT;
        batch.batch_size = batch_size;
        batch.kv_len = t->kv_len[i];
        batch.q_heads = 32;
        batch.kv_heads = 4;
        batch.head_dim = 128;
        ekv_plan *plan;
        assert_int_equal(ekv_plan_create(context, planner, &batch, &t->device, NULL, &plan), EKV_OK);
        assert_int_equal(ekv_timeline_run(&timeline, plan, &t->device, (int32_t)system, false), EKV_OK);
        t->rows[i] = (ekv_sim_row){ plan, timeline.info.time_us };
    }
    ekv_timeline_clear(&timeline);
}

static void free_table(table *t)
{
    for (int32_t i = 0; i < ROWS; i++)
        ekv_plan_free((ekv_plan *)t->rows[i].plan);
}

static void constants_are_found_again(void **state)
{
    (void)state;
    static table t;
    const ekv_system_model true_model = { 36, 100, 3700, 2.5, 9, 6 };
    t.device = (ekv_device)EKV_DEVICE_INIT;
    assert_int_equal(ekv_device_find("h200", &t.device), EKV_OK);
    t.device.systems[EKV_SYSTEM_FLASHINFER_TENSOR_CORE] = true_model;
    make_table(&t, "flashinfer-tensor-core", EKV_SYSTEM_FLASHINFER_TENSOR_CORE);
    ekv_device fitted = t.device;
    memset(&fitted.systems[EKV_SYSTEM_FLASHINFER_TENSOR_CORE], 0, sizeof fitted.systems[0]);
    assert_int_equal(ekv_sim_calibrate(context, t.rows, ROWS, EKV_SYSTEM_FLASHINFER_TENSOR_CORE, &fitted), EKV_OK);
    const ekv_system_model *m = &fitted.systems[EKV_SYSTEM_FLASHINFER_TENSOR_CORE];
    assert_true(fabs(m->cta_gb_per_s / true_model.cta_gb_per_s - 1) < 0.01);
    assert_true(fabs(m->total_gb_per_s / true_model.total_gb_per_s - 1) < 0.01);
    assert_true(fabs(m->launch_us + m->tile_us - true_model.launch_us - true_model.tile_us) < 0.5);
    ekv_timeline timeline = { .context = context };
    for (int32_t i = 0; i < ROWS; i++) {
        assert_int_equal(ekv_timeline_run(&timeline, t.rows[i].plan, &fitted, -1, false), EKV_OK);
        assert_true(fabs(timeline.info.time_us / t.rows[i].measured_us - 1) < 0.02);
    }
    ekv_timeline_clear(&timeline);
    /* Other systems are as they were, and a second fit gives the same bytes. */
    assert_memory_equal(&fitted.systems[EKV_SYSTEM_FA3], &t.device.systems[EKV_SYSTEM_FA3], sizeof fitted.systems[0]);
    ekv_device again = t.device;
    assert_int_equal(ekv_sim_calibrate(context, t.rows, ROWS, EKV_SYSTEM_FLASHINFER_TENSOR_CORE, &again), EKV_OK);
    assert_memory_equal(&again.systems, &fitted.systems, sizeof again.systems);
    free_table(&t);
}

static void rows_are_checked(void **state)
{
    (void)state;
    static table t;
    t.device = (ekv_device)EKV_DEVICE_INIT;
    assert_int_equal(ekv_device_find("h200", &t.device), EKV_OK);
    make_table(&t, "fa3", EKV_SYSTEM_FA3);
    const ekv_device before = t.device;
    assert_int_equal(ekv_sim_calibrate(context, t.rows, 5, EKV_SYSTEM_FA3, &t.device), EKV_ERROR_INVALID_ARGUMENT);
    static const double nonsense[] = { 0, -1, NAN, INFINITY };
    for (int i = 0; i < 4; i++) {
        const double good = t.rows[3].measured_us;
        t.rows[3].measured_us = nonsense[i];
        assert_int_equal(ekv_sim_calibrate(context, t.rows, ROWS, EKV_SYSTEM_FA3, &t.device),
                         EKV_ERROR_INVALID_ARGUMENT);
        t.rows[3].measured_us = good;
    }
    assert_memory_equal(&t.device, &before, sizeof before);
    free_table(&t);
}

/* ---- What a decode by even costs --------------------------------------------------------------------- */

enum { EVEN_TIMES = 12 };

/* noise: largest relative error, of alternating sign. */
static void make_even_times(ekv_even_cost cost, double noise, ekv_even_time times[EVEN_TIMES])
{
    for (int32_t i = 0; i < EVEN_TIMES; i++) {
        times[i].tokens = INT64_C(262144) << i / 4;
        times[i].requests = 512 << i % 4;
        times[i].us =
            cost.launch_us + cost.token_us * (double)times[i].tokens + cost.request_us * (double)times[i].requests;
        times[i].us *= 1 + noise * (i % 2 ? 1 : -1) * (i % 3 + 1) / 3;
    }
}

static void even_costs_are_found_again(void **state)
{
    (void)state;
    /* About what an H200 shows; no cost of a request at all; and a launch that costs less than nothing. */
    static const ekv_even_cost costs[] = { { 11, 4.9e-4, 7e-3, 0 }, { 20, 5e-4, 0, 0 }, { -3, 1e-3, 1e-2, 0 } };
    for (int i = 0; i < 3; i++) {
        ekv_even_time times[EVEN_TIMES];
        ekv_even_cost found;
        make_even_times(costs[i], 0, times);
        assert_int_equal(ekv_even_cost_fit(times, EVEN_TIMES, &found), EKV_OK);
        assert_true(fabs(found.launch_us - costs[i].launch_us) < 1e-6);
        assert_true(fabs(found.token_us - costs[i].token_us) < 1e-12);
        assert_true(fabs(found.request_us - costs[i].request_us) < 1e-9);
        assert_true(found.worst < 1e-9);
        make_even_times(costs[i], 0.01, times);
        assert_int_equal(ekv_even_cost_fit(times, EVEN_TIMES, &found), EKV_OK);
        assert_true(fabs(found.launch_us - costs[i].launch_us) < 4);
        assert_true(fabs(found.token_us / costs[i].token_us - 1) < 0.02);
        assert_true(fabs(found.request_us - costs[i].request_us) < 1e-3);
        assert_true(found.worst > 0.002 && found.worst < 0.02);
    }
}

static void even_times_are_checked(void **state)
{
    (void)state;
    const ekv_even_cost cost = { 11, 4.9e-4, 7e-3, 0 }, before = { 1, 2, 3, 4 };
    ekv_even_time times[EVEN_TIMES], alike[EVEN_TIMES];
    ekv_even_cost found = before;
    make_even_times(cost, 0.01, times);
    assert_int_equal(ekv_even_cost_fit(times, 0, &found), EKV_ERROR_INVALID_ARGUMENT);
    assert_int_equal(ekv_even_cost_fit(times, 2, &found), EKV_ERROR_INVALID_ARGUMENT);
    assert_int_equal(ekv_even_cost_fit(times, 4, &found), EKV_ERROR_INVALID_ARGUMENT); /* all of one number of tokens */
    for (int32_t i = 0; i < EVEN_TIMES; i++) {
        alike[i] = times[i];
        alike[i].requests = 64;
    }
    assert_int_equal(ekv_even_cost_fit(alike, EVEN_TIMES, &found), EKV_ERROR_INVALID_ARGUMENT);
    static const double nonsense[] = { 0, -1, NAN, INFINITY };
    for (int i = 0; i < 4; i++) {
        times[7].us = nonsense[i];
        assert_int_equal(ekv_even_cost_fit(times, EVEN_TIMES, &found), EKV_ERROR_INVALID_ARGUMENT);
    }
    assert_memory_equal(&found, &before, sizeof before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(constants_are_found_again),
        cmocka_unit_test(rows_are_checked),
        cmocka_unit_test(even_costs_are_found_again),
        cmocka_unit_test(even_times_are_checked),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
