/* SPDX-License-Identifier: Apache-2.0
 * The two products of a warp of the mma kernels, with the online softmax between them.
 *
 *   scores  S^T[token][row] = K[token][d] Q^T[d][row]     mma.m16n8k16: 16 tokens x 8 rows, no padding of M
 *   output  O^T[d][row]    += V^T[d][token] P^T[token][row]
 *
 * S^T leaves the first product with a column (row of Q) in the threads that also hold that column of O^T, so
 * the online softmax rescales without any exchange; P^T becomes the B operand by transposing 8x8 matrices. */
#ifndef EVENKV_CUDA_KERNELS_MMA_PRODUCT_CUH
#define EVENKV_CUDA_KERNELS_MMA_PRODUCT_CUH

#include "cuda/kernels/mma_feed.cuh"

namespace mma
{

/* ---- Instructions --------------------------------------------------------------------------------------- */

EKV_DEVICE void load_matrices(uint32_t (&a)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

EKV_DEVICE void load_matrices_transposed(uint32_t (&a)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

EKV_DEVICE uint32_t transpose_matrix(uint32_t x)
{
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

template <int BF16>
EKV_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Four registers of a product: element i lies in column i % 2 of the lane's two. */
EKV_DEVICE void add_fragment(float (&sum)[4], const float (&weight)[2], const float4 &o)
{
    sum[0] = fmaf(weight[0], o.x, sum[0]);
    sum[1] = fmaf(weight[1], o.y, sum[1]);
    sum[2] = fmaf(weight[0], o.z, sum[2]);
    sum[3] = fmaf(weight[1], o.w, sum[3]);
}

/* ---- A warp's result so far ------------------------------------------------------------------------------- */

/* Below any score times scale_log2, and finite, so that no difference is a NaN. */
#define LOWEST (-1e30f)

template <int D, int N, int BF16>
struct product {
    typedef shape<D, N> S;
    /* What exp2 may reach before sums are rescaled: 2^8 is far from the end of fp16, and a new largest score is rare
     * after a request's first blocks. */
    static constexpr float SLACK = 8.0f;

    uint32_t q[S::ROW_TILES][S::D_TILES][2]; /* B operand: row lane/4, d (lane%4)*2 + {0,1} and 8 more */
    float o[S::ROW_TILES][S::D_TILES][4];    /* d lane/4 and lane/4 + 8; rows (lane%4)*2 + {0,1} */
    /* Of the row, about the largest score so far times scale_log2, to which o and sum are relative; the same in all
     * lanes of a column. */
    float largest[S::ROW_TILES][2];
    float sum[S::ROW_TILES][2]; /* of this lane's tokens */

    EKV_MEMBER void load_q(const ekv_kernel_params &p, const place &w)
    {
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++)
#pragma unroll
            for (int d = 0; d < S::D_TILES; d += 2) {
                uint32_t b[4];
                load_matrices(b, swizzled<D>(w.q, r * 8 + (w.lane & 7), d * 2 + (w.lane >> 3)));
                q[r][d][0] = b[0] ^ p.q_signs, q[r][d][1] = b[1] ^ p.q_signs;
                q[r][d + 1][0] = b[2] ^ p.q_signs, q[r][d + 1][1] = b[3] ^ p.q_signs;
            }
    }

    /* So that its registers are free until the next tile's. */
    EKV_MEMBER void forget_q()
    {
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++)
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++)
                q[r][d][0] = q[r][d][1] = 0;
    }

    EKV_MEMBER void clear()
    {
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++) {
            largest[r][0] = largest[r][1] = LOWEST;
            sum[r][0] = sum[r][1] = 0;
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    o[r][d][i] = 0;
        }
    }

    /* s[r]: scores of tokens lane/4 and lane/4 + 8, rows (lane%4)*2 + {0,1}. */
    EKV_MEMBER void scores(const place &w, uint32_t k_rows, float (&s)[S::ROW_TILES][4]) const
    {
        float odd[S::ROW_TILES][4]; /* a second chain of products halves the latency */
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[r][i] = odd[r][i] = 0;
        const uint32_t first = swizzled<D>(k_rows, w.lane & 15, w.lane >> 4);
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            uint32_t a[4];
            load_matrices(a, first ^ (uint32_t)(d * 32)); /* a d tile is two chunks */
#pragma unroll
            for (int r = 0; r < S::ROW_TILES; r++)
                multiply<BF16>(d % 2 ? odd[r] : s[r], a, q[r][d][0], q[r][d][1]);
        }
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[r][i] += odd[r][i];
    }

    /* Raises `largest` to the largest of these scores and rescales what was summed. */
    EKV_MEMBER void raise(const ekv_kernel_params &p, int r, const float (&s)[4])
    {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float top = fmaxf(s[c], s[c + 2]);
#pragma unroll
            for (int other = 4; other < 32; other *= 2)
                top = fmaxf(top, __shfl_xor_sync(EKV_FULL_WARP, top, other));
            const float raised = fmaxf(largest[r][c], top * p.scale_log2), factor = ekv_exp2(largest[r][c] - raised);
            largest[r][c] = raised;
            sum[r][c] *= factor;
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++) {
                o[r][d][c] *= factor;
                o[r][d][c + 2] *= factor;
            }
        }
    }

    /* 16 tokens; those from `valid` on do not count. */
    EKV_MEMBER void tokens16(const ekv_kernel_params &p, const place &w, uint32_t k_rows, uint32_t v_rows,
                             int32_t valid)
    {
        float s[S::ROW_TILES][4];
        scores(w, k_rows, s);
        uint32_t weights[S::ROW_TILES][2];
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++) {
            bool above = false;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (w.lane / 4 + i / 2 * 8 >= valid)
                    s[r][i] = -INFINITY;
                above |= fmaf(s[r][i], p.scale_log2, -largest[r][i % 2]) > SLACK;
            }
            if (__any_sync(EKV_FULL_WARP, above))
                raise(p, r, s[r]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[r][i] = ekv_exp2(fmaf(s[r][i], p.scale_log2, -largest[r][i % 2]));
                sum[r][i % 2] += s[r][i];
            }
            weights[r][0] = transpose_matrix(ekv_pack2<BF16>(s[r][0], s[r][1]));
            weights[r][1] = transpose_matrix(ekv_pack2<BF16>(s[r][2], s[r][3]));
        }
        const uint32_t first = swizzled<D>(v_rows, (w.lane & 7) + ((w.lane >> 4) << 3), (w.lane >> 3) & 1);
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            uint32_t a[4];
            load_matrices_transposed(a, first ^ (uint32_t)(d * 32));
#pragma unroll
            for (int r = 0; r < S::ROW_TILES; r++)
                multiply<BF16>(o[r][d], a, weights[r][0], weights[r][1]);
        }
    }

    EKV_MEMBER void block(const ekv_kernel_params &p, const place &w, uint32_t stage, int32_t valid)
    {
#pragma unroll
        for (int i = 0; i < S::TOKENS / 16; i++)
            if (i == 0 || i * 16 < valid)
                tokens16(p, w, stage + i * 16 * D * 2, stage + S::K_BYTES + i * 16 * D * 2, valid - i * 16);
    }
};

} // namespace mma

#endif
