/* SPDX-License-Identifier: Apache-2.0 */
#include "trace_tests.h"

#include "trace/trace.h"

#define AZURE "TIMESTAMP,ContextTokens,GeneratedTokens\n"
#define BURSTGPT "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"

/* Opens bytes as if they were a file named "t.csv"; *file is to be closed after the trace. */
static ekv_status open_bytes(ekv_context *context, const void *bytes, size_t size, ekv_trace_format format,
                             ekv_trace **trace, FILE **file)
{
    *file = tmpfile();
    assert_non_null(*file);
    assert_int_equal(fwrite(bytes, 1, size, *file), size);
    rewind(*file);
    return ekv_trace_open_file(context, *file, "t.csv", format, trace);
}

/* Opens the bytes and reads rows until the end or an error. */
static ekv_status read_all(ekv_context *context, const void *bytes, size_t size, ekv_trace_format format)
{
    ekv_trace *trace = NULL;
    FILE *file;
    ekv_status status = open_bytes(context, bytes, size, format, &trace, &file);
    bool end = false;
    ekv_trace_row row;
    while (!status && !end)
        status = ekv_trace_next(trace, &row, &end);
    ekv_trace_free(trace);
    fclose(file);
    return status;
}

/* ---- Good traces ------------------------------------------------------------------------------------- */

static void assert_rows(ekv_trace *trace, const ekv_trace_row *expected, int32_t count)
{
    ekv_trace_row row;
    bool end = true;
    for (int32_t i = 0; i < count; i++) {
        if (ekv_trace_next(trace, &row, &end))
            fail_msg("%s", ekv_last_error());
        assert_false(end);
        assert_int_equal(row.row, i + 1);
        assert_float_equal(row.arrival, expected[i].arrival, 1e-12);
        assert_int_equal(row.input_tokens, expected[i].input_tokens);
        assert_int_equal(row.output_tokens, expected[i].output_tokens);
    }
    for (int again = 0; again < 2; again++) {
        end = false;
        assert_int_equal(ekv_trace_next(trace, &row, &end), EKV_OK);
        assert_true(end);
    }
}

static void every_format_is_found_and_read(void **state)
{
    static const struct {
        const char *path;
        ekv_trace_format format;
        ekv_trace_row rows[5];
        int32_t count;
    } cases[] = {
        { EVENKV_TEST_DATA "/trace-azure.csv",
          EKV_TRACE_AZURE,
          { { 1, 0, 374, 44 },
            { 2, 4.314579, 396, 109 },
            { 3, 4.541877, 879, 55 },
            { 4, 4.710427, 91, 16 },
            { 5, 5.892655, 91, 16 } },
          5 },
        { EVENKV_TEST_DATA "/trace-mooncake.jsonl",
          EKV_TRACE_MOONCAKE,
          { { 1, 0, 6758, 500 }, { 2, 0, 7322, 490 }, { 3, 3, 13544, 71 } },
          3 },
        { EVENKV_TEST_DATA "/trace-burstgpt.csv",
          EKV_TRACE_BURSTGPT,
          { { 1, 0, 472, 18 }, { 2, 40, 1087, 230 }, { 3, 113.5, 417, 276 } },
          3 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int forced = 0; forced < 2; forced++) {
            ekv_trace *trace = NULL;
            if (ekv_trace_open(*state, cases[i].path, forced ? cases[i].format : EKV_TRACE_AUTO, &trace))
                fail_msg("%s", ekv_last_error());
            assert_int_equal(ekv_trace_format_get(trace), cases[i].format);
            assert_rows(trace, cases[i].rows, cases[i].count);
            ekv_trace_free(trace);
        }
}

static void line_ends_blanks_and_column_order_do_not_matter(void **state)
{
    static const char *const texts[] = {
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-12-31 23:59:59.5,7,8\n2024-01-01 00:00:01,0,2147483647\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-12-31 23:59:59.5,7,8\r\n2024-01-01 00:00:01,0,2147483647\r\n",
        "\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\n2023-12-31 23:59:59.5,7,8\n\n \n"
        "2024-01-01 00:00:01,0,2147483647", /* as published: no newline at the end */
        "\n  GeneratedTokens , x, TIMESTAMP,\tContextTokens\n8,,2023-12-31 23:59:59.500000001, 7 \n"
        "2147483647,\"\",2024-01-01 00:00:01.000000001999,0\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-12-31 23:59:59.5+00:00,7,8\n2024-01-01 02:30:01+02:30,0,"
        "2147483647\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-12-31 22:59:59.5-01:00,7,8\n2024-01-01 00:00:01Z,0,2147483647\n",
        "{\"timestamp\":1000.5,\"input_length\":7,\"output_length\":8}\n"
        "{\"x\":{\"timestamp\":[]},\"output_length\":2147483647,\"input_length\":0,\"timestamp\":2500.5}",
        " { \"timestamp\" : 0, \"input_length\" : 7.0, \"output_length\" : 8e0 } \r\n\r\n"
        "{\"timestamp\":1500,\"input_length\":0,\"output_length\":2147483647}\r\n",
        "Timestamp,Request tokens,Response tokens\n0.25,7,8\n1.75,0,2147483647\n",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "1e1,a,b,GPT-4,7,8,15,API log\n11.5,,,,0,2147483647,,\n",
    };
    static const ekv_trace_row rows[] = { { 1, 0, 7, 8 }, { 2, 1.5, 0, INT32_MAX } };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        ekv_trace *trace = NULL;
        FILE *file;
        if (open_bytes(*state, texts[i], strlen(texts[i]), EKV_TRACE_AUTO, &trace, &file))
            fail_msg("text %zu: %s", i, ekv_last_error());
        assert_rows(trace, rows, 2);
        ekv_trace_free(trace);
        fclose(file);
    }
}

