/* SPDX-License-Identifier: Apache-2.0
 * Decode on tensor cores with packed GQA.
 *
 * One warp works on one KV head of a tile, alone, with a ring of stages of its own: no barrier among warps in
 * the loop.  A CTA is tile_heads x warps_per_head warps: either one warp a head, so that the CTA reads whole
 * pages, or several warps a head, which take the head's blocks in turn and merge at the tile's end.
 *
 *   scores  S^T[token][row] = K[token][d] Q^T[d][row]     mma.m16n8k16: 16 tokens x 8 rows, no padding of M
 *   output  O^T[d][row]    += V^T[d][token] P^T[token][row]
 *
 * S^T leaves the first product with a column (row of Q) in the threads that also hold that column of O^T, so
 * the online softmax rescales without any exchange; P^T becomes the B operand by transposing 8x8 matrices.
 *
 * Three iterators walk the CTA's tiles: the scout, which fetches tile records and page-table rows in steps that
 * never wait for memory; the producer, which keeps every free stage of the ring in flight across tile borders;
 * and the consumer, stages later. */
#ifndef EVENKV_CUDA_KERNELS_MMA_CUH
#define EVENKV_CUDA_KERNELS_MMA_CUH

#include "cuda/kernels/mma_source.cuh"

namespace mma
{

/* ---- Tensor-core instructions -------------------------------------------------------------------------- */

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

/* ---- Consumer ------------------------------------------------------------------------------------------ */

template <int D, int N, int BF16>
struct consumer {
    typedef shape<D, N> S;
    uint32_t q[S::ROW_TILES][S::D_TILES][2]; /* B operand: row lane/4, d (lane%4)*2 + {0,1} and 8 more */
    float o[S::ROW_TILES][S::D_TILES][4];    /* d lane/4 and lane/4 + 8; rows (lane%4)*2 + {0,1} */
    float largest[S::ROW_TILES][2];          /* score of the row so far, the same in all lanes of a column */
    float sum[S::ROW_TILES][2];              /* of this lane's tokens */

    /* The lane's pieces of a tile's Q; rows past the group are 0. */
    static EKV_MEMBER void load_q(const ekv_kernel_params &p, const place &w, const tile_entry &tile,
                                  uint4 (&pieces)[S::Q_COPIES])
    {
        const int32_t head = (int32_t)(tile.heads & 0xFFFF) + w.head, rows = p.query_heads_tiled ? 1 : p.group;
        const uint16_t *request = reinterpret_cast<const uint16_t *>(p.q) + tile.request * p.q_stride_request;
#pragma unroll
        for (int i = 0; i < S::Q_COPIES; i++) {
            const int piece = i * 32 + w.lane, row = piece / S::CHUNKS, chunk = piece % S::CHUNKS;
            const uint16_t *source = request + ekv_query_head(p, head, row) * p.q_stride_head + chunk * 8;
            pieces[i] = ekv_load_q8(p, source, row < rows);
        }
    }

