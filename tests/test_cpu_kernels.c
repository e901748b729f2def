/* SPDX-License-Identifier: Apache-2.0
 * The tile kernels of the CPU backend, each one that this CPU can run, forced in turn.
 *
 *     EKV_TEST_KERNEL=avx2 test_cpu_kernels    only that one; exit code 77 where this CPU lacks it */
#include "support.h"

#include "base/half.h"

enum { MAX_KERNELS = 8 };

static const ekv_cpu_kernel *kernels[MAX_KERNELS];
static int num_kernels;

/* Says which kernels are left out, so that a test run shows what it did not test. */
static void list_kernels(void)
{
    const ekv_cpu_kernel *forced = support_forced_kernel(), *kernel;
    bool runs_here;
    for (int32_t i = 0; (kernel = ekv_cpu_kernel_at(i, &runs_here)); i++) {
        if (forced && kernel != forced)
            continue;
        if (runs_here)
            kernels[num_kernels++] = kernel;
        printf("kernel %s: %s\n", kernel->name, runs_here ? "tested" : "skipped, this CPU cannot run it");
    }
}

static ekv_batch batch_for(const ekv_cpu_kernel *kernel, int32_t batch_size, const int32_t *kv_len)
{
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = batch_size;
    batch.kv_len = kv_len;
    batch.q_heads = 16;
    batch.kv_heads = 2;
    batch.head_dim = 128;
    if (!kernel->bf16_only)
        batch.q_dtype = EKV_DTYPE_F32;
    return batch;
}

/* ---- 2^x --------------------------------------------------------------------------------------------- */

static void check_exp2(const ekv_cpu_kernel *kernel, const float *x)
{
    float weights[EKV_TILE_PANEL];
    kernel->exp2(x, weights, EKV_TILE_PANEL);
    for (int i = 0; i < EKV_TILE_PANEL; i++) {
        const double exact = exp2((double)x[i]);
        /* a unit in the last place or two, and half of the smallest subnormal */
        const double allowed = exact * 0x1p-23 + 0x1p-150;
        if (!(fabs(weights[i] - exact) <= allowed))
            fail_msg("%s: 2^%.9g is %.9g, not %.9g", kernel->name, (double)x[i], (double)weights[i], exact);
    }
}

/* From 0 to below where 2^x ends, a bit pattern in 997 and all round each integer. */
static void exp2_is_right_over_its_whole_range(void **state)
{
    (void)state;
    float x[EKV_TILE_PANEL];
    for (int k = 0; k < num_kernels; k++) {
        const uint32_t last = ekv_f32_bits(-1000.0f);
        for (uint32_t bits = 0x80000000u; bits < last; bits += 997 * EKV_TILE_PANEL) {
            for (uint32_t i = 0; i < EKV_TILE_PANEL; i++)
                x[i] = ekv_bits_f32(bits + 997 * i);
            check_exp2(kernels[k], x);
        }
        for (int n = 0; n <= 152; n++)
            for (int half = 0; half < 2; half++) { /* at integers and where n changes */
                const float middle = -(float)n - (float)half / 2;
                for (int i = 0; i < EKV_TILE_PANEL; i++)
                    x[i] = ekv_bits_f32(ekv_f32_bits(middle) + (uint32_t)i) - (middle == 0 ? 0 : 0x1p-22f * 2);
                check_exp2(kernels[k], x);
            }
    }
}

static void exp2_of_limits(void **state)
{
    (void)state;
    const float x[EKV_TILE_PANEL] = { 0, -0.0f, -INFINITY, NAN, -3e38f, -150.5f, -149, -1e-40f };
    float weights[EKV_TILE_PANEL];
    for (int k = 0; k < num_kernels; k++) {
        kernels[k]->exp2(x, weights, EKV_TILE_PANEL);
        assert_true(weights[0] == 1 && weights[1] == 1 && weights[2] == 0);
        assert_true(isnan(weights[3]));
        assert_true(weights[4] == 0 && weights[5] == 0 && weights[6] == 0x1p-149f && weights[7] == 1);
    }
}

