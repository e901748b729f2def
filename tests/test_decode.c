/* SPDX-License-Identifier: Apache-2.0
 * The CPU backend against the reference: every planner over random shapes, and the cases that random shapes miss.
 *
 *     EKV_SEED=1234 test_decode    only the random case of that seed, under every planner */
#include "support.h"

#include "counting_allocator.h"

#include <sys/mman.h>

enum { RANDOM_CASES = 20, MAX_REQUESTS = 12 };

/* Contexts of 1, 2, 3 and 16 threads. */
enum { NUM_CONTEXTS = 4 };
static ekv_context *contexts[NUM_CONTEXTS];

static int create_contexts(void **state)
{
    (void)state;
    const int32_t threads[NUM_CONTEXTS] = { 1, 2, 3, 16 };
    for (int i = 0; i < NUM_CONTEXTS; i++)
        contexts[i] = support_context(threads[i]);
    return 0;
}

static int free_contexts(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_CONTEXTS; i++)
        ekv_context_free(contexts[i]);
    return 0;
}

static ekv_batch small_batch(int32_t batch_size, const int32_t *kv_len)
{
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = batch_size;
    batch.kv_len = kv_len;
    batch.q_heads = 6;
    batch.kv_heads = 2;
    batch.head_dim = 64;
    batch.page_size = 16;
    batch.q_dtype = batch.kv_dtype = EKV_DTYPE_F32;
    return batch;
}

/* ---- Random shapes ----------------------------------------------------------------------------------- */

typedef struct random_case {
    ekv_batch batch;
    ekv_device device;
    ekv_plan_options options;
    ekv_random_cache_options cache;
    ekv_lse_base lse_base;
    ekv_context *context;
    int32_t kv_len[MAX_REQUESTS];
} random_case;

static int32_t random_length(ekv_rng *rng, int32_t longest)
{
    switch (ekv_rng_below(rng, 6)) {
    case 0: return PICK(rng, 0, 1, 2);
    case 1: return PICK(rng, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257);
    case 2: return 1 << ekv_rng_below(rng, 9);
    default: return (int32_t)ekv_rng_below(rng, longest);
    }
}

static void make_case(uint64_t seed, random_case *c)
{
    ekv_rng rng = { seed };
    *c = (random_case){ .batch = EKV_BATCH_INIT,
                        .options = EKV_PLAN_OPTIONS_INIT,
                        .cache = EKV_RANDOM_CACHE_OPTIONS_INIT,
                        .context = contexts[ekv_rng_below(&rng, NUM_CONTEXTS)] };
    ekv_batch *batch = &c->batch;
    batch->batch_size = 1 + (int32_t)ekv_rng_below(&rng, MAX_REQUESTS);
    batch->kv_len = c->kv_len;
    const int32_t longest = PICK(&rng, 40, 200, 700);
    for (int32_t b = 0; b < batch->batch_size; b++)
        c->kv_len[b] = random_length(&rng, longest);
    if (ekv_rng_below(&rng, 4) == 0) /* one holds most of the batch */
        c->kv_len[ekv_rng_below(&rng, batch->batch_size)] = 2000 + (int32_t)ekv_rng_below(&rng, 500);
    batch->kv_heads = PICK(&rng, 1, 2, 3, 4);
    batch->q_heads = batch->kv_heads * PICK(&rng, 1, 2, 3, 4, 5, 7, 8, 16);
    batch->head_dim = PICK(&rng, 64, 128, 32 + 8 * (int32_t)ekv_rng_below(&rng, 29));
    batch->page_size = PICK(&rng, 1, 2, 3, 16, 64, 100);
    batch->q_dtype = (ekv_dtype)ekv_rng_below(&rng, 3);
    batch->kv_dtype = (ekv_dtype)ekv_rng_below(&rng, 3);
    support_fit_kernel(batch);
    batch->layout = (ekv_layout)ekv_rng_below(&rng, 2);
    c->device = support_device(PICK(&rng, 1, 2, 7, 16, 78, 132));
    c->device.ctas_per_sm = PICK(&rng, 1, 2);
    c->device.request_cost_tokens = PICK(&rng, 0, 0, 20);
    c->options.resident_ctas = PICK(&rng, 1, 2, 9);
    c->options.cuda_graph = PICK(&rng, 0, 0, 1);
    c->options.no_sort = PICK(&rng, 0, 1);
    c->options.no_pack_gqa = PICK(&rng, 0, 1);
    c->options.dispatch = (ekv_dispatch)(ekv_rng_below(&rng, 2) * ekv_rng_below(&rng, 4));
    c->options.heads_per_tile = PICK(&rng, 0, 1, batch->kv_heads);
    c->options.block_tokens = PICK(&rng, 0, 1, 16);
    c->options.chunk_tokens = PICK(&rng, 0, 16, 128);
    c->cache.seed = seed;
    c->cache.block_table = ekv_rng_below(&rng, 2);
    c->cache.no_lse = ekv_rng_below(&rng, 8) == 0;
    c->cache.row_padding = PICK(&rng, 0, 0, 1, 24);
    c->cache.q_range = (float)PICK(&rng, 1, 4, 16, 64);
    c->lse_base = (ekv_lse_base)ekv_rng_below(&rng, 2);
}

