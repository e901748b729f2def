/* SPDX-License-Identifier: Apache-2.0
 * The CSV formats.  Columns are found by their names in the header, so their order and further columns do not
 * matter.  Sources of the names: Azure/AzurePublicDataset AzureLLMInferenceDataset2023.md, HPMLL/BurstGPT
 * README.md. */
#include "base/number.h"
#include "base/status.h"
#include "trace/trace_rows.h"

#include <math.h>
#include <string.h>

const char *const ekv_azure_columns[EKV_TRACE_FIELDS] = { "TIMESTAMP", "ContextTokens", "GeneratedTokens" };
const char *const ekv_burstgpt_columns[EKV_TRACE_FIELDS] = { "Timestamp", "Request tokens", "Response tokens" };

/* Takes the first column off *rest, which must have one; false if it is the last. */
static bool take_column(ekv_line *rest, ekv_line *column)
{
    const char *comma = memchr(rest->text, ',', rest->size);
    *column = *rest;
    if (comma) {
        column->size = (size_t)(comma - rest->text);
        rest->text += column->size + 1;
        rest->size -= column->size + 1;
    }
    *column = ekv_line_trim(*column);
    return comma != NULL;
}

/* The index of a column in the header, or -1; *columns is their number. */
static int32_t find_column(ekv_line header, const char *name, int32_t *columns)
{
    int32_t found = -1, i = 0;
    bool more;
    do {
        ekv_line column;
        more = take_column(&header, &column);
        if (found < 0 && column.size == strlen(name) && !memcmp(column.text, name, column.size))
            found = i;
        i++;
    } while (more);
    *columns = i;
    return found;
}

bool ekv_csv_header_matches(ekv_line header, const char *const columns[EKV_TRACE_FIELDS])
{
    int32_t count;
    return find_column(header, columns[1], &count) >= 0 || find_column(header, columns[2], &count) >= 0;
}

ekv_status ekv_csv_read_header(ekv_line header, const char *const columns[EKV_TRACE_FIELDS], ekv_csv_layout *layout)
{
    for (int32_t field = 0; field < EKV_TRACE_FIELDS; field++) {
        layout->column[field] = find_column(header, columns[field], &layout->columns);
        if (layout->column[field] < 0) {
            char quoted[EKV_QUOTE_SIZE];
            return ekv_fail(EKV_ERROR_PARSE, "the header '%s' has no column %s",
                            ekv_quote(header.text, header.size, quoted), columns[field]);
        }
    }
    return EKV_OK;
}

static ekv_status split(ekv_line line, const ekv_csv_layout *layout, ekv_line fields[EKV_TRACE_FIELDS])
{
    int32_t i = 0;
    bool more;
    do {
        ekv_line column;
        more = take_column(&line, &column);
        for (int32_t field = 0; field < EKV_TRACE_FIELDS; field++)
            if (layout->column[field] == i)
                fields[field] = column;
        i++;
    } while (more);
    if (i != layout->columns)
        return ekv_fail(EKV_ERROR_PARSE, "the row has %d column%s where the header has %d", i, i == 1 ? "" : "s",
                        layout->columns);
    return EKV_OK;
}

static ekv_status read_tokens(const ekv_line fields[EKV_TRACE_FIELDS], const char *const columns[EKV_TRACE_FIELDS],
                              ekv_raw_row *row)
{
    ekv_status status = ekv_parse_int32(fields[1].text, fields[1].size, columns[1], 0, INT32_MAX, &row->input_tokens);
    return status ? status
                  : ekv_parse_int32(fields[2].text, fields[2].size, columns[2], 0, INT32_MAX, &row->output_tokens);
}

/* ---- Times ------------------------------------------------------------------------------------------- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Reads text that follows a pattern, in which a '0' stands for a digit and anything else for itself.  The runs
 * of digits go to numbers[]. */
static bool match_digits(const char *text, const char *pattern, int32_t *numbers)
{
    bool in_number = false;
    for (; *pattern; text++, pattern++) {
        const bool digit = is_digit(*text);
        if (*pattern == '0' ? !digit : *text != *pattern)
            return false;
        if (*pattern == '0') {
            *numbers = (in_number ? *numbers * 10 : 0) + (*text - '0');
            in_number = true;
        } else if (in_number) {
            numbers++;
            in_number = false;
        }
    }
    return true;
}

