/* SPDX-License-Identifier: Apache-2.0
 * The simulator against times that are worked out by hand, and what holds for every plan.
 *
 *     EKV_SEED=1234 test_sim    only the random batch of that seed, as a failure prints it */
#include "base/rng.h"
#include "one_context.h"
#include "plan/plan.h"
#include "sim/timeline.h"

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* cmocka compares in single precision. */
#define assert_near(value, expected, tolerance)                                 \
    do {                                                                        \
        const double value_ = (value), expected_ = (expected);                  \
        if (!(fabs(value_ - expected_) <= (tolerance)))                         \
            fail_msg("%s is %.12g, expected %.12g", #value, value_, expected_); \
    } while (0)

/* One head of 64 bf16: 256 bytes of K and V a token, 128 of Q, 128 of O, 4 a page of 16 tokens. */
static const double token_bytes = 256, q_bytes = 128, o_bytes = 128, page_bytes = 4, partial_bytes = 65 * 4;

static double tile_bytes(int32_t tokens)
{
    return tokens * token_bytes + (tokens ? q_bytes : 0) + o_bytes + (tokens + 15) / 16 * page_bytes;
}

/* A GPU whose CTAs and SMs are not limited but by what a test sets.  1 GB/s is 1,000 bytes a microsecond. */
static ekv_device make_device(int32_t num_sms)
{
    ekv_device device = EKV_DEVICE_INIT;
    strcpy(device.name, "test");
    device.num_sms = num_sms;
    device.sm_arch = 90;
    device.ctas_per_sm = 1;
    device.projected = 0;
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++)
        device.systems[s] = (ekv_system_model){ 1, 1e6, 1e6, 0, 0, 0 };
    return device;
}

static ekv_batch make_batch(const int32_t *kv_len, int32_t batch_size)
{
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = batch_size;
    batch.kv_len = kv_len;
    batch.q_heads = batch.kv_heads = 1;
    batch.head_dim = 64;
    return batch;
}

/* Plans and simulates with events; the caller frees both. */
static ekv_timeline_info simulate(const char *planner, const ekv_batch *batch, const ekv_device *device,
                                  const ekv_plan_options *plan_options, ekv_plan **plan, ekv_timeline **timeline)
{
    ekv_sim_options options = EKV_SIM_OPTIONS_INIT;
    ekv_timeline_info info = EKV_TIMELINE_INFO_INIT;
    options.events = 1;
    if (ekv_plan_create(context, planner, batch, device, plan_options, plan) ||
        ekv_simulate(*plan, NULL, &options, timeline) || ekv_timeline_info_get(*timeline, &info))
        fail_msg("%s: %s", planner, ekv_last_error());
    return info;
}

/* Without events, freeing all. */
static ekv_timeline_info simulate_only(const char *planner, const ekv_batch *batch, const ekv_device *device,
                                       const ekv_plan_options *plan_options)
{
    ekv_plan *plan;
    ekv_timeline *timeline;
    ekv_timeline_info info = simulate(planner, batch, device, plan_options, &plan, &timeline);
    ekv_timeline_free(timeline);
    ekv_plan_free(plan);
    return info;
}

/* none keeps 1 CTA an SM. */
static ekv_plan_options one_resident(void)
{
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.resident_ctas = 1;
    return options;
}

/* ---- By hand ----------------------------------------------------------------------------------------- */

