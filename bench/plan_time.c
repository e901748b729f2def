/* SPDX-License-Identifier: Apache-2.0
 * How long ekv_plan_update takes on this machine's CPU, for every planner.
 *
 *     plan_time [KV_HEADS [BATCH...]]      default: 4 KV heads, batches of 128, 1024, 8192 and 65536
 *
 * Prints `planner,batch,median_us,min_us`.  An H200, 8 query heads a KV head, head_dim 128, bf16, pages of 16; lengths
 * exponential around 1,000 tokens, seed 1, each request one token longer at each update, as decode grows them.  Each
 * figure is of ROUNDS updates; the planners of a batch take turns, so that a disturbance falls on all. */
#include "base/number.h"
#include "evenkv/evenkv.h"
#include "timing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 101, MAX_PLANNERS = 32, GROUP = 8 };

/* Plans the batch with every planner; one that refuses it has NULL and a line on stderr. */
static void create_plans(ekv_context *context, const ekv_batch *batch, const ekv_device *device, ekv_plan **plans)
{
    for (int32_t p = 0; p < MAX_PLANNERS && ekv_planner_name(p); p++) {
        ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
        plans[p] = NULL;
        if (ekv_plan_create(context, ekv_planner_name(p), batch, device, &options, &plans[p]))
            fprintf(stderr, "plan_time: %s, batch %d: %s\n", ekv_planner_name(p), batch->batch_size, ekv_last_error());
    }
}

static int time_batch(ekv_context *context, const ekv_device *device, int32_t kv_heads, int32_t batch_size)
{
    static double us[MAX_PLANNERS][ROUNDS];
    ekv_plan *plans[MAX_PLANNERS];
    int32_t *kv_len = malloc((size_t)batch_size * sizeof *kv_len);
    if (!kv_len) {
        fprintf(stderr, "plan_time: no memory for %d lengths\n", batch_size);
        return 1;
    }
    fill_lengths(kv_len, batch_size);
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = batch_size;
    batch.kv_len = kv_len;
    batch.q_heads = GROUP * kv_heads;
    batch.kv_heads = kv_heads;
    batch.head_dim = 128;
    create_plans(context, &batch, device, plans);

    for (int32_t round = 0; round < ROUNDS; round++) {
        for (int32_t b = 0; b < batch_size; b++)
            kv_len[b]++;
        for (int32_t p = 0; p < MAX_PLANNERS && ekv_planner_name(p); p++) {
            if (!plans[p])
                continue;
            const double begin = now_us();
            if (ekv_plan_update(plans[p], kv_len, batch_size)) {
                fprintf(stderr, "plan_time: %s, batch %d: %s\n", ekv_planner_name(p), batch_size, ekv_last_error());
                ekv_plan_free(plans[p]);
                plans[p] = NULL;
                continue;
            }
            us[p][round] = now_us() - begin;
        }
    }
    for (int32_t p = 0; p < MAX_PLANNERS && ekv_planner_name(p); p++) {
        if (!plans[p])
            continue;
        qsort(us[p], ROUNDS, sizeof us[p][0], compare_doubles);
        printf("%s,%d,%.2f,%.2f\n", ekv_planner_name(p), batch_size, us[p][ROUNDS / 2], us[p][0]);
        ekv_plan_free(plans[p]);
    }
    free(kv_len);
    return 0;
}

int main(int argc, char **argv)
{
    static const int32_t default_batches[] = { 128, 1024, 8192, 65536 };
    int32_t kv_heads = 4, batch_size;
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.num_threads = 1;
    options.cuda_device = -2;
    ekv_context *context;
    ekv_device device = EKV_DEVICE_INIT;
    if ((argc > 1 && ekv_parse_int32(argv[1], strlen(argv[1]), "KV_HEADS", 1, 1024, &kv_heads)) ||
        ekv_context_create(&options, &context) || ekv_device_find("h200", &device)) {
        fprintf(stderr, "plan_time: %s\n", ekv_last_error());
        return 2;
    }
    printf("planner,batch,median_us,min_us\n");
    int failed = 0;
    for (size_t i = 0; argc <= 2 && i < sizeof default_batches / sizeof default_batches[0]; i++)
        failed |= time_batch(context, &device, kv_heads, default_batches[i]);
    for (int i = 2; i < argc; i++) {
        if (ekv_parse_int32(argv[i], strlen(argv[i]), "BATCH", 1, 1 << 20, &batch_size)) {
            fprintf(stderr, "plan_time: %s\n", ekv_last_error());
            failed = 2;
            break;
        }
        failed |= time_batch(context, &device, kv_heads, batch_size);
    }
    ekv_context_free(context);
    return failed;
}
