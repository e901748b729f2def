/* SPDX-License-Identifier: Apache-2.0
 * Many replays of captured decodes, each with lengths and a page table of its own, against fresh runs, bit for bit.
 *
 *     EKV_SOAK_REPLAYS=100000 test_cuda_soak    so many for each planner in place of 400
 *     EKV_SEED=7 test_cuda_soak                 other cases, in another order
 *
 * A case is lengths and a page table.  What a case gives is computed once by a fresh plan in a fresh workspace, outside
 * of any graph, and held against the reference.  Then graphs are captured, each with inputs and outputs of its own;
 * all run one plan in one workspace, so a replay finds whatever the one before left there.  A burst gives each graph a
 * case, launches all without waiting, and compares every byte of their outputs and of what lies behind them.  In some
 * bursts another kernel holds some of the SMs, which changes what runs where and who arrives last.
 *
 * This finds what depends on the replay before or on timing.  It cannot find what fresh runs do wrong as well beyond
 * the reference's tolerance, nor what takes more than one GPU or process. */
#include "gpu_support.h"
#include "plan/tensors.h"

#include <inttypes.h>

enum {
    REQUESTS = 48,
    KV_HEADS = 4,
    GROUP = 8,
    PAGE = 16,
    BOUND = 2048,           /* tokens of a request, but */
    LONG_BOUND = 40 * 1024, /* of LONG_REQUEST */
    LONG_REQUEST = 5,
    NUM_CASES = 48,
    GRAPHS = 4,
    LAYERS = 2, /* decodes a graph */
    GUARD_BYTES = 512,
    POISON = 0xFF,
    USUAL_REPLAYS = 400,
    BUSY_EVERY = 8 /* bursts */
};

typedef struct soak_case {
    int32_t kv_len[REQUESTS];
    int32_t *tables;         /* indptr [REQUESTS + 1], then indices [all_pages] */
    unsigned char *expected; /* [block] */
} soak_case;

typedef struct soak_graph {
    ekv_tensors tensors[LAYERS];
    int32_t *inputs; /* device: kv_len [REQUESTS], then as soak_case.tables */
    void *graph;
    int32_t case_index; /* of the running burst */
} soak_graph;

typedef struct soak {
    const char *planner;
    bool on_device; /* else by host plans, updated before each launch */
    gpu_problem problem;
    int32_t all_pages;
    size_t tables_size;
    size_t o_size, block;         /* of one decode: O, LSE, guard */
    unsigned char *outputs, *got; /* device and host: [GRAPHS][LAYERS][block] */
    void *stream, *busy;
    ekv_rng rng;
    soak_case cases[NUM_CASES];
    soak_graph graphs[GRAPHS];
} soak;

static uint64_t seed_of_run(void)
{
    const char *seed = getenv("EKV_SEED");
    return seed ? strtoull(seed, NULL, 10) : 1;
}

static int32_t bound_of(int32_t request)
{
    return request == LONG_REQUEST ? LONG_BOUND : BOUND;
}

/* ---- Cases ------------------------------------------------------------------------------------------- */

/* What serving sees: all alike, of all lengths, one long one, few tokens, many padding rows, nothing at all. */
static int32_t draw_length(ekv_rng *rng, int32_t kind, int32_t request, int32_t common, int32_t used)
{
    const int32_t bound = bound_of(request);
    switch (kind) {
    case 0: return common;
    case 1: return (int32_t)ekv_rng_below(rng, BOUND + 1);
    case 2:
        return request == LONG_REQUEST ? bound - (int32_t)ekv_rng_below(rng, 5000)
                                       : 1 + (int32_t)ekv_rng_below(rng, 200);
    case 3: return (int32_t)ekv_rng_below(rng, 40);
    case 4: return request < used ? (int32_t)ekv_rng_below(rng, bound + 1) : 0;
    case 5: return bound;
    default: return 0;
    }
}

