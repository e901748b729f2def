/* SPDX-License-Identifier: Apache-2.0
 * What ekv_decode refuses, with which words, and that it leaves its outputs alone then. */
#include "one_context.h"
#include "support.h"

enum { REQUESTS = 3 };
static const int32_t lengths[REQUESTS] = { 20, 0, 33 }; /* pages of 16: 2, 0, 3 */

static ekv_batch some_batch(void)
{
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = REQUESTS;
    batch.kv_len = lengths;
    batch.q_heads = 4;
    batch.kv_heads = 2;
    batch.head_dim = 64;
    return batch;
}

static void set_up_batch(const ekv_batch *batch, bool block_table, decode_setup *setup)
{
    const ekv_device device = support_device(4);
    ekv_random_cache_options cache = EKV_RANDOM_CACHE_OPTIONS_INIT;
    cache.block_table = block_table;
    assert_ok(support_set_up(context, "even", batch, &device, NULL, &cache, setup));
}

static void set_up(bool block_table, decode_setup *setup)
{
    const ekv_batch batch = some_batch();
    set_up_batch(&batch, block_table, setup);
}

static void assert_untouched(const decode_setup *setup)
{
    const uint16_t *o = setup->tensors->o;
    for (int32_t i = 0; i < REQUESTS * 4 * 64; i++)
        assert_int_equal(o[i], 0xFFFF);
    for (int32_t i = 0; setup->tensors->lse && i < REQUESTS * 4; i++)
        assert_true(isnan(setup->tensors->lse[i]));
}

/* Runs the decode with tensors (or options) changed, and takes the change back. */
#define REFUSED(change, status, ...)                               \
    do {                                                           \
        const ekv_tensors tensors_ = *setup.tensors;               \
        const ekv_decode_options options_ = setup.options;         \
        setup.change;                                              \
        assert_fails(support_decode(&setup), status, __VA_ARGS__); \
        *setup.tensors = tensors_;                                 \
        setup.options = options_;                                  \
        assert_untouched(&setup);                                  \
    } while (0)

static void missing_and_odd_pointers(void **state)
{
    (void)state;
    decode_setup setup;
    set_up(false, &setup);
    assert_fails(ekv_decode(NULL, setup.tensors, NULL, setup.workspace, setup.workspace_size),
                 EKV_ERROR_INVALID_ARGUMENT, "plan is NULL");
    assert_fails(ekv_decode(setup.plan, NULL, NULL, setup.workspace, setup.workspace_size), EKV_ERROR_INVALID_ARGUMENT,
                 "tensors is NULL");
    REFUSED(tensors->struct_size = 0, EKV_ERROR_INVALID_ARGUMENT, "ekv_tensors.struct_size is 0");
    REFUSED(options.struct_size = 1, EKV_ERROR_INVALID_ARGUMENT, "ekv_decode_options.struct_size is 1");
    REFUSED(tensors->q = NULL, EKV_ERROR_INVALID_ARGUMENT, "tensors.q is NULL");
    REFUSED(tensors->k = NULL, EKV_ERROR_INVALID_ARGUMENT, "tensors.k is NULL");
    REFUSED(tensors->v = NULL, EKV_ERROR_INVALID_ARGUMENT, "tensors.v is NULL");
    REFUSED(tensors->o = NULL, EKV_ERROR_INVALID_ARGUMENT, "tensors.o is NULL");
    REFUSED(tensors->q = (const char *)setup.tensors->q + 1, EKV_ERROR_INVALID_ARGUMENT, "tensors.q", "aligned");
    REFUSED(tensors->v = (const char *)setup.tensors->v + 1, EKV_ERROR_INVALID_ARGUMENT, "tensors.v", "aligned");
    REFUSED(tensors->sm_scale = NAN, EKV_ERROR_INVALID_ARGUMENT, "sm_scale is nan");
    REFUSED(tensors->num_pages = -4, EKV_ERROR_INVALID_ARGUMENT, "num_pages is -4");
    REFUSED(options.lse_base = (ekv_lse_base)7, EKV_ERROR_INVALID_ARGUMENT, "lse_base 7");
    REFUSED(options.kernel = (ekv_kernel)99, EKV_ERROR_INVALID_ARGUMENT, "kernel 99");
    REFUSED(options.backend = (ekv_backend)7, EKV_ERROR_INVALID_ARGUMENT, "backend 7");
    assert_ok(support_decode(&setup));
    support_tear_down(&setup);
}

