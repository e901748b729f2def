/* SPDX-License-Identifier: Apache-2.0
 * The error of a decode in floating point.
 *
 * A decode computes s_t = scale * q.k_t, p_t = exp(s_t - m) / sum, o = sum of p_t v_t with float arithmetic of unit
 * roundoff u = 2^-24, and rounds o to its dtype.  Inputs are exact.  A sum of n terms has an error of at most n u
 * times the sum of magnitudes, and of RANDOM * sqrt(n) u with a probability that can be relied on (rounding errors
 * are nearly independent of mean zero: Higham and Mary, "A new approach to probabilistic rounding error analysis",
 * SIAM J. Sci. Comput. 41, 2019); RANDOM is their lambda.  With L = scale * sum |q_d k_td|, at its largest over t:
 *
 *   logit    the dot product is off by RANDOM sqrt(head_dim) u L, its scale, the subtraction of the maximum and the
 *            product with log2(e) each by u times at most 2 L, together within 4 u L more;
 *   weight   so exp(s_t - m) is off by eta = u ((RANDOM sqrt(head_dim) + 4) L + 8), relatively: exp itself is good
 *            to a few u, and the rescaling of partial results takes another exp of the same quality;
 *   softmax  o changes by the sum of p_t delta_t (v_t - o) when p_t changes by p_t delta_t, so by at most
 *            2 eta S, where S = sum of p_t |v_t|, as |o| <= S;
 *   sums     kv_len terms in the numerator and as many in the denominator, one rescaling and one addition more for
 *            each split and for each block, of which there are fewer than terms: 2 kv_len + 2 num_splits operations,
 *            in numerator and denominator: 2 RANDOM sqrt(.) u S, and a division, 2 u S;
 *   P        where the weights are rounded to p_dtype before P.V, the errors u_p p_t are independent, of mean zero:
 *            RANDOM u_p sqrt(sum of p_t^2 (v_t - o)^2), within RANDOM u_p p_norm 2 S for values of one magnitude;
 *   output   rounding o to its dtype: u_o |o|, or half of the smallest subnormal.
 *
 * The natural logarithm of the sum has the relative errors of the sum as absolute ones, and a float's own rounding
 * of m, of the logarithm, of their sum and of a change of base. */
#include "cpu/tolerance.h"

#include "cpu/convert.h"
#include "plan/tensors.h"

#include <math.h>

#define UNIT 0x1p-24
#define RANDOM 4.0

static double unit_roundoff(ekv_dtype dtype)
{
    return dtype == EKV_DTYPE_BF16 ? 0x1p-8 : dtype == EKV_DTYPE_F16 ? 0x1p-11 : UNIT;
}

static double half_smallest(ekv_dtype dtype)
{
    return dtype == EKV_DTYPE_BF16 ? 0x1p-134 : dtype == EKV_DTYPE_F16 ? 0x1p-25 : 0x1p-150;
}

static double weight_error(const ekv_row_shape *shape, const ekv_row_scale *scale)
{
    return UNIT * ((RANDOM * sqrt(shape->head_dim) + 4) * scale->logit + 8);
}

static double sum_error(const ekv_row_shape *shape)
{
    return UNIT * RANDOM * sqrt(2.0 * shape->kv_len + 2.0 * shape->num_splits);
}

double ekv_tolerance_o(const ekv_row_shape *shape, const ekv_row_scale *scale, double ref)
{
    double inner = 2 * weight_error(shape, scale) + 2 * sum_error(shape) + 2 * UNIT;
    if (shape->p_dtype != EKV_DTYPE_F32)
        inner += 2 * RANDOM * unit_roundoff(shape->p_dtype) * scale->p_norm;
    inner *= scale->value;
    return inner + unit_roundoff(shape->o_dtype) * (fabs(ref) + inner) + half_smallest(shape->o_dtype);
}

double ekv_tolerance_lse(const ekv_row_shape *shape, const ekv_row_scale *scale, double ref_lse)
{
    return weight_error(shape, scale) + sum_error(shape) + 4 * UNIT * fabs(ref_lse);
}

/* Error over tolerance; anything but a number counts as infinitely wrong. */
static double ratio(double value, double ref, double tolerance)
{
    if (value == ref)
        return 0;
    double result = fabs(value - ref) / tolerance;
    return result >= 0 ? result : INFINITY;
}

static void note_ratio(ekv_comparison *comparison, double value, int64_t row, int32_t q_heads, int32_t dim)
{
    if (value <= comparison->max_ratio)
        return;
    comparison->max_ratio = value;
    comparison->request = (int32_t)(row / q_heads);
    comparison->q_head = (int32_t)(row % q_heads);
    comparison->dim = dim;
}

static double element(const void *row, ekv_dtype dtype, int32_t d)
{
    float value;
    ekv_row_to_f32(ekv_element(row, dtype, d), dtype, 1, &value);
    return value;
}

static void compare_row(ekv_comparison *c, const ekv_row_shape *shape, const ekv_reference *reference, int64_t row,
                        const void *o)
{
    const double *ref = reference->o + row * shape->head_dim;
    double largest = 0, error = 0;
    for (int32_t d = 0; d < shape->head_dim; d++) {
        double value = element(o, shape->o_dtype, d);
        double tolerance = shape->kv_len ? ekv_tolerance_o(shape, &reference->scale[row], ref[d]) : 0;
        note_ratio(c, ratio(value, ref[d], tolerance), row, reference->batch.q_heads, d);
        largest = fmax(largest, fabs(ref[d]));
        error = fmax(error, fabs(value - ref[d]));
    }
    c->max_abs_err = fmax(c->max_abs_err, error);
    if (largest > 0)
        c->max_rel_err = fmax(c->max_rel_err, error / largest);
}

ekv_comparison ekv_compare(const ekv_plan *plan, const ekv_tensors *tensors, ekv_lse_base lse_base, ekv_dtype p_dtype,
                           const ekv_reference *reference)
{
    const ekv_batch *batch = &reference->batch;
    const double natural = lse_base == EKV_LSE_BASE2 ? 0.69314718055994530942 : 1; /* ln 2 */
    ekv_tensors t = *tensors;
    ekv_tensors_set_defaults(batch, &t);
    ekv_comparison comparison = { 0 };
    for (int32_t b = 0; b < batch->batch_size; b++) {
        const ekv_row_shape shape = { .o_dtype = batch->q_dtype,
                                      .p_dtype = p_dtype,
                                      .head_dim = batch->head_dim,
                                      .kv_len = batch->kv_len[b],
                                      .num_splits = plan->num_splits[b] };
        for (int32_t h = 0; h < batch->q_heads; h++) {
            const int64_t row = (int64_t)b * batch->q_heads + h;
            compare_row(&comparison, &shape, reference, row,
                        ekv_element(t.o, batch->q_dtype, b * t.o_stride_request + h * t.o_stride_head));
            if (t.lse) {
                double lse = t.lse[b * t.lse_stride_request + h * t.lse_stride_head] * natural;
                double tolerance = ekv_tolerance_lse(&shape, &reference->scale[row], reference->lse[row]);
                note_ratio(&comparison, ratio(lse, reference->lse[row], tolerance), row, batch->q_heads, -1);
            }
        }
    }
    return comparison;
}
