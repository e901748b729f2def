/* SPDX-License-Identifier: Apache-2.0
 * Timelines in Chrome's trace format (JSON), which Perfetto and chrome://tracing open: a process a decode, a track for
 * each CTA place of each SM, a slice a tile, merge or wait. */
#ifndef EVENKV_TOOLS_TIMELINE_H
#define EVENKV_TOOLS_TIMELINE_H

#include "cli.h"
#include "cuda/cuda_timeline.h"

/* Start with {0}. */
typedef struct cli_timeline {
    cli_text events; /* of the JSON array, with commas between */
    int32_t decodes;
} cli_timeline;

/* recorded: of a decode of the plan; batch: which of several, from 0. */
void cli_timeline_add(cli_timeline *timeline, const ekv_plan *plan, int64_t batch, const ekv_cuda_timeline *recorded);
/* The whole JSON. */
void cli_timeline_write(const cli_timeline *timeline, cli_text *text);
void cli_timeline_free(cli_timeline *timeline);

#endif