static void strides_beyond_sense(void **state)
{
    (void)state;
    decode_setup setup;
    set_up(false, &setup);
    REFUSED(tensors->k_stride_page = INT64_MAX / 2, EKV_ERROR_OVERFLOW, "k_stride_page", "4611686018427387903");
    REFUSED(tensors->v_stride_token = INT64_MIN, EKV_ERROR_OVERFLOW, "v_stride_token");
    REFUSED(tensors->v_stride_head = (int64_t)1 << 61, EKV_ERROR_OVERFLOW, "v_stride_head");
    REFUSED(tensors->q_stride_request = -((int64_t)1 << 61), EKV_ERROR_OVERFLOW, "q_stride_request");
    REFUSED(tensors->o_stride_head = (int64_t)1 << 61, EKV_ERROR_OVERFLOW, "o_stride_head");
    REFUSED(tensors->o_stride_head = 63, EKV_ERROR_INVALID_ARGUMENT, "o_stride_head is 63", "overlap");
    REFUSED(tensors->o_stride_request = 0, EKV_ERROR_INVALID_ARGUMENT, "o_stride_request is 0", "overlap");
    REFUSED(tensors->lse_stride_head = 0, EKV_ERROR_INVALID_ARGUMENT, "lse_stride_head is 0", "overlap");
    setup.tensors->o_stride_request = setup.tensors->o_stride_head = 64; /* apart each, not together */
    assert_fails(support_decode(&setup), EKV_ERROR_INVALID_ARGUMENT, "o_stride_request is 64 and o_stride_head 64");
    setup.tensors->o_stride_request = -2 * 64; /* request 1 and head 2 */
    assert_fails(support_decode(&setup), EKV_ERROR_INVALID_ARGUMENT, "o_stride_request is -128", "overlap");
    setup.tensors->o_stride_request = setup.tensors->o_stride_head = 0;
    setup.tensors->num_pages = 0; /* unknown: the pages in use still bound the offsets */
    REFUSED(tensors->k_stride_page = INT64_MAX / 2, EKV_ERROR_OVERFLOW, "k_stride_page");
    support_tear_down(&setup);
}

static void page_table_forms(void **state)
{
    (void)state;
    decode_setup setup;
    set_up(false, &setup);
    const int32_t table[1] = { 0 };
    REFUSED(tensors->block_table = table, EKV_ERROR_INVALID_ARGUMENT, "both given");
    REFUSED(tensors->block_table_rows = table, EKV_ERROR_INVALID_ARGUMENT, "block_table_rows");
    REFUSED(tensors->page_indices = NULL, EKV_ERROR_INVALID_ARGUMENT, "page_indices is NULL");
    setup.tensors->page_indptr = setup.tensors->page_indices = NULL;
    REFUSED(tensors->q_stride_head = 64, EKV_ERROR_INVALID_ARGUMENT, "both NULL");
    setup.tensors->block_table = table;
    REFUSED(tensors->q_stride_head = 64, EKV_ERROR_INVALID_ARGUMENT, "last_page_len is given without");
    support_tear_down(&setup);
}

