/* SPDX-License-Identifier: Apache-2.0
 * Single cases of the CUDA backend: far strides, large batches, merges of states, refusals, device, timeline. */
#include "gpu_support.h"

#include "base/half.h"
#include "cuda/cuda_timeline.h"

/* Runs a problem by several planners through both kernels; those that do not do the shape are left out. */
static void run_all(gpu_problem *problem, const char *what)
{
    static const char *const planners[] = { "none", "flashinfer-tensor-core", "fa3", "even", "even-invariant" };
    for (int32_t i = 0; i < 10; i++) {
        ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
        options.heads_per_tile = i % 2 ? 1 : 0;
        gpu_run run;
        assert_true(
            gpu_run_create(problem, planners[i / 2], &options, i % 2 ? EKV_KERNEL_SIMT : EKV_KERNEL_MMA, NULL, &run));
        char name[256];
        snprintf(name, sizeof name, "%s: %s, kernel %d", what, planners[i / 2], run.options.kernel);
        gpu_run_check(&run, problem, name);
        gpu_run_free(&run);
    }
}

static void strides_past_31_bits(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 33, 70 };
    gpu_spec spec = GPU_SPEC_INIT;
    spec.batch_size = 2;
    spec.kv_len = kv_len;
    spec.page_size = 64;
    spec.page_padding = (INT64_C(1) << 31) + 8; /* elements: six pages of K and V span 43 GB */
    gpu_problem problem;
    if (!gpu_problem_create(&spec, &problem)) {
        print_message("skipped: no memory on this GPU\n");
        skip();
    }
    run_all(&problem, "strides past 31 bits");
    gpu_problem_free(&problem);
}

static void batches_past_16_bits(void **state)
{
    (void)state;
    for (int32_t batch_size = 65536; batch_size <= 65537; batch_size++) {
        int32_t *kv_len = malloc((size_t)batch_size * sizeof *kv_len);
        for (int32_t b = 0; b < batch_size; b++)
            kv_len[b] = b % 4 ? b % 23 : 0;
        kv_len[batch_size - 1] = 5000;
        gpu_spec spec = GPU_SPEC_INIT;
        spec.head_dim = 64;
        spec.kv_heads = spec.group = 1;
        spec.batch_size = batch_size;
        spec.kv_len = kv_len;
        gpu_problem problem;
        assert_true(gpu_problem_create(&spec, &problem));
        run_all(&problem, batch_size == 65536 ? "65,536 requests" : "65,537 requests");
        gpu_problem_free(&problem);
        free(kv_len);
    }
}

static void one_long_request(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 3, 300001, 100, 0 };
    gpu_spec spec = GPU_SPEC_INIT;
    spec.batch_size = 4;
    spec.kv_len = kv_len;
    spec.group = 8;
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    run_all(&problem, "one long request");
    gpu_problem_free(&problem);
}

/* CTAs come in waves, so a request's first piece is often done before its second begins, and a CTA that has more to do
 * is the last at a merge. */
static void more_ctas_than_fit_an_sm(void **state)
{
    (void)state;
    enum { REQUESTS = 300 };
    int32_t kv_len[REQUESTS];
    ekv_rng rng = { 44 };
    for (int32_t b = 0; b < REQUESTS; b++)
        kv_len[b] = b % 7 == 0 ? 9000 : (int32_t)ekv_rng_below(&rng, 900);
    gpu_spec spec = GPU_SPEC_INIT;
    spec.batch_size = REQUESTS;
    spec.kv_len = kv_len;
    spec.kv_heads = 4;
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    for (int32_t i = 0; i < 6; i++) {
        ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
        options.heads_per_tile = 1 << i / 2;
        options.ctas_per_sm = 8;
        options.snap_tokens = i % 2 ? -1 : 0;
        gpu_run run;
        assert_true(gpu_run_create(&problem, "even", &options, EKV_KERNEL_MMA, NULL, &run));
        gpu_run_check(&run, &problem, "more CTAs than fit");
        gpu_run_free(&run);
    }
    gpu_problem_free(&problem);
}

static void no_tokens_at_all(void **state)
{
    (void)state;
    const int32_t kv_len[40] = { 0 };
    gpu_spec spec = GPU_SPEC_INIT;
    spec.batch_size = 40;
    spec.kv_len = kv_len;
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    run_all(&problem, "no tokens");
    problem.tensors.k = problem.tensors.v = NULL;
    run_all(&problem, "no tokens and no cache");
    gpu_problem_free(&problem);
}

