/* SPDX-License-Identifier: Apache-2.0
 * evenkv plan: what planners make of a batch. */
#include "json.h"
#include "plan/plan.h"
#include "workload.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_WARNINGS = EKV_PLAN_MAX_WARNINGS + 1 };

/* One plan and all that is said about it. */
typedef struct plan_report {
    ekv_plan *plan;
    const ekv_device *device;
    ekv_plan_info info;
    size_t workspace_bytes; /* of the CPU backend, so that a plan prints the same with and without a GPU */
    int32_t num_warnings;   /* the planner's, then what ekv_plan_check found */
    const char *warnings[MAX_WARNINGS];
    char breach[512];
} plan_report;

static ekv_status read_report(plan_report *report)
{
    report->info = (ekv_plan_info)EKV_PLAN_INFO_INIT;
    ekv_status status;
    if ((status = ekv_plan_info_get(report->plan, &report->info)) ||
        (status = ekv_workspace_size(report->plan, EKV_BACKEND_CPU, &report->workspace_bytes)))
        return status;
    for (int32_t i = 0; i < report->info.num_warnings; i++)
        report->warnings[report->num_warnings++] = report->info.warnings[i];
    status = ekv_plan_check(report->plan);
    if (status != EKV_ERROR_PLAN_INVALID)
        return status;
    /* A fault of the original: shown, not hidden. */
    snprintf(report->breach, sizeof report->breach, "the plan breaks an invariant: %s", ekv_last_error());
    report->warnings[report->num_warnings++] = report->breach;
    return EKV_OK;
}

/* ---- JSON -------------------------------------------------------------------------------------------- */

static ekv_status print_json_tiles(cJSON *object, const plan_report *report)
{
    const bool range = report->info.dispatch == EKV_DISPATCH_RANGE;
    int64_t cta = -1, begin, end = 0;
    cli_text text = { 0 };
    cli_print(&text, "[");
    for (int64_t i = 0; i < report->info.num_tiles; i++) {
        ekv_tile tile;
        ekv_status status = ekv_plan_tile_get(report->plan, i, &tile);
        while (!status && range && i >= end)
            status = ekv_plan_cta_range(report->plan, ++cta, &begin, &end);
        if (status) {
            free(text.data);
            return status;
        }
        cli_print(&text,
                  "%s{\"request\":%d,\"m_block\":%d,\"head\":%d,\"head_count\":%d,\"split\":%d,\"kv_begin\":%d,"
                  "\"kv_end\":%d,\"slot\":",
                  i ? "," : "", tile.request, tile.m_block, tile.head, tile.head_count, tile.split, tile.kv_begin,
                  tile.kv_end);
        if (tile.slot < 0)
            cli_print(&text, "null");
        else
            cli_print(&text, "%d", tile.slot);
        if (range)
            cli_print(&text, ",\"cta\":%" PRId64, cta);
        cli_print(&text, "}");
    }
    cli_print(&text, "]");
    json_raw(object, "tiles", &text);
    return EKV_OK;
}

static ekv_status print_json(cli_state *cli, const plan_report *report)
{
    const ekv_plan_info *info = &report->info;
    cJSON *object = json_object();
    json_string(object, "planner", info->planner);
    json_string(object, "device", report->device->name);
    json_int(object, "batch", info->batch_size);
    json_string(object, "dispatch", cli_dispatch_name(info->dispatch));
    json_ints(object, "grid", info->grid, 3);
    json_int(object, "ctas", info->num_ctas);
    json_bool(object, "split_kv", info->split_kv);
    json_int(object, "num_work_items", info->num_work_items);
    json_int(object, "num_tiles", info->num_tiles);
    json_int_or_null(object, "kv_chunk_tokens", info->kv_chunk_tokens, info->kv_chunk_tokens < 0);
    json_ints(object, "num_splits", info->num_splits, info->batch_size);
    json_int_or_null(object, "num_splits_bound", info->num_splits_bound, info->num_splits_bound < 0);
    json_ints(object, "batch_order", info->batch_order, info->batch_size);
    json_int(object, "max_cta_tokens", info->max_cta_tokens);
    json_real(object, "mean_cta_tokens", info->mean_cta_tokens);
    json_real(object, "imbalance", info->imbalance);
    json_int(object, "workspace_bytes", (int64_t)report->workspace_bytes);
    json_strings(object, "warnings", report->warnings, report->num_warnings);
    ekv_status status = cli->options.tiles ? print_json_tiles(object, report) : EKV_OK;
    if (status)
        cJSON_Delete(object);
    else
        json_print(&cli->out, object);
    return status;
}

