/* SPDX-License-Identifier: Apache-2.0
 * The invariants of a plan (docs/planners.md), checked for any planner in time linear in tiles and cells.  A *cell*
 * is one (request, m_block, head): the unit that owns an output.
 *
 *  1. Walking the tiles in increasing split index, each cell's tiles come as splits 0, 1, ... and as token ranges
 *     that join from 0 to kv_len.
 *  2. A cell has either one tile, which writes the output, or only partial ones, which exactly one merge takes in
 *     split order; no partial slot is written twice.
 *  3. Tiles, merges, slots and CTAs stay within what creation promised.
 *  5., 7. Where the plan promises a balance: no CTA costs more than the mean and one block, or has more than two
 *     pieces of cut requests.
 * (4. and 6. compare plans with each other; the property tests do.) */
#include "plan/plan.h"

#include "base/arena.h"
#include "base/status.h"
#include "plan/even_rule.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct cell {
    int32_t splits; /* tiles walked so far */
    int32_t tokens; /* end of the last of them */
    int32_t merge;  /* index of its merge, -1: none */
} cell;

typedef struct checker {
    const ekv_plan *plan;
    int64_t num_cells;
    cell *cells;              /* [num_cells] */
    int32_t *by_split;        /* [num_tiles] tile indices in increasing split index */
    int32_t *split_begin;     /* [largest split index + 2] */
    unsigned char *slot_used; /* [num_slots] */
    unsigned char *visited;   /* [batch_size] */
} checker;

/* ---- Breaches ---------------------------------------------------------------------------------------- */

__attribute__((format(printf, 1, 2))) static ekv_status breach(const char *format, ...)
{
    char text[448];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return ekv_fail(EKV_ERROR_PLAN_INVALID, "%s", text);
}

/* Begins with the tile in full. */
__attribute__((format(printf, 3, 4))) static ekv_status tile_breach(const ekv_plan *plan, int64_t index,
                                                                    const char *format, ...)
{
    const ekv_tile *t = &plan->tiles[index];
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return breach("tile %" PRId64 " (request %d, m_block %d, heads %d+%d, split %d, tokens [%d, %d), slot %d, flags "
                  "0x%X): %s",
                  index, t->request, t->m_block, t->head, t->head_count, t->split, t->kv_begin, t->kv_end, t->slot,
                  t->flags, text);
}

__attribute__((format(printf, 3, 4))) static ekv_status merge_breach(const ekv_plan *plan, int64_t index,
                                                                     const char *format, ...)
{
    const ekv_merge *m = &plan->merges[index];
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return breach("merge %" PRId64 " (request %d, m_block %d, heads %d+%d, %d splits, slots %d, %d + i * %d): %s",
                  index, m->request, m->m_block, m->head, m->head_count, m->num_splits, m->slot_first, m->slot_next,
                  m->slot_stride, text);
}

/* ---- 3: promised sizes ------------------------------------------------------------------------------- */

static ekv_status check_count(int64_t count, int64_t largest, const char *what)
{
    if (count < 0 || count > largest)
        return breach("the plan has %" PRId64 " %s; creation promised at most %" PRId64, count, what, largest);
    return EKV_OK;
}

/* The query rows of a head fall into m_blocks. */
static ekv_status check_rows(const ekv_plan *plan)
{
    bool packed = plan->heads == plan->batch.kv_heads;
    if (!packed && plan->heads != plan->batch.q_heads)
        return breach("tiles run over %d heads; the batch has %d KV heads and %d query heads", plan->heads,
                      plan->batch.kv_heads, plan->batch.q_heads);
    int64_t rows = (int64_t)plan->batch.q_len * (packed ? plan->group : 1);
    if (plan->rows != rows || plan->block_m < 1 || plan->m_blocks != ekv_ceil_div(rows, plan->block_m))
        return breach("%d m_blocks of %d rows for %d packed rows; a head has %" PRId64, plan->m_blocks, plan->block_m,
                      plan->rows, rows);
    return EKV_OK;
}

