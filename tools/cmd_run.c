/* SPDX-License-Identifier: Apache-2.0
 * evenkv run: executes plans and checks what comes out. */
#include "base/context.h"
#include "execution.h"
#include "json.h"
#include "timeline.h"
#include "workload.h"

#include <inttypes.h>
#include <stdio.h>

static void print_head(cli_text *text)
{
    cli_print(text, "%-27s %-8s %8s %10s %12s %12s %8s %10s %10s\n", "planner", "dispatch", "tiles", "plan us",
              "median us", "min us", "GB/s", "rel. err.", "of limit");
}

static void print_row(cli_state *cli, const ekv_plan *plan, const cli_result *result)
{
    cli_print(&cli->out, "%-27s %-8s %8" PRId64 " %10.1f %12.1f %12.1f %8.2f", plan->planner->name,
              cli_dispatch_name(plan->dispatch), plan->num_tiles, result->plan_us, result->decode.median_us,
              result->decode.min_us, result->kv_gb_per_s);
    if (cli->options.no_check)
        cli_print(&cli->out, " %10s %10s", "-", "-");
    else
        cli_print(&cli->out, " %10.2e %10.3f", result->check.comparison.max_rel_err,
                  result->check.comparison.max_ratio);
    cli_print(&cli->out, "%s\n", result->check.passed ? "" : "  WRONG");
}

static void print_json(cli_state *cli, const cli_workload *workload, int64_t index, const ekv_plan *plan,
                       const cli_execution *execution, const cli_result *result)
{
    const ekv_batch *batch = &plan->batch;
    const bool checked = !cli->options.no_check;
    cJSON *object = json_object();
    json_string(object, "planner", plan->planner->name);
    json_string(object, "device", workload->device.name);
    json_string(object, "backend", execution->backend->name);
    json_int(object, "threads", cli->context->options.num_threads);
    json_int(object, "batch", batch->batch_size);
    json_int(object, "total_tokens", workload->lengths->batches[index].total_tokens);
    json_shape(object, batch);
    json_string(object, "layout", batch->layout == EKV_LAYOUT_HND ? "hnd" : "nhd");
    json_string(object, "kernel", result->kernel);
    json_string(object, "dispatch", cli_dispatch_name(plan->dispatch));
    json_int(object, "num_tiles", plan->num_tiles);
    json_string(object, "flush", execution->flush);
    json_int(object, "repeat", result->decode.count);
    json_string(object, "planned_on", plan->options.on_device ? "device" : "host");
    json_real(object, "plan_us", result->plan_us);
    json_real(object, "median_us", result->decode.median_us);
    json_real(object, "min_us", result->decode.min_us);
    json_real(object, "kv_gb_per_s", result->kv_gb_per_s);
    json_bool(object, "checked", checked);
    json_real_or_null(object, "max_abs_err", result->check.comparison.max_abs_err, !checked);
    json_real_or_null(object, "max_rel_err", result->check.comparison.max_rel_err, !checked);
    json_real_or_null(object, "tolerance_ratio", result->check.comparison.max_ratio, !checked);
    json_bool(object, "passed", result->check.passed);
    json_print(&cli->out, object);
}

/* What the planners of a command share. */
typedef struct run_state {
    cli_state *cli;
    cli_workload workload;
    cli_execution execution;
    cli_timeline timeline;
} run_state;

static ekv_status execute(run_state *run, int64_t index, const char *planner, ekv_plan *plan)
{
    cli_state *cli = run->cli;
    ekv_cuda_timeline recorded = { 0 };
    cli_result result;
    ekv_status status =
        cli_execute(&run->execution, plan, cli_repeat(cli), cli->options.timeline ? &recorded : NULL, &result);
    if (status)
        return status;
    if (cli->options.json)
        print_json(cli, &run->workload, index, plan, &run->execution, &result);
    else
        print_row(cli, plan, &result);
    if (cli->options.timeline)
        cli_timeline_add(&run->timeline, plan, index, &recorded);
    ekv_release(cli->context, recorded.stamps);
    if (!result.check.passed)
        cli_check_report(cli, planner, &result.check);
    return EKV_OK;
}

static ekv_status run_planner(run_state *run, int64_t index, const char *planner)
{
    const ekv_batch batch = cli_workload_batch(&run->workload, index);
    ekv_plan *plan;
    ekv_status status =
        ekv_plan_create(run->cli->context, planner, &batch, &run->workload.device, &run->cli->options.plan, &plan);
    if (status)
        return cli_plan_status(run->cli, status);
    status = execute(run, index, planner, plan);
    ekv_plan_free(plan);
    return status;
}

