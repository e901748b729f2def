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
template <int D, int N>
struct shape {
    enum {
        TOKENS = D >= 128 ? 16 : 32, /* ekv_mma_stage_tokens */
        CHUNKS = D / 8,              /* 16-byte pieces of a row */
        K_BYTES = TOKENS * D * 2,
        STAGE_BYTES = 2 * K_BYTES,
        COPIES = TOKENS * CHUNKS / 32, /* 16-byte copies of K that a lane issues for a stage */
        LANE_ROWS = 32 / CHUNKS,       /* rows that a warp copies at a time; 1 at D = 256 */
        ROW_TILES = N / 8,
        D_TILES = D / 16,
        Q_COPIES = N * CHUNKS / 32, /* 16-byte pieces of Q that a lane loads */
        PREFETCH_Q = D * N <= 1024  /* else the registers do not suffice */
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

/* Shared address of 16-byte chunk `chunk` of row `row`: chunks are permuted within a row so that eight rows at
 * one chunk lie in different banks. */
template <int D>
EKV_DEVICE uint32_t swizzled(uint32_t base, int row, int chunk)
{
    return base + (uint32_t)(row * (D * 2) + ((chunk ^ (row & 7)) << 4));
}

/* ---- The warp's place in the CTA ----------------------------------------------------------------------- */

/* What a warp keeps of a tile; 32 bytes in shared memory. */
struct __align__(16) tile_entry
{
    int32_t request;
    int32_t kv_begin;
    int32_t kv_end;
    int32_t slot;
    uint32_t heads; /* head | head_count << 16 */
    uint32_t flags;
    const int32_t *pages; /* of the request */
};

struct place {
    int lane;
    int warp;
    int head;                                /* of the tile's heads */
    int member;                              /* among the warps of the head */
    int members;                             /* warps a head */
    uint32_t ring;                           /* shared address of the warp's first stage */
    uint32_t q;                              /* shared address of the warp's Q, [N][D] */
    tile_entry *entries;                     /* [EKV_MMA_TILE_RING], the warp's own */
    volatile unsigned long long *queue_ring; /* [EKV_MMA_TILE_RING], the CTA's */
};

/* ---- Scout --------------------------------------------------------------------------------------------- */

/* The sequence of the CTA's tiles, and what is known of its next ones.  Each step takes three tiles on by one
 * load each: the third one's record is stored, the second one's page-table row is asked for, the first one's
 * record is asked for (under queue dispatch warp 0 claims its number one step earlier).  So a load has a whole
 * step, one block's time, to arrive. */
struct scout {
    int32_t first, count; /* tile numbers first .. first + count - 1, then the queue's */
    int32_t known;        /* records stored in w.entries */
    int32_t rows_asked;   /* page-table rows asked for */
    int32_t records_asked;
    int32_t claims;   /* warp 0, queue: numbers asked for */
    int32_t total;    /* tiles of the sequence; INT_MAX until its end is known */
    uint32_t claim;   /* the latest number asked for */
    int32_t tokens;   /* of the tiles whose records have arrived and that the producer has not begun */
    ekv_tile asked;   /* the latest record asked for */
    tile_entry found; /* the one whose page-table row was asked for */

    EKV_MEMBER void start(const ekv_kernel_params &p)
    {
        known = rows_asked = records_asked = tokens = 0;
        claim = 0;
        first = (int32_t)blockIdx.x;
        if (p.dispatch == EKV_DISPATCH_RANGE) { /* the first tile's record comes with the range */
            const ekv_cta_record *cta = p.ctas + blockIdx.x;
            asked = ekv_load_tile(&cta->first, 0);
            const int2 range = __ldg(reinterpret_cast<const int2 *>(cta));
            first = range.x;
            count = range.y - range.x;
            records_asked = count > 0;
        } else {
            count = first < __ldg(&p.header->num_tiles);
        }
        claims = count;
        total = p.dispatch == EKV_DISPATCH_QUEUE && count > 0 ? 0x7FFFFFFF : count;
    }

    /* Number of the n-th tile, END, or UNKNOWN where warp 0 has not published it yet. */
    EKV_MEMBER int32_t number(const place &w, int32_t n) const
    {
        if (n < count)
            return first + n;
        if (n >= total)
            return END;
        const unsigned long long entry = w.queue_ring[n % EKV_MMA_TILE_RING];
        return (int32_t)(entry >> 32) == n ? (int32_t)entry : UNKNOWN;
    }

    EKV_MEMBER void claim_step(const ekv_kernel_params &p, const place &w, bool wanted)
    {
        if (claims > records_asked && claims > count) { /* asked for at the last step: publish */
            const int32_t n = claims - 1;
            if (w.lane == 0)
                w.queue_ring[n % EKV_MMA_TILE_RING] =
                    (unsigned long long)(uint32_t)n << 32 |
                    (claim < (uint32_t)__ldg(&p.header->num_tiles) ? claim : (uint32_t)END);
            __syncwarp();
        } else if (wanted && claims < total) {
            if (w.lane == 0)
                claim = atomicAdd(p.queue, 1u) + gridDim.x;
            claims++;
        }
    }

