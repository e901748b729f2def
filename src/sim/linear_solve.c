/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/linear_solve.h"

#include <math.h>

double ekv_linear_solve(double *rows, int32_t n, double limit, double *x)
{
    const int32_t width = n + 1;
    double smallest = INFINITY;
    for (int32_t p = 0; p < n; p++) {
        double *pivot = rows + p * width;
        int32_t best = p;
        for (int32_t r = p + 1; r < n; r++)
            if (fabs(rows[r * width + p]) > fabs(rows[best * width + p]))
                best = r;
        for (int32_t c = 0; c < width; c++) {
            const double swapped = pivot[c];
            pivot[c] = rows[best * width + c];
            rows[best * width + c] = swapped;
        }
        smallest = fmin(smallest, fabs(pivot[p]));
        for (int32_t r = p + 1; r < n; r++) {
            double *row = rows + r * width;
            const double factor = row[p] / pivot[p];
            for (int32_t c = p; c < width; c++)
                row[c] -= pivot[c] * factor;
        }
    }
    for (int32_t r = n - 1; r >= 0; r--) {
        const double *row = rows + r * width;
        x[r] = row[n];
        for (int32_t c = r + 1; c < n; c++)
            x[r] -= row[c] * x[c];
        x[r] = fmin(fmax(x[r] / row[r], -limit), limit);
    }
    return smallest;
}
