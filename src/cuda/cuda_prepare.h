/* SPDX-License-Identifier: Apache-2.0
 * On-device plans: their records are written on the GPU, from lengths that live there.  Needs no CUDA header. */
#ifndef EVENKV_CUDA_CUDA_PREPARE_H
#define EVENKV_CUDA_CUDA_PREPARE_H

#include "cuda/kernels/params.h"
#include "plan/plan.h"

/* For a new plan of options.on_device: memory of the plan's own for the upper bounds and for what one kernel leaves to
 * the next.  It belongs to ekv_cuda_plan.planning.  The context is current.  Errors: OUT_OF_MEMORY, DRIVER. */
ekv_status ekv_cuda_prepare_create(ekv_plan *plan);

/* Enqueues on `stream` what writes the plan's records for kv_len (device, [batch_size]).  Its launches are the same
 * for all lengths.  The context is current. */
ekv_status ekv_cuda_prepare(ekv_plan *plan, const int32_t *kv_len, void *stream);

/* ---- For tests and benches ------------------------------------------------------------------------------ */

/* ekv_cuda_prepare from any context. */
ekv_status ekv_cuda_prepare_alone(ekv_plan *plan, const int32_t *kv_len, void *stream);

/* Where a plan's records are on the device: one block, from the header on. */
typedef struct ekv_cuda_records {
    size_t size; /* of the block, in bytes */
    ekv_plan_header *header;
    ekv_tile *tiles;      /* [capacity.tiles] */
    ekv_merge *merges;    /* [capacity.merges] */
    ekv_cta_record *ctas; /* [capacity.ctas] */
} ekv_cuda_records;

/* plan: made with options.cuda. */
ekv_cuda_records ekv_cuda_records_of(const ekv_plan *plan);

#endif
