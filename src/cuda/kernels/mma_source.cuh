/* SPDX-License-Identifier: Apache-2.0
 * How a warp of the mma kernels comes by its KV tokens: the scout and the producer (see mma.cuh). */
#ifndef EVENKV_CUDA_KERNELS_MMA_SOURCE_CUH
#define EVENKV_CUDA_KERNELS_MMA_SOURCE_CUH

#include "cuda/kernels/common.cuh"
#include "cuda/kernels/mma_shape.h"

namespace mma
{

enum { END = -1, UNKNOWN = -2 };

/* D: head_dim.  N: rows of Q, 8 or 16. */
template <int D, int N>
struct shape {
    enum {
        TOKENS = D >= 128 ? 16 : 32, /* ekv_mma_stage_tokens */
        CHUNKS = D / 8,              /* 16-byte pieces of a row */
        K_BYTES = TOKENS * D * 2,
        STAGE_BYTES = 2 * K_BYTES,
        COPIES = TOKENS * CHUNKS / 32, /* 16-byte copies of K that a lane issues for a stage */
        LANE_ROWS = 32 / CHUNKS,       /* rows that a warp copies at a time; 1 at D = 256 */
        ROW_TILES = N / 8,
        D_TILES = D / 16,
        Q_COPIES = N * CHUNKS / 32, /* 16-byte pieces of Q that a lane loads */
        PREFETCH_Q = D * N <= 1024  /* else the registers do not suffice */
    };
};

/* Shared address of 16-byte chunk `chunk` of row `row`: chunks are permuted within a row so that eight rows at
 * one chunk lie in different banks. */
template <int D>
EKV_DEVICE uint32_t swizzled(uint32_t base, int row, int chunk)
{
    return base + (uint32_t)(row * (D * 2) + ((chunk ^ (row & 7)) << 4));
}

/* ---- The warp's place in the CTA ----------------------------------------------------------------------- */

/* What a warp keeps of a tile; 32 bytes in shared memory. */
struct __align__(16) tile_entry
{
    int32_t request;
    int32_t kv_begin;
    int32_t kv_end;
    int32_t slot;
    uint32_t heads; /* head | head_count << 16 */
    uint32_t flags;
    const int32_t *pages; /* of the request */
};

struct place {
    int lane;
    int warp;
    int head;                       /* of the tile's heads */
    int member;                     /* among the warps of the head */
    int members;                    /* warps a head */
    uint32_t ring;                  /* shared address of the warp's first stage */
    uint32_t q;                     /* shared address of the warp's Q, [N][D] */
    tile_entry *entries;            /* [EKV_MMA_TILE_RING], the warp's own */
    unsigned long long *queue_ring; /* [EKV_MMA_TILE_RING], the CTA's */
};

/* ---- Scout --------------------------------------------------------------------------------------------- */

/* The sequence of the CTA's tiles, and what is known of its next ones.  Each step takes three tiles on by one
 * load each: the third one's record is stored, the second one's page-table row is asked for, the first one's
 * record is asked for (under queue dispatch warp 0 claims its number one step earlier).  So a load has a whole
 * step, one block's time, to arrive. */
struct scout {
    int32_t first, count; /* tile numbers first .. first + count - 1, then the queue's */
    int32_t known;        /* records stored in w.entries */
    int32_t rows_asked;   /* page-table rows asked for */
    int32_t records_asked;
    int32_t claims;   /* warp 0, queue: numbers asked for */
    int32_t total;    /* tiles of the sequence; INT_MAX until its end is known */
    uint32_t claim;   /* the latest number asked for */
    int32_t tokens;   /* of the tiles whose records have arrived and that the producer has not begun */
    ekv_tile asked;   /* the latest record asked for */
    tile_entry found; /* the one whose page-table row was asked for */

    EKV_MEMBER void start(const ekv_kernel_params &p)
    {
        known = rows_asked = records_asked = tokens = 0;
        claim = 0;
        first = (int32_t)blockIdx.x;
        if (p.dispatch == EKV_DISPATCH_RANGE) { /* the first tile's record comes with the range */
            const ekv_cta_record *cta = p.ctas + blockIdx.x;
            asked = ekv_load_tile(&cta->first, 0);
            const int2 range = __ldg(reinterpret_cast<const int2 *>(cta));
            first = range.x;
            count = range.y - range.x;
            records_asked = count > 0;
        } else {
            count = first < __ldg(&p.header->num_tiles);
        }
        claims = count;
        total = p.dispatch == EKV_DISPATCH_QUEUE && count > 0 ? 0x7FFFFFFF : count;
    }

