/* SPDX-License-Identifier: Apache-2.0
 * Parameters of the kernels that plan on the GPU (prepare.cu), by value.  Read by the host as C and by nvcc. */
#ifndef EVENKV_CUDA_KERNELS_PREPARE_H
#define EVENKV_CUDA_KERNELS_PREPARE_H

#include "cuda/kernels/params.h"
#include "plan/even_emit.h"
#include "plan/fa3_emit.h"

enum {
    EKV_PREPARE_THREADS = 1024,
    EKV_EMIT_ALONE_REQUESTS = 3071, /* of more requests, or for more CTAs, many CTAs write the records */
    EKV_EMIT_ALONE_CTAS = 1024,
    EKV_EMIT_EVEN_THREADS = 128, /* all on one CTA of the plan */
    EKV_EMIT_FA3_THREADS = 128   /* a warp on one request */
};

/* Lengths in, records out. */
typedef struct ekv_prepare_io {
    const int32_t *kv_len; /* [batch_size], the caller's */
    const int32_t *bound;  /* [batch_size]: a length is taken as at least 0 and at most this */
    ekv_plan_header *header;
    ekv_tile *tiles;
    ekv_merge *merges;
    ekv_cta_record *ctas; /* NULL: the plan has no ranges */
    int32_t num_ctas;     /* of ctas; 0 for NULL */
} ekv_prepare_io;

/* ekv_prepare_even, grid (1); ekv_emit_even: any grid.  The same with _invariant. */
typedef struct ekv_prepare_even_params {
    ekv_prepare_io io;
    ekv_even_line line; /* less cost, kv_len and total */
    /* Between the two kernels: */
    int32_t *kv_len;      /* [batch_size], within the bounds */
    int64_t *cost;        /* [batch_size + 1], as in ekv_even_line */
    int32_t *partial;     /* [batch_size + 1], as in ekv_even_chunks */
    int32_t *cut;         /* [batch_size + 1], as in ekv_even_chunk_line */
    ekv_even_mark *marks; /* [line.num_ctas + 1] */
    int32_t emit;         /* 1: ekv_prepare_* writes the records, too, and ekv_emit_* is not launched */
} ekv_prepare_even_params;

/* ekv_prepare_fa3: a CTA for each EKV_FA3_PREPARE_REQUESTS requests; ekv_emit_fa3: any grid. */
typedef struct ekv_prepare_fa3_params {
    ekv_prepare_io io;
    ekv_fa3_shape shape;
    ekv_fa3_work *works; /* [batch_size], in order */
} ekv_prepare_fa3_params;

#endif
