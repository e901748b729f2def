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
 * Two iterators walk the CTA's tiles: the producer, which keeps every free stage of the ring in flight across
 * tile borders, and the consumer, stages later. */
#ifndef EVENKV_CUDA_KERNELS_MMA_CUH
#define EVENKV_CUDA_KERNELS_MMA_CUH

#include "cuda/kernels/common.cuh"
#include "cuda/kernels/mma_shape.h"

namespace mma
{

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
enum { STAGES = 2 };
#else
enum { STAGES = 3 };
#endif
enum { END = -1, UNKNOWN = -2 };

/* D: head_dim.  N: rows of Q, 8 or 16. */
template <int D, int N> struct shape {
    enum {
        TOKENS = D >= 128 ? 16 : 32, /* ekv_mma_stage_tokens */
        CHUNKS = D / 8,              /* 16-byte pieces of a row */
        K_BYTES = TOKENS * D * 2,
        STAGE_BYTES = 2 * K_BYTES,
        COPIES = TOKENS * CHUNKS / 32, /* 16-byte copies of K that a lane issues for a stage */
        LANE_ROWS = 32 / CHUNKS,       /* rows that a warp copies at a time; 1 at D = 256 */
        ROW_TILES = N / 8,
        D_TILES = D / 16
    };
};

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

template <int BF16> EKV_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
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

/* Shared address of 16-byte chunk `chunk` of row `row`: chunks are permuted within a row so that eight rows at
 * one chunk lie in different banks. */
template <int D> EKV_DEVICE uint32_t swizzled(uint32_t base, int row, int chunk)
{
    return base + (uint32_t)(row * (D * 2) + ((chunk ^ (row & 7)) << 4));
}

/* ---- The warp's place in the CTA ----------------------------------------------------------------------- */

struct place {
    int lane;
    int warp;
    int head;   /* of the tile's heads */
    int member; /* among the warps of the head */
    int members;
    uint32_t ring; /* shared address of the warp's first stage */
    volatile unsigned long long *queue_ring;
};

/* The sequence of the CTA's tiles: the n-th, END, or UNKNOWN where another warp has still to claim it. */
struct tile_sequence {
    int32_t first;
    int32_t count; /* unknown under queue dispatch */

    EKV_MEMBER tile_sequence(const ekv_kernel_params &p)
    {
        first = (int32_t)blockIdx.x;
        count = first < __ldg(&p.header->num_tiles);
        if (p.dispatch == EKV_DISPATCH_RANGE) {
            bool launched = first < __ldg(&p.header->num_ctas);
            first = launched ? __ldg(p.cta_begin + blockIdx.x) : 0;
            count = launched ? __ldg(p.cta_begin + blockIdx.x + 1) - first : 0;
        }
    }

    EKV_MEMBER int32_t at(const ekv_kernel_params &p, const place &w, int32_t n) const
    {
        if (n < count)
            return first + n;
        if (p.dispatch != EKV_DISPATCH_QUEUE || count == 0)
            return END;
        unsigned long long entry = w.queue_ring[n % EKV_MMA_QUEUE_RING];
        return (int32_t)(entry >> 32) == n ? (int32_t)entry : UNKNOWN;
    }

