/* SPDX-License-Identifier: Apache-2.0
 * Merges partial results in split order: after the tiles, in the same stream.
 *
 * A unit is one row of one head of one merge.  With few splits a warp merges a row, and the CTA of a head's first
 * unit merges all of its rows.  With many splits a CTA merges a row: each warp adds up a contiguous part of the
 * splits, and the parts are added in order.
 *
 * The kernel is cold when it starts, so its code is kept short: instructions have to come from memory, too. */
#ifndef EVENKV_CUDA_KERNELS_MERGE_CUH
#define EVENKV_CUDA_KERNELS_MERGE_CUH

#include "cuda/kernels/common.cuh"
#include "cuda/kernels/merge_shape.h"

namespace merge
{

enum {
    WARPS = EKV_MERGE_THREADS / 32,
    FEW = 8,     /* splits that one warp merges alone */
    AT_ONCE = 8, /* partial results that a warp loads at a time */
    SLICE = 128  /* elements of a row that a warp takes at a time, 4 a lane */
};

/* The partial results of one row. */
struct row_parts {
    uint32_t first, next, stride; /* slot rows, as in ekv_merge */

    EKV_MEMBER row_parts(const ekv_kernel_params &p, const ekv_merge &m, int32_t head, int32_t row)
    {
        first = (uint32_t)((m.slot_first + head) * p.slot_rows + row);
        next = (uint32_t)((m.slot_next + head) * p.slot_rows + row);
        stride = (uint32_t)(m.slot_stride * p.slot_rows);
    }

    EKV_MEMBER uint32_t slot_row(int32_t split) const
    {
        return split == 0 ? first : next + (uint32_t)(split - 1) * stride;
    }

    /* Largest score and sum; a part without tokens has sum 0. */
    EKV_MEMBER float2 load_ml(const ekv_kernel_params &p, int32_t split, int32_t splits) const
    {
        return split < splits ? reinterpret_cast<const float2 *>(p.part_ml)[slot_row(split)]
                              : make_float2(-INFINITY, 0);
    }
};

EKV_DEVICE float weight_of(float2 ml, float top, float scale_log2)
{
    return ml.y > 0 ? ekv_exp2((ml.x - top) * scale_log2) : 0;
}

EKV_DEVICE void add(float4 &sum, float weight, const float4 &o)
{
    sum.x = fmaf(weight, o.x, sum.x);
    sum.y = fmaf(weight, o.y, sum.y);
    sum.z = fmaf(weight, o.z, sum.z);
    sum.w = fmaf(weight, o.w, sum.w);
}

/* Elements d .. d + 3 of the partial results of AT_ONCE splits from `at` on; not set where there is none. */
EKV_DEVICE void load(const ekv_kernel_params &p, const row_parts &parts, int32_t at, int32_t end, int32_t d,
                     float4 (&o)[AT_ONCE])
{
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        if (at + i < end && d < p.head_dim)
            o[i] = *reinterpret_cast<const float4 *>(p.part_o + (int64_t)parts.slot_row(at + i) * p.head_dim + d);
}

template <int BF16>
EKV_DEVICE void write(const ekv_kernel_params &p, const ekv_merge &m, int32_t head, int32_t row, int32_t d,
                      const float4 &o, float top, float total)
{
    const int32_t query_head = ekv_query_head(p, m.head + head, row);
    const float factor = total > 0 ? 1.0f / total : 0.0f;
    uint2 packed;
    packed.x = ekv_pack2<BF16>(o.x * factor, o.y * factor);
    packed.y = ekv_pack2<BF16>(o.z * factor, o.w * factor);
    *reinterpret_cast<uint2 *>(reinterpret_cast<uint16_t *>(p.o) + m.request * p.o_stride_request +
                               query_head * p.o_stride_head + d) = packed;
    if (p.lse && d == 0)
        p.lse[m.request * p.lse_stride_request + query_head * p.lse_stride_head] = ekv_lse(p, top, total);
}

/* 128 elements of a row from `slice` on, by one warp or, many, by all warps of the CTA.  The first partial results
 * are under way while the weights are found. */
template <int BF16>
EKV_DEVICE void merge_slice(const ekv_kernel_params &p, const ekv_merge &m, int32_t head, int32_t row, int32_t slice,
                            bool many, float4 (&shared)[WARPS][32])
{
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    const int32_t splits = m.num_splits, d = slice + lane * 4;
    const row_parts parts(p, m, head, row);
    const int32_t begin = many ? (int32_t)((int64_t)splits * warp / WARPS) : 0;
    const int32_t end = many ? (int32_t)((int64_t)splits * (warp + 1) / WARPS) : splits;
    float4 o[AT_ONCE], sum = make_float4(0, 0, 0, 0);
    load(p, parts, begin, end, d, o);

    float top = -INFINITY, total = 0;
#pragma unroll 1
    for (int32_t s = lane; s < splits; s += 32)
        top = fmaxf(top, parts.load_ml(p, s, splits).x);
#pragma unroll
    for (int other = 16; other; other /= 2)
        top = fmaxf(top, __shfl_xor_sync(EKV_FULL_WARP, top, other));
#pragma unroll 1
    for (int32_t s = lane; s < splits; s += 32) { /* from the L1 cache */
        const float2 ml = parts.load_ml(p, s, splits);
        total = fmaf(weight_of(ml, top, p.scale_log2), ml.y, total);
    }
#pragma unroll
    for (int other = 16; other; other /= 2)
        total += __shfl_xor_sync(EKV_FULL_WARP, total, other);

#pragma unroll 1
    for (int32_t at = begin; at < end; at += AT_ONCE) {
        const float weight = weight_of(parts.load_ml(p, at + lane, lane < AT_ONCE ? end : 0), top, p.scale_log2);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float by = __shfl_sync(EKV_FULL_WARP, weight, i);
            if (at + i < end && d < p.head_dim)
                add(sum, by, o[i]);
        }
        load(p, parts, at + AT_ONCE, end, d, o);
    }
    if (many) {
        shared[warp][lane] = sum;
        __syncthreads();
        if (warp == 0)
            for (int w = 1; w < WARPS; w++)
                add(sum, 1.0f, shared[w][lane]);
        __syncthreads();
    }
    if ((!many || warp == 0) && d < p.head_dim)
        write<BF16>(p, m, head, row, d, sum, top, total);
}

