/* SPDX-License-Identifier: Apache-2.0
 * Streams, CUDA graphs and updates in flight. */
#include "gpu_support.h"

static const char *const planners[] = { "none", "flashinfer-tensor-core", "fa3", "even", "even-invariant" };
enum { NUM_PLANNERS = sizeof planners / sizeof planners[0], REQUESTS = 9, NUM_SETS = 4 };

/* Lengths of one batch over time: the first is the longest in all, so that a plan made for it fits the others. */
static const int32_t length_sets[NUM_SETS][REQUESTS] = {
    { 9000, 4097, 4097, 2000, 2000, 700, 700, 700, 700 },
    { 1, 0, 17, 0, 16, 15, 1, 3, 2 },
    { 8999, 1, 0, 129, 128, 127, 0, 64, 640 },
    { 0, 4097, 0, 1999, 33, 1, 699, 5, 0 },
};

static gpu_problem make_problem(void)
{
    gpu_spec spec = GPU_SPEC_INIT;
    spec.batch_size = REQUESTS;
    spec.kv_len = length_sets[0];
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    return problem;
}

/* max_total_tokens: even-invariant's room. */
static gpu_run make_run(const gpu_problem *problem, const char *planner, ekv_kernel kernel, ekv_dispatch dispatch,
                        void *stream)
{
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.heads_per_tile = kernel == EKV_KERNEL_SIMT ? 1 : 0;
    options.dispatch = dispatch;
    options.table_width = 9008;
    gpu_run run;
    if (!gpu_run_create(problem, planner, &options, kernel, stream, &run))
        fail_msg("%s: %s", planner, ekv_last_error());
    return run;
}

static void *make_stream(void)
{
    void *stream;
    assert_ok(ekv_cuda_stream_create(gpu_context, &stream));
    return stream;
}

static void read_and_check(gpu_problem *problem, const gpu_run *run, const char *what)
{
    gpu_output output = gpu_output_read(problem);
    gpu_output_check(problem, run->plan, &run->options, &output, what);
    gpu_output_free(&output);
}

typedef struct decode_work {
    gpu_run *run;
    const gpu_problem *problem;
    int32_t repeat;
} decode_work;

static ekv_status enqueue_decodes(void *argument, void *stream)
{
    decode_work *work = argument;
    work->run->options.stream = stream;
    ekv_status status = EKV_OK;
    for (int32_t i = 0; i < work->repeat && !status; i++)
        status = gpu_decode(work->run, work->problem);
    return status;
}

/* ---- Graphs ---------------------------------------------------------------------------------------------- */

/* Captured with lengths `first`; replayed with all others, some of fewer requests. */
static void replay(gpu_problem *problem, const char *planner, ekv_kernel kernel, ekv_dispatch dispatch, int32_t first,
                   void *stream)
{
    gpu_problem_set_lengths(problem, length_sets[0], REQUESTS);
    gpu_run run = make_run(problem, planner, kernel, dispatch, stream);
    assert_ok(ekv_plan_update(run.plan, length_sets[first], REQUESTS));
    decode_work work = { &run, problem, 2 };
    void *graph;
    assert_ok(ekv_cuda_graph_create(gpu_context, stream, enqueue_decodes, &work, &graph));
    for (int32_t i = 0; i < 2 * NUM_SETS; i++) {
        const int32_t set = (first + i) % NUM_SETS, requests = i < NUM_SETS ? REQUESTS : REQUESTS - 2;
        char what[128];
        snprintf(what, sizeof what, "%s, kernel %d, dispatch %d: captured with set %d, replayed with %d", planner,
                 kernel, dispatch, first, set);
        gpu_problem_set_lengths(problem, length_sets[set], requests);
        if (i)
            assert_ok(ekv_plan_update(run.plan, length_sets[set], requests));
        gpu_problem_reset(problem);
        assert_ok(ekv_cuda_graph_launch(gpu_context, graph, stream));
        assert_ok(ekv_cuda_stream_wait(gpu_context, stream));
        read_and_check(problem, &run, what);
    }
    /* Outside the graph the same plan still runs. */
    gpu_problem_reset(problem);
    assert_ok(gpu_decode(&run, problem));
    assert_ok(ekv_cuda_stream_wait(gpu_context, stream));
    read_and_check(problem, &run, "after replays");
    ekv_cuda_graph_free(gpu_context, graph);
    gpu_run_free(&run);
}

