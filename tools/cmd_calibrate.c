/* SPDX-License-Identifier: Apache-2.0
 * evenkv calibrate: fits the constants of systems on a device to measured times, and says how well they then
 * predict. */
#include "base/context.h"
#include "base/number.h"
#include "base/status.h"
#include "bench.h"
#include "calibrate.h"
#include "measured.h"
#include "panels.h"
#include "read_probe.h"
#include "sim/calibrate.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct row_state {
    const cli_measured_row *row;
    ekv_plan *plan; /* NULL: the planner does not take the batch, or is not asked for */
    ekv_system system;
    bool fitted; /* else judged */
    double simulated_us;
} row_state;

typedef struct calibration {
    cli_state *cli;
    cli_workload workload; /* device, planners, and the lengths of --kv-lens @FILE */
    cli_measured measured;
    row_state *rows; /* [measured.num_rows] */
    int64_t num_rows;
    bool fitted[EKV_NUM_SYSTEMS];
    int64_t fitted_rows[EKV_NUM_SYSTEMS];
} calibration;

/* ---- Rows -------------------------------------------------------------------------------------------- */

static bool is_wanted(const calibration *c, const char *planner)
{
    for (int32_t i = 0; i < c->workload.num_planners; i++)
        if (!strcmp(c->workload.planners[i], planner))
            return true;
    return false;
}

static bool is_fitted(const cli_measured_row *row, cli_fit fit)
{
    switch (fit) {
    case CLI_FIT_EVEN: return row->position % 2 == 0;
    case CLI_FIT_ODD: return row->position % 2 == 1;
    case CLI_FIT_ALL: return true;
    case CLI_FIT_NONE: break;
    }
    return false;
}

