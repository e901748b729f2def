/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/even_cost.h"

#include "base/status.h"
#include "sim/linear_solve.h"

#include <inttypes.h>
#include <math.h>

enum { TERMS = 3 };

/* The terms of a time, over the time itself: their sum with the constants is to be 1. */
static void terms_of(const ekv_even_time *time, double terms[TERMS])
{
    terms[0] = 1 / time->us;
    terms[1] = (double)time->tokens / time->us;
    terms[2] = (double)time->requests / time->us;
}

ekv_status ekv_even_cost_fit(const ekv_even_time *times, int64_t count, ekv_even_cost *cost)
{
    double products[TERMS][TERMS] = { { 0 } }, sums[TERMS] = { 0 };
    for (int64_t i = 0; i < count; i++) {
        if (!(times[i].us > 0) || !isfinite(times[i].us))
            return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "times[%" PRId64 "] is %g us; it must be positive", i,
                            times[i].us);
        double terms[TERMS];
        terms_of(&times[i], terms);
        for (int r = 0; r < TERMS; r++) {
            sums[r] += terms[r];
            for (int c = 0; c < TERMS; c++)
                products[r][c] += terms[r] * terms[c];
        }
    }
    /* The normal equations, scaled so that the diagonal is 1. */
    double rows[TERMS][TERMS + 1], x[TERMS];
    for (int r = 0; r < TERMS; r++) {
        for (int c = 0; c < TERMS; c++)
            rows[r][c] = products[r][c] / sqrt(products[r][r] * products[c][c]);
        rows[r][TERMS] = sums[r] / sqrt(products[r][r]);
    }
    const double smallest = 1e-9; /* of a pivot */
    if (count < TERMS || !(ekv_linear_solve(rows[0], TERMS, INFINITY, x) > smallest))
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                        "%" PRId64 " times do not tell the costs of a launch, a token and a "
                        "request apart",
                        count);
    for (int r = 0; r < TERMS; r++)
        x[r] /= sqrt(products[r][r]);
    *cost = (ekv_even_cost){ .launch_us = x[0], .token_us = x[1], .request_us = x[2] };
    for (int64_t i = 0; i < count; i++) {
        double terms[TERMS], share = 0;
        terms_of(&times[i], terms);
        for (int c = 0; c < TERMS; c++)
            share += terms[c] * x[c];
        cost->worst = fmax(cost->worst, fabs(share - 1));
    }
    return EKV_OK;
}
