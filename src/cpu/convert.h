/* SPDX-License-Identifier: Apache-2.0
 * Rows of elements to and from float. */
#ifndef EVENKV_CPU_CONVERT_H
#define EVENKV_CPU_CONVERT_H

#include "base/half.h"

/* Address of element `offset`. */
static inline const void *ekv_element(const void *base, ekv_dtype dtype, int64_t offset)
{
    return (const char *)base + offset * ekv_dtype_size(dtype);
}

static inline void *ekv_element_mutable(void *base, ekv_dtype dtype, int64_t offset)
{
    return (char *)base + offset * ekv_dtype_size(dtype);
}

/* row: [n], F32, F16 or BF16. */
static inline void ekv_row_to_f32(const void *restrict row, ekv_dtype dtype, int32_t n, float *restrict out)
{
    const uint16_t *halves = row;
    if (dtype == EKV_DTYPE_F32)
        memcpy(out, row, (size_t)n * sizeof *out);
    else if (dtype == EKV_DTYPE_F16)
        for (int32_t i = 0; i < n; i++)
            out[i] = ekv_f16_to_f32(halves[i]);
    else
        for (int32_t i = 0; i < n; i++)
            out[i] = ekv_bf16_to_f32(halves[i]);
}

static inline void ekv_row_from_f32(const float *restrict in, int32_t n, ekv_dtype dtype, void *restrict row)
{
    uint16_t *halves = row;
    if (dtype == EKV_DTYPE_F32)
        memcpy(row, in, (size_t)n * sizeof *in);
    else if (dtype == EKV_DTYPE_F16)
        for (int32_t i = 0; i < n; i++)
            halves[i] = ekv_f32_to_f16(in[i]);
    else
        for (int32_t i = 0; i < n; i++)
            halves[i] = ekv_f32_to_bf16(in[i]);
}

#endif
