/* SPDX-License-Identifier: Apache-2.0
 * Decode on CUDA cores, one CTA a tile.
 *
 * D / 8 threads form a thread group: each holds 8 of the D elements, for all packed rows.  A thread group takes
 * TOKENS consecutive tokens at a time, so each K and V row is read once, by 16-byte loads, and converted once for
 * all rows.  The next K is under way during softmax and V, the next V during K.  Thread groups keep their own
 * softmax state and merge at the tile's end. */
#ifndef EVENKV_CUDA_KERNELS_SIMT_CUH
#define EVENKV_CUDA_KERNELS_SIMT_CUH

#include "cuda/kernels/common.cuh"
#include "cuda/kernels/simt_shape.h"

namespace simt
{

/* D: head_dim.  G: packed rows, 1, 2, 4 or 8. */
template <int D, int G>
struct shape {
    enum {
        LANES = D / 8, /* of a thread group */
        GROUPS = EKV_SIMT_THREADS / LANES,
        TOKENS = G == 8 ? 4 : 8,                           /* of a thread group at a time */
        VALUES = TOKENS * G,                               /* scores of them */
        LANE_VALUES = VALUES > LANES ? VALUES / LANES : 1, /* scores that a lane ends up with; divides G */
        REPLICAS = VALUES < LANES ? LANES / VALUES : 1,    /* lanes that end up with the same score */
        WEIGHTS = VALUES + 4                               /* floats of a thread group's weights, padded by 16 bytes */
    };
};

template <int D, int G>
struct shared_memory {
    typedef shape<D, G> S;
    union {
        float weights[S::GROUPS][S::WEIGHTS];
        float o[S::GROUPS][G][D];
    };
    float factors[S::GROUPS][G];
    float2 ml[S::GROUPS][G]; /* largest, sum */
    int32_t tile;
};

/* Sums x[0..W) over LANES lanes; value v ends up in the lanes whose number begins with the bits of v. */
template <int W, int STEP>
struct reduce_scatter {
    static EKV_MEMBER void run(float *x, int lane)
    {
        if (W > 1) {
            const bool upper = lane & STEP;
#pragma unroll
            for (int i = 0; i < W / 2; i++) {
                const float keep = upper ? x[i + W / 2] : x[i], send = upper ? x[i] : x[i + W / 2];
                x[i] = keep + __shfl_xor_sync(EKV_FULL_WARP, send, STEP);
            }
        } else {
            x[0] += __shfl_xor_sync(EKV_FULL_WARP, x[0], STEP);
        }
        reduce_scatter<(W > 1 ? W / 2 : 1), STEP / 2>::run(x, lane);
    }
};

template <int W>
struct reduce_scatter<W, 0> {
    static EKV_MEMBER void run(float *, int)
    {
    }
};

template <int BF16>
EKV_DEVICE void unpack8(const uint4 &packed, float (&x)[8])
{
    const uint32_t words[4] = { packed.x, packed.y, packed.z, packed.w };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = ekv_unpack2<BF16>(words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}

/* A thread's view of one tile. */
template <int D, int G, int BF16>
struct worker {
    typedef shape<D, G> S;
    const uint16_t *k, *v; /* of the head, at the lane's elements */
    const int32_t *pages;
    int32_t end;
    int lane; /* in the thread group */
    float q[G][8], o[G][8];
    float largest[S::LANE_VALUES], sum[S::LANE_VALUES]; /* of the lane's own rows and tokens */
    int64_t k_offset[S::TOKENS], v_offset[S::TOKENS];   /* of the next tokens; -1 past the end */

    /* Offsets of TOKENS tokens from `token` on. */
    EKV_MEMBER void look_up(const ekv_kernel_params &p, int32_t token)
    {
        int32_t page = 0, in_page = 0;
#pragma unroll
        for (int t = 0; t < S::TOKENS; t++) {
            if (t == 0 || !p.pages_aligned) {
                page = token + t < end ? __ldg(pages + (token + t) / p.page_size) : 0;
                in_page = (token + t) % p.page_size;
            } else {
                in_page++; /* TOKENS divides 16, so they share a page */
            }
            k_offset[t] = (int64_t)page * p.k_stride_page + (int64_t)in_page * p.k_stride_token;
            v_offset[t] = (int64_t)page * p.v_stride_page + (int64_t)in_page * p.v_stride_token;
        }
    }

    EKV_MEMBER void load(const uint16_t *base, const int64_t (&offset)[S::TOKENS], int32_t token,
                         uint4 (&rows)[S::TOKENS]) const
    {
#pragma unroll
        for (int t = 0; t < S::TOKENS; t++)
            rows[t] =
                token + t < end ? __ldg(reinterpret_cast<const uint4 *>(base + offset[t])) : make_uint4(0, 0, 0, 0);
    }

    /* x: scores of the lane, value lane * LANE_VALUES / REPLICAS + i = token * G + row. */
    EKV_MEMBER void scores(const uint4 (&k_rows)[S::TOKENS], float (&x)[S::VALUES]) const
    {
#pragma unroll
        for (int t = 0; t < S::TOKENS; t++) {
            float k8[8];
            unpack8<BF16>(k_rows[t], k8);
#pragma unroll
            for (int g = 0; g < G; g++) {
                float dot = 0;
#pragma unroll
                for (int i = 0; i < 8; i++)
                    dot = fmaf(q[g][i], k8[i], dot);
                x[t * G + g] = dot;
            }
        }
        reduce_scatter<S::VALUES, S::LANES / 2>::run(x, lane);
    }

    EKV_MEMBER int first_value() const
    {
        return lane / S::REPLICAS * S::LANE_VALUES;
    }

    /* Turns the lane's scores into weights and leaves those of all tokens and rows in shared memory. */
    EKV_MEMBER void softmax(const ekv_kernel_params &p, int32_t token, float (&x)[S::VALUES], float *weights,
                            float *factors)
    {
        const int value = first_value();
        const bool valid = token + value / G < end;
        bool raised = false;
        float factor[S::LANE_VALUES];
#pragma unroll
        for (int i = 0; i < S::LANE_VALUES; i++) {
            float top = valid ? x[i] : -INFINITY;
#pragma unroll
            for (int other = S::LANES / S::TOKENS; other < S::LANES; other *= 2)
                top = fmaxf(top, __shfl_xor_sync(EKV_FULL_WARP, top, other));
            factor[i] = 1.0f;
            if (top > largest[i]) {
                factor[i] = ekv_exp2((largest[i] - top) * p.scale_log2);
                largest[i] = top;
                raised = true;
            }
            const float weight = valid ? ekv_exp2(fmaf(x[i], p.scale_log2, -largest[i] * p.scale_log2)) : 0;
            sum[i] = sum[i] * factor[i] + weight;
            weights[value + i] = weight;
        }
        raised = __any_sync(EKV_FULL_WARP, raised);
        if (raised)
#pragma unroll
            for (int i = 0; i < S::LANE_VALUES; i++)
                factors[(value + i) % G] = factor[i];
        __syncwarp();
        if (raised)
#pragma unroll
            for (int g = 0; g < G; g++) {
                const float by = factors[g];
#pragma unroll
                for (int i = 0; i < 8; i++)
                    o[g][i] *= by;
            }
    }

    EKV_MEMBER void outputs(const uint4 (&v_rows)[S::TOKENS], const float *weights)
    {
#pragma unroll
        for (int t = 0; t < S::TOKENS; t++) {
            float v8[8];
            unpack8<BF16>(v_rows[t], v8);
#pragma unroll
            for (int g = 0; g < G; g++) {
                const float weight = weights[t * G + g];
#pragma unroll
                for (int i = 0; i < 8; i++)
                    o[g][i] = fmaf(weight, v8[i], o[g][i]);
            }
        }
        __syncwarp();
    }
};

/* One tile, rows [row_begin, row_begin + G) of the packed rows, by the thread groups first, first + count, ... */
template <int D, int G, int BF16>
EKV_DEVICE void tile(const ekv_kernel_params &p, const ekv_tile &t, int32_t row_begin, int32_t rows, int member,
                     int members, shared_memory<D, G> &shared)
{
    typedef shape<D, G> S;
    const int group = (int)threadIdx.x / S::LANES;
    worker<D, G, BF16> w;
    w.lane = (int)threadIdx.x % S::LANES;
    w.end = t.kv_end;
    const int32_t kv_head = ekv_kv_head(p, t.head);
    w.k = reinterpret_cast<const uint16_t *>(p.k) + kv_head * p.k_stride_head + w.lane * 8;
    w.v = reinterpret_cast<const uint16_t *>(p.v) + kv_head * p.v_stride_head + w.lane * 8;
    w.pages = ekv_pages(p, t.request);
#pragma unroll
    for (int g = 0; g < G; g++) {
        const int32_t row = row_begin + g;
        const uint16_t *source = reinterpret_cast<const uint16_t *>(p.q) + t.request * p.q_stride_request +
                                 ekv_query_head(p, t.head, row) * p.q_stride_head + w.lane * 8;
        unpack8<BF16>(ekv_load_q8(p, source, row < rows), w.q[g]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            w.o[g][i] = 0;
    }
#pragma unroll
    for (int i = 0; i < S::LANE_VALUES; i++) {
        w.largest[i] = -INFINITY;
        w.sum[i] = 0;
    }

    /* All thread groups of a warp make the same rounds: shuffles and __syncwarp need the whole warp. */
    const int32_t step = members * S::TOKENS;
    int32_t token = t.kv_begin + member * S::TOKENS;
    const int32_t rounds = t.kv_end > t.kv_begin ? (t.kv_end - t.kv_begin + step - 1) / step : 0;
    uint4 k_rows[S::TOKENS], v_rows[S::TOKENS];
    if (rounds > 0) {
        w.look_up(p, token);
        w.load(w.k, w.k_offset, token, k_rows);
        w.load(w.v, w.v_offset, token, v_rows);
        w.look_up(p, token + step);
    }
    for (int32_t round = 0; round < rounds; round++, token += step) {
        float x[S::VALUES];
        w.scores(k_rows, x);
        w.load(w.k, w.k_offset, token + step, k_rows);
        w.softmax(p, token, x, shared.weights[group], shared.factors[group]);
        w.outputs(v_rows, shared.weights[group]);
        w.load(w.v, w.v_offset, token + step, v_rows);
        w.look_up(p, token + 2 * step);
    }

    /* The sums of a row lie spread over the lanes of its tokens. */
#pragma unroll
    for (int i = 0; i < S::LANE_VALUES; i++)
#pragma unroll
        for (int other = S::LANES / S::TOKENS; other < S::LANES; other *= 2)
            w.sum[i] += __shfl_xor_sync(EKV_FULL_WARP, w.sum[i], other);
    __syncthreads(); /* weights and results share their memory */
#pragma unroll
    for (int i = 0; i < S::LANE_VALUES; i++)
        shared.ml[group][(w.first_value() + i) % G] = make_float2(w.largest[i], w.sum[i]);
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
        for (int i = 0; i < 8; i += 4)
            *reinterpret_cast<float4 *>(&shared.o[group][g][w.lane * 8 + i]) =
                make_float4(w.o[g][i], w.o[g][i + 1], w.o[g][i + 2], w.o[g][i + 3]);
    __syncthreads();
}

/* Merges the thread groups' results, in their order, and writes them. */
template <int D, int G, int BF16>
EKV_DEVICE void write_tile(const ekv_kernel_params &p, const ekv_tile &t, int32_t rows, int sets,
                           const shared_memory<D, G> &shared)
{
    typedef shape<D, G> S;
    const int members = S::GROUPS / sets;
    for (int item = (int)threadIdx.x; item < rows * (D / 8); item += EKV_SIMT_THREADS) {
        const int row = item / (D / 8), d = item % (D / 8) * 8, g = row % G, first = row / G * members;
        float top = -INFINITY, total = 0, out[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
        for (int m = first; m < first + members; m++)
            top = fmaxf(top, shared.ml[m][g].x);
        for (int m = first; m < first + members; m++) {
            const float2 ml = shared.ml[m][g];
            if (ml.y == 0)
                continue;
            const float weight = ekv_exp2((ml.x - top) * p.scale_log2);
            total += weight * ml.y;
#pragma unroll
            for (int i = 0; i < 8; i++)
                out[i] += weight * shared.o[m][g][d + i];
        }
        ekv_write_row<BF16>(p, t, 0, row, d, out, top, total);
    }
    __syncthreads();
}

template <int D, int G, int BF16>
EKV_DEVICE void decode(const ekv_kernel_params &p)
{
    typedef shape<D, G> S;
    __shared__ shared_memory<D, G> shared;
    ekv_launch_dependents();
    const int32_t rows = ekv_rows(p);
    const int sets = rows > G ? 2 : 1; /* of G rows, each with half the thread groups */
    const int group = (int)threadIdx.x / S::LANES, members = S::GROUPS / sets;
    int32_t index = (int32_t)blockIdx.x, end, num_tiles = 0;
    if (p.dispatch == EKV_DISPATCH_RANGE) {
        index = __ldg(&p.ctas[blockIdx.x].tile_begin);
        end = __ldg(&p.ctas[blockIdx.x].tile_end);
    } else {
        num_tiles = __ldg(&p.header->num_tiles);
        end = index < num_tiles ? index + 1 : index;
    }
    while (index < end) {
        const int64_t start_ns = p.stamps ? ekv_global_ns() : 0;
        const ekv_tile t = ekv_load_tile(p.tiles, index);
        tile<D, G, BF16>(p, t, group / members * G, rows, group % members, members, shared);
        write_tile<D, G, BF16>(p, t, rows, sets, shared);
        if (p.stamps && threadIdx.x == 0)
            ekv_stamp_write(p.stamps, index, index, 1, start_ns);
        if (p.dispatch != EKV_DISPATCH_QUEUE) {
            index++;
            continue;
        }
        if (threadIdx.x == 0) {
            const uint32_t before = atomicAdd(p.queue, 1u);
            shared.tile = (int32_t)ekv_min((int64_t)before + gridDim.x, num_tiles);
            if (before == (uint32_t)num_tiles - 1) /* every CTA has asked in vain */
                *p.queue = 0;
        }
        __syncthreads();
        index = shared.tile;
        end = num_tiles;
        __syncthreads();
    }
}

} // namespace simt

#define EKV_SIMT_KERNEL(name, bf16, d, g)                             \
    extern "C" __global__ void __launch_bounds__(EKV_SIMT_THREADS, 2) \
        name(const __grid_constant__ ekv_kernel_params p)             \
    {                                                                 \
        simt::decode<d, g, bf16>(p);                                  \
    }

#endif
