/* SPDX-License-Identifier: Apache-2.0
 * What holds for every simulated plan, over seeded random batches and devices.
 *
 *     EKV_SEED=1234 test_sim_properties    only the batch of that seed, as a failure prints it */
#include "base/rng.h"
#include "sim_tests.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_plan_keeps_the_books),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
