/* SPDX-License-Identifier: Apache-2.0
 * Runs plans over one batch of random tensors, times them and compares them with the reference. */
#ifndef EVENKV_TOOLS_EXECUTION_H
#define EVENKV_TOOLS_EXECUTION_H

#include "cli.h"
#include "cpu/random_cache.h"
#include "cpu/tolerance.h"

/* A batch in memory, with what its decode should give. */
typedef struct cli_execution {
    ekv_random_cache *cache;
    ekv_reference *reference; /* NULL: not wanted */
    int64_t kv_bytes;         /* of K and V that a decode has to read */
} cli_execution;

typedef struct cli_result {
    double plan_us;            /* ekv_plan_update with the same lengths, median */
    double median_us, min_us;  /* ekv_decode */
    double kv_gb_per_s;        /* kv_bytes over the median, 1e9 bytes/s */
    ekv_comparison comparison; /* where there is a reference */
    bool passed;               /* within the tolerance and the guard bands; true where nothing was compared */
} cli_result;

/* batch: its kv_len must outlive the execution.  Start *execution with {0}; free it after an error too. */
ekv_status cli_execution_create(cli_state *cli, const ekv_batch *batch, bool with_reference, cli_execution *execution);
void cli_execution_free(cli_execution *execution);

/* Decodes once to warm up and `repeat` times for the clock, on the CPU. */
ekv_status cli_execute(cli_execution *execution, ekv_plan *plan, int32_t repeat, cli_result *result);

#endif
