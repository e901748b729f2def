/* SPDX-License-Identifier: Apache-2.0
 * Kernels that measure and prepare: the plain read, random contents, and one that keeps SMs busy. */
#include "base/rng.h"
#include "cuda/kernels/params.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* ---- Plain read: N loads of 16 bytes in flight a thread ------------------------------------------------ */

template <int N> static __device__ void read_all(const uint4 *data, int64_t count, uint32_t *sink)
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

/* Element i is range * (2 u - 1), u being output i of SplitMix64(seed) as a number in [0, 1). */
extern "C" __global__ void ekv_fill_random(void *target, int32_t dtype, int64_t count, uint64_t seed, float range)
{
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        ekv_rng rng = { seed + (uint64_t)i * 0x9E3779B97F4A7C15u };
        const float value = range * (float)(2 * ekv_rng_unit(&rng) - 1);
        if (dtype == EKV_DTYPE_F32)
            ((float *)target)[i] = value;
        else if (dtype == EKV_DTYPE_F16)
            ((__half *)target)[i] = __float2half_rn(value);
        else
            ((__nv_bfloat16 *)target)[i] = __float2bfloat16_rn(value);
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
