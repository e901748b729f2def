/* SPDX-License-Identifier: Apache-2.0
 * Is the time of decode attention linear in the tokens of the batch? */
#include "bench_sim.h"
#include "panels.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Called linear where no time is further than this from the line, as a share of the time. */
static const double linear_share = 0.05;

typedef struct line {
    double a, b;      /* time = a + b * tokens, in us and us a token */
    double r_squared; /* 1: all on the line */
    double worst;     /* largest |time - line| / time */
    int64_t count;
} line;

static bool is_trace(const bench_sim_row *row)
{
    return !strcmp(row->dist, "trace");
}

/* Rows of one fit. */
static bool same_fit(const bench_sim_row *x, const bench_sim_row *y)
{
    return x->planner == y->planner && !strcmp(x->dist, y->dist) && (is_trace(x) || x->batch == y->batch);
}

/* Ordinary least squares over the rows of the fit that `of` is in. */
static line fit_line(const bench_sim_rows *rows, const bench_sim_row *of)
{
    line l = { 0 };
    double sum_x = 0, sum_y = 0, xx = 0, xy = 0, yy = 0, left = 0;
    for (int64_t i = 0; i < rows->count; i++)
        if (same_fit(&rows->rows[i], of)) {
            sum_x += (double)rows->rows[i].total_tokens;
            sum_y += rows->rows[i].info.time_us;
            l.count++;
        }
    const double mean_x = sum_x / (double)l.count, mean_y = sum_y / (double)l.count;
    for (int64_t i = 0; i < rows->count; i++)
        if (same_fit(&rows->rows[i], of)) {
            const double x = (double)rows->rows[i].total_tokens - mean_x, y = rows->rows[i].info.time_us - mean_y;
            xx += x * x;
            xy += x * y;
            yy += y * y;
        }
    l.b = xx > 0 ? xy / xx : 0;
    l.a = mean_y - l.b * mean_x;
    for (int64_t i = 0; i < rows->count; i++)
        if (same_fit(&rows->rows[i], of)) {
            const double us = rows->rows[i].info.time_us;
            const double off = us - (l.a + l.b * (double)rows->rows[i].total_tokens);
            left += off * off;
            l.worst = fmax(l.worst, fabs(off) / us);
        }
    l.r_squared = yy > 0 ? 1 - left / yy : 1;
    return l;
}

/* Whether an earlier row is of the same fit. */
static bool is_seen(const bench_sim_rows *rows, int64_t index)
{
    for (int64_t i = 0; i < index; i++)
        if (same_fit(&rows->rows[i], &rows->rows[index]))
            return true;
    return false;
}

static void print_fit(cli_text *text, const bench_sim_row *row, const line *l, bool json)
{
    if (json) {
        cJSON *object = json_object();
        json_string(object, "fit", "time_us = a + b * tokens");
        json_string(object, "planner", row->planner);
        json_string(object, "dist", row->dist);
        json_int_or_null(object, "batch", row->batch, is_trace(row));
        json_int(object, "points", l->count);
        json_real(object, "a_us", l->a);
        json_real(object, "b_us_per_million_tokens", l->b * 1e6);
        json_real(object, "r_squared", l->r_squared);
        json_real(object, "worst_residual", l->worst);
        json_bool(object, "projected", row->info.projected);
        json_print(text, object);
        return;
    }
    char batch[16] = "all";
    if (!is_trace(row))
        snprintf(batch, sizeof batch, "%d", row->batch);
    cli_print(text, "%-27s %-8s %6s %6" PRId64 " %10.1f %12.1f %9.5f %9.1f%s\n", row->planner, row->dist, batch,
              l->count, l->a, l->b * 1e6, l->r_squared, 100 * l->worst, l->worst > linear_share ? "  *" : "");
}

