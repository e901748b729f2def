/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_sim.h"

#include "base/half.h"
#include "base/number.h"
#include "base/status.h"
#include "panels.h"
#include "plan/plan.h"
#include "sim/timeline.h"
#include "sim_view.h"
#include "systems.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const char bench_commit[]; /* cmake/commit.cmake */

typedef struct sweep {
    cli_state *cli;
    cli_workload workload; /* lengths: of the trace, if there is one */
    bench_cells list;
    bench_sim_rows rows;
    ekv_timeline timeline;
} sweep;

/* ---- Presets ----------------------------------------------------------------------------------------- */

static void set_default(const char **option, const char *value)
{
    if (!*option)
        *option = value;
}

/* What the preset sets and no option does. */
static ekv_status apply_preset(cli_state *cli)
{
    cli_options *options = &cli->options;
    const bool own_lengths = options->kv_lens || options->trace;
    if (options->preset == CLI_PRESET_IMBALANCE)
        set_default(&options->planner, "flashinfer-cuda-core,flashinfer-tensor-core,fa3-nosplit,fa3,even");
    if (options->preset == CLI_PRESET_LINEARITY)
        set_default(&options->planner, "flashinfer-cuda-core,flashinfer-tensor-core,flashinfer-batch-attention,"
                                       "fa3-nosplit,fa3,even");
    if (options->preset && !own_lengths) {
        const bool linear = options->preset == CLI_PRESET_LINEARITY;
        set_default(&options->dists, "uniform,skew40,skew60,skew80,2x40");
        set_default(&options->batches, linear ? "4,16,32,64,128,256,512,1024"
                                              : "4,8,16,18,20,24,28,32,34,36,40,44,48,64,66,80,96,128,192,256,297,384,"
                                                "512,768,992,1024,2048");
        set_default(&options->token_list, linear ? "65536,131072,262144,524288,1048576,2097152" : "524288");
    }
    if (options->trace && options->preset != CLI_PRESET_LINEARITY)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "--trace goes with --preset linearity only"));
    if (options->trace && (options->dists || options->batches || options->token_list || options->kv_lens))
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s does not go with --trace",
                                       options->dists     ? "--dists"
                                       : options->batches ? "--batches"
                                       : options->kv_lens ? "--kv-lens"
                                                          : "--tokens"));
    if (options->trace && !options->sample)
        options->sample = 200;
    return EKV_OK;
}

/* ---- Rows -------------------------------------------------------------------------------------------- */

/* A plain read of as many bytes as K, V, Q and O have, at the device's measured rate. */
static double read_us(const sweep *s, const ekv_batch *batch, int64_t tokens)
{
    const int64_t qo = (int64_t)2 * batch->batch_size * batch->q_heads * batch->head_dim * batch->q_len *
                       ekv_dtype_size(batch->q_dtype);
    const double bytes = (double)(cli_kv_bytes_per_token(batch) * tokens + qo);
    return s->workload.device.read_gb_per_s > 0 ? bytes / s->workload.device.read_gb_per_s / 1e3 : 0;
}

static bench_sim_row *add_row(bench_sim_rows *rows)
{
    if (rows->count == rows->capacity) {
        rows->capacity = 2 * rows->capacity + 64;
        rows->rows = cli_realloc(rows->rows, (size_t)rows->capacity * sizeof *rows->rows);
    }
    return &rows->rows[rows->count++];
}

/* A planner that cannot take the batch is left out of it. */
static ekv_status simulate(sweep *s, const char *planner, const char *dist, const ekv_batch *batch, int64_t tokens)
{
    cli_state *cli = s->cli;
    ekv_plan *plan = NULL;
    ekv_status status = ekv_plan_create(cli->context, planner, batch, &s->workload.device, &cli->options.plan, &plan);
    if (!status)
        status = ekv_timeline_run(&s->timeline, plan, &s->workload.device, cli->options.system, false);
    if (!status) {
        ekv_plan_info info = EKV_PLAN_INFO_INIT;
        status = ekv_plan_info_get(plan, &info);
        const cli_threshold threshold = cli_threshold_of(plan);
        bench_sim_row *row = add_row(&s->rows);
        *row = (bench_sim_row){ .planner = planner,
                                .batch = batch->batch_size,
                                .total_tokens = tokens,
                                .dispatch = plan->dispatch,
                                .info = s->timeline.info,
                                .read_us = read_us(s, batch, tokens),
                                .threshold = threshold.batch > 0 ? threshold.batch + !threshold.inclusive : 0 };
        row->info.imbalance = info.imbalance;
        snprintf(row->dist, sizeof row->dist, "%s", dist);
    }
    ekv_plan_free(plan);
    if (status != EKV_ERROR_UNSUPPORTED && status != EKV_ERROR_OVERFLOW)
        return status ? cli_plan_status(cli, status) : EKV_OK;
    cli_progress(NULL);
    fprintf(stderr, "evenkv: %s, batch %d: %s left out: %s (%s)\n", dist, batch->batch_size, planner, ekv_last_error(),
            ekv_status_name(status));
    return EKV_OK;
}

