/* SPDX-License-Identifier: Apache-2.0
 * ekv_merge_states: one warp a row, states in order, fp32. */
#include "cuda/kernels/args.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

static __device__ float to_float(float x)
{
    return x;
}

static __device__ float to_float(__half x)
{
    return __half2float(x);
}

static __device__ float to_float(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}

static __device__ void store(void *o, int32_t dtype, int64_t at, float x)
{
    if (dtype == EKV_DTYPE_F32)
        ((float *)o)[at] = x;
    else if (dtype == EKV_DTYPE_F16)
        ((__half *)o)[at] = __float2half_rn(x);
    else
        ((__nv_bfloat16 *)o)[at] = __float2bfloat16_rn(x);
}

/* parts: of the row's first state.  The weight of a state relative to the row's largest is exp2((lse - largest) *
 * log2_factor); an empty state (-inf) is skipped, whatever its part holds. */
template <typename PART>
static __device__ void merge_row(const ekv_states_params &p, const PART *parts, const float *lse, int64_t row)
{
    const int lane = (int)(threadIdx.x % 32);
    float largest = -INFINITY, sum = 0;
    for (int32_t s = 0; s < p.num_states; s++)
        largest = fmaxf(largest, lse[s * p.lse_stride_state]);
    const bool empty = largest == -INFINITY;
    for (int32_t s = 0; s < p.num_states && !empty; s++)
        sum += exp2f((lse[s * p.lse_stride_state] - largest) * p.log2_factor);
    const float factor = empty ? 0 : 1 / sum;
    for (int32_t d = lane; d < p.head_dim; d += 32) {
        float merged = 0;
        for (int32_t s = 0; s < p.num_states && !empty; s++) {
            const float state = lse[s * p.lse_stride_state];
            if (state != -INFINITY)
                merged += exp2f((state - largest) * p.log2_factor) * to_float(parts[s * p.part_stride_state + d]);
        }
        store(p.o, p.o_dtype, row * p.head_dim + d, merged * factor);
    }
    if (p.lse && lane == 0)
        p.lse[row] = empty ? -INFINITY : largest + log2f(sum) / p.log2_factor;
}

template <typename PART>
static __device__ void merge_rows(const ekv_states_params &p)
{
    const int64_t warps = (int64_t)gridDim.x * (blockDim.x / 32);
    for (int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < p.rows; row += warps)
        merge_row(p, (const PART *)p.o_parts + row * p.part_stride_row, p.lse_parts + row * p.lse_stride_row, row);
}

extern "C" __global__ void __launch_bounds__(128) ekv_merge_states_f32(const __grid_constant__ ekv_states_params p)
{
    merge_rows<float>(p);
}

extern "C" __global__ void __launch_bounds__(128) ekv_merge_states_f16(const __grid_constant__ ekv_states_params p)
{
    merge_rows<__half>(p);
}

extern "C" __global__ void __launch_bounds__(128) ekv_merge_states_bf16(const __grid_constant__ ekv_states_params p)
{
    merge_rows<__nv_bfloat16>(p);
}
