/* SPDX-License-Identifier: Apache-2.0
 * What lets one header serve the host compiler and nvcc. */
#ifndef EVENKV_BASE_PORTABLE_H
#define EVENKV_BASE_PORTABLE_H

#include <stdint.h>

#if defined(__CUDACC__)
#define EKV_HD __host__ __device__
#define EKV_INLINE static __forceinline__
#else
#define EKV_HD
#define EKV_INLINE static inline
#endif

/* a > 0, b > 0 or a == 0 */
EKV_INLINE EKV_HD int64_t ekv_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

EKV_INLINE EKV_HD int64_t ekv_round_up(int64_t a, int64_t b)
{
    return ekv_ceil_div(a, b) * b;
}

EKV_INLINE EKV_HD int64_t ekv_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

EKV_INLINE EKV_HD int64_t ekv_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

#endif
