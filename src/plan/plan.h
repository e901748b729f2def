/* SPDX-License-Identifier: Apache-2.0
 * The plan and the planner table.
 *
 * A planner is three functions over a plan whose batch, device and options are already checked:
 *   capacity  once, at creation: resolves options, sets the fields that no update changes, and bounds what
 *             any lengths can need, so that updates never allocate;
 *   fits      before each build: refuses lengths that the planner or the capacity cannot take;
 *   build     writes the tiles, merges and CTA ranges for plan->kv_len.  Cannot fail.
 * Everything that reads a plan (backends, simulator, printers, the checker) reads this struct and no planner. */
#ifndef EVENKV_PLAN_PLAN_H
#define EVENKV_PLAN_PLAN_H

#include "base/context.h"
#include "plan/record.h"

#include <stdbool.h>
#include <stddef.h>

/* Upper bounds for any lengths of the created batch. */
typedef struct ekv_plan_capacity {
    int64_t tiles;
    int64_t merges;
    int64_t slots;       /* partial slots */
    int64_t ctas;        /* entries of cta_begin less one; 0 for a planner that is not range */
    size_t scratch_size; /* bytes that build wants as plan->scratch */
} ekv_plan_capacity;

/* How a planner runs on a GPU, from lengths that live there (options.on_device). */
typedef enum ekv_device_rule {
    EKV_DEVICE_RULE_NONE = 0, /* it does not */
    EKV_DEVICE_RULE_EVEN,
    EKV_DEVICE_RULE_EVEN_INVARIANT,
    EKV_DEVICE_RULE_FA3
} ekv_device_rule;

typedef struct ekv_planner {
    const char *name;
    const char *summary;
    ekv_status (*capacity)(ekv_plan *plan, ekv_plan_capacity *capacity);
    /* NULL: any lengths fit.  kv_len: [batch_size]. */
    ekv_status (*fits)(const ekv_plan *plan, const int32_t *kv_len, int32_t batch_size);
    void (*build)(ekv_plan *plan);
    ekv_system system; /* whose kernels run such plans */
    ekv_device_rule device_rule;
} ekv_planner;

enum { EKV_PLAN_MAX_WARNINGS = 4, EKV_PLAN_WARNING_SIZE = 192 };
enum { EKV_PLAN_MAX_RECORDS = INT32_MAX / 2 }; /* the most tiles, partial slots or merges that a capacity may have */

struct ekv_plan {
    ekv_context *context;
    const ekv_planner *planner;
    ekv_batch batch; /* batch_size and kv_len are those of the last update */
    ekv_device device;
    ekv_plan_options options;
    ekv_plan_capacity capacity;
    int32_t max_batch_size;

    /* Set by the core before capacity(). */
    int32_t *kv_len; /* [max_batch_size], what batch.kv_len points to */
    int32_t group;   /* q_heads / kv_heads */
    int32_t num_sms; /* device SMs less sm_margin */

    /* Set by capacity(). */
    int32_t heads;         /* heads that tiles run over: kv_heads, or q_heads where GQA is not packed */
    int32_t rows;          /* packed query rows of a head: q_len * group; q_len where not packed */
    int32_t block_m;       /* rows of an m_block, <= what the original's kernel computes */
    int32_t m_blocks;      /* ceil(rows / block_m) */
    int32_t padded_rows;   /* rows that the original's kernel computes for a tile, padding included */
    int32_t resident_ctas; /* CTAs an SM */
    int32_t block_tokens;  /* BLOCK_N where the planner has one, else 1 */
    int32_t cut_tokens;    /* where a tile has tokens, kv_begin is a multiple of this, whatever the lengths; 0: is 0 */
    bool empty_splits;     /* the original makes tiles without tokens (fa3's trailing splits) */
    /* even: what a request costs beyond its tokens.  Costs of CTAs, in tokens of one head, a tile costing head_count
     * times its tokens rounded up to block_tokens and, where kv_begin is 0, request_cost: no CTA costs more than the
     * mean over all CTAs plus heads_per_tile * (block_tokens + request_cost + 2 * options.snap_tokens).  -1: no balance
     * is promised */
    int32_t request_cost;

    /* Set by build() (by the core where dispatch is overridden). */
    ekv_dispatch dispatch;
    int32_t grid[3];
    bool split_kv;
    int64_t num_work_items;
    int64_t max_work_items;   /* what the grid promises: differs from num_work_items under graph padding */
    int64_t kv_chunk_tokens;  /* -1: none */
    int32_t num_splits_bound; /* -1: none */
    int32_t *num_splits;      /* [max_batch_size] */
    int32_t *batch_order;     /* [max_batch_size] */
    int64_t num_tiles;
    ekv_tile *tiles; /* [capacity.tiles], in dispatch order */
    int64_t num_merges;
    ekv_merge *merges; /* [capacity.merges] */
    int64_t num_slots;
    int64_t *cta_begin; /* range: [num_ctas + 1] */
    int32_t num_warnings;
    char warnings[EKV_PLAN_MAX_WARNINGS][EKV_PLAN_WARNING_SIZE];
    const char *warning_list[EKV_PLAN_MAX_WARNINGS];

    void *cuda;         /* owned by src/cuda; NULL unless options.cuda */
    void *scratch;      /* capacity.scratch_size bytes, contents undefined between builds */
    int64_t *slot_load; /* [num_sms * resident_ctas], for ekv_plan_info_get */
};

/* A caller's device, checked and completed: programs built before devices had systems give none.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED. */
ekv_status ekv_device_read(const ekv_device *given, ekv_device *device);
enum { EKV_DEVICE_FIRST_SIZE = offsetof(ekv_device, systems) }; /* of ekv_device as first published */

/* NULL if there is none of that name. */
const ekv_planner *ekv_planner_find(const char *name);

/* CTAs of the launch: product of the grid. */
static inline int64_t ekv_plan_num_ctas(const ekv_plan *plan)
{
    return (int64_t)plan->grid[0] * plan->grid[1] * plan->grid[2];
}

/* The KV head that a tile of `head` reads. */
static inline int32_t ekv_plan_kv_head(const ekv_plan *plan, int32_t head)
{
    return plan->heads == plan->batch.kv_heads ? head : head / plan->group;
}

/* Rows of a partial slot. */
static inline int32_t ekv_plan_slot_rows(const ekv_plan *plan)
{
    return plan->block_m < plan->rows ? plan->block_m : plan->rows;
}

/* For build(): appends.  The capacity makes room. */
static inline void ekv_plan_add_tile(ekv_plan *plan, ekv_tile tile)
{
    plan->tiles[plan->num_tiles++] = tile;
}

static inline void ekv_plan_add_merge(ekv_plan *plan, ekv_merge merge)
{
    plan->merges[plan->num_merges++] = merge;
}

/* For build(): a line for ekv_plan_info.warnings; more than EKV_PLAN_MAX_WARNINGS are dropped. */
__attribute__((format(printf, 2, 3))) void ekv_plan_warn(ekv_plan *plan, const char *format, ...);

/* For capacity(): the fields of a planner whose tiles pack all query rows of a KV head, block_m at a time. */
void ekv_plan_pack_rows(ekv_plan *plan, int32_t block_m);

/* For build(), where each request is cut into num_splits[b] equal pieces of piece_tokens(b) tokens: appends the
 * merges and numbers the partial slots ((partial_base + m_block * splits + split) * heads + head).
 * merge_single: requests of one split go through a partial result too. */
void ekv_plan_add_split_merges(ekv_plan *plan, bool merge_single, int32_t *partial_base);

#endif