void bench_linear_print(const bench_sim_rows *rows)
{
    cli_text *text = &rows->cli->out;
    const bool json = rows->cli->options.json;
    if (!json) {
        cli_print(text, "time = a + b * tokens on %s%s; * where a time is more than %.0f %% off the line\n",
                  rows->device->name, rows->device->projected ? " (projected)" : "", 100 * linear_share);
        cli_print(text, "%-27s %-8s %6s %6s %10s %12s %9s %9s\n", "planner", "dist", "batch", "points", "a us",
                  "b us/Mtoken", "R^2", "worst %");
    }
    int64_t fits = 0, linear = 0;
    const char *planner = NULL;
    cli_text summary = { 0 };
    for (int64_t i = 0; i <= rows->count; i++) {
        if (planner && (i == rows->count || rows->rows[i].planner != planner)) {
            cli_print(&summary, "%-27s %" PRId64 " of %" PRId64 " lines\n", planner, linear, fits);
            fits = linear = 0;
        }
        if (i == rows->count)
            break;
        planner = rows->rows[i].planner;
        if (is_seen(rows, i))
            continue;
        const line l = fit_line(rows, &rows->rows[i]);
        print_fit(text, &rows->rows[i], &l, json);
        fits++;
        linear += l.worst <= linear_share;
    }
    if (!json && summary.size)
        cli_print(text, "\nwithin %.0f %% of a line:\n%.*s", 100 * linear_share, (int)summary.size, summary.data);
    free(summary.data);
}

/* ---- Figures ----------------------------------------------------------------------------------------- */

/* One batch size is drawn: the one nearest to 128, as figures have but two axes. */
static int32_t drawn_batch(const bench_sim_rows *rows)
{
    int32_t best = 0;
    for (int64_t i = 0; i < rows->count; i++)
        if (!best || abs(rows->rows[i].batch - 128) < abs(best - 128))
            best = rows->rows[i].batch;
    return best;
}

/* The line at both ends of its tokens. */
static void add_fit(cli_panels *panels, const bench_sim_rows *rows, const bench_sim_row *of)
{
    const line l = fit_line(rows, of);
    double first = INFINITY, last = 0;
    for (int64_t i = 0; i < rows->count; i++)
        if (same_fit(&rows->rows[i], of)) {
            first = fmin(first, (double)rows->rows[i].total_tokens);
            last = fmax(last, (double)rows->rows[i].total_tokens);
        }
    cli_panels_add(panels, of->planner, "fit", first / 1e3, l.a + l.b * first);
    cli_panels_add(panels, of->planner, "fit", last / 1e3, l.a + l.b * last);
}

ekv_status bench_linear_plot(const bench_sim_rows *rows, const char *path)
{
    const bool trace = rows->count && is_trace(&rows->rows[0]);
    const int32_t batch = drawn_batch(rows);
    char note[160];
    cli_panels panels = { .x_label = trace ? "KV tokens, thousands" : "KV tokens",
                          .y_label = "time, us",
                          .note = note };
    panels.points = panels.linear_x = panels.linear_y = trace;
    if (trace)
        snprintf(note, sizeof note,
                 "simulated on %s%s; %d/%d heads; a point a decode step of the trace, its line by "
                 "least squares",
                 rows->device->name, rows->device->projected ? " (projected)" : "", rows->shape->q_heads,
                 rows->shape->kv_heads);
    else
        snprintf(note, sizeof note, "simulated on %s%s; %d/%d heads, %d requests", rows->device->name,
                 rows->device->projected ? " (projected)" : "", rows->shape->q_heads, rows->shape->kv_heads, batch);
    for (int64_t i = 0; i < rows->count; i++) {
        const bench_sim_row *row = &rows->rows[i];
        if (trace)
            cli_panels_add(&panels, row->planner, "batch", (double)row->total_tokens / 1e3, row->info.time_us);
        else if (row->batch == batch)
            cli_panels_add(&panels, row->planner, row->dist, (double)row->total_tokens, row->info.time_us);
        if (trace && !is_seen(rows, i))
            add_fit(&panels, rows, row);
    }
    ekv_status status = cli_panels_plot(&panels, path);
    cli_panels_free(&panels);
    return status;
}
