/* SPDX-License-Identifier: Apache-2.0
 * What becomes of a tile's result: an output, or a partial result that the last of its merge to arrive merges.
 *
 * A warp holds its *part* of a result in the registers of the product, O^T: some d tiles, all of them where a head has
 * one warp.  Partial results lie in the workspace in that order of registers, so that neither writing nor merging one
 * exchanges anything.
 *
 * Merges form a tree.  The splits of a merge are put into groups of up to EKV_MMA_FAN_IN in their order; whoever
 * arrives last at a group merges it, in split order, and arrives with that at the group of groups, until one is left,
 * which becomes the output.  What is added to what is fixed by the number of splits alone: results do not depend on who
 * is last.  Nobody waits for anybody.  Who finds all others there need not arrive, which saves a fence and an atomic.
 *
 * Arrivals are counted for each group and each part by itself: at level L, in the place of split `first split of the
 * group + L`.  The last one sets the count back to 0, as the next decode of the plan must find it. */
#ifndef EVENKV_CUDA_KERNELS_MMA_RESULT_CUH
#define EVENKV_CUDA_KERNELS_MMA_RESULT_CUH

#include "cuda/kernels/mma_product.cuh"

namespace mma
{

/* ---- Within the CTA --------------------------------------------------------------------------------------- */

/* What the warps of a head hand each other: in the stage that each has just emptied its o, beside it the largest
 * score and the sum of its rows, and where the stage is. */
template <int D, int N>
struct exchange {
    unsigned char *rings; /* of warp 0 */
    uint32_t ring_bytes;  /* of a warp */
    float2 *rows;         /* [warps][N]: largest, sum */
    int32_t *stage;       /* [warps] */

    EKV_MEMBER exchange(const ekv_kernel_params &p)
    {
        const shared_memory<D, N> shared(p);
        rings = shared.rings;
        ring_bytes = (uint32_t)(p.stages * shape<D, N>::STAGE_BYTES);
        rows = shared.rows;
        stage = shared.stage;
    }

    EKV_MEMBER float4 *result(int warp, int32_t of_stage) const
    {
        return reinterpret_cast<float4 *>(rings + (size_t)warp * ring_bytes +
                                          (size_t)of_stage * shape<D, N>::STAGE_BYTES);
    }
};

/* Keeps the warps of a CTA together: they read neighbouring heads of the same pages. */
EKV_DEVICE void cta_barrier(int warps)
{
    asm volatile("bar.sync %0, %1;" ::"r"(1 + EKV_MMA_MAX_WARPS), "r"(warps * 32) : "memory");
}

EKV_DEVICE void head_barrier(const place &w)
{
    asm volatile("bar.sync %0, %1;" ::"r"(1 + w.head), "r"(w.members * 32) : "memory");
}

/* Sums over the lanes' tokens. */
template <int D, int N, int BF16>
EKV_DEVICE void sum_lanes(product<D, N, BF16> &c)
{
#pragma unroll
    for (int r = 0; r < shape<D, N>::ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int other = 4; other < 32; other *= 2)
                c.sum[r][i] += __shfl_xor_sync(EKV_FULL_WARP, c.sum[r][i], other);
}

/* Merges the warps of a head, in their order; the warp's part is then in the first `count` d tiles of c.o. */
template <int D, int N, int BF16>
EKV_DEVICE void merge_warps(const place &w, const exchange<D, N> &x, product<D, N, BF16> &c, int32_t stage, int count)
{
    typedef shape<D, N> S;
    const int first_warp = w.head * w.members, column = w.lane % 4 * 2;
    if (w.lane == 0)
        x.stage[w.warp] = stage;
    __syncwarp();
    float4 *mine = x.result(w.warp, stage);
#pragma unroll
    for (int r = 0; r < S::ROW_TILES; r++) {
        if (w.lane < 4)
            for (int i = 0; i < 2; i++)
                x.rows[w.warp * N + r * 8 + column + i] = make_float2(c.largest[r][i], c.sum[r][i]);
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++)
            if (stage >= 0)
                mine[(r * S::D_TILES + d) * 32 + w.lane] =
                    make_float4(c.o[r][d][0], c.o[r][d][1], c.o[r][d][2], c.o[r][d][3]);
    }
    head_barrier(w);
    c.clear();
#pragma unroll
    for (int r = 0; r < S::ROW_TILES; r++) {
        for (int m = first_warp; m < first_warp + w.members; m++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                c.largest[r][i] = fmaxf(c.largest[r][i], x.rows[m * N + r * 8 + column + i].x);
#pragma unroll 1
        for (int m = first_warp; m < first_warp + w.members; m++) {
            if (x.stage[m] < 0)
                continue;
            float weight[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 ml = x.rows[m * N + r * 8 + column + i];
                weight[i] = ekv_exp2(ml.x - c.largest[r][i]);
                c.sum[r][i] = fmaf(weight[i], ml.y, c.sum[r][i]);
            }
            const float4 *from = x.result(m, x.stage[m]) + (r * S::D_TILES + w.member * count) * 32 + w.lane;
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++)
                if (d < count)
                    add_fragment(c.o[r][d], weight, from[d * 32]);
        }
    }
    head_barrier(w);
}