static void draw_case(soak *s, int32_t index, const int32_t *pages)
{
    soak_case *c = &s->cases[index];
    /* Nothing at all is one of the cases; of each other kind there are several. */
    const int32_t kind = index == 0 ? 6 : index % 6, common = 1 + (int32_t)ekv_rng_below(&s->rng, BOUND);
    const int32_t used = 1 + (int32_t)ekv_rng_below(&s->rng, REQUESTS);
    c->tables = malloc(s->tables_size);
    int32_t *indices = c->tables + REQUESTS + 1;
    for (int32_t i = 0; i < s->all_pages; i++) {
        const int32_t j = (int32_t)ekv_rng_below(&s->rng, i + 1);
        indices[i] = indices[j];
        indices[j] = pages[i];
    }
    c->tables[0] = 0;
    for (int32_t b = 0; b < REQUESTS; b++) {
        c->kv_len[b] = draw_length(&s->rng, kind, b, common, used);
        c->tables[b + 1] = c->tables[b] + (int32_t)ekv_ceil_div(c->kv_len[b], PAGE);
    }
}

/* Tensors of the problem with other inputs and outputs. */
static ekv_tensors tensors_at(const soak *s, const int32_t *inputs, unsigned char *outputs)
{
    ekv_tensors t = s->problem.tensors;
    t.page_indptr = inputs + REQUESTS;
    t.page_indices = t.page_indptr + REQUESTS + 1;
    t.o = outputs;
    t.lse = (float *)(void *)(outputs + s->o_size);
    return t;
}

static void set_inputs(const soak *s, const soak_case *c, int32_t *inputs)
{
    assert_ok(ekv_cuda_copy(gpu_context, inputs, c->kv_len, sizeof c->kv_len));
    assert_ok(ekv_cuda_copy(gpu_context, inputs + REQUESTS, c->tables, s->tables_size));
}

static void *device_memory(size_t size)
{
    void *memory;
    assert_ok(ekv_cuda_alloc(gpu_context, size, &memory));
    assert_ok(ekv_cuda_fill(gpu_context, memory, POISON, size));
    return memory;
}

static bool make_run(const soak *s, const gpu_problem *problem, bool on_device, gpu_run *run)
{
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.on_device = on_device;
    return gpu_run_create(problem, s->planner, &options, EKV_KERNEL_MMA, s->stream, run);
}

/* The case by itself: its own lengths are all that the plan knows, and its workspace has never been used. */
static void run_fresh(soak *s, soak_case *c, int32_t *inputs, int32_t index)
{
    gpu_problem *problem = &s->problem;
    const ekv_tensors kept = problem->tensors;
    gpu_run run;
    char what[64];
    snprintf(what, sizeof what, "%s, case %" PRId32, s->planner, index);
    set_inputs(s, c, inputs);
    problem->tensors.page_indptr = inputs + REQUESTS;
    problem->tensors.page_indices = problem->tensors.page_indptr + REQUESTS + 1;
    gpu_problem_set_lengths(problem, c->kv_len, REQUESTS);
    gpu_problem_reset(problem);
    assert_true(make_run(s, problem, false, &run));
    assert_ok(gpu_decode(&run, problem));
    assert_ok(ekv_cuda_stream_wait(gpu_context, s->stream));
    gpu_output output = gpu_output_read(problem);
    gpu_output_check(problem, run.plan, &run.options, &output, what);
    gpu_output_free(&output);
    c->expected = malloc(s->block);
    memset(c->expected, POISON, s->block);
    assert_ok(ekv_cuda_copy(gpu_context, c->expected, problem->tensors.o, s->o_size));
    assert_ok(ekv_cuda_copy(gpu_context, c->expected + s->o_size, problem->tensors.lse, problem->lse_size));
    gpu_run_free(&run);
    problem->tensors = kept;
}

/* ---- Graphs ------------------------------------------------------------------------------------------ */

typedef struct capture {
    soak *s;
    soak_graph *graph;
    gpu_run *run;
} capture;

/* As layers of a model: the first plans, where the plan is made on the GPU, and the others read its records. */
static ekv_status enqueue_layers(void *argument, void *stream)
{
    const capture *c = argument;
    ekv_status status = EKV_OK;
    c->run->options.stream = stream;
    for (int32_t layer = 0; layer < LAYERS && !status; layer++) {
        ekv_tensors tensors = c->graph->tensors[layer];
        tensors.kv_len = c->s->on_device && layer == 0 ? c->graph->inputs : NULL;
        status = ekv_decode(c->run->plan, &tensors, &c->run->options, c->run->workspace, c->run->workspace_size);
    }
    return status;
}

