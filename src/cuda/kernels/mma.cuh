/* SPDX-License-Identifier: Apache-2.0
 * Decode on tensor cores with packed GQA.
 *
 * One warp works on one KV head of a tile, alone, with a ring of stages of its own: no barrier among warps in
 * the loop.  A CTA is tile_heads x warps_per_head warps: either one warp a head, so that the CTA reads whole
 * pages, or several warps a head, which take the head's blocks in turn and merge at the tile's end.  One warp
 * more, the scout, walks tiles and page tables ahead of them.
 *
 *   mma_scout.cuh    what to read next
 *   mma_feed.cuh     copies of K, V and Q into the ring, across the borders of tiles
 *   mma_product.cuh  the two products and the softmax between them
 *   mma_result.cuh   outputs, partial results, merges */
#ifndef EVENKV_CUDA_KERNELS_MMA_CUH
#define EVENKV_CUDA_KERNELS_MMA_CUH

#include "cuda/kernels/mma_result.cuh"

namespace mma
{

/* The tile's result; stage: which the warp has emptied last, -1 where it had no block of the tile; ring_free: all are
 * empty and stay so. */
template <int D, int N, int BF16>
EKV_DEVICE void finish(const ekv_kernel_params &p, const place &w, const round_header &t, product<D, N, BF16> &c,
                       int32_t stage, bool ring_free)
{
    const int count = shape<D, N>::D_TILES / w.members; /* d tiles of a warp's part */
    if (t.flags & MERGE) {
        if (!(t.arrived >> w.warp & 1))
            return;
    } else {
        sum_lanes(c);
        if (w.members > 1)
            merge_warps(w, exchange<D, N>(p), c, stage, count);
        if (p.stamps && threadIdx.x == 0)
            ekv_stamp_write(p.stamps, t.tile, t.tile, 1, *shared_memory<D, N>(p).start_ns);
    }
    const int64_t merge_ns = p.stamps ? ekv_global_ns() : 0;
    const bool partial = t.flags & EKV_TILE_PARTIAL;
    if (partial && !merge_last(p, w, t, c, count, ring_free))
        return;
    write_output(p, w, t, c, count);
    if (partial && p.stamps && w.lane == 0 && w.member == 0) {
        const int32_t unit = t.merge * p.merge_heads + t.merge_head + w.head;
        ekv_stamp_write(p.stamps, (int64_t)p.header->num_tiles + unit, unit, 2, merge_ns);
    }
}

template <int D, int N, int BF16>
EKV_DEVICE void decode(const ekv_kernel_params &p)
{
    typedef shape<D, N> S;
    const shared_memory<D, N> shared(p);
    const round_ring rounds = shared.rounds;

    place w;
    w.lane = (int)(threadIdx.x % 32);
    w.warp = (int)(threadIdx.x / 32);
    w.members = p.warps_per_head;
    w.head = w.warp / w.members;
    w.member = w.warp % w.members;
    w.ring = ekv_shared_address(shared.rings) + (uint32_t)(w.warp * p.stages * S::STAGE_BYTES);
    w.q = ekv_shared_address(shared.q) + (uint32_t)(w.warp * S::Q_BYTES);
    const int warps = shared.warps;

    if (threadIdx.x < EKV_MMA_ROUNDS) {
        barrier_init(rounds.full + threadIdx.x * 8, 32);
        barrier_init(rounds.empty + threadIdx.x * 8, (uint32_t)warps * 32);
    }
    if (p.stamps && threadIdx.x == 0)
        *shared.start_ns = ekv_global_ns();
    __syncthreads();
    ekv_wait_for_launch(); /* for the kernel that plans */
    if (w.warp == warps) {
        scout<D, N> ahead;
        ahead.run(p, w.lane, rounds);
        return;
    }

    feed<D, N> source;
    source.start();
    product<D, N, BF16> c;
    uint32_t number = 0; /* of the round that is computed */
    bool open = false;   /* its header has been read: */
    bool last = false;   /* it is its tile's last */
    bool fresh = false;  /* the warp has not had a block of the tile */
    int32_t blocks = 0;  /* that the warp has yet to compute */
    int32_t valid = 0;   /* tokens of the tile from the next of these on */
    int32_t stage = 0;   /* which it is in */

    /* One loop and one place for each thing: the code of a cold kernel comes from memory, too. */
    for (;;) {
        source.fill(p, w, rounds);
        if (blocks > 0) {
            ekv_copy_wait(source.staged - 1);
            __syncwarp();
            if (fresh) {
                c.load_q(p, w);
                source.q_taken = true;
                fresh = false;
            }
            c.block(p, w, w.ring + (uint32_t)(stage * S::STAGE_BYTES), valid);
            __syncwarp();
            stage = stage + 1 == p.stages ? 0 : stage + 1;
            blocks--;
            valid -= w.members * S::TOKENS;
            source.staged--;
            source.held = w.members > 1 && valid <= 0; /* the tile's result goes through the stage emptied last */
            continue;
        }
        if (open) {
            if (last) {
                finish(p, w, rounds.at(number).header, c, fresh ? -1 : (stage > 0 ? stage : p.stages) - 1,
                       source.ended && source.staged == 0);
                source.held = 0;
            }
            rounds.release(number++);
        }
        rounds.wait_full(number);
        if (w.members == 1)
            cta_barrier(warps);
        const round_header &t = rounds.at(number).header;
        if (t.flags & END)
            break;
        const int32_t first = first_own_block(w, t.first_block);
        open = true;
        last = t.left <= p.round_tokens;
        blocks = own_blocks(w, first, t.blocks);
        valid = t.left - first * S::TOKENS;
        if (t.first_block == 0) {
            c.clear();
            fresh = true;
            if (p.stamps && threadIdx.x == 0 && number > 0)
                *shared.start_ns = ekv_global_ns();
        }
    }
}

} // namespace mma

#define EKV_MMA_KERNEL(name, bf16, d, n)                                            \
    extern "C" __global__ void __launch_bounds__((EKV_MMA_WARPS_AT(d) + 1) * 32, 1) \
        name(const __grid_constant__ ekv_kernel_params p)                           \
    {                                                                               \
        mma::decode<d, n, bf16>(p);                                                 \
    }

#endif
