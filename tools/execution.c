/* SPDX-License-Identifier: Apache-2.0 */
#include "execution.h"

#include "base/half.h"
#include "base/status.h"
#include "workload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- Figures ----------------------------------------------------------------------------------------- */

static int compare_times(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

cli_times cli_times_of(double *times, int32_t count)
{
    qsort(times, (size_t)count, sizeof *times, compare_times);
    return (cli_times){ .count = count,
                        .median_us = (times[(count - 1) / 2] + times[count / 2]) / 2,
                        .min_us = times[0],
                        /* the smallest that 95 % do not exceed */
                        .p95_us = times[ekv_ceil_div((int64_t)count * 95, 100) - 1] };
}

/* ---- Backends ---------------------------------------------------------------------------------------- */

ekv_status cli_backend_choose(cli_state *cli)
{
    cli_options *options = &cli->options;
    const bool cuda = cli->context->cuda != NULL;
    if (options->backend == CLI_BACKEND_AUTO)
        options->backend = cuda ? EKV_BACKEND_CUDA : EKV_BACKEND_CPU;
    options->plan.cuda = options->backend == EKV_BACKEND_CUDA;
    if (options->plan.cuda && !cuda)
        return ekv_fail(EKV_ERROR_BACKEND_UNAVAILABLE, "no CUDA backend: %s", cli->context->cuda_missing);
    if (options->plan.cuda && options->kernel >= EKV_KERNEL_GENERIC)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "that --kernel goes with --backend cpu only"));
    if (options->plan.cuda)
        return EKV_OK;
    const bool own = options->kernel == EKV_KERNEL_AUTO || options->kernel >= EKV_KERNEL_GENERIC;
    const char *given = !own                      ? "--kernel mma and simt"
                        : options->graph          ? "--graph"
                        : options->plan.on_device ? "--on-device"
                        : options->timeline       ? "--timeline"
                                                  : NULL;
    if (given)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s goes with --backend cuda only", given));
    return EKV_OK;
}

int32_t cli_repeat(const cli_state *cli)
{
    enum { CPU = 9, CUDA = 20 };
    if (cli->options.repeat)
        return cli->options.repeat;
    return cli->options.backend == EKV_BACKEND_CUDA ? CUDA : CPU;
}

/* ---- Execution --------------------------------------------------------------------------------------- */

void cli_limits_add(cli_limits *limits, const ekv_batch *batch)
{
    int64_t pages = 0;
    for (int32_t b = 0; b < batch->batch_size; b++)
        pages += ekv_ceil_div(batch->kv_len[b], batch->page_size);
    limits->pages = ekv_max(limits->pages, pages);
    limits->requests = (int32_t)ekv_max(limits->requests, batch->batch_size);
}

ekv_status cli_execution_create(cli_state *cli, const ekv_batch *shape, cli_limits limits, cli_execution *execution)
{
    *execution = (cli_execution){
        .cli = cli,
        .backend = cli->options.backend == EKV_BACKEND_CUDA ? &cli_backend_cuda : &cli_backend_cpu,
        .limits = limits,
        .cold = !cli->options.no_flush,
        .flush = "none",
        .driver = "none",
        .batch = *shape,
    };
    return execution->backend->create(execution);
}

ekv_status cli_execution_set_batch(cli_execution *execution, const ekv_batch *batch)
{
    execution->batch = *batch;
    execution->kv_bytes = 0;
    for (int32_t b = 0; b < batch->batch_size; b++)
        execution->kv_bytes += cli_kv_bytes_per_token(batch) * batch->kv_len[b];
    const int64_t rows = (int64_t)batch->batch_size * batch->q_heads;
    execution->bytes = execution->kv_bytes + 2 * rows * batch->head_dim * ekv_dtype_size(batch->q_dtype);
    return execution->backend->set_batch(execution);
}

void cli_execution_free(cli_execution *execution)
{
    if (execution->backend)
        execution->backend->free(execution);
    *execution = (cli_execution){ 0 };
}

/* ---- Jobs -------------------------------------------------------------------------------------------- */

ekv_status cli_job_create(cli_execution *execution, ekv_plan *plan, cli_job *job)
{
    *job = (cli_job){ .plan = plan, .options = EKV_DECODE_OPTIONS_INIT };
    job->options.backend = (ekv_backend)execution->cli->options.backend;
    job->options.kernel = (ekv_kernel)execution->cli->options.kernel;
    ekv_status status;
    if ((status = ekv_backend_supports(plan, execution->tensors, &job->options)) ||
        (status = ekv_workspace_size(plan, job->options.backend, &job->workspace_size)))
        return status;
    if ((status = execution->backend->prepare(execution, job)))
        cli_job_free(execution, job);
    return status;
}

void cli_job_free(cli_execution *execution, cli_job *job)
{
    execution->backend->release(execution, job);
    *job = (cli_job){ 0 };
}

ekv_status cli_job_time(cli_execution *execution, cli_job *job, double *us)
{
    return execution->backend->time(execution, job, us);
}

/* Outputs are dense, both O and LSE. */
static bool same(const cli_execution *execution, const cli_outputs *outputs, const void *o, const void *lse)
{
    const size_t rows = (size_t)execution->batch.batch_size * (size_t)execution->batch.q_heads;
    const size_t o_size = rows * (size_t)execution->batch.head_dim * (size_t)ekv_dtype_size(execution->batch.q_dtype);
    return !memcmp(outputs->o, o, o_size) && !memcmp(outputs->lse, lse, rows * sizeof(float));
}