static ekv_status plan_rows(calibration *c)
{
    cli_state *cli = c->cli;
    c->rows = cli_alloc((size_t)c->measured.num_rows * sizeof *c->rows);
    for (int64_t i = 0; i < c->measured.num_rows; i++) {
        const cli_measured_row *row = &c->measured.rows[i];
        if (!is_wanted(c, row->planner))
            continue;
        row_state *state = &c->rows[c->num_rows];
        *state = (row_state){ .row = row, .fitted = is_fitted(row, (cli_fit)cli->options.fit) };
        ekv_status status = ekv_plan_create(cli->context, row->planner, &row->batch, &c->workload.device,
                                            &cli->options.plan, &state->plan);
        if (status)
            return cli_plan_status(cli,
                                   ekv_fail(status, "the row of line %" PRId64 ": %s", row->line, ekv_last_error()));
        state->system = row->ours ? EKV_SYSTEM_EVENKV : ekv_sim_system_of(state->plan, &c->workload.device);
        c->num_rows++;
    }
    if (!c->num_rows)
        return cli_usage(
            cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s has no row of the planners asked for", cli->options.from));
    return EKV_OK;
}

static ekv_status fit_system(calibration *c, ekv_system system)
{
    ekv_sim_row *rows = cli_alloc((size_t)c->num_rows * sizeof *rows);
    int64_t count = 0;
    for (int64_t i = 0; i < c->num_rows; i++)
        if (c->rows[i].system == system && c->rows[i].fitted)
            rows[count++] = (ekv_sim_row){ c->rows[i].plan, c->rows[i].row->median_us };
    ekv_status status = EKV_OK;
    if (count) {
        char text[64];
        snprintf(text, sizeof text, "fitting %s to %" PRId64 " rows", ekv_system_name((int32_t)system), count);
        cli_progress(text);
        status = ekv_sim_calibrate(c->cli->context, rows, count, system, &c->workload.device);
        c->fitted[system] = true;
        c->fitted_rows[system] = count;
    }
    free(rows);
    return status;
}

static ekv_status simulate_rows(calibration *c)
{
    ekv_timeline timeline = { .context = c->cli->context };
    ekv_status status = EKV_OK;
    for (int64_t i = 0; i < c->num_rows && !status; i++) {
        row_state *row = &c->rows[i];
        status = ekv_timeline_run(&timeline, row->plan, &c->workload.device, (int32_t)row->system, false);
        row->simulated_us = timeline.info.time_us;
    }
    ekv_timeline_clear(&timeline);
    return status;
}

/* ---- Errors ------------------------------------------------------------------------------------------ */

typedef struct errors {
    int64_t count;
    double median, p95, worst, bias; /* of |simulated / measured - 1|; bias: geometric mean of the ratio, less 1 */
    const row_state *worst_row;
} errors;

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double error_of(const row_state *row)
{
    return row->simulated_us / row->row->median_us - 1;
}

/* The smallest value that at least `share` of them do not exceed. */
static double percentile(const double *sorted, int64_t count, double share)
{
    const int64_t rank = (int64_t)ceil(share * (double)count);
    return sorted[ekv_max(rank, 1) - 1];
}

static errors errors_of(const calibration *c, const char *planner, bool fitted)
{
    errors e = { 0 };
    double *sizes = cli_alloc((size_t)c->num_rows * sizeof *sizes), logs = 0;
    for (int64_t i = 0; i < c->num_rows; i++) {
        const row_state *row = &c->rows[i];
        if (row->row->planner != planner || row->fitted != fitted)
            continue;
        sizes[e.count++] = fabs(error_of(row));
        logs += log1p(error_of(row));
        if (fabs(error_of(row)) >= e.worst) {
            e.worst = fabs(error_of(row));
            e.worst_row = row;
        }
    }
    if (e.count) {
        qsort(sizes, (size_t)e.count, sizeof *sizes, by_value);
        e.median = percentile(sizes, e.count, 0.5);
        e.p95 = percentile(sizes, e.count, 0.95);
        e.bias = expm1(logs / (double)e.count);
    }
    free(sizes);
    return e;
}

/* ---- Output ------------------------------------------------------------------------------------------ */

static void print_errors(cli_text *text, const char *planner, const char *kind, const errors *e)
{
    if (!e->count)
        return;
    const cli_measured_row *worst = e->worst_row->row;
    cli_print(text, "%-27s %-7s %5" PRId64 " %8.2f %8.2f %8.2f %+8.2f  %s, %d requests, %" PRId64 " tokens\n", planner,
              kind, e->count, 100 * e->median, 100 * e->p95, 100 * error_of(e->worst_row), 100 * e->bias, worst->dist,
              worst->batch.batch_size, worst->total_tokens);
}

static void print_text(calibration *c)
{
    cli_text *text = &c->cli->out;
    cli_print(text, "%s: %" PRId64 " rows; device %s\n", c->cli->options.from, c->num_rows, c->workload.device.name);
    cli_print(text, "\n%-27s %9s %9s %10s %8s %10s %9s\n", "system", "CTA GB/s", "SM GB/s", "total GB/s", "tile us",
              "launch us", "merge us");
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++) {
        const ekv_system_model *m = &c->workload.device.systems[s];
        bool used = false;
        for (int64_t i = 0; i < c->num_rows; i++)
            used = used || c->rows[i].system == (ekv_system)s;
        if (used)
            cli_print(text, "%-27s %9.3f %9.3f %10.1f %8.3f %10.3f %9.3f  %s\n", ekv_system_name(s), m->cta_gb_per_s,
                      m->sm_gb_per_s, m->total_gb_per_s, m->tile_us, m->launch_us, m->merge_us,
                      c->fitted[s] ? "fitted" : "the device's");
    }
    cli_print(text, "\n%-27s %-7s %5s %8s %8s %8s %8s  %s\n", "planner", "rows", "", "median %", "p95 %", "worst %",
              "bias %", "worst at");
    for (int32_t p = 0; p < c->workload.num_planners; p++)
        for (int fitted = 1; fitted >= 0; fitted--) {
            const errors e = errors_of(c, c->workload.planners[p], fitted);
            print_errors(text, c->workload.planners[p], fitted ? "fitted" : "judged", &e);
        }
    for (int64_t i = 0; c->cli->options.residuals && i < c->num_rows; i++) {
        const row_state *row = &c->rows[i];
        if (i == 0)
            cli_print(text, "\n%-27s %-10s %6s %9s %5s %7s %12s %12s %8s\n", "planner", "dist", "batch", "tokens",
                      "page", "heads", "measured us", "simulated us", "error %");
        char heads[32];
        snprintf(heads, sizeof heads, "%d/%d", row->row->batch.q_heads, row->row->batch.kv_heads);
        cli_print(text, "%-27s %-10s %6d %9" PRId64 " %5d %7s %12.2f %12.2f %+8.2f%s\n", row->row->planner,
                  row->row->dist, row->row->batch.batch_size, row->row->total_tokens, row->row->batch.page_size, heads,
                  row->row->median_us, row->simulated_us, 100 * error_of(row), row->fitted ? "" : "  judged");
    }
}

static void print_json_errors(cJSON *object, const char *key, const errors *e)
{
    cJSON *entry = json_add_object(object, key);
    json_int(entry, "rows", e->count);
    json_real_or_null(entry, "median", e->median, !e->count);
    json_real_or_null(entry, "p95", e->p95, !e->count);
    json_real_or_null(entry, "worst", e->worst, !e->count);
    json_real_or_null(entry, "bias", e->bias, !e->count);
}

