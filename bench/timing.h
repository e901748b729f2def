/* SPDX-License-Identifier: Apache-2.0
 * What programs that time the host share. */
#ifndef EVENKV_BENCH_TIMING_H
#define EVENKV_BENCH_TIMING_H

#include "base/rng.h"

#include <math.h>
#include <stdint.h>
#include <time.h>

static inline double now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

/* For qsort. */
static inline int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Exponential round 1,000 tokens, at least 1, seed 1.  kv_len: [batch_size]. */
static inline void fill_lengths(int32_t *kv_len, int32_t batch_size)
{
    ekv_rng rng = { 1 };
    for (int32_t b = 0; b < batch_size; b++)
        kv_len[b] = 1 + (int32_t)(-1000 * log(1.0 - ekv_rng_unit(&rng)));
}

#endif