/* ---- Output --------------------------------------------------------------------------------------------- */

/* Stores four 8x8 matrices of 16-bit elements transposed: of matrix m the lane has words[m], row lane / 4 and columns
 * (lane % 4) * 2 + {0,1}; column c goes to the 16 bytes whose address lane 8 * m + c has.  Those of matrices from
 * `count` on are not stored. */
EKV_DEVICE void store_matrices_transposed(uint32_t address, const uint32_t (&words)[4], int count, int lane)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (count >= 4)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(words[0]),
                     "r"(words[1])
                     : "memory");
#else
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const uint32_t word = transpose_matrix(words[m]);
        const uint32_t row = __shfl_sync(EKV_FULL_WARP, address, 8 * m + lane / 4);
        if (m < count)
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(word) : "memory");
    }
#endif
}

EKV_DEVICE uint4 load_shared16(uint32_t address)
{
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

EKV_DEVICE float4 load_shared_floats(uint32_t address)
{
    const uint4 words = load_shared16(address);
    return make_float4(__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                       __uint_as_float(words.w));
}

/* O and LSE of a head from the part that c holds: d tiles w.member * count and on.  Through shared memory, so that few
 * instructions write whole rows: while a warp is here, its ring is not refilled. */
template <int D, int N, int BF16>
EKV_DEVICE void write_output(const ekv_kernel_params &p, const place &w, const round_header &t,
                             const product<D, N, BF16> &c, int count)
{
    typedef shape<D, N> S;
    const int rows = ekv_rows(p), first_chunk = w.member * count * 2; /* chunks are 16 bytes of a row */
    const int chunk_bits = __ffs(count);                              /* of the part's chunks in a row, 2 * count */
    const int32_t head = t.head + w.head;
    uint16_t *o = reinterpret_cast<uint16_t *>(p.o) + t.request * p.o_stride_request;
    const uint32_t out = ekv_shared_address(shared_memory<D, N>(p).out) + (uint32_t)(w.head * S::OUTPUT_BYTES);
#pragma unroll
    for (int r = 0; r < S::ROW_TILES; r++) {
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            factor[i] = c.sum[r][i] > 0 ? 1.0f / c.sum[r][i] : 0.0f;
        __syncwarp(); /* the rows before have been read */
#pragma unroll
        for (int d = 0; d < S::D_TILES; d += 2) {
            if (d >= count)
                break;
            uint32_t words[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const float(&v)[4] = c.o[r][d + t / 2];
                words[t] = ekv_pack2<BF16>(v[t % 2 * 2] * factor[0], v[t % 2 * 2 + 1] * factor[1]);
            }
            store_matrices_transposed(swizzled<D>(out, w.lane & 7, first_chunk + d * 2 + w.lane / 8), words,
                                      (count - d) * 2, w.lane);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < S::D_TILES / 2; i++) {
            const int unit = i * 32 + w.lane, row = unit >> chunk_bits;
            const int chunk = first_chunk + (unit & (count * 2 - 1));
            if (r * 8 + row < rows && row < 8)
                *reinterpret_cast<uint4 *>(o + ekv_query_head(p, head, r * 8 + row) * p.o_stride_head + chunk * 8) =
                    load_shared16(swizzled<D>(out, row, chunk));
        }
        if (p.lse && w.member == 0 && w.lane < 4)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (r * 8 + w.lane * 2 + i < rows) {
                    const int32_t query_head = ekv_query_head(p, head, r * 8 + w.lane * 2 + i);
                    const float sum = c.sum[r][i];
                    p.lse[t.request * p.lse_stride_request + query_head * p.lse_stride_head] =
                        sum > 0 ? (c.largest[r][i] + log2f(sum)) * p.lse_factor : -INFINITY;
                }
    }
}

/* ---- Partial results ------------------------------------------------------------------------------------ */

/* Of a merge, the splits that are merged together: first, first + span, ..., this many. */
struct group {
    int32_t first, span, splits;

    EKV_MEMBER int32_t split(int32_t s) const
    {
        return first + s * span;
    }
};

/* The partial results of a merge, as one warp sees them. */
template <int D, int N>
struct partials {
    typedef shape<D, N> S;
    enum { RING_SPLITS = 4 };
    int32_t slot_first, slot_next, slot_stride; /* of the warp's head */
    int count;                                  /* d tiles of the part */

    EKV_MEMBER partials(const place &w, const round_header &t, int part)
        : slot_first(t.slot_first + w.head), slot_next(t.slot_next + w.head), slot_stride(t.slot_stride), count(part)
    {
    }

    EKV_MEMBER int64_t slot(int32_t split) const
    {
        return split == 0 ? slot_first : slot_next + (int64_t)(split - 1) * slot_stride;
    }

    /* The lane's piece of the part's first d tile; those of others are 32 and D_TILES * 32 further. */
    EKV_MEMBER float4 *o(const ekv_kernel_params &p, const place &w, int32_t split) const
    {
        return reinterpret_cast<float4 *>(p.part_o + slot(split) * (N * D)) + w.member * count * 32 + w.lane;
    }

    EKV_MEMBER float2 *ml(const ekv_kernel_params &p, const place &w, int32_t split) const
    {
        return reinterpret_cast<float2 *>(p.part_ml) + (slot(split) * w.members + w.member) * N;
    }

    EKV_MEMBER uint32_t *arrivals(const ekv_kernel_params &p, const place &w, int32_t split) const
    {
        return p.arrivals + slot(split) * w.members + w.member;
    }

    /* Whether partial results have the lane's two rows of row tile r: those of the group. */
    EKV_MEMBER bool stored(const ekv_kernel_params &p, const place &w, int r) const
    {
        return r * 8 + w.lane % 4 * 2 < ekv_rows(p);
    }

    template <int BF16>
    EKV_MEMBER void store(const ekv_kernel_params &p, const place &w, int32_t split, const product<D, N, BF16> &c) const
    {
        float4 *to = o(p, w, split);
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++) {
            if (stored(p, w, r))
#pragma unroll
                for (int d = 0; d < S::D_TILES; d++)
                    if (d < count)
                        to[(r * S::D_TILES + d) * 32] =
                            make_float4(c.o[r][d][0], c.o[r][d][1], c.o[r][d][2], c.o[r][d][3]);
            if (w.lane < 4)
                *reinterpret_cast<float4 *>(ml(p, w, split) + r * 8 + w.lane % 4 * 2) =
                    make_float4(c.largest[r][0], c.sum[r][0], c.largest[r][1], c.sum[r][1]);
        }
    }

    /* A split without tokens has an o of 0.  Largest scores and sums of the group into c, and the weight of each split:
     * of split lane / 8 + 4 * i and row lane % 8 in weights[i]. */
    template <int BF16>
    EKV_MEMBER void weigh(const ekv_kernel_params &p, const place &w, const group &g, int r, product<D, N, BF16> &c,
                          float (&weights)[EKV_MMA_FAN_IN / 4]) const
    {
        float2 rows[EKV_MMA_FAN_IN / 4];
        float top = LOWEST, total = 0;
#pragma unroll
        for (int i = 0; i < EKV_MMA_FAN_IN / 4; i++) {
            const int32_t s = w.lane / 8 + 4 * i;
            rows[i] = s < g.splits ? __ldcg(ml(p, w, g.split(s)) + r * 8 + w.lane % 8) : make_float2(LOWEST, 0);
            top = fmaxf(top, rows[i].x);
        }
        top = fmaxf(top, __shfl_xor_sync(EKV_FULL_WARP, top, 8));
        top = fmaxf(top, __shfl_xor_sync(EKV_FULL_WARP, top, 16));
#pragma unroll
        for (int i = 0; i < EKV_MMA_FAN_IN / 4; i++) {
            weights[i] = ekv_exp2(rows[i].x - top);
            total = fmaf(weights[i], rows[i].y, total);
        }
        total += __shfl_xor_sync(EKV_FULL_WARP, total, 8);
        total += __shfl_xor_sync(EKV_FULL_WARP, total, 16);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            c.largest[r][i] = __shfl_sync(EKV_FULL_WARP, top, w.lane % 4 * 2 + i);
            c.sum[r][i] = __shfl_sync(EKV_FULL_WARP, total, w.lane % 4 * 2 + i);
        }
    }

    /* Of split s the weights of the lane's two rows.  To be called for s = 0, 1, ...: the first of `four` has those of
     * the four splits that are being added. */
    EKV_MEMBER static void row_weights(const place &w, int32_t s, float (&four)[EKV_MMA_FAN_IN / 4], float (&weight)[2])
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            weight[i] = __shfl_sync(EKV_FULL_WARP, four[0], s % 4 * 8 + w.lane % 4 * 2 + i);
        if (s % 4 == 3)
