/* SPDX-License-Identifier: Apache-2.0
 * evenkv replay: what a request trace costs on simulated servers under each planner. */
#include "base/context.h"
#include "base/number.h"
#include "base/status.h"
#include "bench.h"
#include "json.h"
#include "models.h"
#include "panels.h"
#include "replay_run.h"

#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Where nobody measured a plain read, its rate is this share of the nominal one, as on the H200 (4,160 of 4,800). */
static const double read_share = 4160.0 / 4800.0;

typedef struct replay_state {
    cli_state *cli;
    cli_workload workload; /* device, shape, planners */
    replay_server server;
    const char *model;
    double weights_gb, kv_memory_gb; /* of a rank */
    bool derived_base;
    replay_result results[CLI_MAX_PLANNERS];
    atomic_int next, done;
} replay_state;

/* ---- The server -------------------------------------------------------------------------------------- */

static ekv_status set_memory(replay_state *r)
{
    cli_state *cli = r->cli;
    const ekv_device *device = &r->workload.device;
    const double token_bytes = (double)cli_kv_bytes_per_token(&r->workload.shape) * r->server.layers;
    r->kv_memory_gb = cli->options.kv_memory_gb;
    if (r->kv_memory_gb <= 0) { /* not given */
        if (!device->memory_bytes)
            return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                                           "nobody knows the memory of device %s; give --kv-memory", device->name));
        r->kv_memory_gb = (double)device->memory_bytes / 1e9 - r->weights_gb;
        if (r->kv_memory_gb <= 0)
            return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                                           "%.1f GB of weights on each of %d ranks leave no room in the %.1f GB of "
                                           "device %s; raise --tp",
                                           r->weights_gb, cli->options.tp, (double)device->memory_bytes / 1e9,
                                           device->name));
    }
    r->server.token_budget = (int64_t)ekv_max((int64_t)(r->kv_memory_gb * 1e9 / token_bytes), 1);
    if (cli->options.token_budget)
        r->server.token_budget = ekv_min(r->server.token_budget, cli->options.token_budget);
    return EKV_OK;
}

static ekv_status set_step_base(replay_state *r)
{
    const ekv_device *device = &r->workload.device;
    r->server.step_base_us = r->cli->options.step_base_us;
    r->derived_base = r->server.step_base_us <= 0;
    if (!r->derived_base)
        return EKV_OK;
    const double rate = device->read_gb_per_s > 0 ? device->read_gb_per_s : read_share * device->read_gb_per_s_nominal;
    if (rate <= 0)
        return cli_usage(r->cli,
                         ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                                  "nobody knows the read rate of device %s; give --step-base-us", device->name));
    r->server.step_base_us = r->weights_gb / rate * 1e6;
    return EKV_OK;
}

static ekv_status read_server(replay_state *r)
{
    cli_state *cli = r->cli;
    const cli_options *options = &cli->options;
    ekv_status status;
    if (!options->trace)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "replay needs --trace FILE"));
    if (options->sample)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "--sample does not go with replay, which takes the "
                                                                   "whole trace"));
    if ((options->plot && (status = cli_usage(cli, bench_check_plot(options->plot)))) ||
        (status = cli_shape_read(cli, &r->workload.shape)) || (status = cli_planners_read(cli, &r->workload)) ||
        (status = cli_device_read(cli, "h200", &r->workload.device)))
        return status;
    r->model = options->model ? options->model : "qwen3-30b-a3b";
    const cli_model *model = cli_model_find(r->model);
    const double weights_gb = options->weights_gb ? options->weights_gb : 2 * model->parameters;
    r->weights_gb = weights_gb / options->tp;
    r->server = (replay_server){ .device = r->workload.device,
                                 .shape = r->workload.shape,
                                 .layers = options->layers ? options->layers : model->layers,
                                 .replicas = options->replicas,
                                 .fixed_step = options->fixed_step };
    if ((status = set_memory(r)) || (status = set_step_base(r)))
        return status;
    return options->plot ? bench_try_plot(options->plot) : EKV_OK;
}

/* ---- Running ----------------------------------------------------------------------------------------- */

