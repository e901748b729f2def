/* SPDX-License-Identifier: Apache-2.0
 * Planning on the GPU.  Of each planner two kernels: ekv_prepare_* makes the sums over requests and CTAs, one CTA by
 * itself; ekv_emit_* writes the records, every thread by itself.  What they compute is in plan/even_emit.h and
 * plan/fa3_emit.h. */
#ifndef EVENKV_CUDA_KERNELS_PREPARE_CUH
#define EVENKV_CUDA_KERNELS_PREPARE_CUH

#include "cuda/kernels/common.cuh"
#include "cuda/kernels/prepare.h"

namespace prepare
{

enum { THREADS = EKV_PREPARE_THREADS, WARPS = THREADS / 32 };

/* ---- All threads of a CTA ----------------------------------------------------------------------------- */

EKV_DEVICE int64_t scan_warp(int64_t value)
{
    const int lane = (int)(threadIdx.x % 32);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int64_t other = __shfl_up_sync(EKV_FULL_WARP, value, step);
        value += lane >= step ? other : 0;
    }
    return value;
}

/* Sum of `value` over the threads before this one; *total: over all.  sums: shared, free for the next call. */
EKV_DEVICE int64_t scan(int64_t value, int64_t (&sums)[WARPS], int64_t *total)
{
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    const int64_t inclusive = scan_warp(value);
    if (lane == 31)
        sums[warp] = inclusive;
    __syncthreads();
    const int64_t warps = scan_warp(sums[lane]); /* every warp the same: cheaper than a third barrier */
    const int64_t before = __shfl_sync(EKV_FULL_WARP, warps, warp > 0 ? warp - 1 : 0);
    *total = __shfl_sync(EKV_FULL_WARP, warps, WARPS - 1);
    __syncthreads();
    return (warp > 0 ? before : 0) + inclusive - value;
}

/* Bitonic sort, ascending, of one key a thread. */
EKV_DEVICE uint64_t sort(uint64_t key, uint64_t (&shared)[THREADS])
{
    const unsigned thread = threadIdx.x;
#pragma unroll 1
    for (unsigned size = 2; size <= THREADS; size *= 2)
#pragma unroll 1
        for (unsigned step = size / 2; step > 0; step /= 2) {
            uint64_t other;
            if (step < 32) {
                other = __shfl_xor_sync(EKV_FULL_WARP, key, step);
            } else {
                __syncthreads();
                shared[thread] = key;
                __syncthreads();
                other = shared[thread ^ step];
            }
            const bool ascending = !(thread & size), lower = !(thread & step);
            key = (key < other) == (ascending == lower) ? key : other;
        }
    return key;
}

/* Two counts below 2^31 in one sum. */
EKV_DEVICE int64_t pack(int32_t low, int32_t high)
{
    return (int64_t)high << 32 | low;
}

EKV_DEVICE int32_t low(int64_t packed)
{
    return (int32_t)packed;
}

EKV_DEVICE int32_t high(int64_t packed)
{
    return (int32_t)(packed >> 32);
}

/* ---- Lengths and records ------------------------------------------------------------------------------ */

EKV_DEVICE int32_t length(const ekv_prepare_io &io, int32_t request)
{
    return max(0, min(io.kv_len[request], io.bound[request]));
}

/* Records as 16-byte words; both sides are aligned to them. */
template <int WORDS>
EKV_DEVICE void store(void *to, const int4 (&words)[WORDS])
{
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        static_cast<int4 *>(to)[i] = words[i];
}

EKV_DEVICE void store_tile(ekv_tile *to, const ekv_tile &tile)
{
    union {
        ekv_tile record;
        int4 words[2];
    } u;
    u.record = tile;
    store(to, u.words);
}

EKV_DEVICE void store_merge(ekv_merge *to, const ekv_merge &merge)
{
    union {
        ekv_merge record;
        int4 words[2];
    } u;
    u.record = merge;
    store(to, u.words);
}

/* first: of the CTA's tiles [begin, end), zeros where it has none. */
EKV_DEVICE void store_cta(ekv_cta_record *to, int32_t begin, int32_t end, const ekv_tile &first)
{
    union {
        ekv_cta_record record;
        int4 words[3];
    } u;
    u.record = ekv_cta_record{ begin, end, { 0, 0 }, first };
    store(to, u.words);
}

