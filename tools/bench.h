/* SPDX-License-Identifier: Apache-2.0
 * evenkv bench: one measured row, and its forms. */
#ifndef EVENKV_TOOLS_BENCH_H
#define EVENKV_TOOLS_BENCH_H

#include "execution.h"
#include "json.h"
#include "workload.h"

/* One batch of the sweep. */
typedef struct bench_cell {
    char dist[32];
    const ekv_lengths *lengths;
    bool made; /* by a distribution, so that --hot means something */
} bench_cell;

/* All of them. */
typedef struct bench_cells {
    cli_state *cli;
    ekv_lengths_list *file; /* of --kv-lens, or NULL */
    bench_cell *cells;      /* [num_cells] */
    int64_t num_cells, capacity;
    ekv_lengths_list **made; /* [num_made], behind the cells that distributions made */
    int64_t num_made;
    cli_text left_out; /* a line for each batch that cannot be */
} bench_cells;

/* Reads --dists, --batches, --tokens and --kv-lens into *list, which is {0}; what cannot be is said on stderr.
 * Free it after an error too.  Errors: usage errors, those of the file. */
ekv_status bench_cells_list(cli_state *cli, bench_cells *list);
void bench_cells_free(bench_cells *list);

/* bench --sim */
ekv_status bench_sim_run(cli_state *cli);

/* One planner in one cell. */
typedef struct bench_row {
    const bench_cell *cell;
    const cli_execution *execution; /* batch, backend, flush */
    const ekv_plan *plan;
    const cli_job *job;
    const char *device;
    const cli_read *read;
    double plan_us;
    cli_times times;
    cli_check check;
} bench_row;

double bench_share_of_read(const bench_row *row);

/* The header line of the CSV and a row of it, each with its newline. */
void bench_print_csv_head(cli_text *text);
void bench_print_csv(cli_text *text, const bench_row *row);
/* One object a line: the columns of the CSV, then what explains them. */
void bench_print_json(cli_text *text, const bench_row *row);
/* A table: what stands above the rows of a cell, and a row. */
void bench_print_cell(cli_text *text, const bench_cell *cell, const cli_execution *execution, const cli_read *read);
void bench_print_row(cli_text *text, const bench_row *row);

/* Draws a CSV of bench by the embedded gnuplot program.  path: FILE.svg or FILE.png.  Errors: INVALID_ARGUMENT (another
 * ending), NOT_FOUND (no gnuplot), IO. */
ekv_status bench_check_plot(const char *path);
/* Before the sweep: fails as bench_plot would, without gnuplot or where the path cannot be written. */
ekv_status bench_try_plot(const char *path);
ekv_status bench_plot(const cli_text *csv, const char *path);
/* Its parts.  A string as gnuplot quotes it, `name = '...'`; and a whole program.  Errors: NOT_FOUND, IO, SYSTEM. */
void bench_print_string(cli_text *text, const char *name, const char *value, size_t size);
ekv_status bench_run_gnuplot(const cli_text *program);

#endif
