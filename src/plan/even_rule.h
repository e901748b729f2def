/* SPDX-License-Identifier: Apache-2.0
 * even: what does CTA i do, as a pure function of i and of prefix sums over the requests, for host and device.
 *
 * The work is one line: the requests in order, and of each request its head groups (the heads_per_tile KV heads
 * that one CTA reads together).  A *pair* (request, head group) is a row of blocks of block_tokens tokens; its first
 * block also carries request_cost, and an empty request is one block of request_cost alone.  The line is cut into
 * num_ctas equal shares, share i from floor(i * total / num_ctas) on, and
 *
 *     a block belongs to the CTA whose share contains the block's last unit
 *
 * (a block without cost to the CTA of the unit before it).  A block is the smallest thing that can move, and its
 * cost is at most block_tokens + request_cost.  Of a CTA's blocks only the first can begin before its share, so no
 * CTA costs more than the mean plus that, and the order of the requests moves the largest cost by no more.  Within
 * its share a CTA meets at most two cut pairs: the one it continues and the one it leaves unfinished.
 *
 * A cut costs more than it looks: two partial results to write, read and merge.  So a share that would begin within
 * `snap` of a pair's begin or end begins there instead: snap is snap_tokens, but at most 1/8 of a share,
 * and the largest cost grows by 2 snap at most.  What one CTA leaves, the memory gives to the others.
 *
 * Of a small batch only as many CTAs take part as get a share of least_share each, or as there are pairs if these are
 * more, num_ctas being their number: what more of them would save in reading, cuts and merges cost.  There snap is at
 * most 6/8 of a share, so that requests of up to 1.5 shares stay whole.
 *
 * Partial slots are numbered without a count over the CTAs, in units of heads_per_tile slots:
 *  total >= num_ctas * block_tokens: a share is at least a block long, so between two adjacent blocks of a pair,
 *      whose last units are a block apart, there is at most one cut: every CTA from a pair's first to its last owns a
 *      piece.  The piece that continues a pair gets unit cta, the piece that begins one gets unit num_ctas + cta.
 *  total < num_ctas * block_tokens: a share is at most a block long, so there is a cut between any two adjacent
 *      blocks of a pair: every block is a piece.  The piece at coordinate y gets unit floor(y / block_tokens), where
 *      y is its begin, after request_cost for the first of a pair: two pieces are at least a block apart.
 * Either way the units of a pair's pieces from the second on are consecutive, as ekv_merge wants them, and less than
 * 2 * num_ctas. */
#ifndef EVENKV_PLAN_EVEN_RULE_H
#define EVENKV_PLAN_EVEN_RULE_H

#include "plan/record.h"

enum {
    EKV_EVEN_SNAP_EIGHTHS = 1,    /* of a share */
    EKV_EVEN_SNAP_TOKENS = 256,   /* by default */
    EKV_EVEN_FEW_SNAP_EIGHTHS = 6 /* where fewer CTAs take part */
};

typedef struct ekv_even_line {
    const int64_t *cost;   /* [batch_size + 1]: what one head group of the requests before b costs */
    const int32_t *kv_len; /* [batch_size] */
    int64_t total;         /* groups * cost[batch_size]; total * num_ctas must fit int64 */
    int64_t snap;          /* how far a share's end may move, see ekv_even_sum; even-invariant has no use for it */
    int32_t batch_size;
    int32_t groups; /* head groups */
    int32_t heads_per_tile;
    int32_t num_ctas;     /* that take part, see ekv_even_sum */
    int32_t block_tokens; /* of even-invariant: tokens of a chunk */
    int32_t request_cost; /* of even-invariant: of each chunk */
    int32_t snap_tokens;  /* even: the option */
    int32_t least_share;  /* even: the option; 0: all CTAs take part */
} ekv_even_line;

/* A place on the line where a piece begins; {batch_size, 0, 0} is its end. */
typedef struct ekv_even_place {
    int32_t request;
    int32_t group;
    int32_t token;
} ekv_even_place;

EKV_INLINE EKV_HD int64_t ekv_even_cost(int32_t kv_len, int32_t block_tokens, int32_t request_cost)
{
    uint32_t blocks = ((uint32_t)kv_len + (uint32_t)block_tokens - 1u) / (uint32_t)block_tokens;
    return (int64_t)blocks * block_tokens + request_cost;
}

/* ---- The line ---------------------------------------------------------------------------------------- */

