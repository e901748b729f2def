/* SPDX-License-Identifier: Apache-2.0
 * Mooncake's JSON lines (kvcache-ai/Mooncake FAST25-release/traces): one object a line; keys other than the
 * three that are read here, such as hash_ids, are skipped. */
#include "base/number.h"
#include "base/status.h"
#include "trace/trace_rows.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

static ekv_status fail_value(const cJSON *item, const char *key, const char *kind, int64_t largest)
{
    char quoted[EKV_QUOTE_SIZE];
    char *printed = cJSON_PrintUnformatted(item); /* of a number that passed the range of a double it makes null */
    const char *text = printed ? printed : "?";
    if (cJSON_IsNumber(item) && isinf(item->valuedouble))
        text = item->valuedouble > 0 ? "inf" : "-inf";
    ekv_status status = ekv_fail(EKV_ERROR_PARSE, "%s is %s; it must be a %s 0..%" PRId64, key,
                                 ekv_quote(text, strlen(text), quoted), kind, largest);
    cJSON_free(printed);
    return status;
}

/* The object's only member of that name. */
static ekv_status find_member(const cJSON *object, const char *key, const cJSON **member)
{
    const cJSON *item, *found = NULL;
    cJSON_ArrayForEach(item, object)
    {
        if (strcmp(item->string, key) != 0)
            continue;
        if (found)
            return ekv_fail(EKV_ERROR_PARSE, "the row has %s twice", key);
        found = item;
    }
    *member = found;
    return found ? EKV_OK : ekv_fail(EKV_ERROR_PARSE, "the row has no %s", key);
}

static ekv_status read_number(const cJSON *object, const char *key, bool whole, int64_t largest, double *value)
{
    const cJSON *item;
    ekv_status status = find_member(object, key, &item);
    if (status)
        return status;
    const double number = item->valuedouble;
    if (!cJSON_IsNumber(item) || !(number >= 0 && number <= (double)largest) || (whole && number != floor(number)))
        return fail_value(item, key, whole ? "whole number" : "number", largest);
    *value = number;
    return EKV_OK;
}

ekv_status ekv_mooncake_read_row(ekv_line line, ekv_raw_row *row)
{
    const char *after = NULL;
    cJSON *object = cJSON_ParseWithLengthOpts(line.text, line.size, &after, false);
    double ms, input, output;
    ekv_status status;
    const bool complete = cJSON_IsObject(object) && after == line.text + line.size;
    if (!complete) {
        char quoted[EKV_QUOTE_SIZE];
        status = ekv_fail(EKV_ERROR_PARSE, "'%s' is no JSON object", ekv_quote(line.text, line.size, quoted));
    } else if (!(status = read_number(object, "timestamp", false, EKV_TRACE_LAST_SECOND * 1000, &ms)) &&
               !(status = read_number(object, "input_length", true, INT32_MAX, &input)) &&
               !(status = read_number(object, "output_length", true, INT32_MAX, &output)))
        *row = (ekv_raw_row){ .time_ns = llround(ms * 1e6),
                              .input_tokens = (int32_t)input,
                              .output_tokens = (int32_t)output };
    cJSON_Delete(object);
    return status;
}