static void graphs_replay_with_other_lengths(void **state)
{
    (void)state;
    gpu_problem problem = make_problem();
    void *stream = make_stream();
    for (int32_t i = 0; i < NUM_PLANNERS; i++)
        for (int32_t first = 0; first < 2; first++) {
            replay(&problem, planners[i], EKV_KERNEL_MMA, EKV_DISPATCH_DEFAULT, first, stream);
            replay(&problem, planners[i], EKV_KERNEL_SIMT, EKV_DISPATCH_DEFAULT, first, stream);
            replay(&problem, planners[i], EKV_KERNEL_MMA, (ekv_dispatch)(1 + i % 3), first, stream);
        }
    ekv_cuda_stream_free(gpu_context, stream);
    gpu_problem_free(&problem);
}

/* An update right after the launch of a replay that has not begun must not reach that replay. */
static void updates_wait_for_a_replay_in_flight(void **state)
{
    (void)state;
    gpu_problem problem = make_problem();
    void *stream = make_stream();
    gpu_run run = make_run(&problem, "even", EKV_KERNEL_MMA, EKV_DISPATCH_DEFAULT, stream);
    decode_work work = { &run, &problem, 1 };
    void *graph;
    assert_ok(ekv_cuda_graph_create(gpu_context, stream, enqueue_decodes, &work, &graph));
    for (int32_t i = 0; i < 6; i++) {
        const int32_t set = i % NUM_SETS, next = (i + 1) % NUM_SETS;
        gpu_problem_set_lengths(&problem, length_sets[set], REQUESTS);
        gpu_problem_reset(&problem);
        assert_ok(ekv_plan_update(run.plan, length_sets[set], REQUESTS));
        assert_ok(ekv_cuda_occupy(gpu_context, stream, 1, 20 * 1000 * 1000));
        assert_ok(ekv_cuda_graph_launch(gpu_context, graph, stream));
        assert_ok(ekv_plan_update(run.plan, length_sets[next], REQUESTS));
        assert_ok(ekv_cuda_stream_wait(gpu_context, stream));
        gpu_output output = gpu_output_read(&problem);
        assert_ok(ekv_plan_update(run.plan, length_sets[set], REQUESTS)); /* num_splits for the tolerance */
        gpu_output_check(&problem, run.plan, &run.options, &output, "update behind a replay");
        gpu_output_free(&output);
    }
    ekv_cuda_graph_free(gpu_context, graph);
    gpu_run_free(&run);
    ekv_cuda_stream_free(gpu_context, stream);
    gpu_problem_free(&problem);
}

/* The same outside graphs: decodes of several updates pile up behind a busy kernel, each with outputs of its own. */
static void updates_do_not_reach_decodes_in_flight(void **state)
{
    (void)state;
    gpu_problem problems[NUM_SETS];
    gpu_output outputs[NUM_SETS];
    for (int32_t i = 0; i < NUM_SETS; i++) {
        problems[i] = make_problem();
        gpu_problem_set_lengths(&problems[i], length_sets[i], REQUESTS);
        gpu_problem_reset(&problems[i]);
    }
    void *stream = make_stream();
    gpu_problem full = make_problem();
    gpu_run run = make_run(&full, "even", EKV_KERNEL_MMA, EKV_DISPATCH_DEFAULT, stream);
    assert_ok(ekv_cuda_occupy(gpu_context, stream, 1, 50 * 1000 * 1000));
    for (int32_t i = 0; i < NUM_SETS; i++) {
        assert_ok(ekv_plan_update(run.plan, length_sets[i], REQUESTS));
        assert_ok(ekv_plan_update(run.plan, length_sets[i], REQUESTS)); /* one that no decode uses */
        assert_ok(gpu_decode(&run, &problems[i]));
        assert_ok(gpu_decode(&run, &problems[i]));
    }
    assert_ok(ekv_cuda_stream_wait(gpu_context, stream));
    for (int32_t i = 0; i < NUM_SETS; i++) {
        outputs[i] = gpu_output_read(&problems[i]);
        assert_ok(ekv_plan_update(run.plan, length_sets[i], REQUESTS));
        gpu_output_check(&problems[i], run.plan, &run.options, &outputs[i], "decode behind a busy kernel");
        gpu_output_free(&outputs[i]);
        gpu_problem_free(&problems[i]);
    }
    gpu_run_free(&run);
    gpu_problem_free(&full);
    ekv_cuda_stream_free(gpu_context, stream);
}

