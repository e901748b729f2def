/* SPDX-License-Identifier: Apache-2.0
 * What must not change a single bit of the output: threads, dispatch, page order, page size, layout, strides, form of
 * the page table, and for even-invariant the rest of the batch and the device.  And what may change roundings only:
 * the number of splits. */
#include "one_context.h"
#include "support.h"

enum { REQUESTS = 7 };
static const int32_t lengths[REQUESTS] = { 1, 1300, 0, 257, 64, 31, 700 };

static ekv_batch some_batch(void)
{
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = REQUESTS;
    batch.kv_len = lengths;
    batch.q_heads = 10;
    batch.kv_heads = 2;
    batch.head_dim = 64;
    return batch;
}

static ekv_plan_options some_options(void)
{
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.resident_ctas = 2;
    return options;
}

/* ---- Threads and dispatch ---------------------------------------------------------------------------- */

static void threads_do_not_matter(void **state)
{
    (void)state;
    const ekv_batch batch = some_batch();
    const ekv_plan_options options = some_options();
    const ekv_device device = support_device(12);
    const char *planner;
    for (int32_t i = 0; (planner = ekv_planner_name(i)); i++) {
        decode_setup one, many;
        const int32_t step = strcmp(planner, "even-invariant") ? 3 : 1;
        support_run(context, planner, &batch, &device, &options, NULL, &one);
        for (int32_t threads = 1; threads <= 16; threads += step) {
            ekv_context *other = support_context(threads);
            assert_ok(support_set_up(other, planner, &batch, &device, &options, NULL, &many));
            assert_ok(support_decode(&many));
            support_assert_same(&one, &many, planner);
            support_tear_down(&many);
            ekv_context_free(other);
        }
        support_tear_down(&one);
    }
}

static void dispatch_does_not_matter(void **state)
{
    (void)state;
    const ekv_batch batch = some_batch();
    const ekv_device device = support_device(12);
    const char *planner;
    for (int32_t i = 0; (planner = ekv_planner_name(i)); i++) {
        decode_setup own, other;
        ekv_plan_options options = some_options();
        support_run(context, planner, &batch, &device, &options, NULL, &own);
        for (int d = EKV_DISPATCH_GRID; d <= EKV_DISPATCH_RANGE; d++) {
            options.dispatch = (ekv_dispatch)d;
            assert_ok(support_set_up(context, planner, &batch, &device, &options, NULL, &other));
            assert_ok(support_decode(&other));
            support_assert_same(&own, &other, planner);
            support_tear_down(&other);
        }
        support_tear_down(&own);
    }
}

/* Twenty decodes with one workspace and threads that race for tiles. */
static void repetition_does_not_matter(void **state)
{
    (void)state;
    const ekv_batch batch = some_batch();
    const ekv_device device = support_device(12);
    decode_setup first, again;
    support_run(context, "even", &batch, &device, NULL, NULL, &first);
    assert_ok(support_set_up(context, "even", &batch, &device, NULL, NULL, &again));
    for (int n = 0; n < 20; n++) {
        assert_ok(support_decode(&again));
        support_assert_same(&first, &again, "again");
    }
    support_tear_down(&first);
    support_tear_down(&again);
}

/* Packed or not, a query head computes the same. */
static void packing_does_not_matter(void **state)
{
    (void)state;
    const ekv_batch batch = some_batch();
    const ekv_device device = support_device(12);
    ekv_plan_options options = some_options();
    decode_setup packed, unpacked;
    support_run(context, "none", &batch, &device, &options, NULL, &packed);
    options.no_pack_gqa = 1;
    support_run(context, "none", &batch, &device, &options, NULL, &unpacked);
    assert_int_equal(unpacked.plan->heads, batch.q_heads);
    support_assert_same(&packed, &unpacked, "packing");
    support_tear_down(&packed);
    support_tear_down(&unpacked);
}

/* ---- Where the cache lies ---------------------------------------------------------------------------- */