/* ---- Shapes and tails -------------------------------------------------------------------------------- */

/* Every length up to two blocks and some, so every tail of tokens; every number of rows up to three panels. */
static void every_tail_of_tokens_and_rows(void **state)
{
    (void)state;
    enum { REQUESTS = 2 * EKV_TILE_BLOCK + 5 };
    static const int32_t pages[] = { 1, 3, 16, 64, 100 }, dims[] = { 32, 40, 48, 64, 80, 96, 128, 160, 256 };
    int32_t kv_len[REQUESTS];
    for (int32_t b = 0; b < REQUESTS; b++)
        kv_len[b] = b;
    ekv_context *context = support_context(2);
    const ekv_device device = support_device(3);
    int done = 0;
    for (int k = 0; k < num_kernels; k++)
        for (int32_t group = 1; group <= 2 * EKV_TILE_PANEL + 1; group++)
            for (int32_t dtype = 0; dtype < 3; dtype++) {
                ekv_batch batch = batch_for(kernels[k], REQUESTS, kv_len);
                ekv_random_cache_options cache = EKV_RANDOM_CACHE_OPTIONS_INIT;
                ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
                decode_setup setup;
                const ekv_cpu_kernel *chosen;
                batch.kv_dtype = (ekv_dtype)dtype;
                batch.kv_heads = 1 + group % 3;
                batch.q_heads = group * batch.kv_heads;
                batch.head_dim = dims[(group + 3 * dtype) % 9];
                batch.page_size = pages[(group + dtype) % 5];
                batch.layout = (ekv_layout)(group % 2);
                cache.row_padding = group % 4 == 3 ? 5 : 0;
                if (ekv_cpu_kernel_choose(&batch, kernels[k]->id, &chosen))
                    continue;
                assert_ok(support_set_up(context, "even", &batch, &device, &options, &cache, &setup));
                setup.options.kernel = kernels[k]->id;
                assert_ok(support_decode(&setup));
                support_assert_right(&setup, kernels[k]->name);
                support_tear_down(&setup);
                done++;
            }
    ekv_context_free(context);
    assert_true(done >= 4 * num_kernels);
}

/* ---- Threads ----------------------------------------------------------------------------------------- */

static void any_number_of_threads_gives_the_same_bits(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 700, 0, 33, 1, 2100 };
    const ekv_device device = support_device(7);
    for (int k = 0; k < num_kernels; k++) {
        const ekv_batch batch = batch_for(kernels[k], 5, kv_len);
        ekv_context *one = support_context(1);
        decode_setup expected;
        assert_ok(support_set_up(one, "even", &batch, &device, NULL, NULL, &expected));
        expected.options.kernel = kernels[k]->id;
        assert_ok(support_decode(&expected));
        support_assert_right(&expected, kernels[k]->name);
        for (int32_t threads = 2; threads <= 16; threads++) {
            ekv_context *context = support_context(threads);
            decode_setup setup;
            assert_ok(support_set_up(context, "even", &batch, &device, NULL, NULL, &setup));
            setup.options.kernel = kernels[k]->id;
            for (int repeat = 0; repeat < 5; repeat++) {
                assert_ok(support_decode(&setup));
                support_assert_same(&expected, &setup, kernels[k]->name);
            }
            support_tear_down(&setup);
            ekv_context_free(context);
        }
        support_tear_down(&expected);
        ekv_context_free(one);
    }
}

/* ---- Long contexts ----------------------------------------------------------------------------------- */

