/* SPDX-License-Identifier: Apache-2.0 */
#include "trace_tests.h"

#include "base/rng.h"
#include "trace/lengths.h"

static void assert_batch(const ekv_lengths *batch, const int32_t *expected, int32_t batch_size, int64_t index)
{
    assert_int_equal(batch->batch_size, batch_size);
    assert_int_equal(batch->index, index);
    int64_t total = 0;
    for (int32_t i = 0; i < batch_size; i++) {
        assert_int_equal(batch->kv_len[i], expected[i]);
        total += expected[i];
    }
    assert_int_equal(batch->total_tokens, total);
}

/* ---- Text -------------------------------------------------------------------------------------------- */

static void a_text_is_one_batch(void **state)
{
    static const struct {
        const char *text;
        int32_t lengths[3], count;
    } cases[] = {
        { "5,17,0", { 5, 17, 0 }, 3 }, { "7", { 7 }, 1 },
        { " 1 ,\t2 ", { 1, 2 }, 2 },   { "2147483647,2147483647,2147483647", { INT32_MAX, INT32_MAX, INT32_MAX }, 3 },
        { "007", { 7 }, 1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ekv_lengths_list *list = NULL;
        assert_int_equal(ekv_lengths_from_text(*state, cases[i].text, &list), EKV_OK);
        assert_int_equal(list->count, 1);
        assert_batch(&list->batches[0], cases[i].lengths, cases[i].count, 0);
        ekv_lengths_free(list);
    }
}

static void a_bad_text_is_refused_with_its_value(void **state)
{
    static const struct {
        const char *text, *parts;
    } cases[] = {
        { "", "empty" },
        { "  ", "empty" },
        { ",", "kv_len[0] is ''" },
        { "5,", "kv_len[1] is ''" },
        { "5,,7", "kv_len[1] is ''" },
        { "5,-3", "kv_len[1] is '-3'|0..2147483647" },
        { "5,6,abc", "kv_len[2] is 'abc'" },
        { "2147483648", "kv_len[0] is '2147483648'" },
        { "99999999999999999999999999", "kv_len[0] is '99999999999999999999999999'" },
        { "1.5", "'1.5'" },
        { "1e3", "'1e3'" },
        { "+1", "'+1'" },
        { "0x10", "'0x10'" },
        { "1 2", "'1 2'" },
        { "5;17", "'5;17'" },
        { "nan", "'nan'" },
        { "5\n6", "'5?6'" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ekv_lengths_list *list = NULL;
        assert_fails(ekv_lengths_from_text(*state, cases[i].text, &list), EKV_ERROR_PARSE, cases[i].parts);
        assert_null(list);
    }
}

/* ---- Files ------------------------------------------------------------------------------------------- */

static ekv_status read_bytes(ekv_context *context, const void *bytes, size_t size, ekv_lengths_list **list)
{
    temporary_path path;
    write_temporary(bytes, size, path);
    ekv_status status = ekv_lengths_from_file(context, path, list);
    unlink(path);
    return status;
}

static void a_file_has_one_batch_a_line(void **state)
{
    static const char *const texts[] = {
        "# two batches\n\n5,17\n  # indented\n3\n",
        "# two batches\r\n\r\n5,17\r\n\t# indented\r\n3\r\n",
        "\xef\xbb\xbf# byte order mark\n\n5, 17 \n\n3", /* and no newline at the end */
        "#\n \n5,17\n\n3\r",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        ekv_lengths_list *list = NULL;
        assert_int_equal(read_bytes(*state, texts[i], strlen(texts[i]), &list), EKV_OK);
        assert_int_equal(list->count, 2);
        assert_batch(&list->batches[0], (int32_t[]){ 5, 17 }, 2, 3);
        assert_batch(&list->batches[1], (int32_t[]){ 3 }, 1, 5);
        ekv_lengths_free(list);
    }
}

static void a_bad_file_is_refused_with_line_and_value(void **state)
{
    static const struct {
        const char *bytes;
        size_t size; /* 0: strlen */
        const char *parts;
    } cases[] = {
        { "", 0, "/tmp/evenkv-|is empty" },
        { "\n# nothing\n", 0, "no batch" },
        { "5,6\n7,x\n", 0, "/tmp/evenkv-|, line 2: kv_len[1] is 'x'" },
        { "5,6\n\n-7\n", 0, ", line 3: kv_len[0] is '-7'" },
        { "5\n2147483648\n", 0, ", line 2: kv_len[0] is '2147483648'" },
        { "5,6\n7,", 0, ", line 2: kv_len[1] is ''" },
        { "5,\0,6\n", 6, ", line 1|0x00|no text file" },
        { "5,6\n\x7f"
          "ELF\x02",
          0, ", line 2|0x7f|no text file" },
        { "5\r6\r", 0, ", line 1|0x0d" },
        { "\x1f\x8b\x08\x00\x00", 5, "gzip|gunzip" },
        { "\x28\xb5\x2f\xfd\x04", 0, "zstd -d" },
        { "\xfd"
          "7zXZ\0",
          6, "xz -d" },
        { "BZh91AY", 0, "bzip2 -d" },
        { "PK\x03\x04\x14", 0, "unzip" },
        { "PAR1....", 0, "Parquet" },
        { "\xff\xfe\x35\x00", 4, "UTF-16" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ekv_lengths_list *list = NULL;
        size_t size = cases[i].size ? cases[i].size : strlen(cases[i].bytes);
        assert_fails(read_bytes(*state, cases[i].bytes, size, &list), EKV_ERROR_PARSE, cases[i].parts);
        assert_null(list);
    }
}

static void a_file_that_cannot_be_read_says_why(void **state)
{
    ekv_lengths_list *list = NULL;
    assert_fails(ekv_lengths_from_file(*state, "/no/such/file.txt", &list), EKV_ERROR_NOT_FOUND,
                 "/no/such/file.txt: No such file or directory");
    assert_fails(ekv_lengths_from_file(*state, "/", &list), EKV_ERROR_IO, "/: Is a directory");
    assert_fails(ekv_lengths_from_file(*state, "/dev/zero", &list), EKV_ERROR_PARSE,
                 "/dev/zero, line 1: longer than 67108864 bytes");
    assert_null(list);
}

/* A line that passes the reader's buffer several times over. */
static void a_long_line_is_one_batch(void **state)
{
    enum { COUNT = 200000 };
    char *text = malloc(COUNT * 7 + 16);
    assert_non_null(text);
    size_t size = 0;
    size += (size_t)sprintf(text, "1\n");
    for (int32_t i = 0; i < COUNT; i++)
        size += (size_t)sprintf(text + size, "%s%d", i ? "," : "", i);
    size += (size_t)sprintf(text + size, "\n2\n");
    ekv_lengths_list *list = NULL;
    assert_int_equal(read_bytes(*state, text, size, &list), EKV_OK);
    free(text);
    assert_int_equal(list->count, 3);
    assert_int_equal(list->batches[1].batch_size, COUNT);
    for (int32_t i = 0; i < COUNT; i++)
        assert_int_equal(list->batches[1].kv_len[i], i);
    assert_int_equal(list->batches[2].index, 3);
    ekv_lengths_free(list);
}

/* ---- Distributions ----------------------------------------------------------------------------------- */

static void distributions_give_the_lengths_computed_by_hand(void **state)
{
    static const struct {
        const char *dist;
        int64_t tokens;
        int32_t batch_size;
        ekv_hot hot;
        int32_t lengths[6];
    } cases[] = {
        { "uniform", 10, 4, EKV_HOT_FIRST, { 3, 3, 2, 2 } },
        { "uniform", 4, 4, EKV_HOT_LAST, { 1, 1, 1, 1 } },
        { "uniform", 7, 1, EKV_HOT_MIDDLE, { 7 } },
        { "skew80", 104, 4, EKV_HOT_FIRST, { 83, 7, 7, 7 } },
        { "skew80", 106, 4, EKV_HOT_FIRST, { 84, 8, 7, 7 } },
        { "skew80", 106, 4, EKV_HOT_MIDDLE, { 8, 84, 7, 7 } },
        { "skew80", 106, 4, EKV_HOT_LAST, { 8, 7, 7, 84 } },
        { "skew80", 106, 5, EKV_HOT_MIDDLE, { 6, 6, 84, 5, 5 } },
        { "skew1", 100, 2, EKV_HOT_FIRST, { 1, 99 } },
        { "skew1", 2, 2, EKV_HOT_FIRST, { 0, 2 } },
        { "skew99", 10, 5, EKV_HOT_LAST, { 1, 0, 0, 0, 9 } },
        { "2x40", 101, 5, EKV_HOT_FIRST, { 40, 40, 7, 7, 7 } },
        { "2x40", 102, 5, EKV_HOT_MIDDLE, { 8, 40, 40, 7, 7 } },
        { "2x40", 102, 6, EKV_HOT_MIDDLE, { 6, 6, 40, 40, 5, 5 } },
        { "2x40", 102, 5, EKV_HOT_LAST, { 8, 7, 7, 40, 40 } },
        { "3x33", 100, 4, EKV_HOT_LAST, { 1, 33, 33, 33 } },
        { "1x50", 9, 3, EKV_HOT_FIRST, { 4, 3, 2 } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ekv_lengths_list *list = NULL;
        assert_int_equal(
            ekv_lengths_from_dist(*state, cases[i].dist, cases[i].batch_size, cases[i].tokens, cases[i].hot, &list),
            EKV_OK);
        assert_int_equal(list->count, 1);
        assert_batch(&list->batches[0], cases[i].lengths, cases[i].batch_size, 0);
        ekv_lengths_free(list);
    }
}

/* 524,288 tokens, 128 requests, one with 80 %: 419,430 and 104,858 = 127 * 825 + 83. */
static void the_usual_skewed_batch_is_right(void **state)
{
    ekv_lengths_list *list = NULL;
    assert_int_equal(ekv_lengths_from_dist(*state, "skew80", 128, 524288, EKV_HOT_FIRST, &list), EKV_OK);
    const ekv_lengths *batch = &list->batches[0];
    assert_int_equal(batch->total_tokens, 524288);
    assert_int_equal(batch->kv_len[0], 419430);
    for (int32_t i = 1; i < 128; i++)
        assert_int_equal(batch->kv_len[i], i <= 83 ? 826 : 825);
    ekv_lengths_free(list);
}

static void a_bad_distribution_is_refused_with_its_values(void **state)
{
    static const struct {
        const char *dist;
        int64_t batch_size, tokens;
        ekv_status status;
        const char *parts;
    } cases[] = {
        { "", 4, 100, EKV_ERROR_NOT_FOUND, "no distribution ''" },
        { "Uniform", 4, 100, EKV_ERROR_NOT_FOUND, "'Uniform'|skewNN|KxNN" },
        { "uniform1", 4, 100, EKV_ERROR_NOT_FOUND, "'uniform1'" },
        { "skew", 4, 100, EKV_ERROR_NOT_FOUND, "'skew'" },
        { "skew0", 4, 100, EKV_ERROR_NOT_FOUND, "'skew0'" },
        { "skew100", 4, 100, EKV_ERROR_NOT_FOUND, "'skew100'" },
        { "skew8x", 4, 100, EKV_ERROR_NOT_FOUND, "'skew8x'" },
        { "skew-5", 4, 100, EKV_ERROR_NOT_FOUND, "'skew-5'" },
        { "x50", 4, 100, EKV_ERROR_NOT_FOUND, "'x50'" },
        { "2x", 4, 100, EKV_ERROR_NOT_FOUND, "'2x'" },
        { "0x40", 4, 100, EKV_ERROR_NOT_FOUND, "'0x40'" },
        { "2x0", 4, 100, EKV_ERROR_NOT_FOUND, "'2x0'" },
        { "2x50", 4, 100, EKV_ERROR_NOT_FOUND, "'2x50'" },
        { "4x25", 8, 100, EKV_ERROR_NOT_FOUND, "'4x25'" },
        { "2x2x2", 8, 100, EKV_ERROR_NOT_FOUND, "'2x2x2'" },
        { "4294967297x1", 8, 100, EKV_ERROR_NOT_FOUND, "'4294967297x1'" },
        { "uniform", 0, 100, EKV_ERROR_INVALID_ARGUMENT, "the batch is 0 requests" },
        { "uniform", -4, 100, EKV_ERROR_INVALID_ARGUMENT, "the batch is -4 requests" },
        { "uniform", INT64_MAX, INT64_MAX, EKV_ERROR_INVALID_ARGUMENT, "the batch is 9223372036854775807 requests" },
        { "uniform", 4, 3, EKV_ERROR_INVALID_ARGUMENT, "3 tokens|4 requests" },
        { "uniform", 4, -1, EKV_ERROR_INVALID_ARGUMENT, "-1 tokens|4 requests" },
        { "skew80", 1, 100, EKV_ERROR_INVALID_ARGUMENT, "skew80 needs|2 requests|it is 1" },
        { "3x20", 3, 100, EKV_ERROR_INVALID_ARGUMENT, "3x20 needs|4 requests|it is 3" },
        { "uniform", 2, 4294967295, EKV_ERROR_INVALID_ARGUMENT, "4294967295 tokens|2147483648" },
        { "skew99", 64, INT64_MAX, EKV_ERROR_INVALID_ARGUMENT, "9223372036854775807 tokens" },
        { "uniform", 3, INT64_MAX, EKV_ERROR_INVALID_ARGUMENT, "a length of 3074457345618258603" },
        { "skew1", 3, INT64_MAX, EKV_ERROR_INVALID_ARGUMENT, "a length of 4565569158243114025" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ekv_lengths_list *list = NULL;
        assert_fails(
            ekv_lengths_from_dist(*state, cases[i].dist, cases[i].batch_size, cases[i].tokens, EKV_HOT_FIRST, &list),
            cases[i].status, cases[i].parts);
        assert_null(list);
    }
}

static int compare_lengths(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Sums are exact, the others differ by one token at most, and the place of the hot ones changes the order only. */
static void distributions_keep_their_properties(void **state)
{
    enum { LARGEST = 3000 };
    static int32_t sorted[3][LARGEST];
    for (uint64_t seed = 1; seed <= 500; seed++) {
        ekv_rng rng = { seed };
        int64_t hot_requests = ekv_rng_below(&rng, 20);
        int64_t percent = hot_requests ? 1 + ekv_rng_below(&rng, 99 / hot_requests) : 0;
        int64_t batch_size = hot_requests + 1 + ekv_rng_below(&rng, LARGEST - 20);
        int64_t tokens = batch_size + ekv_rng_below(&rng, (int64_t)1 << ekv_rng_below(&rng, 31));
        char dist[16] = "uniform";
        if (hot_requests)
            snprintf(dist, sizeof dist, "%dx%d", (int)hot_requests, (int)percent);
        for (int32_t hot = 0; hot < 3; hot++) {
            ekv_lengths_list *list = NULL;
            if (ekv_lengths_from_dist(*state, dist, batch_size, tokens, (ekv_hot)hot, &list))
                fail_msg("seed %d: %s", (int)seed, ekv_last_error());
            int64_t total = 0;
            for (int32_t i = 0; i < batch_size; i++)
                total += list->batches[0].kv_len[i];
            if (total != tokens || list->batches[0].total_tokens != tokens)
                fail_msg("seed %d: %s: the sum is %lld, not %lld", (int)seed, dist, (long long)total,
                         (long long)tokens);
            memcpy(sorted[hot], list->batches[0].kv_len, (size_t)batch_size * sizeof(int32_t));
            ekv_lengths_free(list);
            qsort(sorted[hot], (size_t)batch_size, sizeof(int32_t), compare_lengths);
        }
        if (memcmp(sorted[0], sorted[1], (size_t)batch_size * 4) ||
            memcmp(sorted[0], sorted[2], (size_t)batch_size * 4))
            fail_msg("seed %d: %s depends on --hot", (int)seed, dist);
        const int32_t hot_tokens = (int32_t)(tokens * percent / 100);
        int64_t hot_found = 0;
        int32_t lowest = INT32_MAX, highest = 0;
        for (int32_t i = 0; i < batch_size; i++) {
            if (sorted[0][i] == hot_tokens && hot_found < hot_requests) {
                hot_found++;
                continue;
            }
            lowest = sorted[0][i] < lowest ? sorted[0][i] : lowest;
            highest = sorted[0][i] > highest ? sorted[0][i] : highest;
        }
        if (hot_found != hot_requests || highest - lowest > 1)
            fail_msg("seed %d: %s: %d hot requests, others %d..%d", (int)seed, dist, (int)hot_found, lowest, highest);
    }
}

static void places_of_hot_requests_have_names(void **state)
{
    (void)state;
    ekv_hot hot;
    assert_int_equal(ekv_hot_find("first", &hot), EKV_OK);
    assert_int_equal(hot, EKV_HOT_FIRST);
    assert_int_equal(ekv_hot_find("middle", &hot), EKV_OK);
    assert_int_equal(hot, EKV_HOT_MIDDLE);
    assert_int_equal(ekv_hot_find("last", &hot), EKV_OK);
    assert_int_equal(hot, EKV_HOT_LAST);
    assert_fails(ekv_hot_find("end", &hot), EKV_ERROR_NOT_FOUND, "'end'|middle");
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

static ekv_status create_from_text(ekv_context *context, void **result)
{
    return ekv_lengths_from_text(context, "1,2,3", (ekv_lengths_list **)result);
}

static ekv_status create_from_dist(ekv_context *context, void **result)
{
    return ekv_lengths_from_dist(context, "skew50", 8, 100, EKV_HOT_FIRST, (ekv_lengths_list **)result);
}

static ekv_status create_from_file(ekv_context *context, void **result)
{
    char text[64 * 4]; /* more lines than a list has room for at first */
    for (size_t i = 0; i < sizeof text; i += 4)
        memcpy(text + i, "1,2\n", 4);
    return read_bytes(context, text, sizeof text, (ekv_lengths_list **)result);
}

static void release_list(void *list)
{
    ekv_lengths_free(list);
}

static void no_memory_is_reported_and_leaks_nothing(void **state)
{
    (void)state;
    assert_int_equal(walk_allocation_failures(create_from_text, release_list), 3);
    assert_int_equal(walk_allocation_failures(create_from_dist, release_list), 3);
    assert_true(walk_allocation_failures(create_from_file, release_list) > 64);
    ekv_lengths_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_text_is_one_batch),
        cmocka_unit_test(a_bad_text_is_refused_with_its_value),
        cmocka_unit_test(a_file_has_one_batch_a_line),
        cmocka_unit_test(a_bad_file_is_refused_with_line_and_value),
        cmocka_unit_test(a_file_that_cannot_be_read_says_why),
        cmocka_unit_test(a_long_line_is_one_batch),
        cmocka_unit_test(distributions_give_the_lengths_computed_by_hand),
        cmocka_unit_test(the_usual_skewed_batch_is_right),
        cmocka_unit_test(a_bad_distribution_is_refused_with_its_values),
        cmocka_unit_test(distributions_keep_their_properties),
        cmocka_unit_test(places_of_hot_requests_have_names),
        cmocka_unit_test(no_memory_is_reported_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
