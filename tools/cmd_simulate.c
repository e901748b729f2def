/* SPDX-License-Identifier: Apache-2.0
 * evenkv simulate: what plans would take on a device, and why. */
#include "base/context.h"
#include "base/number.h"
#include "base/status.h"
#include "json.h"
#include "sim_view.h"
#include "timeline.h"
#include "workload.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct simulated {
    ekv_plan *plan;
    ekv_timeline *timeline;
    ekv_timeline_info info;
} simulated;

typedef struct sim_state {
    cli_state *cli;
    cli_workload workload;
    cli_timeline trace;
    cli_text gantt;
} sim_state;

const char *cli_tail_name(ekv_tail_cause cause)
{
    switch (cause) {
    case EKV_TAIL_NONE: break;
    case EKV_TAIL_LONG_TILE: return "long tile";
    case EKV_TAIL_SPLIT_WAVE: return "split-made wave";
    case EKV_TAIL_WHOLE_WAVE: return "whole-tile wave";
    case EKV_TAIL_UNEVEN: return "uneven ranges";
    }
    return "";
}

/* ---- Text -------------------------------------------------------------------------------------------- */

static void print_head(cli_text *text)
{
    cli_print(text, "%-27s %-8s %7s %10s %8s %8s %8s %9s  %s\n", "planner", "dispatch", "tiles", "time us", "SM busy",
              "tail us", "GB/s", "imbalance", "tail");
}

static void print_row(cli_text *text, const simulated *s)
{
    cli_print(text, "%-27s %-8s %7" PRId64 " %10.2f %7.1f%% %8.2f %8.1f %9.3f  %s\n", s->plan->planner->name,
              cli_dispatch_name(s->plan->dispatch), s->info.num_tiles, s->info.time_us, 100 * s->info.sm_busy_share,
              s->info.tail_us, s->info.kv_gb_per_s, s->info.imbalance,
              s->info.tail_cause ? cli_tail_name(s->info.tail_cause) : "-");
}

/* What the SMs wait for, in words. */
static void print_cause(cli_text *text, const simulated *s)
{
    if (s->info.tail_cause == EKV_TAIL_NONE)
        return;
    const ekv_plan *plan = s->plan;
    const ekv_tile *tile = &plan->tiles[s->info.tail_tile];
    const int64_t slots = (int64_t)s->info.num_sms * s->info.slots_per_sm;
    char what[160];
    snprintf(what, sizeof what, "%s: for %.1f us SMs wait for tile %" PRId64 " (request %d, split %d of %d, %d tokens)",
             plan->planner->name, s->info.tail_us, s->info.tail_tile, tile->request, tile->split,
             plan->num_splits[tile->request], tile->kv_end - tile->kv_begin);
    switch (s->info.tail_cause) {
    case EKV_TAIL_NONE: break;
    case EKV_TAIL_LONG_TILE:
        cli_wrapf(text, 2, "%s.  Long tile: it alone takes longer than a slot's even share of all tiles.", what);
        break;
    case EKV_TAIL_SPLIT_WAVE:
        cli_wrapf(text, 2,
                  "%s.  Split-made wave: splitting made %" PRId64 " tiles for %" PRId64
                  " slots, %.2f waves, of which the last is not full.",
                  what, plan->num_tiles, slots, (double)plan->num_tiles / (double)slots);
        break;
    case EKV_TAIL_WHOLE_WAVE:
        cli_wrapf(text, 2,
                  "%s.  Whole-tile wave: %" PRId64 " tiles for %" PRId64
                  " slots are %.2f waves, of which the last is not full, and nothing was split to fill it.",
                  what, plan->num_tiles, slots, (double)plan->num_tiles / (double)slots);
        break;
    case EKV_TAIL_UNEVEN: cli_wrapf(text, 2, "%s.  Uneven ranges: its CTA was given more than others.", what); break;
    }
}

