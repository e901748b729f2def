/* SPDX-License-Identifier: Apache-2.0
 * evenkv bench: planners over many batches, timed in turn, as shares of a plain read. */
#include "base/context.h"
#include "base/number.h"
#include "base/status.h"
#include "bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Without --repeat a planner that is slow in a cell is timed less often: no more than MIN_REPEAT times once its runs
 * have taken that long. */
enum { MIN_REPEAT = 5 };
static const double budget_us[] = { [EKV_BACKEND_CPU] = 2e6, [EKV_BACKEND_CUDA] = 100e3 };

typedef struct known_read {
    int64_t bytes;
    cli_read read;
} known_read;

typedef struct bench_state {
    cli_state *cli;
    cli_workload workload; /* without lengths */
    cli_execution execution;
    bench_cells list;
    known_read *reads; /* [num_reads], one for each number of bytes */
    int64_t num_reads;
    int64_t num_rows; /* measured so far */
    FILE *csv;
    cli_text csv_text; /* all of it, for the plot */
} bench_state;

/* ---- Cells ------------------------------------------------------------------------------------------- */

static ekv_batch cell_batch(const bench_state *bench, const bench_cell *cell)
{
    ekv_batch batch = bench->workload.shape;
    batch.batch_size = cell->lengths->batch_size;
    batch.kv_len = cell->lengths->kv_len;
    return batch;
}

/* ---- One cell ---------------------------------------------------------------------------------------- */

/* A planner in the cell; plan is NULL where it cannot take it. */
typedef struct entry {
    ekv_plan *plan;
    cli_job job;
    bool prepared;
    double plan_us;
    cli_check check;
    double *times; /* [repeat] */
    int32_t count;
    double total_us;
} entry;

static void free_entry(bench_state *bench, entry *e)
{
    if (e->prepared)
        cli_job_free(&bench->execution, &e->job);
    ekv_plan_free(e->plan);
    free(e->times);
    *e = (entry){ 0 };
}

static ekv_status prepare(bench_state *bench, const ekv_batch *batch, const char *planner, entry *e)
{
    cli_state *cli = bench->cli;
    const int32_t repeat = cli_repeat(cli);
    ekv_status status =
        ekv_plan_create(cli->context, planner, batch, &bench->workload.device, &cli->options.plan, &e->plan);
    if (status)
        return cli_plan_status(cli, status);
    e->times = cli_alloc((size_t)repeat * sizeof *e->times);
    if ((status = cli_plan_time(&bench->execution, e->plan, repeat, &e->plan_us)) ||
        (status = cli_job_create(&bench->execution, e->plan, &e->job)))
        return status;
    e->prepared = true;
    return cli_job_check(&bench->execution, &e->job, &e->check);
}

/* A planner that cannot take the cell is left out of it. */
static ekv_status prepare_or_skip(bench_state *bench, const bench_cell *cell, const char *planner, entry *e)
{
    const ekv_batch batch = cell_batch(bench, cell);
    ekv_status status = prepare(bench, &batch, planner, e);
    if (status != EKV_ERROR_UNSUPPORTED && status != EKV_ERROR_OVERFLOW && status != EKV_ERROR_PLAN_INVALID)
        return status;
    cli_progress(NULL);
    fprintf(stderr, "evenkv: %s, batch %d: %s left out: %s (%s)\n", cell->dist, batch.batch_size, planner,
            ekv_last_error(), ekv_status_name(status));
    free_entry(bench, e);
    return EKV_OK;
}

static bool wants_more(const bench_state *bench, const entry *e)
{
    const cli_options *options = &bench->cli->options;
    const bool over = !options->repeat && e->count >= MIN_REPEAT && e->total_us > budget_us[options->backend];
    return e->plan && !over;
}

/* One run of each in turn, so that what disturbs the machine falls on all alike.  On the CPU, whose memory is shared
 * with whatever else runs, the plain read takes its turn too: *read becomes the median of these. */
static ekv_status time_entries(bench_state *bench, entry *entries, cli_read *read, double *read_times)
{
    const int32_t repeat = cli_repeat(bench->cli);
    const bool cpu = bench->cli->options.backend == EKV_BACKEND_CPU;
    for (int32_t i = 0; i < repeat; i++) {
        if (cpu) {
            ekv_status status = bench->execution.backend->read(&bench->execution, read->index, &read_times[i]);
            if (status)
                return status;
        }
        for (int32_t p = 0; p < bench->workload.num_planners; p++) {
            entry *e = &entries[p];
            if (!wants_more(bench, e))
                continue;
            double us;
            ekv_status status = cli_job_time(&bench->execution, &e->job, &us);
            if (status)
                return status;
            e->times[e->count++] = us;
            e->total_us += us;
        }
    }
    if (cpu)
        read->us = cli_times_of(read_times, repeat).median_us;
    return EKV_OK;
}

