/* SPDX-License-Identifier: Apache-2.0 */
#include "base/number.h"

#include <locale.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const int64_t untouched = -77;

static void refuse_int64(const char *text, size_t size, int64_t smallest, int64_t largest)
{
    int64_t value = untouched;
    assert_int_equal(ekv_parse_int64(text, size, "--count", smallest, largest, &value), EKV_ERROR_PARSE);
    assert_int_equal(value, untouched);
    assert_non_null(strstr(ekv_last_error(), "--count"));
}

static int64_t take_int64(const char *text)
{
    int64_t value = untouched;
    assert_int_equal(ekv_parse_int64(text, strlen(text), "--count", INT64_MIN, INT64_MAX, &value), EKV_OK);
    return value;
}

static void integers_are_whole_and_exact(void **state)
{
    (void)state;
    assert_int_equal(take_int64("0"), 0);
    assert_int_equal(take_int64("-0"), 0);
    assert_int_equal(take_int64("007"), 7);
    assert_int_equal(take_int64("9223372036854775807"), INT64_MAX);
    assert_int_equal(take_int64("-9223372036854775808"), INT64_MIN);
    static const char *const bad[] = {
        "",
        "-",
        "+1",
        " 1",
        "1 ",
        "1\n",
        "0x10",
        "1e3",
        "1.0",
        "1,000",
        "--1",
        "-1-",
        "abc",
        "12a",
        "9223372036854775808",
        "-9223372036854775809",
        "99999999999999999999999999",
        "\xD9\xA1" /* an Arabic digit */,
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        refuse_int64(bad[i], strlen(bad[i]), INT64_MIN, INT64_MAX);
}

static void a_number_ends_where_its_size_says(void **state)
{
    (void)state;
    int64_t value = untouched;
    assert_int_equal(ekv_parse_int64("12345", 3, "n", 0, 999, &value), EKV_OK);
    assert_int_equal(value, 123);
    refuse_int64("12\0", 3, 0, 999);
    double real = 0;
    assert_int_equal(ekv_parse_double("1.2575", 4, "x", 0, 9, &real), EKV_OK);
    assert_true(real == 1.25);
}

static void ranges_are_inclusive_and_named(void **state)
{
    (void)state;
    int64_t wide = untouched;
    assert_int_equal(ekv_parse_int64("5", 1, "n", 5, 5, &wide), EKV_OK);
    refuse_int64("4", 1, 5, 8);
    refuse_int64("9", 1, 5, 8);
    assert_string_equal(ekv_last_error(), "--count is '9'; it must be a whole number 5..8");

    int32_t narrow = -7;
    assert_int_equal(ekv_parse_int32("2147483647", 10, "n", 0, INT32_MAX, &narrow), EKV_OK);
    assert_int_equal(narrow, INT32_MAX);
    assert_int_equal(ekv_parse_int32("2147483648", 10, "n", INT32_MIN, INT32_MAX, &narrow), EKV_ERROR_PARSE);
    assert_non_null(strstr(ekv_last_error(), "2147483648"));
    assert_int_equal(ekv_parse_int32("-2147483648", 11, "n", INT32_MIN, INT32_MAX, &narrow), EKV_OK);
    assert_int_equal(narrow, INT32_MIN);
}

static void doubles_are_plain_and_finite(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        double value;
    } good[] = {
        { "0", 0.0 },       { "-0.5", -0.5 },
        { "4160", 4160.0 }, { "1e3", 1000.0 },
        { "1E+3", 1000.0 }, { "25e-2", 0.25 },
        { "0.1", 0.1 },     { "1e-400", 0.0 },
        { "007.5", 7.5 },   { "9007199254740993", 9007199254740992.0 }, /* a tie, to even */
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        double value = -77;
        assert_int_equal(ekv_parse_double(good[i].text, strlen(good[i].text), "x", -1e300, 1e300, &value), EKV_OK);
        assert_true(value == good[i].value);
    }
    static const char *const bad[] = {
        "",
        "-",
        ".5",
        "5.",
        "1.e3",
        "1e",
        "1e+",
        "nan",
        "NAN",
        "inf",
        "-inf",
        "infinity",
        "0x1p3",
        "1_000",
        "1,5",
        " 1",
        "1 ",
        "+1",
        "1e309",
        "1.5.2",
        "1e3e3",
        "\xEF\xBC\x91" /* a full-width one */,
        "00000000000000000000000000000000000000000000000000000000000000001", /* 65 characters */
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        double value = -77;
        assert_int_equal(ekv_parse_double(bad[i], strlen(bad[i]), "rate", -1e308 * 10, 1e308 * 10, &value),
                         EKV_ERROR_PARSE);
        assert_true(value == -77);
        assert_non_null(strstr(ekv_last_error(), "rate"));
    }
}

static void a_comma_locale_changes_nothing(void **state)
{
    (void)state;
    static const char *const comma[] = { "de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "ru_RU.UTF-8" };
    const char *set = NULL;
    for (size_t i = 0; i < sizeof comma / sizeof comma[0] && !set; i++)
        set = setlocale(LC_ALL, comma[i]);
    if (!set)
        skip(); /* this machine has none of them */
    double value = 0;
    assert_int_equal(ekv_parse_double("1.5", 3, "x", 0, 9, &value), EKV_OK);
    assert_true(value == 1.5);
    assert_int_equal(ekv_parse_double("1,5", 3, "x", 0, 9, &value), EKV_ERROR_PARSE);
    setlocale(LC_ALL, "C");
}

static void foreign_bytes_are_quoted_printably(void **state)
{
    (void)state;
    char quoted[EKV_QUOTE_SIZE];
    assert_string_equal(ekv_quote("plain", 5, quoted), "plain");
    assert_string_equal(ekv_quote("a\nb\x1B[2J\xC3\xA9", 9, quoted), "a?b?[2J??");
    assert_string_equal(ekv_quote("0123456789012345678901234567890123456789", 40, quoted),
                        "0123456789012345678901234567890123456789");
    assert_string_equal(ekv_quote("0123456789012345678901234567890123456789X", 41, quoted),
                        "0123456789012345678901234567890123456789...");
    assert_string_equal(ekv_quote("", 0, quoted), "");
}

static void long_paths_keep_their_end(void **state)
{
    (void)state;
    char shown[EKV_PATH_SIZE], path[1000];
    assert_string_equal(ekv_show_path("", shown), "");
    for (size_t size = 190; size < sizeof path; size++) {
        memset(path, 'a', size);
        memcpy(path + size - 4, "/end", 5);
        ekv_show_path(path, shown);
        assert_int_equal(strlen(shown), size < EKV_PATH_SIZE ? size : EKV_PATH_SIZE - 1);
        assert_int_equal(strncmp(shown, "...", 3) == 0, size >= EKV_PATH_SIZE);
        assert_string_equal(shown + strlen(shown) - 4, "/end");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(integers_are_whole_and_exact),   cmocka_unit_test(a_number_ends_where_its_size_says),
        cmocka_unit_test(ranges_are_inclusive_and_named), cmocka_unit_test(doubles_are_plain_and_finite),
        cmocka_unit_test(a_comma_locale_changes_nothing), cmocka_unit_test(foreign_bytes_are_quoted_printably),
        cmocka_unit_test(long_paths_keep_their_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
