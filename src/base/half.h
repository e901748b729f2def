/* SPDX-License-Identifier: Apache-2.0
 * bf16 and fp16 as integers, IEEE 754 rules, round to nearest even. */
#ifndef EVENKV_BASE_HALF_H
#define EVENKV_BASE_HALF_H

#include "evenkv/evenkv.h"

#include <stdint.h>
#include <string.h>

static inline float ekv_bits_f32(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t ekv_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float ekv_bf16_to_f32(uint16_t value)
{
    return ekv_bits_f32((uint32_t)value << 16);
}

static inline uint16_t ekv_f32_to_bf16(float value)
{
    const uint32_t bits = ekv_f32_bits(value), high = bits >> 16;
    const uint32_t rounded = (bits + 0x7FFFu + (high & 1u)) >> 16, quiet_nan = high | 0x0040u;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded); /* no branch, for the vectoriser */
}

static inline float ekv_f16_to_f32(uint16_t value)
{
    uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
    uint32_t magnitude = value & 0x7FFFu;
    /* Subnormals and normals alike: rebias the exponent by an exact multiplication.  Infinity and NaN then get the
     * largest exponent; no branch, so that loops over rows are vectorised. */
    uint32_t bits = ekv_f32_bits(ekv_bits_f32(magnitude << 13) * 0x1p112f);
    return ekv_bits_f32(sign | bits | (magnitude >= 0x7C00u ? 0x7F800000u : 0));
}

static inline uint16_t ekv_f32_to_f16(float value)
{
    uint32_t bits = ekv_f32_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u)
        return (uint16_t)(sign | 0x7E00u);
    if (magnitude >= 0x477FF000u) /* rounds to 65536 or is infinite */
        return (uint16_t)(sign | 0x7C00u);
    if (magnitude < 0x38800000u) /* subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits */
        return (uint16_t)(sign | (ekv_f32_bits(ekv_bits_f32(magnitude) + 0.5f) - 0x3F000000u));
    magnitude += 0xFFFu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((magnitude - 0x38000000u) >> 13));
}

/* Bytes of an element; FP8 is 1. */
static inline int32_t ekv_dtype_size(ekv_dtype dtype)
{
    switch (dtype) {
    case EKV_DTYPE_F32: return 4;
    case EKV_DTYPE_F16:
    case EKV_DTYPE_BF16: return 2;
    case EKV_DTYPE_FP8_E4M3:
    case EKV_DTYPE_FP8_E5M2: return 1;
    }
    return 0;
}

#endif
