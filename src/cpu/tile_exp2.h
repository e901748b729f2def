/* SPDX-License-Identifier: Apache-2.0
 * Powers of 2 for softmax weights: part of a tile kernel's file, which defines before
 *
 *     panel, ipanel          vector types of as many floats and int32_t
 *     panel_fma(a, b, c)     a * b + c
 *     panel_max(a, b)        a > b ? a : b in each lane, so b where one of them is NaN */
#include "cpu/tile_rows.h"

TILE_INLINE panel panel_load(const float *from)
{
    panel value;
    memcpy(&value, from, sizeof value);
    return value;
}

TILE_INLINE void panel_store(float *to, panel value)
{
    memcpy(to, &value, sizeof value);
}

TILE_INLINE panel panel_splat(float value)
{
    return value - (panel){ 0 }; /* not +: -0 is to stay */
}

/* 2^x for x <= 0 in each lane, within 2^-23 relatively; 2^0 is 1, from -150 down it is 0, and NaN stays NaN.
 * Below -126 results are subnormal, with half of the smallest one as a further error: a weight must not stop falling,
 * since the value that it weighs may be as large as 10^38. x = n + f with |f| <= 1/2; the polynomial is 1 at 0 and
 * within 2.0e-9 of 2^f, relatively (fitted to the smallest maximum by iteratively reweighted least squares,
 * coefficients then rounded). */
TILE_INLINE panel panel_exp2(panel x)
{
    const panel round = panel_splat(0x1.8p23f); /* adding it leaves an integer in the low bits of the significand */
    x = panel_max(panel_splat(-150.0f), x);
    const panel shifted = x + round;
    const panel f = x - (shifted - round);
    panel e = panel_splat(0x1.41fbbcp-13f);
    e = panel_fma(e, f, panel_splat(0x1.5f3e52p-10f));
    e = panel_fma(e, f, panel_splat(0x1.3b2d4cp-7f));
    e = panel_fma(e, f, panel_splat(0x1.c6aee8p-5f));
    e = panel_fma(e, f, panel_splat(0x1.ebfbdcp-3f));
    e = panel_fma(e, f, panel_splat(0x1.62e430p-1f));
    e = panel_fma(e, f, panel_splat(1.0f));
    /* 2^n alone may be no normal number */
    return e * (panel)(((ipanel)shifted + (127 + 64)) << 23) * 0x1p-64f;
}
