/* SPDX-License-Identifier: Apache-2.0
 * What is to be read next: one warp of a CTA, the scout, walks the tiles and the page tables ahead of the warps that
 * compute (mma.cuh), so that none of these ever waits for a tile record or a page number.
 *
 * It hands over *rounds*: up to p.round_tokens tokens of one tile, with the place of every token.  The rounds
 * lie in a ring in shared memory; each place of the ring has a barrier that says it is full and one that says it is
 * empty. */
#ifndef EVENKV_CUDA_KERNELS_MMA_SCOUT_CUH
#define EVENKV_CUDA_KERNELS_MMA_SCOUT_CUH

#include "cuda/kernels/common.cuh"
#include "cuda/kernels/mma_shape.h"

namespace mma
{

/* D: head_dim.  N: rows of Q, 8 or 16. */
template <int D, int N>
struct shape {
    enum {
        TOKENS = D >= 128 ? 16 : 32, /* ekv_mma_block_tokens */
        CHUNKS = D / 8,              /* 16-byte pieces of a row */
        K_BYTES = TOKENS * D * 2,
        STAGE_BYTES = 2 * K_BYTES,
        LANE_ROWS = 32 / CHUNKS, /* rows that a warp copies at a time; 1 at D = 256 */
        ROW_TILES = N / 8,
        D_TILES = D / 16,
        Q_BYTES = N * D * 2,
        OUTPUT_BYTES = 8 * D * 2,  /* ekv_mma_output_bytes */
        Q_COPIES = N * CHUNKS / 32 /* 16-byte pieces of Q that a lane copies */
    };
};

/* ---- Barriers in shared memory -------------------------------------------------------------------------- */

EKV_DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

EKV_DEVICE void barrier_arrive(uint32_t barrier)
{
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}

/* Whether the phase of that parity is over. */
EKV_DEVICE bool barrier_over(uint32_t barrier, uint32_t parity)
{
    uint32_t over;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 /* may wait a while before it says no */
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
    return over;
}

EKV_DEVICE bool barrier_over_now(uint32_t barrier, uint32_t parity)
{
    uint32_t over;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return over;
}

/* ---- Rounds --------------------------------------------------------------------------------------------- */

/* Flags of a round beside EKV_TILE_PARTIAL. */
enum {
    END = 1 << 9,       /* there are no more tiles; the round has no blocks */
    DEFERRED = 1 << 10, /* the scout will arrive at the tile's merge */
    MERGE = 1 << 11     /* the scout has, and warps that are in `arrived` are to merge; the round has no blocks */
};

/* 64 bytes. */
struct __align__(16) round_header
{
    int32_t request;
    int32_t head;  /* the tile's first */
    int32_t split; /* of the tile */
    uint32_t flags;
    int32_t first_block; /* of the round, counted from the tile's first */
    int32_t blocks;      /* of the round; 0 only in a tile without tokens */
    int32_t left; /* tokens of the tile from the round's first block on; at most round_tokens in its last round */
    int32_t tile; /* index in the plan */
    /* Of a tile with a partial result: */
    int32_t merge; /* index in the plan */
    int32_t num_splits;
    int32_t slot_first, slot_next, slot_stride; /* as in ekv_merge, of the tile's first head */
    int32_t merge_head;                         /* the tile's first head, counted from the merge's */
    uint32_t arrived;                           /* bit w: all others whom computing warp w merges with have arrived */
    int32_t reserved;
};

static_assert(sizeof(round_header) == EKV_MMA_HEADER_BYTES, "the host counts its bytes");

struct round {
    round_header header;
    int2 places[1]; /* [round_tokens]: page and token in the page.  Where p.pages_aligned, only every 16th is set. */
};

struct round_ring {
    unsigned char *rounds; /* [EKV_MMA_ROUNDS] */
    uint32_t bytes;        /* of a round */
    uint32_t full;         /* shared addresses of the first barriers, 8 bytes each */
    uint32_t empty;

