/* SPDX-License-Identifier: Apache-2.0
 * What the kernels of planning on a GPU compute, on the CPU: the functions of even_emit.h and fa3_emit.h with every
 * CTA and thread by itself, last ones first, against the plans of the host.
 *
 *     EKV_SEED=1234 test_on_device    only the case of that seed, as a failure prints it */
#include "on_device_cases.h"
#include "one_context.h"
#include "plan/even_emit.h"
#include "plan/planner_even.h"
#include "plan/planner_fa3.h"

enum { NUM_CASES = 3000, LARGE_EVERY = 500, LARGEST_BATCH = 65537 };

typedef struct records {
    ekv_plan_header *header;
    ekv_tile *tiles;
    ekv_merge *merges;
    ekv_cta_record *ctas;
} records;

/* Room for what `plan` can become. */
static records create_records(const ekv_plan *plan, record_block *block)
{
    const ekv_plan_capacity *c = &plan->capacity;
    block->tiles = sizeof(ekv_plan_header);
    block->merges = block->tiles + (size_t)c->tiles * sizeof(ekv_tile);
    block->ctas = block->merges + (size_t)c->merges * sizeof(ekv_merge);
    block->size = block->ctas + (size_t)c->ctas * sizeof(ekv_cta_record);
    block->bytes = malloc(block->size);
    assert_non_null(block->bytes);
    memset(block->bytes, RECORDS_POISON, block->size);
    return (records){ (void *)block->bytes, (void *)(block->bytes + block->tiles),
                      (void *)(block->bytes + block->merges), (void *)(block->bytes + block->ctas) };
}

static void write_header(const ekv_plan *plan, const records *r, int32_t num_tiles, int32_t num_merges)
{
    const bool ranges = plan->dispatch == EKV_DISPATCH_RANGE;
    *r->header = (ekv_plan_header){ .num_tiles = num_tiles,
                                    .num_merges = num_merges,
                                    .num_ctas = ranges ? (int32_t)ekv_plan_num_ctas(plan) : 0,
                                    .batch_size = plan->batch.batch_size };
}

/* ---- even, even-invariant ---------------------------------------------------------------------------- */

typedef struct even_sums {
    int64_t *cost;
    int32_t *partial, *cut;
    ekv_even_mark *marks;
} even_sums;

static ekv_even_chunk_line sum_requests(const ekv_plan *plan, const int32_t *kv_len, bool invariant, even_sums *s)
{
    ekv_even_line line = ekv_even_line_of(plan);
    s->cost[0] = s->partial[0] = s->cut[0] = 0;
    for (int32_t b = 0; b < line.batch_size; b++) {
        const int32_t n = ekv_even_num_chunks(kv_len[b], line.block_tokens);
        s->cost[b + 1] = s->cost[b] + (invariant ? ekv_even_chunks_cost(kv_len[b], n, line.request_cost)
                                                 : ekv_even_cost(kv_len[b], line.block_tokens, line.request_cost));
        s->partial[b + 1] = s->partial[b] + (n > 1 ? n : 0);
        s->cut[b + 1] = s->cut[b] + (n > 1);
    }
    line.cost = s->cost;
    line.kv_len = kv_len;
    ekv_even_sum(&line);
    return (ekv_even_chunk_line){ { line, s->partial }, s->cut };
}

static void mark_ctas(const ekv_even_chunk_line *line, int32_t num_ctas, bool invariant, ekv_even_mark *marks)
{
    for (int32_t i = num_ctas; i >= 0; i--) {
        ekv_even_mark *mark = &marks[i];
        if (invariant) {
            mark->place = ekv_even_chunk_begin(&line->chunks, i);
            mark->tiles = ekv_even_chunk_index(line, mark->place);
            mark->merges = ekv_even_merges_before(line, mark->place.request);
        } else {
            mark->place = ekv_even_begin(&line->chunks.line, i);
        }
    }
    marks[0].tiles = marks[0].merges = 0;
    for (int32_t i = 0; i < num_ctas && !invariant; i++) {
        const ekv_even_place begin = marks[i].place, end = marks[i + 1].place;
        marks[i + 1].tiles = marks[i].tiles + ekv_even_num_pieces(&line->chunks.line, begin, end);
        marks[i + 1].merges = marks[i].merges + ekv_even_num_merges(begin, end);
    }
}