/* Plain reads of as many bytes, measured once. */
static ekv_status find_read(bench_state *bench, const cli_read **read)
{
    for (int64_t i = 0; i < bench->num_reads; i++)
        if (bench->reads[i].bytes == bench->execution.bytes) {
            *read = &bench->reads[i].read;
            return EKV_OK;
        }
    bench->reads = cli_realloc(bench->reads, (size_t)(bench->num_reads + 1) * sizeof *bench->reads);
    known_read *added = &bench->reads[bench->num_reads];
    added->bytes = bench->execution.bytes;
    ekv_status status = cli_read_time(&bench->execution, cli_repeat(bench->cli), &added->read);
    if (status)
        return status;
    bench->num_reads++;
    *read = &added->read;
    return EKV_OK;
}

static void report(bench_state *bench, const bench_cell *cell, const cli_read *read, entry *e)
{
    cli_state *cli = bench->cli;
    const int32_t repeat = cli_repeat(cli);
    const bench_row row = { .cell = cell,
                            .execution = &bench->execution,
                            .plan = e->plan,
                            .job = &e->job,
                            .device = bench->workload.device.name,
                            .read = read,
                            .plan_us = e->plan_us,
                            .times = cli_times_of(e->times, e->count),
                            .check = e->check };
    char what[128];
    snprintf(what, sizeof what, "%s, batch %d: %s", cell->dist, cell->lengths->batch_size, e->plan->planner->name);
    bench->num_rows++;
    bench_print_csv(&bench->csv_text, &row);
    if (cli->options.json)
        bench_print_json(&cli->out, &row);
    else
        bench_print_row(&cli->out, &row);
    if (!e->check.passed)
        cli_check_report(cli, what, &e->check);
    if (e->count < repeat) {
        cli_progress(NULL);
        fprintf(stderr, "evenkv: %s timed %d times in place of %d\n", what, e->count, repeat);
    }
}

static ekv_status write_csv(bench_state *bench, size_t begin)
{
    const size_t size = bench->csv_text.size - begin;
    if (!bench->csv || (fwrite(bench->csv_text.data + begin, 1, size, bench->csv) == size && !fflush(bench->csv)))
        return EKV_OK;
    return cli_fail_file(EKV_ERROR_IO, "write to", bench->cli->options.csv);
}

static ekv_status measure_entries(bench_state *bench, const bench_cell *cell, entry *entries)
{
    const cli_workload *workload = &bench->workload;
    const size_t begin = bench->csv_text.size;
    const cli_read *known;
    ekv_status status = find_read(bench, &known);
    for (int32_t p = 0; p < workload->num_planners && !status; p++)
        status = prepare_or_skip(bench, cell, workload->planners[p], &entries[p]);
    if (status)
        return status;
    cli_read read = *known;
    double *read_times = cli_alloc((size_t)cli_repeat(bench->cli) * sizeof *read_times);
    status = time_entries(bench, entries, &read, read_times);
    free(read_times);
    if (status)
        return status;
    if (!bench->cli->options.json)
        bench_print_cell(&bench->cli->out, cell, &bench->execution, &read);
    for (int32_t p = 0; p < workload->num_planners; p++)
        if (entries[p].plan)
            report(bench, cell, &read, &entries[p]);
    return write_csv(bench, begin);
}

static ekv_status measure_cell(bench_state *bench, const bench_cell *cell)
{
    char text[96];
    snprintf(text, sizeof text, "cell %d of %d: %s, batch %d", (int)(cell - bench->list.cells) + 1,
             (int)bench->list.num_cells, cell->dist, cell->lengths->batch_size);
    cli_progress(text);
    const ekv_batch batch = cell_batch(bench, cell);
    ekv_status status = cli_execution_set_batch(&bench->execution, &batch);
    if (status)
        return status;
    entry entries[CLI_MAX_PLANNERS] = { 0 };
    status = measure_entries(bench, cell, entries);
    for (int32_t p = 0; p < bench->workload.num_planners; p++)
        free_entry(bench, &entries[p]);
    return status;
}

/* ---- The sweep --------------------------------------------------------------------------------------- */