static void many_heads(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 700, 64, 1 };
    gpu_spec spec = GPU_SPEC_INIT;
    spec.kv_heads = 32;
    spec.group = 1;
    spec.batch_size = 3;
    spec.kv_len = kv_len;
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    run_all(&problem, "32 KV heads");
    gpu_problem_free(&problem);
}

static void lse_may_be_left_out(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 700, 64, 0 };
    gpu_spec spec = GPU_SPEC_INIT;
    spec.batch_size = 3;
    spec.kv_len = kv_len;
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    problem.tensors.lse = NULL;
    run_all(&problem, "no LSE");
    gpu_problem_free(&problem);
}

static void a_negative_scale_and_large_logits(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 700, 64, 1, 5000 };
    const float scales[] = { -0.3f, 1e-3f, 50.0f, 3e5f };
    gpu_spec spec = GPU_SPEC_INIT;
    spec.batch_size = 4;
    spec.kv_len = kv_len;
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    for (int i = 0; i < 4; i++) {
        problem.tensors.sm_scale = scales[i];
        gpu_problem_set_lengths(&problem, kv_len, 4);
        run_all(&problem, "scale");
    }
    gpu_problem_free(&problem);
}

static void sm_margin_leaves_sms(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 9000, 64, 1, 5000 };
    gpu_spec spec = GPU_SPEC_INIT;
    spec.batch_size = 4;
    spec.kv_len = kv_len;
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    static const char *const planners[] = { "fa3", "even" };
    for (int i = 0; i < 2; i++) {
        ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
        options.sm_margin = gpu_device.num_sms - 3;
        gpu_run run;
        assert_true(gpu_run_create(&problem, planners[i], &options, EKV_KERNEL_MMA, NULL, &run));
        assert_int_equal(ekv_plan_num_ctas(run.plan), 3 * run.plan->resident_ctas);
        gpu_run_check(&run, &problem, "sm_margin");
        gpu_run_free(&run);
    }
    gpu_problem_free(&problem);
}

/* ---- Refusals -------------------------------------------------------------------------------------------- */

static void what_is_not_done_is_refused(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 700, 64 };
    gpu_spec spec = GPU_SPEC_INIT;
    spec.batch_size = 2;
    spec.kv_len = kv_len;
    spec.block_table = true;
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    gpu_run run;
    assert_true(gpu_run_create(&problem, "even", NULL, EKV_KERNEL_AUTO, NULL, &run));
    const ekv_tensors good = problem.tensors;
    ekv_tensors *t = &problem.tensors;

    t->k = (const unsigned char *)good.k + 2;
    assert_fails(gpu_decode(&run, &problem), EKV_ERROR_UNSUPPORTED, "tensors.k", "16 bytes");
    *t = good;
    t->o = (unsigned char *)good.o + 8;
    assert_fails(gpu_decode(&run, &problem), EKV_ERROR_UNSUPPORTED, "tensors.o", "16 bytes");
    *t = good;
    t->v_stride_token += 4;
    assert_fails(gpu_decode(&run, &problem), EKV_ERROR_UNSUPPORTED, "v_stride_token", "multiple of 8");
    *t = good;
    t->block_table_width = 43; /* 700 tokens take 44 pages */
    assert_fails(gpu_decode(&run, &problem), EKV_ERROR_INVALID_ARGUMENT, "block_table_width is 43", "44 pages");
    *t = good;
    t->kv_len = good.block_table;
    assert_fails(gpu_decode(&run, &problem), EKV_ERROR_UNSUPPORTED, "kv_len");
    *t = good;
    assert_fails(ekv_decode(run.plan, t, &run.options, run.workspace, run.workspace_size - 1),
                 EKV_ERROR_WORKSPACE_TOO_SMALL, "needs");
    run.options.kernel = EKV_KERNEL_SIMT;
    assert_fails(gpu_decode(&run, &problem), EKV_ERROR_UNSUPPORTED, "2 heads a tile", "heads_per_tile");
    gpu_run_free(&run);

    ekv_plan *plan;
    assert_ok(ekv_plan_create(gpu_context, "even", &problem.batch, &gpu_device, NULL, &plan));
    assert_fails(ekv_backend_supports(plan, t, &run.options), EKV_ERROR_UNSUPPORTED, "options.cuda");
    ekv_plan_free(plan);
    gpu_problem_free(&problem);
}