static void show_progress(int32_t done, int32_t all)
{
    char text[80];
    snprintf(text, sizeof text, "%d of %d planners replayed", done, all);
    cli_progress(text);
}

/* Planners are dealt to the context's threads. */
static void work(void *argument, int32_t thread)
{
    replay_state *r = argument;
    for (;;) {
        const int32_t i = atomic_fetch_add(&r->next, 1);
        if (i >= r->workload.num_planners)
            return;
        replay_run(r->cli, &r->server, &r->results[i]);
        const int32_t done = atomic_fetch_add(&r->done, 1) + 1;
        if (thread == 0)
            show_progress(done, r->workload.num_planners);
    }
}

/* A planner that cannot take the trace is left out where --planners is all, else an error. */
static ekv_status check_results(replay_state *r)
{
    int32_t good = 0;
    for (int32_t i = 0; i < r->workload.num_planners; i++) {
        const replay_result *result = &r->results[i];
        good += !result->status;
        if (!result->status)
            continue;
        const ekv_status status = ekv_fail(result->status, "%s: %s", result->planner, result->error);
        if (!cli_skip_planner(&r->workload, result->planner, status))
            return status;
    }
    return good ? EKV_OK : ekv_fail(EKV_ERROR_UNSUPPORTED, "no planner can replay this trace: %s", ekv_last_error());
}

/* ---- Text -------------------------------------------------------------------------------------------- */

static void print_server(const replay_state *r)
{
    cli_text *text = &r->cli->out;
    const cli_options *options = &r->cli->options;
    cli_print(text, "trace %s, arrivals x%g, %d server%s of %d %s%s%s\n", options->trace, options->speedup,
              r->server.replicas, r->server.replicas > 1 ? "s" : "", options->tp, r->workload.device.name,
              options->tp > 1 ? "s" : "", r->workload.device.projected ? " (projected)" : "");
    cli_print(text,
              "model %s, %d layers, %d/%d heads of %d on a rank, %.1f GB of weights and room for %" PRId64
              " KV tokens (%.1f GB)\n",
              r->model, r->server.layers, r->server.shape.q_heads, r->server.shape.kv_heads, r->server.shape.head_dim,
              r->weights_gb, r->server.token_budget, r->kv_memory_gb);
    if (r->server.fixed_step)
        cli_print(text, "a step takes %g ms, whatever attention takes\n", options->step_ms);
    else
        cli_print(text, "a step takes %.0f us%s + %d x attention\n", r->server.step_base_us,
                  r->derived_base ? " (the rank's weights read once)" : "", r->server.layers);
    cli_wrap(text, 0, "Prefill, communication between ranks and the rest of a step are not modelled.");
}

static void print_text(const replay_state *r)
{
    cli_text *text = &r->cli->out;
    print_server(r);
    cli_print(text, "\n%-27s | %-53s | batch\n", "", "attention of a step, all layers, us");
    cli_print(text, "%-27s | %9s %8s %8s %8s %8s %7s | %8s %6s %6s %7s\n", "planner", "total s", "mean", "p50", "p95",
              "p99", "max", "steps", "mean", "max", "past %");
    for (int32_t i = 0; i < r->workload.num_planners; i++) {
        const replay_result *p = &r->results[i];
        if (!p->status)
            cli_print(text, "%-27s | %9.2f %8.0f %8.0f %8.0f %8.0f %7.0f | %8" PRId64 " %6.1f %6d %7.1f\n", p->planner,
                      p->attention.sum / 1e6, replay_mean(&p->attention), replay_quantile(&p->attention, 0.5),
                      replay_quantile(&p->attention, 0.95), replay_quantile(&p->attention, 0.99), p->attention.largest,
                      p->steps, p->mean_batch, p->largest_batch,
                      p->steps ? 100.0 * (double)p->past_threshold / (double)p->steps : 0);
    }
    cli_print(text, "\n%-27s %12s %12s %12s %12s %11s %10s\n", "planner", "TPOT p50 ms", "TPOT p99 ms", "tokens/s",
              "attention %", "seconds", "requests");
    for (int32_t i = 0; i < r->workload.num_planners; i++) {
        const replay_result *p = &r->results[i];
        if (!p->status)
            cli_print(text, "%-27s %12.2f %12.2f %12.0f %12.1f %11.1f %10" PRId64 "\n", p->planner,
                      replay_quantile(&p->token_time, 0.5) / 1e3, replay_quantile(&p->token_time, 0.99) / 1e3,
                      p->seconds > 0 ? p->tokens / p->seconds : 0,
                      p->busy_us > 0 ? 100 * p->attention.sum / p->busy_us : 0, p->seconds, p->finished);
    }
    cli_print(text, "\n");
    cli_wrap(text, 0,
             "past: share of steps whose batch is past the planner's threshold (`evenkv explain`).  TPOT: time per "
             "output token of a request.  tokens/s: over all servers, until the last is done.");
    if (r->workload.device.projected)
        cli_wrapf(text, 0, "Projected: constants of %s were not measured on such a device.", r->workload.device.name);
}

