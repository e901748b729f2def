/* SPDX-License-Identifier: Apache-2.0
 * The inner loop of the CPU backend: attention of the query rows of some KV heads to a range of their tokens.
 *
 * Each kernel is one file, compiled for its instruction set and chosen at run time. */
#ifndef EVENKV_CPU_TILE_KERNEL_H
#define EVENKV_CPU_TILE_KERNEL_H

#include "evenkv/evenkv.h"

#include <stdbool.h>

/* Tokens that a kernel handles at once.  Blocks are counted from kv_begin, so that a tile's result does not
 * depend on pages.  32 rows of 128 floats take half of a first-level cache. */
enum { EKV_TILE_BLOCK = 32 };

/* Query rows whose softmax is computed together (tile_rows.h); scratch is for whole panels. */
enum { EKV_TILE_PANEL = 8 };

typedef struct ekv_cpu_tile {
    /* [heads][rows][head_dim], the kernel's q_dtype, at the beginning of room for [heads][panels][EKV_TILE_PANEL]
     * [head_dim] floats, aligned to 64 bytes, in which the kernel may arrange them; panels = ceil(rows /
     * EKV_TILE_PANEL). */
    void *q;
    int32_t heads; /* KV heads, one after the other in each block, so that pages are read as they lie */
    int32_t rows;  /* query rows of a head */
    int32_t head_dim;
    float scale;          /* > 0, of the logits */
    ekv_dtype kv_dtype;   /* F32, F16 or BF16 */
    const void *k, *v;    /* the first KV head at page 0, token 0 */
    const int32_t *pages; /* the request's */
    int32_t page_size;
    int32_t kv_begin, kv_end;
    int64_t k_stride_page, k_stride_token, k_stride_head; /* elements */
    int64_t v_stride_page, v_stride_token, v_stride_head;
    /* Scratch, aligned to 64 bytes. */
    float *p;     /* [panels][EKV_TILE_BLOCK][EKV_TILE_PANEL] */
    float *state; /* [heads][panels][2][EKV_TILE_PANEL] */
    /* The result: with dots m_t = q.k_t (not scaled) and their maximum, weights w_t = exp(scale * (m_t - max)),
     * the sum of w_t, and acc = sum of w_t v_t.  No tokens, or logits of -inf alone: -inf, 0, 0.  The maximum stays
     * apart from the sum because a float LSE of 8e6 would be too coarse to merge by. */
    float *acc;                       /* [heads] of [rows][head_dim] */
    float *max;                       /* [heads] of [rows] */
    float *sum;                       /* [heads] of [rows] */
    int64_t stride_acc, stride_state; /* from head to head, of acc; of max and sum */
} ekv_cpu_tile;

typedef struct ekv_cpu_kernel {
    const char *name; /* as in --kernel */
    ekv_kernel id;
    int32_t head_dim_step; /* what head_dim has to be a multiple of */
    ekv_dtype q_dtype;     /* of ekv_cpu_tile.q */
    bool bf16_only;        /* Q, K and V have to be bf16 */
    ekv_dtype p_dtype;     /* what softmax weights are rounded to before P.V */
    /* Every row's result is a function of its query, its tokens and kv_begin alone, bit for bit: not of the rows and
     * heads beside it, the thread, the page size or the strides. */
    void (*run)(const ekv_cpu_tile *tile);
    /* row[i] = acc[i] * factor, rounded to dtype, for n elements; acc changes. */
    void (*write)(float *acc, float factor, int32_t n, ekv_dtype dtype, void *row);
    /* weights[i] = 2^x[i] as `run` computes it, for n values <= 0, n a multiple of EKV_TILE_PANEL: for
     * tests. */
    void (*exp2)(const float *x, float *weights, int32_t n);
} ekv_cpu_kernel;

/* Kernel `index` of the build, slowest first; NULL past the last.  *runs_here: whether this CPU has what it needs. */
const ekv_cpu_kernel *ekv_cpu_kernel_at(int32_t index, bool *runs_here);

/* The fastest that this CPU has and that can do head_dim and dtypes, or the one asked for.  Errors: UNSUPPORTED (the
 * one asked for cannot, or is none of the CPU). */
ekv_status ekv_cpu_kernel_choose(const ekv_batch *batch, ekv_kernel wanted, const ekv_cpu_kernel **kernel);

#endif