static ekv_status check_grid(const ekv_plan *plan)
{
    const int64_t ctas = ekv_plan_num_ctas(plan), persistent = (int64_t)plan->num_sms * plan->resident_ctas;
    if (plan->grid[0] < 1 || plan->grid[1] < 1 || plan->grid[2] < 1)
        return breach("the grid is %d x %d x %d", plan->grid[0], plan->grid[1], plan->grid[2]);
    if (plan->num_work_items > plan->max_work_items)
        return breach("%" PRId64 " work items, but the captured grid has room for %" PRId64, plan->num_work_items,
                      plan->max_work_items);
    if (plan->dispatch == EKV_DISPATCH_GRID && ctas < plan->num_tiles)
        return breach("a grid of %" PRId64 " CTAs for %" PRId64 " tiles", ctas, plan->num_tiles);
    if (plan->dispatch != EKV_DISPATCH_GRID && ctas > persistent)
        return breach("%" PRId64 " persistent CTAs; %d SMs hold %" PRId64, ctas, plan->num_sms, persistent);
    return EKV_OK;
}

/* Each CTA of a range dispatch owns [cta_begin[i], cta_begin[i + 1]); together they own all tiles. */
static ekv_status check_ranges(const ekv_plan *plan)
{
    const int64_t ctas = ekv_plan_num_ctas(plan);
    ekv_status status = check_count(ctas, plan->capacity.ctas, "CTAs");
    if (status)
        return status;
    if (plan->cta_begin[0] != 0)
        return breach("CTA 0 begins at tile %" PRId64, plan->cta_begin[0]);
    for (int64_t i = 0; i < ctas; i++)
        if (plan->cta_begin[i + 1] < plan->cta_begin[i])
            return breach("CTA %" PRId64 " owns tiles [%" PRId64 ", %" PRId64 ")", i, plan->cta_begin[i],
                          plan->cta_begin[i + 1]);
    if (plan->cta_begin[ctas] != plan->num_tiles)
        return breach("the ranges of %" PRId64 " CTAs end at tile %" PRId64 " of %" PRId64, ctas, plan->cta_begin[ctas],
                      plan->num_tiles);
    return EKV_OK;
}

static ekv_status check_sizes(const ekv_plan *plan)
{
    ekv_status status;
    if ((status = check_count(plan->batch.batch_size, plan->max_batch_size, "requests")) ||
        (status = check_count(plan->num_tiles, plan->capacity.tiles, "tiles")) ||
        (status = check_count(plan->num_merges, plan->capacity.merges, "merges")) ||
        (status = check_count(plan->num_slots, plan->capacity.slots, "partial slots")) || (status = check_rows(plan)) ||
        (status = check_grid(plan)))
        return status;
    return plan->dispatch == EKV_DISPATCH_RANGE ? check_ranges(plan) : EKV_OK;
}

/* ---- Records by themselves --------------------------------------------------------------------------- */

static ekv_status check_tile(const ekv_plan *plan, int64_t index)
{
    const ekv_tile *t = &plan->tiles[index];
    if (t->request < 0 || t->request >= plan->batch.batch_size)
        return tile_breach(plan, index, "the batch has %d requests", plan->batch.batch_size);
    if (t->m_block < 0 || t->m_block >= plan->m_blocks)
        return tile_breach(plan, index, "a head has %d m_blocks", plan->m_blocks);
    if (t->head_count < 1 || t->head + t->head_count > plan->heads)
        return tile_breach(plan, index, "the batch has %d heads", plan->heads);
    if (t->split < 0 || t->split >= plan->num_tiles)
        return tile_breach(plan, index, "the split index is outside the plan's %" PRId64 " tiles", plan->num_tiles);
    if (t->flags & ~EKV_TILE_PARTIAL)
        return tile_breach(plan, index, "flags 0x%X are unknown", t->flags & ~EKV_TILE_PARTIAL);
    const int32_t kv_len = plan->kv_len[t->request];
    if (t->kv_begin < 0 || t->kv_begin > t->kv_end || t->kv_end > kv_len)
        return tile_breach(plan, index, "the request has tokens [0, %d)", kv_len);
    if (t->kv_begin < t->kv_end && t->kv_begin > 0 && !plan->cut_tokens)
        return tile_breach(plan, index, "this planner does not cut requests");
    if (t->kv_begin < t->kv_end && plan->cut_tokens && t->kv_begin % plan->cut_tokens)
        return tile_breach(plan, index, "this planner cuts at multiples of %d tokens", plan->cut_tokens);
    if (t->kv_begin == t->kv_end && kv_len > 0 && !plan->empty_splits)
        return tile_breach(plan, index, "empty, though the request has %d tokens and this planner makes no empty tiles",
                           kv_len);
    if (!(t->flags & EKV_TILE_PARTIAL) && t->slot != -1)
        return tile_breach(plan, index, "writes the output and has a partial slot");
    if ((t->flags & EKV_TILE_PARTIAL) && (t->slot < 0 || t->slot > plan->num_slots - t->head_count))
        return tile_breach(plan, index, "the plan has %" PRId64 " partial slots", plan->num_slots);
    return EKV_OK;
}