    /* next: the tile that the producer begins next; left: tokens of the one that it is in.  A queue's tiles are
     * claimed when little else is left, so that they stay even; a range's records are fetched some tiles ahead. */
    EKV_MEMBER void step(const ekv_kernel_params &p, const place &w, int32_t next, int32_t left, int32_t little)
    {
        if (rows_asked > known) {
            if (w.lane == 0)
                w.entries[known % EKV_MMA_TILE_RING] = found;
            prefetch(p, w);
            known++;
            __syncwarp();
        }
        if (records_asked > rows_asked) {
            found.request = asked.request;
            found.kv_begin = asked.kv_begin;
            found.kv_end = asked.kv_end;
            found.slot = asked.slot;
            found.heads = asked.head | (uint32_t)asked.head_count << 16;
            found.flags = asked.flags;
            found.pages = ekv_pages(p, asked.request);
            tokens += asked.kv_end - asked.kv_begin;
            rows_asked++;
        }
        const bool queue = p.dispatch == EKV_DISPATCH_QUEUE;
        const bool wanted =
            queue ? rows_asked == records_asked && left + tokens <= little && records_asked < next + EKV_MMA_LOOK_AHEAD
                  : records_asked < next + EKV_MMA_LOOK_AHEAD;
        if (queue && w.warp == 0)
            claim_step(p, w, wanted);
        if (wanted) {
            const int32_t n = number(w, records_asked);
            if (n == END) {
                total = records_asked;
            } else if (n != UNKNOWN) {
                asked = ekv_load_tile(p.tiles, n);
                records_asked++;
            }
        }
    }

    /* Brings the tile's Q and the first entries of its page table near. */
    EKV_MEMBER void prefetch(const ekv_kernel_params &p, const place &w) const
    {
        const uint16_t *q = reinterpret_cast<const uint16_t *>(p.q) + found.request * p.q_stride_request;
        const int32_t rows = p.query_heads_tiled ? 1 : p.group, lines = p.head_dim / 64; /* of 128 bytes, a row */
        for (int32_t i = w.lane; i < rows * lines; i += 32)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(
                q + ekv_query_head(p, (int32_t)(found.heads & 0xFFFF) + w.head, i / lines) * p.q_stride_head +
                i % lines * 64));
        if (w.lane == 0 && found.kv_end > found.kv_begin)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(found.pages + found.kv_begin / p.page_size));
    }
};

/* ---- Producer ------------------------------------------------------------------------------------------ */

template <int D, int N>
struct producer {
    typedef shape<D, N> S;
    const uint16_t *k, *v; /* of the tile's head */
    const int32_t *pages;  /* of the tile's request */
    int32_t token, end;    /* next block, end of the tile */
    int32_t page, in_page; /* of the lane's token of that block (aligned: of its group of 16) */
    int32_t next;          /* in the sequence: the tile after this one */
    int32_t issued;        /* stages, all told */

    EKV_MEMBER void start()
    {
        token = end = next = issued = 0;
        page = in_page = 0;
        k = v = 0;
        pages = 0;
    }

    EKV_MEMBER void look_up(const ekv_kernel_params &p, const place &w)
    {
        const int32_t mine = p.pages_aligned ? token + w.lane * 16 : token + w.lane;
        if (mine < end && w.lane < S::TOKENS) {
            page = __ldg(pages + mine / p.page_size);
            in_page = mine % p.page_size;
        } else {
            page = in_page = 0;
        }
    }

    /* Moves to the next tile in which this warp has a block, if the scout knows one.  The warp's ring of tiles
     * holds those from the consumer's on. */
    EKV_MEMBER void advance(const ekv_kernel_params &p, const place &w, scout &ahead, int32_t consumed_tiles)
    {
        token = end;
        while (next < ahead.known && next < consumed_tiles + EKV_MMA_TILE_RING / 2) {
            const tile_entry tile = w.entries[next % EKV_MMA_TILE_RING];
            next++;
            ahead.tokens -= tile.kv_end - tile.kv_begin;
            if (tile.kv_begin + w.member * S::TOKENS >= tile.kv_end)
                continue;
            token = tile.kv_begin + w.member * S::TOKENS;
            end = tile.kv_end;
            const int32_t kv_head = ekv_kv_head(p, (int32_t)(tile.heads & 0xFFFF) + w.head);
            k = reinterpret_cast<const uint16_t *>(p.k) + kv_head * p.k_stride_head;
            v = reinterpret_cast<const uint16_t *>(p.v) + kv_head * p.v_stride_head;
            pages = tile.pages;
            return;
        }
    }

    /* 16 bytes of K and V for each of the lane's rows. */
    EKV_MEMBER void copy_rows(const place &w, int i, const uint16_t *k_row, const uint16_t *v_row) const
    {
        const int chunk = w.lane % S::CHUNKS, row = w.lane / S::CHUNKS + i * S::LANE_ROWS;
        const uint32_t k_stage = w.ring + (uint32_t)(issued % STAGES) * S::STAGE_BYTES;
        const bool valid = token + row < end;
        ekv_copy16(swizzled<D>(k_stage, row, chunk), valid ? k_row : k, valid);
        ekv_copy16(swizzled<D>(k_stage + S::K_BYTES, row, chunk), valid ? v_row : v, valid);
    }

