/* SPDX-License-Identifier: Apache-2.0
 * The records of a plan that device code reads too.  ekv_tile is public (evenkv.h); ekv_merge is not. */
#ifndef EVENKV_PLAN_RECORD_H
#define EVENKV_PLAN_RECORD_H

#include "base/portable.h"
#include "evenkv/evenkv.h"

/* One output that is merged from num_splits >= 1 partial results, in split order, for heads
 * [head, head + head_count) and rows of m_block.  Head `head + h` of split s lies in partial slot
 * ekv_merge_slot(m, s) + h. */
typedef struct ekv_merge {
    int32_t request;
    int32_t m_block;
    int32_t num_splits;
    int32_t slot_first;  /* of split 0 */
    int32_t slot_next;   /* of split 1 */
    int32_t slot_stride; /* from split 1 on */
    uint16_t head;
    uint16_t head_count;
    uint32_t reserved; /* 0 */
} ekv_merge;

#ifndef __cplusplus
_Static_assert(sizeof(ekv_tile) == 32, "ekv_tile is a 32-byte record");
_Static_assert(sizeof(ekv_merge) == 32, "ekv_merge is a 32-byte record");
#endif

/* The record of a tile on the device: one with a partial result has the index of its merge, which has the m_block, in
 * place of m_block. */
EKV_INLINE EKV_HD ekv_tile ekv_device_tile(ekv_tile tile, int32_t merge)
{
    if (tile.flags & EKV_TILE_PARTIAL)
        tile.m_block = merge;
    return tile;
}

EKV_INLINE EKV_HD int64_t ekv_merge_slot(const ekv_merge *merge, int32_t split)
{
    return split == 0 ? merge->slot_first : merge->slot_next + (int64_t)(split - 1) * merge->slot_stride;
}

#endif
