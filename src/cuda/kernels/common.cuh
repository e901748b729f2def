/* SPDX-License-Identifier: Apache-2.0
 * Device code that more than one kernel uses: 16-bit types, asynchronous copies, page addresses, stamps. */
#ifndef EVENKV_CUDA_KERNELS_COMMON_CUH
#define EVENKV_CUDA_KERNELS_COMMON_CUH

#include "cuda/kernels/params.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define EKV_DEVICE static __device__ __forceinline__
#define EKV_MEMBER __device__ __forceinline__
#define EKV_FULL_WARP 0xFFFFFFFFu

/* ---- 16-bit floats, two in a register: BF16 1 is bf16, 0 is fp16 -------------------------------------- */

template <int BF16>
EKV_DEVICE uint32_t ekv_pack2(float low, float high)
{
    uint32_t packed;
    if (BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <int BF16>
EKV_DEVICE float2 ekv_unpack2(uint32_t packed)
{
    if (BF16)
        return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000u));
    return __half22float2(*reinterpret_cast<const __half2 *>(&packed));
}

EKV_DEVICE float ekv_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); /* relative error 2^-22; -inf gives 0 */
    return y;
}

/* ---- Asynchronous copies ------------------------------------------------------------------------------ */

EKV_DEVICE uint32_t ekv_shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* 16 bytes to shared memory; zeros where !valid (global is not read then). */
EKV_DEVICE void ekv_copy16(uint32_t shared, const void *global, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

EKV_DEVICE void ekv_copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most `pending` of the thread's youngest groups are under way; pending is 0..3. */
EKV_DEVICE void ekv_copy_wait(int pending)
{
    if (pending >= 3)
        asm volatile("cp.async.wait_group 3;" ::: "memory");
    else if (pending == 2)
        asm volatile("cp.async.wait_group 2;" ::: "memory");
    else if (pending == 1)
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    else
        asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/* ---- Plan and pages ----------------------------------------------------------------------------------- */

EKV_DEVICE ekv_tile ekv_load_tile(const ekv_tile *tiles, int32_t index)
{
    union {
        int4 words[2];
        ekv_tile tile;
    } record;
    const int4 *source = reinterpret_cast<const int4 *>(tiles + index);
    record.words[0] = __ldg(source);
    record.words[1] = __ldg(source + 1);
    return record.tile;
}

EKV_DEVICE ekv_merge ekv_load_merge(const ekv_merge *merges, int32_t index)
{
    union {
        int4 words[2];
        ekv_merge merge;
    } record;
    const int4 *source = reinterpret_cast<const int4 *>(merges + index);
    record.words[0] = __ldg(source);
    record.words[1] = __ldg(source + 1);
    return record.merge;
}

/* The request's row of the page table. */
EKV_DEVICE const int32_t *ekv_pages(const ekv_kernel_params &p, int32_t request)
{
    if (p.page_indptr)
        return p.page_indices + __ldg(p.page_indptr + request);
    int64_t row = p.table_rows ? __ldg(p.table_rows + request) : request;
    return p.page_indices + row * p.table_stride;
}

EKV_DEVICE int32_t ekv_kv_head(const ekv_kernel_params &p, int32_t head)
{
    return p.query_heads_tiled ? head / p.group : head;
}

/* Rows of Q that a tile packs. */
EKV_DEVICE int32_t ekv_rows(const ekv_kernel_params &p)
{
    return p.query_heads_tiled ? 1 : p.group;
}

/* Query head of a packed row. */
EKV_DEVICE int32_t ekv_query_head(const ekv_kernel_params &p, int32_t head, int32_t row)
{
    return p.query_heads_tiled ? head : head * p.group + row;
}

/* Eight elements of Q, with the sign of sm_scale; zeros for a row past the group. */
EKV_DEVICE uint4 ekv_load_q8(const ekv_kernel_params &p, const uint16_t *source, bool valid)
{
    if (!valid)
        return make_uint4(0, 0, 0, 0);
    const uint4 q = __ldg(reinterpret_cast<const uint4 *>(source));
    return make_uint4(q.x ^ p.q_signs, q.y ^ p.q_signs, q.z ^ p.q_signs, q.w ^ p.q_signs);
}

/* ---- Results ------------------------------------------------------------------------------------------ */

/* Eight outputs of a query head, normalised: 16 bytes. */
template <int BF16>
EKV_DEVICE void ekv_store8(void *to, const float (&out)[8], float factor)
{
    uint4 packed;
    packed.x = ekv_pack2<BF16>(out[0] * factor, out[1] * factor);
    packed.y = ekv_pack2<BF16>(out[2] * factor, out[3] * factor);
    packed.z = ekv_pack2<BF16>(out[4] * factor, out[5] * factor);
    packed.w = ekv_pack2<BF16>(out[6] * factor, out[7] * factor);
    *reinterpret_cast<uint4 *>(to) = packed;
}

/* The LSE of a row with largest score `top` and sum `total` of exp2 relative to it. */
EKV_DEVICE float ekv_lse(const ekv_kernel_params &p, float top, float total)
{
    return total > 0 ? (top * p.scale_log2 + log2f(total)) * p.lse_factor : -INFINITY;
}

/* Writes d..d+7 of a row of head `head_index` of a tile, where the tile's flags say; out is not normalised. */
template <int BF16>
EKV_DEVICE void ekv_write_row(const ekv_kernel_params &p, const ekv_tile &tile, int32_t head_index, int32_t row,
                              int32_t d, const float (&out)[8], float top, float total)
{
    if (tile.flags & EKV_TILE_PARTIAL) {
        const int64_t slot_row = (int64_t)(tile.slot + head_index) * p.slot_rows + row;
        float4 *to = reinterpret_cast<float4 *>(p.part_o + slot_row * p.head_dim + d);
        to[0] = make_float4(out[0], out[1], out[2], out[3]);
        to[1] = make_float4(out[4], out[5], out[6], out[7]);
        if (d == 0)
            reinterpret_cast<float2 *>(p.part_ml)[slot_row] = make_float2(top, total);
        return;
    }
    const int32_t query_head = ekv_query_head(p, tile.head + head_index, row);
    ekv_store8<BF16>(reinterpret_cast<uint16_t *>(p.o) + tile.request * p.o_stride_request +
                         query_head * p.o_stride_head + d,
                     out, total > 0 ? 1.0f / total : 0.0f);
    if (p.lse && d == 0)
        p.lse[tile.request * p.lse_stride_request + query_head * p.lse_stride_head] = ekv_lse(p, top, total);
}

/* What was stored before others added to the count that is read here can be read afterwards. */
EKV_DEVICE uint32_t ekv_load_acquire(const uint32_t *count)
{
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
    return value;
}

/* Adds 1 to a count, whose value before is returned.  What the thread has stored, or seen stored, can be read by those
 * who find the count later. */
EKV_DEVICE uint32_t ekv_arrive(uint32_t *count)
{
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}

/* ---- Dependent launches ------------------------------------------------------------------------------- */

/* Lets the next kernel of the stream take its place on SMs as they come free. */
EKV_DEVICE void ekv_launch_dependents()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Waits until the kernels before this one have ended and what they wrote can be read. */
EKV_DEVICE void ekv_wait_for_launch()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* ---- Stamps ------------------------------------------------------------------------------------------- */

EKV_DEVICE int64_t ekv_global_ns()
{
    int64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

/* Called by one thread. */
EKV_DEVICE void ekv_stamp_write(ekv_stamp *stamps, int64_t slot, int32_t index, int32_t kind, int64_t start_ns)
{
    int32_t sm;
    asm("mov.u32 %0, %%smid;" : "=r"(sm));
    stamps[slot] = ekv_stamp{ start_ns, ekv_global_ns(), index, sm, (int32_t)blockIdx.x, kind };
}

#endif
