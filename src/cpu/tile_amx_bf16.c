/* SPDX-License-Identifier: Apache-2.0
 * The tile kernel for x86-64 with AMX BF16, for Q, K and V of bf16.  A tile register has up to 16 rows of 64 bytes, and
 * tdpbf16ps adds A.B to C of fp32, where A is [M][32] and B [32][N], its rows interleaved by pairs (subnormal elements
 * and sums are taken as 0).  Both products keep a panel's query rows together:
 *
 *     dots [16 tokens][8 rows] = K [16 tokens][head_dim] . Q^T          K as it lies, where 16 tokens are in one page
 *     acc [8 rows][head_dim]  += weights [8 rows][32 tokens] . V        V interleaved by pairs of tokens, in scratch
 *
 * Weights are rounded to bf16 before P.V, their sum is not.  Interleaving leaves 32 elements of V in another order;
 * acc keeps it until the tile's end. */
#include "cpu/tile_avx512.h"

typedef vec panel; /* of two tokens */
typedef int32_t ipanel __attribute__((vector_size(64)));

#define panel_fma vec_fma
#define panel_max(a, b) _mm512_max_ps(a, b)

#include "cpu/tile_exp2.h"

#include <stdatomic.h>

enum {
    STEP = 32,        /* elements of a row of a tile register */
    TILE_TOKENS = 16, /* rows of one */
    TILE_WORDS = TILE_TOKENS * STEP,
    MAX_DIM = 256,
    PAIRS = EKV_TILE_BLOCK / 2 /* of tokens in a block */
};

/* Steps of fetching while a panel's weights are found.  Every phase of a unit has some: one without would leave the
 * memory idle, and too many at once would hold it up. */
enum { WEIGHT_STEPS = 8 };

_Static_assert((int)EKV_TILE_BLOCK == (int)STEP && 2 * TILE_TOKENS == STEP && PANEL == 8, "how blocks become tiles");

/* Tile registers.  Macros, since the intrinsics make names of them. */
#define DOTS_0 0 /* [TILE_TOKENS][PANEL] floats */
#define DOTS_1 1
#define QUERIES 2 /* [PAIRS of elements][PANEL] */
#define WEIGHTS 3 /* [rows of the panel][EKV_TILE_BLOCK] */
#define SUMS_0 4  /* [rows of the panel][16] floats */
#define SUMS_1 5
#define WORDS_0 6 /* of K: [TILE_TOKENS][STEP]; of V: [PAIRS][16 elements] */
#define WORDS_1 7

/* What ldtilecfg takes. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "palette 1");

/* Tile loads read what other code has stored, which their intrinsics do not tell every compiler. */
TILE_INLINE void finish_stores(void)
{
    atomic_signal_fence(memory_order_seq_cst);
}

static void configure(int32_t rows)
{
    const uint8_t m = (uint8_t)rows, n = PANEL * sizeof(float), all = TILE_TOKENS, bytes = STEP * sizeof(uint16_t);
    const tile_config config = { .palette = 1,
                                 .row_bytes = { n, n, n, bytes, bytes, bytes, bytes, bytes },
                                 .rows = { all, all, all, m, m, m, all, all } };
    finish_stores();
    _tile_loadconfig(&config);
}

/* ---- Q.K --------------------------------------------------------------------------------------------- */

/* Rows of a tile register in memory. */
typedef struct tile_place {
    const void *at;
    int64_t stride; /* bytes from row to row */
} tile_place;

/* Tokens [t, t + TILE_TOKENS) of a block, those behind its last one being 0: where they lie, if their rows are evenly
 * apart, else in `copy`, [TILE_TOKENS][head_dim]. */
