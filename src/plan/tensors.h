/* SPDX-License-Identifier: Apache-2.0
 * The tensors of a decode, resolved: a copy of the caller's ekv_tensors in which every stride is explicit and
 * sm_scale is set.  Backends and the reference see resolved tensors only. */
#ifndef EVENKV_PLAN_TENSORS_H
#define EVENKV_PLAN_TENSORS_H

#include "base/half.h"
#include "evenkv/evenkv.h"

/* Fills in dense strides and the default scale.  tensors: a full ekv_tensors with pointers of any kind. */
void ekv_tensors_set_defaults(const ekv_batch *batch, ekv_tensors *tensors);

/* Checks all that can be checked without reading through a pointer: NULLs, alignment, page table form,
 * strides, scale.  tensors: with defaults set.  Errors: INVALID_ARGUMENT, OVERFLOW. */
ekv_status ekv_tensors_check(const ekv_batch *batch, const ekv_tensors *tensors);

/* Checks a page table in host memory against the batch's lengths: one pass over the used entries.  tensors:
 * accepted by ekv_tensors_check.  Errors: INVALID_ARGUMENT, OVERFLOW. */
ekv_status ekv_tensors_check_pages(const ekv_batch *batch, const ekv_tensors *tensors);

/* Entries of a request's page table, [ceil(kv_len / page_size)]. */
static inline const int32_t *ekv_tensors_pages(const ekv_tensors *tensors, int32_t request)
{
    if (tensors->page_indptr)
        return tensors->page_indices ? tensors->page_indices + tensors->page_indptr[request] : NULL;
    if (!tensors->block_table)
        return NULL; /* a batch without tokens */
    int64_t row = tensors->block_table_rows ? tensors->block_table_rows[request] : request;
    return tensors->block_table + row * tensors->block_table_stride;
}

#endif