static void print_json(calibration *c)
{
    cJSON *object = json_object();
    json_string(object, "from", c->cli->options.from);
    json_string(object, "device", c->workload.device.name);
    cJSON *systems = json_add_object(object, "systems");
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++)
        if (c->fitted[s])
            json_system(systems, (ekv_system)s, &c->workload.device.systems[s]);
    cJSON *planners = json_add_object(object, "planners");
    for (int32_t p = 0; p < c->workload.num_planners; p++) {
        const errors fitted = errors_of(c, c->workload.planners[p], true);
        const errors judged = errors_of(c, c->workload.planners[p], false);
        if (!fitted.count && !judged.count)
            continue;
        cJSON *planner = json_add_object(planners, c->workload.planners[p]);
        print_json_errors(planner, "fitted", &fitted);
        print_json_errors(planner, "judged", &judged);
    }
    cJSON *rows = c->cli->options.residuals ? json_add_array(object, "rows") : NULL;
    for (int64_t i = 0; rows && i < c->num_rows; i++) {
        const row_state *row = &c->rows[i];
        cJSON *entry = json_append_object(rows);
        json_string(entry, "planner", row->row->planner);
        json_string(entry, "dist", row->row->dist);
        json_int(entry, "batch", row->row->batch.batch_size);
        json_int(entry, "total_tokens", row->row->total_tokens);
        json_int(entry, "page_size", row->row->batch.page_size);
        json_int(entry, "q_heads", row->row->batch.q_heads);
        json_int(entry, "kv_heads", row->row->batch.kv_heads);
        json_bool(entry, "fitted", row->fitted);
        json_real(entry, "measured_us", row->row->median_us);
        json_real(entry, "simulated_us", row->simulated_us);
    }
    json_print(&c->cli->out, object);
}

/* Simulated against measured, a panel a planner, a colour a distribution; lines of files are one. */
static ekv_status plot(const calibration *c, const char *path)
{
    char note[400];
    cli_panels panels = { .x_label = "measured, us", .y_label = "simulated, us", .note = note };
    panels.diagonal = panels.points = true;
    snprintf(note, sizeof note, "%s; device %s", c->cli->options.from, c->workload.device.name);
    for (int32_t p = 0; p < c->workload.num_planners; p++)
        for (int64_t i = 0; i < c->num_rows; i++) {
            const row_state *row = &c->rows[i];
            if (row->row->planner == c->workload.planners[p])
                cli_panels_add(&panels, row->row->planner,
                               strncmp(row->row->dist, "file", 4) != 0 ? row->row->dist : "file", row->row->median_us,
                               row->simulated_us);
        }
    ekv_status status = cli_panels_plot(&panels, path);
    cli_panels_free(&panels);
    return status;
}

/* ---- The device with its new constants --------------------------------------------------------------- */

/* Whether the line sets a constant of a system that was fitted.  argument: the calibration. */
static bool is_fitted_line(const void *argument, const char *line, size_t size)
{
    const calibration *c = argument;
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++) {
        const char *name = ekv_system_name(s);
        const size_t length = strlen(name);
        if (c->fitted[s] && size > length && !memcmp(line, name, length) && line[length] == '.')
            return true;
    }
    return false;
}

static void print_constant(cli_text *text, int32_t system, const char *name, double value, const char *source)
{
    char key[64];
    snprintf(key, sizeof key, "%s.%s", ekv_system_name(system), name);
    cli_print(text, "%-41s = %-9.4g # %s\n", key, value, source);
}

static void print_system(const calibration *c, cli_text *text, int32_t s)
{
    const ekv_system_model *m = &c->workload.device.systems[s];
    char source[256];
    snprintf(source, sizeof source, "fitted to %" PRId64 " rows of %s", c->fitted_rows[s], c->cli->options.from);
    print_constant(text, s, "cta_gb_per_s", m->cta_gb_per_s, source);
    print_constant(text, s, "sm_gb_per_s", m->sm_gb_per_s, source);
    print_constant(text, s, "total_gb_per_s", m->total_gb_per_s, source);
    print_constant(text, s, "tile_us", m->tile_us, source);
    print_constant(text, s, "launch_us", m->launch_us, source);
    print_constant(text, s, "merge_us", m->merge_us, source);
}