static ekv_status open_csv(bench_state *bench)
{
    const char *path = bench->cli->options.csv;
    bench_print_csv_head(&bench->csv_text);
    if (!path)
        return EKV_OK;
    bench->csv = fopen(path, "wb");
    if (!bench->csv)
        return cli_fail_file(EKV_ERROR_IO, "write to", path);
    return write_csv(bench, 0);
}

static ekv_status close_csv(bench_state *bench)
{
    FILE *file = bench->csv;
    bench->csv = NULL;
    if (file && fclose(file))
        return cli_fail_file(EKV_ERROR_IO, "write to", bench->cli->options.csv);
    return EKV_OK;
}

static ekv_status run_cells(bench_state *bench)
{
    cli_limits limits = { .with_reference = !bench->cli->options.no_check };
    for (int64_t i = 0; i < bench->list.num_cells; i++) {
        const ekv_batch batch = cell_batch(bench, &bench->list.cells[i]);
        cli_limits_add(&limits, &batch);
    }
    ekv_status status = cli_execution_create(bench->cli, &bench->workload.shape, limits, &bench->execution);
    for (int64_t i = 0; i < bench->list.num_cells && !status; i++)
        status = measure_cell(bench, &bench->list.cells[i]);
    if (!status && !bench->num_rows)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "no planner takes a batch of the sweep");
    return status;
}

static ekv_status sweep(bench_state *bench)
{
    cli_state *cli = bench->cli;
    cli_workload *workload = &bench->workload;
    ekv_status status;
    if ((cli->options.plot && (status = cli_usage(cli, bench_check_plot(cli->options.plot)))) ||
        (status = cli_backend_choose(cli)) || (status = cli_shape_read(cli, &workload->shape)) ||
        (status = cli_planners_read(cli, workload)) || (status = cli_device_read(cli, NULL, &workload->device)) ||
        (status = bench_cells_list(cli, &bench->list)))
        return status;
    if (!workload->device.sm_arch) /* threads stand for SMs */
        workload->device.num_sms = cli->context->options.num_threads;
    if ((cli->options.plot && (status = bench_try_plot(cli->options.plot))) || (status = open_csv(bench)) ||
        (status = run_cells(bench)) || (status = close_csv(bench)))
        return status;
    return cli->options.plot ? bench_plot(&bench->csv_text, cli->options.plot) : EKV_OK;
}

static ekv_status bench_run(cli_state *cli)
{
    if (cli->options.sim || cli->options.preset)
        return bench_sim_run(cli);
    bench_state bench = { .cli = cli };
    const char *stray = cli_options_given(&cli->options, CLI_TRACE | CLI_SYSTEM);
    if (stray && strcmp(stray, "--seed") != 0) /* of the tensors, here */
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s goes with %s only", stray,
                                       cli->options.trace           ? "--preset linearity"
                                       : !strcmp(stray, "--system") ? "--sim"
                                                                    : "--trace"));
    ekv_status status = sweep(&bench);
    cli_execution_free(&bench.execution);
    if (bench.csv)
        fclose(bench.csv);
    bench_cells_free(&bench.list);
    free(bench.reads);
    free(bench.csv_text.data);
    cli_workload_free(&bench.workload);
    return status;
}

const cli_command cli_command_bench = {
    .name = "bench",
    .summary = "time planners over many batches, as shares of a plain read",
    .details =
        "Measures every planner on every batch of a sweep: each distribution x number of requests x number of tokens, "
        "or the batches of a file.  The planners of a batch run in turn; caches are flushed before each run.  Prints "
        "the time of planning on the host; median, best and 95th percentile of decoding; GB/s of K and V; the share of "
        "a plain read, which is the time of the best of a fixed list of plain reads of as many bytes as K, V, Q and O "
        "have, under the same flush in the same process (on the CPU in turn with the runs), over the median; and the "
        "largest "
        "error.\n"
        "A batch that cannot be (fewer tokens than requests) or that a planner cannot take is left out, with a line on "
        "stderr; where nothing is left, bench fails.  Without --repeat a planner whose runs of a batch have taken 100 "
        "ms on a GPU (2 s on the CPU) is timed 5 times at least and no more.\n",
    .groups = CLI_SHAPE | CLI_LENGTHS | CLI_TRACE | CLI_SWEEP | CLI_PLANNING | CLI_DEVICE | CLI_SYSTEM | CLI_EXECUTION |
              CLI_JSON | CLI_OUTPUT,
    .planners = "even",
    .run = bench_run,
};
