/* SPDX-License-Identifier: Apache-2.0
 * What FlashInfer's two decode grids share: one chunk length for the whole batch, found by a search over whole
 * pages, and work items (request, m_block, split) numbered in that order. */
#ifndef EVENKV_PLAN_SPLIT_GRID_H
#define EVENKV_PLAN_SPLIT_GRID_H

#include "plan/plan.h"

/* Tokens of the smallest chunk, in whole pages and of at least one page and about 128 tokens, that cuts the
 * batch into at most `budget` pieces; where none does, the longest request rounded up to whole pages.
 * count_empty: a request without tokens counts as one piece, else as none. */
int64_t ekv_split_grid_chunk(const ekv_plan *plan, int64_t budget, bool count_empty);

/* Tokens of the longest request, rounded up to whole pages; one page for a batch without tokens. */
int64_t ekv_split_grid_longest(const ekv_plan *plan);

/* For build(): cuts every request into chunks of chunk_tokens (at least one) and sets num_splits, batch_order,
 * split_kv, kv_chunk_tokens, num_work_items and max_work_items. */
void ekv_split_grid_cut(ekv_plan *plan, int64_t chunk_tokens, bool split_kv);

/* For build(), after the cut: appends the tiles, head by head and in each head work item by work item, and the
 * merges.  Where split_kv is set every request goes through partial results, those of one split too.
 * Uses plan->scratch as int32_t [batch_size]. */
void ekv_split_grid_emit(ekv_plan *plan);

#endif
