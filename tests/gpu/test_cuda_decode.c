/* SPDX-License-Identifier: Apache-2.0
 * Every variant of the decode kernels, under every dispatch, over lengths at the edges of blocks, chunks and pages. */
#include "gpu_support.h"

static const int32_t lengths[] = { 129, 0, 1, 15, 4097, 16, 17, 0, 127, 128, 4095, 4096 };
enum { NUM_LENGTHS = sizeof lengths / sizeof lengths[0] };

typedef struct way {
    const char *planner;
    ekv_kernel kernel;
    ekv_plan_options options;
} way;

/* What a problem is run by; `turn` chooses among options, so that all meet all kernels over the problems. */
static int32_t list_ways(int32_t turn, const ekv_batch *batch, way *ways)
{
    static const ekv_dispatch dispatches[] = { EKV_DISPATCH_DEFAULT, EKV_DISPATCH_GRID, EKV_DISPATCH_QUEUE,
                                               EKV_DISPATCH_RANGE };
    static const char *const planners[] = {
        "none",           "flashinfer-tensor-core",     "fa3",           "flashinfer-cuda-core", "even",
        "flashinfer-xqa", "flashinfer-batch-attention", "even-invariant"
    };
    int32_t n = 0;
    for (int32_t i = 0; i < 4; i++) {
        way *w = &ways[n++];
        *w = (way){ planners[(turn + 2 * i) % 8], i % 2 ? EKV_KERNEL_SIMT : EKV_KERNEL_MMA, EKV_PLAN_OPTIONS_INIT };
        w->options.resident_ctas = strcmp(w->planner, "flashinfer-cuda-core") ? 0 : 4;
        w->options.dispatch = dispatches[(turn / 8 + i) % 4];
        w->options.no_pack_gqa = !strcmp(w->planner, "none") && turn % 16 < 8;
        w->options.heads_per_tile = w->kernel == EKV_KERNEL_SIMT ? 1 : turn / 2 % 2 ? batch->kv_heads : 0;
        w->options.chunk_tokens = turn % 3 ? 0 : 48;
        w->options.block_tokens = turn % 5 ? 0 : 24; /* cuts that pages of 16 tokens cross */
        w->options.sm_margin = turn % 7 ? 0 : gpu_device.num_sms / 3;
    }
    return n;
}

static void run_problem(const gpu_spec *spec, int32_t turn)
{
    gpu_problem problem;
    assert_true(gpu_problem_create(spec, &problem));
    way ways[4];
    const int32_t n = list_ways(turn, &problem.batch, ways);
    for (int32_t i = 0; i < n; i++) {
        char what[256];
        snprintf(what, sizeof what,
                 "%s, kernel %d, dispatch %d, dtype %d, head_dim %d, group %d, page size %d, turn %d", ways[i].planner,
                 ways[i].kernel, ways[i].options.dispatch, spec->dtype, spec->head_dim, spec->group, spec->page_size,
                 turn);
        gpu_run run;
        if (!gpu_run_create(&problem, ways[i].planner, &ways[i].options, ways[i].kernel, NULL, &run))
            fail_msg("%s: %s", what, ekv_last_error());
        run.options.lse_base = turn % 2 ? EKV_LSE_BASE2 : EKV_LSE_NATURAL;
        gpu_run_check(&run, &problem, what);
        gpu_run_free(&run);
    }
    gpu_problem_free(&problem);
}

static void every_variant(ekv_dtype dtype, int32_t head_dim)
{
    static const int32_t pages[] = { 1, 3, 16, 64, 128, 1000 }, groups[] = { 1, 2, 3, 4, 5, 6, 7, 8, 16 };
    int32_t turn = 0;
    for (size_t p = 0; p < sizeof pages / sizeof pages[0]; p++)
        for (size_t g = 0; g < sizeof groups / sizeof groups[0]; g++, turn++) {
            gpu_spec spec = GPU_SPEC_INIT;
            spec.dtype = dtype;
            spec.head_dim = head_dim;
            spec.kv_heads = turn % 3 + 1;
            spec.group = groups[g];
            spec.page_size = pages[p];
            spec.batch_size = NUM_LENGTHS;
            spec.kv_len = lengths;
            spec.layout = turn % 2 ? EKV_LAYOUT_HND : EKV_LAYOUT_NHD;
            spec.block_table = turn / 2 % 2;
            spec.row_padding = turn % 4 ? 0 : 8;
            spec.page_padding = turn % 5 ? 0 : 64;
            spec.seed = (uint64_t)turn + 1;
            run_problem(&spec, turn);
        }
}

static void bf16_64(void **state)
{
    (void)state;
    every_variant(EKV_DTYPE_BF16, 64);
}

static void bf16_128(void **state)
{
    (void)state;
    every_variant(EKV_DTYPE_BF16, 128);
}

static void bf16_256(void **state)
{
    (void)state;
    every_variant(EKV_DTYPE_BF16, 256);
}

static void f16_64(void **state)
{
    (void)state;
    every_variant(EKV_DTYPE_F16, 64);
}

static void f16_128(void **state)
{
    (void)state;
    every_variant(EKV_DTYPE_F16, 128);
}

static void f16_256(void **state)
{
    (void)state;
    every_variant(EKV_DTYPE_F16, 256);
}

/* The oracle of all other tests against the one on the CPU. */
static void gpu_reference_agrees_with_cpu_reference(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 4; i++) {
        const int32_t kv_len[] = { 5, 0, 2049, 300 };
        gpu_spec spec = GPU_SPEC_INIT;
        spec.dtype = i % 2 ? EKV_DTYPE_F16 : EKV_DTYPE_BF16;
        spec.head_dim = i < 2 ? 128 : 64;
        spec.batch_size = 4;
        spec.kv_len = kv_len;
        spec.block_table = i % 2;
        spec.row_padding = 8 * (i / 2);
        gpu_problem p;
        assert_true(gpu_problem_create(&spec, &p));
        gpu_host_tensors host = gpu_host_tensors_read(&p);
        ekv_reference *cpu;
        assert_ok(ekv_reference_create(gpu_context, &p.batch, &host.tensors, &cpu));
        const int32_t rows = p.batch.batch_size * p.batch.q_heads;
        for (int32_t r = 0; r < rows; r++) {
            for (int32_t d = 0; d < spec.head_dim; d++)
                assert_true(fabs(cpu->o[r * spec.head_dim + d] - p.reference.o[r * spec.head_dim + d]) < 1e-12);
            assert_true(cpu->lse[r] == p.reference.lse[r] || fabs(cpu->lse[r] - p.reference.lse[r]) < 1e-12);
            assert_true(fabs(cpu->scale[r].logit - p.reference.scale[r].logit) < 1e-11);
            assert_true(fabs(cpu->scale[r].value - p.reference.scale[r].value) < 1e-12);
            assert_true(fabs(cpu->scale[r].p_norm - p.reference.scale[r].p_norm) < 1e-12);
        }
        ekv_reference_free(cpu);
        gpu_host_tensors_free(&host);
        gpu_problem_free(&p);
    }
}

static int run(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpu_reference_agrees_with_cpu_reference),
        cmocka_unit_test(bf16_64),
        cmocka_unit_test(bf16_128),
        cmocka_unit_test(bf16_256),
        cmocka_unit_test(f16_64),
        cmocka_unit_test(f16_128),
        cmocka_unit_test(f16_256),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(void)
{
    return gpu_main(run);
}
