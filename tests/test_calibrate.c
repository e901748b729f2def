/* SPDX-License-Identifier: Apache-2.0
 * Fitting finds the constants that made the times. */
#include "one_context.h"
#include "sim/calibrate.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(constants_are_found_again),
        cmocka_unit_test(rows_are_checked),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
