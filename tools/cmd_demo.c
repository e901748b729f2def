/* SPDX-License-Identifier: Apache-2.0
 * evenkv demo: what each planner does with batches from a real trace and with a skewed one, executed on the CPU. */
#include "base/status.h"
#include "execution.h"
#include "trace/replay.h"
#include "workload.h"

#include <inttypes.h>
#include <stdio.h>

#define SAMPLE_TRACE "data/azure-conv-1000.csv"
enum { REPEAT = 3, SAMPLES = 2, SKEW_REQUESTS = 96, SKEW_TOKENS = 65536 };

static void print_introduction(cli_text *text, const cli_state *cli)
{
    cli_wrapf(
        text, 0,
        "In decode every request of a batch brings one query and a KV cache of its own length. A planner cuts the "
        "caches into tiles for the thread blocks (CTAs) of a GPU; the batch is done when the busiest slot is. So "
        "`imbalance`, the busiest slot's tokens over the mean, is what a plan costs beyond reading the KV cache, "
        "and 1 is ideal.");
    cli_wrapf(
        text, 0,
        "Below, each plan is made for an H200 and then executed on this machine's CPU (%d thread%s), tile by tile "
        "and merge by merge, and compared with a double-precision reference: `of limit` is the largest error as "
        "a share of what rounding explains. Times are of this CPU: a few threads take tile after tile, so they "
        "feel the number of tiles, but not the imbalance over a GPU's slots.",
        cli->context->options.num_threads, cli->context->options.num_threads > 1 ? "s" : "");
}

static ekv_status demo_planner(cli_state *cli, const cli_workload *workload, int64_t index, const char *planner,
                               cli_execution *execution)
{
    const ekv_batch batch = cli_workload_batch(workload, index);
    ekv_plan *plan;
    ekv_status status = ekv_plan_create(cli->context, planner, &batch, &workload->device, NULL, &plan);
    if (status)
        return status;
    ekv_plan_info info = EKV_PLAN_INFO_INIT;
    cli_result result;
    if (!(status = ekv_plan_info_get(plan, &info)) && !(status = cli_execute(execution, plan, REPEAT, NULL, &result))) {
        cli_print(&cli->out, "%-27s %7" PRId64 " %10" PRId64 " %10.1f %9.3f %9.1f %10.2e %9.3f%s\n", planner,
                  info.num_tiles, info.max_cta_tokens, info.mean_cta_tokens, info.imbalance,
                  result.decode.median_us / 1e3, result.check.comparison.max_rel_err, result.check.comparison.max_ratio,
                  result.check.passed ? "" : "  WRONG");
        if (!result.check.passed)
            cli->exit_code = CLI_FAILURE;
    }
    ekv_plan_free(plan);
    return status;
}

static ekv_status demo_batch(cli_state *cli, const cli_workload *workload, int64_t index, const char *title)
{
    const ekv_batch batch = cli_workload_batch(workload, index);
    cli_print(&cli->out, "\n%s\n", title);
    cli_print_batch(&cli->out, workload, index);
    cli_print(&cli->out, "%-27s %7s %10s %10s %9s %9s %10s %9s\n", "planner", "tiles", "busiest", "mean", "imbalance",
              "CPU ms", "rel. err.", "of limit");
    cli_execution execution = { 0 };
    cli_limits limits = { .with_reference = true, .poison = true };
    cli_limits_add(&limits, &batch);
    cli_progress("computing the reference");
    ekv_status status = cli_execution_create(cli, &batch, limits, &execution);
    if (!status)
        status = cli_execution_set_batch(&execution, &batch);
    for (int32_t p = 0; p < workload->num_planners && !status; p++) {
        char text[128];
        snprintf(text, sizeof text, "%s: %s", title, workload->planners[p]);
        cli_progress(text);
        status = demo_planner(cli, workload, index, workload->planners[p], &execution);
        if (status && cli_skip_planner(workload, workload->planners[p], status))
            status = EKV_OK;
    }
    cli_execution_free(&execution);
    return status;
}

static ekv_status demo_trace(cli_state *cli, cli_workload *workload)
{
    const bool given = cli->options.trace != NULL;
    if (!given)
        cli->options.trace = SAMPLE_TRACE;
    if (!cli->options.sample)
        cli->options.sample = SAMPLES;
    ekv_status status = cli_trace_read(cli, &workload->lengths);
    if (status == EKV_ERROR_NOT_FOUND && !given)
        return ekv_fail(status, "%s is not here; run demo in the source tree or name a request trace with --trace",
                        SAMPLE_TRACE);
    for (int64_t i = 0; !status && i < workload->lengths->count; i++) {
        char title[256];
        snprintf(title, sizeof title, "Decode step %" PRId64 " of a replay of %s", workload->lengths->batches[i].index,
                 cli->options.trace);
        status = demo_batch(cli, workload, i, title);
    }
    return status;
}

static ekv_status demo_skew(cli_state *cli, cli_workload *workload)
{
    ekv_lengths_free(workload->lengths);
    workload->lengths = NULL;
    ekv_status status =
        ekv_lengths_from_dist(cli->context, "skew80", SKEW_REQUESTS, SKEW_TOKENS, EKV_HOT_FIRST, &workload->lengths);
    return status ? status : demo_batch(cli, workload, 0, "One request holds 80 % of the tokens (skew80)");
}

static ekv_status demo_run(cli_state *cli)
{
    cli_workload workload = { 0 };
    cli->options.backend = EKV_BACKEND_CPU;
    ekv_status status;
    if (!(status = cli_shape_read(cli, &workload.shape)) && !(status = cli_planners_read(cli, &workload)) &&
        !(status = cli_device_read(cli, "h200", &workload.device))) {
        print_introduction(&cli->out, cli);
        if (!(status = demo_trace(cli, &workload)))
            status = demo_skew(cli, &workload);
    }
    if (!status)
        cli_print(&cli->out, "\nNext: evenkv explain --batch 128 --tokens 524288 --dist skew80\n");
    cli_workload_free(&workload);
    return status;
}

const cli_command cli_command_demo = {
    .name = "demo",
    .summary = "every planner on batches of a real trace, executed and checked on the CPU",
    .details = "Samples decode batches from a request trace (by default " SAMPLE_TRACE ", 1,000 requests of the "
               "Azure LLM inference trace), adds a batch where one request holds 80 % of the tokens, and for every "
               "planner prints tiles, the busiest slot's and the mean tokens, imbalance, the time on this CPU, and the "
               "error against the reference.\n",
    .groups = CLI_SHAPE | CLI_TRACE | CLI_OUTPUT,
    .planners = "all",
    .run = demo_run,
};