#pragma unroll
            for (int i = 0; i + 1 < EKV_MMA_FAN_IN / 4; i++)
                four[i] = four[i + 1];
    }

    /* Adds the lane's pieces of row tile r, one split at a time: for merges in the middle, where the ring is in use and
     * other copies keep the memory busy.  More at a time cost registers that the main loop then lacks. */
    template <int BF16>
    EKV_MEMBER void add_in_registers(const ekv_kernel_params &p, const place &w, const group &g, int r,
                                     product<D, N, BF16> &c, const float (&weights)[EKV_MMA_FAN_IN / 4]) const
    {
        enum { TILES = S::D_TILES / S::ROW_TILES };
#pragma unroll
        for (int d0 = 0; d0 < S::D_TILES; d0 += TILES) {
            float four[EKV_MMA_FAN_IN / 4];
#pragma unroll
            for (int i = 0; i < EKV_MMA_FAN_IN / 4; i++)
                four[i] = weights[i];
#pragma unroll 1
            for (int32_t s = 0; s < g.splits; s++) {
                const float4 *from = o(p, w, g.split(s)) + (r * S::D_TILES + d0) * 32;
                float4 pieces[TILES];
#pragma unroll
                for (int d = 0; d < TILES; d++) {
                    pieces[d] = make_float4(0, 0, 0, 0);
                    if (d0 + d < count && stored(p, w, r))
                        pieces[d] = __ldcg(from + d * 32);
                }
                float weight[2];
                row_weights(w, s, four, weight);
#pragma unroll
                for (int d = 0; d < TILES; d++)
                    add_fragment(c.o[r][d0 + d], weight, pieces[d]);
            }
        }
    }

    /* Where the lane's piece of d tile d of split s is in the ring: where copies of K and V by this lane went, too. */
    EKV_MEMBER static uint32_t ring_piece(const place &w, int32_t s, int d)
    {
        const int row = (s % RING_SPLITS * S::D_TILES + d) * S::LANE_ROWS + w.lane / S::CHUNKS;
        return swizzled<D>(w.ring, row, w.lane % S::CHUNKS);
    }

    /* The lane's pieces of split s, row tile r, on their way to the ring, which has room for RING_SPLITS.  A group of
     * copies in any case: who waits counts groups.  Nothing is copied for a split that there is not: nobody would wait
     * for it before the next merge uses its place. */
    EKV_MEMBER void copy(const ekv_kernel_params &p, const place &w, const group &g, int r, int32_t s) const
    {
        if (s < g.splits) {
            const float4 *from = o(p, w, g.split(s)) + r * S::D_TILES * 32;
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++)
                if (d < count)
                    ekv_copy16(ring_piece(w, s, d), from + d * 32, stored(p, w, r));
        }
        ekv_copy_commit();
    }

    /* The same through the warp's ring, more at a time, of which the first are under way: for merges at a CTA's end,
     * when each round trip counts and nothing else is to be read. */
    template <int BF16>
    EKV_MEMBER void add_through_ring(const ekv_kernel_params &p, const place &w, const group &g, int r,
                                     product<D, N, BF16> &c, float (&four)[EKV_MMA_FAN_IN / 4]) const
    {
#pragma unroll 1
        for (int32_t s = 0; s < g.splits; s++) {
            float weight[2];
            row_weights(w, s, four, weight);
            ekv_copy_wait(RING_SPLITS - 1);
            float4 pieces[S::D_TILES];
#pragma unroll /* from count on they are nobody's: with a branch for each, every load would wait for the one before */
            for (int d = 0; d < S::D_TILES; d++)
                pieces[d] = load_shared_floats(ring_piece(w, s, d));
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++)
                add_fragment(c.o[r][d], weight, pieces[d]);
            copy(p, w, g, r, s + RING_SPLITS);
        }
    }

    /* Merges the group into c. */
    template <int BF16>
    EKV_MEMBER void merge(const ekv_kernel_params &p, const place &w, const group &g, bool ring_free,
                          product<D, N, BF16> &c) const
    {
        ring_free = ring_free && p.stages * S::STAGE_BYTES >= RING_SPLITS * S::D_TILES * 512;
        c.forget_q();
        c.clear();
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++) {
            float weights[EKV_MMA_FAN_IN / 4];
            if (ring_free)
#pragma unroll 1
                for (int32_t s = 0; s < RING_SPLITS; s++)
                    copy(p, w, g, r, s);
            weigh(p, w, g, r, c, weights);
            if (ring_free)
                add_through_ring(p, w, g, r, c, weights);
            else
                add_in_registers(p, w, g, r, c, weights);
        }
    }
};