static void print_text(sim_state *sim, int64_t index, const simulated *all, int32_t count)
{
    cli_text *text = &sim->cli->out;
    cli_print(text, "%s", text->size ? "\n" : "");
    cli_print_batch(text, &sim->workload, index);
    cli_print_device(text, &sim->workload.device);
    print_head(text);
    for (int32_t i = 0; i < count; i++)
        print_row(text, &all[i]);
    for (int32_t i = 0; i < count; i++)
        print_cause(text, &all[i]);
    if (count && all[0].info.projected)
        cli_wrapf(text, 2,
                  "Projected: constants of %s were not measured on such a device (`evenkv devices --device %s`).",
                  sim->workload.device.name, sim->cli->options.device);
}

/* ---- JSON -------------------------------------------------------------------------------------------- */

static void print_json(sim_state *sim, int64_t index, const simulated *s)
{
    const ekv_timeline_info *info = &s->info;
    const ekv_batch *batch = &s->plan->batch;
    cJSON *object = json_object();
    json_string(object, "planner", s->plan->planner->name);
    json_string(object, "system", info->system);
    json_string(object, "device", sim->workload.device.name);
    json_bool(object, "projected", info->projected);
    json_int(object, "batch", batch->batch_size);
    json_int(object, "total_tokens", sim->workload.lengths->batches[index].total_tokens);
    json_shape(object, batch);
    json_string(object, "dispatch", cli_dispatch_name(s->plan->dispatch));
    json_int(object, "num_sms", info->num_sms);
    json_int(object, "slots_per_sm", info->slots_per_sm);
    json_int(object, "num_ctas", info->num_ctas);
    json_int(object, "num_tiles", info->num_tiles);
    json_real(object, "time_us", info->time_us);
    json_real(object, "launch_us", info->launch_us);
    json_real(object, "merge_us", info->merge_us);
    json_real(object, "sm_busy_share", info->sm_busy_share);
    json_real(object, "tail_us", info->tail_us);
    json_int_or_null(object, "tail_tile", info->tail_tile, info->tail_tile < 0);
    json_int_or_null(object, "tail_request", info->tail_tile < 0 ? 0 : s->plan->tiles[info->tail_tile].request,
                     info->tail_tile < 0);
    json_string(object, "tail_cause", info->tail_cause ? cli_tail_name(info->tail_cause) : NULL);
    json_real(object, "kv_gb_per_s", info->kv_gb_per_s);
    json_real(object, "imbalance", info->imbalance);
    json_int(object, "kv_bytes", info->kv_bytes);
    json_int(object, "q_bytes", info->q_bytes);
    json_int(object, "o_bytes", info->o_bytes);
    json_int(object, "partial_bytes", info->partial_bytes);
    json_int(object, "table_bytes", info->table_bytes);
    json_print(&sim->cli->out, object);
}

/* ---- Files ------------------------------------------------------------------------------------------- */

/* At most 2^62, which is 146 years. */
static int64_t nanoseconds(double us)
{
    return us * 1e3 < 0x1p62 ? llround(us * 1e3) : INT64_C(1) << 62;
}

/* A simulated execution as a GPU's clock would have recorded it. */
static void add_trace(sim_state *sim, int64_t index, const simulated *s)
{
    const ekv_plan *plan = s->plan;
    ekv_cuda_timeline recorded = { .num_tiles = plan->num_tiles, .heads = plan->heads };
    recorded.stamps = cli_alloc((size_t)ekv_max(plan->num_tiles, 1) * sizeof *recorded.stamps);
    for (int64_t i = 0; i < s->info.num_events; i++) {
        ekv_timeline_event event;
        if (ekv_timeline_event_get(s->timeline, i, &event))
            continue;
        recorded.stamps[event.tile] = (ekv_stamp){ .start_ns = nanoseconds(event.start_us),
                                                   .stop_ns = nanoseconds(event.stop_us),
                                                   .index = (int32_t)event.tile,
                                                   .sm = event.sm,
                                                   .cta = event.sm + event.slot * s->info.num_sms,
                                                   .kind = 1 };
    }
    cli_timeline_add(&sim->trace, plan, index, &recorded);
    free(recorded.stamps);
}

/* ---- The command ------------------------------------------------------------------------------------- */