static void make_graph(soak *s, gpu_run *run, int32_t index)
{
    soak_graph *g = &s->graphs[index];
    g->inputs = device_memory(REQUESTS * sizeof *g->inputs + s->tables_size);
    set_inputs(s, &s->cases[0], g->inputs);
    for (int32_t layer = 0; layer < LAYERS; layer++)
        g->tensors[layer] = tensors_at(s, g->inputs, s->outputs + (size_t)(index * LAYERS + layer) * s->block);
    capture work = { s, g, run };
    assert_ok(ekv_cuda_graph_create(gpu_context, s->stream, enqueue_layers, &work, &g->graph));
}

/* ---- Bursts ------------------------------------------------------------------------------------------ */

static void say_difference(const soak *s, const soak_graph *g, const unsigned char *got, int64_t replay, int32_t layer)
{
    const unsigned char *expected = s->cases[g->case_index].expected;
    size_t at = 0;
    while (got[at] == expected[at])
        at++;
    const size_t row_bytes = s->o_size / (REQUESTS * KV_HEADS * GROUP);
    const size_t row = at < s->o_size ? at / row_bytes : (at - s->o_size) / sizeof(float);
    fail_msg("%s%s, EKV_SEED=%" PRIu64 ": replay %" PRId64 ", layer %d, case %d: byte %zu of %zu (%s of request %zu, "
             "head %zu) differs from the fresh run's",
             s->planner, s->on_device ? " on the device" : "", seed_of_run(), replay, layer, g->case_index, at,
             s->block,
             at < s->o_size                      ? "O"
             : row < REQUESTS * KV_HEADS * GROUP ? "LSE"
                                                 : "past the end",
             row / (KV_HEADS * GROUP), row % (KV_HEADS * GROUP));
}

static void give_cases(soak *s)
{
    for (int32_t i = 0; i < GRAPHS; i++) {
        soak_graph *g = &s->graphs[i];
        g->case_index = (int32_t)ekv_rng_below(&s->rng, NUM_CASES);
        set_inputs(s, &s->cases[g->case_index], g->inputs);
    }
    assert_ok(ekv_cuda_fill(gpu_context, s->outputs, POISON, GRAPHS * LAYERS * s->block));
}

static void run_burst(soak *s, gpu_run *run, int64_t replay, int64_t burst)
{
    give_cases(s);
    if (burst % BUSY_EVERY == 0)
        assert_ok(ekv_cuda_occupy(gpu_context, s->busy, 1 + (int32_t)ekv_rng_below(&s->rng, gpu_device.num_sms - 1),
                                  20 * 1000 + ekv_rng_below(&s->rng, 200 * 1000)));
    for (int32_t i = 0; i < GRAPHS; i++) {
        if (!s->on_device)
            assert_ok(ekv_plan_update(run->plan, s->cases[s->graphs[i].case_index].kv_len, REQUESTS));
        assert_ok(ekv_cuda_graph_launch(gpu_context, s->graphs[i].graph, s->stream));
    }
    assert_ok(ekv_cuda_stream_wait(gpu_context, s->stream));
    assert_ok(ekv_cuda_copy(gpu_context, s->got, s->outputs, GRAPHS * LAYERS * s->block));
    for (int32_t i = 0; i < GRAPHS; i++)
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            const unsigned char *got = s->got + (size_t)(i * LAYERS + layer) * s->block;
            if (memcmp(got, s->cases[s->graphs[i].case_index].expected, s->block))
                say_difference(s, &s->graphs[i], got, replay + i, layer);
        }
}

/* ---- The test ---------------------------------------------------------------------------------------- */

