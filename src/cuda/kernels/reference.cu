/* SPDX-License-Identifier: Apache-2.0
 * The oracle for batches that are too large for the one on the CPU: double precision, straight from tensors and
 * lengths, no tiles.  One CTA a (chunk of a request, query head), one warp a token, then a merge in chunk order. */
#include "cuda/kernels/args.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum { WARPS = 4, LANE_DIMS = EKV_REFERENCE_MAX_DIM / 32 };

template <int BF16>
static __device__ double element(const void *base, int64_t offset)
{
    if (BF16)
        return __bfloat162float(((const __nv_bfloat16 *)base)[offset]);
    return __half2float(((const __half *)base)[offset]);
}

static __device__ double warp_sum(double x)
{
    for (int other = 16; other > 0; other /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, other);
    return x;
}

/* A partial result; lane holds dimensions lane + 32 i. */
struct state {
    double largest, sum, sum_squares, logit;
    double o[LANE_DIMS], abs_o[LANE_DIMS];
};

static __device__ void clear(state &s)
{
    s.largest = -INFINITY;
    s.sum = s.sum_squares = s.logit = 0;
    for (int i = 0; i < LANE_DIMS; i++)
        s.o[i] = s.abs_o[i] = 0;
}

/* Makes room for a score of `largest`: all sums become relative to it. */
static __device__ void raise(state &s, double largest)
{
    if (largest <= s.largest)
        return;
    const double factor = exp(s.largest - largest);
    s.largest = largest;
    s.sum *= factor;
    s.sum_squares *= factor * factor;
    for (int i = 0; i < LANE_DIMS; i++) {
        s.o[i] *= factor;
        s.abs_o[i] *= factor;
    }
}

static __device__ void load(state &s, const double *part, int dims)
{
    const int lane = (int)(threadIdx.x % 32);
    clear(s);
    s.largest = part[EKV_REFERENCE_LARGEST];
    s.sum = part[EKV_REFERENCE_SUM];
    s.sum_squares = part[EKV_REFERENCE_SUM_SQUARES];
    s.logit = part[EKV_REFERENCE_LOGIT];
    for (int i = 0; i < LANE_DIMS && lane + 32 * i < dims; i++) {
        s.o[i] = part[EKV_REFERENCE_O + lane + 32 * i];
        s.abs_o[i] = part[EKV_REFERENCE_O + dims + lane + 32 * i];
    }
}

static __device__ void save(const state &s, double *part, int dims)
{
    const int lane = (int)(threadIdx.x % 32);
    if (lane == 0) {
        part[EKV_REFERENCE_LARGEST] = s.largest;
        part[EKV_REFERENCE_SUM] = s.sum;
        part[EKV_REFERENCE_SUM_SQUARES] = s.sum_squares;
        part[EKV_REFERENCE_LOGIT] = s.logit;
    }
    for (int i = 0; i < LANE_DIMS && lane + 32 * i < dims; i++) {
        part[EKV_REFERENCE_O + lane + 32 * i] = s.o[i];
        part[EKV_REFERENCE_O + dims + lane + 32 * i] = s.abs_o[i];
    }
}

/* An empty part (sum 0) changes nothing. */
static __device__ void add(state &s, const state &part)
{
    if (part.sum == 0)
        return;
    raise(s, part.largest);
    const double factor = exp(part.largest - s.largest);
    s.sum += factor * part.sum;
    s.sum_squares += factor * factor * part.sum_squares;
    s.logit = fmax(s.logit, part.logit);
    for (int i = 0; i < LANE_DIMS; i++) {
        s.o[i] += factor * part.o[i];
        s.abs_o[i] += factor * part.abs_o[i];
    }
}