    /* Warp 0 only: takes the n-th tile from the queue for the whole CTA. */
    EKV_MEMBER int32_t claim(const ekv_kernel_params &p, const place &w, int32_t n) const
    {
        int32_t tile = 0;
        if (w.lane == 0) {
            uint32_t taken = atomicAdd(p.queue, 1u) + gridDim.x;
            tile = taken < (uint32_t)__ldg(&p.header->num_tiles) ? (int32_t)taken : END;
            w.queue_ring[n % EKV_MMA_QUEUE_RING] = (unsigned long long)(uint32_t)n << 32 | (uint32_t)tile;
        }
        return __shfl_sync(EKV_FULL_WARP, tile, 0);
    }
};

/* ---- Producer ------------------------------------------------------------------------------------------ */

template <int D, int N> struct producer {
    typedef shape<D, N> S;
    const uint16_t *k, *v; /* of the tile's head */
    const int32_t *pages;  /* of the tile's request */
    int32_t token, end;    /* next block, end of the tile */
    int32_t page, in_page; /* of the lane's token of that block (aligned: of its group of 16) */
    int32_t next;          /* in the sequence: the tile after this one */
    int32_t issued;        /* stages, all told */
    bool finished;

    EKV_MEMBER void start()
    {
        token = end = next = issued = 0;
        page = in_page = 0;
        finished = false;
        k = v = 0;
        pages = 0;
    }

    EKV_MEMBER void look_up(const ekv_kernel_params &p, const place &w)
    {
        int32_t mine = p.pages_aligned ? token + w.lane * 16 : token + w.lane;
        if (mine < end && w.lane < S::TOKENS) {
            page = __ldg(pages + mine / p.page_size);
            in_page = mine % p.page_size;
        } else {
            page = in_page = 0;
        }
    }

    /* Moves to the next tile in which this warp has a block.  False: none is known yet, or none is left. */
    EKV_MEMBER bool advance(const ekv_kernel_params &p, const place &w, const tile_sequence &tiles,
                            int32_t consumed_tiles)
    {
        while (!finished) {
            int32_t index = tiles.at(p, w, next);
            if (index == UNKNOWN && w.warp == 0 && next < consumed_tiles + EKV_MMA_QUEUE_RING / 2)
                index = tiles.claim(p, w, next);
            if (index == UNKNOWN)
                return false;
            if (index == END) {
                finished = true;
                return false;
            }
            next++;
            ekv_tile tile = ekv_load_tile(p.tiles, index);
            token = tile.kv_begin + w.member * S::TOKENS;
            end = tile.kv_end;
            if (token >= end)
                continue;
            int32_t kv_head = ekv_kv_head(p, tile.head + w.head);
            k = reinterpret_cast<const uint16_t *>(p.k) + kv_head * p.k_stride_head;
            v = reinterpret_cast<const uint16_t *>(p.v) + kv_head * p.v_stride_head;
            pages = ekv_pages(p, tile.request);
            look_up(p, w);
            return true;
        }
        return false;
    }

    EKV_MEMBER void copy_block(const ekv_kernel_params &p, const place &w)
    {
        const int chunk = w.lane % S::CHUNKS, lane_row = w.lane / S::CHUNKS;
        const uint32_t k_stage = w.ring + (uint32_t)(issued % STAGES) * S::STAGE_BYTES;
        const uint32_t v_stage = k_stage + S::K_BYTES;
#pragma unroll
        for (int i = 0; i < S::COPIES; i++) {
            const int row = lane_row + i * S::LANE_ROWS;
            const int source = p.pages_aligned ? row / 16 : row;
            const int64_t row_page = __shfl_sync(EKV_FULL_WARP, page, source);
            int64_t row_token = __shfl_sync(EKV_FULL_WARP, in_page, source);
            if (p.pages_aligned)
                row_token += row % 16;
            const bool valid = token + row < end;
            const uint16_t *k_row = k + row_page * p.k_stride_page + row_token * p.k_stride_token + chunk * 8;
            const uint16_t *v_row = v + row_page * p.v_stride_page + row_token * p.v_stride_token + chunk * 8;
            ekv_copy16(swizzled<D>(k_stage, row, chunk), valid ? k_row : k, valid);
            ekv_copy16(swizzled<D>(v_stage, row, chunk), valid ? v_row : v, valid);
        }
        ekv_copy_commit();
    }

    /* Starts the copies of one block.  False: no block is known yet, or none is left. */
    EKV_MEMBER bool issue(const ekv_kernel_params &p, const place &w, const tile_sequence &tiles,
                          int32_t consumed_tiles)
    {
        if (token >= end && !advance(p, w, tiles, consumed_tiles))
            return false;
        copy_block(p, w);
        issued++;
        token += w.members * S::TOKENS;
        if (token < end)
            look_up(p, w);
        else
            advance(p, w, tiles, consumed_tiles);
        return true;
    }
};

/* ---- Consumer ------------------------------------------------------------------------------------------ */

template <int D, int N, int BF16> struct consumer {
    typedef shape<D, N> S;
    uint32_t q[S::ROW_TILES][S::D_TILES][2]; /* B operand: row lane/4, d (lane%4)*2 + {0,1} and 8 more */
    float o[S::ROW_TILES][S::D_TILES][4];    /* d lane/4 and lane/4 + 8; rows (lane%4)*2 + {0,1} */
    float largest[S::ROW_TILES][2];          /* score of the row so far, the same in all lanes of a column */
    float sum[S::ROW_TILES][2];              /* of this lane's tokens */

    EKV_MEMBER void load_q(const ekv_kernel_params &p, const place &w, int32_t request, int32_t head, int32_t rows)
    {
#pragma unroll
        for (int r = 0; r < S::ROW_TILES; r++) {
            const int row = r * 8 + w.lane / 4;
            const uint16_t *source = reinterpret_cast<const uint16_t *>(p.q) + request * p.q_stride_request +
                                     ekv_query_head(p, head, row) * p.q_stride_head + (w.lane % 4) * 2;
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    q[r][d][half] =
                        row < rows ? __ldg(reinterpret_cast<const unsigned *>(source + d * 16 + half * 8)) : 0;
        }
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
template <int D, int N> struct exchange {
    unsigned char *rings; /* of warp 0 */
    float2 *rows;         /* [warps][N]: largest, sum */
    int32_t *stage;       /* [warps] */

    EKV_MEMBER float *result(int warp) const
    {
        return reinterpret_cast<float *>(rings + (size_t)warp * STAGES * shape<D, N>::STAGE_BYTES +
                                         (size_t)stage[warp] * shape<D, N>::STAGE_BYTES);
    }
};

/* Index of (row, d) in a result: d is permuted by row pairs so that the writes below meet no bank twice. */
template <int D> EKV_DEVICE int result_index(int row, int d)
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
EKV_DEVICE void write_tile(const ekv_kernel_params &p, const place &w, const exchange<D, N> &x, const ekv_tile &tile,
                           int32_t rows)
{
    const int first_warp = w.head * w.members;
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
        ekv_write_row<BF16>(p, tile, w.head, row, d, out, top, total);
    }
}

/* ---- The kernel ---------------------------------------------------------------------------------------- */

template <int D, int N, int BF16> EKV_DEVICE void decode(const ekv_kernel_params &p)
{
    typedef shape<D, N> S;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warps = (int)(blockDim.x / 32);

    /* Shared memory, as ekv_mma_shared_bytes has it. */
    exchange<D, N> x;
    x.rings = shared;
    place w;
    w.queue_ring = reinterpret_cast<volatile unsigned long long *>(shared + (size_t)warps * STAGES * S::STAGE_BYTES);
    x.rows = reinterpret_cast<float2 *>(const_cast<unsigned long long *>(w.queue_ring) + EKV_MMA_QUEUE_RING);
    x.stage = reinterpret_cast<int32_t *>(x.rows + warps * N);

    w.lane = (int)(threadIdx.x % 32);
    w.warp = (int)(threadIdx.x / 32);
    w.members = p.warps_per_head;
    w.head = w.warp / w.members;
    w.member = w.warp % w.members;
    w.ring = ekv_shared_address(shared) + (uint32_t)(w.warp * STAGES * S::STAGE_BYTES);

    if (p.dispatch == EKV_DISPATCH_QUEUE) {
        if (threadIdx.x < EKV_MMA_QUEUE_RING)
            w.queue_ring[threadIdx.x] = ~0ull; /* no tile has that place */
        __syncthreads();
    }

    const tile_sequence tiles(p);
    producer<D, N> source;
    source.start();
    consumer<D, N, BF16> sink;
    int32_t consumed = 0; /* stages */
    while (source.issued < STAGES && source.issue(p, w, tiles, 0)) {
    }

    for (int32_t n = 0;; n++) {
        /* The tile: warp 0 claims it while it tops up its ring; the others wait for that. */
        int32_t index = tiles.at(p, w, n);
        while (index == UNKNOWN) {
            if (w.warp == 0)
                source.advance(p, w, tiles, n);
            index = tiles.at(p, w, n);
        }
        if (index == END)
            break;
        const int64_t start_ns = p.stamps ? ekv_global_ns() : 0;
        const ekv_tile tile = ekv_load_tile(p.tiles, index);
        const int32_t rows = p.query_heads_tiled ? 1 : p.group;
        sink.load_q(p, w, tile.request, tile.head + w.head, rows);
        sink.clear();

        /* Its blocks. */
        const int32_t step = w.members * S::TOKENS;
        int32_t token = tile.kv_begin + w.member * S::TOKENS;
        const bool any = token < tile.kv_end;
        int32_t stage = 0;
        for (bool last = !any; !last; token += step) {
            while (source.issued == consumed)
                source.issue(p, w, tiles, n);
            ekv_copy_wait(source.issued - consumed - 1);
            __syncwarp();
            stage = consumed % STAGES;
            sink.block(p, w, w.ring + (uint32_t)stage * S::STAGE_BYTES, token, tile.kv_end);
            __syncwarp();
            last = token + step >= tile.kv_end;
            if (!last) {
                consumed++;
                while (source.issued - consumed < STAGES && source.issue(p, w, tiles, n)) {
                }
            }
        }

        /* Its result, by way of the stage that was emptied last. */
        hand_over<D, N, BF16>(w, x, sink, stage, any);
        head_barrier(w);
        write_tile<D, N, BF16>(p, w, x, tile, rows);
        head_barrier(w);
        if (any) {
            consumed++;
            while (source.issued - consumed < STAGES && source.issue(p, w, tiles, n + 1)) {
            }
        }
        if (p.dispatch == EKV_DISPATCH_QUEUE)
            __syncthreads(); /* keeps the warps within the ring of tile numbers */
        if (p.stamps && threadIdx.x == 0)
            ekv_stamp_write(p.stamps, index, index, 1, start_ns);
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