    /* Turns them into operands by way of shared memory. */
    EKV_MEMBER void take_q(const place &w, const uint4 (&pieces)[S::Q_COPIES])
    {
#pragma unroll
        for (int i = 0; i < S::Q_COPIES; i++) {
            const int piece = i * 32 + w.lane;
            asm volatile(
                "st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(swizzled<D>(w.q, piece / S::CHUNKS, piece % S::CHUNKS)),
                "r"(pieces[i].x), "r"(pieces[i].y), "r"(pieces[i].z), "r"(pieces[i].w)
                : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++)
#pragma unroll
            for (int d = 0; d < S::D_TILES; d += 2) {
                uint32_t b[4];
                load_matrices(b, swizzled<D>(w.q, r * 8 + (w.lane & 7), d * 2 + (w.lane >> 3)));
                q[r][d][0] = b[0], q[r][d][1] = b[1], q[r][d + 1][0] = b[2], q[r][d + 1][1] = b[3];
            }
        __syncwarp();
    }

    EKV_MEMBER void clear()
    {
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++) {
            largest[r][0] = largest[r][1] = -INFINITY;
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
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            uint32_t a[4];
            load_matrices(a, swizzled<D>(k_rows, w.lane & 15, 2 * d + (w.lane >> 4)));
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

    /* Raises `largest` to the block's and rescales what was summed. */
    EKV_MEMBER void raise(const ekv_kernel_params &p, int r, const float (&s)[4])
    {
        float top[2] = { fmaxf(s[0], s[2]), fmaxf(s[1], s[3]) };
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int other = 4; other < 32; other *= 2)
                top[c] = fmaxf(top[c], __shfl_xor_sync(EKV_FULL_WARP, top[c], other));
        const bool higher = top[0] > largest[r][0] || top[1] > largest[r][1];
        if (!__any_sync(EKV_FULL_WARP, higher))
            return;
        float factor[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float raised = fmaxf(largest[r][c], top[c]);
            factor[c] = raised > largest[r][c] ? ekv_exp2((largest[r][c] - raised) * p.scale_log2) : 1.0f;
            largest[r][c] = raised;
            sum[r][c] *= factor[c];
        }
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                o[r][d][i] *= factor[i % 2];
    }

    /* 16 tokens from `token` on; those at or past `end` do not count. */
    EKV_MEMBER void tokens16(const ekv_kernel_params &p, const place &w, uint32_t k_rows, uint32_t v_rows,
                             int32_t token, int32_t end)
    {
        float s[S::ROW_TILES][4];
        scores(w, k_rows, s);
        uint32_t weights[S::ROW_TILES][2];
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++) {
            if (token + 16 > end) {
                if (token + w.lane / 4 >= end)
                    s[r][0] = s[r][1] = -INFINITY;
                if (token + w.lane / 4 + 8 >= end)
                    s[r][2] = s[r][3] = -INFINITY;
            }
            raise(p, r, s[r]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[r][i] = ekv_exp2(fmaf(s[r][i], p.scale_log2, -largest[r][i % 2] * p.scale_log2));
                sum[r][i % 2] += s[r][i];
            }
            weights[r][0] = transpose_matrix(ekv_pack2<BF16>(s[r][0], s[r][1]));
            weights[r][1] = transpose_matrix(ekv_pack2<BF16>(s[r][2], s[r][3]));
        }
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            uint32_t a[4];
            load_matrices_transposed(
                a, swizzled<D>(v_rows, (w.lane & 7) + ((w.lane >> 4) << 3), 2 * d + ((w.lane >> 3) & 1)));
#pragma unroll
            for (int r = 0; r < S::ROW_TILES; r++)
                multiply<BF16>(o[r][d], a, weights[r][0], weights[r][1]);
        }
    }

    EKV_MEMBER void block(const ekv_kernel_params &p, const place &w, uint32_t stage, int32_t token, int32_t end)
    {
#pragma unroll
        for (int i = 0; i < S::TOKENS / 16; i++)
            if (i == 0 || token + i * 16 < end)
                tokens16(p, w, stage + i * 16 * D * 2, stage + S::K_BYTES + i * 16 * D * 2, token + i * 16, end);
    }
};

/* ---- Results ------------------------------------------------------------------------------------------- */

/* What the warps of a head hand each other: in the stage that each has just emptied, O^T turned to
 * [row][d] fp32; beside it the row's largest score and sum, and where the stage is. */
template <int D, int N>
struct exchange {
    unsigned char *rings; /* of warp 0 */
    uint32_t ring_bytes;  /* of a warp */
    float2 *rows;         /* [warps][N]: largest, sum */
    int32_t *stage;       /* [warps] */

    EKV_MEMBER float *result(int warp) const
    {
        return reinterpret_cast<float *>(rings + (size_t)warp * ring_bytes +
                                         (size_t)stage[warp] * shape<D, N>::STAGE_BYTES);
    }
};

