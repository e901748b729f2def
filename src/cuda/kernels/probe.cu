/* SPDX-License-Identifier: Apache-2.0
 * Kernels that measure and prepare: the plain read, random contents, and one that keeps SMs busy. */
#include "base/rng.h"
#include "cuda/kernels/args.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* ---- Plain read: N loads of 16 bytes in flight a thread ------------------------------------------------ */

template <int N>
static __device__ void read_all(const uint4 *data, int64_t count, uint32_t *sink)
{
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t seen = 0;
    for (; i + (N - 1) * stride < count; i += N * stride) {
        uint4 loaded[N];
#pragma unroll
        for (int n = 0; n < N; n++)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(loaded[n].x), "=r"(loaded[n].y), "=r"(loaded[n].z), "=r"(loaded[n].w)
                         : "l"(data + i + n * stride));
#pragma unroll
        for (int n = 0; n < N; n++)
            seen |= loaded[n].x ^ loaded[n].y ^ loaded[n].z ^ loaded[n].w;
    }
    for (; i < count; i += stride)
        seen |= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
    if (seen == 0x5EEDB175u) /* as good as never, but the compiler cannot know, so the loads stay */
        atomicAdd(sink, 1u);
}

/* data: count vectors of 16 bytes. */
extern "C" __global__ void ekv_read_4(const uint4 *data, int64_t count, uint32_t *sink)
{
    read_all<4>(data, count, sink);
}

extern "C" __global__ void ekv_read_8(const uint4 *data, int64_t count, uint32_t *sink)
{
    read_all<8>(data, count, sink);
}

extern "C" __global__ void ekv_read_16(const uint4 *data, int64_t count, uint32_t *sink)
{
    read_all<16>(data, count, sink);
}

/* ---- Random contents ------------------------------------------------------------------------------------ */

/* range * (2 u - 1), u being output i of SplitMix64(seed) as a number in [0, 1). */
static __device__ float random_value(uint64_t seed, uint64_t i, float range)
{
    ekv_rng rng = { seed + i * 0x9E3779B97F4A7C15u };
    return range * (float)(2 * ekv_rng_unit(&rng) - 1);
}

static __device__ void store(void *target, int32_t dtype, int64_t at, float value)
{
    if (dtype == EKV_DTYPE_F32)
        ((float *)target)[at] = value;
    else if (dtype == EKV_DTYPE_F16)
        ((__half *)target)[at] = __float2half_rn(value);
    else
        ((__nv_bfloat16 *)target)[at] = __float2bfloat16_rn(value);
}

extern "C" __global__ void ekv_fill_random(void *target, int32_t dtype, int64_t count, uint64_t seed, float range)
{
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        store(target, dtype, i, random_value(seed, (uint64_t)i, range));
}

/* A value depends on request, token, head and dimension only, not on where they lie. */
extern "C" __global__ void __launch_bounds__(256) ekv_fill_tokens(const __grid_constant__ ekv_fill_params p)
{
    const int64_t stride = (int64_t)gridDim.x * blockDim.x, row = (int64_t)p.heads * p.head_dim;
    for (int32_t b = (int32_t)blockIdx.y; b < p.batch_size; b += (int32_t)gridDim.y) {
        const int32_t *pages = p.page_indptr ? p.page_indices + p.page_indptr[b]
                                             : p.page_indices + (p.table_rows ? p.table_rows[b] : b) * p.table_stride;
        const int64_t count = p.kv_len[b] * row;
        for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
            const int32_t token = (int32_t)(i / row), head = (int32_t)(i % row / p.head_dim);
            const int64_t at = pages[token / p.page_size] * p.stride_page + token % p.page_size * p.stride_token +
                               head * p.stride_head + i % p.head_dim;
            store(p.data, p.dtype, at, random_value(p.seed, ((uint64_t)b << 40) + (uint64_t)i, p.range));
        }
    }
}

/* ---- Busy SMs ------------------------------------------------------------------------------------------- */

/* Every CTA holds its place for ns.  Launched with enough dynamic shared memory, one CTA fills an SM. */
extern "C" __global__ void ekv_occupy(int64_t ns)
{
    int64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}