/* ---- JSON -------------------------------------------------------------------------------------------- */

static void print_json_planner(cJSON *planners, const replay_result *p)
{
    cJSON *object = json_add_object(planners, p->planner);
    json_bool(object, "projected", p->projected);
    json_int(object, "steps", p->steps);
    json_real(object, "total_s", p->attention.sum / 1e6);
    json_real(object, "mean_us", replay_mean(&p->attention));
    json_real(object, "p50_us", replay_quantile(&p->attention, 0.5));
    json_real(object, "p95_us", replay_quantile(&p->attention, 0.95));
    json_real(object, "p99_us", replay_quantile(&p->attention, 0.99));
    json_real(object, "max_us", p->attention.largest);
    json_real(object, "past_threshold_share", p->steps ? (double)p->past_threshold / (double)p->steps : 0);
    json_real(object, "mean_batch", p->mean_batch);
    json_int(object, "max_batch", p->largest_batch);
    json_real(object, "tpot_p50_us", replay_quantile(&p->token_time, 0.5));
    json_real(object, "tpot_p99_us", replay_quantile(&p->token_time, 0.99));
    json_real(object, "tokens_per_s", p->seconds > 0 ? p->tokens / p->seconds : 0);
    json_real(object, "attention_share", p->busy_us > 0 ? p->attention.sum / p->busy_us : 0);
    json_real(object, "seconds", p->seconds);
    json_int(object, "finished", p->finished);
    json_int(object, "skipped", p->skipped);
    cJSON *worst = json_add_object(object, "worst");
    json_int(worst, "step", p->worst_step);
    json_int(worst, "replica", p->worst_replica);
    json_ints(worst, "kv_len", p->worst_kv_len, p->worst_batch);
}

static void print_json(const replay_state *r)
{
    const cli_options *options = &r->cli->options;
    cJSON *object = json_object();
    json_string(object, "trace", options->trace);
    json_string(object, "device", r->workload.device.name);
    json_bool(object, "projected", r->workload.device.projected);
    json_string(object, "model", r->model);
    json_int(object, "layers", r->server.layers);
    json_int(object, "tp", options->tp);
    json_int(object, "replicas", r->server.replicas);
    json_real(object, "speedup", options->speedup);
    json_int(object, "token_budget", r->server.token_budget);
    json_real_or_null(object, "step_base_us", r->server.step_base_us, r->server.fixed_step);
    json_real_or_null(object, "fixed_step_us", options->step_ms * 1e3, !r->server.fixed_step);
    json_string(object, "not_modelled", "prefill, communication, the rest of a step beside its base");
    int64_t steps = 0;
    for (int32_t i = 0; i < r->workload.num_planners; i++)
        steps = ekv_max(steps, r->results[i].steps);
    json_int(object, "steps", steps);
    cJSON *planners = json_add_object(object, "planners");
    for (int32_t i = 0; i < r->workload.num_planners; i++)
        if (!r->results[i].status)
            print_json_planner(planners, &r->results[i]);
    json_print(&r->cli->out, object);
}

/* ---- Files ------------------------------------------------------------------------------------------- */