static tile_place place_of_k(const ekv_cpu_tile *tile, const tile_rows *rows, int32_t t, uint16_t *copy)
{
    const int32_t dim = tile->head_dim, size = (int32_t)sizeof *copy;
    if (t + TILE_TOKENS <= rows->n && (rows->first + t) % tile->page_size + TILE_TOKENS <= tile->page_size)
        return (tile_place){ rows->k[t], tile->k_stride_token * size };
    for (int32_t i = 0; i < TILE_TOKENS; i++)
        for (int32_t d = 0; d < dim; d += STEP) {
            const __m512i zero = _mm512_setzero_si512();
            const __m512i words =
                t + i < rows->n ? load_words((const uint16_t *)(const void *)rows->k[t + i] + d) : zero;
            _mm512_storeu_si512(copy + i * dim + d, words);
        }
    return (tile_place){ copy, dim * size };
}

/* p: [EKV_TILE_BLOCK][PANEL]; queries: as arrange_queries leaves a panel. */
static void find_dots(const uint16_t *queries, const tile_place *k, int32_t head_dim, float *p, tile_fetch *fetch)
{
    tile_cursor cursor = fetch->cursor;
    _tile_zero(DOTS_0);
    _tile_zero(DOTS_1);
    for (int32_t d = 0; d < head_dim; d += STEP) {
        tile_fetch_step(fetch, &cursor);
        _tile_loadd(QUERIES, queries + d * PANEL, PANEL * sizeof(float));
        _tile_loadd(WORDS_0, (const uint16_t *)k[0].at + d, k[0].stride);
        _tile_dpbf16ps(DOTS_0, WORDS_0, QUERIES);
        tile_fetch_step(fetch, &cursor);
        _tile_loadd(WORDS_1, (const uint16_t *)k[1].at + d, k[1].stride);
        _tile_dpbf16ps(DOTS_1, WORDS_1, QUERIES);
    }
    _tile_stored(DOTS_0, p, PANEL * sizeof *p);
    _tile_stored(DOTS_1, p + TILE_TOKENS * PANEL, PANEL * sizeof *p);
    fetch->cursor = cursor;
}

/* ---- Weights ----------------------------------------------------------------------------------------- */

/* Tokens follow each other in the rows of weights, and so in the pairs of V, as the conversion leaves them: pair i is
 * of these tokens of a block. */
static int32_t even_token(int32_t i)
{
    return 8 * (i % 4) + i / 4;
}

static int32_t odd_token(int32_t i)
{
    return even_token(i) + 4;
}

/* Each lane's own, and that of the same row in the other half. */
TILE_INLINE panel swap_halves(panel x)
{
    return _mm512_shuffle_f32x4(x, x, 0x4E);
}

TILE_INLINE panel both_halves(const float *row)
{
    return _mm512_broadcast_f32x8(_mm256_loadu_ps(row));
}

/* x: [PAIRS] vectors of two tokens' rows, to w: [PANEL][EKV_TILE_BLOCK] of bf16, tokens as even_token has them.  Four
 * tokens make a vector of words, a token a lane of 128 bits; then each lane is transposed as a matrix of 8 vectors of 8
 * words. */
static inline void round_weights(const panel *x, uint16_t *w)
{
    __m512i a[8], b[8];
    for (int32_t i = 0; i < 8; i++)
        a[i] = (__m512i)_mm512_cvtne2ps_pbh(x[2 * i + 1], x[2 * i]);
    for (int32_t i = 0; i < 8; i += 2) {
        b[i] = _mm512_unpacklo_epi16(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 1]);
    }
    for (int32_t i = 0; i < 2; i++)       /* rows 4i to 4i + 3 */
        for (int32_t j = 0; j < 2; j++) { /* vectors 4j to 4j + 3 */
            a[4 * i + 2 * j] = _mm512_unpacklo_epi32(b[4 * j + i], b[4 * j + 2 + i]);
            a[4 * i + 2 * j + 1] = _mm512_unpackhi_epi32(b[4 * j + i], b[4 * j + 2 + i]);
        }
    for (int32_t i = 0; i < 2; i++)
        for (int32_t j = 0; j < 2; j++) {
            uint16_t *to = w + (4 * i + 2 * j) * EKV_TILE_BLOCK;
            _mm512_store_si512(to, _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]));
            _mm512_store_si512(to + EKV_TILE_BLOCK, _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]));
        }
}