static void csr_tables(void **state)
{
    (void)state;
    decode_setup setup;
    set_up(false, &setup);
    const int32_t *good = setup.tensors->page_indptr; /* 0, 2, 2, 5 */
    assert_int_equal(good[3], 5);
    const int32_t falling[] = { 0, 2, 1, 5 }, negative[] = { -1, 2, 2, 5 }, few[] = { 0, 2, 2, 4 };
    REFUSED(tensors->page_indptr = falling, EKV_ERROR_INVALID_ARGUMENT, "page_indptr[1] is 2", "page_indptr[2] is 1");
    REFUSED(tensors->page_indptr = negative, EKV_ERROR_INVALID_ARGUMENT, "page_indptr[0] is -1");
    REFUSED(tensors->page_indptr = few, EKV_ERROR_INVALID_ARGUMENT, "request 2 has 2 pages", "kv_len 33", "3");
    const int32_t zero[] = { 0, 0, 1 }, long_page[] = { 4, 0, 17 }, other[] = { 4, 0, 2 };
    REFUSED(tensors->last_page_len = zero, EKV_ERROR_INVALID_ARGUMENT, "last_page_len[0] is 0", "1..16");
    REFUSED(tensors->last_page_len = long_page, EKV_ERROR_INVALID_ARGUMENT, "last_page_len[2] is 17", "1..16");
    REFUSED(tensors->last_page_len = other, EKV_ERROR_INVALID_ARGUMENT, "last_page_len[2] is 2", "34 tokens", "33");
    int32_t pages[5];
    memcpy(pages, setup.tensors->page_indices, sizeof pages);
    pages[3] = -1;
    REFUSED(tensors->page_indices = pages, EKV_ERROR_INVALID_ARGUMENT, "page 1 of request 2 is -1");
    pages[3] = (int32_t)setup.tensors->num_pages;
    REFUSED(tensors->page_indices = pages, EKV_ERROR_INVALID_ARGUMENT, "page 1 of request 2 is 8", "num_pages is 8");
    assert_ok(support_decode(&setup));
    support_tear_down(&setup);
}

/* Pages for later tokens are legal where no last_page_len contradicts them; an index array may start anywhere. */
static void csr_tables_with_room(void **state)
{
    (void)state;
    decode_setup setup;
    set_up(false, &setup);
    const int32_t *used = setup.tensors->page_indices;
    const int32_t indptr[] = { 3, 7, 8, 11 };
    const int32_t indices[] = { -7, -7, -7, used[0], used[1], -1, -1, -1, used[2], used[3], used[4] };
    setup.tensors->page_indptr = indptr;
    setup.tensors->page_indices = indices;
    assert_fails(support_decode(&setup), EKV_ERROR_INVALID_ARGUMENT, "last_page_len[0] is 4", "kv_len is 20");
    setup.tensors->last_page_len = NULL;
    assert_ok(support_decode(&setup));
    support_assert_right(&setup, "room in the table");
    support_tear_down(&setup);
}

static void block_tables(void **state)
{
    (void)state;
    decode_setup setup;
    set_up(true, &setup);
    const int32_t *good = setup.tensors->block_table_rows, rows[] = { good[0], good[1], -2 };
    REFUSED(tensors->block_table_width = 2, EKV_ERROR_INVALID_ARGUMENT, "block_table_width is 2", "request 2",
            "needs 3");
    REFUSED(tensors->block_table_width = -1, EKV_ERROR_INVALID_ARGUMENT, "block_table_width is -1");
    REFUSED(tensors->block_table_rows = rows, EKV_ERROR_INVALID_ARGUMENT, "block_table_rows[2] is -2");
    REFUSED(tensors->block_table_stride = INT64_MAX, EKV_ERROR_OVERFLOW, "block_table_stride");
    /* The same with rows in request order: -1 in the used part, and beyond it. */
    int32_t table[REQUESTS][5];
    for (int32_t b = 0; b < REQUESTS; b++)
        memcpy(table[b], setup.tensors->block_table + setup.tensors->block_table_rows[b] * 5, sizeof table[b]);
    setup.tensors->block_table = table[0];
    setup.tensors->block_table_rows = NULL;
    setup.tensors->block_table_stride = 0; /* dense */
    assert_int_equal(table[2][3], -1);
    assert_ok(support_decode(&setup));
    support_assert_right(&setup, "block table");
    ekv_random_cache_reset(setup.cache);
    table[2][2] = -1;
    REFUSED(tensors->num_pages = 0, EKV_ERROR_INVALID_ARGUMENT, "page 2 of request 2 is -1");
    support_tear_down(&setup);
}

