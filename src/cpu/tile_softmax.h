/* SPDX-License-Identifier: Apache-2.0
 * Softmax weights of a panel in vectors of PANEL rows: part of a tile kernel's file, which defines before what
 * tile_exp2.h wants, of PANEL lanes. */
#include "cpu/tile_exp2.h"

static void panel_exp2_all(const float *x, float *weights, int32_t n)
{
    for (int32_t i = 0; i < n; i += PANEL)
        panel_store(weights + i, panel_exp2(panel_load(x + i)));
}

/* Turns the dots of n tokens, p: [n][PANEL], into weights against the new maximum of each row; alpha: [PANEL], what
 * old sums are to be scaled by. */
static inline void to_weights(float scale, int32_t n, float *p, tile_state *state, float *alpha)
{
    const panel old = panel_load(state->max);
    panel most = old;
    for (int32_t t = 0; t < n; t++)
        most = panel_max(panel_load(p + t * PANEL), most);
    /* -inf - -inf is NaN: where there is nothing but -inf, weights are those of any finite maximum, 0 */
    const panel from = panel_max(most, panel_splat(-0x1.fffffep127f));
    const float scale2 = scale * 0x1.715476p0f; /* log2(e): weights are powers of 2 */
    panel total = { 0 };
    for (int32_t t = 0; t < n; t++) {
        const panel weights = panel_exp2((panel_load(p + t * PANEL) - from) * scale2);
        panel_store(p + t * PANEL, weights);
        total += weights;
    }
    const panel rescale = panel_exp2((old - from) * scale2);
    panel_store(alpha, rescale);
    panel_store(state->max, most);
    panel_store(state->sum, panel_load(state->sum) * rescale + total);
}
