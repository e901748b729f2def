/* SPDX-License-Identifier: Apache-2.0
 * What the tests of planning on a GPU share: random plans with upper bounds and live lengths, and the records that the
 * host's planners make of them.  Functions fail the running cmocka test. */
#ifndef EVENKV_TESTS_ON_DEVICE_CASES_H
#define EVENKV_TESTS_ON_DEVICE_CASES_H

#include "cuda/kernels/params.h"
#include "plan/fa3_rule.h"
#include "support.h"

typedef struct on_device_case {
    const char *planner;
    ekv_batch batch; /* kv_len: bound */
    ekv_device device;
    ekv_plan_options options; /* on_device and cuda are 0 */
    int32_t *bound;           /* [batch_size] */
    int32_t *live;            /* [batch_size], some out of bounds */
    int32_t *exact;           /* [batch_size], live within the bounds */
} on_device_case;

/* ---- Random cases ------------------------------------------------------------------------------------ */

static inline int32_t case_batch_size(ekv_rng *rng)
{
    switch (ekv_rng_below(rng, 64)) {
    case 0: return PICK(rng, 991, 992, 993, 1022, 1023, 1024, 1984, 1985, 2048, 4095, 4096, 4097);
    case 1:
    case 2: return 1 + (int32_t)ekv_rng_below(rng, 3000);
    default: return 1 + (int32_t)ekv_rng_below(rng, ekv_rng_below(rng, 4) ? 12 : 200);
    }
}

static inline int32_t case_length(ekv_rng *rng, int64_t kind, int32_t block)
{
    switch (kind) {
    case 0: return (int32_t)ekv_rng_below(rng, 6000);
    case 1: return (int32_t)ekv_rng_below(rng, 3);
    case 2: return block;
    case 3: return (int32_t)ekv_max(0, block * ekv_rng_below(rng, 20) + ekv_rng_below(rng, 3) - 1);
    case 4: return ekv_rng_below(rng, 20) ? (int32_t)ekv_rng_below(rng, 100) : 100000;
    case 5: return 0;
    default: return (int32_t)ekv_rng_below(rng, ekv_rng_below(rng, 4) ? 300 : 20000);
    }
}

/* New live lengths, as a decode step or a new batch in the same graph would bring them. */
static inline void case_set_live(on_device_case *c, ekv_rng *rng)
{
    const int32_t block = PICK(rng, 1, 16, 128, 256);
    const int64_t kind = ekv_rng_below(rng, 12);
    for (int32_t b = 0; b < c->batch.batch_size; b++) {
        const int32_t bound = c->bound[b];
        switch (kind) {
        case 0: c->live[b] = bound; break;
        case 1: c->live[b] = 0; break;
        case 2: c->live[b] = b == 0 ? bound : 0; break;
        case 3: c->live[b] = b == c->batch.batch_size - 1 ? bound : 1; break;
        case 4: c->live[b] = (int32_t)ekv_rng_below(rng, 8) ? bound : INT32_MAX - bound; break;
        case 5: c->live[b] = (int32_t)ekv_rng_below(rng, 8) ? bound : (int32_t)ekv_rng_next(rng); break;
        case 6: c->live[b] = case_length(rng, 3, block); break;
        case 7: c->live[b] = ekv_rng_below(rng, 2) ? 0 : bound; break; /* padding rows */
        default: c->live[b] = (int32_t)ekv_rng_below(rng, (int64_t)bound + 1); break;
        }
        c->exact[b] = (int32_t)ekv_max(0, ekv_min(c->live[b], bound));
    }
}

