/* SPDX-License-Identifier: Apache-2.0
 * The inner loop of the CPU backend: attention of the query rows of one KV head to a range of its tokens. */
#ifndef EVENKV_CPU_TILE_KERNEL_H
#define EVENKV_CPU_TILE_KERNEL_H

#include "evenkv/evenkv.h"

/* Tokens that a kernel handles at once.  Blocks are counted from kv_begin, so that a tile's result does not
 * depend on pages.  32 rows of 128 floats take half of a first-level cache. */
enum { EKV_TILE_BLOCK = 32 };

typedef struct ekv_cpu_tile {
    const float *q; /* [rows][head_dim] */
    int32_t rows;
    int32_t head_dim;     /* a multiple of 8 */
    float scale;          /* > 0, of the logits */
    ekv_dtype kv_dtype;   /* F32, F16 or BF16 */
    const void *k, *v;    /* this KV head at page 0, token 0 */
    const int32_t *pages; /* the request's */
    int32_t page_size;
    int32_t kv_begin, kv_end;
    int64_t k_stride_page, k_stride_token; /* elements */
    int64_t v_stride_page, v_stride_token;
    float *block; /* scratch, [EKV_TILE_BLOCK][head_dim] */
    float *p;     /* scratch, [rows][EKV_TILE_BLOCK] */
    /* The result: with dots m_t = q.k_t (not scaled) and their maximum, weights w_t = exp(scale * (m_t - max)),
     * the sum of w_t, and acc = sum of w_t v_t.  No tokens, or logits of -inf alone: -inf, 0, 0.  The maximum stays
     * apart from the sum because a float LSE of 8e6 would be too coarse to merge by. */
    float *acc; /* [rows][head_dim] */
    float *max; /* [rows] */
    float *sum; /* [rows] */
} ekv_cpu_tile;

/* Every row's result is a function of its query, its tokens and kv_begin alone, bit for bit: not of the rows
 * beside it, the thread, the page size or the strides. */
typedef void ekv_cpu_tile_kernel(const ekv_cpu_tile *tile);

/* Portable C. */
ekv_cpu_tile_kernel ekv_tile_kernel_generic;

#endif