    EKV_MEMBER round &at(uint32_t number) const
    {
        return *reinterpret_cast<round *>(rounds + number % EKV_MMA_ROUNDS * bytes);
    }

    /* Of the uses of a place before, which is what barriers know. */
    static EKV_MEMBER uint32_t parity(uint32_t number)
    {
        return number / EKV_MMA_ROUNDS & 1;
    }

    EKV_MEMBER bool is_full_now(uint32_t number) const
    {
        return barrier_over_now(full + number % EKV_MMA_ROUNDS * 8, parity(number));
    }

    EKV_MEMBER void wait_full(uint32_t number) const
    {
        while (!barrier_over(full + number % EKV_MMA_ROUNDS * 8, parity(number))) {
        }
    }

    /* By every lane of the scout, for what it has written. */
    EKV_MEMBER void hand_over(uint32_t number) const
    {
        barrier_arrive(full + number % EKV_MMA_ROUNDS * 8);
    }

    /* By every lane of the computing warps, for what it has read. */
    EKV_MEMBER void release(uint32_t number) const
    {
        barrier_arrive(empty + number % EKV_MMA_ROUNDS * 8);
    }

    EKV_MEMBER bool is_released_now(uint32_t number) const
    {
        return barrier_over_now(empty + number % EKV_MMA_ROUNDS * 8, parity(number));
    }

    EKV_MEMBER void wait_released(uint32_t number) const
    {
        while (!barrier_over(empty + number % EKV_MMA_ROUNDS * 8, parity(number))) {
        }
    }
};

/* ---- Shared memory -------------------------------------------------------------------------------------- */

/* Dynamic shared memory, as ekv_mma_shared_bytes has it. */
template <int D, int N>
struct shared_memory {
    int warps;            /* that compute */
    unsigned char *rings; /* [warps][stages] of STAGE_BYTES */
    unsigned char *q;     /* [warps][N][D] */
    unsigned char *out;   /* [heads][8][D] */
    round_ring rounds;
    round_header *deferred; /* of the tile that the scout is to arrive for */
    float2 *rows;           /* [warps][N], for merge_warps */
    int32_t *stage;         /* [warps], too */
    int64_t *start_ns;      /* of the tile, for its stamp */

    EKV_MEMBER shared_memory(const ekv_kernel_params &p)
    {
        extern __shared__ __align__(512) unsigned char memory[]; /* the longest row */
        typedef shape<D, N> S;
        warps = (int)(blockDim.x / 32) - 1;
        rings = memory;
        q = rings + warps * p.stages * S::STAGE_BYTES;
        out = q + warps * S::Q_BYTES;
        rounds.rounds = out + warps / p.warps_per_head * S::OUTPUT_BYTES;
        rounds.bytes = (uint32_t)ekv_mma_round_bytes(p.round_tokens);
        unsigned char *barriers = rounds.rounds + EKV_MMA_ROUNDS * rounds.bytes;
        rounds.full = ekv_shared_address(barriers);
        rounds.empty = rounds.full + EKV_MMA_ROUNDS * 8;
        deferred = reinterpret_cast<round_header *>(barriers + EKV_MMA_ROUNDS * 16);
        start_ns = reinterpret_cast<int64_t *>(deferred + 1);
        rows = reinterpret_cast<float2 *>(start_ns + 1);
        stage = reinterpret_cast<int32_t *>(rows + warps * N);
    }
};

/* Splits that are merged at a time: two levels of about equal size, where one is not enough. */
EKV_DEVICE int32_t fan_in(int32_t num_splits)
{
    int32_t fan = EKV_MMA_FAN_IN;
    while (num_splits > EKV_MMA_FAN_IN && fan > 2 && (fan - 1) * (fan - 1) >= num_splits)
        fan--;
    return fan;
}

/* ---- The scout ------------------------------------------------------------------------------------------ */

/* A tile on its way: number -1 where there is none. */
struct scouted_tile {
    int32_t number;
    ekv_tile tile;
    const int32_t *pages; /* of its request */
    ekv_merge merge;      /* of a partial tile */
};

/* Tokens of a tile whose places have been asked for. */
struct window {
    enum { LOOK_UPS = 4 }; /* by a lane */
    scouted_tile t;
    int32_t token; /* the first one */
    int32_t tokens;
    int2 places[LOOK_UPS]; /* of tokens (32 * i + lane) * step */
};

/* A tile passes four stations, by one dependent access to memory each: asked (for its record), ready (its row of the
 * page table and its merge), current (its pages, a window at a time), and the window whose rounds are published.  The
 * loop takes every station one step on, so that the accesses of all of them are under way together. */
template <int D, int N>
struct scout {
    typedef shape<D, N> S;