static void one_sm_runs_tiles_in_turn(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 100, 50, 7 };
    const ekv_batch batch = make_batch(kv_len, 3);
    ekv_device device = make_device(1);
    device.systems[EKV_SYSTEM_EVENKV] = (ekv_system_model){ 2, 1e6, 1e6, 3, 10, 5 };
    const ekv_plan_options options = one_resident();
    ekv_plan *plan;
    ekv_timeline *timeline;
    const ekv_timeline_info info = simulate("none", &batch, &device, &options, &plan, &timeline);
    double at = 10; /* launch */
    for (int64_t i = 0; i < 3; i++) {
        ekv_timeline_event event;
        assert_int_equal(ekv_timeline_event_get(timeline, i, &event), EKV_OK);
        assert_int_equal(event.tile, i);
        assert_int_equal(event.sm, 0);
        assert_int_equal(event.slot, 0);
        assert_near(event.start_us, at, 1e-9);
        at += 3 + tile_bytes(kv_len[i]) / 2000;
        assert_near(event.stop_us, at, 1e-9);
    }
    assert_near(info.time_us, at, 1e-9); /* nothing is merged */
    assert_near(info.launch_us, 10, 0);
    assert_near(info.merge_us, 0, 0);
    assert_near(info.sm_busy_share, (at - 10) / at, 1e-9);
    assert_near(info.tail_us, 0, 1e-9);
    assert_int_equal(info.tail_tile, 2);
    assert_int_equal(info.tail_cause, EKV_TAIL_NONE);
    assert_int_equal(info.num_events, 3);
    assert_near(info.kv_gb_per_s, 157 * token_bytes / at / 1e3, 1e-9);
    ekv_timeline_free(timeline);
    ekv_plan_free(plan);
}

static void two_sms_and_three_equal_tiles_make_two_waves(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 64, 64, 64 };
    const ekv_batch batch = make_batch(kv_len, 3);
    const ekv_device device = make_device(2);
    const ekv_plan_options options = one_resident();
    const double tile = tile_bytes(64) / 1000;
    ekv_plan *plan;
    ekv_timeline *timeline;
    const ekv_timeline_info info = simulate("none", &batch, &device, &options, &plan, &timeline);
    assert_near(info.time_us, 2 * tile, 1e-9);
    assert_near(info.tail_us, tile, 1e-9);
    assert_near(info.sm_busy_share, 0.75, 1e-9);
    assert_int_equal(info.tail_tile, 2);
    assert_int_equal(info.tail_cause, EKV_TAIL_WHOLE_WAVE);
    static const int32_t sms[] = { 0, 1, 0 };
    for (int64_t i = 0; i < 3; i++) {
        ekv_timeline_event event;
        assert_int_equal(ekv_timeline_event_get(timeline, i, &event), EKV_OK);
        assert_int_equal(event.tile, i);
        assert_int_equal(event.sm, sms[i]);
        assert_near(event.start_us, i == 2 ? tile : 0, 1e-9);
    }
    ekv_timeline_free(timeline);
    ekv_plan_free(plan);
}

static void one_giant_tile_is_the_tail(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 10000, 10, 10, 10 };
    const ekv_batch batch = make_batch(kv_len, 4);
    const ekv_device device = make_device(4);
    const ekv_plan_options options = one_resident();
    const ekv_timeline_info info = simulate_only("none", &batch, &device, &options);
    assert_near(info.time_us, tile_bytes(10000) / 1000, 1e-9);
    assert_near(info.tail_us, (tile_bytes(10000) - tile_bytes(10)) / 1000, 1e-9);
    assert_int_equal(info.tail_tile, 0);
    assert_int_equal(info.tail_cause, EKV_TAIL_LONG_TILE);
    /* even cuts it: 629 blocks of 16 tokens on 4 CTAs. */
    const ekv_timeline_info even = simulate_only("even", &batch, &device, NULL);
    assert_true(even.time_us < info.time_us / 3.9);
}

static void no_tokens_and_no_tiles(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 0, 0 };
    const ekv_batch batch = make_batch(kv_len, 2);
    ekv_device device = make_device(4);
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++)
        device.systems[s] = (ekv_system_model){ 1, 1e6, 1e6, 2, 7, 3 };
    for (int32_t p = 0; ekv_planner_name(p); p++) {
        ekv_plan_options options = one_resident();
        const ekv_timeline_info info = simulate_only(ekv_planner_name(p), &batch, &device, &options);
        assert_true(info.time_us >= 7 && info.time_us < 20);
        assert_int_equal(info.kv_bytes, 0);
        assert_near(info.kv_gb_per_s, 0, 0);
    }
    /* A plan whose tiles are all gone. */
    ekv_plan *plan;
    ekv_timeline *timeline;
    ekv_timeline_info info = EKV_TIMELINE_INFO_INIT;
    assert_int_equal(ekv_plan_create(context, "fa3", &batch, &device, NULL, &plan), EKV_OK);
    plan->num_tiles = 0;
    assert_int_equal(ekv_simulate(plan, NULL, NULL, &timeline), EKV_OK);
    assert_int_equal(ekv_timeline_info_get(timeline, &info), EKV_OK);
    assert_near(info.time_us, 7, 0);
    assert_near(info.tail_us, 0, 0);
    assert_int_equal(info.tail_tile, -1);
    ekv_timeline_free(timeline);
    ekv_plan_free(plan);
}

