/* SPDX-License-Identifier: Apache-2.0
 * Merges partial results in split order: after the tiles, in the same stream.
 *
 * A unit is one row of one head of one merge.  With few splits a warp merges a row, so that the CTA of a head's
 * first unit merges all of its rows.  With many splits a CTA merges a row: each warp adds up a contiguous part of
 * the splits, and the parts are added in order. */
#ifndef EVENKV_CUDA_KERNELS_MERGE_CUH
#define EVENKV_CUDA_KERNELS_MERGE_CUH

#include "cuda/kernels/common.cuh"

namespace merge
{

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    AT_ONCE = 8,   /* partial results of a row that a warp loads at a time */
    FEW = AT_ONCE, /* splits that one warp merges alone */
    MAX_HEAD_DIM = 256,
    PASSES = MAX_HEAD_DIM / 128
};

/* The partial results of one row. */
struct row_parts {
    const float *o;
    const float2 *ml;            /* largest, sum */
    int64_t first, next, stride; /* slot rows, as in ekv_merge */
    int32_t head_dim;

    EKV_MEMBER row_parts(const ekv_kernel_params &p, const ekv_merge &m, int32_t head, int32_t row)
    {
        o = p.part_o;
        ml = reinterpret_cast<const float2 *>(p.part_ml);
        first = (int64_t)(m.slot_first + head) * p.slot_rows + row;
        next = (int64_t)(m.slot_next + head) * p.slot_rows + row;
        stride = (int64_t)m.slot_stride * p.slot_rows;
        head_dim = p.head_dim;
    }

    EKV_MEMBER int64_t slot_row(int32_t split) const
    {
        return split == 0 ? first : next + (split - 1) * stride;
    }

    /* d = pass * 128 + lane * 4 .. + 3; 0 where there is no such split or element. */
    EKV_MEMBER float4 load(int32_t split, int32_t splits, int pass) const
    {
        const int d = pass * 128 + (int)(threadIdx.x % 32) * 4;
        if (split >= splits || d >= head_dim)
            return make_float4(0, 0, 0, 0);
        return *reinterpret_cast<const float4 *>(o + slot_row(split) * head_dim + d);
    }

    EKV_MEMBER float2 load_ml(int32_t split, int32_t splits) const
    {
        return split < splits ? ml[slot_row(split)] : make_float2(-INFINITY, 0);
    }
};

EKV_DEVICE float warp_max(float x)
{
    for (int other = 16; other; other /= 2)
        x = fmaxf(x, __shfl_xor_sync(EKV_FULL_WARP, x, other));
    return x;
}

EKV_DEVICE float warp_sum(float x)
{
    for (int other = 16; other; other /= 2)
        x += __shfl_xor_sync(EKV_FULL_WARP, x, other);
    return x;
}

/* Weight of a partial result; a part without tokens has none, whatever its largest score. */
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

/* Writes d .. d + 3 of a row. */
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

/* At most FEW splits: all loads are under way before the first is used. */
template <int BF16>
EKV_DEVICE void merge_row_by_warp(const ekv_kernel_params &p, const ekv_merge &m, int32_t head, int32_t row)
{
    const int lane = (int)(threadIdx.x % 32);
    const row_parts parts(p, m, head, row);
    const float2 ml = parts.load_ml(lane, m.num_splits);
    float4 o[FEW][PASSES];
#pragma unroll
    for (int s = 0; s < FEW; s++)
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            o[s][pass] = parts.load(s, m.num_splits, pass);
    const float top = warp_max(ml.x);
    const float weight = weight_of(ml, top, p.scale_log2);
    const float total = warp_sum(weight * ml.y);
    float4 sum[PASSES] = {};
#pragma unroll
    for (int s = 0; s < FEW; s++)
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            add(sum[pass], __shfl_sync(EKV_FULL_WARP, weight, s), o[s][pass]);
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
        if (pass * 128 + lane * 4 < p.head_dim)
            write<BF16>(p, m, head, row, pass * 128 + lane * 4, sum[pass], top, total);
}

