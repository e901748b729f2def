/* SPDX-License-Identifier: Apache-2.0
 * Plans made on the GPU: their records against the host's, byte for byte, and decodes with them.
 *
 *     EKV_SEED=1234 test_cuda_prepare    only the plan of that seed, as a failure prints it */
#include "../on_device_cases.h"
#include "cuda/cuda_prepare.h"
#include "gpu_support.h"

enum { NUM_PLANS = 1300, BATCHES_A_PLAN = 4, LARGE_EVERY = 100, LARGEST_BATCH = 65537 };

static void *device_copy(const void *host, size_t size)
{
    void *device;
    assert_ok(ekv_cuda_alloc(gpu_context, size, &device));
    assert_ok(ekv_cuda_copy(gpu_context, device, host, size));
    return device;
}

static ekv_plan *create_on_device(const char *planner, const ekv_batch *batch, const ekv_device *device,
                                  ekv_plan_options options)
{
    ekv_plan *plan;
    options.on_device = options.cuda = 1;
    assert_ok(ekv_plan_create(gpu_context, planner, batch, device, &options, &plan));
    assert_ok(ekv_plan_check(plan));
    return plan;
}

/* ---- Records ----------------------------------------------------------------------------------------- */

typedef struct prepare_work {
    ekv_plan *plan;
    const int32_t *kv_len; /* device */
} prepare_work;

static ekv_status enqueue_prepare(void *argument, void *stream)
{
    const prepare_work *work = argument;
    return ekv_cuda_prepare_alone(work->plan, work->kv_len, stream);
}

static size_t offset_in(const void *array, const ekv_plan_header *header)
{
    return (size_t)((const char *)array - (const char *)header);
}

/* Captured once; each replay finds poison in place of the records of the last, and lengths of its own. */
static void check_plan(uint64_t seed, void *stream)
{
    ekv_rng rng = { seed };
    on_device_case c = case_create(&rng, seed % LARGE_EVERY ? 0 : LARGEST_BATCH);
    ekv_plan *plan = create_on_device(c.planner, &c.batch, &c.device, c.options);
    const ekv_cuda_records records = ekv_cuda_records_of(plan);
    record_block block = { .bytes = malloc(records.size),
                           .tiles = offset_in(records.tiles, records.header),
                           .merges = offset_in(records.merges, records.header),
                           .ctas = offset_in(records.ctas, records.header),
                           .size = records.size };
    assert_non_null(block.bytes);
    const size_t lengths = (size_t)c.batch.batch_size * sizeof *c.live;
    int32_t *kv_len = device_copy(c.live, lengths);
    prepare_work work = { plan, kv_len };
    void *graph;
    assert_ok(ekv_cuda_graph_create(gpu_context, stream, enqueue_prepare, &work, &graph));
    for (int32_t i = 0; i < BATCHES_A_PLAN; i++) {
        char where[128];
        snprintf(where, sizeof where, "EKV_SEED=%" PRIu64 ": %s, %d requests, lengths %d", seed, c.planner,
                 c.batch.batch_size, i);
        assert_ok(ekv_cuda_copy(gpu_context, kv_len, c.live, lengths));
        assert_ok(ekv_cuda_fill(gpu_context, records.header, RECORDS_POISON, records.size));
        assert_ok(i % 2 ? ekv_cuda_graph_launch(gpu_context, graph, stream)
                        : ekv_cuda_prepare_alone(plan, kv_len, stream));
        assert_ok(ekv_cuda_copy(gpu_context, block.bytes, records.header, records.size));
        ekv_plan *host = case_host_plan(gpu_context, &c);
        expect_records(host, &block, where);
        ekv_plan_free(host);
        case_set_live(&c, &rng);
    }
    ekv_cuda_graph_free(gpu_context, graph);
    ekv_cuda_free(gpu_context, kv_len);
    free(block.bytes);
    ekv_plan_free(plan);
    case_free(&c);
}

static void device_plans_are_host_plans(void **state)
{
    (void)state;
    void *stream;
    assert_ok(ekv_cuda_stream_create(gpu_context, &stream));
    const char *seed = getenv("EKV_SEED");
    if (seed)
        check_plan(strtoull(seed, NULL, 10), stream);
    for (uint64_t i = 1; i <= NUM_PLANS && !seed; i++)
        check_plan(i, stream);
    ekv_cuda_stream_free(gpu_context, stream);
}