    EKV_MEMBER void copy_block(const ekv_kernel_params &p, const place &w) const
    {
        const int element = w.lane % S::CHUNKS * 8, lane_row = w.lane / S::CHUNKS;
        if (p.pages_aligned) {
#pragma unroll
            for (int group = 0; group < S::TOKENS / 16; group++) {
                const int64_t group_page = __shfl_sync(EKV_FULL_WARP, page, group);
                const int64_t row0 = __shfl_sync(EKV_FULL_WARP, in_page, group) + lane_row;
                const uint16_t *k_row = k + group_page * p.k_stride_page + row0 * p.k_stride_token + element;
                const uint16_t *v_row = v + group_page * p.v_stride_page + row0 * p.v_stride_token + element;
                const int64_t k_step = S::LANE_ROWS * p.k_stride_token, v_step = S::LANE_ROWS * p.v_stride_token;
#pragma unroll
                for (int i = 0; i < 16 / S::LANE_ROWS; i++)
                    copy_rows(w, group * (16 / S::LANE_ROWS) + i, k_row + i * k_step, v_row + i * v_step);
            }
        } else {
#pragma unroll 2
            for (int i = 0; i < S::COPIES; i++) {
                const int64_t row_page = __shfl_sync(EKV_FULL_WARP, page, lane_row + i * S::LANE_ROWS);
                const int64_t row_token = __shfl_sync(EKV_FULL_WARP, in_page, lane_row + i * S::LANE_ROWS);
                copy_rows(w, i, k + row_page * p.k_stride_page + row_token * p.k_stride_token + element,
                          v + row_page * p.v_stride_page + row_token * p.v_stride_token + element);
            }
        }
        ekv_copy_commit();
    }

    /* Starts the copies of the next block, if it is known and a stage is free, finds the one after it, and lets the
     * scout make a step.  False: there is nothing more to start now. */
    EKV_MEMBER bool issue(const ekv_kernel_params &p, const place &w, scout &ahead, int32_t consumed_tiles,
                          int32_t consumed)
    {
        if (token < end && issued - consumed < STAGES) {
            copy_block(p, w);
            issued++;
            token += w.members * S::TOKENS;
        }
        if (token >= end)
            advance(p, w, ahead, consumed_tiles);
        if (token < end)
            look_up(p, w);
        ahead.step(p, w, next, end - token, 2 * STAGES * w.members * S::TOKENS);
        return token < end && issued - consumed < STAGES;
    }
};

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
            pieces[i] = row < rows ? __ldg(reinterpret_cast<const uint4 *>(source)) : make_uint4(0, 0, 0, 0);
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
    float2 *rows;         /* [warps][N]: largest, sum */
    int32_t *stage;       /* [warps] */

    EKV_MEMBER float *result(int warp) const
    {
        return reinterpret_cast<float *>(rings + (size_t)warp * STAGES * shape<D, N>::STAGE_BYTES +
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
    unsigned char *q = shared + (size_t)warps * STAGES * S::STAGE_BYTES;
    w.queue_ring = reinterpret_cast<volatile unsigned long long *>(q + (size_t)warps * N * D * 2);
    tile_entry *entries =
        reinterpret_cast<tile_entry *>(const_cast<unsigned long long *>(w.queue_ring) + EKV_MMA_TILE_RING);
    x.rows = reinterpret_cast<float2 *>(entries + warps * EKV_MMA_TILE_RING);
    x.stage = reinterpret_cast<int32_t *>(x.rows + warps * N);

    w.lane = (int)(threadIdx.x % 32);
    w.warp = (int)(threadIdx.x / 32);
    w.members = p.warps_per_head;
    w.head = w.warp / w.members;
    w.member = w.warp % w.members;
    w.ring = ekv_shared_address(shared) + (uint32_t)(w.warp * STAGES * S::STAGE_BYTES);
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
    int32_t n = 0, token = 0, consumed = 0, stamped = 0; /* tile of the sequence, its next block, stages done with */
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
            sink.block(p, w, w.ring + (uint32_t)(consumed % STAGES) * S::STAGE_BYTES, token, tile.kv_end);
            __syncwarp();
            token += step;
            if (token < tile.kv_end) {
                consumed++;
                continue;
            }
        }

        /* The tile's result, by way of the stage that was emptied last. */
        hand_over<D, N, BF16>(w, x, sink, consumed % STAGES, any);
        head_barrier(w);
        write_tile<D, N, BF16>(p, w, x, tile);
        head_barrier(w);
        if (p.dispatch == EKV_DISPATCH_QUEUE)
            __syncthreads(); /* keeps the warps within the rings of tiles */
        if (p.stamps && threadIdx.x == 0)
            ekv_stamp_write(p.stamps, stamped, stamped, 1, start_ns);
        consumed += any;
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