    int32_t next, end; /* numbers of tiles known to come: [next, end) */
    bool more;         /* queue: there may be others */
    bool claiming;     /* queue: a number is asked for, the one after `claim` claims */
    uint32_t claim;
    scouted_tile asked, ready, current;
    int32_t token;   /* of the current tile, the first that was not looked up */
    int32_t step;    /* tokens that a look-up is for: 16 where p.pages_aligned, else 1 */
    uint32_t number; /* of the next round */
    uint32_t ahead;  /* rounds that may be handed over and not yet released */
    bool deferring;  /* a tile's partial result waits to be arrived for, once its last round is released: */
    uint32_t last_round;
    uint32_t *arrivals; /* of its first part */
    int32_t splits;
    uint32_t merging; /* bit w: computing warp w is the last at the deferred tile's merge and has yet to merge */

    EKV_MEMBER void start(const ekv_kernel_params &p)
    {
        asked.number = ready.number = current.number = -1;
        claiming = more = deferring = false;
        number = merging = 0;
        /* What a queue's CTA has taken ahead, no other can take. */
        ahead = p.dispatch == EKV_DISPATCH_QUEUE ? EKV_MMA_QUEUE_ROUNDS : EKV_MMA_ROUNDS;
        step = p.pages_aligned ? 16 : 1;
        next = (int32_t)blockIdx.x;
        if (p.dispatch == EKV_DISPATCH_RANGE) { /* the first tile's record comes with the range */
            const ekv_cta_record *cta = p.ctas + blockIdx.x;
            asked.tile = ekv_load_tile(&cta->first, 0);
            const int2 range = __ldg(reinterpret_cast<const int2 *>(cta));
            next = range.x;
            end = range.y;
            if (next < end)
                asked.number = next++;
        } else {
            end = next + (next < __ldg(&p.header->num_tiles));
            more = p.dispatch == EKV_DISPATCH_QUEUE && next < end;
        }
    }

    /* The current tile's next window; its number is -1 where there is none. */
    EKV_MEMBER void look_up(const ekv_kernel_params &p, int lane, window &to)
    {
        to.t = current;
        if (current.number < 0)
            return;
        to.token = token;
        to.tokens = min((int32_t)(p.pages_aligned ? 512 : 128), current.tile.kv_end - token); /* whole rounds */
#pragma unroll
        for (int i = 0; i < window::LOOK_UPS; i++) {
            const int32_t offset = (i * 32 + lane) * step;
            to.places[i] = make_int2(0, 0);
            if (offset < to.tokens) {
                const int32_t page = (token + offset) / p.page_size;
                to.places[i] = make_int2(__ldg(current.pages + page), token + offset - page * p.page_size);
            }
        }
        token += to.tokens;
        if (token >= current.tile.kv_end)
            current.number = -1;
    }