/* batch_size: 0 for any. */
static inline on_device_case case_create(ekv_rng *rng, int32_t batch_size)
{
    static const char *const planners[] = { "even", "even-invariant", "fa3", "fa3-nosplit", "fa3-vllm" };
    on_device_case c = { .planner = planners[ekv_rng_below(rng, 5)],
                         .batch = EKV_BATCH_INIT,
                         .device = EKV_DEVICE_INIT,
                         .options = EKV_PLAN_OPTIONS_INIT };
    const int32_t n = batch_size ? batch_size : case_batch_size(rng);
    c.batch.batch_size = n;
    c.batch.kv_heads = n > 5000 ? PICK(rng, 1, 2, 4) : PICK(rng, 1, 1, 2, 4, 6, 8, 16);
    c.batch.q_heads = c.batch.kv_heads * PICK(rng, 1, 4, 8);
    c.batch.head_dim = PICK(rng, 64, 128, 256);
    c.batch.page_size = PICK(rng, 1, 7, 16, 64);
    c.batch.q_len = ekv_rng_below(rng, 16) ? 1 : PICK(rng, 2, 40); /* of fa3: several m_blocks */
    c.device.num_sms = PICK(rng, 1, 2, 7, 78, 108, 132, 132, 600);
    c.device.ctas_per_sm = PICK(rng, 1, 2, 3);
    c.device.sm_arch = PICK(rng, 0, 90, 90); /* what least_share is by default depends on it */
    c.device.request_cost_tokens = PICK(rng, 0, 12, 40);
    c.options.sm_margin = ekv_rng_below(rng, 8) ? 0 : c.device.num_sms / 3;
    c.options.heads_per_tile = ekv_rng_below(rng, 2) ? 0 : c.batch.kv_heads % 2 ? 1 : 2;
    c.options.block_tokens = PICK(rng, 0, 0, 1, 16, 24, 128);
    c.options.chunk_tokens = PICK(rng, 0, 0, 64, 100, 512);
    c.options.request_cost = PICK(rng, -1, -1, 0, 1, 16);
    c.options.least_share = PICK(rng, -1, -1, 0, 40, 700);
    c.options.no_sort = ekv_rng_below(rng, 4) == 0;
    c.options.dispatch = (ekv_dispatch)(ekv_rng_below(rng, 2) ? 0 : ekv_rng_below(rng, 4));
    c.bound = malloc((size_t)n * sizeof *c.bound);
    c.live = malloc((size_t)n * sizeof *c.live);
    c.exact = malloc((size_t)n * sizeof *c.exact);
    assert_true(c.bound && c.live && c.exact);
    const int32_t block = PICK(rng, 16, 64, 128, 256);
    const int64_t kind = ekv_rng_below(rng, 8);
    int32_t longest = 0;
    for (int32_t b = 0; b < n; b++) {
        c.bound[b] = case_length(rng, kind == 7 ? ekv_rng_below(rng, 7) : kind, block);
        if (n > 5000) /* tiles of even-invariant are as many as tokens allow */
            c.bound[b] = b == n / 2 ? 1000000 : (int32_t)ekv_min(c.bound[b], 300);
        longest = (int32_t)ekv_max(longest, c.bound[b]);
    }
    c.batch.kv_len = c.bound;
    if (ekv_rng_below(rng, 3) == 0)
        c.options.table_width = longest + PICK(rng, 0, 1, 50000);
    case_set_live(&c, rng);
    return c;
}

static inline void case_free(on_device_case *c)
{
    free(c->bound);
    free(c->live);
    free(c->exact);
}

/* The plan that the host makes of the exact lengths.  fa3's static bound follows from the width of the page table:
 * by default that of the upper bounds. */
static inline ekv_plan *case_host_plan(ekv_context *context, const on_device_case *c)
{
    ekv_batch batch = c->batch;
    ekv_plan_options options = c->options;
    batch.kv_len = c->exact;
    for (int32_t b = 0; !c->options.table_width && b < batch.batch_size; b++)
        options.table_width = ekv_max(options.table_width, c->bound[b]);
    ekv_plan *plan;
    assert_ok(ekv_plan_create(context, c->planner, &batch, &c->device, &options, &plan));
    return plan;
}