static void emit_even(const ekv_plan *plan, const int32_t *kv_len, const records *r)
{
    const bool invariant = plan->planner->device_rule == EKV_DEVICE_RULE_EVEN_INVARIANT;
    const size_t requests = (size_t)plan->batch.batch_size + 1;
    const int32_t num_ctas = plan->num_sms * plan->resident_ctas;
    even_sums s = { malloc(requests * sizeof *s.cost), malloc(requests * sizeof *s.partial),
                    malloc(requests * sizeof *s.cut), malloc(((size_t)num_ctas + 1) * sizeof *s.marks) };
    assert_true(s.cost && s.partial && s.cut && s.marks);
    const ekv_even_chunk_line line = sum_requests(plan, kv_len, invariant, &s);
    mark_ctas(&line, num_ctas, invariant, s.marks);
    write_header(plan, r, s.marks[num_ctas].tiles, s.marks[num_ctas].merges);
    for (int32_t cta = num_ctas - 1; cta >= 0; cta--) {
        const ekv_even_mark *mark = &s.marks[cta];
        ekv_tile tile = { 0 };
        for (int32_t k = mark[1].tiles - mark[0].tiles - 1; k >= 0; k--) {
            ekv_merge merge;
            int32_t index;
            if (invariant)
                index = ekv_even_chunk_piece(&line, mark, k, &tile, &merge);
            else if ((index = ekv_even_piece(&line.chunks.line, cta, mark, k, &tile, &merge)) >= 0)
                index = s.marks[index].merges;
            tile = ekv_device_tile(tile, index);
            r->tiles[mark[0].tiles + k] = tile;
            if (index >= 0 && tile.kv_begin == 0)
                r->merges[index] = merge;
        }
        if (plan->dispatch == EKV_DISPATCH_RANGE)
            r->ctas[cta] = (ekv_cta_record){ .tile_begin = mark[0].tiles, .tile_end = mark[1].tiles, .first = tile };
    }
    free(s.cost);
    free(s.partial);
    free(s.cut);
    free(s.marks);
}

/* ---- fa3 --------------------------------------------------------------------------------------------- */

typedef struct keyed_work {
    uint64_t key;
    ekv_fa3_work work;
} keyed_work;

static int by_key(const void *a, const void *b)
{
    const uint64_t x = ((const keyed_work *)a)->key, y = ((const keyed_work *)b)->key;
    return x < y ? -1 : x > y;
}

static void emit_fa3(const ekv_plan *plan, const int32_t *kv_len, const records *r)
{
    const ekv_fa3_shape shape = ekv_fa3_shape_of(plan);
    const size_t requests = (size_t)shape.batch_size;
    keyed_work *keyed = malloc(requests * sizeof *keyed);
    ekv_fa3_work *works = malloc(requests * sizeof *works);
    assert_true(keyed && works);
    int64_t blocks = 0;
    int32_t partials = 0, merges = 0, tiles = 0;
    for (int32_t b = 0; b < shape.batch_size; b++)
        blocks += ekv_fa3_blocks(&shape, kv_len[b]);
    for (int32_t b = 0; b < shape.batch_size; b++) {
        ekv_fa3_work *work = &keyed[b].work;
        *work = ekv_fa3_split(&shape, b, kv_len[b], ekv_fa3_split_target(&shape, blocks));
        keyed[b].key = ekv_fa3_key(&shape, work, b % EKV_FA3_PREPARE_REQUESTS);
        work->partial_base = partials;
        work->merge_begin = merges;
        partials += ekv_fa3_num_partials(&shape, work);
        merges += ekv_fa3_num_merges(&shape, work);
    }
    for (int32_t b = 0; b < shape.batch_size; b += EKV_FA3_PREPARE_REQUESTS)
        qsort(keyed + b, (size_t)ekv_min(shape.batch_size - b, EKV_FA3_PREPARE_REQUESTS), sizeof *keyed, by_key);
    for (int32_t i = 0; i < shape.batch_size; i++) {
        works[i] = keyed[i].work;
        works[i].tile_begin = tiles;
        tiles += ekv_fa3_num_tiles(&shape, &works[i]);
    }
    write_header(plan, r, tiles, merges);
    for (int32_t i = shape.batch_size - 1; i >= 0; i--) {
        for (int32_t k = ekv_fa3_num_tiles(&shape, &works[i]) - 1; k >= 0; k--)
            r->tiles[works[i].tile_begin + k] = ekv_fa3_piece(&shape, &works[i], k);
        for (int32_t m = ekv_fa3_num_merges(&shape, &works[i]) - 1; m >= 0; m--)
            r->merges[works[i].merge_begin + m] = ekv_fa3_merge(&shape, &works[i], m);
    }
    const int64_t num_ctas = r->header->num_ctas;
    for (int64_t cta = 0; cta < num_ctas; cta++) {
        ekv_cta_record *record = &r->ctas[cta];
        *record = (ekv_cta_record){ .tile_begin = (int32_t)(cta * tiles / num_ctas),
                                    .tile_end = (int32_t)((cta + 1) * tiles / num_ctas) };
        if (record->tile_begin < record->tile_end)
            record->first = ekv_fa3_find(&shape, works, record->tile_begin);
    }
    free(keyed);
    free(works);
}