/* ---- Sharing ----------------------------------------------------------------------------------------- */

/* n tiles of x1 <= x2 <= ... bytes on n SMs share a rate R equally: tile k ends x[k-1] to x[k] later than the one
 * before, in which n - k + 1 tiles move, unless they are slower on their own. */
static void fluid_sharing_has_a_closed_form(void **state)
{
    (void)state;
    enum { N = 7 };
    const int32_t kv_len[N] = { 1000, 1300, 1300, 2000, 5000, 9000, 10000 };
    const ekv_batch batch = make_batch(kv_len, N);
    ekv_device device = make_device(N);
    device.systems[EKV_SYSTEM_EVENKV] = (ekv_system_model){ 1, 1e6, 3.5, 0, 0, 0 };
    const ekv_plan_options options = one_resident();
    ekv_plan *plan;
    ekv_timeline *timeline;
    const ekv_timeline_info info = simulate("none", &batch, &device, &options, &plan, &timeline);
    double at = 0, moved = 0;
    for (int32_t k = 0; k < N; k++) {
        const double rate = fmin(1000, 3500.0 / (N - k));
        at += (tile_bytes(kv_len[k]) - moved) / rate;
        moved = tile_bytes(kv_len[k]);
        for (int64_t i = 0; i < N; i++) {
            ekv_timeline_event event;
            assert_int_equal(ekv_timeline_event_get(timeline, i, &event), EKV_OK);
            if (event.tile == k)
                assert_near(event.stop_us, at, 1e-6);
        }
    }
    assert_near(info.time_us, at, 1e-6);
    ekv_timeline_free(timeline);
    ekv_plan_free(plan);
}

/* Two CTAs on one SM and one on the other.  u = 0.5: alone 1, together 2 * (1 - 0.25) / 2 = 0.75 each. */
static void ctas_of_an_sm_wait_for_the_same_units(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 4000, 4000, 4000 };
    const ekv_batch batch = make_batch(kv_len, 3);
    ekv_device device = make_device(2);
    device.systems[EKV_SYSTEM_EVENKV] = (ekv_system_model){ 1, 2, 1e6, 0, 0, 0 };
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.resident_ctas = 2;
    const double bytes = tile_bytes(4000);
    assert_near(simulate_only("none", &batch, &device, &options).time_us, bytes / 750, 1e-6);
    /* The lone one is the only one that the total cuts: 2.2 = 2 * 0.75 + 0.7. */
    device.systems[EKV_SYSTEM_EVENKV].total_gb_per_s = 2.2;
    ekv_plan *plan;
    ekv_timeline *timeline;
    simulate("none", &batch, &device, &options, &plan, &timeline);
    for (int64_t i = 0; i < 3; i++) {
        ekv_timeline_event event;
        assert_int_equal(ekv_timeline_event_get(timeline, i, &event), EKV_OK);
        const double share = 2200.0 / 3; /* max-min: all three below their own 0.75 */
        assert_near(event.stop_us, bytes / share, 1e-6);
    }
    ekv_timeline_free(timeline);
    ekv_plan_free(plan);
}

/* ---- Real devices ------------------------------------------------------------------------------------ */

static ekv_device find_device(const char *name)
{
    ekv_device device = EKV_DEVICE_INIT;
    assert_int_equal(ekv_device_find(name, &device), EKV_OK);
    return device;
}

/* tokens spread evenly over batch_size requests. */
static ekv_timeline_info simulate_uniform(const char *planner, const ekv_device *device, int32_t batch_size,
                                          int32_t tokens)
{
    int32_t *kv_len = calloc((size_t)batch_size, sizeof *kv_len);
    for (int32_t b = 0; b < batch_size; b++)
        kv_len[b] = tokens / batch_size + (b < tokens % batch_size);
    ekv_batch batch = make_batch(kv_len, batch_size);
    batch.q_heads = 32;
    batch.kv_heads = 4;
    batch.head_dim = 128;
    const ekv_timeline_info info = simulate_only(planner, &batch, device, NULL);
    free(kv_len);
    return info;
}