static void workspaces(void **state)
{
    (void)state;
    decode_setup setup;
    set_up(false, &setup);
    const size_t size = setup.workspace_size;
    char needed[32], given[32];
    snprintf(needed, sizeof needed, "needs %zu", size);
    snprintf(given, sizeof given, "is %zu", size - 1);
    ekv_random_cache_reset(setup.cache);
    assert_fails(ekv_decode(setup.plan, setup.tensors, NULL, setup.workspace, size - 1), EKV_ERROR_WORKSPACE_TOO_SMALL,
                 needed, given);
    assert_fails(ekv_decode(setup.plan, setup.tensors, NULL, NULL, size), EKV_ERROR_INVALID_ARGUMENT, "NULL");
    assert_fails(ekv_decode(setup.plan, setup.tensors, NULL, (char *)setup.workspace + 128, size),
                 EKV_ERROR_INVALID_ARGUMENT, "aligned to 256");
    assert_untouched(&setup);
    size_t got = 77;
    assert_fails(ekv_workspace_size(NULL, EKV_BACKEND_CPU, &got), EKV_ERROR_INVALID_ARGUMENT, "plan");
    assert_fails(ekv_workspace_size(setup.plan, EKV_BACKEND_CPU, NULL), EKV_ERROR_INVALID_ARGUMENT, "size");
    assert_fails(ekv_workspace_size(setup.plan, (ekv_backend)3, &got), EKV_ERROR_INVALID_ARGUMENT, "backend 3");
    assert_int_equal(got, 77);
    support_tear_down(&setup);
}

/* What the fields of the API promise for later is refused today, by decode and by ekv_backend_supports alike. */
static void what_is_not_built_yet(void **state)
{
    (void)state;
    decode_setup setup;
    set_up(false, &setup);
    const float sinks[4] = { 0 };
    REFUSED(tensors->k_scale = 0.5f, EKV_ERROR_UNSUPPORTED, "k_scale 0.5");
    REFUSED(tensors->v_scale = 2, EKV_ERROR_UNSUPPORTED, "v_scale 2");
    REFUSED(tensors->sinks = sinks, EKV_ERROR_UNSUPPORTED, "sinks");
    REFUSED(tensors->kv_len = lengths, EKV_ERROR_UNSUPPORTED, "tensors.kv_len");
    REFUSED(options.kernel = EKV_KERNEL_MMA, EKV_ERROR_UNSUPPORTED, "kernel 2");
    REFUSED(options.stream = &setup, EKV_ERROR_UNSUPPORTED, "stream");
    assert_ok(ekv_backend_supports(setup.plan, NULL, NULL));
    assert_ok(ekv_backend_supports(setup.plan, setup.tensors, &setup.options));
    setup.tensors->sinks = sinks;
    assert_fails(ekv_backend_supports(setup.plan, setup.tensors, NULL), EKV_ERROR_UNSUPPORTED, "sinks");
    assert_fails(ekv_backend_supports(NULL, NULL, NULL), EKV_ERROR_INVALID_ARGUMENT, "plan");
    support_tear_down(&setup);
}

static void assert_batch_refused(const ekv_batch *batch, const char *word)
{
    const ekv_device device = support_device(4);
    ekv_plan *plan;
    assert_ok(ekv_plan_create(context, "even", batch, &device, NULL, &plan));
    size_t size;
    assert_ok(ekv_workspace_size(plan, EKV_BACKEND_CPU, &size)); /* planned and explained it may be */
    ekv_tensors tensors = EKV_TENSORS_INIT;
    assert_fails(ekv_decode(plan, &tensors, NULL, NULL, 0), EKV_ERROR_UNSUPPORTED, word);
    assert_fails(ekv_backend_supports(plan, NULL, NULL), EKV_ERROR_UNSUPPORTED, word);
    ekv_plan_free(plan);
}

