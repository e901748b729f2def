/* SPDX-License-Identifier: Apache-2.0
 * flashinfer-batch-attention: persistent workers with lists made on the host (BatchAttention).
 * Rule: TwoStageHolisticPlan in FlashInfer's include/flashinfer/attention/scheduler.cuh and MinHeap in heap.h
 * (commit fb28d72).  Where q_len > 1 every query row sees all tokens, FlashInfer's causal = false. */
#include "base/status.h"
#include "plan/plan.h"

#include <inttypes.h>
#include <string.h>

enum {
    MAX_WORKS = 65536, /* max_total_num_works: what its index arrays hold */
    DECODE_ROWS = 16,  /* CTA_TILE_Q_SIZES: packed rows of a work, */
    PREFILL_ROWS = 128 /* where a request has more than 16 */
};

/* A worker in the heap.  FlashInfer sums costs in float, so does this: beyond 2^24 they round. */
typedef struct worker {
    float cost;
    int32_t id;
} worker;

typedef struct scratch {
    worker *heap;          /* [workers] */
    int64_t *next;         /* [workers], where the worker's next tile goes */
    int32_t *owner;        /* [MAX_WORKS], worker of each work */
    int32_t *partial_base; /* [batch_size] */
} scratch;

static int32_t num_workers(const ekv_plan *plan)
{
    return plan->num_sms * plan->resident_ctas;
}

/* Lays the scratch out in `memory`; returns its size.  memory: 8-byte aligned, or NULL to count. */
static size_t lay_out(const ekv_plan *plan, unsigned char *memory, scratch *s)
{
    const size_t workers = (size_t)num_workers(plan), batch_size = (size_t)plan->batch.batch_size;
    const size_t next = workers * sizeof(worker), owner = next + workers * sizeof(int64_t);
    const size_t partial_base = owner + MAX_WORKS * sizeof(int32_t);
    if (memory)
        *s = (scratch){ (worker *)(void *)memory, (int64_t *)(void *)(memory + next),
                        (int32_t *)(void *)(memory + owner), (int32_t *)(void *)(memory + partial_base) };
    return partial_base + batch_size * sizeof(int32_t);
}

/* Prefill-sized works are cut finer by this factor. */
static int32_t chunk_divisor(const ekv_plan *plan)
{
    return plan->block_m == PREFILL_ROWS ? (int32_t)ekv_min(plan->heads, 2) : 1;
}

/* Tokens at which requests are cut. */
static int64_t chunk_limit(const ekv_plan *plan, const int32_t *kv_len, int32_t batch_size)
{
    int64_t total = 0;
    for (int32_t b = 0; b < batch_size; b++)
        total += kv_len[b];
    int64_t share = ekv_ceil_div(total * plan->m_blocks * plan->heads, num_workers(plan));
    return (share <= 128 ? 128 : ekv_round_up(share, 256)) / chunk_divisor(plan);
}

static int32_t num_chunks(int32_t kv_len, int64_t limit)
{
    return (int32_t)ekv_max(ekv_ceil_div(kv_len, limit), 1);
}

static ekv_status batch_attention_capacity(ekv_plan *plan, ekv_plan_capacity *capacity)
{
    const int64_t packed = (int64_t)plan->batch.q_len * plan->group;
    ekv_plan_pack_rows(plan, packed > DECODE_ROWS ? PREFILL_ROWS : DECODE_ROWS);
    plan->resident_ctas = plan->batch.head_dim >= 256 ? 1 : 2;
    plan->cut_tokens = 128 / chunk_divisor(plan);

    /* With n = batch_size * m_blocks: limit * divisor * workers >= tokens * m_blocks * heads, so cutting adds fewer
     * than workers * divisor to the n * heads works, and fewer than workers * divisor / heads (request, m_block)
     * are longer than the limit, whose pieces are at most twice workers * divisor over all heads. */
    const int64_t whole = (int64_t)plan->batch.batch_size * plan->m_blocks;
    const int64_t cuts = (int64_t)num_workers(plan) * chunk_divisor(plan);
    capacity->tiles = ekv_min(whole * plan->heads + cuts, MAX_WORKS);
    capacity->slots = ekv_min(capacity->tiles, 2 * cuts);
    capacity->merges = ekv_min(whole, cuts / plan->heads);
    capacity->ctas = num_workers(plan);
    capacity->scratch_size = lay_out(plan, NULL, NULL);
    return EKV_OK;
}

static ekv_status batch_attention_fits(const ekv_plan *plan, const int32_t *kv_len, int32_t batch_size)
{
    const int64_t works_per_chunk = (int64_t)plan->m_blocks * plan->heads;
    /* One chunk alone is too many: no limit is wanted, and its products might overflow. */
    const int64_t limit = works_per_chunk > MAX_WORKS ? INT32_MAX : chunk_limit(plan, kv_len, batch_size);
    int64_t works = 0;
    for (int32_t b = 0; b < batch_size; b++)
        works += num_chunks(kv_len[b], limit);
    works *= works_per_chunk;
    if (works > MAX_WORKS)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "%" PRId64 " works; FlashInfer's BatchAttention takes at most %d", works,
                        (int)MAX_WORKS);
    return EKV_OK;
}

