/* SPDX-License-Identifier: Apache-2.0
 * What tests of the simulator share: toy devices and batches. */
#ifndef EVENKV_TESTS_SIM_TESTS_H
#define EVENKV_TESTS_SIM_TESTS_H

#include "one_context.h"
#include "plan/plan.h"
#include "sim/timeline.h"

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* cmocka compares in single precision. */
#define assert_near(value, expected, tolerance)                                 \
    do {                                                                        \
        const double value_ = (value), expected_ = (expected);                  \
        if (!(fabs(value_ - expected_) <= (tolerance)))                         \
            fail_msg("%s is %.12g, expected %.12g", #value, value_, expected_); \
    } while (0)

/* One head of 64 bf16: 256 bytes of K and V a token, 128 of Q, 128 of O, 4 a page of 16 tokens. */
static const double token_bytes = 256, q_bytes = 128, o_bytes = 128, page_bytes = 4, partial_bytes = 65 * 4;

static inline double tile_bytes(int32_t tokens)
{
    return tokens * token_bytes + (tokens ? q_bytes : 0) + o_bytes + (tokens + 15) / 16 * page_bytes;
}

/* A GPU whose CTAs and SMs are not limited but by what a test sets.  1 GB/s is 1,000 bytes a microsecond. */
static inline ekv_device make_device(int32_t num_sms)
{
    ekv_device device = EKV_DEVICE_INIT;
    strcpy(device.name, "test");
    device.num_sms = num_sms;
    device.sm_arch = 90;
    device.ctas_per_sm = 1;
    device.projected = 0;
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++)
        device.systems[s] = (ekv_system_model){ 1, 1e6, 1e6, 0, 0, 0 };
    return device;
}

static inline ekv_batch make_batch(const int32_t *kv_len, int32_t batch_size)
{
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = batch_size;
    batch.kv_len = kv_len;
    batch.q_heads = batch.kv_heads = 1;
    batch.head_dim = 64;
    return batch;
}

/* Plans and simulates with events; the caller frees both. */
static inline ekv_timeline_info simulate(const char *planner, const ekv_batch *batch, const ekv_device *device,
                                         const ekv_plan_options *plan_options, ekv_plan **plan, ekv_timeline **timeline)
{
    ekv_sim_options options = EKV_SIM_OPTIONS_INIT;
    ekv_timeline_info info = EKV_TIMELINE_INFO_INIT;
    options.events = 1;
    if (ekv_plan_create(context, planner, batch, device, plan_options, plan) ||
        ekv_simulate(*plan, NULL, &options, timeline) || ekv_timeline_info_get(*timeline, &info))
        fail_msg("%s: %s", planner, ekv_last_error());
    return info;
}

/* Without events, freeing all. */
static inline ekv_timeline_info simulate_only(const char *planner, const ekv_batch *batch, const ekv_device *device,
                                              const ekv_plan_options *plan_options)
{
    ekv_plan *plan;
    ekv_timeline *timeline;
    ekv_timeline_info info = simulate(planner, batch, device, plan_options, &plan, &timeline);
    ekv_timeline_free(timeline);
    ekv_plan_free(plan);
    return info;
}

/* none keeps 1 CTA an SM. */
static inline ekv_plan_options one_resident(void)
{
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.resident_ctas = 1;
    return options;
}

#endif