/* By one thread. */
EKV_DEVICE void store_header(const ekv_prepare_io &io, int32_t num_tiles, int32_t num_merges, int32_t batch_size)
{
    *io.header = ekv_plan_header{ num_tiles, num_merges, io.num_ctas, batch_size, { 0 } };
}

/* ---- even, even-invariant: sums ----------------------------------------------------------------------- */

enum {
    ITEMS = 4,             /* requests a thread takes at a time */
    SHARED_REQUESTS = 3072 /* below so many, searches read shared memory */
};

/* The line with its prefix sums, as the second kernel sees it. */
EKV_DEVICE ekv_even_line line_of(const ekv_prepare_even_params &p)
{
    ekv_even_line line = p.line;
    line.cost = p.cost;
    line.kv_len = p.kv_len;
    ekv_even_sum(&line);
    return line;
}

EKV_DEVICE ekv_even_chunk_line chunk_line_of(const ekv_prepare_even_params &p)
{
    ekv_even_chunk_line line;
    line.chunks.line = line_of(p);
    line.chunks.partial = p.partial;
    line.cut = p.cut;
    return line;
}

/* Writes kv_len, cost and, for even-invariant, partial and cut.  cost: p.cost's copy in shared memory, or NULL. */
template <int INVARIANT>
EKV_DEVICE void sum_requests(const ekv_prepare_even_params &p, int64_t (&sums)[WARPS], int64_t *cost)
{
    const ekv_even_line &line = p.line;
    int64_t cost_before = 0, counts_before = 0, total;
    for (int32_t first = 0; first <= line.batch_size; first += THREADS * ITEMS) {
        const int32_t mine = first + (int32_t)threadIdx.x * ITEMS;
        int32_t lengths[ITEMS];
        int64_t costs[ITEMS], counts[ITEMS], own_cost = 0, own_counts = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            lengths[i] = mine + i < line.batch_size ? length(p.io, mine + i) : 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) { /* requests past the last do not matter to anyone */
            const int32_t n = INVARIANT ? ekv_even_num_chunks(lengths[i], line.block_tokens) : 1;
            costs[i] = INVARIANT ? ekv_even_chunks_cost(lengths[i], n, line.request_cost)
                                 : ekv_even_cost(lengths[i], line.block_tokens, line.request_cost);
            counts[i] = n > 1 ? pack(n, 1) : 0;
            own_cost += costs[i];
            own_counts += counts[i];
        }
        int64_t cost_at = cost_before + scan(own_cost, sums, &total);
        cost_before += total;
        int64_t counts_at = 0;
        if (INVARIANT) {
            counts_at = counts_before + scan(own_counts, sums, &total);
            counts_before += total;
        }
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (mine + i <= line.batch_size) {
                if (mine + i < line.batch_size)
                    p.kv_len[mine + i] = lengths[i];
                p.cost[mine + i] = cost_at;
                if (cost)
                    cost[mine + i] = cost_at;
                if (INVARIANT) {
                    p.partial[mine + i] = low(counts_at);
                    p.cut[mine + i] = high(counts_at);
                }
                cost_at += costs[i];
                counts_at += counts[i];
            }
    }
    __syncthreads();
}

/* Writes the marks of the CTAs and the header. */
template <int INVARIANT>
EKV_DEVICE void mark_ctas(const ekv_prepare_even_params &p, int64_t (&sums)[WARPS], const int64_t *cost)
{
    __shared__ ekv_even_place places[THREADS];
    ekv_even_chunk_line line = chunk_line_of(p);
    if (cost)
        line.chunks.line.cost = cost;
    const int32_t num_ctas = p.line.num_ctas;
    int64_t before = 0, total;
    /* A CTA's counts need the place of the next one: of 1,024 places, 1,023 are marked. */
    for (int32_t first = 0; first <= num_ctas; first += THREADS - 1) {
        const int32_t cta = (int32_t)ekv_min(first + (int32_t)threadIdx.x, num_ctas);
        const bool marks = first + (int32_t)threadIdx.x <= num_ctas && threadIdx.x < THREADS - 1;
        ekv_even_mark mark;
        if (INVARIANT) {
            mark.place = ekv_even_chunk_begin(&line.chunks, cta);
            mark.tiles = ekv_even_chunk_index(&line, mark.place);
            mark.merges = ekv_even_merges_before(&line, mark.place.request);
        } else {
            mark.place = places[threadIdx.x] = ekv_even_begin(&line.chunks.line, cta);
            __syncthreads();
            int64_t counts = 0;
            if (marks) {
                const ekv_even_place end = places[threadIdx.x + 1];
                counts =
                    pack(ekv_even_num_pieces(&line.chunks.line, mark.place, end), ekv_even_num_merges(mark.place, end));
            }
            counts = before + scan(counts, sums, &total);
            before += total;
            mark.tiles = low(counts);
            mark.merges = high(counts);
        }
        if (marks) {
            p.marks[cta] = mark;
            if (cta == num_ctas)
                store_header(p.io, mark.tiles, mark.merges, p.line.batch_size);
        }
    }
}