static bool is_leap(int32_t year)
{
    return year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
}

/* Days from 1970-01-01 in the Gregorian calendar; -1 if there is no such day. */
static int64_t days_since_1970(int32_t year, int32_t month, int32_t day)
{
    static const int32_t lengths[] = { 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31 };
    if (year < 1970 || month < 1 || month > 12 || day < 1 || day > lengths[month - 1] + (month == 2 && is_leap(year)))
        return -1;
    const int32_t before = year - 1;
    int64_t days = (year - 1970) * INT64_C(365) + (before / 4 - before / 100 + before / 400) -
                   (1969 / 4 - 1969 / 100 + 1969 / 400) + (day - 1);
    for (int32_t m = 1; m < month; m++)
        days += lengths[m - 1] + (m == 2 && is_leap(year));
    return days;
}

/* ".6805900" from *at on, in ns; digits past the ninth are dropped. */
static int64_t read_fraction(ekv_line text, size_t *at)
{
    int64_t ns = 0, unit = 100000000;
    size_t i = *at;
    if (i + 1 >= text.size || text.text[i] != '.' || !is_digit(text.text[i + 1]))
        return 0;
    for (i++; i < text.size && is_digit(text.text[i]); i++) {
        ns += (text.text[i] - '0') * unit;
        unit /= 10;
    }
    *at = i;
    return ns;
}

/* "", "Z", "+01:30" from `at` to the end, in seconds. */
static bool read_zone(ekv_line text, size_t at, int64_t *seconds)
{
    const char *zone = text.text + at;
    int32_t hm[2];
    *seconds = 0;
    if (at == text.size || (text.size - at == 1 && *zone == 'Z'))
        return true;
    if (text.size - at != 6 || (*zone != '+' && *zone != '-') || !match_digits(zone + 1, "00:00", hm))
        return false;
    *seconds = (hm[0] * 60 + hm[1]) * (*zone == '-' ? -60 : 60);
    return hm[0] < 24 && hm[1] < 60;
}

/* "2023-11-16 18:15:46.6805900", "2024-05-10 00:00:00.009930+00:00": ns since 1970, UTC where no zone is. */
static bool read_date(ekv_line text, int64_t *time_ns)
{
    static const char pattern[] = "0000-00-00 00:00:00";
    int32_t n[6];
    size_t at = sizeof pattern - 1;
    if (text.size < at || !match_digits(text.text, pattern, n))
        return false;
    const int64_t days = days_since_1970(n[0], n[1], n[2]);
    int64_t zone;
    const int64_t fraction = read_fraction(text, &at);
    if (days < 0 || n[3] > 23 || n[4] > 59 || n[5] > 59 || !read_zone(text, at, &zone))
        return false;
    const int64_t seconds = ((days * 24 + n[3]) * 60 + n[4]) * 60 + n[5] - zone;
    if (seconds < 0 || seconds > EKV_TRACE_LAST_SECOND)
        return false;
    *time_ns = seconds * 1000000000 + fraction;
    return true;
}

/* ---- Rows -------------------------------------------------------------------------------------------- */

ekv_status ekv_azure_read_row(ekv_line line, const ekv_csv_layout *layout, ekv_raw_row *row)
{
    ekv_line fields[EKV_TRACE_FIELDS];
    ekv_status status = split(line, layout, fields);
    if (status)
        return status;
    if (!read_date(fields[0], &row->time_ns)) {
        char quoted[EKV_QUOTE_SIZE];
        return ekv_fail(EKV_ERROR_PARSE, "TIMESTAMP is '%s'; it must be like 2023-11-16 18:15:46.6805900",
                        ekv_quote(fields[0].text, fields[0].size, quoted));
    }
    return read_tokens(fields, ekv_azure_columns, row);
}

ekv_status ekv_burstgpt_read_row(ekv_line line, const ekv_csv_layout *layout, ekv_raw_row *row)
{
    ekv_line fields[EKV_TRACE_FIELDS];
    double seconds;
    ekv_status status = split(line, layout, fields);
    if (status || (status = ekv_parse_double(fields[0].text, fields[0].size, ekv_burstgpt_columns[0], 0,
                                             (double)EKV_TRACE_LAST_SECOND, &seconds)))
        return status;
    row->time_ns = llround(seconds * 1e9);
    return read_tokens(fields, ekv_burstgpt_columns, row);
}