static void compare(const cli_execution *execution, const cli_job *job, const cli_outputs *outputs, cli_check *check)
{
    ekv_tensors tensors = *execution->tensors;
    tensors.o = outputs->o;
    tensors.lse = outputs->lse;
    check->guards_intact = outputs->guards_intact;
    if (execution->reference)
        check->comparison = ekv_compare(job->plan, &tensors, EKV_LSE_NATURAL, job->p_dtype, execution->reference);
}

ekv_status cli_job_check(cli_execution *execution, cli_job *job, cli_check *check)
{
    const size_t rows = (size_t)execution->batch.batch_size * (size_t)execution->batch.q_heads;
    const size_t o_size = rows * (size_t)execution->batch.head_dim * (size_t)ekv_dtype_size(execution->batch.q_dtype);
    *check = (cli_check){ 0 };
    cli_outputs outputs;
    ekv_status status = execution->backend->decode(execution, job, &outputs);
    if (status)
        return status;
    compare(execution, job, &outputs, check);
    char *first = cli_alloc(o_size + rows * sizeof(float));
    memcpy(first, outputs.o, o_size);
    memcpy(first + o_size, outputs.lse, rows * sizeof(float));
    if (!(status = execution->backend->decode(execution, job, &outputs))) {
        check->same_bits = same(execution, &outputs, first, first + o_size);
        check->guards_intact = check->guards_intact && outputs.guards_intact;
        check->passed = check->guards_intact && check->same_bits && check->comparison.max_ratio <= 1;
    }
    free(first);
    return status;
}

void cli_check_report(cli_state *cli, const char *what, const cli_check *check)
{
    const ekv_comparison *c = &check->comparison;
    cli->exit_code = CLI_FAILURE;
    cli_progress(NULL);
    if (c->max_ratio > 1)
        fprintf(stderr, "evenkv: %s is out of tolerance by a factor of %.3g at request %d, query head %d, %s%d\n", what,
                c->max_ratio, c->request, c->q_head, c->dim < 0 ? "LSE " : "element ", c->dim);
    else
        fprintf(stderr, "evenkv: %s %s\n", what,
                check->guards_intact ? "gave other bits the second time" : "wrote outside of its outputs");
}

/* ---- Times ------------------------------------------------------------------------------------------- */

double cli_now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static ekv_status time_plan_once(cli_execution *execution, ekv_plan *plan, double *us)
{
    if (plan->options.on_device)
        return execution->backend->time_plan(execution, plan, us);
    const double start = cli_now_us();
    ekv_status status = ekv_plan_update(plan, plan->kv_len, plan->batch.batch_size);
    *us = cli_now_us() - start;
    return status;
}

ekv_status cli_plan_time(cli_execution *execution, ekv_plan *plan, int32_t repeat, double *us)
{
    double *times = cli_alloc((size_t)repeat * sizeof *times);
    ekv_status status = EKV_OK;
    for (int32_t i = 0; i < repeat && !status; i++)
        status = time_plan_once(execution, plan, &times[i]);
    if (!status)
        *us = cli_times_of(times, repeat).median_us;
    free(times);
    return status;
}

/* Shapes take turns, so that a disturbance falls on all. */
ekv_status cli_read_time(cli_execution *execution, int32_t repeat, cli_read *read)
{
    enum { MAX_SHAPES = 16 };
    const cli_backend *backend = execution->backend;
    char text[sizeof read->shape];
    int32_t shapes = 0;
    while (shapes < MAX_SHAPES && backend->read_shape(execution, shapes, text, sizeof text))
        shapes++;
    double *times = cli_alloc((size_t)shapes * (size_t)repeat * sizeof *times);
    ekv_status status = EKV_OK;
    for (int32_t i = -1; i < repeat && !status; i++) /* -1 warms up */
        for (int32_t s = 0; s < shapes && !status; s++)
            status = backend->read(execution, s, &times[s * repeat + (i < 0 ? 0 : i)]);
    if (!status) {
        read->us = 0;
        for (int32_t s = 0; s < shapes; s++) {
            const double us = cli_times_of(times + s * repeat, repeat).median_us;
            if (s && us >= read->us)
                continue;
            read->us = us;
            read->index = s;
            backend->read_shape(execution, s, read->shape, sizeof read->shape);
        }
    }
    free(times);
    return status;
}

static ekv_status time_decode(cli_execution *execution, cli_job *job, int32_t repeat, cli_result *result)
{
    double *times = cli_alloc((size_t)repeat * sizeof *times);
    ekv_status status = EKV_OK;
    for (int32_t i = 0; i < repeat && !status; i++) /* the check has warmed up */
        status = cli_job_time(execution, job, &times[i]);
    if (!status) {
        result->decode = cli_times_of(times, repeat);
        result->kv_gb_per_s = (double)execution->kv_bytes / result->decode.median_us / 1e3;
    }
    free(times);
    return status;
}

ekv_status cli_execute(cli_execution *execution, ekv_plan *plan, int32_t repeat, ekv_cuda_timeline *timeline,
                       cli_result *result)
{
    *result = (cli_result){ 0 };
    cli_job job;
    ekv_status status;
    if (!(status = cli_plan_time(execution, plan, repeat, &result->plan_us)) &&
        !(status = cli_job_create(execution, plan, &job))) {
        snprintf(result->kernel, sizeof result->kernel, "%s", job.kernel);
        if (!(status = cli_job_check(execution, &job, &result->check)) &&
            !(status = time_decode(execution, &job, repeat, result)) && timeline)
            status = execution->backend->timeline(execution, &job, timeline);
        cli_job_free(execution, &job);
    }
    return status;
}