/* ---- even, even-invariant: records -------------------------------------------------------------------- */

/* Tile k of CTA `cta`, its merge if it is the merge's first, and the CTA's own record. */
template <int INVARIANT>
EKV_DEVICE void emit_piece(const ekv_prepare_even_params &p, const ekv_even_chunk_line &line, int32_t cta,
                           const ekv_even_mark (&mark)[2], int32_t k)
{
    ekv_tile tile;
    ekv_merge merge;
    int32_t index;
    if (INVARIANT) {
        index = ekv_even_chunk_piece(&line, mark, k, &tile, &merge);
    } else {
        index = ekv_even_piece(&line.chunks.line, cta, mark, k, &tile, &merge);
        if (index >= 0)
            index = p.marks[index].merges;
    }
    tile = ekv_device_tile(tile, index);
    store_tile(p.io.tiles + mark[0].tiles + k, tile);
    if (index >= 0 && tile.kv_begin == 0)
        store_merge(p.io.merges + index, merge);
    if (k == 0 && p.io.ctas)
        store_cta(p.io.ctas + cta, mark[0].tiles, mark[1].tiles, tile);
}

/* Of a CTA without tiles. */
EKV_DEVICE void emit_nothing(const ekv_prepare_even_params &p, int32_t cta, const ekv_even_mark (&mark)[2])
{
    const ekv_tile none = {};
    if (mark[0].tiles == mark[1].tiles && p.io.ctas)
        store_cta(p.io.ctas + cta, mark[0].tiles, mark[1].tiles, none);
}

/* All records, by one CTA: a thread for each tile. */
template <int INVARIANT>
EKV_DEVICE void emit_all(const ekv_prepare_even_params &p, const ekv_even_chunk_line &line)
{
    __shared__ int32_t begin[EKV_EMIT_ALONE_CTAS + 1]; /* first tile of each CTA */
    const int32_t num_ctas = p.line.num_ctas;
    for (int32_t cta = (int32_t)threadIdx.x; cta <= num_ctas; cta += THREADS) {
        begin[cta] = p.marks[cta].tiles;
        if (cta < num_ctas) {
            const ekv_even_mark mark[2] = { p.marks[cta], p.marks[cta + 1] };
            emit_nothing(p, cta, mark);
        }
    }
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < begin[num_ctas]; i += THREADS) {
        int32_t cta = 0, last = num_ctas - 1;
        while (cta < last) { /* the last CTA that begins at tile i or before */
            const int32_t middle = cta + (last - cta + 1) / 2;
            if (begin[middle] <= i)
                cta = middle;
            else
                last = middle - 1;
        }
        const ekv_even_mark mark[2] = { p.marks[cta], p.marks[cta + 1] };
        emit_piece<INVARIANT>(p, line, cta, mark, i - begin[cta]);
    }
}

/* One CTA.  Where p.emit is 0, ekv_emit_* writes the records instead. */
template <int INVARIANT>
EKV_DEVICE void prepare_even(const ekv_prepare_even_params &p)
{
    __shared__ int64_t sums[WARPS];
    __shared__ int64_t shared_cost[SHARED_REQUESTS];
    int64_t *cost = p.line.batch_size < SHARED_REQUESTS ? shared_cost : nullptr;
    ekv_launch_dependents();
    sum_requests<INVARIANT>(p, sums, cost);
    mark_ctas<INVARIANT>(p, sums, cost);
    if (!p.emit)
        return;
    __syncthreads();
    ekv_even_chunk_line line = chunk_line_of(p);
    if (cost)
        line.chunks.line.cost = cost;
    emit_all<INVARIANT>(p, line);
}