/* First coordinate of the share of CTA i; from num_ctas on, which take no part, total or more. */
EKV_INLINE EKV_HD int64_t ekv_even_share(const ekv_even_line *line, int32_t i)
{
    return i * line->total / line->num_ctas;
}

/* The CTA whose share contains unit z - 1.  floor(i * total / n) < z is i * total < z * n, so it is the last i with
 * i <= (z * n - 1) / total. */
EKV_INLINE EKV_HD int32_t ekv_even_owner(const ekv_even_line *line, int64_t z)
{
    return z > 0 ? (int32_t)((z * line->num_ctas - 1) / line->total) : 0;
}

/* The request that coordinate x < total lies in: the first that ends behind it.  Requests without cost contain no
 * coordinate. */
EKV_INLINE EKV_HD int32_t ekv_even_request(const ekv_even_line *line, int64_t x)
{
    int32_t low = 0, high = line->batch_size - 1;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (line->groups * line->cost[middle + 1] > x)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

EKV_INLINE EKV_HD int ekv_even_before(ekv_even_place a, ekv_even_place b)
{
    if (a.request != b.request)
        return a.request < b.request;
    return a.group != b.group ? a.group < b.group : a.token < b.token;
}

EKV_INLINE EKV_HD ekv_even_place ekv_even_next_pair(const ekv_even_line *line, ekv_even_place at)
{
    ekv_even_place next = { at.request, at.group + 1, 0 };
    if (next.group == line->groups) {
        next.request++;
        next.group = 0;
    }
    return next;
}

EKV_INLINE EKV_HD int ekv_even_is_dense(const ekv_even_line *line)
{
    return line->total >= (int64_t)line->num_ctas * line->block_tokens;
}

/* Whether a line of that cost is too small for all CTAs. */
EKV_INLINE EKV_HD int ekv_even_is_small(int64_t total, int32_t num_ctas, int32_t least_share)
{
    return least_share > 0 && total / least_share < num_ctas;
}

/* How many of num_ctas take part in a small line of so many pairs. */
EKV_INLINE EKV_HD int32_t ekv_even_few_ctas(int64_t total, int64_t pairs, int32_t num_ctas, int32_t least_share)
{
    return (int32_t)ekv_max(total / least_share, ekv_min(pairs, num_ctas));
}

/* How far a share may move at most. */
EKV_INLINE EKV_HD int64_t ekv_even_snap(int64_t share, int small, int32_t snap_tokens)
{
    const int32_t eighths = small ? EKV_EVEN_FEW_SNAP_EIGHTHS : EKV_EVEN_SNAP_EIGHTHS;
    return ekv_min(share * eighths / 8, snap_tokens);
}

/* Sets what follows from the prefix sums, `total`, `snap` and how many of num_ctas take part. */
EKV_INLINE EKV_HD void ekv_even_sum(ekv_even_line *line)
{
    line->total = line->groups * line->cost[line->batch_size];
    const int small = ekv_even_is_small(line->total, line->num_ctas, line->least_share);
    if (small)
        line->num_ctas =
            ekv_even_few_ctas(line->total, (int64_t)line->batch_size * line->groups, line->num_ctas, line->least_share);
    line->snap = 0;
    if (ekv_even_is_dense(line))
        line->snap = ekv_even_snap(line->total / line->num_ctas, small, line->snap_tokens);
}

/* Of a pair of that cost: a share that begins within so much of its begin begins with the pair. */
EKV_INLINE EKV_HD int64_t ekv_even_begin_zone(const ekv_even_line *line, int64_t pair)
{
    const int64_t block = ekv_min(line->request_cost + line->block_tokens, pair);
    return ekv_max(block, ekv_min(line->snap, (pair + 1) / 2));
}

/* A share that begins within so much of its end begins with the next pair. */
EKV_INLINE EKV_HD int64_t ekv_even_end_zone(const ekv_even_line *line, int64_t pair)
{
    return ekv_min(ekv_min(line->snap, pair / 2), pair - ekv_even_begin_zone(line, pair));
}

/* ---- CTAs -------------------------------------------------------------------------------------------- */

/* Where the CTA begins whose share begins at x, a coordinate of `request`: at the block that contains x. */
EKV_INLINE EKV_HD ekv_even_place ekv_even_locate(const ekv_even_line *line, int32_t request, int64_t x)
{
    const int64_t pair = line->cost[request + 1] - line->cost[request];
    const int64_t offset = x - line->groups * line->cost[request];
    const int64_t group = line->groups > 1 ? offset / pair : 0;
    const int64_t in_pair = offset - group * pair;
    ekv_even_place at = { request, (int32_t)group, 0 };
    if (in_pair < ekv_even_begin_zone(line, pair))
        return at;
    if (in_pair >= pair - ekv_even_end_zone(line, pair))
        return ekv_even_next_pair(line, at);
    const uint32_t tokens = (uint32_t)(in_pair - line->request_cost); /* below 2^31 + block_tokens */
    at.token = (int32_t)(tokens / (uint32_t)line->block_tokens * (uint32_t)line->block_tokens);
    return at;
}

/* Where CTA i begins and CTA i - 1 ends, i >= 0. */
EKV_INLINE EKV_HD ekv_even_place ekv_even_begin(const ekv_even_line *line, int32_t i)
{
    ekv_even_place first = { 0, 0, 0 }, end = { line->batch_size, 0, 0 };
    if (i == 0)
        return first;
    const int64_t x = ekv_even_share(line, i);
    return x < line->total ? ekv_even_locate(line, ekv_even_request(line, x), x) : end;
}

/* ---- Pieces ------------------------------------------------------------------------------------------ */

/* Coordinate at which the pair of `at` begins, and what it costs. */
EKV_INLINE EKV_HD int64_t ekv_even_pair(const ekv_even_line *line, ekv_even_place at, int64_t *cost)
{
    *cost = line->cost[at.request + 1] - line->cost[at.request];
    return line->groups * line->cost[at.request] + at.group * *cost;
}

/* The CTA of the first block of the pair of `at`. */
EKV_INLINE EKV_HD int32_t ekv_even_first_cta(const ekv_even_line *line, ekv_even_place at)
{
    int64_t cost;
    const int64_t begin = ekv_even_pair(line, at, &cost);
    return ekv_even_owner(line, begin + ekv_even_begin_zone(line, cost));
}

/* How the pair of `at` is merged, num_splits 1 where it is not cut.  first_cta: as above. */
EKV_INLINE EKV_HD ekv_merge ekv_even_merge(const ekv_even_line *line, ekv_even_place at, int32_t first_cta)
{
    const int32_t heads = line->heads_per_tile;
    int64_t cost;
    const int64_t begin = ekv_even_pair(line, at, &cost);
    ekv_merge merge = { at.request, 0, 0, 0, 0, heads, (uint16_t)(at.group * heads), (uint16_t)heads, 0 };
    if (ekv_even_is_dense(line)) {
        merge.num_splits = ekv_even_owner(line, begin + cost - ekv_even_end_zone(line, cost)) - first_cta + 1;
        merge.slot_first = (line->num_ctas + first_cta) * heads;
        merge.slot_next = (first_cta + 1) * heads;
    } else {
        const int32_t unit = (int32_t)((begin + line->request_cost) / line->block_tokens);
        merge.num_splits = (int32_t)ekv_max((cost - line->request_cost) / line->block_tokens, 1);
        merge.slot_first = unit * heads;
        merge.slot_next = (unit + 1) * heads;
    }
    return merge;
}

/* A pair of one piece: its tile writes the output. */
EKV_INLINE EKV_HD ekv_tile ekv_even_whole(const ekv_even_line *line, ekv_even_place at)
{
    const int32_t heads = line->heads_per_tile, kv_len = line->kv_len[at.request];
    ekv_tile tile = { at.request, 0, 0, 0, kv_len, -1, (uint16_t)(at.group * heads), (uint16_t)heads, 0 };
    return tile;
}

/* The piece of CTA `cta` of a pair that is cut: it begins at `at`, and the CTA ends at `end`.  merge and
 * first_cta: of the pair. */
EKV_INLINE EKV_HD ekv_tile ekv_even_part(const ekv_even_line *line, int32_t cta, ekv_even_place at, ekv_even_place end,
                                         const ekv_merge *merge, int32_t first_cta)
{
    ekv_tile tile = ekv_even_whole(line, at);
    tile.kv_begin = at.token;
    if (at.request == end.request && at.group == end.group)
        tile.kv_end = end.token;
    if (at.token > 0)
        tile.split = ekv_even_is_dense(line) ? cta - first_cta : at.token / line->block_tokens;
    tile.slot = (int32_t)ekv_merge_slot(merge, tile.split);
    tile.flags = EKV_TILE_PARTIAL;
    return tile;
}

/* Whether the piece that begins at `at` in a CTA that ends at `end` is a part of its pair. */
EKV_INLINE EKV_HD int ekv_even_is_part(ekv_even_place at, ekv_even_place end)
{
    return at.token > 0 || (at.request == end.request && at.group == end.group);
}

#endif