    /* Number of the n-th tile, END, or UNKNOWN where warp 0 has not published it yet. */
    EKV_MEMBER int32_t number(const place &w, int32_t n) const
    {
        if (n < count)
            return first + n;
        if (n >= total)
            return END;
        unsigned long long entry = 0; /* atomics: warps hand numbers over without a barrier */
        if (w.lane == 0)
            entry = atomicAdd_block(w.queue_ring + n % EKV_MMA_TILE_RING, 0ull);
        entry = __shfl_sync(EKV_FULL_WARP, entry, 0);
        return (int32_t)(entry >> 32) == n ? (int32_t)entry : UNKNOWN;
    }

    EKV_MEMBER void claim_step(const ekv_kernel_params &p, const place &w, bool wanted)
    {
        if (claims > records_asked && claims > count) { /* asked for at the last step: publish */
            const int32_t n = claims - 1;
            if (w.lane == 0)
                atomicExch_block(w.queue_ring + n % EKV_MMA_TILE_RING,
                                 (unsigned long long)(uint32_t)n << 32 |
                                     (claim < (uint32_t)__ldg(&p.header->num_tiles) ? claim : (uint32_t)END));
            __syncwarp();
        } else if (wanted && claims < total) {
            if (w.lane == 0)
                claim = atomicAdd(p.queue, 1u) + gridDim.x;
            claims++;
        }
    }

    /* next: the tile that the producer begins next; left: tokens of the one that it is in.  A queue's tiles are
     * claimed when little else is left, so that they stay even; a range's records are fetched some tiles ahead. */
    EKV_MEMBER void step(const ekv_kernel_params &p, const place &w, int32_t next, int32_t left, int32_t little)
    {
        if (rows_asked > known) {
            if (w.lane == 0)
                w.entries[known % EKV_MMA_TILE_RING] = found;
            prefetch(p, w);
            known++;
            __syncwarp();
        }
        if (records_asked > rows_asked) {
            found.request = asked.request;
            found.kv_begin = asked.kv_begin;
            found.kv_end = asked.kv_end;
            found.slot = asked.slot;
            found.heads = asked.head | (uint32_t)asked.head_count << 16;
            found.flags = asked.flags;
            found.pages = ekv_pages(p, asked.request);
            tokens += asked.kv_end - asked.kv_begin;
            rows_asked++;
        }
        const bool queue = p.dispatch == EKV_DISPATCH_QUEUE;
        const bool wanted =
            queue ? rows_asked == records_asked && left + tokens <= little && records_asked < next + EKV_MMA_LOOK_AHEAD
                  : records_asked < next + EKV_MMA_LOOK_AHEAD;
        if (queue && w.warp == 0)
            claim_step(p, w, wanted);
        if (wanted) {
            const int32_t n = number(w, records_asked);
            if (n == END) {
                total = records_asked;
            } else if (n != UNKNOWN) {
                asked = ekv_load_tile(p.tiles, n);
                records_asked++;
            }
        }
    }

    /* Brings the tile's Q and the first entries of its page table near. */
    EKV_MEMBER void prefetch(const ekv_kernel_params &p, const place &w) const
    {
        const uint16_t *q = reinterpret_cast<const uint16_t *>(p.q) + found.request * p.q_stride_request;
        const int32_t rows = p.query_heads_tiled ? 1 : p.group, lines = p.head_dim / 64; /* of 128 bytes, a row */
        for (int32_t i = w.lane; i < rows * lines; i += 32)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(
                q + ekv_query_head(p, (int32_t)(found.heads & 0xFFFF) + w.head, i / lines) * p.q_stride_head +
                i % lines * 64));
        if (w.lane == 0 && found.kv_end > found.kv_begin)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(found.pages + found.kv_begin / p.page_size));
    }
};

/* ---- Producer ------------------------------------------------------------------------------------------ */

template <int D, int N>
struct producer {
    typedef shape<D, N> S;
    const uint16_t *k, *v; /* of the tile's head */
    const int32_t *pages;  /* of the tile's request */
    int32_t token, end;    /* next block, end of the tile */
    int32_t page, in_page; /* of the lane's token of that block (aligned: of its group of 16) */
    int32_t next;          /* in the sequence: the tile after this one */
    int32_t issued;        /* stages, all told */
    int32_t stage;         /* of the ring, to be filled next */

    EKV_MEMBER void start()
    {
        token = end = next = issued = stage = 0;
        page = in_page = 0;
        k = v = 0;
        pages = 0;
    }

