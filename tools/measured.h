/* SPDX-License-Identifier: Apache-2.0
 * Measured times out of CSV files: those of `evenkv bench --csv`, and tables of other systems with the same columns. */
#ifndef EVENKV_TOOLS_MEASURED_H
#define EVENKV_TOOLS_MEASURED_H

#include "workload.h"

/* A row whose planner is one of ours. */
typedef struct cli_measured_row {
    int64_t line;     /* of the file, from 1 */
    int64_t position; /* among the rows of its planner, from 0 */
    const char *planner;
    char dist[32];
    ekv_batch batch; /* kv_len is owned by the list */
    int64_t total_tokens;
    double median_us;
    bool ours; /* measured on kernels of this project: by the column backend, cpu or cuda */
} cli_measured_row;

typedef struct cli_measured {
    cli_measured_row *rows; /* [num_rows] */
    int64_t num_rows;
    int64_t num_foreign; /* rows of systems that have no planner here */
} cli_measured;

/* Reads the files (their names with commas between).  Columns, in any order, others are passed over: planner or system;
 * dist or batch_line; batch; total_tokens; page_size; q_heads; kv_heads; median_us; and where they are not the defaults
 * head_dim (128), dtype (bf16), hot (first), backend (not ours).  dist `fileN` and batch_line N are line N of the
 * lengths. lengths: batches by line, or NULL. Errors: those of the file, PARSE with the line. */
ekv_status cli_measured_read(cli_state *cli, const char *paths, const ekv_lengths_list *lengths,
                             cli_measured *measured);
void cli_measured_free(cli_measured *measured);

#endif