/* True if the planner takes the shape and the decode was right.  Refusals that are right: a shape whose rule
 * nobody knows, and FlashInfer's graph padding fault. */
static bool run_case(const char *planner, const random_case *c)
{
    decode_setup setup;
    ekv_status status = support_set_up(c->context, planner, &c->batch, &c->device, &c->options, &c->cache, &setup);
    if (status == EKV_ERROR_UNSUPPORTED)
        return false;
    assert_ok(status);
    setup.options.lse_base = c->lse_base;
    status = support_decode(&setup);
    const bool padding_fault = setup.plan->num_work_items > setup.plan->max_work_items;
    assert_int_equal(status, padding_fault ? EKV_ERROR_PLAN_INVALID : EKV_OK);
    if (!padding_fault)
        support_assert_right(&setup, "random case");
    support_tear_down(&setup);
    return !padding_fault;
}

static void every_planner_matches_the_reference(void **state)
{
    (void)state;
    const char *only = getenv("EKV_SEED"), *planner;
    const uint64_t first = only ? strtoull(only, NULL, 0) : 1;
    const int cases = only ? 1 : RANDOM_CASES;
    for (int32_t i = 0; (planner = ekv_planner_name(i)); i++) {
        int decoded = 0;
        for (int n = 0; n < cases; n++) {
            random_case c;
            const uint64_t seed = only ? first : first + (uint64_t)(i * RANDOM_CASES + n);
            print_message("%s: EKV_SEED=%" PRIu64 "\n", planner, seed);
            make_case(seed, &c);
            decoded += run_case(planner, &c);
        }
        if (!only && decoded < RANDOM_CASES / 2)
            fail_msg("planner %s took %d of %d cases only", planner, decoded, RANDOM_CASES);
    }
}

/* Every head_dim, with rows left over from every width of the kernel. */
static void every_head_dim_and_group(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 77, 1, 32 };
    ekv_batch batch = small_batch(3, kv_len);
    const ekv_device device = support_device(4);
    decode_setup setup;
    for (batch.head_dim = 32; batch.head_dim <= 256; batch.head_dim += 8) {
        batch.q_heads = batch.kv_heads * (1 + batch.head_dim / 8 % 9);
        support_run(contexts[1], "even", &batch, &device, NULL, NULL, &setup);
        support_tear_down(&setup);
    }
}

/* ---- Without tokens ---------------------------------------------------------------------------------- */

static void assert_empty(const decode_setup *setup, int32_t request)
{
    const ekv_batch *batch = &setup->plan->batch;
    const float *o = (const float *)setup->tensors->o + (int64_t)request * batch->q_heads * batch->head_dim;
    for (int32_t i = 0; i < batch->q_heads * batch->head_dim; i++)
        assert_true(o[i] == 0);
    for (int32_t h = 0; h < batch->q_heads; h++)
        assert_true(setup->tensors->lse[request * batch->q_heads + h] == -INFINITY);
}