/* Where an accumulator of 16 bits, or one float sum over all tokens, would be far off. */
static void a_request_of_262144_tokens(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 262144 };
    const ekv_device device = support_device(2);
    ekv_context *context = support_context(2);
    for (int k = 0; k < num_kernels; k++) {
        ekv_batch batch = batch_for(kernels[k], 1, kv_len);
        batch.q_heads = 4;
        batch.kv_heads = 1;
        batch.head_dim = 32;
        decode_setup setup;
        assert_ok(support_set_up(context, "even", &batch, &device, NULL, NULL, &setup));
        setup.options.kernel = kernels[k]->id;
        assert_ok(support_decode(&setup));
        const ekv_comparison c = support_compare(&setup);
        printf("kernel %s, 262144 tokens: largest error %.2e, %.2f of what is allowed\n", kernels[k]->name,
               c.max_abs_err, c.max_ratio);
        assert_true(c.max_ratio <= 1);
        support_tear_down(&setup);
    }
    ekv_context_free(context);
}

/* ---- Choice ------------------------------------------------------------------------------------------ */

static void kernels_are_refused_where_they_cannot_work(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 50 };
    const ekv_device device = support_device(2);
    ekv_context *context = support_context(1);
    const ekv_cpu_kernel *kernel;
    bool runs_here;
    for (int32_t i = 0; (kernel = ekv_cpu_kernel_at(i, &runs_here)); i++) {
        ekv_batch batch = batch_for(kernel, 1, kv_len);
        ekv_plan *plan;
        ekv_decode_options options = EKV_DECODE_OPTIONS_INIT;
        options.kernel = kernel->id;
        assert_ok(ekv_plan_create(context, "even", &batch, &device, NULL, &plan));
        if (runs_here)
            assert_ok(ekv_backend_supports(plan, NULL, &options));
        else
            assert_fails(ekv_backend_supports(plan, NULL, &options), EKV_ERROR_UNSUPPORTED, kernel->name, "this CPU");
        ekv_plan_free(plan);
        batch.head_dim = 40;
        assert_ok(ekv_plan_create(context, "even", &batch, &device, NULL, &plan));
        if (runs_here && 40 % kernel->head_dim_step)
            assert_fails(ekv_backend_supports(plan, NULL, &options), EKV_ERROR_UNSUPPORTED, kernel->name, "40");
        options.kernel = EKV_KERNEL_AUTO;
        assert_ok(ekv_backend_supports(plan, NULL, &options));
        options.kernel = EKV_KERNEL_MMA;
        assert_fails(ekv_backend_supports(plan, NULL, &options), EKV_ERROR_UNSUPPORTED, "kernel 2");
        ekv_plan_free(plan);
    }
    ekv_context_free(context);
}

/* The list is in the order of speed. */
static void auto_is_the_last_kernel_that_can(void **state)
{
    (void)state;
    static const int32_t dims[] = { 40, 48, 64 };
    const int32_t kv_len[] = { 50 };
    const ekv_cpu_kernel *kernel, *chosen, *one, *last;
    bool runs_here;
    for (int32_t dtype = 0; dtype < 3; dtype++)
        for (int32_t i = 0; i < 3; i++) {
            ekv_batch batch = EKV_BATCH_INIT;
            batch.batch_size = 1;
            batch.kv_len = kv_len;
            batch.q_heads = batch.kv_heads = 1;
            batch.head_dim = dims[i];
            batch.q_dtype = batch.kv_dtype = (ekv_dtype)dtype;
            last = NULL;
            for (int32_t k = 0; (kernel = ekv_cpu_kernel_at(k, &runs_here)); k++)
                if (!ekv_cpu_kernel_choose(&batch, kernel->id, &one)) {
                    assert_true(runs_here && one == kernel);
                    last = kernel;
                }
            assert_ok(ekv_cpu_kernel_choose(&batch, EKV_KERNEL_AUTO, &chosen));
            assert_ptr_equal(chosen, last);
        }
}

int main(void)
{
    list_kernels();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp2_is_right_over_its_whole_range),
        cmocka_unit_test(exp2_of_limits),
        cmocka_unit_test(every_tail_of_tokens_and_rows),
        cmocka_unit_test(any_number_of_threads_gives_the_same_bits),
        cmocka_unit_test(a_request_of_262144_tokens),
        cmocka_unit_test(kernels_are_refused_where_they_cannot_work),
        cmocka_unit_test(auto_is_the_last_kernel_that_can),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
