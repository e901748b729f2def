/* SPDX-License-Identifier: Apache-2.0
 * exp for softmax weights: the same bits on every machine, and free of branches for the vectoriser. */
#ifndef EVENKV_CPU_EXPF_H
#define EVENKV_CPU_EXPF_H

#include "base/half.h"

/* exp(x) for x <= 0, within 2 units in the last place; exp(0) is 1, below -104 it is 0, and NaN stays NaN.  From about
 * -87 on down results are subnormal and good to half of the smallest one: a weight must not stop falling, since the
 * value that it weighs may be as large as 10^38.
 * x = n ln 2 + r with |r| <= ln(2)/2, and exp(r) by its Taylor series: the first term left out, r^8/8!, is below
 * 2^-27. */
static inline float ekv_exp_nonpositive(float x)
{
    const float round = 0x1.8p23f; /* adding it leaves an integer in the low bits of the significand */
    const float ln2_high = 0x1.62e4p-1f,
                ln2_low = 0x1.7f7d1cp-20f; /* ln 2 in 16 + 24 bits, so that n * high is exact */
    x = x < -104.0f ? -104.0f : x;
    const float shifted = x * 0x1.715476p0f + round; /* log2(e) */
    const float n = shifted - round;
    const float r = (x - n * ln2_high) - n * ln2_low;
    float e = 1.0f / 5040;
    e = e * r + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    return e * ekv_bits_f32((ekv_f32_bits(shifted) + 127 + 64) << 23) *
           0x1p-64f; /* 2^n alone may be no normal number */
}

#endif