static void empty_requests_give_zero_and_minus_infinity(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 0, 130, 0, 0, 700, 0 };
    const ekv_batch batch = small_batch(6, kv_len);
    const ekv_device device = support_device(8);
    const char *planner;
    for (int32_t i = 0; (planner = ekv_planner_name(i)); i++)
        for (int base = 0; base < 2; base++) {
            ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
            options.resident_ctas = 2;
            decode_setup setup;
            assert_ok(support_set_up(contexts[2], planner, &batch, &device, &options, NULL, &setup));
            setup.options.lse_base = (ekv_lse_base)base;
            assert_ok(support_decode(&setup));
            support_assert_right(&setup, "some empty requests");
            for (int32_t b = 0; b < batch.batch_size; b++)
                if (!kv_len[b])
                    assert_empty(&setup, b);
            support_tear_down(&setup);
        }
}

/* No pages, no cache, no page table. */
static void a_batch_without_tokens_needs_no_cache(void **state)
{
    (void)state;
    const int32_t kv_len[5] = { 0 };
    const ekv_batch batch = small_batch(5, kv_len);
    const ekv_device device = support_device(8);
    const char *planner;
    for (int32_t i = 0; (planner = ekv_planner_name(i)); i++) {
        ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
        options.resident_ctas = 2;
        decode_setup setup;
        assert_ok(support_set_up(contexts[1], planner, &batch, &device, &options, NULL, &setup));
        setup.tensors->k = setup.tensors->v = NULL;
        setup.tensors->page_indices = NULL;
        assert_ok(support_decode(&setup));
        for (int32_t b = 0; b < batch.batch_size; b++)
            assert_empty(&setup, b);
        setup.tensors->page_indptr = setup.tensors->last_page_len = NULL;
        assert_ok(support_decode(&setup));
        assert_empty(&setup, 4);
        support_tear_down(&setup);
    }
}

/* ---- Extremes ---------------------------------------------------------------------------------------- */

/* Makes every logit base + t % 4 for request 0 of the batch, all exact in float: q = (2000, 1, 0, ...) and
 * k_t = (base / 2000, t % 4, 0, ...). */
static void set_logits(const decode_setup *setup, const float *base)
{
    const ekv_batch *batch = &setup->plan->batch;
    const ekv_tensors *t = setup->tensors;
    float *q = (float *)t->q, *k = (float *)t->k;
    for (int32_t h = 0; h < batch->q_heads; h++) {
        memset(q + h * t->q_stride_head, 0, (size_t)batch->head_dim * sizeof *q);
        q[h * t->q_stride_head] = 2000;
        q[h * t->q_stride_head + 1] = 1;
    }
    for (int32_t token = 0; token < batch->kv_len[0]; token++)
        for (int32_t h = 0; h < batch->kv_heads; h++) {
            float *row = k + t->page_indices[token / batch->page_size] * t->k_stride_page +
                         token % batch->page_size * t->k_stride_token + h * t->k_stride_head;
            memset(row, 0, (size_t)batch->head_dim * sizeof *row);
            row[0] = base[token] / 2000;
            row[1] = (float)(token % 4);
        }
}

enum { EXTREME_TOKENS = 600 };

/* Softmax does not change when all logits shift, so O keeps its bits; a merge by float LSEs would lose them. */
static void huge_logits_of_one_size_shift_away(void **state)
{
    (void)state;
    const int32_t kv_len[] = { EXTREME_TOKENS };
    const ekv_batch batch = small_batch(1, kv_len);
    const ekv_device device = support_device(8);
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.resident_ctas = 2;
    const float shifts[] = { 0, 8e6f, -8e6f };
    float base[EXTREME_TOKENS];
    const char *planner;
    for (int32_t i = 0; (planner = ekv_planner_name(i)); i++) {
        decode_setup setup[3];
        for (int n = 0; n < 3; n++) {
            assert_ok(support_set_up(contexts[1], planner, &batch, &device, &options, NULL, &setup[n]));
            setup[n].tensors->sm_scale = 1;
            for (int t = 0; t < EXTREME_TOKENS; t++)
                base[t] = shifts[n];
            set_logits(&setup[n], base);
            assert_ok(support_decode(&setup[n]));
            if (n == 0)
                support_assert_right(&setup[n], "no shift");
            else
                assert_memory_equal(setup[n].tensors->o, setup[0].tensors->o,
                                    (size_t)(batch.q_heads * batch.head_dim) * sizeof(float));
            for (int32_t h = 0; h < batch.q_heads; h++) /* a float of this size has steps of 0.5 */
                assert_true(fabsf(setup[n].tensors->lse[h] - setup[0].tensors->lse[h] - shifts[n]) <= 0.5f);
        }
        for (int n = 0; n < 3; n++)
            support_tear_down(&setup[n]);
    }
}