static ekv_status check_merge(const ekv_plan *plan, int64_t index)
{
    const ekv_merge *m = &plan->merges[index];
    if (m->request < 0 || m->request >= plan->batch.batch_size)
        return merge_breach(plan, index, "the batch has %d requests", plan->batch.batch_size);
    if (m->m_block < 0 || m->m_block >= plan->m_blocks)
        return merge_breach(plan, index, "a head has %d m_blocks", plan->m_blocks);
    if (m->head_count < 1 || m->head + m->head_count > plan->heads)
        return merge_breach(plan, index, "the batch has %d heads", plan->heads);
    if (m->num_splits < 1)
        return merge_breach(plan, index, "nothing to merge");
    if (m->reserved)
        return merge_breach(plan, index, "reserved is %u", m->reserved);
    return EKV_OK;
}

static ekv_status check_records(const ekv_plan *plan)
{
    ekv_status status;
    for (int64_t i = 0; i < plan->num_tiles; i++)
        if ((status = check_tile(plan, i)))
            return status;
    for (int64_t i = 0; i < plan->num_merges; i++)
        if ((status = check_merge(plan, i)))
            return status;
    if (plan->num_merges > 0 && !plan->split_kv)
        return breach("%" PRId64 " merges in a plan that says split_kv false", plan->num_merges);
    return EKV_OK;
}

static ekv_status check_order(checker *c)
{
    const ekv_plan *plan = c->plan;
    const int32_t batch_size = plan->batch.batch_size;
    memset(c->visited, 0, (size_t)batch_size);
    for (int32_t i = 0; i < batch_size; i++) {
        int32_t request = plan->batch_order[i];
        if (request < 0 || request >= batch_size || c->visited[request])
            return breach("batch_order[%d] is %d, which is %s", i, request,
                          request < 0 || request >= batch_size ? "no request" : "there twice");
        c->visited[request] = 1;
    }
    return EKV_OK;
}

/* ---- 1: coverage ------------------------------------------------------------------------------------- */

/* The cells of heads [head, ...) of one (request, m_block). */
static cell *cells_of(const checker *c, int32_t request, int32_t m_block, int32_t head)
{
    return c->cells + ((int64_t)request * c->plan->m_blocks + m_block) * c->plan->heads + head;
}

/* Counting sort. */
static void sort_by_split(checker *c, int32_t largest)
{
    const ekv_plan *plan = c->plan;
    memset(c->split_begin, 0, (size_t)(largest + 2) * sizeof *c->split_begin);
    for (int64_t i = 0; i < plan->num_tiles; i++)
        c->split_begin[plan->tiles[i].split + 1]++;
    for (int32_t s = 0; s <= largest; s++)
        c->split_begin[s + 1] += c->split_begin[s];
    for (int64_t i = 0; i < plan->num_tiles; i++)
        c->by_split[c->split_begin[plan->tiles[i].split]++] = (int32_t)i;
}

static ekv_status check_coverage(checker *c)
{
    const ekv_plan *plan = c->plan;
    for (int64_t i = 0; i < c->num_cells; i++)
        c->cells[i] = (cell){ 0, 0, -1 };
    for (int64_t k = 0; k < plan->num_tiles; k++) {
        const int64_t i = c->by_split[k];
        const ekv_tile *t = &plan->tiles[i];
        cell *cells = cells_of(c, t->request, t->m_block, t->head);
        for (int32_t h = 0; h < t->head_count; h++) {
            if (cells[h].splits != t->split)
                return tile_breach(plan, i, "head %d has %d splits before this one", t->head + h, cells[h].splits);
            if (cells[h].tokens != t->kv_begin)
                return tile_breach(plan, i, "the splits of head %d before this one end at token %d", t->head + h,
                                   cells[h].tokens);
            cells[h].splits++;
            cells[h].tokens = t->kv_end;
        }
    }
    return EKV_OK;
}