/* Pairwise, into x[0]. */
#define REDUCE(x, operation)                           \
    for (int32_t width = PAIRS / 2; width; width /= 2) \
        for (int32_t i = 0; i < width; i++)            \
            (x)[i] = operation((x)[i], (x)[i + width]);

/* The dots of n tokens, p: [EKV_TILE_BLOCK][PANEL], to weights against the new maximum of each row, w: as of
 * round_weights, 0 behind the last token; alpha: [PANEL], what old sums are to be scaled by. */
static void find_weights(float scale, int32_t n, float *p, tile_state *state, float *alpha, uint16_t *w,
                         tile_fetch *fetch)
{
    tile_cursor cursor = fetch->cursor;
    for (int32_t i = n * PANEL; i < EKV_TILE_BLOCK * PANEL; i++)
        p[i] = -INFINITY;
    panel x[PAIRS], most[PAIRS];
    for (int32_t i = 0; i < PAIRS; i++)
        most[i] = x[i] = panel_load(p + i * 2 * PANEL);
    REDUCE(most, panel_max)
    const panel old = both_halves(state->max);
    const panel max = panel_max(panel_max(most[0], swap_halves(most[0])), old);
    /* -inf - -inf is NaN: where there is nothing but -inf, weights are those of any finite maximum, 0 */
    const panel from = panel_max(max, panel_splat(-0x1.fffffep127f));
    const float scale2 = scale * 0x1.715476p0f; /* log2(e): weights are powers of 2 */
    for (int32_t i = 0; i < PAIRS; i++) {
        if (i % (PAIRS / WEIGHT_STEPS) == 0)
            tile_fetch_step(fetch, &cursor);
        x[i] = panel_exp2((x[i] - from) * scale2);
    }
    fetch->cursor = cursor;
    round_weights(x, w);
    REDUCE(x, _mm512_add_ps)
    const panel total = x[0] + swap_halves(x[0]);
    const panel rescale = panel_exp2((old - from) * scale2);
    const panel sum = both_halves(state->sum) * rescale + total;
    _mm256_storeu_ps(alpha, _mm512_castps512_ps256(rescale));
    _mm256_storeu_ps(state->max, _mm512_castps512_ps256(max));
    _mm256_storeu_ps(state->sum, _mm512_castps512_ps256(sum));
}

/* As ekv_cpu_kernel.exp2. */
static void exp2_all(const float *x, float *weights, int32_t n)
{
    for (int32_t i = 0; i < n; i += PANEL)
        _mm256_storeu_ps(weights + i, _mm512_castps512_ps256(panel_exp2(both_halves(x + i))));
}

/* ---- P.V --------------------------------------------------------------------------------------------- */

/* v: [head_dim / 16][PAIRS][16] pairs of words, tokens behind the last one being 0. */
static void pair_tokens(const tile_rows *rows, int32_t head_dim, uint16_t *v, tile_fetch *fetch)
{
    static const uint16_t zeros[MAX_DIM];
    tile_cursor cursor = fetch->cursor;
    for (int32_t i = 0; i < PAIRS; i++) {
        const uint16_t *even = even_token(i) < rows->n ? (const void *)rows->v[even_token(i)] : zeros;
        const uint16_t *odd = odd_token(i) < rows->n ? (const void *)rows->v[odd_token(i)] : zeros;
        uint16_t *to = v + i * STEP;
        tile_fetch_step(fetch, &cursor);
        for (int32_t d = 0; d < head_dim; d += STEP, to += 2 * TILE_WORDS) {
            const __m512i a = load_words(even + d), b = load_words(odd + d);
            _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(to + TILE_WORDS, _mm512_unpackhi_epi16(a, b));
        }
    }
    fetch->cursor = cursor;
}

/* acc[r] *= alpha[r], where that changes anything. */
static void rescale(int32_t rows, int32_t head_dim, const float *alpha, float *acc)
{
    for (int32_t r = 0; r < rows; r++, acc += head_dim)
        if (alpha[r] != 1)
            for (int32_t d = 0; d < head_dim; d += LANES)
                _mm512_storeu_ps(acc + d, _mm512_mul_ps(_mm512_loadu_ps(acc + d), _mm512_set1_ps(alpha[r])));
}