static void batches_that_are_not_built_yet(void **state)
{
    (void)state;
    const ekv_batch good = some_batch();
#define BATCH_REFUSED(change, word)         \
    do {                                    \
        ekv_batch batch = good;             \
        batch.change;                       \
        assert_batch_refused(&batch, word); \
    } while (0)
    BATCH_REFUSED(kv_dtype = EKV_DTYPE_FP8_E4M3, "kv_dtype 3");
    BATCH_REFUSED(q_dtype = EKV_DTYPE_FP8_E5M2, "q_dtype 4");
    BATCH_REFUSED(window_left = 128, "window_left 128");
    BATCH_REFUSED(soft_cap = 30, "soft_cap 30");
    BATCH_REFUSED(q_len = 2, "q_len 2");
    BATCH_REFUSED(head_dim = 24, "head_dim 24");
    BATCH_REFUSED(head_dim = 68, "head_dim 68");
    BATCH_REFUSED(head_dim = 264, "head_dim 264");
#undef BATCH_REFUSED
}

static void cuda_is_unavailable_without_a_gpu(void **state)
{
    (void)state;
    decode_setup setup; /* of a context that was told to use none */
    set_up(false, &setup);
    assert_int_equal(strlen(context->cuda_missing) > 0, 1);
    REFUSED(options.backend = EKV_BACKEND_CUDA, EKV_ERROR_BACKEND_UNAVAILABLE, "CUDA", context->cuda_missing);
    size_t size;
    assert_fails(ekv_workspace_size(setup.plan, EKV_BACKEND_CUDA, &size), EKV_ERROR_BACKEND_UNAVAILABLE, "CUDA");
    support_tear_down(&setup);
}

static void device_detect_describes_the_cpu(void **state)
{
    (void)state;
    ekv_device device = EKV_DEVICE_INIT;
    assert_ok(ekv_device_detect(context, &device));
    assert_string_equal(device.name, "cpu");
    assert_int_equal(device.num_sms, CONTEXT_THREADS);
    assert_fails(ekv_device_detect(NULL, &device), EKV_ERROR_INVALID_ARGUMENT, "context");
    assert_fails(ekv_device_detect(context, NULL), EKV_ERROR_INVALID_ARGUMENT, "device");
}

/* Fifteen empty requests and a long one under graph capture: 48 work items for 33 slots (design of the planner
 * flashinfer-cuda-core). */
static void a_plan_past_its_grid_is_refused(void **state)
{
    (void)state;
    int32_t kv_len[16] = { 0 };
    kv_len[15] = 65536;
    ekv_batch batch = some_batch();
    batch.batch_size = 16;
    batch.kv_len = kv_len;
    batch.q_heads = batch.kv_heads = 8;
    batch.head_dim = 32;
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    options.cuda_graph = 1;
    options.resident_ctas = 2;
    const ekv_device device = support_device(132);
    decode_setup setup;
    assert_ok(support_set_up(context, "flashinfer-cuda-core", &batch, &device, &options, NULL, &setup));
    assert_fails(support_decode(&setup), EKV_ERROR_PLAN_INVALID, "48 work items", "33");
    support_tear_down(&setup);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(missing_and_odd_pointers),
        cmocka_unit_test(strides_beyond_sense),
        cmocka_unit_test(page_table_forms),
        cmocka_unit_test(csr_tables),
        cmocka_unit_test(csr_tables_with_room),
        cmocka_unit_test(block_tables),
        cmocka_unit_test(workspaces),
        cmocka_unit_test(what_is_not_built_yet),
        cmocka_unit_test(batches_that_are_not_built_yet),
        cmocka_unit_test(cuda_is_unavailable_without_a_gpu),
        cmocka_unit_test(device_detect_describes_the_cpu),
        cmocka_unit_test(a_plan_past_its_grid_is_refused),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