/* Every cell is covered to its end; the summary numbers agree with the cells. */
static ekv_status check_cells(const checker *c)
{
    const ekv_plan *plan = c->plan;
    int64_t work_items = 0;
    for (int32_t b = 0; b < plan->batch.batch_size; b++) {
        int32_t request_splits = 0;
        for (int32_t m = 0; m < plan->m_blocks; m++) {
            const cell *cells = cells_of(c, b, m, 0);
            int32_t splits = 0;
            for (int32_t h = 0; h < plan->heads; h++) {
                if (!cells[h].splits || cells[h].tokens != plan->kv_len[b])
                    return breach("request %d, m_block %d, head %d: %d tiles cover %d of %d tokens", b, m, h,
                                  cells[h].splits, cells[h].tokens, plan->kv_len[b]);
                splits = cells[h].splits > splits ? cells[h].splits : splits;
            }
            work_items += splits;
            request_splits = splits > request_splits ? splits : request_splits;
        }
        if (plan->num_splits[b] != request_splits)
            return breach("num_splits[%d] is %d; the tiles of the request have %d", b, plan->num_splits[b],
                          request_splits);
    }
    if (plan->num_work_items != work_items)
        return breach("num_work_items is %" PRId64 "; the tiles are %" PRId64 " work items", plan->num_work_items,
                      work_items);
    return EKV_OK;
}

/* ---- 2: slots and merges ----------------------------------------------------------------------------- */

static ekv_status assign_merges(checker *c)
{
    const ekv_plan *plan = c->plan;
    for (int64_t i = 0; i < plan->num_merges; i++) {
        const ekv_merge *m = &plan->merges[i];
        cell *cells = cells_of(c, m->request, m->m_block, m->head);
        for (int32_t h = 0; h < m->head_count; h++) {
            if (cells[h].merge >= 0)
                return merge_breach(plan, i, "merge %d writes head %d too", cells[h].merge, m->head + h);
            if (cells[h].splits != m->num_splits)
                return merge_breach(plan, i, "head %d has %d splits", m->head + h, cells[h].splits);
            cells[h].merge = (int32_t)i;
        }
    }
    return EKV_OK;
}

static ekv_status check_partial(checker *c, int64_t index, int32_t head, const cell *own)
{
    const ekv_plan *plan = c->plan;
    const ekv_tile *t = &plan->tiles[index];
    const int64_t slot = (int64_t)t->slot + head - t->head;
    if (own->merge < 0)
        return tile_breach(plan, index, "no merge takes head %d", head);
    const ekv_merge *m = &plan->merges[own->merge];
    const int64_t merged = ekv_merge_slot(m, t->split) + head - m->head;
    if (merged != slot)
        return tile_breach(plan, index, "merge %d takes head %d from slot %" PRId64, own->merge, head, merged);
    if (c->slot_used[slot])
        return tile_breach(plan, index, "another tile writes slot %" PRId64 " too", slot);
    c->slot_used[slot] = 1;
    return EKV_OK;
}

/* Every output is written once, by its only tile or by one merge of all its tiles.  A merge has as many splits as
 * its cells have tiles and every tile's slot is the one that the merge reads, so it reads no other slots. */
static ekv_status check_outputs(checker *c)
{
    const ekv_plan *plan = c->plan;
    ekv_status status = assign_merges(c);
    if (status)
        return status;
    memset(c->slot_used, 0, (size_t)plan->num_slots);
    for (int64_t i = 0; i < plan->num_tiles; i++) {
        const ekv_tile *t = &plan->tiles[i];
        const cell *cells = cells_of(c, t->request, t->m_block, t->head);
        for (int32_t h = 0; h < t->head_count; h++) {
            if (t->flags & EKV_TILE_PARTIAL) {
                if ((status = check_partial(c, i, t->head + h, &cells[h])))
                    return status;
            } else if (cells[h].splits > 1 || cells[h].merge >= 0) {
                return tile_breach(plan, i, "writes the output of head %d, which has %d splits and %s merge",
                                   t->head + h, cells[h].splits, cells[h].merge >= 0 ? "a" : "no");
            }
        }
    }
    return EKV_OK;
}

/* ---- 5, 7: balance ----------------------------------------------------------------------------------- */

