/* SPDX-License-Identifier: Apache-2.0
 * What the CUDA backend asks of fa3 and its variants. */
#ifndef EVENKV_PLAN_PLANNER_FA3_H
#define EVENKV_PLAN_PLANNER_FA3_H

#include "plan/fa3_emit.h"
#include "plan/plan.h"

/* plan: built. */
ekv_fa3_shape ekv_fa3_shape_of(const ekv_plan *plan);

#endif