template <int BF16>
EKV_DEVICE void merge_all(const ekv_kernel_params &p)
{
    __shared__ float4 shared[WARPS][32];
    ekv_wait_for_launch();
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    const uint32_t heads = (uint32_t)(p.header->num_merges * p.merge_heads), units = heads * (uint32_t)p.slot_rows;
    /* Unit u: row u / heads of head u % heads.  The warp looks at 32 of the CTA's units at a time. */
    for (uint32_t base = blockIdx.x; base < units; base += 32 * gridDim.x) {
        const uint32_t mine = base + (uint32_t)lane * gridDim.x, mine_head = mine % heads;
        bool active = false;
        if (mine < units) {
            const ekv_merge *m = p.merges + mine_head / (uint32_t)p.merge_heads;
            active = (mine < heads || m->num_splits > FEW) && mine_head % (uint32_t)p.merge_heads < m->head_count;
        }
        for (uint32_t left = __ballot_sync(EKV_FULL_WARP, active); left; left &= left - 1) {
            const uint32_t unit = base + (uint32_t)(__ffs((int)left) - 1) * gridDim.x, unit_head = unit % heads;
            const int64_t start_ns = p.stamps ? ekv_global_ns() : 0;
            const ekv_merge m = p.merges[unit_head / (uint32_t)p.merge_heads];
            const int32_t head = (int32_t)(unit_head % (uint32_t)p.merge_heads);
            const bool many = m.num_splits > FEW;
#pragma unroll 1
            for (int32_t row = many ? (int32_t)(unit / heads) : warp; row < p.slot_rows;
                 row += many ? p.slot_rows : (int32_t)WARPS)
#pragma unroll 1
                for (int32_t slice = 0; slice < p.head_dim; slice += SLICE)
                    merge_slice<BF16>(p, m, head, row, slice, many, shared);
            if (p.stamps && threadIdx.x == 0 && unit < heads)
                ekv_stamp_write(p.stamps, (int64_t)p.header->num_tiles + unit, (int32_t)unit, 2, start_ns);
        }
    }
}

} // namespace merge

#define EKV_MERGE_KERNEL(name, bf16)                                                       \
    extern "C" __global__ void __launch_bounds__(EKV_MERGE_THREADS, EKV_MERGE_CTAS_PER_SM) \
        name(const __grid_constant__ ekv_kernel_params p)                                  \
    {                                                                                      \
        merge::merge_all<bf16>(p);                                                         \
    }

#endif