/* One token far above all others, wherever it is: O is its value. */
static void huge_logits_of_both_signs(void **state)
{
    (void)state;
    const int32_t kv_len[] = { EXTREME_TOKENS };
    const ekv_batch batch = small_batch(1, kv_len);
    const ekv_device device = support_device(8);
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.resident_ctas = 2;
    float base[EXTREME_TOKENS];
    const char *planner;
    for (int32_t i = 0; (planner = ekv_planner_name(i)); i++)
        for (int32_t peak = 0; peak < EXTREME_TOKENS; peak += 199) {
            decode_setup setup;
            assert_ok(support_set_up(contexts[2], planner, &batch, &device, &options, NULL, &setup));
            for (int t = 0; t < EXTREME_TOKENS; t++)
                base[t] = t == peak ? 8e6f : t % 3 ? -8e6f : 4e6f;
            set_logits(&setup, base);
            const ekv_tensors *t = setup.tensors;
            for (int negative = 0; negative < 2; negative++) { /* the same with both signs turned round */
                setup.tensors->sm_scale = negative ? -1 : 1;
                for (int32_t h = 0; negative && h < batch.q_heads; h++)
                    for (int32_t d = 0; d < 2; d++)
                        ((float *)t->q)[h * t->q_stride_head + d] *= -1;
                assert_ok(support_decode(&setup));
                for (int32_t h = 0; h < batch.q_heads; h++) {
                    const float *v = (const float *)t->v + t->page_indices[peak / 16] * t->v_stride_page +
                                     peak % 16 * t->v_stride_token + h / 3 * t->v_stride_head;
                    assert_memory_equal((const float *)t->o + h * t->o_stride_head, v,
                                        (size_t)batch.head_dim * sizeof *v);
                }
            }
            support_tear_down(&setup);
        }
}

/* Tokens that the others outweigh beyond what a float can tell, at logits of -8e6 and -inf, do not count: not where
 * their values are close to the largest float, and not where nothing outweighs them yet, as they come first. */
static void tokens_without_weight_do_not_count(void **state)
{
    (void)state;
    const int32_t kv_len[] = { EXTREME_TOKENS };
    const ekv_batch batch = small_batch(1, kv_len);
    const ekv_device device = support_device(8);
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.resident_ctas = 2;
    float base[EXTREME_TOKENS];
    const char *planner;
    for (int32_t i = 0; (planner = ekv_planner_name(i)); i++)
        for (int n = 0; n < 2; n++) {
            decode_setup setup;
            assert_ok(support_set_up(contexts[2], planner, &batch, &device, &options, NULL, &setup));
            const ekv_tensors *t = setup.tensors;
            setup.tensors->sm_scale = 1;
            for (int token = 0; token < EXTREME_TOKENS; token++) {
                const bool counts = token > 200 && token % 5 != 0;
                base[token] = counts ? 0 : n == 0 ? -8e6f : -INFINITY;
                float *v =
                    (float *)t->v + t->page_indices[token / 16] * t->v_stride_page + token % 16 * t->v_stride_token;
                for (int32_t h = 0; h < batch.kv_heads; h++)
                    for (int32_t d = 0; d < batch.head_dim; d++)
                        v[h * t->v_stride_head + d] = counts || token <= 200 ? 1 : 1e38f;
            }
            set_logits(&setup, base);
            assert_ok(support_decode(&setup));
            for (int32_t h = 0; h < batch.q_heads; h++)
                for (int32_t d = 0; d < batch.head_dim; d++)
                    if (!(fabsf(((const float *)t->o)[h * t->o_stride_head + d] - 1) < 1e-5f))
                        fail_msg("%s: O is %g, not 1", planner,
                                 (double)((const float *)t->o)[h * t->o_stride_head + d]);
            support_tear_down(&setup);
        }
}