/* FlashAttention-3 computes 128 rows a tile: 128 FLOP a byte of K and V, and an H20 has 148 TFLOP/s. */
static void fa3_on_an_h20_is_bound_by_its_matrix_units(void **state)
{
    (void)state;
    const ekv_device h20 = find_device("h20");
    for (int32_t batch_size = 1; batch_size <= 2048; batch_size *= 2)
        assert_true(simulate_uniform("fa3", &h20, batch_size, 524288).time_us >= 900);
    assert_true(simulate_uniform("flashinfer-tensor-core", &h20, 32, 524288).time_us < 500); /* 16 rows */
    assert_int_equal(simulate_uniform("fa3", &h20, 32, 524288).projected, 1);
    const ekv_device h200 = find_device("h200");
    assert_int_equal(simulate_uniform("fa3", &h200, 32, 524288).projected, 0);
    assert_true(simulate_uniform("fa3", &h200, 128, 524288).time_us < 320);
}

/* Measured on an H200 (data/h200-systems.csv): 422 against 375 us at 18 requests, 442 against 438 at 34. */
static void waves_on_even_lengths_have_their_causes(void **state)
{
    (void)state;
    const ekv_device h200 = find_device("h200");
    for (int32_t batch_size = 18; batch_size <= 28; batch_size += batch_size == 18 ? 2 : 4) {
        const ekv_timeline_info split = simulate_uniform("fa3", &h200, batch_size, 524288);
        assert_int_equal(split.tail_cause, EKV_TAIL_SPLIT_WAVE);
        assert_true(split.time_us > simulate_uniform("fa3-nosplit", &h200, batch_size, 524288).time_us * 1.02);
    }
    static const int32_t whole[] = { 34, 36, 40, 44, 48, 80 };
    for (int i = 0; i < 6; i++) {
        const ekv_timeline_info split = simulate_uniform("fa3", &h200, whole[i], 524288);
        const ekv_timeline_info nosplit = simulate_uniform("fa3-nosplit", &h200, whole[i], 524288);
        assert_int_equal(split.tail_cause, EKV_TAIL_WHOLE_WAVE);
        assert_int_equal(nosplit.tail_cause, EKV_TAIL_WHOLE_WAVE);
        assert_true(fabs(split.time_us / nosplit.time_us - 1) < 0.02);
        assert_true(split.time_us > 1.1 * simulate_uniform("fa3", &h200, 32, 524288).time_us);
    }
}

/* Blocks of 128 tokens are read whole, and a padded grid's CTAs without a tile take their turn. */
static void padding_costs(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 129 };
    const ekv_batch batch = make_batch(kv_len, 1);
    ekv_device device = make_device(1);
    ekv_timeline_info info = simulate_only("fa3", &batch, &device, NULL);
    assert_int_equal(info.kv_bytes, 256 * (int64_t)token_bytes);
    info = simulate_only("even", &batch, &device, NULL);
    assert_int_equal(info.kv_bytes, 129 * (int64_t)token_bytes);

    device.systems[EKV_SYSTEM_FLASHINFER_TENSOR_CORE].tile_us = 4;
    ekv_plan_options options = one_resident();
    const double plain = simulate_only("flashinfer-tensor-core", &batch, &device, &options).time_us;
    options.cuda_graph = 1;
    ekv_plan *plan;
    ekv_timeline *timeline;
    info = simulate("flashinfer-tensor-core", &batch, &device, &options, &plan, &timeline);
    const int64_t empty = plan->max_work_items - plan->num_work_items;
    assert_true(empty >= 0 && info.time_us >= plain + 4.0 * (double)empty - 1e-6);
    ekv_timeline_free(timeline);
    ekv_plan_free(plan);
}