typedef struct fork_work {
    gpu_run *run;
    const gpu_problem *problem;
    void *other;
    ekv_status status;
} fork_work;

/* Decodes on the captured stream, then on another that forks from it and joins it. */
static ekv_status enqueue_forked(void *argument, void *stream)
{
    fork_work *work = argument;
    ekv_status status;
    if ((status = ekv_cuda_stream_order(gpu_context, stream, work->other)))
        return status;
    work->run->options.stream = stream;
    if ((status = gpu_decode(work->run, work->problem)))
        return status;
    /* Both use one workspace, so the second waits for the first; the fork lies before the transfer. */
    if ((status = ekv_cuda_stream_order(gpu_context, stream, work->other)))
        return status;
    work->run->options.stream = work->other;
    if ((status = gpu_decode(work->run, work->problem)))
        return status;
    return ekv_cuda_stream_order(gpu_context, work->other, stream);
}

static void a_capture_may_fork(void **state)
{
    (void)state;
    gpu_problem problem = make_problem();
    void *stream = make_stream(), *other = make_stream();
    gpu_run run = make_run(&problem, "fa3", EKV_KERNEL_MMA, EKV_DISPATCH_DEFAULT, stream);
    fork_work work = { &run, &problem, other, EKV_OK };
    void *graph;
    assert_ok(ekv_cuda_graph_create(gpu_context, stream, enqueue_forked, &work, &graph));
    for (int32_t i = 0; i < NUM_SETS; i++) {
        gpu_problem_set_lengths(&problem, length_sets[i], REQUESTS);
        assert_ok(ekv_plan_update(run.plan, length_sets[i], REQUESTS));
        gpu_problem_reset(&problem);
        assert_ok(ekv_cuda_graph_launch(gpu_context, graph, stream));
        assert_ok(ekv_cuda_stream_wait(gpu_context, stream));
        read_and_check(&problem, &run, "forked capture");
    }
    ekv_cuda_graph_free(gpu_context, graph);
    gpu_run_free(&run);
    ekv_cuda_stream_free(gpu_context, other);
    ekv_cuda_stream_free(gpu_context, stream);
    gpu_problem_free(&problem);
}

/* ---- Streams --------------------------------------------------------------------------------------------- */