template <int BF16>
EKV_DEVICE void merge_row_by_cta(const ekv_kernel_params &p, const ekv_merge &m, int32_t head, int32_t row,
                                 float4 (&shared)[WARPS][MAX_HEAD_DIM / 4])
{
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    const int32_t splits = m.num_splits;
    const row_parts parts(p, m, head, row);
    float top = -INFINITY, total = 0;
    for (int32_t s = lane; s < splits; s += 32)
        top = fmaxf(top, parts.load_ml(s, splits).x);
    top = warp_max(top);
    for (int32_t s = lane; s < splits; s += 32) {
        const float2 ml = parts.load_ml(s, splits);
        total = fmaf(weight_of(ml, top, p.scale_log2), ml.y, total);
    }
    total = warp_sum(total);

    const int32_t begin = (int32_t)((int64_t)splits * warp / WARPS),
                  end = (int32_t)((int64_t)splits * (warp + 1) / WARPS);
    float4 sum[PASSES] = {};
    for (int32_t window = begin; window < end; window += 32) {
        const float weight = weight_of(parts.load_ml(window + lane, end), top, p.scale_log2);
        const int32_t window_end = window + 32 < end ? window + 32 : end;
        for (int32_t s = window; s < window_end; s += AT_ONCE) {
            float4 o[AT_ONCE][PASSES];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int pass = 0; pass < PASSES; pass++)
                    o[i][pass] = parts.load(s + i, window_end, pass);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int pass = 0; pass < PASSES; pass++)
                    add(sum[pass], __shfl_sync(EKV_FULL_WARP, weight, s - window + i), o[i][pass]);
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
        shared[warp][pass * 32 + lane] = sum[pass];
    __syncthreads();
    if ((int)threadIdx.x * 4 < p.head_dim) {
        float4 all = shared[0][threadIdx.x];
        for (int w = 1; w < WARPS; w++)
            add(all, 1.0f, shared[w][threadIdx.x]);
        write<BF16>(p, m, head, row, (int32_t)threadIdx.x * 4, all, top, total);
    }
    __syncthreads();
}

template <int BF16> EKV_DEVICE void merge_all(const ekv_kernel_params &p)
{
    __shared__ float4 shared[WARPS][MAX_HEAD_DIM / 4];
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory"); /* launched before the tiles have ended */
#endif
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    const int64_t heads = (int64_t)p.header->num_merges * p.merge_heads, units = heads * p.slot_rows;
    /* Unit u: row u / heads of head u % heads.  The warp looks at 32 of the CTA's units at a time. */
    for (int64_t base = blockIdx.x; base < units; base += 32 * (int64_t)gridDim.x) {
        const int64_t mine = base + (int64_t)lane * gridDim.x;
        bool active = false;
        if (mine < units) {
            const ekv_merge *m = p.merges + mine % heads / p.merge_heads;
            active = (mine < heads || m->num_splits > FEW) && mine % heads % p.merge_heads < m->head_count;
        }
        for (uint32_t left = __ballot_sync(EKV_FULL_WARP, active); left; left &= left - 1) {
            const int64_t unit = base + (int64_t)(__ffs((int)left) - 1) * gridDim.x;
            const int64_t start_ns = p.stamps ? ekv_global_ns() : 0;
            const ekv_merge m = p.merges[unit % heads / p.merge_heads];
            const int32_t head = (int32_t)(unit % heads % p.merge_heads);
            if (m.num_splits > FEW)
                merge_row_by_cta<BF16>(p, m, head, (int32_t)(unit / heads), shared);
            else
                for (int32_t row = warp; row < p.slot_rows; row += WARPS)
                    merge_row_by_warp<BF16>(p, m, head, row);
            if (p.stamps && threadIdx.x == 0 && unit < heads)
                ekv_stamp_write(p.stamps, (int64_t)p.header->num_tiles + unit, (int32_t)unit, 2, start_ns);
        }
    }
}

} // namespace merge

#define EKV_MERGE_KERNEL(name, bf16)                                                                               \
    extern "C" __global__ void __launch_bounds__(merge::THREADS) name(const __grid_constant__ ekv_kernel_params p) \
    {                                                                                                              \
        merge::merge_all<bf16>(p);                                                                                 \
    }

#endif