static void merges_are_charged(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 4096 };
    const ekv_batch batch = make_batch(kv_len, 1);
    ekv_device device = make_device(4);
    device.systems[EKV_SYSTEM_EVENKV] = (ekv_system_model){ 1, 1e6, 2, 0, 0, 6 };
    const ekv_timeline_info info = simulate_only("even", &batch, &device, NULL);
    /* 4 partial results are written, then read; O is written once. */
    assert_int_equal(info.partial_bytes, 8 * (int64_t)partial_bytes);
    assert_int_equal(info.o_bytes, (int64_t)o_bytes);
    assert_near(info.merge_us, 6 + (4 * partial_bytes + o_bytes) / 2000, 1e-9);
    const double moved = 4096 * token_bytes + 4 * (q_bytes + partial_bytes) + 256 * page_bytes;
    assert_near(info.time_us, moved / 2000 + info.merge_us, 1e-3); /* four equal tiles share 2 GB/s */
}

/* ---- For every plan ---------------------------------------------------------------------------------- */

enum { RANDOM_BATCHES = 150, MAX_BATCH = 400 };

typedef struct random_case {
    int32_t kv_len[MAX_BATCH];
    ekv_batch batch;
    ekv_device device;
} random_case;

static void make_case(uint64_t seed, random_case *c)
{
    ekv_rng rng = { seed };
    const int32_t batch_size = (int32_t)(1 + ekv_rng_below(&rng, ekv_rng_below(&rng, 2) ? 8 : MAX_BATCH));
    for (int32_t b = 0; b < batch_size; b++)
        c->kv_len[b] = (int32_t)ekv_rng_below(&rng, ekv_rng_below(&rng, 10) ? 700 : 60000);
    c->batch = make_batch(c->kv_len, batch_size);
    c->batch.kv_heads = (int32_t)(1 + ekv_rng_below(&rng, 4));
    c->batch.q_heads = c->batch.kv_heads * (int32_t)(1 + ekv_rng_below(&rng, 8));
    c->batch.head_dim = 128;
    c->device = make_device((int32_t)(1 + ekv_rng_below(&rng, 140)));
    c->device.ctas_per_sm = (int32_t)(1 + ekv_rng_below(&rng, 3));
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++)
        c->device.systems[s] = (ekv_system_model){ 1 + 50 * ekv_rng_unit(&rng),    1 + 100 * ekv_rng_unit(&rng),
                                                   10 + 4000 * ekv_rng_unit(&rng), 5 * ekv_rng_unit(&rng),
                                                   20 * ekv_rng_unit(&rng),        10 * ekv_rng_unit(&rng) };
}