/* Pages, requests and heads more than 2^31 elements apart, in address space that is mostly not there. */
static void strides_past_2_31_elements(void **state)
{
    (void)state;
    enum { PAGES = 3, REQUESTS = 3, RANGE = 1 << 16 };
    const int64_t stride = ((int64_t)1 << 31) + 4096;
    const size_t size = 3 * (size_t)stride * sizeof(float);
    char *space[4]; /* K, V, Q, O */
    for (int i = 0; i < 4; i++) {
        space[i] = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        assert_true(space[i] != MAP_FAILED);
        for (int p = 0; p < 3; p++)
            assert_int_equal(mprotect(space[i] + p * stride * 4, RANGE, PROT_READ | PROT_WRITE), 0);
    }
    const int32_t kv_len[REQUESTS] = { 16, 11, 5 };
    ekv_batch batch = small_batch(REQUESTS, kv_len);
    const ekv_device device = support_device(5);
    ekv_random_cache_options cache = EKV_RANDOM_CACHE_OPTIONS_INIT;
    cache.ordered_pages = true;
    cache.extra_pages = 0;
    decode_setup dense, apart;
    support_run(contexts[1], "even", &batch, &device, NULL, &cache, &dense);
    assert_ok(support_set_up(contexts[1], "even", &batch, &device, NULL, &cache, &apart));
    ekv_tensors *t = apart.tensors;
    for (int p = 0; p < PAGES; p++) {
        const int64_t page = t->k_stride_page, row = t->q_stride_request;
        memcpy(space[0] + p * stride * 4, (const float *)t->k + p * page, (size_t)page * 4);
        memcpy(space[1] + p * stride * 4, (const float *)t->v + p * page, (size_t)page * 4);
        memcpy(space[2] + p * stride * 4, (const float *)t->q + p * row, (size_t)row * 4);
    }
    t->k = space[0];
    t->v = space[1] + 2 * stride * 4; /* and backwards: page p of V is at -p */
    int32_t order[PAGES] = { 0, 1, 2 };
    t->page_indices = order;
    t->v_stride_page = -stride;
    for (size_t i = 0; i < (size_t)RANGE; i++) { /* pages 0 and 2 of V change places */
        char swapped = space[1][i];
        space[1][i] = space[1][2 * stride * 4 + (int64_t)i];
        space[1][2 * stride * 4 + (int64_t)i] = swapped;
    }
    t->q = space[2];
    t->o = space[3];
    t->k_stride_page = t->q_stride_request = t->o_stride_request = stride;
    assert_ok(support_decode(&apart));
    support_assert_right(&apart, "strides past 2^31");
    support_assert_same(&dense, &apart, "strides past 2^31");
    support_tear_down(&dense);
    support_tear_down(&apart);
    for (int i = 0; i < 4; i++)
        munmap(space[i], size);
}

/* ---- Growing ----------------------------------------------------------------------------------------- */

static void copy_token(const ekv_batch *batch, const ekv_tensors *from, const ekv_tensors *to, int32_t request,
                       int32_t token)
{
    const int32_t page = from->page_indices[from->page_indptr[request] + token / batch->page_size];
    for (int32_t h = 0; h < batch->kv_heads; h++) {
        const int64_t at =
            page * from->k_stride_page + token % batch->page_size * from->k_stride_token + h * from->k_stride_head;
        const size_t size = (size_t)batch->head_dim * sizeof(float);
        memcpy((float *)to->k + at, (const float *)from->k + at, size);
        memcpy((float *)to->v + at, (const float *)from->v + at, size);
    }
}

/* 2,000 steps of generation: each request grows by a token a step over a cache whose slots are NaN until they are
 * written.  Nothing is allocated on the way and the workspace stays as it was promised. */
