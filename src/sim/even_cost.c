/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/even_cost.h"

#include "base/status.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>

enum { TERMS = 3 };

/* Gaussian elimination with the largest pivot of a column; false where the rows do not determine x. */
static bool solve(double rows[TERMS][TERMS + 1], double x[TERMS])
{
    const double smallest = 1e-9; /* of a pivot, where the matrix has ones on its diagonal */
    for (int c = 0; c < TERMS; c++) {
        int pivot = c;
        for (int r = c + 1; r < TERMS; r++)
            if (fabs(rows[r][c]) > fabs(rows[pivot][c]))
                pivot = r;
        if (!(fabs(rows[pivot][c]) > smallest))
            return false;
        for (int k = 0; k <= TERMS; k++) {
            const double swapped = rows[c][k];
            rows[c][k] = rows[pivot][k];
            rows[pivot][k] = swapped;
        }
        for (int r = c + 1; r < TERMS; r++) {
            const double factor = rows[r][c] / rows[c][c];
            for (int k = c; k <= TERMS; k++)
                rows[r][k] -= factor * rows[c][k];
        }
    }
    for (int c = TERMS - 1; c >= 0; c--) {
        x[c] = rows[c][TERMS];
        for (int k = c + 1; k < TERMS; k++)
            x[c] -= rows[c][k] * x[k];
        x[c] /= rows[c][c];
    }
    return true;
}

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
    if (count < TERMS || !solve(rows, x))
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