#define CHECK(seed, planner, condition)                                                                            \
    do {                                                                                                           \
        if (!(condition))                                                                                          \
            fail_msg("EKV_SEED=%" PRIu64 ", planner %s: %s does not hold", (uint64_t)(seed), planner, #condition); \
    } while (0)

/* Every tile runs once, on an SM and slot that are there, after the launch, and no two at a time in a slot. */
static void check_events(uint64_t seed, const char *planner, const ekv_plan *plan, const ekv_timeline *timeline,
                         const ekv_timeline_info *info)
{
    const int64_t slots = (int64_t)info->num_sms * info->slots_per_sm;
    double *free_at = calloc((size_t)slots, sizeof *free_at), last = info->launch_us;
    char *seen = calloc((size_t)plan->num_tiles + 1, 1);
    CHECK(seed, planner, info->num_events == plan->num_tiles);
    double before = 0;
    for (int64_t i = 0; i < info->num_events; i++) {
        ekv_timeline_event e;
        CHECK(seed, planner, ekv_timeline_event_get(timeline, i, &e) == EKV_OK);
        CHECK(seed, planner, e.tile >= 0 && e.tile < plan->num_tiles && !seen[e.tile]);
        CHECK(seed, planner, e.sm >= 0 && e.sm < info->num_sms && e.slot >= 0 && e.slot < info->slots_per_sm);
        double *slot = &free_at[(int64_t)e.sm * info->slots_per_sm + e.slot];
        CHECK(seed, planner, e.start_us >= *slot - 1e-6 && e.start_us >= info->launch_us && e.stop_us >= e.start_us);
        CHECK(seed, planner, e.start_us >= before);
        *slot = e.stop_us;
        before = e.start_us;
        last = fmax(last, e.stop_us);
        seen[e.tile] = 1;
    }
    CHECK(seed, planner, fabs(last + info->merge_us - info->time_us) < 1e-6 * info->time_us);
    free(seen);
    free(free_at);
}

static void check_info(uint64_t seed, const char *planner, const ekv_plan *plan, const random_case *c,
                       const ekv_timeline_info *info)
{
    const ekv_system_model *model = &c->device.systems[plan->planner->system];
    int64_t tokens = 0, read = 0;
    for (int32_t b = 0; b < c->batch.batch_size; b++)
        tokens += c->kv_len[b];
    for (int64_t i = 0; i < plan->num_tiles; i++) {
        const ekv_tile *tile = &plan->tiles[i];
        read += ekv_round_up(tile->kv_end - tile->kv_begin, plan->planner->system == EKV_SYSTEM_FA3 ? 128 : 1) *
                tile->head_count;
    }
    /* What the tiles have is what is moved; less than the batch has it cannot be. */
    CHECK(seed, planner, info->kv_bytes == read * 512);
    CHECK(seed, planner, info->kv_bytes >= tokens * c->batch.kv_heads * 512);
    CHECK(seed, planner, info->o_bytes == (int64_t)c->batch.batch_size * c->batch.q_heads * 128 * 2);
    CHECK(seed, planner, info->sm_busy_share >= 0 && info->sm_busy_share <= 1 + 1e-9);
    CHECK(seed, planner, info->tail_us >= 0 && info->tail_us <= info->time_us);
    /* No faster than the memory. */
    const double all =
        (double)(info->kv_bytes + info->q_bytes + info->o_bytes + info->partial_bytes + info->table_bytes);
    CHECK(seed, planner, info->time_us >= (all / (model->total_gb_per_s * 1e3)) * (1 - 1e-9));
    CHECK(seed, planner, info->time_us >= model->launch_us);
}

static ekv_timeline_info run_case(const char *planner, const random_case *c, const ekv_device *device)
{
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    if (!strcmp(planner, "flashinfer-cuda-core"))
        options.resident_ctas = 5; /* for groups that nobody measured */
    return simulate_only(planner, &c->batch, device, &options);
}

/* Where each CTA's work is fixed and all run from the beginning, a faster memory or CTA never takes longer.  (With a
 * queue it may: another order of tiles can be worse.)  Faster SMs may by a little, 2.3 % at most in 5,000 batches: SMs
 * with several CTAs then take memory from one whose only CTA is the last to end. */
static void check_monotone(uint64_t seed, const char *planner, const random_case *c, double time_us)
{
    static const size_t rates[] = { offsetof(ekv_system_model, cta_gb_per_s), offsetof(ekv_system_model, sm_gb_per_s),
                                    offsetof(ekv_system_model, total_gb_per_s) };
    for (int i = 0; i < 3; i++) {
        ekv_device faster = c->device;
        for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++)
            *(double *)(void *)((char *)&faster.systems[s] + rates[i]) *= 1.5;
        const double allowed = i == 1 ? 0.05 : 1e-9;
        CHECK(seed, planner, run_case(planner, c, &faster).time_us <= time_us * (1 + allowed));
    }
}

static void check_case(uint64_t seed)
{
    static random_case c;
    make_case(seed, &c);
    for (int32_t p = 0; ekv_planner_name(p); p++) {
        const char *planner = ekv_planner_name(p);
        ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
        if (!strcmp(planner, "flashinfer-cuda-core"))
            options.resident_ctas = 5;
        ekv_plan *plan;
        ekv_timeline *timeline;
        const ekv_timeline_info info = simulate(planner, &c.batch, &c.device, &options, &plan, &timeline);
        check_events(seed, planner, plan, timeline, &info);
        check_info(seed, planner, plan, &c, &info);
        /* The same bytes again, in memory that had another simulation. */
        ekv_timeline again = { .context = context };
        assert_int_equal(ekv_timeline_run(&again, plan, &c.device, -1, false), EKV_OK);
        assert_int_equal(ekv_timeline_run(&again, plan, &c.device, -1, true), EKV_OK);
        CHECK(seed, planner, again.info.time_us == info.time_us && again.info.tail_us == info.tail_us);
        CHECK(seed, planner, !memcmp(again.events, timeline->events, (size_t)plan->num_tiles * sizeof *again.events));
        ekv_timeline_clear(&again);
        if (plan->dispatch == EKV_DISPATCH_RANGE)
            check_monotone(seed, planner, &c, info.time_us);
        ekv_timeline_free(timeline);
        ekv_plan_free(plan);
    }
}

