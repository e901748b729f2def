/* SPDX-License-Identifier: Apache-2.0
 * Seeded random numbers that are the same on every machine: SplitMix64 (Steele, Lea, Flood: "Fast splittable
 * pseudorandom number generators", OOPSLA 2014). */
#ifndef EVENKV_BASE_RNG_H
#define EVENKV_BASE_RNG_H

#include "base/portable.h"

typedef struct ekv_rng {
    uint64_t state;
} ekv_rng;

EKV_INLINE EKV_HD uint64_t ekv_rng_next(ekv_rng *rng)
{
    uint64_t z = rng->state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Uniform in [0, 1). */
EKV_INLINE EKV_HD double ekv_rng_unit(ekv_rng *rng)
{
    return (double)(ekv_rng_next(rng) >> 11) * 0x1p-53;
}

/* Uniform in 0..n-1, n >= 1; the bias of n / 2^64 does not matter to any use here. */
EKV_INLINE EKV_HD int64_t ekv_rng_below(ekv_rng *rng, int64_t n)
{
    return (int64_t)(ekv_rng_next(rng) % (uint64_t)n);
}

#endif
