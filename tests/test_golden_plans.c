/* SPDX-License-Identifier: Apache-2.0
 * tests/data/golden-plans.jsonl: plans that FlashInfer (commit fb28d72) and FlashAttention-3 (commit 0251105) made on
 * an H200.  One object a line; num_splits is an array by request, or 1 where no request is split. */
#include "plan/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

enum { GOLDEN_ROWS = 320, H200_SMS = 132, HOPPER = 90 };

static int64_t get_int(const cJSON *object, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (!cJSON_IsNumber(item))
        fail_msg("no number '%s'", key);
    return (int64_t)item->valuedouble;
}

static bool get_bool(const cJSON *object, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (!cJSON_IsBool(item))
        fail_msg("no truth value '%s'", key);
    return cJSON_IsTrue(item);
}

static void expect(const char *id, const char *planner, const char *what, int64_t is, int64_t golden)
{
    if (is != golden)
        fail_msg("row %s, %s: %s is %lld, golden %lld", id, planner, what, (long long)is, (long long)golden);
}

static void expect_splits(const char *id, const ekv_plan *plan, const cJSON *golden)
{
    const cJSON *splits = cJSON_GetObjectItemCaseSensitive(golden, "num_splits");
    assert_non_null(splits);
    if (cJSON_IsArray(splits))
        expect(id, plan->planner->name, "the number of requests", plan->batch.batch_size, cJSON_GetArraySize(splits));
    const cJSON *item = cJSON_IsArray(splits) ? splits->child : splits;
    for (int32_t b = 0; b < plan->batch.batch_size; b++) {
        char what[32];
        snprintf(what, sizeof what, "num_splits[%d]", (int)b);
        expect(id, plan->planner->name, what, plan->num_splits[b], (int64_t)item->valuedouble);
        if (cJSON_IsArray(splits))
            item = item->next;
    }
}

/* The plan of one row by the named planner, every invariant checked. */
static ekv_plan *plan_row(ekv_context *context, const cJSON *row, const char *planner)
{
    const cJSON *lengths = cJSON_GetObjectItemCaseSensitive(row, "kv_len");
    const int32_t batch_size = cJSON_GetArraySize(lengths);
    int32_t *kv_len = calloc((size_t)batch_size, sizeof *kv_len);
    assert_non_null(kv_len);
    int32_t b = 0;
    for (const cJSON *item = lengths->child; item; item = item->next)
        kv_len[b++] = (int32_t)item->valuedouble;

    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = batch_size;
    batch.kv_len = kv_len;
    batch.q_heads = (int32_t)get_int(row, "q_heads");
    batch.kv_heads = (int32_t)get_int(row, "kv_heads");
    batch.head_dim = (int32_t)get_int(row, "head_dim");
    batch.page_size = (int32_t)get_int(row, "page_size");
    ekv_device device = EKV_DEVICE_INIT;
    device.num_sms = (int32_t)get_int(row, "num_sm");
    device.sm_arch = HOPPER;
    assert_int_equal(device.num_sms, H200_SMS);

    ekv_plan *plan = NULL;
    if (ekv_plan_create(context, planner, &batch, &device, NULL, &plan) || ekv_plan_check(plan))
        fail_msg("%s", ekv_last_error());
    free(kv_len);
    return plan;
}

static void compare_flashinfer(ekv_context *context, const cJSON *row, const char *planner)
{
    const char *id = cJSON_GetObjectItemCaseSensitive(row, "id")->valuestring;
    const cJSON *golden = cJSON_GetObjectItemCaseSensitive(row, planner);
    ekv_plan *plan = plan_row(context, row, planner);
    expect(id, planner, "split_kv", plan->split_kv, get_bool(golden, "split_kv"));
    expect(id, planner, "num_work_items", plan->num_work_items, get_int(golden, "num_work_items"));
    expect(id, planner, "kv_chunk_tokens", plan->kv_chunk_tokens, get_int(golden, "kv_chunk_tokens"));
    expect_splits(id, plan, golden);
    if (!strcmp(planner, "flashinfer-cuda-core"))
        expect(id, planner, "resident_ctas", plan->resident_ctas, get_int(golden, "resident_ctas_per_sm"));
    else
        expect(id, planner, "block_m", plan->block_m, get_int(golden, "cta_tile_q"));
    ekv_plan_free(plan);
}

static void compare_fa3(ekv_context *context, const cJSON *row)
{
    const char *id = cJSON_GetObjectItemCaseSensitive(row, "id")->valuestring;
    const cJSON *golden = cJSON_GetObjectItemCaseSensitive(row, "fa3");
    ekv_plan *plan = plan_row(context, row, "fa3");
    expect(id, "fa3", "padded_rows", plan->padded_rows, get_int(golden, "block_m"));
    expect(id, "fa3", "block_tokens", plan->block_tokens, get_int(golden, "block_n"));
    expect(id, "fa3", "num_splits_bound", plan->num_splits_bound, get_int(golden, "num_splits_bound"));
    expect_splits(id, plan, golden);
    ekv_plan_free(plan);
}

static char *read_golden(void)
{
    FILE *file = fopen(EVENKV_TEST_DATA "/golden-plans.jsonl", "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    long size = ftell(file);
    assert_true(size > 0);
    rewind(file);
    char *text = malloc((size_t)size + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)size, file), size);
    text[size] = 0;
    fclose(file);
    return text;
}

/* Calls compare on every row; all GOLDEN_ROWS of them must be there. */
static void for_each_row(void (*compare)(ekv_context *context, const cJSON *row, const char *planner),
                         const char *planner)
{
    ekv_context *context = NULL;
    assert_int_equal(ekv_context_create(NULL, &context), EKV_OK);
    char *text = read_golden();
    int rows = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        cJSON *row = cJSON_Parse(line);
        assert_non_null(row);
        compare(context, row, planner);
        cJSON_Delete(row);
        rows++;
    }
    assert_int_equal(rows, GOLDEN_ROWS);
    free(text);
    ekv_context_free(context);
}

static void cuda_core_matches(void **state)
{
    (void)state;
    for_each_row(compare_flashinfer, "flashinfer-cuda-core");
}

static void tensor_core_matches(void **state)
{
    (void)state;
    for_each_row(compare_flashinfer, "flashinfer-tensor-core");
}

static void compare_fa3_row(ekv_context *context, const cJSON *row, const char *planner)
{
    (void)planner;
    compare_fa3(context, row);
}

static void fa3_matches(void **state)
{
    (void)state;
    for_each_row(compare_fa3_row, "fa3");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuda_core_matches),
        cmocka_unit_test(tensor_core_matches),
        cmocka_unit_test(fa3_matches),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