static void show_progress(int64_t done, int64_t all, const char *planner)
{
    enum { WIDTH = 40 };
    char bar[WIDTH + 1], text[128];
    for (int i = 0; i < WIDTH; i++)
        bar[i] = done * WIDTH / all > i ? '#' : '.';
    bar[WIDTH] = 0;
    snprintf(text, sizeof text, "[%s] %" PRId64 " of %" PRId64 ", %s", bar, done, all, planner);
    cli_progress(text);
}

static ekv_status simulate_all(sweep *s)
{
    const cli_workload *workload = &s->workload;
    const int64_t batches = workload->lengths ? workload->lengths->count : s->list.num_cells;
    const int64_t all = batches * workload->num_planners;
    for (int32_t p = 0; p < workload->num_planners; p++)
        for (int64_t i = 0; i < batches; i++) {
            const ekv_lengths *lengths = workload->lengths ? &workload->lengths->batches[i] : s->list.cells[i].lengths;
            ekv_batch batch = workload->shape;
            batch.batch_size = lengths->batch_size;
            batch.kv_len = lengths->kv_len;
            show_progress(p * batches + i, all, workload->planners[p]);
            ekv_status status = simulate(s, workload->planners[p], workload->lengths ? "trace" : s->list.cells[i].dist,
                                         &batch, lengths->total_tokens);
            if (status)
                return status;
        }
    cli_progress(NULL);
    return s->rows.count ? EKV_OK : ekv_fail(EKV_ERROR_UNSUPPORTED, "no planner takes a batch of the sweep");
}

/* ---- Forms ------------------------------------------------------------------------------------------- */

/* The columns of measured rows (bench_rows.c); empty: what a simulation does not have. */
static void print_csv(const sweep *s, cli_text *text)
{
    const ekv_batch *shape = &s->workload.shape;
    bench_print_csv_head(text);
    for (int64_t i = 0; i < s->rows.count; i++) {
        const bench_sim_row *row = &s->rows.rows[i];
        const bool made = !s->workload.lengths && strncmp(row->dist, "file", 4) != 0;
        char share[24] = "";
        if (row->read_us > 0)
            snprintf(share, sizeof share, "%.4f", row->read_us / row->info.time_us);
        cli_print(text, "%s,%s,%d,%" PRId64 ",%d,%d,%d,%d,%s,%.2f,%.2f,%.2f,%.2f,%s,,,sim,%s,%s,%s,%s,model,%s,%s,%s\n",
                  row->planner, row->dist, row->batch, row->total_tokens, shape->page_size, shape->q_heads,
                  shape->kv_heads, shape->head_dim, cli_dtype_name(shape->kv_dtype), row->info.time_us,
                  row->info.time_us, row->info.time_us, row->info.kv_gb_per_s, share, row->info.system,
                  cli_dispatch_name(row->dispatch), made ? cli_hot_name((ekv_hot)s->cli->options.hot) : "na",
                  shape->layout == EKV_LAYOUT_HND ? "hnd" : "nhd", s->workload.device.name,
                  row->info.projected ? "projected" : "sim", bench_commit);
    }
}

static void print_json(const sweep *s, const bench_sim_row *row)
{
    const ekv_batch *shape = &s->workload.shape;
    cJSON *object = json_object();
    json_string(object, "planner", row->planner);
    json_string(object, "dist", row->dist);
    json_int(object, "batch", row->batch);
    json_int(object, "total_tokens", row->total_tokens);
    json_int(object, "page_size", shape->page_size);
    json_int(object, "q_heads", shape->q_heads);
    json_int(object, "kv_heads", shape->kv_heads);
    json_int(object, "head_dim", shape->head_dim);
    json_string(object, "dtype", cli_dtype_name(shape->kv_dtype));
    json_real(object, "median_us", row->info.time_us);
    json_real(object, "kv_gb_per_s", row->info.kv_gb_per_s);
    json_real_or_null(object, "share_of_read", row->read_us / row->info.time_us, row->read_us <= 0);
    json_string(object, "backend", "sim");
    json_string(object, "kernel", row->info.system);
    json_string(object, "dispatch", cli_dispatch_name(row->dispatch));
    json_string(object, "device", s->workload.device.name);
    json_bool(object, "projected", row->info.projected);
    json_int(object, "num_tiles", row->info.num_tiles);
    json_real(object, "sm_busy_share", row->info.sm_busy_share);
    json_real(object, "tail_us", row->info.tail_us);
    json_string(object, "tail_cause", row->info.tail_cause ? cli_tail_name(row->info.tail_cause) : NULL);
    json_real(object, "imbalance", row->info.imbalance);
    json_int_or_null(object, "threshold", row->threshold, !row->threshold);
    json_print(&s->cli->out, object);
}