/* acc += w . v */
static void weigh(const uint16_t *w, const uint16_t *v, int32_t head_dim, float *acc, tile_fetch *fetch)
{
    const int64_t stride = head_dim * (int64_t)sizeof *acc, v_stride = STEP * sizeof *v;
    tile_cursor cursor = fetch->cursor;
    finish_stores();
    _tile_loadd(WEIGHTS, w, EKV_TILE_BLOCK * sizeof *w);
    for (int32_t d = 0; d < head_dim; d += STEP, v += 2 * TILE_WORDS) {
        tile_fetch_step(fetch, &cursor);
        _tile_loadd(SUMS_0, acc + d, stride);
        _tile_loadd(WORDS_0, v, v_stride);
        _tile_dpbf16ps(SUMS_0, WEIGHTS, WORDS_0);
        tile_fetch_step(fetch, &cursor);
        _tile_loadd(SUMS_1, acc + d + LANES, stride);
        _tile_loadd(WORDS_1, v + TILE_WORDS, v_stride);
        _tile_dpbf16ps(SUMS_1, WEIGHTS, WORDS_1);
        _tile_stored(SUMS_0, acc + d, stride);
        _tile_stored(SUMS_1, acc + d + LANES, stride);
    }
    fetch->cursor = cursor;
}

/* ---- Tiles ------------------------------------------------------------------------------------------- */

/* Words of a panel's queries, arranged: [head_dim / 2][PANEL] pairs. */
static int64_t queries_words(const ekv_cpu_tile *tile)
{
    return (int64_t)PANEL * tile->head_dim;
}

/* Behind tile->q: [heads][panels] of arranged queries. */
static uint16_t *queries_of(const ekv_cpu_tile *tile, int32_t head)
{
    const int64_t panels = ekv_ceil_div(tile->rows, PANEL);
    return (uint16_t *)tile->q + (tile->heads + head) * panels * queries_words(tile);
}

/* STEP elements of `rows` rows, head_dim apart, to [STEP / 2][PANEL] pairs; lanes without a row get 0. */
static void transpose_pairs(const uint16_t *from, int32_t rows, int32_t head_dim, uint16_t *to)
{
    __m512i a[PANEL], b[PANEL];
    for (int32_t r = 0; r < PANEL; r++)
        a[r] = r < rows ? load_words(from + r * head_dim) : _mm512_setzero_si512();
    for (int32_t r = 0; r < PANEL; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int32_t half = 0; half < 2; half++) { /* rows 4 * half to 4 * half + 3; lane i has pairs 4i to 4i + 3 */
        const __m512i *x = b + 4 * half;
        const __m512i pair[4] = { _mm512_unpacklo_epi64(x[0], x[2]), _mm512_unpackhi_epi64(x[0], x[2]),
                                  _mm512_unpacklo_epi64(x[1], x[3]), _mm512_unpackhi_epi64(x[1], x[3]) };
        for (int32_t i = 0; i < 4; i++) {
            uint16_t *at = to + i * 2 * PANEL + half * PANEL;
            _mm_store_si128((void *)at, _mm512_extracti32x4_epi32(pair[i], 0));
            _mm_store_si128((void *)(at + 8 * PANEL), _mm512_extracti32x4_epi32(pair[i], 1));
            _mm_store_si128((void *)(at + 16 * PANEL), _mm512_extracti32x4_epi32(pair[i], 2));
            _mm_store_si128((void *)(at + 24 * PANEL), _mm512_extracti32x4_epi32(pair[i], 3));
        }
    }
}

static void arrange_queries(const ekv_cpu_tile *tile, int32_t head)
{
    const int32_t dim = tile->head_dim;
    const uint16_t *from = (const uint16_t *)tile->q + (int64_t)head * tile->rows * dim;
    uint16_t *to = queries_of(tile, head);
    for (int32_t r = 0; r < tile->rows; r += PANEL)
        for (int32_t d = 0; d < dim; d += STEP, to += STEP * PANEL)
            transpose_pairs(from + (int64_t)r * dim + d, (int32_t)ekv_min(tile->rows - r, PANEL), dim, to);
}

