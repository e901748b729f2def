/* SPDX-License-Identifier: Apache-2.0
 * Small systems of linear equations, for fits. */
#ifndef EVENKV_SIM_LINEAR_SOLVE_H
#define EVENKV_SIM_LINEAR_SOLVE_H

#include <stdint.h>

/* Gaussian elimination with the largest pivot of each column.  rows: [n][n + 1], the right-hand sides behind the
 * matrix; destroyed.  No x[i] is beyond +-limit: one that would be is set there before those above it follow. Returns
 * the smallest pivot's magnitude; where that is 0, x means nothing. */
double ekv_linear_solve(double *rows, int32_t n, double limit, double *x);

#endif
