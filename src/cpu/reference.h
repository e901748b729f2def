/* SPDX-License-Identifier: Apache-2.0
 * The oracle: decode attention in double precision over the gathered tokens of each request, with no notion
 * of plans, tiles or blocks. */
#ifndef EVENKV_CPU_REFERENCE_H
#define EVENKV_CPU_REFERENCE_H

#include "base/context.h"

/* What the rounding error of an output row scales with (tolerance.h). */
typedef struct ekv_row_scale {
    double logit;  /* max over tokens t of |sm_scale| * sum over d of |q_d k_td| */
    double value;  /* max over d of sum over t of p_t |v_td|, p being the softmax weights */
    double p_norm; /* sqrt(sum of p_t^2): 1 if one token has all the weight, 1/sqrt(kv_len) if all weigh the same */
} ekv_row_scale;

typedef struct ekv_reference {
    ekv_context *context;
    ekv_batch batch;      /* kv_len is borrowed */
    double *o;            /* [batch_size][q_heads][head_dim] */
    double *lse;          /* [batch_size][q_heads], natural logarithm */
    ekv_row_scale *scale; /* [batch_size][q_heads] */
} ekv_reference;

/* batch and tensors must be such that ekv_decode accepts them on the CPU; kv_len must outlive the reference.
 * Spread over the context's threads.  Errors: OUT_OF_MEMORY. */
ekv_status ekv_reference_create(ekv_context *context, const ekv_batch *batch, const ekv_tensors *tensors,
                                ekv_reference **reference);
void ekv_reference_free(ekv_reference *reference);

#endif