/* A unit's panels go through their phases one behind the other, so that none has to wait for the results of the one
 * before, which tile registers and the stores between them deliver late: while a panel's dots are on the way, the
 * weights of the panel before are multiplied by V. */
typedef struct pipeline {
    uint16_t k[2][TILE_TOKENS * MAX_DIM]; /* of place_of_k */
    uint16_t v[EKV_TILE_BLOCK * MAX_DIM]; /* of pair_tokens */
    uint16_t w[PANEL * EKV_TILE_BLOCK];   /* of find_weights */
    /* The panel whose dots are found. */
    int32_t rows, n; /* query rows, 0: there is none yet; tokens */
    tile_state *state;
    float *acc;
    int32_t configured; /* rows that the tile registers are configured for */
} pipeline;

static void find_pending_weights(const ekv_cpu_tile *tile, pipeline *own, float *alpha, tile_fetch *fetch)
{
    if (own->rows)
        find_weights(tile->scale, own->n, tile->p, own->state, alpha, own->w, fetch);
}

static void weigh_pending(const ekv_cpu_tile *tile, pipeline *own, const float *alpha, tile_fetch *fetch)
{
    if (!own->rows)
        return;
    if (own->rows != own->configured)
        configure(own->configured = own->rows);
    rescale(own->rows, tile->head_dim, alpha, own->acc);
    weigh(own->w, own->v, tile->head_dim, own->acc, fetch);
}

static void run_unit(const ekv_cpu_tile *tile, void *memory, int32_t head, const tile_rows *rows, tile_fetch *fetch)
{
    pipeline *own = memory;
    const int32_t dim = tile->head_dim;
    const uint16_t *queries = queries_of(tile, head);
    const tile_place k[2] = { place_of_k(tile, rows, 0, own->k[0]), place_of_k(tile, rows, TILE_TOKENS, own->k[1]) };
    for (int32_t r = 0; r < tile->rows; r += PANEL, queries += queries_words(tile)) {
        float alpha[PANEL];
        find_pending_weights(tile, own, alpha, fetch);
        finish_stores();
        find_dots(queries, k, dim, tile->p, fetch);
        weigh_pending(tile, own, alpha, fetch);
        if (r == 0)
            pair_tokens(rows, dim, own->v, fetch);
        own->rows = (int32_t)ekv_min(tile->rows - r, PANEL);
        own->n = rows->n;
        own->state = &tile_states(tile, head)[r / PANEL];
        own->acc = tile->acc + head * tile->stride_acc + (int64_t)r * dim;
    }
}

/* Steps of fetching in a unit. */
static int32_t steps_of(const ekv_cpu_tile *tile)
{
    const int32_t vectors = tile->head_dim / STEP, panels = (int32_t)ekv_ceil_div(tile->rows, PANEL);
    return PAIRS + panels * (WEIGHT_STEPS + 4 * vectors);
}

static void run_tile(const ekv_cpu_tile *tile)
{
    for (int32_t h = 0; h < tile->heads; h++)
        arrange_queries(tile, h);
    _Alignas(64) pipeline own;
    float alpha[PANEL];
    tile_fetch nothing = { 0 };
    own.rows = 0;
    configure(own.configured = (int32_t)ekv_min(tile->rows, PANEL));
    tile_for_units(tile, run_unit, &own, steps_of(tile));
    find_pending_weights(tile, &own, alpha, &nothing);
    weigh_pending(tile, &own, alpha, &nothing);
    _tile_release(); /* so that the kernel has no tile registers to save with the thread */
    tile_end(tile);
    put_tile_in_order(tile);
}

const ekv_cpu_kernel ekv_cpu_kernel_amx_bf16 = {
    .name = "amx-bf16",
    .id = EKV_KERNEL_AMX_BF16,
    .head_dim_step = STEP,
    .q_dtype = EKV_DTYPE_BF16,
    .bf16_only = true,
    .p_dtype = EKV_DTYPE_BF16,
    .run = run_tile,
    .write = tile_write,
    .exp2 = exp2_all,
};