/* ---- Records ----------------------------------------------------------------------------------------- */

enum { RECORDS_POISON = 0xA5 };

/* The records of a plan in one block, header first. */
typedef struct record_block {
    unsigned char *bytes;       /* [size], poison where there is no record */
    size_t tiles, merges, ctas; /* offsets */
    size_t size;
} record_block;

static inline void expect_same_bytes(const unsigned char *got, const unsigned char *expected, size_t begin, size_t end,
                                     size_t record, const char *array, const char *where)
{
    for (size_t i = begin; i < end; i++)
        if (got[i] != expected[i])
            fail_msg("%s: %s %zu, byte %zu is 0x%02x; the host has 0x%02x", where, array, (i - begin) / record,
                     (i - begin) % record, got[i], expected[i]);
}

/* The plan's tiles as ekv_device_tile has them; free() them.  A search through all merges for each tile. */
static inline ekv_tile *device_tiles(const ekv_plan *plan)
{
    ekv_tile *tiles = malloc(((size_t)plan->num_tiles + 1) * sizeof *tiles);
    assert_non_null(tiles);
    memcpy(tiles, plan->tiles, (size_t)plan->num_tiles * sizeof *tiles);
    for (int64_t m = 0; m < plan->num_merges; m++) {
        const ekv_merge *merge = &plan->merges[m];
        for (int64_t i = 0; i < plan->num_tiles; i++)
            if (plan->tiles[i].flags & EKV_TILE_PARTIAL && plan->tiles[i].request == merge->request &&
                plan->tiles[i].m_block == merge->m_block && plan->tiles[i].head >= merge->head &&
                plan->tiles[i].head < merge->head + merge->head_count)
                tiles[i].m_block = (int32_t)m;
    }
    return tiles;
}

/* Fails unless the block is what the host writes for `plan`, and poison elsewhere. */
static inline void expect_records(const ekv_plan *plan, const record_block *got, const char *where)
{
    const bool ranges = plan->dispatch == EKV_DISPATCH_RANGE;
    const int32_t num_ctas = ranges ? (int32_t)ekv_plan_num_ctas(plan) : 0;
    const ekv_plan_header header = { .num_tiles = (int32_t)plan->num_tiles,
                                     .num_merges = (int32_t)plan->num_merges,
                                     .num_ctas = num_ctas,
                                     .batch_size = plan->batch.batch_size };
    unsigned char *bytes = malloc(got->size);
    ekv_tile *tiles = device_tiles(plan);
    assert_non_null(bytes);
    memset(bytes, RECORDS_POISON, got->size);
    memcpy(bytes, &header, sizeof header);
    memcpy(bytes + got->tiles, tiles, (size_t)plan->num_tiles * sizeof *plan->tiles);
    if (plan->num_merges)
        memcpy(bytes + got->merges, plan->merges, (size_t)plan->num_merges * sizeof *plan->merges);
    for (int32_t i = 0; i < num_ctas; i++) {
        const int32_t begin = (int32_t)plan->cta_begin[i], end = (int32_t)plan->cta_begin[i + 1];
        ekv_cta_record record = { .tile_begin = begin, .tile_end = end };
        if (begin < end)
            record.first = tiles[begin];
        memcpy(bytes + got->ctas + (size_t)i * sizeof record, &record, sizeof record);
    }
    expect_same_bytes(got->bytes, bytes, 0, got->tiles, sizeof header, "header", where);
    expect_same_bytes(got->bytes, bytes, got->tiles, got->merges, sizeof *plan->tiles, "tile", where);
    expect_same_bytes(got->bytes, bytes, got->merges, got->ctas, sizeof *plan->merges, "merge", where);
    expect_same_bytes(got->bytes, bytes, got->ctas, got->size, sizeof(ekv_cta_record), "CTA", where);
    free(tiles);
    free(bytes);
}

#endif