/* Index of (row, d) in a result: d is permuted by row pairs so that the writes below meet no bank twice. */
template <int D>
EKV_DEVICE int result_index(int row, int d)
{
    return row * D + (d ^ (((row >> 1) & 3) << 3));
}

EKV_DEVICE void head_barrier(const place &w)
{
    if (w.members == 1)
        __syncwarp();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(1 + w.head), "r"(w.members * 32) : "memory");
}

template <int D, int N, int BF16>
EKV_DEVICE void hand_over(const place &w, const exchange<D, N> &x, consumer<D, N, BF16> &c, int32_t stage, bool any)
{
    typedef shape<D, N> S;
    if (w.lane == 0)
        x.stage[w.warp] = stage;
    __syncwarp();
    float *result = x.result(w.warp);
#pragma unroll
    for (int r = 0; r < S::ROW_TILES; r++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int other = 4; other < 32; other *= 2)
                c.sum[r][i] += __shfl_xor_sync(EKV_FULL_WARP, c.sum[r][i], other);
            if (w.lane < 4)
                x.rows[w.warp * N + r * 8 + w.lane * 2 + i] = make_float2(c.largest[r][i], c.sum[r][i]);
        }
        if (any)
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    result[result_index<D>(r * 8 + (w.lane % 4) * 2 + i % 2, d * 16 + w.lane / 4 + i / 2 * 8)] =
                        c.o[r][d][i];
    }
}