static void write_worst(const replay_state *r, const char *path)
{
    cli_text text = { 0 };
    for (int32_t i = 0; i < r->workload.num_planners; i++) {
        const replay_result *p = &r->results[i];
        if (p->status || !p->worst_batch)
            continue;
        cli_print(&text, "# %s: step %" PRId64 " of replica %d, %.1f us of attention in %d layers\n", p->planner,
                  p->worst_step, p->worst_replica, p->attention.largest, r->server.layers);
        for (int32_t b = 0; b < p->worst_batch; b++)
            cli_print(&text, "%s%d", b ? "," : "", p->worst_kv_len[b]);
        cli_print(&text, "\n");
    }
    cli_write_later(r->cli, path, &text);
}

static void add_curve(cli_panels *panels, const char *panel, const char *planner, const replay_values *values)
{
    for (int percent = 5; percent < 100 && values->count > 0; percent += 5)
        cli_panels_add(panels, panel, planner, percent, replay_quantile(values, percent / 100.0) / 1e3);
    if (values->count > 0)
        cli_panels_add(panels, panel, planner, 99, replay_quantile(values, 0.99) / 1e3);
    if (values->count > 0)
        cli_panels_add(panels, panel, planner, 100, values->largest / 1e3);
}

static ekv_status plot(const replay_state *r, const char *path)
{
    char note[200];
    cli_panels panels = { .x_label = "percentile", .y_label = "ms", .note = note, .linear_x = true };
    snprintf(note, sizeof note, "simulated on %d x %d %s%s; %s, %d/%d heads on a rank, %d layers", r->server.replicas,
             r->cli->options.tp, r->workload.device.name, r->workload.device.projected ? " (projected)" : "", r->model,
             r->server.shape.q_heads, r->server.shape.kv_heads, r->server.layers);
    for (int32_t i = 0; i < r->workload.num_planners; i++)
        if (!r->results[i].status) {
            add_curve(&panels, "attention/step", r->results[i].planner, &r->results[i].attention);
            add_curve(&panels, "time/output-token", r->results[i].planner, &r->results[i].token_time);
        }
    ekv_status status = cli_panels_plot(&panels, path);
    cli_panels_free(&panels);
    return status;
}

/* ---- The command ------------------------------------------------------------------------------------- */

static ekv_status replay(replay_state *r)
{
    const cli_options *options = &r->cli->options;
    ekv_status status = read_server(r);
    if (status)
        return status;
    for (int32_t i = 0; i < r->workload.num_planners; i++)
        r->results[i].planner = r->workload.planners[i];
    show_progress(0, r->workload.num_planners);
    ekv_pool_run(r->cli->context->pool, work, r);
    cli_progress(NULL);
    if ((status = check_results(r)))
        return status;
    if (options->json)
        print_json(r);
    else
        print_text(r);
    if (options->worst)
        write_worst(r, options->worst);
    return options->plot ? plot(r, options->plot) : EKV_OK;
}

static ekv_status replay_run_command(cli_state *cli)
{
    replay_state r = { .cli = cli };
    ekv_status status = replay(&r);
    for (int32_t i = 0; i < CLI_MAX_PLANNERS; i++)
        replay_result_free(&r.results[i]);
    cli_workload_free(&r.workload);
    return status;
}

const cli_command cli_command_replay = {
    .name = "replay",
    .summary = "what a request trace costs on simulated servers, planner by planner",
    .details =
        "Sends a request trace through continuous batching on simulated servers, once for each planner, and prints "
        "how long attention takes in a step, the time per output token, and tokens per second.  The loop is closed: "
        "a step takes base + layers x simulated attention, so that slow attention lets the batch grow; with "
        "--fixed-step it is open.\n"
        "Prefill and communication are not modelled.  Times of devices on which nobody measured are projected.\n",
    .groups = CLI_SHAPE | CLI_TRACE | CLI_REPLAY | CLI_PLANNING | CLI_DEVICE | CLI_SYSTEM | CLI_JSON | CLI_OUTPUT,
    .planners = "flashinfer-cuda-core,flashinfer-tensor-core,flashinfer-batch-attention,fa3-nosplit,fa3,even",
    .run = replay_run_command,
};