static void shapes_without_a_kernel_are_refused(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 700 };
    ekv_decode_options options = EKV_DECODE_OPTIONS_INIT;
    options.backend = EKV_BACKEND_CUDA;
    for (int i = 0; i < 3; i++) {
        ekv_batch batch = EKV_BATCH_INIT;
        batch.batch_size = 1;
        batch.kv_len = kv_len;
        batch.kv_heads = 1;
        batch.q_heads = i == 0 ? 17 : 4;
        batch.head_dim = i == 1 ? 96 : 128;
        batch.q_dtype = batch.kv_dtype = i == 2 ? EKV_DTYPE_F32 : EKV_DTYPE_BF16;
        static const char *const texts[] = { "17 query heads", "head_dim 96", "kv_dtype 0" };
        ekv_plan_options plan_options = EKV_PLAN_OPTIONS_INIT;
        plan_options.cuda = 1;
        ekv_plan *plan;
        assert_ok(ekv_plan_create(gpu_context, "even", &batch, &gpu_device, &plan_options, &plan));
        assert_fails(ekv_backend_supports(plan, NULL, &options), EKV_ERROR_UNSUPPORTED, texts[i]);
        ekv_plan_free(plan);
    }
}

static void a_device_that_is_not_there_is_refused(void **state)
{
    (void)state;
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.cuda_device = 1000;
    ekv_context *context;
    assert_fails(ekv_context_create(&options, &context), EKV_ERROR_INVALID_ARGUMENT, "cuda_device is 1000");
    assert_true(gpu_device.num_sms > 0 && gpu_device.sm_arch >= 80);
}

/* ---- Merging of states ----------------------------------------------------------------------------------- */

enum { STATES = 5, ROWS = 300, DIM = 100 };

static float as_float(const void *values, ekv_dtype dtype, int64_t i)
{
    if (dtype == EKV_DTYPE_F32)
        return ((const float *)values)[i];
    const uint16_t half = ((const uint16_t *)values)[i];
    return dtype == EKV_DTYPE_F16 ? ekv_f16_to_f32(half) : ekv_bf16_to_f32(half);
}

/* Parts of empty states are NaN; some rows have empty states only. */
static void make_states(ekv_rng *rng, ekv_dtype dtype, void *parts, float *lse)
{
    for (int64_t i = 0; i < STATES * ROWS; i++) {
        const bool empty = i % ROWS % 7 == 0 || ekv_rng_below(rng, 3) == 0;
        lse[i] = empty ? -INFINITY : (float)(40 * ekv_rng_unit(rng) - 20);
        for (int64_t d = 0; d < DIM; d++) {
            const float value = empty ? NAN : (float)(2 * ekv_rng_unit(rng) - 1);
            if (dtype == EKV_DTYPE_F32)
                ((float *)parts)[i * DIM + d] = value;
            else
                ((uint16_t *)parts)[i * DIM + d] =
                    dtype == EKV_DTYPE_F16 ? ekv_f32_to_f16(value) : ekv_f32_to_bf16(value);
        }
    }
}