/* Moves `last` up from `hole` while its parent costs more. */
static void sift_up(worker *heap, int32_t hole, worker last)
{
    while (hole > 0 && heap[(hole - 1) / 2].cost > last.cost) {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = last;
}

/* Gives the least loaded worker a work of this cost and returns its id.  Many workers tie, above all at the start;
 * to pick the one that FlashInfer picks, the heap moves as std::pop_heap and then std::push_heap of GCC's library
 * do: the hole sinks to the bottom, to the right child on ties, and the last element rises from there. */
static int32_t take_work(worker *heap, int32_t count, float cost)
{
    worker least = heap[0];
    const int32_t last = count - 1;
    int32_t hole = 0;
    for (int32_t child = 2; child <= last; child = 2 * hole + 2) {
        if (child == last || heap[child].cost > heap[child - 1].cost)
            child--;
        heap[hole] = heap[child];
        hole = child;
    }
    if (last > 0)
        sift_up(heap, hole, heap[last]);
    least.cost += cost;
    sift_up(heap, last, least);
    return least.id;
}

/* Works are dealt in the order request, m_block, chunk, head.  Fills owner and cta_begin. */
static void deal(ekv_plan *plan, const scratch *s)
{
    const int32_t workers = num_workers(plan);
    const int64_t limit = plan->kv_chunk_tokens;
    for (int32_t w = 0; w < workers; w++)
        s->heap[w] = (worker){ 0.0f, w };
    memset(plan->cta_begin, 0, ((size_t)workers + 1) * sizeof *plan->cta_begin);
    int64_t work = 0;
    for (int32_t b = 0; b < plan->batch.batch_size; b++)
        for (int32_t i = 0; i < plan->m_blocks * plan->num_splits[b]; i++) {
            int64_t begin = i % plan->num_splits[b] * limit;
            float cost = 2.0f * (float)plan->block_m + (float)ekv_min(plan->kv_len[b] - begin, limit);
            for (int32_t h = 0; h < plan->heads; h++) {
                s->owner[work] = take_work(s->heap, workers, cost);
                plan->cta_begin[s->owner[work++] + 1]++;
            }
        }
    for (int32_t w = 0; w < workers; w++)
        plan->cta_begin[w + 1] += plan->cta_begin[w];
    plan->num_tiles = work;
}

/* Writes the tiles, in the order in which they were dealt, to the ends of their workers' lists. */
static void place(ekv_plan *plan, const scratch *s)
{
    const int64_t limit = plan->kv_chunk_tokens;
    memcpy(s->next, plan->cta_begin, (size_t)num_workers(plan) * sizeof *s->next);
    int64_t work = 0;
    for (int32_t b = 0; b < plan->batch.batch_size; b++) {
        const int32_t splits = plan->num_splits[b];
        for (int32_t i = 0; i < plan->m_blocks * splits; i++)
            for (int32_t h = 0; h < plan->heads; h++) {
                const int32_t split = i % splits;
                plan->tiles[s->next[s->owner[work++]]++] =
                    (ekv_tile){ .request = b,
                                .m_block = i / splits,
                                .split = split,
                                .kv_begin = (int32_t)(split * limit),
                                .kv_end = (int32_t)ekv_min((split + 1) * limit, plan->kv_len[b]),
                                .slot = splits > 1 ? (s->partial_base[b] + i) * plan->heads + h : -1,
                                .head = (uint16_t)h,
                                .head_count = 1,
                                .flags = splits > 1 ? EKV_TILE_PARTIAL : 0 };
            }
    }
}

static void batch_attention_build(ekv_plan *plan)
{
    scratch s = { 0 };
    lay_out(plan, plan->scratch, &s);
    plan->kv_chunk_tokens = chunk_limit(plan, plan->kv_len, plan->batch.batch_size);
    for (int32_t b = 0; b < plan->batch.batch_size; b++) {
        plan->num_splits[b] = num_chunks(plan->kv_len[b], plan->kv_chunk_tokens);
        plan->batch_order[b] = b;
    }
    ekv_plan_add_split_merges(plan, false, s.partial_base);
    plan->split_kv = plan->num_merges > 0;
    deal(plan, &s);
    place(plan, &s);
    plan->num_work_items = plan->max_work_items = plan->num_tiles / plan->heads;
    plan->dispatch = EKV_DISPATCH_RANGE;
    plan->grid[0] = num_workers(plan);
    plan->grid[1] = plan->grid[2] = 1;
}

const ekv_planner ekv_planner_flashinfer_batch_attention = {
    .name = "flashinfer-batch-attention",
    .summary = "FlashInfer's BatchAttention: chunks of an equal share, each to the least loaded persistent worker",
    .capacity = batch_attention_capacity,
    .fits = batch_attention_fits,
    .build = batch_attention_build,
    .system = EKV_SYSTEM_FLASHINFER_BATCH_ATTENTION,
};
