/* SPDX-License-Identifier: Apache-2.0
 * Copies a plan's records from pinned host memory.  A kernel, not a copy node: it moves only what the plan uses now,
 * also in a graph that was captured when the plan used less or more, and does not switch to a copy engine. */
#include "cuda/kernels/args.h"

/* size: bytes, rounded up to 16; the capacity of every array is a multiple of 16 bytes. */
static __device__ void copy(const ekv_upload_params &p, int64_t offset, int64_t size)
{
    const int4 *source = (const int4 *)((const char *)p.source + offset);
    int4 *target = (int4 *)((char *)p.target + offset);
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (size + 15) / 16; i += stride)
        target[i] = source[i];
}

extern "C" __global__ void __launch_bounds__(256) ekv_plan_upload(const __grid_constant__ ekv_upload_params p)
{
    __shared__ int32_t counts[3];
    if (threadIdx.x == 0) {
        const volatile ekv_plan_header *header = (const volatile ekv_plan_header *)p.source;
        counts[0] = header->num_tiles;
        counts[1] = header->num_merges;
        counts[2] = header->num_ctas;
    }
    __syncthreads();
    copy(p, 0, sizeof(ekv_plan_header));
    copy(p, p.tiles_offset, (int64_t)counts[0] * (int64_t)sizeof(ekv_tile));
    copy(p, p.merges_offset, (int64_t)counts[1] * (int64_t)sizeof(ekv_merge));
    if (p.ctas_offset >= 0)
        copy(p, p.ctas_offset, (int64_t)counts[2] * (int64_t)sizeof(ekv_cta_record));
}