    /* The round that begins `begin` tokens after the window does. */
    EKV_MEMBER void publish(const ekv_kernel_params &p, int lane, const round_ring &ring, const window &from,
                            int32_t begin)
    {
        const ekv_tile &t = from.t.tile;
        const int32_t left = t.kv_end - from.token - begin, tokens = min(left, p.round_tokens);
        round &r = ring.at(number);
        const bool defer = defers(p, from.t, left);
        const uint32_t arrived = defer ? 0 : others_arrived(p, lane, from.t, left);
        if (number >= ahead)
            ring.wait_released(number - ahead);
        if (lane == 0) {
            r.header.request = t.request;
            r.header.head = t.head;
            r.header.split = t.split;
            r.header.flags = (t.flags & EKV_TILE_PARTIAL) | (defer ? DEFERRED : 0);
            r.header.first_block = (from.token + begin - t.kv_begin) / S::TOKENS;
            r.header.blocks = (tokens + S::TOKENS - 1) / S::TOKENS;
            r.header.left = left;
            r.header.tile = from.t.number;
            if (t.flags & EKV_TILE_PARTIAL) {
                const int32_t merge_head = t.head - from.t.merge.head;
                r.header.merge = t.m_block;
                r.header.num_splits = from.t.merge.num_splits;
                r.header.slot_first = from.t.merge.slot_first + merge_head;
                r.header.slot_next = from.t.merge.slot_next + merge_head;
                r.header.slot_stride = from.t.merge.slot_stride;
                r.header.merge_head = merge_head;
                r.header.arrived = arrived;
            }
            if (defer)
                *shared_memory<D, N>(p).deferred = r.header;
        }
#pragma unroll
        for (int i = 0; i < window::LOOK_UPS; i++) {
            const int32_t offset = (i * 32 + lane) * step - begin;
            if (offset >= 0 && offset < p.round_tokens)
                r.places[offset] = from.places[i];
        }
        ring.hand_over(number++);
    }

    /* Of the tile's merge, the first count that its warps arrive at, and how many splits are to. */
    EKV_MEMBER void find_arrivals(const ekv_kernel_params &p, const scouted_tile &t, uint32_t *&first,
                                  int32_t &count) const
    {
        const int32_t fan = fan_in(t.merge.num_splits), split = t.tile.split / fan * fan;
        first = p.arrivals + (ekv_merge_slot(&t.merge, split) + t.tile.head - t.merge.head) * p.warps_per_head;
        count = min(fan, t.merge.num_splits - split);
    }

    /* A warp that goes on to another tile would have to wait for its copies under way before it could arrive; so the
     * scout does that for it.  The last tile of a CTA, as far as is known, is the warps' own business. */
    EKV_MEMBER bool defers(const ekv_kernel_params &p, const scouted_tile &t, int32_t left)
    {
        if (!(t.tile.flags & EKV_TILE_PARTIAL) || left > p.round_tokens || deferring || merging ||
            !(current.number >= 0 || ready.number >= 0 || asked.number >= 0 || next < end))
            return false;
        find_arrivals(p, t, arrivals, splits);
        last_round = number;
        deferring = splits > 1;
        return deferring;
    }

    /* Arrives for the deferred tile if all warps have stored their part, or after waiting until they have. */
    EKV_MEMBER void arrive_deferred(int lane, const round_ring &ring, bool wait)
    {
        if (number <= last_round + ahead) { /* else that was waited for already */
            if (wait)
                ring.wait_released(last_round);
            else if (!__all_sync(EKV_FULL_WARP, ring.is_released_now(last_round)))
                return;
        }
        const int warps = (int)(blockDim.x / 32) - 1;
        bool last = false;
        if (lane < warps)
            last = ekv_arrive(arrivals + lane) == (uint32_t)splits - 1;
        deferring = false;
        merging = __ballot_sync(EKV_FULL_WARP, last);
    }

    /* Between two tiles: has the warps merge that were the last. */
    EKV_MEMBER void publish_merge(const ekv_kernel_params &p, int lane, const round_ring &ring)
    {
        if (number >= ahead)
            ring.wait_released(number - ahead);
        if (lane == 0) {
            round_header &h = ring.at(number).header;
            h = *shared_memory<D, N>(p).deferred;
            h.flags = EKV_TILE_PARTIAL | MERGE;
            h.first_block = h.blocks = h.left = 0;
            h.arrived = merging;
        }
        merging = 0;
        ring.hand_over(number++);
    }