/* Merges the results of the head's warps, in their order, and writes the tile's output or partial result. */
template <int D, int N, int BF16>
EKV_DEVICE void write_tile(const ekv_kernel_params &p, const place &w, const exchange<D, N> &x, const tile_entry &tile)
{
    const int first_warp = w.head * w.members, rows = p.query_heads_tiled ? 1 : p.group;
    ekv_tile written; /* what ekv_write_row reads of it */
    written.request = tile.request;
    written.slot = tile.slot;
    written.head = (uint16_t)tile.heads;
    written.flags = tile.flags;
    for (int item = w.member * 32 + w.lane; item < rows * (D / 8); item += w.members * 32) {
        const int row = item / (D / 8), d = item % (D / 8) * 8;
        float top = -INFINITY, total = 0, out[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
        for (int m = 0; m < w.members; m++)
            top = fmaxf(top, x.rows[(first_warp + m) * N + row].x);
        for (int m = 0; m < w.members; m++) {
            const float2 part = x.rows[(first_warp + m) * N + row];
            if (part.y == 0)
                continue;
            const float weight = w.members == 1 ? 1.0f : ekv_exp2((part.x - top) * p.scale_log2);
            const float4 *from = reinterpret_cast<const float4 *>(x.result(first_warp + m) + result_index<D>(row, d));
            const float4 low = from[0], high = from[1];
            total += weight * part.y;
            out[0] += weight * low.x, out[1] += weight * low.y, out[2] += weight * low.z, out[3] += weight * low.w;
            out[4] += weight * high.x, out[5] += weight * high.y, out[6] += weight * high.z, out[7] += weight * high.w;
        }
        ekv_write_row<BF16>(p, written, w.head, row, d, out, top, total);
    }
}

/* ---- The kernel ---------------------------------------------------------------------------------------- */

template <int D, int N, int BF16>
EKV_DEVICE void decode(const ekv_kernel_params &p)
{
    typedef shape<D, N> S;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warps = (int)(blockDim.x / 32);

    /* Shared memory, as ekv_mma_shared_bytes has it. */
    exchange<D, N> x;
    x.rings = shared;
    place w;
    x.ring_bytes = (uint32_t)(p.stages * S::STAGE_BYTES);
    unsigned char *q = shared + (size_t)warps * x.ring_bytes;
    w.queue_ring = reinterpret_cast<unsigned long long *>(q + (size_t)warps * N * D * 2);
    tile_entry *entries = reinterpret_cast<tile_entry *>(w.queue_ring + EKV_MMA_TILE_RING);
    x.rows = reinterpret_cast<float2 *>(entries + warps * EKV_MMA_TILE_RING);
    x.stage = reinterpret_cast<int32_t *>(x.rows + warps * N);

    w.lane = (int)(threadIdx.x % 32);
    w.warp = (int)(threadIdx.x / 32);
    w.members = p.warps_per_head;
    w.head = w.warp / w.members;
    w.member = w.warp % w.members;
    w.ring = ekv_shared_address(shared) + (uint32_t)w.warp * x.ring_bytes;
    w.q = ekv_shared_address(q) + (uint32_t)(w.warp * N * D * 2);
    w.entries = entries + w.warp * EKV_MMA_TILE_RING;

    ekv_launch_dependents();
    if (p.dispatch == EKV_DISPATCH_QUEUE) {
        if (threadIdx.x < EKV_MMA_TILE_RING)
            w.queue_ring[threadIdx.x] = ~0ull; /* no tile has that place */
        __syncthreads();
    }

    scout ahead;
    ahead.start(p);
    producer<D, N> source;
    source.start();
    consumer<D, N, BF16> sink;
    uint4 pieces[S::Q_COPIES]; /* of the next tile's Q */
    bool q_loaded = false, in_tile = false, any = false;
    const int32_t step = w.members * S::TOKENS;
    int32_t n = 0, token = 0, stamped = 0; /* tile of the sequence, its next block */
    int32_t consumed = 0, stage = 0;       /* stages done with, the one that is consumed next */
    int64_t start_ns = 0;
    tile_entry tile;

    /* One loop and one place for each thing: the code of a cold kernel comes from memory, too. */
    for (;;) {
        while (source.issue(p, w, ahead, n, consumed)) {
        }

        if (!in_tile) {
            if (n >= ahead.total)
                break;
            if (n >= ahead.known)
                continue;
            tile = w.entries[n % EKV_MMA_TILE_RING];
            if (p.stamps) {
                start_ns = ekv_global_ns();
                stamped = ahead.number(w, n);
            }
            if (!q_loaded)
                sink.load_q(p, w, tile, pieces);
            sink.take_q(w, pieces);
            sink.clear();
            token = tile.kv_begin + w.member * S::TOKENS;
            any = token < tile.kv_end;
            in_tile = true;
            q_loaded = false;
        }

        if (any) {
            if (source.issued == consumed)
                continue;                                            /* not even the tile's first block is on its way */
            if (S::PREFETCH_Q && !q_loaded && n + 1 < ahead.known) { /* the next tile's Q */
                sink.load_q(p, w, w.entries[(n + 1) % EKV_MMA_TILE_RING], pieces);
                q_loaded = true;
            }
            ekv_copy_wait(source.issued - consumed - 1);
            __syncwarp();
            sink.block(p, w, w.ring + (uint32_t)stage * S::STAGE_BYTES, token, tile.kv_end);
            __syncwarp();
            token += step;
            if (token < tile.kv_end) {
                consumed++;
                stage = stage + 1 == p.stages ? 0 : stage + 1;
                continue;
            }
        }

        /* The tile's result, by way of the stage that was emptied last. */
        hand_over<D, N, BF16>(w, x, sink, stage, any);
        head_barrier(w);
        write_tile<D, N, BF16>(p, w, x, tile);
        head_barrier(w);
        if (p.dispatch == EKV_DISPATCH_QUEUE)
            __syncthreads(); /* keeps the warps within the rings of tiles */
        if (p.stamps && threadIdx.x == 0)
            ekv_stamp_write(p.stamps, stamped, stamped, 1, start_ns);
        if (any) {
            consumed++;
            stage = stage + 1 == p.stages ? 0 : stage + 1;
        }
        in_tile = false;
        n++;
    }
}

} // namespace mma

#define EKV_MMA_KERNEL(name, bf16, d, n)                                    \
    extern "C" __global__ void __launch_bounds__(EKV_MMA_MAX_WARPS * 32, 1) \
        name(const __grid_constant__ ekv_kernel_params p)                   \
    {                                                                       \
        mma::decode<d, n, bf16>(p);                                         \
    }

#endif