/* Every request as long as it may be, in whole pages, so that every page has values. */
static void make_problem(soak *s)
{
    static int32_t bounds[REQUESTS];
    gpu_spec spec = GPU_SPEC_INIT;
    for (int32_t b = 0; b < REQUESTS; b++) {
        bounds[b] = bound_of(b);
        s->all_pages += bounds[b] / PAGE;
    }
    spec.kv_heads = KV_HEADS;
    spec.group = GROUP;
    spec.page_size = PAGE;
    spec.batch_size = REQUESTS;
    spec.kv_len = bounds;
    assert_true(gpu_problem_create(&spec, &s->problem));
    s->tables_size = ((size_t)REQUESTS + 1 + (size_t)s->all_pages) * sizeof(int32_t);
    s->o_size = s->problem.o_size;
    s->block = s->o_size + s->problem.lse_size + GUARD_BYTES;
}

static void make_cases(soak *s)
{
    int32_t *pages = malloc((size_t)s->all_pages * sizeof *pages);
    int32_t *inputs = device_memory(REQUESTS * sizeof *inputs + s->tables_size);
    assert_ok(ekv_cuda_copy(gpu_context, pages, s->problem.tensors.page_indices, (size_t)s->all_pages * sizeof *pages));
    for (int32_t i = 0; i < NUM_CASES; i++) {
        draw_case(s, i, pages);
        run_fresh(s, &s->cases[i], inputs, i);
    }
    ekv_cuda_free(gpu_context, inputs);
    free(pages);
}

static void soak_planner(const char *planner, bool on_device, int64_t replays)
{
    soak *s = calloc(1, sizeof *s);
    s->planner = planner;
    s->on_device = on_device;
    s->rng = (ekv_rng){ seed_of_run() };
    assert_ok(ekv_cuda_stream_create(gpu_context, &s->stream));
    assert_ok(ekv_cuda_stream_create(gpu_context, &s->busy));
    make_problem(s);
    int32_t bounds[REQUESTS];
    memcpy(bounds, s->problem.batch.kv_len, sizeof bounds);
    make_cases(s);
    gpu_problem_set_lengths(&s->problem, bounds, REQUESTS);
    gpu_run run;
    assert_true(make_run(s, &s->problem, on_device, &run));
    s->outputs = device_memory(GRAPHS * LAYERS * s->block);
    s->got = malloc(GRAPHS * LAYERS * s->block);
    for (int32_t i = 0; i < GRAPHS; i++)
        make_graph(s, &run, i);

    int64_t done = 0;
    for (int64_t burst = 0; done < replays; burst++, done += GRAPHS)
        run_burst(s, &run, done, burst);
    print_message("%s%s: %" PRId64 " replays of %d decodes, %d cases, all with the bits of fresh runs\n", planner,
                  on_device ? ", planned on the device" : "", done, LAYERS, NUM_CASES);

    for (int32_t i = 0; i < GRAPHS; i++) {
        ekv_cuda_graph_free(gpu_context, s->graphs[i].graph);
        ekv_cuda_free(gpu_context, s->graphs[i].inputs);
    }
    for (int32_t i = 0; i < NUM_CASES; i++) {
        free(s->cases[i].tables);
        free(s->cases[i].expected);
    }
    ekv_cuda_free(gpu_context, s->outputs);
    free(s->got);
    gpu_run_free(&run);
    gpu_problem_free(&s->problem);
    ekv_cuda_stream_free(gpu_context, s->busy);
    ekv_cuda_stream_free(gpu_context, s->stream);
    free(s);
}

static int64_t replays_of_run(void)
{
    const char *replays = getenv("EKV_SOAK_REPLAYS");
    return replays ? strtoll(replays, NULL, 10) : USUAL_REPLAYS;
}

static void even_on_the_device(void **state)
{
    (void)state;
    soak_planner("even", true, replays_of_run());
}

static void even_invariant_on_the_device(void **state)
{
    (void)state;
    soak_planner("even-invariant", true, replays_of_run());
}

/* A replay reads a host's plan from pinned memory, 0.2 ms each, so there are fewer. */
static void even_by_plans_of_the_host(void **state)
{
    (void)state;
    soak_planner("even", false, ekv_ceil_div(replays_of_run(), 10));
}

static int run(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(even_on_the_device),
        cmocka_unit_test(even_invariant_on_the_device),
        cmocka_unit_test(even_by_plans_of_the_host),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(void)
{
    return gpu_main(run);
}