static void run_cache(const ekv_batch *batch, const ekv_random_cache_options *cache, decode_setup *setup)
{
    const ekv_device device = support_device(12);
    ekv_plan_options options = some_options();
    options.block_tokens = 16; /* or page sizes would move the cuts */
    support_run(context, "even", batch, &device, &options, cache, setup);
}

static void the_cache_s_place_does_not_matter(void **state)
{
    (void)state;
    ekv_batch batch = some_batch();
    ekv_random_cache_options cache = EKV_RANDOM_CACHE_OPTIONS_INIT;
    decode_setup plain, other;
    cache.ordered_pages = true;
    run_cache(&batch, &cache, &plain);
    for (int variant = 0; variant < 32; variant++) {
        cache.ordered_pages = variant & 1;
        cache.block_table = variant & 2;
        cache.row_padding = variant & 4 ? 8 : 0;
        cache.extra_pages = variant & 4 ? 100 : 0;
        batch.layout = variant & 8 ? EKV_LAYOUT_HND : EKV_LAYOUT_NHD;
        batch.page_size = variant & 16 ? 7 : 16;
        run_cache(&batch, &cache, &other);
        support_assert_same(&plain, &other, "place of the cache");
        support_tear_down(&other);
    }
    support_tear_down(&plain);
}

/* Strides of 0 are those of a dense tensor of the batch's layout. */
static void dense_strides_are_the_default(void **state)
{
    (void)state;
    ekv_batch batch = some_batch();
    for (int layout = 0; layout < 2; layout++) {
        batch.layout = (ekv_layout)layout;
        decode_setup given, defaults;
        const ekv_random_cache_options cache = EKV_RANDOM_CACHE_OPTIONS_INIT;
        run_cache(&batch, &cache, &given);
        run_cache(&batch, &cache, &defaults);
        ekv_tensors *t = defaults.tensors;
        const ekv_tensors *g = given.tensors;
        assert_int_equal(g->k_stride_token, layout ? 64 : 2 * 64);
        assert_int_equal(g->k_stride_head, layout ? 16 * 64 : 64);
        t->k_stride_page = t->k_stride_token = t->k_stride_head = 0;
        t->v_stride_page = t->v_stride_token = t->v_stride_head = 0;
        t->q_stride_request = t->q_stride_head = t->o_stride_request = t->o_stride_head = 0;
        t->lse_stride_request = t->lse_stride_head = 0;
        assert_ok(support_decode(&defaults));
        ekv_tensors explicit = *g; /* of the same shape, over the outputs of the defaults */
        explicit.o = t->o;
        explicit.lse = t->lse;
        defaults.tensors = &explicit;
        support_assert_same(&given, &defaults, "default strides");
        support_tear_down(&given);
        support_tear_down(&defaults);
    }
}

/* K as [head][page][token] and V as [token][head][page], which no layout of a batch has. */
static void k_and_v_may_lie_in_different_orders(void **state)
{
    (void)state;
    ekv_batch batch = some_batch();
    batch.kv_dtype = EKV_DTYPE_F32;
    const ekv_random_cache_options cache = EKV_RANDOM_CACHE_OPTIONS_INIT;
    decode_setup plain, other;
    run_cache(&batch, &cache, &plain);
    run_cache(&batch, &cache, &other);
    const ekv_tensors *from = plain.tensors;
    ekv_tensors *to = other.tensors;
    const int64_t pages = from->num_pages, tokens = batch.page_size, heads = batch.kv_heads, dim = batch.head_dim;
    float *k = malloc((size_t)(pages * from->k_stride_page) * sizeof *k);
    float *v = malloc((size_t)(pages * from->v_stride_page) * sizeof *v);
    to->k_stride_head = pages * tokens * dim;
    to->k_stride_page = tokens * dim;
    to->k_stride_token = dim;
    to->v_stride_token = heads * pages * dim;
    to->v_stride_head = pages * dim;
    to->v_stride_page = dim;
    for (int64_t p = 0; p < pages; p++)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t h = 0; h < heads; h++) {
                const int64_t at = p * from->k_stride_page + t * from->k_stride_token + h * from->k_stride_head;
                memcpy(k + p * to->k_stride_page + t * to->k_stride_token + h * to->k_stride_head,
                       (const float *)from->k + at, (size_t)dim * sizeof *k);
                memcpy(v + p * to->v_stride_page + t * to->v_stride_token + h * to->v_stride_head,
                       (const float *)from->v + at, (size_t)dim * sizeof *v);
            }
    to->k = k;
    to->v = v;
    assert_ok(support_decode(&other));
    support_assert_same(&plain, &other, "K and V in other orders");
    support_tear_down(&plain);
    support_tear_down(&other);
    free(k);
    free(v);
}