/* Nothing to do, one of everything, and the largest list of fa3 full of ties. */
static void edges(void **state)
{
    (void)state;
    static const char *const planners[] = { "even", "even-invariant", "fa3", "fa3-nosplit", "fa3-vllm" };
    static const int32_t sizes[] = { 1, 31, 32, 33, 992, 993, 1024, 65536, 65537 };
    int32_t *lengths = calloc((size_t)LARGEST_BATCH, sizeof *lengths);
    assert_non_null(lengths);
    for (size_t p = 0; p < sizeof planners / sizeof planners[0]; p++)
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
            for (int32_t length = 0; length <= 300; length += 300) {
                for (int32_t b = 0; b < sizes[s]; b++)
                    lengths[b] = length;
                on_device_case c = { planners[p], EKV_BATCH_INIT, gpu_device, EKV_PLAN_OPTIONS_INIT, NULL, NULL, NULL };
                c.batch.batch_size = sizes[s];
                c.batch.q_heads = 8;
                c.batch.kv_heads = 1;
                c.batch.head_dim = 128;
                c.batch.kv_len = c.bound = c.live = c.exact = lengths;
                ekv_plan *plan = create_on_device(c.planner, &c.batch, &c.device, c.options);
                ekv_plan *host = case_host_plan(gpu_context, &c);
                const ekv_cuda_records records = ekv_cuda_records_of(plan);
                record_block block = { malloc(records.size), offset_in(records.tiles, records.header),
                                       offset_in(records.merges, records.header),
                                       offset_in(records.ctas, records.header), records.size };
                assert_non_null(block.bytes);
                int32_t *kv_len = device_copy(lengths, (size_t)sizes[s] * sizeof *lengths);
                char where[128];
                snprintf(where, sizeof where, "%s, %d requests of %d tokens", c.planner, sizes[s], length);
                assert_ok(ekv_cuda_fill(gpu_context, records.header, RECORDS_POISON, records.size));
                assert_ok(ekv_cuda_prepare_alone(plan, kv_len, NULL));
                assert_ok(ekv_cuda_copy(gpu_context, block.bytes, records.header, records.size));
                expect_records(host, &block, where);
                ekv_cuda_free(gpu_context, kv_len);
                free(block.bytes);
                ekv_plan_free(host);
                ekv_plan_free(plan);
            }
    free(lengths);
}

/* ---- Decode ------------------------------------------------------------------------------------------ */

enum { REQUESTS = 40, NUM_SETS = 5, WIDTH = 9008 };

/* Upper bounds, then live lengths within them. */
static void set_lengths(int32_t set, int32_t *kv_len)
{
    ekv_rng rng = { 7 };
    for (int32_t b = 0; b < REQUESTS; b++) {
        const int32_t bound = b == 3 ? 9000 : (int32_t)ekv_rng_below(&rng, 1500),
                      less = (int32_t)ekv_rng_below(&rng, bound + 1);
        switch (set) {
        case 0: kv_len[b] = bound; break;
        case 1: kv_len[b] = less; break;
        case 2: kv_len[b] = 0; break;
        case 3: kv_len[b] = b == 3 ? bound : 0; break; /* the rest is padding */
        default: kv_len[b] = b % 2 ? less / 2 : 0; break;
        }
    }
}

typedef struct decode_work {
    gpu_run *run;
    gpu_problem *problem;
    const int32_t *kv_len; /* device */
} decode_work;

/* As two layers of a model: the second reads the records that the first has made. */
static ekv_status enqueue_decodes(void *argument, void *stream)
{
    decode_work *work = argument;
    work->run->options.stream = stream;
    work->problem->tensors.kv_len = work->kv_len;
    ekv_status status = gpu_decode(work->run, work->problem);
    work->problem->tensors.kv_len = NULL;
    return status ? status : gpu_decode(work->run, work->problem);
}