static void print_table(const sweep *s)
{
    cli_text *text = &s->cli->out;
    cli_print(text, "simulated on %s%s, %d/%d heads of %d, %s, page size %d\n", s->workload.device.name,
              s->workload.device.projected ? " (projected)" : "", s->workload.shape.q_heads, s->workload.shape.kv_heads,
              s->workload.shape.head_dim, cli_dtype_name(s->workload.shape.kv_dtype), s->workload.shape.page_size);
    cli_print(text, "%-27s %-10s %6s %9s %8s %11s %9s %8s %9s %9s  %s\n", "planner", "dist", "batch", "tokens", "tiles",
              "time us", "GB/s", "SM busy", "tail us", "imbalance", "tail");
    for (int64_t i = 0; i < s->rows.count; i++) {
        const bench_sim_row *row = &s->rows.rows[i];
        cli_print(text, "%-27s %-10s %6d %9" PRId64 " %8" PRId64 " %11.2f %9.1f %7.1f%% %9.2f %9.3f  %s\n",
                  row->planner, row->dist, row->batch, row->total_tokens, row->info.num_tiles, row->info.time_us,
                  row->info.kv_gb_per_s, 100 * row->info.sm_busy_share, row->info.tail_us, row->info.imbalance,
                  row->info.tail_cause ? cli_tail_name(row->info.tail_cause) : "-");
    }
}

/* Time against batch size, a panel a planner, a line a distribution (and number of tokens, where there are several),
 * thresholds marked. */
static ekv_status plot_sweep(const sweep *s, const char *path)
{
    char note[160];
    cli_panels panels = { .x_label = "requests", .y_label = "time, us", .note = note };
    snprintf(note, sizeof note, "simulated on %s%s; %d/%d heads of %d, %s, page size %d", s->workload.device.name,
             s->workload.device.projected ? " (projected)" : "", s->workload.shape.q_heads, s->workload.shape.kv_heads,
             s->workload.shape.head_dim, cli_dtype_name(s->workload.shape.kv_dtype), s->workload.shape.page_size);
    bool several = false;
    for (int64_t i = 0; i < s->rows.count; i++)
        several = several || s->rows.rows[i].total_tokens != s->rows.rows[0].total_tokens;
    const char *planner = NULL;
    for (int64_t i = 0; i < s->rows.count; i++) {
        const bench_sim_row *row = &s->rows.rows[i];
        const bool file = !strncmp(row->dist, "file", 4);
        char series[64];
        if (several && !file)
            snprintf(series, sizeof series, "%s/%" PRId64, row->dist, row->total_tokens);
        else
            snprintf(series, sizeof series, "%s", file ? "file" : row->dist);
        cli_panels_add(&panels, row->planner, series, row->batch, row->info.time_us);
        if (row->planner != planner && row->threshold) {
            char label[64];
            snprintf(label, sizeof label, "no_split_from_%" PRId64, row->threshold);
            cli_panels_mark(&panels, row->planner, (double)row->threshold, label);
        }
        planner = row->planner;
    }
    ekv_status status = cli_panels_plot(&panels, path);
    cli_panels_free(&panels);
    return status;
}

/* ---- The sweep --------------------------------------------------------------------------------------- */

static ekv_status read_options(sweep *s)
{
    cli_state *cli = s->cli;
    const char *measured = cli_options_given(&cli->options, CLI_EXECUTION);
    ekv_status status;
    if (measured && strcmp(measured, "--layout") != 0)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s does not go with a simulation", measured));
    if ((cli->options.plot && (status = cli_usage(cli, bench_check_plot(cli->options.plot)))) ||
        (status = apply_preset(cli)) || (status = cli_shape_read(cli, &s->workload.shape)) ||
        (status = cli_planners_read(cli, &s->workload)) || (status = cli_device_read(cli, "h200", &s->workload.device)))
        return status;
    status = cli->options.trace ? cli_trace_read(cli, &s->workload.lengths) : bench_cells_list(cli, &s->list);
    if (status)
        return status;
    if (cli->options.plot && (status = bench_try_plot(cli->options.plot)))
        return status;
    return EKV_OK;
}

static void write_csv(sweep *s)
{
    cli_text text = { 0 };
    if (!s->cli->options.csv)
        return;
    print_csv(s, &text);
    cli_write_later(s->cli, s->cli->options.csv, &text);
}

static ekv_status run(sweep *s)
{
    const cli_options *options = &s->cli->options;
    ekv_status status;
    s->rows = (bench_sim_rows){ .cli = s->cli, .device = &s->workload.device, .shape = &s->workload.shape };
    if ((status = read_options(s)) || (status = simulate_all(s)))
        return status;
    write_csv(s);
    const bool linear = options->preset == CLI_PRESET_LINEARITY;
    for (int64_t i = 0; options->json && i < s->rows.count; i++)
        print_json(s, &s->rows.rows[i]);
    if (linear)
        bench_linear_print(&s->rows);
    else if (!options->json)
        print_table(s);
    if (!options->plot)
        return EKV_OK;
    return linear ? bench_linear_plot(&s->rows, options->plot) : plot_sweep(s, options->plot);
}

ekv_status bench_sim_run(cli_state *cli)
{
    sweep s = { .cli = cli, .timeline.context = cli->context };
    ekv_status status = run(&s);
    ekv_timeline_clear(&s.timeline);
    free(s.rows.rows);
    bench_cells_free(&s.list);
    cli_workload_free(&s.workload);
    return status;
}
