/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/imbalance.h"

#include <string.h>

static int64_t tile_tokens(const ekv_tile *tile)
{
    return (int64_t)(tile->kv_end - tile->kv_begin) * tile->head_count;
}

/* heap: min-heap of loads.  Adds tokens to the least of them. */
static void add_to_least(int64_t *heap, int64_t slots, int64_t tokens)
{
    int64_t load = heap[0] + tokens, hole = 0;
    for (int64_t child = 1; child < slots; child = 2 * hole + 1) {
        if (child + 1 < slots && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= load)
            break;
        heap[hole] = heap[child];
        hole = child;
    }
    heap[hole] = load;
}

ekv_imbalance ekv_plan_imbalance(ekv_plan *plan)
{
    const int64_t slots = (int64_t)plan->num_sms * plan->resident_ctas;
    int64_t *load = plan->slot_load, total = 0;
    memset(load, 0, (size_t)slots * sizeof *load);
    if (plan->dispatch == EKV_DISPATCH_RANGE) {
        for (int64_t cta = 0; cta < ekv_plan_num_ctas(plan); cta++) /* as many CTAs as slots, or fewer */
            for (int64_t i = plan->cta_begin[cta]; i < plan->cta_begin[cta + 1]; i++)
                load[cta % slots] += tile_tokens(&plan->tiles[i]);
    } else {
        for (int64_t i = 0; i < plan->num_tiles; i++)
            add_to_least(load, slots, tile_tokens(&plan->tiles[i]));
    }
    ekv_imbalance result = { 0, 0.0 };
    for (int64_t i = 0; i < slots; i++) {
        total += load[i];
        result.max_tokens = ekv_max(result.max_tokens, load[i]);
    }
    result.mean_tokens = (double)total / (double)slots;
    return result;
}
