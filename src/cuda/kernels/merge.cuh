/* SPDX-License-Identifier: Apache-2.0
 * Merges partial results in split order: after the tiles, in the same stream.
 *
 * A CTA takes (merge, head) pairs in turn.  Few splits: each warp merges rows of its own.  Many: all warps share
 * a row, each with a contiguous part of its splits, added up in order. */
#ifndef EVENKV_CUDA_KERNELS_MERGE_CUH
#define EVENKV_CUDA_KERNELS_MERGE_CUH

#include "cuda/kernels/common.cuh"

namespace merge
{

enum { THREADS = 256, WARPS = THREADS / 32, FEW_SPLITS = 8, MAX_HEAD_DIM = 256, PASSES = MAX_HEAD_DIM / 128 };

struct row_parts {
    const float *o;
    const float2 *ml;            /* largest, sum */
    int64_t first, next, stride; /* slot rows, as in ekv_merge */

    EKV_MEMBER int64_t slot_row(int32_t split) const
    {
        return split == 0 ? first : next + (split - 1) * stride;
    }
};

/* Largest score over all splits and the sum relative to it; the same in all lanes. */
EKV_DEVICE float2 total(const row_parts &parts, int32_t splits, float scale_log2)
{
    const int lane = (int)(threadIdx.x % 32);
    float top = -INFINITY, sum = 0;
    for (int32_t s = lane; s < splits; s += 32)
        top = fmaxf(top, parts.ml[parts.slot_row(s)].x);
    for (int other = 16; other; other /= 2)
        top = fmaxf(top, __shfl_xor_sync(EKV_FULL_WARP, top, other));
    for (int32_t s = lane; s < splits; s += 32) {
        const float2 ml = parts.ml[parts.slot_row(s)];
        sum += ml.y > 0 ? ml.y * ekv_exp2((ml.x - top) * scale_log2) : 0;
    }
    for (int other = 16; other; other /= 2)
        sum += __shfl_xor_sync(EKV_FULL_WARP, sum, other);
    return make_float2(top, sum);
}

/* acc[i]: d = i * 128 + lane * 4 .. + 3, over splits [begin, end). */
EKV_DEVICE void add_splits(const row_parts &parts, int32_t begin, int32_t end, float top, float scale_log2,
                           int32_t head_dim, float4 (&acc)[PASSES])
{
    const int lane = (int)(threadIdx.x % 32);
#pragma unroll 2 /* 4 spills */
    for (int32_t s = begin; s < end; s++) {
        const int64_t row = parts.slot_row(s);
        const float2 ml = parts.ml[row];
        const float weight = ml.y > 0 ? ekv_exp2((ml.x - top) * scale_log2) : 0;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const int d = i * 128 + lane * 4;
            if (d >= head_dim)
                continue;
            const float4 o = *reinterpret_cast<const float4 *>(parts.o + row * head_dim + d);
            acc[i].x += weight * o.x, acc[i].y += weight * o.y, acc[i].z += weight * o.z, acc[i].w += weight * o.w;
        }
    }
}

template <int BF16>
EKV_DEVICE void write(const ekv_kernel_params &p, const ekv_merge &m, int32_t head, int32_t row, int32_t d, float4 acc,
                      float2 total_ml)
{
    const int32_t query_head = ekv_query_head(p, m.head + head, row);
    const float factor = total_ml.y > 0 ? 1.0f / total_ml.y : 0.0f;
    uint2 packed;
    packed.x = ekv_pack2<BF16>(acc.x * factor, acc.y * factor);
    packed.y = ekv_pack2<BF16>(acc.z * factor, acc.w * factor);
    *reinterpret_cast<uint2 *>(reinterpret_cast<uint16_t *>(p.o) + m.request * p.o_stride_request +
                               query_head * p.o_stride_head + d) = packed;
    if (p.lse && d == 0)
        p.lse[m.request * p.lse_stride_request + query_head * p.lse_stride_head] = ekv_lse(p, total_ml.x, total_ml.y);
}

template <int BF16>
EKV_DEVICE void merge_head(const ekv_kernel_params &p, const ekv_merge &m, int32_t head,
                           float4 (&shared)[WARPS][MAX_HEAD_DIM / 4])
{
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    const int warps_per_row = m.num_splits <= FEW_SPLITS ? 1 : WARPS;
    for (int32_t row = warp / warps_per_row; row < p.slot_rows; row += WARPS / warps_per_row) {
        const row_parts parts = { p.part_o, reinterpret_cast<const float2 *>(p.part_ml),
                                  (int64_t)(m.slot_first + head) * p.slot_rows + row,
                                  (int64_t)(m.slot_next + head) * p.slot_rows + row,
                                  (int64_t)m.slot_stride * p.slot_rows };
        const float2 total_ml = total(parts, m.num_splits, p.scale_log2);
        float4 acc[PASSES];
        for (int i = 0; i < PASSES; i++)
            acc[i] = make_float4(0, 0, 0, 0);
        if (warps_per_row == 1) {
            add_splits(parts, 0, m.num_splits, total_ml.x, p.scale_log2, p.head_dim, acc);
            for (int i = 0; i < PASSES; i++)
                if (i * 128 + lane * 4 < p.head_dim)
                    write<BF16>(p, m, head, row, i * 128 + lane * 4, acc[i], total_ml);
            continue;
        }
        add_splits(parts, (int32_t)((int64_t)m.num_splits * warp / WARPS),
                   (int32_t)((int64_t)m.num_splits * (warp + 1) / WARPS), total_ml.x, p.scale_log2, p.head_dim, acc);
        for (int i = 0; i < PASSES; i++)
            shared[warp][i * 32 + lane] = acc[i];
        __syncthreads();
        if ((int)threadIdx.x * 4 < p.head_dim) {
            float4 sum = shared[0][threadIdx.x];
            for (int w = 1; w < WARPS; w++) {
                const float4 part = shared[w][threadIdx.x];
                sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
            }
            write<BF16>(p, m, head, row, (int32_t)threadIdx.x * 4, sum, total_ml);
        }
        __syncthreads();
    }
}

template <int BF16> EKV_DEVICE void merge_all(const ekv_kernel_params &p)
{
    __shared__ float4 shared[WARPS][MAX_HEAD_DIM / 4];
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory"); /* launched before the tiles have ended */
#endif
    const int32_t units = p.header->num_merges * p.merge_heads;
    for (int32_t unit = (int32_t)blockIdx.x; unit < units; unit += (int32_t)gridDim.x) {
        const int64_t start_ns = p.stamps ? ekv_global_ns() : 0;
        const ekv_merge m = p.merges[unit / p.merge_heads];
        const int32_t head = unit % p.merge_heads;
        if (head < m.head_count)
            merge_head<BF16>(p, m, head, shared);
        if (p.stamps && threadIdx.x == 0)
            ekv_stamp_write(p.stamps, (int64_t)p.header->num_tiles + unit, unit, 2, start_ns);
    }
}

} // namespace merge

#define EKV_MERGE_KERNEL(name, bf16)                                                                               \
    extern "C" __global__ void __launch_bounds__(merge::THREADS) name(const __grid_constant__ ekv_kernel_params p) \
    {                                                                                                              \
        merge::merge_all<bf16>(p);                                                                                 \
    }

#endif