/* A CTA for each of the plan's. */
template <int INVARIANT>
EKV_DEVICE void emit_even(const ekv_prepare_even_params &p)
{
    ekv_launch_dependents();
    ekv_wait_for_launch();
    const ekv_even_chunk_line line = chunk_line_of(p);
    for (int32_t cta = (int32_t)blockIdx.x; cta < p.line.num_ctas; cta += (int32_t)gridDim.x) {
        const ekv_even_mark mark[2] = { p.marks[cta], p.marks[cta + 1] };
        for (int32_t k = (int32_t)threadIdx.x; k < mark[1].tiles - mark[0].tiles; k += (int32_t)blockDim.x)
            emit_piece<INVARIANT>(p, line, cta, mark, k);
        if (threadIdx.x == 0)
            emit_nothing(p, cta, mark);
    }
}

/* ---- fa3 ---------------------------------------------------------------------------------------------- */

EKV_DEVICE void prepare_fa3(const ekv_prepare_fa3_params &p)
{
    __shared__ int64_t sums[WARPS];
    __shared__ uint64_t keys[THREADS];
    __shared__ ekv_fa3_work works[EKV_FA3_PREPARE_REQUESTS];
    ekv_launch_dependents();
    const int32_t first = (int32_t)blockIdx.x * EKV_FA3_PREPARE_REQUESTS, index = (int32_t)threadIdx.x;
    const bool mine = index < EKV_FA3_PREPARE_REQUESTS && first + index < p.shape.batch_size;

    /* ---- Splits */
    const int32_t kv_len = mine ? length(p.io, first + index) : 0;
    int64_t total_blocks, counts;
    scan(ekv_fa3_blocks(&p.shape, kv_len), sums, &total_blocks);
    ekv_fa3_work work = ekv_fa3_split(&p.shape, first + index, kv_len, ekv_fa3_split_target(&p.shape, total_blocks));

    /* ---- Places among the requests; a list of several has no partial result */
    const int64_t own = mine ? pack(ekv_fa3_num_partials(&p.shape, &work), ekv_fa3_num_merges(&p.shape, &work)) : 0;
    const int64_t before = scan(own, sums, &counts);
    work.partial_base = low(before);
    work.merge_begin = high(before);

    /* ---- Order */
    uint64_t key = mine ? ekv_fa3_key(&p.shape, &work, index) : UINT64_MAX;
    if (mine)
        works[index] = work;
    if (p.shape.sort)
        key = sort(key, keys);
    __syncthreads();
    if (mine)
        work = works[(uint32_t)key];

    /* ---- Places among the ordered; in front of another list are requests of one split */
    int64_t tiles;
    const int32_t one = p.shape.heads * p.shape.m_blocks;
    work.tile_begin = first * one + (int32_t)scan(mine ? ekv_fa3_num_tiles(&p.shape, &work) : 0, sums, &tiles);
    if (mine)
        p.works[first + index] = work;
    if (first == 0 && index == 0)
        store_header(p.io, gridDim.x == 1 ? (int32_t)tiles : p.shape.batch_size * one, high(counts),
                     p.shape.batch_size);
}

EKV_DEVICE void emit_fa3(const ekv_prepare_fa3_params &p)
{
    ekv_launch_dependents();
    ekv_wait_for_launch();
    const int32_t lane = (int32_t)(threadIdx.x % 32), threads = (int32_t)(gridDim.x * blockDim.x);
    const int32_t thread = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    for (int32_t i = thread / 32; i < p.shape.batch_size; i += threads / 32) {
        const ekv_fa3_work work = p.works[i];
        const int32_t tiles = ekv_fa3_num_tiles(&p.shape, &work), merges = ekv_fa3_num_merges(&p.shape, &work);
        for (int32_t k = lane; k < tiles; k += 32)
            store_tile(p.io.tiles + work.tile_begin + k, ekv_fa3_piece(&p.shape, &work, k));
        for (int32_t m = lane; m < merges; m += 32)
            store_merge(p.io.merges + work.merge_begin + m, ekv_fa3_merge(&p.shape, &work, m));
    }
    const int64_t num_tiles = p.io.header->num_tiles;
    for (int32_t cta = thread; cta < p.io.num_ctas; cta += threads) {
        const int32_t begin = (int32_t)(cta * num_tiles / p.io.num_ctas);
        const int32_t end = (int32_t)((cta + 1) * num_tiles / p.io.num_ctas);
        ekv_tile tile = {};
        if (begin < end)
            tile = ekv_fa3_find(&p.shape, p.works, begin);
        store_cta(p.io.ctas + cta, begin, end, tile);
    }
}

} // namespace prepare

#endif