/* O, LSE and Q as views of larger tensors in another order. */
static void rows_may_lie_in_any_order(void **state)
{
    (void)state;
    ekv_batch batch = some_batch();
    batch.q_dtype = EKV_DTYPE_F32;
    const ekv_random_cache_options cache = EKV_RANDOM_CACHE_OPTIONS_INIT;
    decode_setup plain, other;
    run_cache(&batch, &cache, &plain);
    run_cache(&batch, &cache, &other);
    const int64_t rows = batch.q_heads, dim = batch.head_dim;
    float *q = calloc((size_t)(REQUESTS * rows * dim), sizeof *q),
          *o = calloc((size_t)(REQUESTS * rows * dim), sizeof *o);
    float *lse = calloc((size_t)(REQUESTS * rows), sizeof *lse);
    for (int64_t b = 0; b < REQUESTS; b++)
        for (int64_t h = 0; h < rows; h++)
            memcpy(q + (h * REQUESTS + b) * dim, (const float *)plain.tensors->q + (b * rows + h) * dim,
                   (size_t)dim * sizeof *q);
    ekv_tensors *t = other.tensors;
    t->q = q;
    t->q_stride_request = dim;
    t->q_stride_head = REQUESTS * dim;
    t->o = o + (REQUESTS * rows - 1) * dim; /* backwards */
    t->o_stride_request = -dim;
    t->o_stride_head = -REQUESTS * dim;
    t->lse = lse;
    t->lse_stride_request = 1;
    t->lse_stride_head = REQUESTS;
    assert_ok(support_decode(&other));
    support_assert_same(&plain, &other, "rows in another order");
    support_tear_down(&plain);
    support_tear_down(&other);
    free(q);
    free(o);
    free(lse);
}

/* ---- The rest of the batch --------------------------------------------------------------------------- */

/* An output of even-invariant depends on its own request only. */
static void even_invariant_ignores_the_rest_of_the_batch(void **state)
{
    (void)state;
    ekv_batch batch = some_batch();
    ekv_plan_options options = some_options();
    ekv_device device = support_device(132);
    decode_setup together, alone;
    for (int seed = 1; seed <= 3; seed++) {
        ekv_random_cache_options cache = EKV_RANDOM_CACHE_OPTIONS_INIT;
        cache.seed = (uint64_t)seed;
        options.chunk_tokens = seed == 1 ? 0 : 64;
        batch = some_batch();
        support_run(context, "even-invariant", &batch, &device, &options, &cache, &together);
        for (int32_t b = 0; b < REQUESTS; b++) {
            const int32_t others[5] = { 3, 2000, lengths[b], 0, 100 }, ids[5] = { 100, 101, b, 102, 103 };
            for (int32_t threads = 1; threads <= 16; threads += 5) {
                ekv_context *own = support_context(threads);
                const ekv_device small = support_device(threads);
                batch.batch_size = 1;
                batch.kv_len = &lengths[b];
                cache.request_ids = &b;
                assert_ok(support_set_up(own, "even-invariant", &batch, &small, &options, &cache, &alone));
                assert_ok(support_decode(&alone));
                support_assert_same_request(&together, b, &alone, 0, "alone");
                support_tear_down(&alone);
                batch.batch_size = 5;
                batch.kv_len = others;
                cache.request_ids = ids;
                assert_ok(support_set_up(own, "even-invariant", &batch, &small, &options, &cache, &alone));
                assert_ok(support_decode(&alone));
                support_assert_same_request(&together, b, &alone, 2, "in another batch");
                support_tear_down(&alone);
                ekv_context_free(own);
            }
        }
        support_tear_down(&together);
    }
}