/* Days between dates round leap years, in an Azure trace; 86,400 s each. */
static void dates_follow_the_calendar(void **state)
{
    static const struct {
        const char *first, *second;
        int32_t days;
    } cases[] = {
        { "1970-01-01", "1970-01-02", 1 },   { "2023-02-28", "2023-03-01", 1 },     { "2024-02-28", "2024-03-01", 2 },
        { "2000-02-28", "2000-03-01", 2 },   { "2100-02-28", "2100-03-01", 1 },     { "2023-01-01", "2024-01-01", 365 },
        { "2024-01-01", "2025-01-01", 366 }, { "1970-01-01", "2023-11-16", 19677 }, { "2023-04-30", "2023-05-01", 1 },
        { "2023-12-31", "2024-02-29", 60 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[256];
        snprintf(text, sizeof text, AZURE "%s 12:30:00,1,2\n%s 12:30:00,1,2\n", cases[i].first, cases[i].second);
        ekv_trace *trace = NULL;
        FILE *file;
        assert_int_equal(open_bytes(*state, text, strlen(text), EKV_TRACE_AUTO, &trace, &file), EKV_OK);
        const ekv_trace_row rows[] = { { 1, 0, 1, 2 }, { 2, cases[i].days * 86400.0, 1, 2 } };
        assert_rows(trace, rows, 2);
        ekv_trace_free(trace);
        fclose(file);
    }
}

/* ---- Bad traces -------------------------------------------------------------------------------------- */

static const char time_a[] = "2023-11-16 18:15:46.6805900";

static void a_bad_file_is_refused_with_its_reason(void **state)
{
    static const struct {
        const char *bytes;
        size_t size; /* 0: strlen */
        const char *parts;
    } cases[] = {
        { "", 0, "t.csv is empty" },
        { "\n \r\n", 0, "t.csv is empty" },
        { AZURE, 0, "t.csv has a header but no rows" },
        { BURSTGPT "\n", 0, "no rows" },
        { "5,17,30\n", 0, "t.csv, line 1|'5,17,30'|Azure|BurstGPT|Mooncake" },
        { "\n\nhello\n", 0, "t.csv, line 3|'hello'" },
        { "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", 0, "line 1|no column GeneratedTokens" },
        { "Time,ContextTokens,GeneratedTokens\n", 0, "line 1|no column TIMESTAMP" },
        { "Timestamp,Model,Request tokens\n", 0, "line 1|no column Response tokens" },
        { "TIMESTAMP,ContextTokens,Gen", 0, "line 1|no column GeneratedTokens|cut short" },
        { "\x1f\x8b\x08\x08", 0, "t.csv is compressed with gzip; gunzip it first" },
        { "PAR1\x15\x04", 0, "Parquet" },
        { "\x7f"
          "ELF\x02\x01",
          0, "line 1|0x7f|no text file" },
        { AZURE "\x00\x01\x02", sizeof AZURE + 2, "line 2|0x00|no text file" },
        { "\xff\xfeT\0I\0", 6, "UTF-16" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t size = cases[i].size ? cases[i].size : strlen(cases[i].bytes);
        assert_fails(read_all(*state, cases[i].bytes, size, EKV_TRACE_AUTO), EKV_ERROR_PARSE, cases[i].parts);
    }
}

/* Each row comes after one good row; the error must name the line, the row and the value. */
static const struct {
    const char *header_and_row, *row, *parts;
} bad_rows[] = {
#define A AZURE "2023-11-16 18:15:46.6805900,374,44\n"
    { A, "2023-11-16 18:15:47,374\n", "the row has 2 columns where the header has 3" },
    { A, "junk\n", "the row has 1 column where the header has 3" },
    { A, "2023-11-16 18:15:47,374,44,5\n", "the row has 4 columns where the header has 3" },
    { A, "2023-11-16 18:15:47,,44\n", "ContextTokens is ''" },
    { A, "2023-11-16 18:15:47,374,x44\n", "GeneratedTokens is 'x44'" },
    { A, "2023-11-16 18:15:47,-374,44\n", "ContextTokens is '-374'" },
    { A, "2023-11-16 18:15:47,374,-1\n", "GeneratedTokens is '-1'" },
    { A, "2023-11-16 18:15:47,2147483648,44\n", "ContextTokens is '2147483648'" },
    { A, "2023-11-16 18:15:47,374,1e3\n", "GeneratedTokens is '1e3'" },
    { A, "2023-11-16 18:15:47,3.5,44\n", "ContextTokens is '3.5'" },
    { A, ",374,44\n", "TIMESTAMP is ''" },
    { A, "2023-11-16,374,44\n", "TIMESTAMP is '2023-11-16'" },
    { A, "2023/11/16 18:15:47,374,44\n", "TIMESTAMP is '2023/11/16 18:15:47'" },
    { A, "12345.5,374,44\n", "TIMESTAMP is '12345.5'" },
    { A, "2023-13-01 00:00:00,374,44\n", "TIMESTAMP is '2023-13-01 00:00:00'" },
    { A, "2023-02-29 00:00:00,374,44\n", "TIMESTAMP is '2023-02-29 00:00:00'" },
    { A, "2024-00-10 00:00:00,374,44\n", "TIMESTAMP is '2024-00-10" },
    { A, "2024-01-00 00:00:00,374,44\n", "TIMESTAMP is '2024-01-00" },
    { A, "2024-01-10 24:00:00,374,44\n", "TIMESTAMP is" },
    { A, "2024-01-10 00:60:00,374,44\n", "TIMESTAMP is" },
    { A, "2024-01-10 00:00:60,374,44\n", "TIMESTAMP is" },
    { A, "2024-01-10 00:00:00.,374,44\n", "TIMESTAMP is" },
    { A, "2024-01-10 00:00:00.5+1:00,374,44\n", "TIMESTAMP is" },
    { A, "2024-01-10 00:00:00.5+24:00,374,44\n", "TIMESTAMP is" },
    { A, "2024-01-10 00:00:00 UTC,374,44\n", "TIMESTAMP is" },
    { A, "1969-12-31 23:59:59,374,44\n", "TIMESTAMP is" },
    { A, "9999-01-01 00:00:00,374,44\n", "TIMESTAMP is" },
    { A, "2023-11-16 18:15:45.6805900,374,44\n", "the time goes back by 1 s" },
    { A, "2023-11-16 18:15:47,37", "the row has 2 columns|cut short" },
    { A, "2023-11-16 18:1", "the row has 1 column|cut short" },
    { A, "2023-11-16 18:15:47,374,", "GeneratedTokens is ''|cut short" },
#undef A
#define B BURSTGPT "5,ChatGPT,472,18,490,Conversation log\n"
    { B, "4.5,ChatGPT,472,18,490,Conversation log\n", "the time goes back by 0.5 s" },
    { B, "x,ChatGPT,472,18,490,Conversation log\n", "Timestamp is 'x'" },
    { B, "nan,ChatGPT,472,18,490,Conversation log\n", "Timestamp is 'nan'" },
    { B, "-5,ChatGPT,472,18,490,Conversation log\n", "Timestamp is '-5'" },
    { B, "1e300,ChatGPT,472,18,490,Conversation log\n", "Timestamp is '1e300'" },
    { B, "6,ChatGPT,-472,18,490,Conversation log\n", "Request tokens is '-472'" },
    { B, "6,ChatGPT,472,many,490,Conversation log\n", "Response tokens is 'many'" },
    { B, "6,ChatGPT,472,18\n", "the row has 4 columns where the header has 6" },
    { B, "6,ChatGPT,472", "the row has 3 columns|cut short" },
#undef B
#define M "{\"timestamp\": 5, \"input_length\": 10, \"output_length\": 4}\n"
    { M, "{\"timestamp\": 4, \"input_length\": 10, \"output_length\": 4}\n", "the time goes back by 0.001 s" },
    { M, "{\"timestamp\": 6, \"input_length\": 10}\n", "the row has no output_length" },
    { M, "{\"input_length\": 10, \"output_length\": 4}\n", "the row has no timestamp" },
    { M, "{\"timestamp\": 6, \"input_length\": -10, \"output_length\": 4}\n", "input_length is -10|whole number" },
    { M, "{\"timestamp\": 6, \"input_length\": 10, \"output_length\": 2147483648}\n", "output_length is 2147483648" },
    { M, "{\"timestamp\": 6, \"input_length\": 10.5, \"output_length\": 4}\n", "input_length is 10.5" },
    { M, "{\"timestamp\": 6, \"input_length\": \"10\", \"output_length\": 4}\n", "input_length is \"10\"" },
    { M, "{\"timestamp\": 6, \"input_length\": null, \"output_length\": 4}\n", "input_length is null" },
    { M, "{\"timestamp\": -6, \"input_length\": 10, \"output_length\": 4}\n", "timestamp is -6" },
    { M, "{\"timestamp\": 1e999, \"input_length\": 10, \"output_length\": 4}\n",
      "timestamp is inf; it must be a number" },
    { M, "{\"timestamp\": 6, \"input_length\": -1e400, \"output_length\": 4}\n", "input_length is -inf; it must be" },
    { M, "{\"timestamp\": 6, \"input_length\": 10, \"output_length\": 4, \"input_length\": 10}\n",
      "the row has input_length twice" },
    { M, "{\"timestamp\": 6, \"timestamp\": null, \"input_length\": 10, \"output_length\": 4}\n",
      "the row has timestamp twice" },
    { M, "{\"timestamp\": [6], \"input_length\": 10, \"output_length\": 4}\n", "timestamp is [6]" },
    { M, "[1, 2, 3]\n", "'[1, 2, 3]' is no JSON object" },
    { M, "6,10,4\n", "'6,10,4' is no JSON object" },
    { M, "{\"timestamp\": 6, \"input_length\": 10, \"output_length\": 4} x\n", "is no JSON object" },
    { M, "{\"timestamp\": 6, \"input_le", "is no JSON object|cut short" },
    { M, "{\"timestamp\": 6, \"input_length\": 10, \"output_length\": 4", "is no JSON object|cut short" },
#undef M
};

static void a_bad_row_is_refused_with_its_number_and_value(void **state)
{
    for (size_t i = 0; i < sizeof bad_rows / sizeof bad_rows[0]; i++) {
        char text[512], parts[256];
        const bool csv = bad_rows[i].header_and_row[0] == 'T';
        snprintf(text, sizeof text, "%s%s", bad_rows[i].header_and_row, bad_rows[i].row);
        snprintf(parts, sizeof parts, "t.csv, line %d (row 2): |%s", csv ? 3 : 2, bad_rows[i].parts);
        assert_fails(read_all(*state, text, strlen(text), EKV_TRACE_AUTO), EKV_ERROR_PARSE, parts);
        if (strstr(bad_rows[i].parts, "cut short") == NULL)
            assert_null(strstr(ekv_last_error(), "cut short"));
    }
}

static void reading_goes_on_after_a_bad_row(void **state)
{
    char text[256];
    snprintf(text, sizeof text, AZURE "bad\n%s,1,2\n", time_a);
    ekv_trace *trace = NULL;
    FILE *file;
    assert_int_equal(open_bytes(*state, text, strlen(text), EKV_TRACE_AUTO, &trace, &file), EKV_OK);
    ekv_trace_row row = { 77, 0, 0, 0 };
    bool end = false;
    assert_fails(ekv_trace_next(trace, &row, &end), EKV_ERROR_PARSE, "line 2 (row 1)");
    assert_int_equal(row.row, 77);
    assert_int_equal(ekv_trace_next(trace, &row, &end), EKV_OK);
    assert_int_equal(row.row, 2);
    assert_int_equal(row.output_tokens, 2);
    ekv_trace_free(trace);
    fclose(file);
}

static void a_forced_format_is_held_to(void **state)
{
    char text[256];
    snprintf(text, sizeof text, AZURE "%s,1,2\n", time_a);
    assert_fails(read_all(*state, text, strlen(text), EKV_TRACE_BURSTGPT), EKV_ERROR_PARSE,
                 "line 1|no column Timestamp");
    assert_fails(read_all(*state, text, strlen(text), EKV_TRACE_MOONCAKE), EKV_ERROR_PARSE,
                 "line 1 (row 1)|is no JSON object");
    assert_fails(read_all(*state, "{}\n", 3, EKV_TRACE_AZURE), EKV_ERROR_PARSE, "line 1|'{}'|no column TIMESTAMP");
}

static void a_file_that_cannot_be_read_says_why(void **state)
{
    ekv_trace *trace = NULL;
    assert_fails(ekv_trace_open(*state, "/no/such.csv", EKV_TRACE_AUTO, &trace), EKV_ERROR_NOT_FOUND,
                 "/no/such.csv: No such file or directory");
    assert_fails(ekv_trace_open(*state, "/", EKV_TRACE_AUTO, &trace), EKV_ERROR_IO, "/: Is a directory");
    char path[3000]; /* a long name leaves room for what is wrong */
    for (size_t i = 0; i + 6 < sizeof path; i += 6)
        memcpy(path + i, "/a/../", 7);
    strcpy(path + sizeof path - 30, "no-such-folder/no-such.csv");
    assert_fails(ekv_trace_open(*state, path, EKV_TRACE_AUTO, &trace), EKV_ERROR_NOT_FOUND,
                 "...|/no-such-folder/no-such.csv: No such file or directory");
    FILE *file = fmemopen("x\n", 2, "r");
    assert_non_null(file);
    assert_fails(ekv_trace_open_file(*state, file, path, EKV_TRACE_AUTO, &trace), EKV_ERROR_PARSE,
                 "/no-such.csv, line 1: 'x' is neither");
    fclose(file);
    assert_null(trace);
}

static void formats_have_names(void **state)
{
    (void)state;
    ekv_trace_format format;
    for (int32_t i = 0; ekv_trace_format_name(i); i++) {
        assert_int_equal(ekv_trace_format_find(ekv_trace_format_name(i), &format), EKV_OK);
        assert_int_equal(format, i);
    }
    assert_fails(ekv_trace_format_find("csv", &format), EKV_ERROR_NOT_FOUND, "'csv'|azure|mooncake|burstgpt");
    assert_null(ekv_trace_format_name(-1));
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

static void memory_does_not_grow_with_the_file(void **state)
{
    (void)state;
    enum { ROWS = 100000 };
    FILE *file = tmpfile();
    assert_non_null(file);
    fputs(BURSTGPT, file);
    for (int32_t i = 0; i < ROWS; i++)
        fprintf(file, "%d,ChatGPT,%d,18,490,Conversation log\n", i, i);
    assert_true(ftell(file) > 4000000);
    rewind(file);
    failing_allocator allocator;
    ekv_context *context = failing_context(&allocator);
    const int64_t before = allocator.bytes;
    ekv_trace *trace = NULL;
    assert_int_equal(ekv_trace_open_file(context, file, "large", EKV_TRACE_AUTO, &trace), EKV_OK);
    ekv_trace_row row;
    bool end = false;
    int32_t rows = 0;
    for (;;) {
        assert_int_equal(ekv_trace_next(trace, &row, &end), EKV_OK);
        if (end)
            break;
        assert_int_equal(row.input_tokens, rows++);
    }
    assert_int_equal(rows, ROWS);
    assert_true(allocator.bytes - before < 200000);
    ekv_trace_free(trace);
    fclose(file);
    ekv_context_free(context);
}

static ekv_status open_sample(ekv_context *context, void **result)
{
    return ekv_trace_open(context, EVENKV_TEST_DATA "/trace-azure.csv", EKV_TRACE_AUTO, (ekv_trace **)result);
}

static void release_trace(void *trace)
{
    ekv_trace_free(trace);
}

static void no_memory_is_reported_and_leaks_nothing(void **state)
{
    (void)state;
    assert_int_equal(walk_allocation_failures(open_sample, release_trace), 2);
    ekv_trace_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format_is_found_and_read),
        cmocka_unit_test(line_ends_blanks_and_column_order_do_not_matter),
        cmocka_unit_test(dates_follow_the_calendar),
        cmocka_unit_test(a_bad_file_is_refused_with_its_reason),
        cmocka_unit_test(a_bad_row_is_refused_with_its_number_and_value),
        cmocka_unit_test(reading_goes_on_after_a_bad_row),
        cmocka_unit_test(a_forced_format_is_held_to),
        cmocka_unit_test(a_file_that_cannot_be_read_says_why),
        cmocka_unit_test(formats_have_names),
        cmocka_unit_test(memory_does_not_grow_with_the_file),
        cmocka_unit_test(no_memory_is_reported_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
