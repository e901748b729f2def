/* SPDX-License-Identifier: Apache-2.0
 * evenkv run: executes plans and checks what comes out. */
#include "base/status.h"
#include "execution.h"
#include "json.h"
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
              cli_dispatch_name(plan->dispatch), plan->num_tiles, result->plan_us, result->median_us, result->min_us,
              result->kv_gb_per_s);
    if (cli->options.no_check)
        cli_print(&cli->out, " %10s %10s", "-", "-");
    else
        cli_print(&cli->out, " %10.2e %10.3f", result->comparison.max_rel_err, result->comparison.max_ratio);
    cli_print(&cli->out, "%s\n", result->passed ? "" : "  WRONG");
}

static void print_json(cli_state *cli, const cli_workload *workload, int64_t index, const ekv_plan *plan,
                       const cli_result *result)
{
    const ekv_batch *batch = &plan->batch;
    const bool checked = !cli->options.no_check;
    cJSON *object = json_object();
    json_string(object, "planner", plan->planner->name);
    json_string(object, "device", workload->device.name);
    json_string(object, "backend", "cpu");
    json_int(object, "threads", cli->context->options.num_threads);
    json_int(object, "batch", batch->batch_size);
    json_int(object, "total_tokens", workload->lengths->batches[index].total_tokens);
    json_int(object, "q_heads", batch->q_heads);
    json_int(object, "kv_heads", batch->kv_heads);
    json_int(object, "head_dim", batch->head_dim);
    json_int(object, "page_size", batch->page_size);
    json_string(object, "dtype", cli_dtype_name(batch->kv_dtype));
    json_string(object, "layout", batch->layout == EKV_LAYOUT_HND ? "hnd" : "nhd");
    json_string(object, "dispatch", cli_dispatch_name(plan->dispatch));
    json_int(object, "num_tiles", plan->num_tiles);
    json_int(object, "repeat", cli->options.repeat);
    json_real(object, "plan_us", result->plan_us);
    json_real(object, "median_us", result->median_us);
    json_real(object, "min_us", result->min_us);
    json_real(object, "kv_gb_per_s", result->kv_gb_per_s);
    json_bool(object, "checked", checked);
    json_real_or_null(object, "max_abs_err", result->comparison.max_abs_err, !checked);
    json_real_or_null(object, "max_rel_err", result->comparison.max_rel_err, !checked);
    json_real_or_null(object, "tolerance_ratio", result->comparison.max_ratio, !checked);
    json_bool(object, "passed", result->passed);
    json_print(&cli->out, object);
}

/* What went wrong with a result, for stderr. */
static void report_wrong(cli_state *cli, const char *planner, const cli_result *result)
{
    const ekv_comparison *c = &result->comparison;
    cli->exit_code = CLI_FAILURE;
    cli_progress(NULL);
    if (c->max_ratio > 1)
        fprintf(stderr, "evenkv: %s is out of tolerance by a factor of %.3g at request %d, query head %d, %s%d\n",
                planner, c->max_ratio, c->request, c->q_head, c->dim < 0 ? "LSE " : "element ", c->dim);
    else
        fprintf(stderr, "evenkv: %s wrote outside of its outputs\n", planner);
}

static ekv_status run_planner(cli_state *cli, const cli_workload *workload, int64_t index, const char *planner,
                              cli_execution *execution)
{
    const ekv_batch batch = cli_workload_batch(workload, index);
    ekv_plan *plan;
    ekv_status status = ekv_plan_create(cli->context, planner, &batch, &workload->device, &cli->options.plan, &plan);
    if (status)
        return cli_plan_status(cli, status);
    cli_result result;
    status = cli_execute(execution, plan, cli->options.repeat, &result);
    if (!status && cli->options.json)
        print_json(cli, workload, index, plan, &result);
    else if (!status)
        print_row(cli, plan, &result);
    if (!status && !result.passed)
        report_wrong(cli, planner, &result);
    ekv_plan_free(plan);
    return status;
}

static ekv_status run_batch(cli_state *cli, const cli_workload *workload, int64_t index)
{
    const ekv_batch batch = cli_workload_batch(workload, index);
    if (!cli->options.json) {
        cli_print(&cli->out, index ? "\n" : "");
        cli_print_batch(&cli->out, workload, index);
        cli_print(&cli->out, "planned for %s, run on %d CPU thread%s, median of %d\n", workload->device.name,
                  cli->context->options.num_threads, cli->context->options.num_threads > 1 ? "s" : "",
                  cli->options.repeat);
        print_head(&cli->out);
    }
    cli_execution execution = { 0 };
    cli_progress(cli->options.no_check ? "filling the cache" : "filling the cache, computing the reference");
    ekv_status status = cli_execution_create(cli, &batch, !cli->options.no_check, &execution);
    for (int32_t p = 0; p < workload->num_planners && !status; p++) {
        cli_progress(workload->planners[p]);
        status = run_planner(cli, workload, index, workload->planners[p], &execution);
        if (status && cli_skip_planner(workload, workload->planners[p], status))
            status = EKV_OK;
    }
    cli_execution_free(&execution);
    return status;
}

/* Whether the backend can run the workload at all, before anything is computed. */
static ekv_status check_backend(cli_state *cli, const cli_workload *workload)
{
    ekv_decode_options options = EKV_DECODE_OPTIONS_INIT;
    options.backend = (ekv_backend)cli->options.backend;
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
    if (options.backend == EKV_BACKEND_CUDA)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "run has no way yet to place tensors in GPU memory; use --backend cpu");
    return EKV_OK;
}

static ekv_status run_run(cli_state *cli)
{
    cli_workload workload = { 0 };
    ekv_status status = cli_workload_read(cli, "cpu", &workload);
    if (!status && !workload.device.sm_arch) /* threads stand for SMs */
        workload.device.num_sms = cli->context->options.num_threads;
    if (!status)
        status = check_backend(cli, &workload);
    for (int64_t i = 0; !status && i < workload.lengths->count; i++)
        status = run_batch(cli, &workload, i);
    cli_workload_free(&workload);
    return status;
}

const cli_command cli_command_run = {
    .name = "run",
    .summary = "execute plans on random tensors, check them and time them",
    .details =
        "Fills a paged cache with random K and V, decodes the batch by each planner's plan and prints: tiles; the "
        "time of planning and of decoding (median and best of --repeat); GB/s of K and V; the largest error relative "
        "to its row, and as a share of the limit that the tolerance sets.  A result beyond the limit makes the exit "
        "status 1.\n"
        "Unless --device says otherwise plans are made for this machine, where a thread stands for an SM.  Every "
        "request is compared with a double-precision reference unless --no-check is given.\n",
    .groups = CLI_BATCH | CLI_PLANNERS | CLI_PLANNING | CLI_DEVICE | CLI_EXECUTION | CLI_JSON | CLI_OUTPUT,
    .planners = "even",
    .run = run_run,
};
