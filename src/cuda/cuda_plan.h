/* SPDX-License-Identifier: Apache-2.0
 * A plan's records where kernels read them: one copy on the device, and pinned buffers on the way to it.  An on-device
 * plan has no such buffers: kernels write its records (cuda_prepare.h). */
#ifndef EVENKV_CUDA_CUDA_PLAN_H
#define EVENKV_CUDA_CUDA_PLAN_H

#include "cuda/cuda_context.h"
#include "cuda/kernels/params.h"
#include "plan/plan.h"

extern const ekv_plan_copies ekv_cuda_plan_copies;

/* Places of the arrays in a copy of the records. */
typedef struct ekv_records_layout {
    size_t tiles, merges, ctas; /* bytes from the header on */
    size_t size;
    bool ranges;
} ekv_records_layout;

typedef struct ekv_staging {
    unsigned char *host; /* pinned */
    CUdeviceptr mapped;  /* the same memory as kernels see it */
    CUevent copied;      /* after the last transfer out of it */
} ekv_staging;

/* Outside graphs two buffers take turns, so that an update waits for the transfer before the last at most.  Graphs
 * have one of their own, because a captured transfer always reads the same place. */
enum { EKV_STAGING_CAPTURED = 2, EKV_NUM_STAGING };

typedef struct ekv_cuda_plan {
    ekv_cuda *cuda;
    ekv_records_layout layout;
    CUdeviceptr records;
    CUdeviceptr counters; /* uint32_t: of the queue, and of arrivals at merges (params.h); 0 between decodes */
    ekv_staging staging[EKV_NUM_STAGING];
    int32_t max_kv_len;
    int32_t tile_heads;          /* heads a tile, the same for all tiles */
    int32_t most_warps_per_head; /* of an mma kernel; 0: not even one fits */
    int32_t *merge_of_slot;      /* [capacity.slots], of the last records written; NULL for an on-device plan */

    int32_t latest;                   /* staging[latest] holds the plan's records */
    bool uploaded;                    /* a transfer out of it is enqueued ... */
    unsigned long long upload_stream; /* ... on the stream of this id */

    bool captured;       /* some graph transfers from staging[EKV_STAGING_CAPTURED] */
    cuuint64_t capture;  /* id of the last capture with a transfer */
    CUstream origin;     /* stream of that transfer; a capturing stream cannot be asked for its id */
    CUevent transferred; /* after that transfer, for the other streams of the capture */

    /* An on-device plan has these and no staging. */
    CUdeviceptr planning; /* laid out by cuda_prepare.c */
    bool planned;         /* a decode has enqueued the writing of records */
} ekv_cuda_plan;

/* Enqueues on `stream` what makes the device copy hold the plan's records before the next work of the stream.
 * *capturing: whether the stream is being captured.  The context is current. */
ekv_status ekv_cuda_plan_transfer(ekv_plan *plan, CUstream stream, bool *capturing);

#endif
