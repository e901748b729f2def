/* SPDX-License-Identifier: Apache-2.0
 * How far a correct decode may be from the reference, and the comparison. */
#ifndef EVENKV_CPU_TOLERANCE_H
#define EVENKV_CPU_TOLERANCE_H

#include "cpu/reference.h"
#include "plan/plan.h"

/* What a decode did to one output row, apart from its numbers. */
typedef struct ekv_row_shape {
    ekv_dtype o_dtype;
    ekv_dtype p_dtype; /* what softmax weights are rounded to before P.V: F32, or 16 bits on tensor cores */
    int32_t head_dim;
    int32_t kv_len;
    int32_t num_splits;
} ekv_row_shape;

/* Bounds on |o - ref| for one element and on |lse - ref_lse| (natural logarithm).  The derivation is in
 * tolerance.c.  Tight enough that one token left out of thousands, or an output 1 % off, exceeds it. */
double ekv_tolerance_o(const ekv_row_shape *shape, const ekv_row_scale *scale, double ref);
double ekv_tolerance_lse(const ekv_row_shape *shape, const ekv_row_scale *scale, double ref_lse);

typedef struct ekv_comparison {
    double max_ratio;   /* largest error over its tolerance, of O and LSE: the decode is right if <= 1; NaN
                           where there should be none counts as infinity */
    double max_abs_err; /* largest |o - ref| */
    double max_rel_err; /* largest |o - ref| over the largest |ref| of its row */
    int32_t request;    /* where max_ratio is */
    int32_t q_head;
    int32_t dim; /* -1: LSE */
} ekv_comparison;

/* Compares tensors->o and lse (host memory), as written by ekv_decode of `plan` with `lse_base`. */
ekv_comparison ekv_compare(const ekv_plan *plan, const ekv_tensors *tensors, ekv_lse_base lse_base, ekv_dtype p_dtype,
                           const ekv_reference *reference);

#endif