/* ---- Text -------------------------------------------------------------------------------------------- */

static int compare_splits(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* "127 requests in 1, 1 request in 53", the most common first numbers of splits only. */
static void print_splits(cli_text *text, const ekv_plan_info *info)
{
    enum { SHOWN = 8 };
    int32_t *sorted = cli_alloc((size_t)info->batch_size * sizeof *sorted);
    for (int32_t b = 0; b < info->batch_size; b++)
        sorted[b] = info->num_splits[b];
    qsort(sorted, (size_t)info->batch_size, sizeof *sorted, compare_splits);
    int32_t shown = 0, left = 0;
    for (int32_t b = 0, next; b < info->batch_size; b = next) {
        for (next = b + 1; next < info->batch_size && sorted[next] == sorted[b];)
            next++;
        if (++shown > SHOWN && next < info->batch_size) /* the largest is always shown */
            left += next - b;
        else
            cli_print(text, "%s%d request%s in %d", b ? ", " : "", next - b, next - b > 1 ? "s" : "", sorted[b]);
    }
    if (left)
        cli_print(text, ", %d others in between", left);
    cli_print(text, "\n");
    free(sorted);
}

static ekv_status print_tiles(cli_text *text, const plan_report *report)
{
    cli_print(text, "  %8s %8s %7s %5s %5s %6s %10s %10s %8s\n", "tile", "request", "m_block", "head", "heads", "split",
              "kv_begin", "kv_end", "slot");
    for (int64_t i = 0; i < report->info.num_tiles; i++) {
        ekv_tile tile;
        ekv_status status = ekv_plan_tile_get(report->plan, i, &tile);
        if (status)
            return status;
        cli_print(text, "  %8" PRId64 " %8d %7d %5d %5d %6d %10d %10d ", i, tile.request, tile.m_block, tile.head,
                  tile.head_count, tile.split, tile.kv_begin, tile.kv_end);
        if (tile.slot < 0)
            cli_print(text, "%8s\n", "-");
        else
            cli_print(text, "%8d\n", tile.slot);
    }
    return EKV_OK;
}

static void print_warnings(cli_text *text, const plan_report *report)
{
    for (int32_t i = 0; i < report->num_warnings; i++)
        cli_wrapf(text, 2, "warning: %s", report->warnings[i]);
}

static void print_plan(cli_text *text, const plan_report *report)
{
    const ekv_plan_info *info = &report->info;
    cli_print(text, "planner %s\n", info->planner);
    cli_wrap(text, 2, ekv_planner_summary(info->planner));
    cli_print(text, "  dispatch      %s: grid %d x %d x %d, %" PRId64 " CTAs, %d resident on an SM\n",
              cli_dispatch_name(info->dispatch), info->grid[0], info->grid[1], info->grid[2], info->num_ctas,
              info->resident_ctas);
    cli_print(text, "  tiles         %" PRId64 " of %" PRId64 " work items", info->num_tiles, info->num_work_items);
    if (info->kv_chunk_tokens >= 0)
        cli_print(text, ", chunks of %" PRId64 " tokens", info->kv_chunk_tokens);
    if (info->num_splits_bound >= 0)
        cli_print(text, ", at most %d splits", info->num_splits_bound);
    cli_print(text, "%s\n", info->split_kv ? "" : ", no partial results");
    cli_print(text, "  splits        ");
    print_splits(text, info);
    cli_print(text, "  busiest slot  %" PRId64 " tokens, mean %.1f, imbalance %.3f\n", info->max_cta_tokens,
              info->mean_cta_tokens, info->imbalance);
    cli_print(text, "  workspace     %zu bytes on the CPU backend\n", report->workspace_bytes);
}

static void print_table_head(cli_text *text)
{
    cli_print(text, "%-27s %-8s %7s %5s %8s %7s %10s %10s %9s %12s\n", "planner", "dispatch", "ctas", "split", "tiles",
              "chunk", "busiest", "mean", "imbalance", "workspace");
}

static void print_table_legend(cli_text *text)
{
    cli_wrap(
        text, 0,
        "busiest, mean: KV tokens of one head per slot, which is room for one CTA (SMs x resident CTAs, so planners "
        "differ in their number); imbalance: busiest / mean; chunk: tokens per split, where one number rules all; "
        "workspace: bytes on the CPU backend.");
}

static void print_table_row(cli_text *text, const plan_report *report)
{
    const ekv_plan_info *info = &report->info;
    char chunk[24] = "-";
    if (info->kv_chunk_tokens >= 0)
        snprintf(chunk, sizeof chunk, "%" PRId64, info->kv_chunk_tokens);
    cli_print(text, "%-27s %-8s %7" PRId64 " %5s %8" PRId64 " %7s %10" PRId64 " %10.1f %9.3f %12zu\n", info->planner,
              cli_dispatch_name(info->dispatch), info->num_ctas, info->split_kv ? "yes" : "no", info->num_tiles, chunk,
              info->max_cta_tokens, info->mean_cta_tokens, info->imbalance, report->workspace_bytes);
}

/* ---- The command ------------------------------------------------------------------------------------- */

static ekv_status print_report(cli_state *cli, const plan_report *report, bool table)
{
    if (cli->options.json)
        return print_json(cli, report);
    if (table)
        print_table_row(&cli->out, report);
    else
        print_plan(&cli->out, report);
    print_warnings(&cli->out, report);
    return cli->options.tiles ? print_tiles(&cli->out, report) : EKV_OK;
}

static ekv_status plan_one(cli_state *cli, const cli_workload *workload, const ekv_batch *batch, const char *planner)
{
    plan_report report = { .device = &workload->device };
    ekv_status status =
        ekv_plan_create(cli->context, planner, batch, &workload->device, &cli->options.plan, &report.plan);
    if (status)
        return cli_plan_status(cli, status);
    status = read_report(&report);
    if (!status)
        status = print_report(cli, &report, workload->num_planners > 1);
    ekv_plan_free(report.plan);
    return status;
}

static ekv_status plan_batches(cli_state *cli, const cli_workload *workload)
{
    const bool table = !cli->options.json && workload->num_planners > 1;
    for (int64_t i = 0; i < workload->lengths->count; i++) {
        const ekv_batch batch = cli_workload_batch(workload, i);
        if (!cli->options.json) {
            cli_print(&cli->out, i ? "\n" : "");
            cli_print_batch(&cli->out, workload, i);
            cli_print_device(&cli->out, &workload->device);
        }
        if (table)
            print_table_head(&cli->out);
        bool taken = false;
        for (int32_t p = 0; p < workload->num_planners; p++) {
            ekv_status status = plan_one(cli, workload, &batch, workload->planners[p]);
            const bool nobody = !taken && p + 1 == workload->num_planners; /* leaving this one out too leaves none */
            if (status && (nobody || !cli_skip_planner(workload, workload->planners[p], status)))
                return status;
            taken |= !status;
        }
    }
    if (table)
        print_table_legend(&cli->out);
    return EKV_OK;
}

static ekv_status plan_run(cli_state *cli)
{
    cli_workload workload = { 0 };
    ekv_status status = cli_workload_read(cli, "h200", &workload);
    if (!status)
        status = plan_batches(cli, &workload);
    cli_workload_free(&workload);
    return status;
}

const cli_command cli_command_plan = {
    .name = "plan",
    .summary = "print what a planner makes of a batch: tiles, splits, balance",
    .details = "Cuts a decode batch into tiles with one planner or several and prints the plan: how it is dispatched, "
               "how many splits each request gets, and how evenly the tokens lie on the slots (SMs x resident CTAs) of "
               "the device.\n"
               "With --json each plan is one object on a line of its own; several batches and planners give several "
               "lines, batch by batch.\n",
    .groups = CLI_BATCH | CLI_PLANNERS | CLI_PLANNING | CLI_DEVICE | CLI_TILES | CLI_JSON | CLI_OUTPUT,
    .planners = "even",
    .run = plan_run,
};
