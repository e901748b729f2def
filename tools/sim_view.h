/* SPDX-License-Identifier: Apache-2.0
 * Pictures of simulated executions: SMs over time, in text and as SVG. */
#ifndef EVENKV_TOOLS_SIM_VIEW_H
#define EVENKV_TOOLS_SIM_VIEW_H

#include "cli.h"
#include "plan/plan.h"

/* One execution.  Borrowed. */
typedef struct cli_sim_view {
    const ekv_plan *plan;
    const ekv_timeline *timeline; /* with events */
    ekv_timeline_info info;
    int32_t longest; /* request that is drawn in a colour of its own */
} cli_sim_view;

/* Rows of SMs, columns of time: two executions side by side, more below each other, all to one scale. */
void cli_sim_picture(cli_text *text, const cli_sim_view *views, int32_t count);

/* An SVG with a panel an execution, side by side, all to one scale; a rectangle a tile. */
void cli_sim_gantt(cli_text *svg, const cli_sim_view *views, int32_t count);

/* "long tile" and the like; "" for none. */
const char *cli_tail_name(ekv_tail_cause cause);

#endif
