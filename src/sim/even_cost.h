/* SPDX-License-Identifier: Apache-2.0
 * What a decode by `even` costs on a device, out of measured times of batches of equal requests. */
#ifndef EVENKV_SIM_EVEN_COST_H
#define EVENKV_SIM_EVEN_COST_H

#include "evenkv/evenkv.h"

/* One measured batch. */
typedef struct ekv_even_time {
    int64_t tokens;   /* of all requests */
    int32_t requests; /* enough that most are whole: cuts are a part of launch_us then, as there are always as many */
    double us;        /* > 0 */
} ekv_even_time;

/* us = launch_us + token_us * tokens + request_us * requests */
typedef struct ekv_even_cost {
    double launch_us;
    double token_us;
    double request_us;
    double worst; /* largest |us by this / measured us - 1| */
} ekv_even_cost;

/* Least squares on the relative error.  On error *cost is untouched.
 * Errors: INVALID_ARGUMENT (a time that is not positive; times that do not tell the three constants apart, which takes
 * three batches at least that differ in tokens and in requests). */
ekv_status ekv_even_cost_fit(const ekv_even_time *times, int64_t count, ekv_even_cost *cost);

#endif