/* Ordered by events, as decodes of one plan must be; the transfer of each update goes out on the first stream. */
static void streams_take_turns(void **state)
{
    (void)state;
    gpu_problem problem = make_problem(), other_problem = make_problem();
    void *first = make_stream(), *second = make_stream();
    gpu_run run = make_run(&problem, "even", EKV_KERNEL_MMA, EKV_DISPATCH_DEFAULT, first);
    void *workspace;
    assert_ok(ekv_cuda_alloc(gpu_context, run.workspace_size, &workspace));
    for (int32_t i = 0; i < NUM_SETS; i++) {
        gpu_problem_set_lengths(&problem, length_sets[i], REQUESTS);
        gpu_problem_set_lengths(&other_problem, length_sets[i], REQUESTS);
        gpu_problem_reset(&problem);
        gpu_problem_reset(&other_problem);
        assert_ok(ekv_plan_update(run.plan, length_sets[i], REQUESTS));
        assert_ok(ekv_cuda_occupy(gpu_context, first, 1, 10 * 1000 * 1000));
        run.options.stream = first;
        assert_ok(gpu_decode(&run, &problem));
        assert_ok(ekv_cuda_stream_order(gpu_context, first, second));
        run.options.stream = second;
        assert_ok(ekv_decode(run.plan, &other_problem.tensors, &run.options, workspace, run.workspace_size));
        assert_ok(ekv_cuda_stream_order(gpu_context, second, first));
        assert_ok(ekv_cuda_stream_wait(gpu_context, first));
        read_and_check(&problem, &run, "first stream");
        read_and_check(&other_problem, &run, "second stream");
    }
    ekv_cuda_free(gpu_context, workspace);
    gpu_run_free(&run);
    gpu_problem_free(&problem);
    gpu_problem_free(&other_problem);
    ekv_cuda_stream_free(gpu_context, first);
    ekv_cuda_stream_free(gpu_context, second);
}

/* Two plans with workspaces of their own, at once, many times. */
static void two_streams_at_once(void **state)
{
    (void)state;
    gpu_problem problems[2] = { make_problem(), make_problem() };
    void *streams[2] = { make_stream(), make_stream() };
    for (int32_t i = 0; i < NUM_PLANNERS; i++) {
        gpu_run runs[2];
        for (int32_t s = 0; s < 2; s++) {
            const int32_t planner = (i + s * 2) % NUM_PLANNERS;
            runs[s] = make_run(&problems[s], planners[planner], EKV_KERNEL_MMA, EKV_DISPATCH_DEFAULT, streams[s]);
            gpu_problem_reset(&problems[s]);
        }
        for (int32_t n = 0; n < 200; n++)
            for (int32_t s = 0; s < 2; s++)
                assert_ok(gpu_decode(&runs[s], &problems[s]));
        for (int32_t s = 0; s < 2; s++) {
            assert_ok(ekv_cuda_stream_wait(gpu_context, streams[s]));
            read_and_check(&problems[s], &runs[s], planners[i]);
            gpu_run_free(&runs[s]);
        }
    }
    for (int32_t s = 0; s < 2; s++) {
        gpu_problem_free(&problems[s]);
        ekv_cuda_stream_free(gpu_context, streams[s]);
    }
}

/* Half the SMs are held by another kernel for the whole time: no CTA may wait for one that cannot start. */
static void ten_thousand_launches_beside_a_busy_kernel(void **state)
{
    (void)state;
    gpu_problem problem = make_problem();
    void *busy = make_stream(), *stream = make_stream();
    for (int32_t i = 0; i < NUM_PLANNERS; i++) {
        gpu_run run = make_run(&problem, planners[i], EKV_KERNEL_MMA, EKV_DISPATCH_DEFAULT, stream);
        gpu_problem_reset(&problem);
        assert_ok(ekv_cuda_occupy(gpu_context, busy, gpu_device.num_sms / 2, 100 * 1000 * 1000));
        for (int32_t n = 0; n < 2000; n++)
            assert_ok(gpu_decode(&run, &problem));
        assert_ok(ekv_cuda_stream_wait(gpu_context, stream));
        read_and_check(&problem, &run, planners[i]);
        assert_ok(ekv_cuda_stream_wait(gpu_context, busy));
        gpu_run_free(&run);
    }
    ekv_cuda_stream_free(gpu_context, busy);
    ekv_cuda_stream_free(gpu_context, stream);
    gpu_problem_free(&problem);
}

static int run(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(graphs_replay_with_other_lengths),
        cmocka_unit_test(updates_wait_for_a_replay_in_flight),
        cmocka_unit_test(updates_do_not_reach_decodes_in_flight),
        cmocka_unit_test(a_capture_may_fork),
        cmocka_unit_test(streams_take_turns),
        cmocka_unit_test(two_streams_at_once),
        cmocka_unit_test(ten_thousand_launches_beside_a_busy_kernel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(void)
{
    return gpu_main(run);
}