static void every_plan_keeps_the_books(void **state)
{
    (void)state;
    const char *seed = getenv("EKV_SEED");
    if (seed)
        check_case(strtoull(seed, NULL, 10));
    for (uint64_t i = 1; !seed && i <= RANDOM_BATCHES; i++)
        check_case(i);
}

/* The tiles of `even` and more SMs to run them: never slower but by a block and a merge more. */
static void more_sms_help(void **state)
{
    (void)state;
    double before = INFINITY;
    for (int32_t sms = 1; sms <= 128; sms *= 2) {
        const ekv_device device = make_device(sms);
        const int32_t kv_len[] = { 50000, 300, 7000, 1, 0, 20000 };
        const ekv_batch batch = make_batch(kv_len, 6);
        const double us = simulate_only("even", &batch, &device, NULL).time_us;
        assert_true(us < before / 1.5);
        before = us;
    }
}

/* ---- Errors ------------------------------------------------------------------------------------------ */

static void arguments_are_checked(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 100 };
    const ekv_batch batch = make_batch(kv_len, 1);
    ekv_device device = make_device(2);
    ekv_plan *plan;
    ekv_timeline *timeline = NULL;
    ekv_timeline_info info = EKV_TIMELINE_INFO_INIT;
    ekv_timeline_event event;
    ekv_sim_options options = EKV_SIM_OPTIONS_INIT;
    assert_int_equal(ekv_plan_create(context, "fa3", &batch, &device, NULL, &plan), EKV_OK);
    assert_int_equal(ekv_simulate(NULL, NULL, NULL, &timeline), EKV_ERROR_INVALID_ARGUMENT);
    assert_int_equal(ekv_simulate(plan, NULL, NULL, NULL), EKV_ERROR_INVALID_ARGUMENT);
    options.system = EKV_NUM_SYSTEMS;
    assert_int_equal(ekv_simulate(plan, NULL, &options, &timeline), EKV_ERROR_INVALID_ARGUMENT);
    options.system = -2;
    assert_int_equal(ekv_simulate(plan, NULL, &options, &timeline), EKV_ERROR_INVALID_ARGUMENT);
    options.system = -1;
    options.events = 2;
    assert_int_equal(ekv_simulate(plan, NULL, &options, &timeline), EKV_ERROR_INVALID_ARGUMENT);

    device.systems[EKV_SYSTEM_FA3] = (ekv_system_model){ 0 };
    assert_int_equal(ekv_simulate(plan, &device, NULL, &timeline), EKV_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ekv_last_error(), "device test has no constants of fa3"));
    static const double nonsense[] = { -1, 0, NAN, INFINITY, 1e10 };
    for (int i = 0; i < 5; i++) {
        device.systems[EKV_SYSTEM_FA3] = (ekv_system_model){ 1, nonsense[i], 1, 1, 1, 1 };
        assert_int_equal(ekv_simulate(plan, &device, NULL, &timeline), EKV_ERROR_INVALID_ARGUMENT);
        device.systems[EKV_SYSTEM_FA3] = (ekv_system_model){ 1, 1, 1, 1, i == 1 ? -0.1 : nonsense[i], 1 };
        assert_int_equal(ekv_simulate(plan, &device, NULL, &timeline), EKV_ERROR_INVALID_ARGUMENT);
    }
    device.num_sms = 0;
    assert_int_equal(ekv_simulate(plan, &device, NULL, &timeline), EKV_ERROR_INVALID_ARGUMENT);
    assert_null(timeline);

    assert_int_equal(ekv_timeline_info_get(NULL, &info), EKV_ERROR_INVALID_ARGUMENT);
    assert_int_equal(ekv_simulate(plan, NULL, NULL, &timeline), EKV_OK);
    assert_int_equal(ekv_timeline_info_get(timeline, NULL), EKV_ERROR_INVALID_ARGUMENT);
    assert_int_equal(ekv_timeline_info_get(timeline, &info), EKV_OK);
    assert_int_equal(info.num_events, 0);
    assert_int_equal(ekv_timeline_event_get(timeline, 0, &event), EKV_ERROR_INVALID_ARGUMENT);
    assert_int_equal(ekv_timeline_event_get(timeline, -1, &event), EKV_ERROR_INVALID_ARGUMENT);
    ekv_timeline_free(timeline);
    ekv_timeline_free(NULL);
    ekv_plan_free(plan);
}

