/* SPDX-License-Identifier: Apache-2.0
 * Parameters of the kernels other than decode and merge (params.h), by value.  Read by the host as C and by nvcc. */
#ifndef EVENKV_CUDA_KERNELS_ARGS_H
#define EVENKV_CUDA_KERNELS_ARGS_H

#include "cuda/kernels/params.h"

/* ekv_plan_upload: the used parts of a plan's records from pinned host memory to the device, by the counts in
 * source's header.  Both sides: ekv_plan_header, then arrays at the same byte offsets, multiples of 16. */
typedef struct ekv_upload_params {
    const void *source;
    void *target;
    int64_t tiles_offset;  /* ekv_tile[num_tiles] */
    int64_t merges_offset; /* ekv_merge[num_merges] */
    int64_t ctas_offset;   /* ekv_cta_record[num_ctas]; -1: the plan has no ranges */
} ekv_upload_params;

/* ekv_merge_states_*: as ekv_merge_args, strides filled in. */
typedef struct ekv_states_params {
    const void *o_parts;
    int64_t part_stride_state, part_stride_row;
    const float *lse_parts;
    int64_t lse_stride_state, lse_stride_row;
    void *o;
    float *lse; /* NULL: not wanted */
    int64_t rows;
    int32_t num_states;
    int32_t head_dim;
    int32_t o_dtype;   /* ekv_dtype */
    float log2_factor; /* lse * log2_factor is a base-2 logarithm */
} ekv_states_params;

/* ekv_fill_tokens: random K or V for the tokens that requests have; grid.y over requests, all else over tokens. */
typedef struct ekv_fill_params {
    void *data;
    int64_t stride_page, stride_token, stride_head;
    const int32_t *page_indptr, *page_indices, *table_rows; /* as in ekv_kernel_params */
    int64_t table_stride;
    const int32_t *kv_len; /* [batch_size] */
    int32_t batch_size;
    int32_t page_size;
    int32_t heads;
    int32_t head_dim;
    int32_t dtype; /* ekv_dtype */
    float range;
    uint64_t seed;
} ekv_fill_params;

/* A piece of a request, as the reference cuts it. */
typedef struct ekv_reference_chunk {
    int32_t request;
    int32_t begin, end; /* tokens */
} ekv_reference_chunk;

enum { EKV_REFERENCE_MAX_DIM = 256 };

/* Doubles of a partial result of the reference: those named here, then o[head_dim], then abs_o[head_dim], o of
 * |V|.  o, abs_o, sum and sum_squares are relative to exp(largest). */
enum {
    EKV_REFERENCE_LARGEST,     /* score */
    EKV_REFERENCE_SUM,         /* of exp(score) */
    EKV_REFERENCE_SUM_SQUARES, /* of exp(score)^2 */
    EKV_REFERENCE_LOGIT,       /* largest |sm_scale| * sum over d of |q_d k_d| */
    EKV_REFERENCE_O
};

/* ekv_reference_*: grid (num_chunks, q_heads).  ekv_reference_merge: grid (batch_size, q_heads). */
typedef struct ekv_reference_params {
    ekv_kernel_params tensors;         /* q, k, v, their strides, page table, page_size, head_dim, group */
    const ekv_reference_chunk *chunks; /* [num_chunks], those of a request in a row */
    const int32_t *first_chunk;        /* [batch_size + 1] */
    double *parts;                     /* [num_chunks][q_heads][EKV_REFERENCE_O + 2 * head_dim] */
    double sm_scale;
    int32_t q_heads;
    double *o;     /* [batch_size][q_heads][head_dim] */
    double *lse;   /* [batch_size][q_heads], natural */
    double *scale; /* [batch_size][q_heads][3]: ekv_row_scale of cpu/reference.h */
} ekv_reference_params;

#endif