    EKV_MEMBER void look_up(const ekv_kernel_params &p, const place &w)
    {
        const int32_t mine = p.pages_aligned ? token + w.lane * 16 : token + w.lane;
        if (mine < end && w.lane < S::TOKENS) {
            page = __ldg(pages + mine / p.page_size);
            in_page = mine % p.page_size;
        } else {
            page = in_page = 0;
        }
    }

    /* Moves to the next tile in which this warp has a block, if the scout knows one.  The warp's ring of tiles
     * holds those from the consumer's on. */
    EKV_MEMBER void advance(const ekv_kernel_params &p, const place &w, scout &ahead, int32_t consumed_tiles)
    {
        token = end;
        while (next < ahead.known && next < consumed_tiles + EKV_MMA_TILE_RING / 2) {
            const tile_entry tile = w.entries[next % EKV_MMA_TILE_RING];
            next++;
            ahead.tokens -= tile.kv_end - tile.kv_begin;
            if (tile.kv_begin + w.member * S::TOKENS >= tile.kv_end)
                continue;
            token = tile.kv_begin + w.member * S::TOKENS;
            end = tile.kv_end;
            const int32_t kv_head = ekv_kv_head(p, (int32_t)(tile.heads & 0xFFFF) + w.head);
            k = reinterpret_cast<const uint16_t *>(p.k) + kv_head * p.k_stride_head;
            v = reinterpret_cast<const uint16_t *>(p.v) + kv_head * p.v_stride_head;
            pages = tile.pages;
            return;
        }
    }

    /* 16 bytes of K and V for each of the lane's rows. */
    EKV_MEMBER void copy_rows(const place &w, int i, const uint16_t *k_row, const uint16_t *v_row) const
    {
        const int chunk = w.lane % S::CHUNKS, row = w.lane / S::CHUNKS + i * S::LANE_ROWS;
        const uint32_t k_stage = w.ring + (uint32_t)stage * S::STAGE_BYTES;
        const bool valid = token + row < end;
        ekv_copy16(swizzled<D>(k_stage, row, chunk), valid ? k_row : k, valid);
        ekv_copy16(swizzled<D>(k_stage + S::K_BYTES, row, chunk), valid ? v_row : v, valid);
    }

    EKV_MEMBER void copy_block(const ekv_kernel_params &p, const place &w) const
    {
        const int element = w.lane % S::CHUNKS * 8, lane_row = w.lane / S::CHUNKS;
        if (p.pages_aligned) {
#pragma unroll
            for (int group = 0; group < S::TOKENS / 16; group++) {
                const int64_t group_page = __shfl_sync(EKV_FULL_WARP, page, group);
                const int64_t row0 = __shfl_sync(EKV_FULL_WARP, in_page, group) + lane_row;
                const uint16_t *k_row = k + group_page * p.k_stride_page + row0 * p.k_stride_token + element;
                const uint16_t *v_row = v + group_page * p.v_stride_page + row0 * p.v_stride_token + element;
                const int64_t k_step = S::LANE_ROWS * p.k_stride_token, v_step = S::LANE_ROWS * p.v_stride_token;
#pragma unroll
                for (int i = 0; i < 16 / S::LANE_ROWS; i++)
                    copy_rows(w, group * (16 / S::LANE_ROWS) + i, k_row + i * k_step, v_row + i * v_step);
            }
        } else {
#pragma unroll 2
            for (int i = 0; i < S::COPIES; i++) {
                const int64_t row_page = __shfl_sync(EKV_FULL_WARP, page, lane_row + i * S::LANE_ROWS);
                const int64_t row_token = __shfl_sync(EKV_FULL_WARP, in_page, lane_row + i * S::LANE_ROWS);
                copy_rows(w, i, k + row_page * p.k_stride_page + row_token * p.k_stride_token + element,
                          v + row_page * p.v_stride_page + row_token * p.v_stride_token + element);
            }
        }
        ekv_copy_commit();
    }

    /* Starts the copies of the next block, if it is known and a stage is free, finds the one after it, and lets the
     * scout make a step.  False: there is nothing more to start now. */
    EKV_MEMBER bool issue(const ekv_kernel_params &p, const place &w, scout &ahead, int32_t consumed_tiles,
                          int32_t consumed)
    {
        if (token < end && issued - consumed < p.stages) {
            copy_block(p, w);
            issued++;
            stage = stage + 1 == p.stages ? 0 : stage + 1;
            token += w.members * S::TOKENS;
        }
        if (token >= end)
            advance(p, w, ahead, consumed_tiles);
        if (token < end)
            look_up(p, w);
        ahead.step(p, w, next, end - token, 2 * p.stages * w.members * S::TOKENS);
        return token < end && issued - consumed < p.stages;
    }
};

} // namespace mma

#endif