static void check_decodes(gpu_problem *problem, const char *planner, ekv_kernel kernel, ekv_dispatch dispatch,
                          void *stream)
{
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    int32_t lengths[REQUESTS];
    gpu_run host, device;
    options.dispatch = dispatch;
    options.heads_per_tile = kernel == EKV_KERNEL_SIMT ? 1 : 0;
    options.table_width = WIDTH;
    set_lengths(0, lengths);
    gpu_problem_set_lengths(problem, lengths, REQUESTS);
    assert_true(gpu_run_create(problem, planner, &options, kernel, stream, &host));
    options.on_device = 1;
    assert_true(gpu_run_create(problem, planner, &options, kernel, stream, &device));
    int32_t *kv_len = device_copy(lengths, sizeof lengths);
    decode_work work = { &device, problem, kv_len };
    void *graph;
    assert_ok(ekv_cuda_graph_create(gpu_context, stream, enqueue_decodes, &work, &graph));
    for (int32_t set = 0; set < NUM_SETS; set++)
        for (int32_t captured = 0; captured < 2; captured++) {
            char what[128];
            snprintf(what, sizeof what, "%s, kernel %d, dispatch %d, lengths %d%s", planner, kernel, dispatch, set,
                     captured ? ", captured" : "");
            set_lengths(set, lengths);
            assert_ok(ekv_cuda_copy(gpu_context, kv_len, lengths, sizeof lengths));
            gpu_problem_set_lengths(problem, lengths, REQUESTS);
            assert_ok(ekv_plan_update(host.plan, lengths, REQUESTS));
            gpu_problem_reset(problem);
            assert_ok(gpu_decode(&host, problem));
            assert_ok(ekv_cuda_stream_wait(gpu_context, stream));
            gpu_output expected = gpu_output_read(problem);
            gpu_output_check(problem, host.plan, &host.options, &expected, what);
            gpu_problem_reset(problem);
            assert_ok(captured ? ekv_cuda_graph_launch(gpu_context, graph, stream) : enqueue_decodes(&work, stream));
            assert_ok(ekv_cuda_stream_wait(gpu_context, stream));
            gpu_output got = gpu_output_read(problem);
            if (memcmp(got.bytes, expected.bytes, problem->outputs_size))
                fail_msg("%s: the decode has other bits than by the host's plan", what);
            gpu_output_free(&got);
            gpu_output_free(&expected);
        }
    ekv_cuda_graph_free(gpu_context, graph);
    ekv_cuda_free(gpu_context, kv_len);
    gpu_run_free(&host);
    gpu_run_free(&device);
}

static gpu_problem make_problem(void)
{
    static int32_t lengths[REQUESTS];
    gpu_spec spec = GPU_SPEC_INIT;
    set_lengths(0, lengths);
    spec.batch_size = REQUESTS;
    spec.kv_len = lengths;
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    return problem;
}

static void decodes_have_the_bits_of_the_host_plan(void **state)
{
    (void)state;
    static const char *const planners[] = { "even", "even-invariant", "fa3", "fa3-nosplit", "fa3-vllm" };
    gpu_problem problem = make_problem();
    void *stream;
    assert_ok(ekv_cuda_stream_create(gpu_context, &stream));
    for (int32_t i = 0; i < 5; i++) {
        check_decodes(&problem, planners[i], EKV_KERNEL_MMA, EKV_DISPATCH_DEFAULT, stream);
        check_decodes(&problem, planners[i], EKV_KERNEL_SIMT, EKV_DISPATCH_DEFAULT, stream);
        for (int32_t dispatch = EKV_DISPATCH_GRID; dispatch <= EKV_DISPATCH_RANGE; dispatch++)
            check_decodes(&problem, planners[i], EKV_KERNEL_MMA, (ekv_dispatch)dispatch, stream);
    }
    ekv_cuda_stream_free(gpu_context, stream);
    gpu_problem_free(&problem);
}

static void what_does_not_fit_together_is_refused(void **state)
{
    (void)state;
    gpu_problem problem = make_problem();
    int32_t *kv_len = device_copy(problem.batch.kv_len, REQUESTS * sizeof *kv_len);
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    gpu_run host, device;
    assert_true(gpu_run_create(&problem, "even", &options, EKV_KERNEL_AUTO, NULL, &host));
    options.on_device = 1;
    assert_true(gpu_run_create(&problem, "even", &options, EKV_KERNEL_AUTO, NULL, &device));
    assert_fails(gpu_decode(&device, &problem), EKV_ERROR_INVALID_ARGUMENT, "tensors.kv_len is NULL");
    assert_fails(ekv_plan_update(device.plan, problem.batch.kv_len, REQUESTS), EKV_ERROR_UNSUPPORTED, "on-device");
    problem.tensors.kv_len = kv_len;
    assert_fails(gpu_decode(&host, &problem), EKV_ERROR_UNSUPPORTED, "tensors.kv_len");
    problem.tensors.kv_len = (const int32_t *)(const void *)((const char *)kv_len + 1);
    assert_fails(gpu_decode(&device, &problem), EKV_ERROR_INVALID_ARGUMENT, "aligned to 4 bytes");
    problem.tensors.kv_len = NULL;
    device.options = (ekv_decode_options)EKV_DECODE_OPTIONS_INIT;
    assert_fails(gpu_decode(&device, &problem), EKV_ERROR_UNSUPPORTED, "on_device");
    ekv_cuda_free(gpu_context, kv_len);
    gpu_run_free(&host);
    gpu_run_free(&device);
    gpu_problem_free(&problem);
}

static int run(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(edges),
        cmocka_unit_test(device_plans_are_host_plans),
        cmocka_unit_test(decodes_have_the_bits_of_the_host_plan),
        cmocka_unit_test(what_does_not_fit_together_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(void)
{
    return gpu_main(run);
}
