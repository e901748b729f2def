/* SPDX-License-Identifier: Apache-2.0
 * What the host passes to every kernel, by value.  Read by the host as C and by nvcc.
 *
 * The device copy of a plan is one block: a header, then the arrays whose places the kernels get as pointers.
 * What changes from one update to the next (counts) stands in the header, on the device, so that a captured
 * launch stays valid; what a launch fixes (grid, warps, shared memory) does not change over a plan's life. */
#ifndef EVENKV_CUDA_KERNELS_PARAMS_H
#define EVENKV_CUDA_KERNELS_PARAMS_H

#include "plan/record.h"

/* The counts of the plan that the device arrays hold.  64 bytes. */
typedef struct ekv_plan_header {
    int32_t num_tiles;
    int32_t num_merges;
    int32_t num_ctas;
    int32_t batch_size;
    int32_t reserved[12]; /* 0 */
} ekv_plan_header;

/* Under range dispatch, what a CTA begins with: its tiles are [tile_begin, tile_end), the first of them stands here
 * too, so that a CTA knows it after one access to memory.  48 bytes. */
typedef struct ekv_cta_record {
    int32_t tile_begin;
    int32_t tile_end;
    int32_t reserved[2]; /* 0 */
    ekv_tile first;      /* zeros where the CTA has no tile */
} ekv_cta_record;

/* One executed tile or merge, for timelines.  Written where params.stamps is set. */
typedef struct ekv_stamp {
    int64_t start_ns; /* %globaltimer */
    int64_t stop_ns;
    int32_t index; /* tile or merge */
    int32_t sm;    /* %smid */
    int32_t cta;
    int32_t kind; /* 0: never written, 1: tile, 2: merge */
} ekv_stamp;

typedef struct ekv_kernel_params {
    /* Tensors; strides in elements. */
    const void *q;
    const void *k;
    const void *v;
    void *o;
    float *lse; /* NULL: not wanted */
    int64_t q_stride_request, q_stride_head;
    int64_t k_stride_page, k_stride_token, k_stride_head;
    int64_t v_stride_page, v_stride_token, v_stride_head;
    int64_t o_stride_request, o_stride_head;
    int64_t lse_stride_request, lse_stride_head;

    /* Pages of request b: page_indices + page_indptr[b], or, where page_indptr is NULL,
     * page_indices + (table_rows ? table_rows[b] : b) * table_stride. */
    const int32_t *page_indptr;
    const int32_t *page_indices;
    const int32_t *table_rows;
    int64_t table_stride;

    /* The plan. */
    const ekv_plan_header *header;
    const ekv_tile *tiles; /* as ekv_device_tile has them */
    const ekv_merge *merges;
    const ekv_cta_record *ctas; /* range: [num_ctas] */

    /* The plan's too; 0 before and after each launch. */
    uint32_t *queue;    /* queue: claims so far */
    uint32_t *arrivals; /* mma: [slots][warps_per_head] (mma_result.cuh) */

    /* Workspace. */
    /* simt: [slots][slot_rows][head_dim], not normalised.  mma: [slots][8 or 16 rows * head_dim], in the order of the
     * registers of a product. */
    float *part_o;
    /* Largest score and sum of exp2 relative to it.  simt: [slots][slot_rows][2], the score not scaled.  mma:
     * [slots][warps_per_head][8 or 16 rows][2], the score times scale_log2. */
    float *part_ml;
    ekv_stamp *stamps; /* [num_tiles + num_merges * merge_heads] or NULL; merges from num_tiles on */

    float scale_log2; /* |sm_scale| * log2(e) */
    uint32_t q_signs; /* exclusive or with two elements of Q: the signs where sm_scale is negative, else 0 */
    float lse_factor; /* of a base-2 LSE: ln 2 for natural, 1 for base 2 */
    int32_t dispatch; /* ekv_dispatch */
    int32_t page_size;
    int32_t head_dim;
    int32_t group;             /* query heads a KV head */
    int32_t query_heads_tiled; /* 1: a tile's head is a query head (GQA not packed) */
    int32_t slot_rows;         /* simt: rows of a partial slot */
    int32_t merge_heads;       /* heads a merge, the same for all */
    int32_t stages;            /* mma: of a warp's ring, 1 to 4 */
    int32_t round_tokens;      /* mma: of a round, at most (mma_scout.cuh) */
    int32_t warps_per_head;    /* mma: warps that share a head's tokens */
    int32_t pages_aligned;     /* 1: 16 | page_size and every tile begins at a multiple of 16 */
} ekv_kernel_params;

#endif
