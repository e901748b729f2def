/* SPDX-License-Identifier: Apache-2.0 */
#include "execution.h"

#include "workload.h"

#include <stdlib.h>
#include <time.h>

enum { WORKSPACE_ALIGN = 256 }; /* ekv_workspace_size asks for it */

static double now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static int compare_times(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts times. */
static double median(double *times, int32_t count)
{
    qsort(times, (size_t)count, sizeof *times, compare_times);
    return count % 2 ? times[count / 2] : (times[count / 2 - 1] + times[count / 2]) / 2;
}

ekv_status cli_execution_create(cli_state *cli, const ekv_batch *batch, bool with_reference, cli_execution *execution)
{
    ekv_random_cache_options options = EKV_RANDOM_CACHE_OPTIONS_INIT;
    options.seed = (uint64_t)cli->options.seed;
    ekv_status status = ekv_random_cache_create(cli->context, batch, &options, &execution->cache);
    if (status)
        return status;
    for (int32_t b = 0; b < batch->batch_size; b++)
        execution->kv_bytes += cli_kv_bytes_per_token(batch) * batch->kv_len[b];
    if (!with_reference)
        return EKV_OK;
    return ekv_reference_create(cli->context, batch, ekv_random_cache_tensors(execution->cache), &execution->reference);
}

void cli_execution_free(cli_execution *execution)
{
    ekv_reference_free(execution->reference);
    ekv_random_cache_free(execution->cache);
}

static ekv_status time_plan(ekv_plan *plan, int32_t repeat, double *times, double *plan_us)
{
    for (int32_t i = 0; i < repeat; i++) {
        const double start = now_us();
        ekv_status status = ekv_plan_update(plan, plan->kv_len, plan->batch.batch_size);
        if (status)
            return status;
        times[i] = now_us() - start;
    }
    *plan_us = median(times, repeat);
    return EKV_OK;
}

static ekv_status time_decode(cli_execution *execution, ekv_plan *plan, int32_t repeat, void *workspace, size_t size,
                              double *times, cli_result *result)
{
    for (int32_t i = -1; i < repeat; i++) { /* -1 warms up */
        const double start = now_us();
        ekv_status status = ekv_decode(plan, ekv_random_cache_tensors(execution->cache), NULL, workspace, size);
        if (status)
            return status;
        if (i >= 0)
            times[i] = now_us() - start;
    }
    result->median_us = median(times, repeat);
    result->min_us = times[0];
    result->kv_gb_per_s = (double)execution->kv_bytes / result->median_us / 1e3;
    return EKV_OK;
}

static void compare(cli_execution *execution, const ekv_plan *plan, cli_result *result)
{
    result->passed = ekv_random_cache_guards_intact(execution->cache);
    if (!execution->reference)
        return;
    /* The CPU backend keeps softmax weights in fp32. */
    result->comparison = ekv_compare(plan, ekv_random_cache_tensors(execution->cache), EKV_LSE_NATURAL, EKV_DTYPE_F32,
                                     execution->reference);
    result->passed = result->passed && result->comparison.max_ratio <= 1;
}

ekv_status cli_execute(cli_execution *execution, ekv_plan *plan, int32_t repeat, cli_result *result)
{
    *result = (cli_result){ 0 };
    size_t size;
    ekv_status status;
    if ((status = ekv_backend_supports(plan, ekv_random_cache_tensors(execution->cache), NULL)) ||
        (status = ekv_workspace_size(plan, EKV_BACKEND_CPU, &size)))
        return status;
    char *memory = cli_alloc(size + WORKSPACE_ALIGN);
    double *times = cli_alloc((size_t)repeat * sizeof *times);
    void *workspace = memory + (WORKSPACE_ALIGN - (uintptr_t)memory % WORKSPACE_ALIGN) % WORKSPACE_ALIGN;
    ekv_random_cache_reset(execution->cache);
    if (!(status = time_plan(plan, repeat, times, &result->plan_us)) &&
        !(status = time_decode(execution, plan, repeat, workspace, size, times, result)))
        compare(execution, plan, result);
    free(times);
    free(memory);
    return status;
}
