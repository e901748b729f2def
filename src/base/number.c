/* SPDX-License-Identifier: Apache-2.0 */
#include "base/number.h"

#include "base/status.h"

#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

const char *ekv_quote(const char *text, size_t size, char quoted[EKV_QUOTE_SIZE])
{
    const size_t largest = EKV_QUOTE_SIZE - sizeof "...";
    size_t length = size <= largest ? size : largest;
    for (size_t i = 0; i < length; i++)
        quoted[i] = (char)(text[i] >= 0x20 && text[i] < 0x7F ? text[i] : '?');
    strcpy(quoted + length, size <= largest ? "" : "...");
    return quoted;
}

const char *ekv_show_path(const char *path, char shown[EKV_PATH_SIZE])
{
    const size_t size = strlen(path), largest = EKV_PATH_SIZE - sizeof "...";
    strcpy(shown, size < EKV_PATH_SIZE ? "" : "...");
    return strcat(shown, size < EKV_PATH_SIZE ? path : path + size - largest);
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static ekv_status fail_integer(const char *text, size_t size, const char *name, int64_t smallest, int64_t largest)
{
    char quoted[EKV_QUOTE_SIZE];
    return ekv_fail(EKV_ERROR_PARSE, "%s is '%s'; it must be a whole number %" PRId64 "..%" PRId64, name,
                    ekv_quote(text, size, quoted), smallest, largest);
}

ekv_status ekv_parse_int64(const char *text, size_t size, const char *name, int64_t smallest, int64_t largest,
                           int64_t *value)
{
    const bool negative = size > 0 && text[0] == '-';
    size_t i = negative;
    int64_t sum = 0; /* kept negative: INT64_MIN has no positive counterpart */
    if (i == size)
        return fail_integer(text, size, name, smallest, largest);
    for (; i < size; i++) {
        int64_t digit = text[i] - '0';
        if (!is_digit(text[i]) || sum < (INT64_MIN + digit) / 10)
            return fail_integer(text, size, name, smallest, largest);
        sum = sum * 10 - digit;
    }
    if ((!negative && sum == INT64_MIN) || (negative ? sum : -sum) < smallest || (negative ? sum : -sum) > largest)
        return fail_integer(text, size, name, smallest, largest);
    *value = negative ? sum : -sum;
    return EKV_OK;
}

ekv_status ekv_parse_int32(const char *text, size_t size, const char *name, int32_t smallest, int32_t largest,
                           int32_t *value)
{
    int64_t wide;
    ekv_status status = ekv_parse_int64(text, size, name, smallest, largest, &wide);
    if (status)
        return status;
    *value = (int32_t)wide;
    return EKV_OK;
}

enum { DOUBLE_MAX_CHARACTERS = 64 };

/* The index after the digits that begin at i; i itself where there are none. */
static size_t skip_digits(const char *text, size_t size, size_t i)
{
    while (i < size && is_digit(text[i]))
        i++;
    return i;
}

/* -?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)? */
static bool is_decimal(const char *text, size_t size)
{
    size_t begin = size > 0 && text[0] == '-';
    size_t end = skip_digits(text, size, begin);
    if (end == begin)
        return false;
    if (end < size && text[end] == '.') {
        begin = end + 1;
        end = skip_digits(text, size, begin);
        if (end == begin)
            return false;
    }
    if (end < size && (text[end] == 'e' || text[end] == 'E')) {
        begin = end + 1;
        begin += begin < size && (text[begin] == '-' || text[begin] == '+');
        end = skip_digits(text, size, begin);
        if (end == begin)
            return false;
    }
    return end == size;
}

/* strtod with a '.' whatever locale the application has set. */
static ekv_status convert(const char *text, double *value)
{
    locale_t plain = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
    if (!plain)
        return ekv_fail(EKV_ERROR_SYSTEM, "the C locale is not available");
    locale_t before = uselocale(plain);
    *value = strtod(text, NULL);
    uselocale(before);
    freelocale(plain);
    return EKV_OK;
}

ekv_status ekv_parse_double(const char *text, size_t size, const char *name, double smallest, double largest,
                            double *value)
{
    char terminated[DOUBLE_MAX_CHARACTERS + 1];
    double converted = NAN;
    if (size <= DOUBLE_MAX_CHARACTERS && is_decimal(text, size)) {
        memcpy(terminated, text, size);
        terminated[size] = 0;
        ekv_status status = convert(terminated, &converted);
        if (status)
            return status;
    }
    if (!(converted >= smallest && converted <= largest) || isinf(converted)) {
        char quoted[EKV_QUOTE_SIZE];
        return ekv_fail(EKV_ERROR_PARSE, "%s is '%s'; it must be a number %g..%g", name, ekv_quote(text, size, quoted),
                        smallest, largest);
    }
    *value = converted;
    return EKV_OK;
}