static void compare_merges(ekv_dtype part_dtype, ekv_dtype o_dtype, ekv_lse_base base)
{
    static unsigned char parts[STATES * ROWS * DIM * 4], o[2][ROWS * DIM * 4];
    static float lse_parts[STATES * ROWS], lse[2][ROWS];
    ekv_rng rng = { 5 };
    make_states(&rng, part_dtype, parts, lse_parts);
    ekv_merge_args args = EKV_MERGE_ARGS_INIT;
    args.num_states = STATES;
    args.rows = ROWS;
    args.head_dim = DIM;
    args.part_dtype = part_dtype;
    args.o_dtype = o_dtype;
    args.lse_base = base;
    args.o_parts = parts;
    args.lse_parts = lse_parts;
    args.o = o[0];
    args.lse = lse[0];
    assert_ok(ekv_merge_states(gpu_context, &args));
    void *device[4];
    const void *host[4] = { parts, lse_parts, o[1], lse[1] };
    const size_t size[4] = { sizeof parts, sizeof lse_parts, sizeof o[1], sizeof lse[1] };
    for (int i = 0; i < 4; i++) {
        assert_ok(ekv_cuda_alloc(gpu_context, size[i], &device[i]));
        assert_ok(ekv_cuda_copy(gpu_context, device[i], host[i], size[i]));
    }
    args.backend = EKV_BACKEND_CUDA;
    args.o_parts = device[0];
    args.lse_parts = device[1];
    args.o = device[2];
    args.lse = device[3];
    assert_ok(ekv_merge_states(gpu_context, &args));
    assert_ok(ekv_cuda_copy(gpu_context, o[1], device[2], sizeof o[1]));
    assert_ok(ekv_cuda_copy(gpu_context, lse[1], device[3], sizeof lse[1]));
    const float unit = o_dtype == EKV_DTYPE_F32 ? 0x1p-20f : o_dtype == EKV_DTYPE_F16 ? 0x1p-10f : 0x1p-7f;
    for (int64_t i = 0; i < ROWS * DIM; i++)
        assert_true(fabsf(as_float(o[0], o_dtype, i) - as_float(o[1], o_dtype, i)) <= unit);
    for (int64_t r = 0; r < ROWS; r++)
        assert_true(lse[0][r] == lse[1][r] || fabsf(lse[0][r] - lse[1][r]) < 1e-5f);
    for (int i = 0; i < 4; i++)
        ekv_cuda_free(gpu_context, device[i]);
}

static void states_merge_as_on_the_cpu(void **state)
{
    (void)state;
    for (int part = EKV_DTYPE_F32; part <= EKV_DTYPE_BF16; part++)
        for (int o = EKV_DTYPE_F32; o <= EKV_DTYPE_BF16; o++)
            compare_merges((ekv_dtype)part, (ekv_dtype)o, (part + o) % 2 ? EKV_LSE_BASE2 : EKV_LSE_NATURAL);
}

/* ---- Timeline -------------------------------------------------------------------------------------------- */

static void a_timeline_has_every_tile_and_merge(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 30000, 0, 64, 1, 5000 };
    static const char *const planners[] = { "none", "fa3", "even" };
    gpu_spec spec = GPU_SPEC_INIT;
    spec.batch_size = 5;
    spec.kv_len = kv_len;
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    for (int i = 0; i < 6; i++) {
        ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
        options.heads_per_tile = i % 2;
        gpu_run run;
        assert_true(
            gpu_run_create(&problem, planners[i / 2], &options, i % 2 ? EKV_KERNEL_SIMT : EKV_KERNEL_MMA, NULL, &run));
        ekv_cuda_timeline timeline;
        assert_ok(ekv_cuda_timeline_record(run.plan, &problem.tensors, &run.options, run.workspace, &timeline));
        assert_int_equal(timeline.num_tiles, run.plan->num_tiles);
        for (int64_t n = 0; n < timeline.num_tiles + timeline.num_merges; n++) {
            const ekv_stamp *s = &timeline.stamps[n];
            if (n >= timeline.num_tiles) {
                const int64_t merge = (n - timeline.num_tiles) / timeline.heads;
                if ((n - timeline.num_tiles) % timeline.heads >= run.plan->merges[merge].head_count)
                    continue;
            }
            assert_int_equal(s->kind, n < timeline.num_tiles ? 1 : 2);
            assert_true(s->stop_ns >= s->start_ns && s->start_ns > 0);
            assert_in_range(s->sm, 0, gpu_device.num_sms - 1);
        }
        ekv_cuda_timeline_free(gpu_context, &timeline);
        gpu_run_free(&run);
    }
    gpu_problem_free(&problem);
}

static int run(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strides_past_31_bits),
        cmocka_unit_test(batches_past_16_bits),
        cmocka_unit_test(one_long_request),
        cmocka_unit_test(more_ctas_than_fit_an_sm),
        cmocka_unit_test(no_tokens_at_all),
        cmocka_unit_test(many_heads),
        cmocka_unit_test(lse_may_be_left_out),
        cmocka_unit_test(a_negative_scale_and_large_logits),
        cmocka_unit_test(sm_margin_leaves_sms),
        cmocka_unit_test(what_is_not_done_is_refused),
        cmocka_unit_test(shapes_without_a_kernel_are_refused),
        cmocka_unit_test(a_device_that_is_not_there_is_refused),
        cmocka_unit_test(states_merge_as_on_the_cpu),
        cmocka_unit_test(a_timeline_has_every_tile_and_merge),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(void)
{
    return gpu_main(run);
}
