/* SPDX-License-Identifier: Apache-2.0
 * What even and even-invariant share on the host. */
#ifndef EVENKV_PLAN_PLANNER_EVEN_H
#define EVENKV_PLAN_PLANNER_EVEN_H

#include "plan/even_rule.h"
#include "plan/plan.h"

/* For capacity(): resolves heads_per_tile, ctas_per_sm and request_cost and sets the fields that no update changes. */
void ekv_even_resolve(ekv_plan *plan);

/* For fits(): refuses lengths whose line, of group_cost a head group, leaves 64 bits when it is divided into shares.
 * Errors: OVERFLOW. */
ekv_status ekv_even_fit_line(const ekv_plan *plan, int64_t group_cost);

/* The line of the plan's batch, less cost and total. */
ekv_even_line ekv_even_line_of(const ekv_plan *plan);

/* For build(): the fields of a plan of range dispatch in which no request is cut, and the line of its batch less the
 * total. */
ekv_even_line ekv_even_start(ekv_plan *plan, const int64_t *cost);

/* For build(): the first piece of a pair that merges num_splits pieces. */
void ekv_even_add_merge(ekv_plan *plan, ekv_merge merge);

/* For build(): where the CTA ends whose share ends at x; *request, from 0 at the first call, only ever rises. */
static inline bool ekv_even_advance(const ekv_even_line *line, int64_t x, int32_t *request)
{
    if (x >= line->total)
        return false;
    while (line->groups * line->cost[*request + 1] <= x)
        ++*request;
    return true;
}

#endif
