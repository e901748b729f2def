/* SPDX-License-Identifier: Apache-2.0
 * Simulates plans of any lengths by any constants: it ends, and the books balance. */
#include "fuzz.h"

#include "evenkv/evenkv.h"

#include <math.h>
#include <string.h>

enum { MAX_BATCH = 64 };

typedef struct input {
    const uint8_t *data;
    size_t size;
} input;

/* The next byte, 0 past the end. */
static uint32_t take(input *in)
{
    if (!in->size)
        return 0;
    in->size--;
    return *in->data++;
}

static double take_real(input *in)
{
    const uint32_t mantissa = take(in), exponent = take(in) % 16;
    return (mantissa + 1) * pow(10, (double)exponent - 10);
}

static void check(ekv_plan *plan, const ekv_device *device)
{
    ekv_timeline *timeline = NULL;
    ekv_sim_options options = EKV_SIM_OPTIONS_INIT;
    options.events = 1;
    ekv_status status = ekv_simulate(plan, device, &options, &timeline);
    if (status) {
        FUZZ_CHECK(status == EKV_ERROR_UNSUPPORTED || status == EKV_ERROR_INVALID_ARGUMENT);
        FUZZ_CHECK(!timeline);
        return;
    }
    ekv_timeline_info info = EKV_TIMELINE_INFO_INIT;
    FUZZ_CHECK(!ekv_timeline_info_get(timeline, &info));
    FUZZ_CHECK(isfinite(info.time_us) && info.time_us >= info.launch_us);
    FUZZ_CHECK(info.sm_busy_share >= 0 && info.sm_busy_share <= 1 + 1e-9);
    FUZZ_CHECK(info.tail_us >= 0 && info.tail_us <= info.time_us);
    FUZZ_CHECK(info.num_events == info.num_tiles);
    for (int64_t i = 0; i < info.num_events; i++) {
        ekv_timeline_event event;
        FUZZ_CHECK(!ekv_timeline_event_get(timeline, i, &event));
        FUZZ_CHECK(event.sm >= 0 && event.sm < info.num_sms && event.slot >= 0 && event.slot < info.slots_per_sm);
        FUZZ_CHECK(event.start_us <= event.stop_us && event.stop_us <= info.time_us * (1 + 1e-9));
    }
    ekv_timeline_free(timeline);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static ekv_context *context;
    if (!context) {
        ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
        options.num_threads = 1;
        options.cuda_device = -2;
        FUZZ_CHECK(!ekv_context_create(&options, &context));
    }
    input in = { data, size };
    ekv_device device = EKV_DEVICE_INIT;
    memcpy(device.name, "fuzz", 5);
    device.num_sms = 1 + (int32_t)take(&in);
    device.sm_arch = 90;
    device.ctas_per_sm = 1 + (int32_t)(take(&in) % 4);
    device.bf16_tflops = take(&in);
    for (int s = 0; s < EKV_NUM_SYSTEMS; s++)
        device.systems[s] = (ekv_system_model){ take_real(&in), take_real(&in), take_real(&in),
                                                take_real(&in), take_real(&in), take_real(&in) };
    const char *planner = NULL;
    for (uint32_t p = take(&in) % 10; !planner; p = 0)
        planner = ekv_planner_name((int32_t)p);
    ekv_batch batch = EKV_BATCH_INIT;
    int32_t kv_len[MAX_BATCH];
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.cuda_graph = (int32_t)(take(&in) % 2);
    options.resident_ctas = (int32_t)(take(&in) % 10);
    options.dispatch = (ekv_dispatch)(take(&in) % 4);
    batch.kv_heads = 1 + (int32_t)(take(&in) % 4);
    batch.q_heads = batch.kv_heads * (1 + (int32_t)(take(&in) % 8));
    batch.head_dim = 64;
    batch.batch_size = 1 + (int32_t)(take(&in) % MAX_BATCH);
    batch.kv_len = kv_len;
    for (int32_t b = 0; b < batch.batch_size; b++) {
        const uint32_t low = take(&in), high = take(&in);
        kv_len[b] = (int32_t)(low | high << 8);
    }
    ekv_plan *plan;
    if (ekv_plan_create(context, planner, &batch, &device, &options, &plan))
        return 0;
    check(plan, NULL);
    device.num_sms = 1 + device.num_sms / 2; /* another device than it was made for */
    check(plan, &device);
    ekv_plan_free(plan);
    return 0;
}
