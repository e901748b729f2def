/* SPDX-License-Identifier: Apache-2.0
 * A paged KV cache with random contents and the other tensors of a decode: input of tests and of `evenkv run`.
 *
 *     ekv_random_cache_options options = EKV_RANDOM_CACHE_OPTIONS_INIT;
 *     ekv_random_cache *cache;
 *     ekv_random_cache_create(context, &batch, &options, &cache);
 *     ekv_decode(plan, ekv_random_cache_tensors(cache), NULL, workspace, size);
 *
 * K, V and Q of a token depend on the seed, the request's id, the token and the head only: not on layout, page
 * size, page order, strides or the rest of the batch.  K and V are uniform in [-1, 1), Q in [-q_range, q_range).
 * Whatever no decode may read (rows past a length, unused pages, padding) is NaN, and O and LSE start as NaN
 * between guard bands.
 *
 * This file, reference.h and tolerance.h form the static library evenkv_reference, which is no part of
 * libevenkv: link it next to evenkv_static. */
#ifndef EVENKV_CPU_RANDOM_CACHE_H
#define EVENKV_CPU_RANDOM_CACHE_H

#include "base/context.h"

#include <stdbool.h>

typedef struct ekv_random_cache_options {
    uint64_t seed;
    bool ordered_pages;         /* pages in request order; else shuffled by the seed */
    bool block_table;           /* a padded block table with shuffled rows; else CSR */
    bool no_lse;                /* tensors.lse is NULL */
    int32_t extra_pages;        /* pages that no request uses, among the others */
    int32_t row_padding;        /* elements after each row of K, V, Q and O: strides are then explicit */
    float q_range;              /* 4: logits have a standard deviation of 4/3 whatever head_dim */
    const int32_t *request_ids; /* [batch_size] or NULL: 0, 1, ... */
} ekv_random_cache_options;
#define EKV_RANDOM_CACHE_OPTIONS_INIT         \
    {                                         \
        1, false, false, false, 3, 0, 4.0f, 0 \
    }

typedef struct ekv_random_cache ekv_random_cache;

/* batch: a checked one, as in a plan (plan->batch), or one that ekv_plan_create has accepted.
 * Errors: UNSUPPORTED (FP8), OVERFLOW, OUT_OF_MEMORY. */
ekv_status ekv_random_cache_create(ekv_context *context, const ekv_batch *batch,
                                   const ekv_random_cache_options *options, ekv_random_cache **cache);
void ekv_random_cache_free(ekv_random_cache *cache);

/* Owned by the cache; the caller may change members. */
ekv_tensors *ekv_random_cache_tensors(ekv_random_cache *cache);

/* Sets O and LSE to NaN again, for another decode over the same inputs. */
void ekv_random_cache_reset(ekv_random_cache *cache);

/* False if something was written outside the rows of O and LSE. */
bool ekv_random_cache_guards_intact(const ekv_random_cache *cache);

#endif