/* ---- Tests ------------------------------------------------------------------------------------------- */

static void check_case(uint64_t seed)
{
    ekv_rng rng = { seed };
    on_device_case c = case_create(&rng, seed % LARGE_EVERY ? 0 : LARGEST_BATCH);
    char where[96];
    snprintf(where, sizeof where, "EKV_SEED=%" PRIu64 ": %s, %d requests", seed, c.planner, c.batch.batch_size);
    ekv_plan *bounds, *exact = case_host_plan(context, &c);
    assert_ok(ekv_plan_create(context, c.planner, &c.batch, &c.device, &c.options, &bounds));
    record_block block;
    const records r = create_records(bounds, &block);
    if (bounds->planner->device_rule == EKV_DEVICE_RULE_FA3)
        emit_fa3(bounds, c.exact, &r);
    else
        emit_even(bounds, c.exact, &r);
    expect_records(exact, &block, where);
    free(block.bytes);
    ekv_plan_free(bounds);
    ekv_plan_free(exact);
    case_free(&c);
}

static void every_thread_by_itself_writes_the_host_plan(void **state)
{
    (void)state;
    const char *seed = getenv("EKV_SEED");
    if (seed) {
        check_case(strtoull(seed, NULL, 10));
        return;
    }
    for (uint64_t i = 1; i <= NUM_CASES; i++)
        check_case(i);
}

static void planners_say_whether_they_run_on_a_gpu(void **state)
{
    (void)state;
    static const char *const on_device[] = { "even", "even-invariant", "fa3", "fa3-nosplit", "fa3-vllm" };
    for (int32_t i = 0; ekv_planner_name(i); i++) {
        bool listed = false;
        for (size_t j = 0; j < sizeof on_device / sizeof on_device[0]; j++)
            listed = listed || !strcmp(ekv_planner_name(i), on_device[j]);
        on_device_case c = { .batch = EKV_BATCH_INIT, .device = EKV_DEVICE_INIT, .options = EKV_PLAN_OPTIONS_INIT };
        const int32_t kv_len[] = { 100, 0 };
        c.batch.batch_size = 2;
        c.batch.kv_len = kv_len;
        c.batch.q_heads = 8;
        c.batch.kv_heads = 1;
        c.batch.head_dim = 128;
        c.device.num_sms = 132;
        c.options.on_device = c.options.cuda = 1;
        ekv_plan *plan = NULL;
        /* This context has no GPU, which is found out last. */
        assert_fails(ekv_plan_create(context, ekv_planner_name(i), &c.batch, &c.device, &c.options, &plan),
                     listed ? EKV_ERROR_BACKEND_UNAVAILABLE : EKV_ERROR_UNSUPPORTED, listed ? "CUDA" : "on_device");
        assert_null(plan);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_thread_by_itself_writes_the_host_plan),
        cmocka_unit_test(planners_say_whether_they_run_on_a_gpu),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