template <int BF16>
static __device__ void add_token(state &s, const ekv_reference_params &p, const double *q, int32_t page,
                                 int32_t in_page, int32_t kv_head)
{
    const ekv_kernel_params &t = p.tensors;
    const int lane = (int)(threadIdx.x % 32);
    const int64_t k = page * t.k_stride_page + in_page * t.k_stride_token + kv_head * t.k_stride_head;
    const int64_t v = page * t.v_stride_page + in_page * t.v_stride_token + kv_head * t.v_stride_head;
    double dot = 0, abs_dot = 0;
    for (int i = 0; i < LANE_DIMS && lane + 32 * i < t.head_dim; i++) {
        const double product = q[i] * element<BF16>(t.k, k + lane + 32 * i);
        dot += product;
        abs_dot += fabs(product);
    }
    const double score = p.sm_scale * warp_sum(dot);
    s.logit = fmax(s.logit, fabs(p.sm_scale) * warp_sum(abs_dot));
    raise(s, score);
    const double weight = exp(score - s.largest);
    s.sum += weight;
    s.sum_squares += weight * weight;
    for (int i = 0; i < LANE_DIMS && lane + 32 * i < t.head_dim; i++) {
        const double value = element<BF16>(t.v, v + lane + 32 * i);
        s.o[i] += weight * value;
        s.abs_o[i] += weight * fabs(value);
    }
}

template <int BF16>
static __device__ void decode_chunk(const ekv_reference_params &p)
{
    __shared__ double parts[WARPS][EKV_REFERENCE_O + 2 * EKV_REFERENCE_MAX_DIM];
    const ekv_kernel_params &t = p.tensors;
    const ekv_reference_chunk chunk = p.chunks[blockIdx.x];
    const int32_t head = (int32_t)blockIdx.y;
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    const int32_t *pages =
        t.page_indptr ? t.page_indices + t.page_indptr[chunk.request]
                      : t.page_indices + (t.table_rows ? t.table_rows[chunk.request] : chunk.request) * t.table_stride;
    double q[LANE_DIMS];
    for (int i = 0; i < LANE_DIMS && lane + 32 * i < t.head_dim; i++)
        q[i] = element<BF16>(t.q, chunk.request * t.q_stride_request + head * t.q_stride_head + lane + 32 * i);
    state s;
    clear(s);
    for (int32_t token = chunk.begin + warp; token < chunk.end; token += WARPS)
        add_token<BF16>(s, p, q, pages[token / t.page_size], token % t.page_size, head / t.group);
    save(s, parts[warp], t.head_dim);
    __syncthreads();
    if (warp)
        return;
    for (int w = 1; w < WARPS; w++) {
        state other;
        load(other, parts[w], t.head_dim);
        add(s, other);
    }
    save(s, p.parts + ((int64_t)blockIdx.x * p.q_heads + head) * (EKV_REFERENCE_O + 2 * t.head_dim), t.head_dim);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    ekv_reference_bf16(const __grid_constant__ ekv_reference_params p)
{
    decode_chunk<1>(p);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    ekv_reference_f16(const __grid_constant__ ekv_reference_params p)
{
    decode_chunk<0>(p);
}

/* One warp a (request, query head). */
extern "C" __global__ void __launch_bounds__(32) ekv_reference_merge(const __grid_constant__ ekv_reference_params p)
{
    const int32_t dims = p.tensors.head_dim, head = (int32_t)blockIdx.y;
    const int lane = (int)threadIdx.x;
    state s;
    clear(s);
    for (int32_t c = p.first_chunk[blockIdx.x]; c < p.first_chunk[blockIdx.x + 1]; c++) {
        state part;
        load(part, p.parts + ((int64_t)c * p.q_heads + head) * (EKV_REFERENCE_O + 2 * dims), dims);
        add(s, part);
    }
    const int64_t row = (int64_t)blockIdx.x * p.q_heads + head;
    const double factor = s.sum > 0 ? 1 / s.sum : 0;
    double value = 0;
    for (int i = 0; i < LANE_DIMS && lane + 32 * i < dims; i++) {
        p.o[row * dims + lane + 32 * i] = s.o[i] * factor;
        value = fmax(value, s.abs_o[i] * factor);
    }
    for (int other = 16; other > 0; other /= 2)
        value = fmax(value, __shfl_xor_sync(0xFFFFFFFFu, value, other));
    if (lane)
        return;
    p.lse[row] = s.sum > 0 ? s.largest + log(s.sum) : -INFINITY;
    p.scale[row * 3] = s.logit;
    p.scale[row * 3 + 1] = value;
    p.scale[row * 3 + 2] = sqrt(s.sum_squares) * factor;
}
