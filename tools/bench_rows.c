/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const char bench_commit[]; /* cmake/commit.cmake */

/* ---- Columns ----------------------------------------------------------------------------------------- */

/* name, JSON: is it text?, format and arguments.  The order is that of the CSV and of the JSON. */
#define BENCH_COLUMNS(X)                                                   \
    X(planner, true, "%s", row->plan->planner->name)                       \
    X(dist, true, "%s", row->cell->dist)                                   \
    X(batch, false, "%d", batch->batch_size)                               \
    X(total_tokens, false, "%" PRId64, row->cell->lengths->total_tokens)   \
    X(page_size, false, "%d", batch->page_size)                            \
    X(q_heads, false, "%d", batch->q_heads)                                \
    X(kv_heads, false, "%d", batch->kv_heads)                              \
    X(head_dim, false, "%d", batch->head_dim)                              \
    X(dtype, true, "%s", cli_dtype_name(batch->kv_dtype))                  \
    X(median_us, false, "%.2f", row->times.median_us)                      \
    X(min_us, false, "%.2f", row->times.min_us)                            \
    X(p95_us, false, "%.2f", row->times.p95_us)                            \
    X(kv_gb_per_s, false, "%.2f", kv_gb_per_s(row))                        \
    X(share_of_read, false, "%.4f", bench_share_of_read(row))              \
    X(plan_us, false, "%.2f", row->plan_us)                                \
    X(max_rel_err, false, "%s", error_text(row, error, sizeof error))      \
    X(backend, true, "%s", row->execution->backend->name)                  \
    X(kernel, true, "%s", row->job->kernel)                                \
    X(dispatch, true, "%s", cli_dispatch_name(row->plan->dispatch))        \
    X(hot, true, "%s", hot_name(row))                                      \
    X(layout, true, "%s", batch->layout == EKV_LAYOUT_HND ? "hnd" : "nhd") \
    X(flush, true, "%s", row->execution->flush)                            \
    X(device, true, "%s", row->device)                                     \
    X(driver, true, "%s", row->execution->driver)                          \
    X(commit, true, "%s", bench_commit)

double bench_share_of_read(const bench_row *row)
{
    return row->read->us / row->times.median_us;
}

static double kv_gb_per_s(const bench_row *row)
{
    return (double)row->execution->kv_bytes / row->times.median_us / 1e3;
}

static const char *hot_name(const bench_row *row)
{
    return row->cell->made ? cli_hot_name((ekv_hot)row->execution->cli->options.hot) : "na";
}

/* Empty in CSV and null in JSON where nothing was compared. */
static const char *error_text(const bench_row *row, char *text, size_t size)
{
    if (!row->execution->reference)
        return "";
    snprintf(text, size, "%.3e", row->check.comparison.max_rel_err);
    return text;
}

/* ---- Forms ------------------------------------------------------------------------------------------- */

void bench_print_csv_head(cli_text *text)
{
    const char *comma = "";
#define PRINT_NAME(name, is_text, format, value) cli_print(text, "%s" #name, comma), comma = ",";
    BENCH_COLUMNS(PRINT_NAME)
#undef PRINT_NAME
    cli_print(text, "\n");
}

void bench_print_csv(cli_text *text, const bench_row *row)
{
    const ekv_batch *batch = &row->execution->batch;
    const char *comma = "";
    char error[32];
#define PRINT_VALUE(name, is_text, format, value) cli_print(text, "%s" format, comma, value), comma = ",";
    BENCH_COLUMNS(PRINT_VALUE)
#undef PRINT_VALUE
    cli_print(text, "\n");
}

/* A number of the CSV, or null where that has nothing or no finite one. */
static void add_number(cJSON *object, const char *key, cli_text *value)
{
    const bool number = value->size && strchr("-0123456789", value->data[0]);
    if (!number) {
        value->size = 0;
        cli_print(value, "null");
    }
    json_raw(object, key, value);
}

void bench_print_json(cli_text *text, const bench_row *row)
{
    const ekv_batch *batch = &row->execution->batch;
    const bool checked = row->execution->reference != NULL;
    char error[32];
    cli_text value = { 0 };
    cJSON *object = json_object();
#define ADD_VALUE(name, is_text, format, value_of_it) \
    cli_print(&value, format, value_of_it);           \
    if (is_text) {                                    \
        cli_append(&value, "", 1);                    \
        json_string(object, #name, value.data);       \
        value.size = 0;                               \
    } else {                                          \
        add_number(object, #name, &value);            \
    }
    BENCH_COLUMNS(ADD_VALUE)
#undef ADD_VALUE
    free(value.data);
    json_string(object, "planned_on", row->plan->options.on_device ? "device" : "host");
    json_int(object, "repeat", row->times.count);
    json_real(object, "read_us", row->read->us);
    json_string(object, "read_shape", row->read->shape);
    json_int(object, "read_bytes", row->execution->bytes);
    json_int(object, "num_tiles", row->plan->num_tiles);
    json_int(object, "threads", row->job->threads);
    json_int(object, "shared_bytes", row->job->shared_bytes);
    json_int(object, "resident_ctas", row->job->resident_ctas);
    json_real_or_null(object, "tolerance_ratio", row->check.comparison.max_ratio, !checked);
    json_bool(object, "same_bits", row->check.same_bits);
    json_bool(object, "passed", row->check.passed);
    json_print(text, object);
}

void bench_print_cell(cli_text *text, const bench_cell *cell, const cli_execution *execution, const cli_read *read)
{
    const ekv_batch *batch = &execution->batch;
    cli_print(text, "%s%s, %d requests, %" PRId64 " tokens, %d/%d heads of %d, page size %d\n", text->size ? "\n" : "",
              cell->dist, batch->batch_size, cell->lengths->total_tokens, batch->q_heads, batch->kv_heads,
              batch->head_dim, batch->page_size);
    cli_print(text, "plain read of %.1f MB: %.2f us, %.1f GB/s (%s; flush: %s)\n", (double)execution->bytes / 1e6,
              read->us, (double)execution->bytes / read->us / 1e3, read->shape, execution->flush);
    cli_print(text, "%-27s %-8s %-22s %7s %9s %11s %11s %11s %9s %7s %9s %8s\n", "planner", "dispatch", "kernel",
              "CTAs/SM", "plan us", "median us", "min us", "p95 us", "GB/s", "of read", "rel. err.", "of limit");
}

void bench_print_row(cli_text *text, const bench_row *row)
{
    cli_print(text, "%-27s %-8s %-22s %7d %9.1f %11.2f %11.2f %11.2f %9.2f %7.3f", row->plan->planner->name,
              cli_dispatch_name(row->plan->dispatch), row->job->kernel, row->job->resident_ctas, row->plan_us,
              row->times.median_us, row->times.min_us, row->times.p95_us, kv_gb_per_s(row), bench_share_of_read(row));
    if (row->execution->reference)
        cli_print(text, " %9.2e %8.3f", row->check.comparison.max_rel_err, row->check.comparison.max_ratio);
    else
        cli_print(text, " %9s %8s", "-", "-");
    cli_print(text, "%s\n", row->check.passed ? "" : "  WRONG");
}