/* A program built before devices had systems: it can plan, and hears why it cannot simulate. */
static void older_devices_have_no_constants(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 100 };
    const ekv_batch batch = make_batch(kv_len, 1);
    ekv_device device = find_device("h200");
    device.struct_size = offsetof(ekv_device, systems);
    ekv_plan *plan;
    ekv_timeline *timeline = NULL;
    assert_int_equal(ekv_plan_create(context, "even", &batch, &device, NULL, &plan), EKV_OK);
    assert_int_equal(ekv_simulate(plan, NULL, NULL, &timeline), EKV_ERROR_UNSUPPORTED);
    const ekv_device full = find_device("h200");
    assert_int_equal(ekv_simulate(plan, &full, NULL, &timeline), EKV_OK);
    ekv_timeline_free(timeline);
    ekv_plan_free(plan);
    assert_int_equal(ekv_device_find("h20", &device), EKV_OK); /* filled as far as it goes */
    assert_int_equal(device.num_sms, 78);
}

/* A plan for one device on another, with fewer SMs than it has CTAs. */
static void a_plan_runs_on_another_device(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 5000, 100, 100 };
    const ekv_batch batch = make_batch(kv_len, 3);
    const ekv_device many = make_device(16), one = make_device(1);
    ekv_plan *plan;
    assert_int_equal(ekv_plan_create(context, "even", &batch, &many, NULL, &plan), EKV_OK);
    ekv_timeline *on_many, *on_one;
    ekv_timeline_info a = EKV_TIMELINE_INFO_INIT, b = EKV_TIMELINE_INFO_INIT;
    assert_int_equal(ekv_simulate(plan, NULL, NULL, &on_many), EKV_OK);
    assert_int_equal(ekv_simulate(plan, &one, NULL, &on_one), EKV_OK);
    assert_int_equal(ekv_timeline_info_get(on_many, &a), EKV_OK);
    assert_int_equal(ekv_timeline_info_get(on_one, &b), EKV_OK);
    assert_int_equal(b.kv_bytes, a.kv_bytes);
    assert_true(b.time_us > 10 * a.time_us && b.time_us < 16.1 * a.time_us);
    ekv_timeline_free(on_many);
    ekv_timeline_free(on_one);
    ekv_plan_free(plan);
}

static void systems_have_names(void **state)
{
    (void)state;
    assert_string_equal(ekv_system_name(EKV_SYSTEM_EVENKV), "evenkv");
    assert_string_equal(ekv_system_name(EKV_SYSTEM_FA3), "fa3");
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++)
        assert_non_null(ekv_system_name(s));
    assert_null(ekv_system_name(EKV_NUM_SYSTEMS));
    assert_null(ekv_system_name(-1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_sm_runs_tiles_in_turn),
        cmocka_unit_test(two_sms_and_three_equal_tiles_make_two_waves),
        cmocka_unit_test(one_giant_tile_is_the_tail),
        cmocka_unit_test(no_tokens_and_no_tiles),
        cmocka_unit_test(fluid_sharing_has_a_closed_form),
        cmocka_unit_test(ctas_of_an_sm_wait_for_the_same_units),
        cmocka_unit_test(fa3_on_an_h20_is_bound_by_its_matrix_units),
        cmocka_unit_test(waves_on_even_lengths_have_their_causes),
        cmocka_unit_test(padding_costs),
        cmocka_unit_test(merges_are_charged),
        cmocka_unit_test(every_plan_keeps_the_books),
        cmocka_unit_test(more_sms_help),
        cmocka_unit_test(arguments_are_checked),
        cmocka_unit_test(older_devices_have_no_constants),
        cmocka_unit_test(a_plan_runs_on_another_device),
        cmocka_unit_test(systems_have_names),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