/* The same requests in another order, under every planner: right again, and the same up to rounding. */
static void request_order_changes_roundings_only(void **state)
{
    (void)state;
    ekv_batch batch = some_batch();
    const ekv_plan_options options = some_options();
    const ekv_device device = support_device(12);
    int32_t reversed[REQUESTS], ids[REQUESTS];
    for (int32_t b = 0; b < REQUESTS; b++) {
        ids[b] = REQUESTS - 1 - b;
        reversed[b] = lengths[ids[b]];
    }
    const char *planner;
    for (int32_t i = 0; (planner = ekv_planner_name(i)); i++) {
        ekv_random_cache_options cache = EKV_RANDOM_CACHE_OPTIONS_INIT;
        cache.request_ids = ids;
        batch.kv_len = reversed;
        decode_setup setup;
        support_run(context, planner, &batch, &device, &options, &cache, &setup);
        support_tear_down(&setup);
    }
}

/* ---- Splits ------------------------------------------------------------------------------------------ */

/* One split or many: the difference stays within the roundings of both. */
static void splits_change_roundings_only(void **state)
{
    (void)state;
    ekv_batch batch = some_batch();
    batch.q_dtype = EKV_DTYPE_F32; /* so that an output is not rounded to 8 bits */
    const ekv_plan_options options = some_options();
    ekv_device device = support_device(1);
    decode_setup whole, split;
    support_run(context, "none", &batch, &device, &options, NULL, &whole);
    ekv_reference *reference;
    assert_ok(ekv_reference_create(context, &whole.plan->batch, whole.tensors, &reference));
    const char *planner;
    for (int32_t i = 0; (planner = ekv_planner_name(i)); i++) {
        int32_t most = 0;
        for (int32_t sms = 2; sms <= 128; sms *= 4) {
            device = support_device(sms);
            support_run(context, planner, &batch, &device, &options, NULL, &split);
            for (int64_t at = 0; at < REQUESTS * batch.q_heads * batch.head_dim; at++) {
                const int32_t b = (int32_t)(at / (batch.q_heads * batch.head_dim));
                const ekv_row_shape shape = { EKV_DTYPE_F32, EKV_DTYPE_F32, batch.head_dim, lengths[b],
                                              split.plan->num_splits[b] };
                const double difference =
                    fabs((double)((const float *)whole.tensors->o)[at] - ((const float *)split.tensors->o)[at]);
                const double tolerance =
                    ekv_tolerance_o(&shape, &reference->scale[at / batch.head_dim], reference->o[at]);
                if (lengths[b] && difference > 2 * tolerance)
                    fail_msg("%s with %d SMs: request %d differs by %g, tolerance %g", planner, sms, b, difference,
                             tolerance);
                most = split.plan->num_splits[b] > most ? split.plan->num_splits[b] : most;
            }
            support_tear_down(&split);
        }
        if (strcmp(planner, "none") && !strstr(planner, "nosplit") && strcmp(planner, "flashinfer-xqa"))
            assert_true(most > 1); /* or the test shows nothing */
    }
    ekv_reference_free(reference);
    support_tear_down(&whole);
}

int main(void)
{
    support_forced_kernel(); /* ends here where this CPU lacks it */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_do_not_matter),
        cmocka_unit_test(dispatch_does_not_matter),
        cmocka_unit_test(repetition_does_not_matter),
        cmocka_unit_test(packing_does_not_matter),
        cmocka_unit_test(the_cache_s_place_does_not_matter),
        cmocka_unit_test(dense_strides_are_the_default),
        cmocka_unit_test(k_and_v_may_lie_in_different_orders),
        cmocka_unit_test(rows_may_lie_in_any_order),
        cmocka_unit_test(even_invariant_ignores_the_rest_of_the_batch),
        cmocka_unit_test(request_order_changes_roundings_only),
        cmocka_unit_test(splits_change_roundings_only),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
