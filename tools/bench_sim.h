/* SPDX-License-Identifier: Apache-2.0
 * evenkv bench --sim: simulated rows, and what is made of them. */
#ifndef EVENKV_TOOLS_BENCH_SIM_H
#define EVENKV_TOOLS_BENCH_SIM_H

#include "bench.h"

typedef struct bench_sim_row {
    const char *planner;
    char dist[32];
    int32_t batch;
    int64_t total_tokens;
    ekv_dispatch dispatch;
    ekv_timeline_info info;
    double read_us;    /* of a plain read of as many bytes as K, V, Q and O have; 0: unknown */
    int64_t threshold; /* least batch size at which the planner's rule does not split; 0: never or always */
} bench_sim_row;

typedef struct bench_sim_rows {
    cli_state *cli;
    const ekv_device *device;
    const ekv_batch *shape;
    bench_sim_row *rows; /* [count] */
    int64_t count, capacity;
} bench_sim_rows;

/* Fits time = a + b * tokens over the rows of each planner, distribution and batch size (rows of `dist` "trace": over
 * all batches of a planner), and prints the fits, or adds them to cli->out as JSON lines. */
void bench_linear_print(const bench_sim_rows *rows);
/* Figures.  Errors: those of bench_plot. */
ekv_status bench_linear_plot(const bench_sim_rows *rows, const char *path);

#endif