ekv_status calibrate_save(cli_state *cli, const char *name,
                          bool (*is_replaced)(const void *argument, const char *line, size_t size),
                          const void *argument, const cli_text *added)
{
    char *read = NULL;
    size_t size;
    const char *device = cli->options.device ? cli->options.device : name, *text = ekv_device_text(device);
    ekv_status status = EKV_OK;
    if (!text && !cli->options.device)
        return ekv_fail(EKV_ERROR_NOT_FOUND, "no model is called '%s'; --save needs one of --device to change", name);
    if (!text && !(status = cli_read_file(device, 64 << 10, &read, &size)))
        text = read;
    if (status)
        return status;
    cli_text saved = { 0 };
    while (*text) {
        const size_t line = strcspn(text, "\n");
        if (!is_replaced(argument, text, line))
            cli_print(&saved, "%.*s\n", (int)line, text);
        text += line + (text[line] == '\n');
    }
    cli_append(&saved, added->data, added->size);
    cli_write_later(cli, cli->options.save, &saved);
    free(read);
    return EKV_OK;
}

/* The device with the lines of fitted systems replaced. */
static ekv_status save(calibration *c)
{
    cli_text added = { 0 };
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++)
        if (c->fitted[s])
            print_system(c, &added, s);
    ekv_status status = calibrate_save(c->cli, c->workload.device.name, is_fitted_line, c, &added);
    free(added.data);
    return status;
}

/* ---- The command ------------------------------------------------------------------------------------- */

static ekv_status calibrate(calibration *c)
{
    cli_state *cli = c->cli;
    ekv_status status;
    const char *stray = cli_options_given(&cli->options, CLI_SHAPE | CLI_EXECUTION);
    if (stray)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s does not go with --from", stray));
    if (cli->options.save && cli->options.fit == CLI_FIT_NONE)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "--save does not go with --fit none"));
    if ((cli->options.plot && (status = cli_usage(cli, bench_check_plot(cli->options.plot)))) ||
        (status = cli_planners_read(cli, &c->workload)) ||
        (status = cli_device_read(cli, "h200", &c->workload.device)) ||
        (cli->options.kv_lens && (status = cli_kv_lens_read(cli, &c->workload.lengths))) ||
        (status = cli_measured_read(cli, cli->options.from, c->workload.lengths, &c->measured)) ||
        (status = plan_rows(c)) || (cli->options.plot && (status = bench_try_plot(cli->options.plot))))
        return status;
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++)
        if ((status = fit_system(c, (ekv_system)s)))
            return status;
    if ((status = simulate_rows(c)))
        return status;
    if (cli->options.json)
        print_json(c);
    else
        print_text(c);
    if (cli->options.save && (status = save(c)))
        return status;
    return cli->options.plot ? plot(c, cli->options.plot) : EKV_OK;
}

static ekv_status calibrate_run(cli_state *cli)
{
    const cli_options *options = &cli->options;
    if (!options->from && options->device && !strcmp(options->device, "cpu")) {
        const char *stray =
            cli_options_given(options, CLI_SHAPE | CLI_LENGTHS | CLI_PLANNERS | CLI_PLANNING | CLI_CALIBRATE);
        if (stray)
            return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                                           "%s goes with --from or a GPU, not with --device "
                                           "cpu alone",
                                           stray));
        return cli_read_probe(cli);
    }
    if (!options->from)
        return calibrate_gpu_run(cli);
    calibration c = { .cli = cli };
    ekv_status status = calibrate(&c);
    for (int64_t i = 0; i < c.num_rows; i++)
        ekv_plan_free(c.rows[i].plan);
    free(c.rows);
    cli_measured_free(&c.measured);
    cli_workload_free(&c.workload);
    return status;
}

const cli_command cli_command_calibrate = {
    .name = "calibrate",
    .summary = "fit constants to measured times, and judge them; or measure on this GPU",
    .details = "With --from it fits the constants of each system in a table of measured times (at most six a system, "
               "by least squares "
               "on the logarithm of the time) to half of its rows, and prints how far the simulated times of all rows "
               "are from the measured ones.\n"
               "With --fit none it fits nothing and judges the constants that the device has.\n"
               "Without --from it measures even on the GPU: what a launch, a token and a request cost (by batches of "
               "equal requests that leave nothing to cut), the plain read, and at which --request-cost batches of "
               "unequal requests take the least time; --save writes the device's model with the last two in it.\n"
               "With --device cpu and no --from it measures the read rate of this machine's CPU, on one thread and on "
               "all, as `bench --backend cpu` does for its share of a plain read.\n",
    .groups = CLI_CALIBRATE | CLI_SHAPE | CLI_LENGTHS | CLI_PLANNERS | CLI_PLANNING | CLI_DEVICE | CLI_EXECUTION |
              CLI_JSON | CLI_OUTPUT,
    .planners = "all",
    .run = calibrate_run,
};
