/* SPDX-License-Identifier: Apache-2.0
 * even and even-invariant written by many threads at once, for host and device: given prefix sums over the requests,
 * where CTA i begins and what its piece k is, each by itself.  The host's planners walk the line instead, and write
 * the same bytes.
 *
 * Three steps, all threads through one before the next begins: the prefix sums; the marks of the CTAs; the pieces. */
#ifndef EVENKV_PLAN_EVEN_EMIT_H
#define EVENKV_PLAN_EVEN_EMIT_H

#include "plan/even_invariant_rule.h"

/* Where a CTA begins.  There is one more than CTAs. */
typedef struct ekv_even_mark {
    ekv_even_place place;
    int32_t tiles;  /* of the CTAs before it */
    int32_t merges; /* even: of the CTAs before it; even-invariant: of the requests before place.request */
} ekv_even_mark;

/* ---- even ---------------------------------------------------------------------------------------------- */

/* Pieces of a CTA: mark.tiles is the sum over the CTAs before it. */
EKV_INLINE EKV_HD int32_t ekv_even_num_pieces(const ekv_even_line *line, ekv_even_place begin, ekv_even_place end)
{
    if (!ekv_even_before(begin, end))
        return 0;
    return (end.request - begin.request) * line->groups + end.group - begin.group + (end.token > 0);
}

/* 1 if the CTA begins a pair and leaves it unfinished: mark.merges is the sum over the CTAs before it. */
EKV_INLINE EKV_HD int32_t ekv_even_num_merges(ekv_even_place begin, ekv_even_place end)
{
    const int continues = begin.token > 0 && begin.request == end.request && begin.group == end.group;
    return end.token > 0 && !continues;
}

/* Piece k of a CTA whose marks are mark[0] and mark[1].  Where its pair is cut, *merge is the pair's, and the CTA of
 * the pair's first piece is returned, whose mark has the merge's index; else -1. */
EKV_INLINE EKV_HD int32_t ekv_even_piece(const ekv_even_line *line, int32_t cta, const ekv_even_mark *mark, int32_t k,
                                         ekv_tile *tile, ekv_merge *merge)
{
    const ekv_even_place end = mark[1].place;
    ekv_even_place at = mark[0].place;
    if (k > 0) {
        const uint32_t pair = (uint32_t)at.group + (uint32_t)k;
        at.request += (int32_t)(pair / (uint32_t)line->groups);
        at.group = (int32_t)(pair % (uint32_t)line->groups);
        at.token = 0;
    }
    if (!ekv_even_is_part(at, end)) {
        *tile = ekv_even_whole(line, at);
        return -1;
    }
    const int32_t first_cta = at.token > 0 ? ekv_even_first_cta(line, at) : cta;
    *merge = ekv_even_merge(line, at, first_cta);
    *tile = ekv_even_part(line, cta, at, end, merge, first_cta);
    return first_cta;
}

/* ---- even-invariant ------------------------------------------------------------------------------------ */

typedef struct ekv_even_chunk_line {
    ekv_even_chunks chunks;
    const int32_t *cut; /* [batch_size + 1]: requests of several chunks before b */
} ekv_even_chunk_line;

/* Tiles of the requests before `request`, 0..batch_size. */
EKV_INLINE EKV_HD int32_t ekv_even_chunks_before(const ekv_even_chunk_line *c, int32_t request)
{
    return (c->chunks.partial[request] + request - c->cut[request]) * c->chunks.line.groups;
}

/* mark.tiles of a CTA that begins at `at`. */
EKV_INLINE EKV_HD int32_t ekv_even_chunk_index(const ekv_even_chunk_line *c, ekv_even_place at)
{
    const ekv_even_line *line = &c->chunks.line;
    int32_t index = ekv_even_chunks_before(c, at.request);
    if (at.group > 0)
        index += at.group * ekv_even_num_chunks(line->kv_len[at.request], line->block_tokens);
    return index + at.token / line->block_tokens;
}

/* Merges of the requests before `request`, 0..batch_size. */
EKV_INLINE EKV_HD int32_t ekv_even_merges_before(const ekv_even_chunk_line *c, int32_t request)
{
    return c->cut[request] * c->chunks.line.groups;
}

/* Chunk k of a CTA whose marks are mark[0] and mark[1].  Returns the index of its pair's merge, which is then in
 * *merge, or -1 where the pair is one chunk. */
EKV_INLINE EKV_HD int32_t ekv_even_chunk_piece(const ekv_even_chunk_line *c, const ekv_even_mark *mark, int32_t k,
                                               ekv_tile *tile, ekv_merge *merge)
{
    const ekv_even_line *line = &c->chunks.line;
    const int32_t index = mark[0].tiles + k;
    int32_t request = mark[0].place.request;
    int32_t last = (int32_t)ekv_min(mark[1].place.request, line->batch_size - 1);
    while (request < last) { /* the first request whose tiles end behind index */
        const int32_t middle = request + (last - request) / 2;
        if (ekv_even_chunks_before(c, middle + 1) > index)
            last = middle;
        else
            request = middle + 1;
    }
    const uint32_t n = (uint32_t)ekv_even_num_chunks(line->kv_len[request], line->block_tokens);
    const uint32_t offset = (uint32_t)(index - ekv_even_chunks_before(c, request));
    const ekv_even_place at = { request, (int32_t)(offset / n), (int32_t)(offset % n) * line->block_tokens };
    *merge = ekv_even_chunk_merge(&c->chunks, at);
    *tile = ekv_even_chunk_tile(&c->chunks, at, merge);
    return n > 1 ? ekv_even_merges_before(c, request) + at.group : -1;
}

#endif
