/* SPDX-License-Identifier: Apache-2.0
 * The simulator against times that are worked out by hand, and its errors. */
#include "sim_tests.h"

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

/* ---- More SMs --------------------------------------------------------------------------------------- */

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
    const int32_t kv_len[] = { 50000, 1000, 1000 };
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
        cmocka_unit_test(more_sms_help),
        cmocka_unit_test(arguments_are_checked),
        cmocka_unit_test(older_devices_have_no_constants),
        cmocka_unit_test(a_plan_runs_on_another_device),
        cmocka_unit_test(systems_have_names),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