static ekv_status simulate_planner(sim_state *sim, const ekv_batch *batch, const char *planner, simulated *s)
{
    cli_state *cli = sim->cli;
    ekv_sim_options options = EKV_SIM_OPTIONS_INIT;
    options.system = cli->options.system;
    options.events = 1;
    ekv_status status =
        ekv_plan_create(cli->context, planner, batch, &sim->workload.device, &cli->options.plan, &s->plan);
    if (status)
        return cli_plan_status(cli, status);
    s->info = (ekv_timeline_info)EKV_TIMELINE_INFO_INIT;
    if ((status = ekv_simulate(s->plan, NULL, &options, &s->timeline)))
        return status;
    return ekv_timeline_info_get(s->timeline, &s->info);
}

static void draw(sim_state *sim, int64_t index, const simulated *all, int32_t count)
{
    const cli_options *options = &sim->cli->options;
    cli_sim_view views[CLI_MAX_PLANNERS];
    for (int32_t i = 0; i < count; i++) {
        views[i] =
            (cli_sim_view){ all[i].plan, all[i].timeline, all[i].info, cli_longest_request(&all[i].plan->batch) };
        if (options->timeline)
            add_trace(sim, index, &all[i]);
    }
    if (!options->json && !options->no_picture && count)
        cli_sim_picture(&sim->cli->out, views, count);
    if (options->gantt && count)
        cli_sim_gantt(&sim->gantt, views, count);
}

static ekv_status simulate_batch(sim_state *sim, int64_t index)
{
    const ekv_batch batch = cli_workload_batch(&sim->workload, index);
    simulated all[CLI_MAX_PLANNERS] = { 0 };
    int32_t count = 0;
    ekv_status status = EKV_OK;
    for (int32_t p = 0; p < sim->workload.num_planners && !status; p++) {
        const char *planner = sim->workload.planners[p];
        simulated *s = &all[count];
        if (!(status = simulate_planner(sim, &batch, planner, s)))
            count++;
        else if (cli_skip_planner(&sim->workload, planner, status)) {
            ekv_plan_free(s->plan);
            *s = (simulated){ 0 };
            status = EKV_OK;
        }
    }
    if (!status && !count)
        status = ekv_fail(EKV_ERROR_UNSUPPORTED, "no planner can be simulated on %s: %s", sim->workload.device.name,
                          ekv_last_error());
    if (!status && sim->cli->options.json)
        for (int32_t i = 0; i < count; i++)
            print_json(sim, index, &all[i]);
    else if (!status)
        print_text(sim, index, all, count);
    if (!status)
        draw(sim, index, all, count);
    for (int32_t i = 0; i <= count && i < CLI_MAX_PLANNERS; i++) {
        ekv_timeline_free(all[i].timeline);
        ekv_plan_free(all[i].plan);
    }
    return status;
}

static ekv_status simulate_run(cli_state *cli)
{
    sim_state sim = { .cli = cli };
    ekv_status status = cli_workload_read(cli, "h200", &sim.workload);
    const int64_t count = status ? 0 : sim.workload.lengths->count;
    if (!status && cli->options.gantt && count > 1)
        status =
            cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "--gantt draws one batch; there are %" PRId64, count));
    for (int64_t i = 0; i < count && !status; i++)
        status = simulate_batch(&sim, i);
    if (!status && cli->options.timeline) {
        cli_text text = { 0 };
        cli_timeline_write(&sim.trace, &text);
        cli_write_later(cli, cli->options.timeline, &text);
    }
    if (!status && cli->options.gantt)
        cli_write_later(cli, cli->options.gantt, &sim.gantt);
    cli_timeline_free(&sim.trace);
    free(sim.gantt.data);
    cli_workload_free(&sim.workload);
    return status;
}

const cli_command cli_command_simulate = {
    .name = "simulate",
    .summary = "predict what plans of a batch take on a device, and see why",
    .details =
        "Plans a decode batch with one planner or several, simulates each plan on a device model, and prints the "
        "time, how busy the SMs are, the tail (from the first SM without a tile until the last tile ends) with "
        "its cause, and a picture of the SMs over time; two planners stand side by side.\n"
        "Times of devices on which nobody measured are marked as projected.\n",
    .groups = CLI_BATCH | CLI_PLANNERS | CLI_PLANNING | CLI_DEVICE | CLI_SYSTEM | CLI_SIMULATE | CLI_JSON | CLI_OUTPUT,
    .planners = "fa3,even",
    .run = simulate_run,
};
