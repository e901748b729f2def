/* SPDX-License-Identifier: Apache-2.0
 * What is known of the systems whose planners evenkv has: the kernels that a profiler shows, the batch size from
 * which splitting ends, and which of them SGLang takes. */
#ifndef EVENKV_TOOLS_SYSTEMS_H
#define EVENKV_TOOLS_SYSTEMS_H

#include "cli.h"
#include "plan/plan.h"

/* Where SGLang's decode goes. */
typedef struct cli_sglang {
    const char *default_backend; /* attention backend on this device; NULL: not modelled */
    const char *default_planner; /* its planner; NULL: none of ours */
    const char *default_reason;
    const char *flashinfer_planner; /* what --attention-backend flashinfer takes; NULL: not modelled */
    char flashinfer_reason[200];
} cli_sglang;

/* group: query heads a KV head. */
cli_sglang cli_sglang_choose(const ekv_device *device, ekv_dtype kv_dtype, int32_t group);

/* "the default", "with" and the SGLang option that leads there, or NULL: no way leads to this planner's path. */
const char *cli_sglang_path(const cli_sglang *sglang, const char *planner);

/* The kernels of a decode by this plan, in launch order, by their own names; separated by ", ". */
void cli_kernels(const ekv_plan *plan, cli_text *names);

/* From which batch size on a system stops splitting. */
typedef struct cli_threshold {
    int64_t batch;      /* -1: there is none */
    bool inclusive;     /* reached at `batch`, else above it */
    bool reached;       /* by this plan's batch */
    char rule[160];     /* how the number comes about */
    const char *effect; /* what happens from there on */
} cli_threshold;

cli_threshold cli_threshold_of(const ekv_plan *plan);

#endif
