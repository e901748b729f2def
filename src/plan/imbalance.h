/* SPDX-License-Identifier: Apache-2.0
 * How evenly a plan fills the device, with one token of one head as the unit of time. */
#ifndef EVENKV_PLAN_IMBALANCE_H
#define EVENKV_PLAN_IMBALANCE_H

#include "plan/plan.h"

typedef struct ekv_imbalance {
    int64_t max_tokens; /* of the busiest slot */
    double mean_tokens; /* over all num_sms * resident_ctas slots */
} ekv_imbalance;

/* Puts the tiles on slots as the dispatch does: range by its ranges; grid and queue each to the slot that is
 * free first.  Uses plan->slot_load. */
ekv_imbalance ekv_plan_imbalance(ekv_plan *plan);

#endif