    /* Bit w: at the merge of the tile all others have arrived whom computing warp w is to merge with, so that it need
     * not ask.  Looked at once, in the tile's last round. */
    EKV_MEMBER uint32_t others_arrived(const ekv_kernel_params &p, int lane, const scouted_tile &t, int32_t left) const
    {
        if (!(t.tile.flags & EKV_TILE_PARTIAL) || left > p.round_tokens)
            return 0;
        uint32_t *first;
        int32_t count;
        find_arrivals(p, t, first, count);
        const int warps = (int)(blockDim.x / 32) - 1;
        bool arrived = false;
        if (lane < warps)
            arrived = ekv_load_acquire(first + lane) == (uint32_t)count - 1;
        return __ballot_sync(EKV_FULL_WARP, arrived);
    }

    EKV_MEMBER void take_claim(const ekv_kernel_params &p, int lane)
    {
        const uint32_t num_tiles = (uint32_t)__ldg(&p.header->num_tiles);
        const uint32_t before = __shfl_sync(EKV_FULL_WARP, claim, 0);
        claiming = false;
        more = before + gridDim.x < num_tiles;
        if (more) {
            next = (int32_t)(before + gridDim.x);
            end = next + 1;
        }
        if (lane == 0 && before == num_tiles - 1) /* every CTA has asked in vain */
            *p.queue = 0;
    }

    /* A queue's tile is claimed when little else is left to publish, so that the tiles stay even. */
    EKV_MEMBER void claim_next(const ekv_kernel_params &p, int lane, const window &shown, const window &following)
    {
        if (!more || claiming || next < end || asked.number >= 0)
            return;
        const int64_t left = (int64_t)(shown.t.number >= 0 ? shown.tokens : 0) +
                             (following.t.number >= 0 ? following.tokens : 0) +
                             (current.number >= 0 ? current.tile.kv_end - token : 0) +
                             (ready.number >= 0 ? ready.tile.kv_end - ready.tile.kv_begin : 0);
        if (left > p.round_tokens)
            return;
        if (lane == 0)
            claim = atomicAdd(p.queue, 1u);
        claiming = true;
    }

    EKV_MEMBER void run(const ekv_kernel_params &p, int lane, const round_ring &ring)
    {
        window shown, following;
        start(p);
        shown.t.number = -1;
        do {
            if (claiming)
                take_claim(p, lane);
            if (current.number < 0 && ready.number >= 0) {
                current = ready;
                token = current.tile.kv_begin;
                ready.number = -1;
            }
            look_up(p, lane, following);
            if (ready.number < 0 && asked.number >= 0) {
                ready = asked;
                ready.pages = ekv_pages(p, ready.tile.request);
                if (ready.tile.flags & EKV_TILE_PARTIAL)
                    ready.merge = ekv_load_merge(p.merges, ready.tile.m_block);
                asked.number = -1;
            }
            if (asked.number < 0 && next < end) {
                asked.tile = ekv_load_tile(p.tiles, next);
                asked.number = next++;
            }
            claim_next(p, lane, shown, following);
            if (shown.t.number >= 0)
#pragma unroll 1
                for (int32_t begin = 0; begin == 0 || begin < shown.tokens; begin += p.round_tokens)
                    publish(p, lane, ring, shown, begin);
            shown = following;
            if (deferring)
                arrive_deferred(lane, ring, false);
            if (merging && (shown.t.number < 0 || shown.token == shown.t.tile.kv_begin))
                publish_merge(p, lane, ring);
        } while (shown.t.number >= 0 || current.number >= 0 || ready.number >= 0 || asked.number >= 0 || next < end ||
                 more);
        if (deferring)
            arrive_deferred(lane, ring, true);
        if (merging)
            publish_merge(p, lane, ring);
        if (number >= ahead)
            ring.wait_released(number - ahead);
        if (lane == 0) {
            ring.at(number).header.flags = END;
            ring.at(number).header.blocks = 0;
        }
        ring.hand_over(number++);
    }
};

} // namespace mma

#endif
