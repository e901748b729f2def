/* SPDX-License-Identifier: Apache-2.0
 * How long planning and simulating one batch takes on this machine's CPU, for every planner.
 *
 *     sim_time [BATCH...]      default: batches of 128 and 2500
 *
 * Prints `planner,batch,tiles,median_us,min_us`: ekv_plan_update and a simulation in memory that is kept, as `evenkv
 * replay` does it for each step.  An H200, 32/4 heads of 128, bf16, pages of 16; lengths exponential around 1,000
 * tokens, seed 1. */
#include "base/number.h"
#include "plan/plan.h"
#include "sim/timeline.h"
#include "timing.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 51 };

static ekv_status time_planner(ekv_context *context, const char *planner, const ekv_batch *batch,
                               const ekv_device *device)
{
    double us[ROUNDS];
    ekv_plan *plan;
    ekv_timeline timeline = { .context = context };
    ekv_status status = ekv_plan_create(context, planner, batch, device, NULL, &plan);
    if (status)
        return status;
    for (int32_t round = 0; round < ROUNDS && !status; round++) {
        const double begin = now_us();
        if (!(status = ekv_plan_update(plan, batch->kv_len, batch->batch_size)))
            status = ekv_timeline_run(&timeline, plan, device, -1, false);
        us[round] = now_us() - begin;
    }
    if (!status) {
        qsort(us, ROUNDS, sizeof us[0], compare_doubles);
        printf("%s,%d,%" PRId64 ",%.1f,%.1f\n", planner, batch->batch_size, plan->num_tiles, us[ROUNDS / 2], us[0]);
    }
    ekv_timeline_clear(&timeline);
    ekv_plan_free(plan);
    return status;
}

static int time_batch(ekv_context *context, const ekv_device *device, int32_t batch_size)
{
    int32_t *kv_len = malloc((size_t)batch_size * sizeof *kv_len);
    if (!kv_len) {
        fprintf(stderr, "sim_time: no memory for %d lengths\n", batch_size);
        return 1;
    }
    fill_lengths(kv_len, batch_size);
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = batch_size;
    batch.kv_len = kv_len;
    batch.q_heads = 32;
    batch.kv_heads = 4;
    batch.head_dim = 128;
    for (int32_t p = 0; ekv_planner_name(p); p++)
        if (time_planner(context, ekv_planner_name(p), &batch, device))
            fprintf(stderr, "sim_time: %s, batch %d: %s\n", ekv_planner_name(p), batch_size, ekv_last_error());
    free(kv_len);
    return 0;
}

int main(int argc, char **argv)
{
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.num_threads = 1;
    options.cuda_device = -2;
    ekv_context *context;
    ekv_device device = EKV_DEVICE_INIT;
    if (ekv_context_create(&options, &context) || ekv_device_find("h200", &device)) {
        fprintf(stderr, "sim_time: %s\n", ekv_last_error());
        return 2;
    }
    printf("planner,batch,tiles,median_us,min_us\n");
    int failed = argc > 1 ? 0 : time_batch(context, &device, 128) | time_batch(context, &device, 2500);
    for (int i = 1; i < argc && !failed; i++) {
        int32_t batch_size;
        if (ekv_parse_int32(argv[i], strlen(argv[i]), "BATCH", 1, 1 << 20, &batch_size)) {
            fprintf(stderr, "sim_time: %s\n", ekv_last_error());
            failed = 2;
        } else {
            failed = time_batch(context, &device, batch_size);
        }
    }
    ekv_context_free(context);
    return failed;
}