static void print_batch(run_state *run, int64_t index)
{
    cli_state *cli = run->cli;
    const int32_t threads = cli->context->options.num_threads;
    cli_print(&cli->out, index ? "\n" : "");
    cli_print_batch(&cli->out, &run->workload, index);
    cli_print(&cli->out, "planned for %s, run on ", run->workload.device.name);
    if (cli->options.backend == EKV_BACKEND_CUDA)
        cli_print(&cli->out, "the GPU");
    else
        cli_print(&cli->out, "%d CPU thread%s", threads, threads > 1 ? "s" : "");
    cli_print(&cli->out, ", caches %s, median of %d\n", run->execution.cold ? "flushed" : "as they are",
              cli_repeat(cli));
    print_head(&cli->out);
}

static ekv_status run_batch(run_state *run, int64_t index)
{
    cli_state *cli = run->cli;
    cli_workload *workload = &run->workload;
    const ekv_batch batch = cli_workload_batch(workload, index);
    if (!cli->options.json)
        print_batch(run, index);
    cli_progress(cli->options.no_check ? "filling the cache" : "filling the cache, computing the reference");
    ekv_status status = cli_execution_set_batch(&run->execution, &batch);
    for (int32_t p = 0; p < workload->num_planners && !status; p++) {
        cli_progress(workload->planners[p]);
        status = run_planner(run, index, workload->planners[p]);
        if (status && cli_skip_planner(workload, workload->planners[p], status))
            status = EKV_OK;
    }
    return status;
}

/* Whether the backend can run the workload at all, before anything is computed. */
static ekv_status check_backend(cli_state *cli, const cli_workload *workload)
{
    ekv_decode_options options = EKV_DECODE_OPTIONS_INIT;
    options.backend = (ekv_backend)cli->options.backend;
    options.kernel = (ekv_kernel)cli->options.kernel;
    const ekv_batch batch = cli_workload_batch(workload, 0);
    for (int32_t p = 0; p < workload->num_planners; p++) {
        ekv_plan *plan;
        ekv_status status =
            ekv_plan_create(cli->context, workload->planners[p], &batch, &workload->device, &cli->options.plan, &plan);
        if (!status) {
            status = ekv_backend_supports(plan, NULL, &options);
            ekv_plan_free(plan);
        } else {
            status = cli_plan_status(cli, status);
        }
        if (status && !(workload->all_planners && (status == EKV_ERROR_UNSUPPORTED || status == EKV_ERROR_OVERFLOW)))
            return status;
    }
    return EKV_OK;
}

static ekv_status run_batches(run_state *run)
{
    cli_state *cli = run->cli;
    cli_workload *workload = &run->workload;
    cli_limits limits = { .with_reference = !cli->options.no_check, .poison = true };
    ekv_status status = check_backend(cli, workload);
    if (status)
        return status;
    for (int64_t i = 0; i < workload->lengths->count; i++) {
        const ekv_batch batch = cli_workload_batch(workload, i);
        cli_limits_add(&limits, &batch);
    }
    status = cli_execution_create(cli, &workload->shape, limits, &run->execution);
    for (int64_t i = 0; !status && i < workload->lengths->count; i++)
        status = run_batch(run, i);
    if (!status && cli->options.timeline) {
        cli_text text = { 0 };
        cli_timeline_write(&run->timeline, &text);
        cli_write_later(cli, cli->options.timeline, &text);
    }
    return status;
}

static ekv_status run_run(cli_state *cli)
{
    run_state run = { .cli = cli };
    ekv_status status;
    if (!(status = cli_backend_choose(cli)) && !(status = cli_workload_read(cli, NULL, &run.workload))) {
        if (!run.workload.device.sm_arch) /* threads stand for SMs */
            run.workload.device.num_sms = cli->context->options.num_threads;
        status = run_batches(&run);
    }
    cli_execution_free(&run.execution);
    cli_timeline_free(&run.timeline);
    cli_workload_free(&run.workload);
    return status;
}

const cli_command cli_command_run = {
    .name = "run",
    .summary = "execute plans on random tensors, check them and time them",
    .details =
        "Fills a paged cache with random K and V, decodes the batch by each planner's plan on a GPU or the CPU and "
        "prints: tiles; the time of planning and of decoding (median and best of --repeat, caches flushed before "
        "each); GB/s of K and V; the largest error relative to its row, and as a share of the limit that the "
        "tolerance sets.  A result beyond the limit, or one that differs from run to run, makes the exit status 1.\n"
        "Unless --device says otherwise plans are made for this machine; on the CPU a thread stands for an SM.  Every "
        "request is compared with a double-precision reference unless --no-check is given.\n",
    .groups =
        CLI_BATCH | CLI_PLANNERS | CLI_PLANNING | CLI_DEVICE | CLI_EXECUTION | CLI_TIMELINE | CLI_JSON | CLI_OUTPUT,
    .planners = "even",
    .run = run_run,
};