/* What the warp has stored can be read by those who come later.  Whether all others have come before. */
EKV_DEVICE bool arrive(uint32_t *arrivals, int32_t splits, int lane)
{
    __syncwarp();
    uint32_t before = 0;
    if (lane == 0)
        before = ekv_arrive(arrivals);
    return __shfl_sync(EKV_FULL_WARP, before, 0) == (uint32_t)splits - 1;
}

/* c: the warp's part of the tile of header t.  ring_free: nothing is in the warp's ring or on its way there.  Climbs
 * the tree as long as the warp is the last; true: c is the merged result. */
template <int D, int N, int BF16>
EKV_DEVICE bool merge_last(const ekv_kernel_params &p, const place &w, const round_header &t, product<D, N, BF16> &c,
                           int count, bool ring_free)
{
    partials<D, N> parts(w, t, count);
    const int32_t fan = fan_in(t.num_splits);
    int32_t child = t.split, children = t.num_splits, level = 0;
    group g;
    g.span = 1;
    while (children > 1) {
        const int32_t first = child / fan * fan;
        g.first = first * g.span;
        g.splits = min(fan, children - first);
        if (g.splits > 1) {
            uint32_t *arrivals = parts.arrivals(p, w, g.first + level);
            const bool last = level == 0 && t.arrived >> w.warp & 1;
            if (level > 0 || !(t.flags & MERGE))
                parts.store(p, w, g.split(child - first), c);
            if (level == 0 && t.flags & DEFERRED)
                return false;
            if (!last && !arrive(arrivals, g.splits, w.lane))
                return false;
            __syncwarp(); /* the lanes read what others have acquired and stored */
            if (w.lane == 0)
                *arrivals = 0;
            parts.merge(p, w, g, ring_free, c);
        }
        child /= fan;
        children = (children + fan - 1) / fan;
        g.span *= fan;
        level++;
    }
    return true;
}

} // namespace mma

#endif
