/* SPDX-License-Identifier: Apache-2.0
 * What a command works on: the options resolved to a device, the shape of a batch, its lengths and the planners. */
#ifndef EVENKV_TOOLS_WORKLOAD_H
#define EVENKV_TOOLS_WORKLOAD_H

#include "cli.h"
#include "trace/lengths.h"

enum { CLI_MAX_PLANNERS = 32 };

typedef struct cli_workload {
    ekv_device device;
    ekv_batch shape;           /* without lengths */
    ekv_lengths_list *lengths; /* one or more batches */
    bool all_planners;         /* --planner all: one that cannot take the batch is skipped */
    int32_t num_planners;
    const char *planners[CLI_MAX_PLANNERS];
} cli_workload;

/* Fills *workload (started with {0}); needs cli->context.  default_device: for a command line without --device; NULL:
 * what the context runs on.
 * Free with cli_workload_free, after an error too. */
ekv_status cli_workload_read(cli_state *cli, const char *default_device, cli_workload *workload);
void cli_workload_free(cli_workload *workload);

/* The device of --device, or default_name, or, where that is NULL, what the context runs on.  Errors: those of the
 * file, usage errors, DRIVER. */
ekv_status cli_device_read(cli_state *cli, const char *default_name, ekv_device *device);

/* The parts of cli_workload_read. */
ekv_status cli_kv_lens_read(cli_state *cli, ekv_lengths_list **lengths);
ekv_status cli_trace_read(cli_state *cli, ekv_lengths_list **lengths);
ekv_status cli_shape_read(cli_state *cli, ekv_batch *shape);
ekv_status cli_planners_read(cli_state *cli, cli_workload *workload);

/* Whether to go on without a planner that gave this status, and says so on stderr if so. */
bool cli_skip_planner(const cli_workload *workload, const char *planner, ekv_status status);

/* Batch `index` of the workload: the shape with its lengths. */
ekv_batch cli_workload_batch(const cli_workload *workload, int64_t index);

/* How the batches were numbered by their source: "batch 3" is the third line of a file or the like. */
void cli_print_batch(cli_text *text, const cli_workload *workload, int64_t index);
void cli_print_device(cli_text *text, const ekv_device *device);

/* The longest request (the first of them), and bytes of K and V of one token over all local KV heads. */
int32_t cli_longest_request(const ekv_batch *batch);
int64_t cli_kv_bytes_per_token(const ekv_batch *batch);

#endif