/* A tile in tokens of one head: whole blocks, and what its request costs where the request begins. */
static int64_t tile_cost(const ekv_plan *plan, const ekv_tile *t)
{
    const int64_t blocks = ekv_ceil_div((int64_t)t->kv_end - t->kv_begin, plan->block_tokens);
    return (blocks * plan->block_tokens + (t->split == 0 ? plan->request_cost : 0)) * t->head_count;
}

/* The largest cost is at most the mean of the CTAs that take part, one block, which carries the request's cost if it is
 * its first, and what either end of a share may move. */
static ekv_status check_balance(const ekv_plan *plan)
{
    const int64_t ctas = ekv_plan_num_ctas(plan);
    int64_t total = 0, heads = 0;
    for (int64_t i = 0; i < plan->num_tiles; i++) {
        total += tile_cost(plan, &plan->tiles[i]);
        heads = ekv_max(heads, plan->tiles[i].head_count);
    }
    const int32_t least_share = plan->options.least_share;
    const int64_t line = heads ? total / heads : 0; /* as ekv_even_sum has it */
    const bool small = heads && ekv_even_is_small(line, (int32_t)ctas, least_share);
    const int64_t pairs = heads ? (int64_t)plan->batch.batch_size * (plan->heads / heads) : 0;
    const int64_t taking_part = small ? ekv_even_few_ctas(line, pairs, (int32_t)ctas, least_share) : ctas;
    const int64_t snap = ekv_even_snap(line / taking_part, small, plan->options.snap_tokens);
    const int64_t block = heads * (plan->block_tokens + plan->request_cost + 2 * snap);
    for (int64_t cta = 0; cta < ctas; cta++) {
        int64_t cost = 0, pieces = 0;
        for (int64_t i = plan->cta_begin[cta]; i < plan->cta_begin[cta + 1]; i++) {
            cost += tile_cost(plan, &plan->tiles[i]);
            pieces += (plan->tiles[i].flags & EKV_TILE_PARTIAL) != 0;
        }
        if (cost - block > total / taking_part)
            return breach("CTA %" PRId64 " costs %" PRId64 " tokens; the mean is %" PRId64
                          " and a block and what shares may move cost %" PRId64,
                          cta, cost, total / taking_part, block);
        if (pieces > 2)
            return breach("CTA %" PRId64 " has %" PRId64 " pieces of cut requests; at most 2 are promised", cta,
                          pieces);
    }
    return EKV_OK;
}

/* ---- Entry ------------------------------------------------------------------------------------------- */

static void lay_out(ekv_arena *arena, checker *c, int32_t largest_split)
{
    const ekv_plan *plan = c->plan;
    c->num_cells = (int64_t)plan->batch.batch_size * plan->m_blocks * plan->heads;
    c->cells = ekv_arena_take(arena, (size_t)c->num_cells * sizeof *c->cells);
    c->by_split = ekv_arena_take(arena, (size_t)plan->num_tiles * sizeof *c->by_split);
    c->split_begin = ekv_arena_take(arena, ((size_t)largest_split + 2) * sizeof *c->split_begin);
    c->slot_used = ekv_arena_take(arena, (size_t)plan->num_slots);
    c->visited = ekv_arena_take(arena, (size_t)plan->batch.batch_size);
}

ekv_status ekv_plan_check(const ekv_plan *plan)
{
    if (!plan)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "plan is NULL");
    ekv_status status;
    if ((status = check_sizes(plan)) || (status = check_records(plan)))
        return status;
    int32_t largest_split = 0;
    for (int64_t i = 0; i < plan->num_tiles; i++)
        largest_split = (int32_t)ekv_max(largest_split, plan->tiles[i].split);

    checker c = { .plan = plan };
    ekv_arena arena = { NULL, 0 };
    lay_out(&arena, &c, largest_split);
    void *memory = ekv_alloc(plan->context, arena.used);
    if (!memory)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory to check a plan: %zu bytes", arena.used);
    arena = (ekv_arena){ memory, 0 };
    lay_out(&arena, &c, largest_split);
    sort_by_split(&c, largest_split);
    if (!(status = check_order(&c)) && !(status = check_coverage(&c)) && !(status = check_cells(&c)))
        status = check_outputs(&c);
    if (!status && plan->request_cost >= 0 && plan->dispatch == EKV_DISPATCH_RANGE)
        status = check_balance(plan);
    ekv_release(plan->context, memory);
    return status;
}
