/* SPDX-License-Identifier: Apache-2.0
 * How a warp of the mma kernels comes by its K, V and Q: asynchronous copies into a ring of stages of its own. */
#ifndef EVENKV_CUDA_KERNELS_MMA_FEED_CUH
#define EVENKV_CUDA_KERNELS_MMA_FEED_CUH

#include "cuda/kernels/mma_scout.cuh"

namespace mma
{

/* Shared address of 16-byte chunk `chunk` of row `row`: chunks are permuted within a row so that eight rows at
 * one chunk lie in different banks.  As rows are aligned to their size, chunk `chunk ^ c` has that address ^ c * 16. */
template <int D>
EKV_DEVICE uint32_t swizzled(uint32_t base, int row, int chunk)
{
    return base + (uint32_t)(row * (D * 2) + ((chunk ^ (row & 7)) << 4));
}

/* A warp's place in the CTA. */
struct place {
    int lane;
    int warp;
    int head;      /* of the tile's heads */
    int member;    /* among the warps of the head, which take the tile's blocks in turn */
    int members;   /* warps a head, a power of two */
    uint32_t ring; /* shared address of the warp's first stage */
    uint32_t q;    /* shared address of the warp's Q, [N][D] */
};

/* Of a round, the warp's own blocks: block, block + members, ... below blocks. */
EKV_DEVICE int32_t first_own_block(const place &w, int32_t first_block)
{
    return (w.member - first_block) & (w.members - 1);
}

/* How many they are from `first` on. */
EKV_DEVICE int32_t own_blocks(const place &w, int32_t first, int32_t blocks)
{
    return (blocks - first + w.members - 1) >> (__ffs(w.members) - 1);
}

template <int D, int N>
struct feed {
    typedef shape<D, N> S;
    uint32_t number;       /* of the round that copies are made from */
    bool open;             /* its header has been read: */
    int32_t block, blocks; /* the warp's next one of the round, the round's */
    int32_t left;          /* tokens of the tile from the round's first block on */
    bool fresh;            /* the next block is the warp's first of the tile */
    const uint16_t *k, *v; /* of the head, the lane's chunk in the lane's row of page 0 */
    int32_t staged;        /* stages in flight or not yet consumed */
    int32_t stage;         /* to be filled next */
    int32_t held;          /* 1: the stage that was emptied last is not free */
    bool q_taken;          /* the Q in shared memory has been consumed */
    bool ended;

    EKV_MEMBER void start()
    {
        number = 0;
        staged = stage = held = block = blocks = left = 0;
        open = ended = fresh = false;
        q_taken = true;
        k = v = 0;
    }

    EKV_MEMBER void open_round(const ekv_kernel_params &p, const place &w, const round_header &h)
    {
        blocks = h.blocks;
        left = h.left;
        block = first_own_block(w, h.first_block);
        fresh = fresh || h.first_block == 0;
        ended = h.flags & END;
        open = true;
        const int lane_row = w.lane / S::CHUNKS, lane_element = w.lane % S::CHUNKS * 8;
        const int32_t kv_head = ekv_kv_head(p, h.head + w.head);
        k = reinterpret_cast<const uint16_t *>(p.k) + kv_head * p.k_stride_head + lane_element;
        v = reinterpret_cast<const uint16_t *>(p.v) + kv_head * p.v_stride_head + lane_element;
        if (p.pages_aligned) {
            k += lane_row * p.k_stride_token;
            v += lane_row * p.v_stride_token;
        }
    }

    /* The tile's Q; rows past the group are 0. */
    EKV_MEMBER void copy_q(const ekv_kernel_params &p, const place &w, const round_header &h) const
    {
        const int32_t rows = ekv_rows(p);
        const uint16_t *q = reinterpret_cast<const uint16_t *>(p.q) + h.request * p.q_stride_request;
#pragma unroll
        for (int i = 0; i < S::Q_COPIES; i++) {
            const int row = (i * 32 + w.lane) / S::CHUNKS, chunk = (i * 32 + w.lane) % S::CHUNKS;
            const bool valid = row < rows;
            const int32_t query_head = ekv_query_head(p, h.head + w.head, valid ? row : 0);
            ekv_copy16(swizzled<D>(w.q, row, chunk), q + query_head * p.q_stride_head + chunk * 8, valid);
        }
    }

    EKV_MEMBER void copy_block(const ekv_kernel_params &p, const place &w, const int2 *places) const
    {
        const int lane_row = w.lane / S::CHUNKS, chunk = w.lane % S::CHUNKS;
        const uint32_t k_rows = w.ring + (uint32_t)(stage * S::STAGE_BYTES);
        const int32_t valid = left - block * S::TOKENS;
#pragma unroll
        for (int group = 0; group < S::TOKENS / 16; group++) {
            if (p.pages_aligned) {
                const int2 at = places[group * 16];
                const uint16_t *k_row = k + at.x * p.k_stride_page + at.y * p.k_stride_token;
                const uint16_t *v_row = v + at.x * p.v_stride_page + at.y * p.v_stride_token;
#pragma unroll
                for (int i = 0; i < 16; i += S::LANE_ROWS) {
                    const int row = group * 16 + i + lane_row;
                    ekv_copy16(swizzled<D>(k_rows, row, chunk), k_row + i * p.k_stride_token, row < valid);
                    ekv_copy16(swizzled<D>(k_rows + S::K_BYTES, row, chunk), v_row + i * p.v_stride_token, row < valid);
                }
            } else {
#pragma unroll 2
                for (int i = 0; i < 16; i += S::LANE_ROWS) {
                    const int row = group * 16 + i + lane_row;
                    const int2 at = places[row];
                    ekv_copy16(swizzled<D>(k_rows, row, chunk), k + at.x * p.k_stride_page + at.y * p.k_stride_token,
                               row < valid);
                    ekv_copy16(swizzled<D>(k_rows + S::K_BYTES, row, chunk),
                               v + at.x * p.v_stride_page + at.y * p.v_stride_token, row < valid);
                }
            }
        }
    }

    /* Starts as many copies as there are free stages, without waiting for anything. */
    EKV_MEMBER void fill(const ekv_kernel_params &p, const place &w, const round_ring &ring)
    {
#pragma unroll 1
        while (staged + held < p.stages && !ended) {
            if (block >= blocks) {
                if (open)
                    number++;
                open = false;
                if (!ring.is_full_now(number))
                    return;
                open_round(p, w, ring.at(number).header);
                continue;
            }
            const round &r = ring.at(number);
            if (fresh) {
                if (!q_taken)
                    return;
                copy_q(p, w, r.header);
                q_taken = fresh = false;
            }
            copy_block(p, w, r.places + block * S::TOKENS);
            ekv_copy_commit();
            staged++;
            stage = stage + 1 == p.stages ? 0 : stage + 1;
            block += w.members;
        }
    }
};

} // namespace mma

#endif