static void grow(const char *planner)
{
    enum { STEPS = 2000, REQUESTS = 2 };
    counting_allocator allocator;
    ekv_context_options context_options = counting_options(&allocator);
    context_options.cuda_device = -2;
    ekv_context *context;
    assert_ok(ekv_context_create(&context_options, &context));
    int32_t full[REQUESTS] = { STEPS, STEPS + 50 }, kv_len[REQUESTS] = { 0, 50 };
    ekv_batch batch = small_batch(REQUESTS, full);
    batch.q_heads = 2;
    batch.kv_heads = 1;
    batch.head_dim = 32;
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.resident_ctas = 2;
    const ekv_device device = support_device(3);
    decode_setup setup;
    ekv_random_cache *source;
    const ekv_random_cache_options cache_options = EKV_RANDOM_CACHE_OPTIONS_INIT;
    assert_ok(ekv_random_cache_create(context, &batch, &cache_options, &source));
    assert_ok(support_set_up(context, planner, &batch, &device, &options, NULL, &setup));
    ekv_tensors *t = setup.tensors;
    const size_t cache_size = (size_t)(t->num_pages * t->k_stride_page) * sizeof(float);
    memset((void *)t->k, 0xFF, cache_size);
    memset((void *)t->v, 0xFF, cache_size);
    t->last_page_len = NULL; /* the table has pages for later tokens already */
    for (int32_t token = 0; token < kv_len[1]; token++)
        copy_token(&batch, ekv_random_cache_tensors(source), t, 1, token);
    for (int32_t step = 0; step < STEPS; step++) {
        for (int32_t b = 0; b < REQUESTS; b++)
            copy_token(&batch, ekv_random_cache_tensors(source), t, b, kv_len[b]++);
        const int64_t calls = allocator.calls;
        size_t size;
        assert_ok(ekv_plan_update(setup.plan, kv_len, REQUESTS));
        assert_ok(support_decode(&setup));
        assert_ok(ekv_workspace_size(setup.plan, EKV_BACKEND_CPU, &size));
        assert_int_equal(size, setup.workspace_size);
        assert_int_equal(allocator.calls, calls);
        if (step < 34 || step % 16 == 0 || step == STEPS - 1)
            support_assert_right(&setup, "growing");
    }
    support_tear_down(&setup);
    ekv_random_cache_free(source);
    ekv_context_free(context);
    assert_int_equal(allocator.live, 0);
}

static void growing_one_token_at_a_time(void **state)
{
    (void)state;
    grow("even");
    grow("fa3");
}

/* A plan for fewer requests than at its creation. */
static void a_smaller_batch_after_an_update(void **state)
{
    (void)state;
    const int32_t kv_len[] = { 300, 40, 0, 5 }, fewer[] = { 17, 90 };
    const ekv_batch batch = small_batch(4, kv_len);
    const ekv_device device = support_device(4);
    decode_setup setup;
    support_run(contexts[1], "even", &batch, &device, NULL, NULL, &setup);
    assert_ok(ekv_plan_update(setup.plan, fewer, 2));
    setup.tensors->last_page_len = NULL;
    int32_t indptr[3] = { 0, 19, 25 }; /* 16 tokens a page: all pages of the first request are request 0's */
    int32_t pages[25];
    memcpy(pages, setup.tensors->page_indices, 19 * sizeof *pages);
    memcpy(pages + 19, setup.tensors->page_indices, 6 * sizeof *pages);
    setup.tensors->page_indptr = indptr;
    setup.tensors->page_indices = pages;
    assert_ok(support_decode(&setup));
    support_assert_right(&setup, "fewer requests");
    const float *untouched = (const float *)setup.tensors->o + 2 * batch.q_heads * batch.head_dim;
    assert_true(isnan(untouched[0]));
    support_tear_down(&setup);
}

int main(void)
{
    support_forced_kernel(); /* ends here where this CPU lacks it */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_planner_matches_the_reference),
        cmocka_unit_test(every_head_dim_and_group),
        cmocka_unit_test(empty_requests_give_zero_and_minus_infinity),
        cmocka_unit_test(a_batch_without_tokens_needs_no_cache),
        cmocka_unit_test(huge_logits_of_one_size_shift_away),
        cmocka_unit_test(huge_logits_of_both_signs),
        cmocka_unit_test(tokens_without_weight_do_not_count),
        cmocka_unit_test(strides_past_2_31_elements),
        cmocka_unit_test(growing_one_token_at_a_time),
        cmocka_unit_test(a_smaller_batch_after_an_update),
    };
    return cmocka_run_group_tests(tests, create_contexts, free_contexts);
}
