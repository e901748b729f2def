/* SPDX-License-Identifier: Apache-2.0 */
#include "json.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

cJSON *json_object(void)
{
    cJSON_Hooks hooks = { cli_alloc, free };
    cJSON_InitHooks(&hooks);
    return cJSON_CreateObject();
}

void json_print(cli_text *text, cJSON *object)
{
    char *line = cJSON_PrintUnformatted(object);
    cli_print(text, "%s\n", line);
    cJSON_free(line);
    cJSON_Delete(object);
}

/* A cJSON number is a double and prints 17 digits of it at most, so integers go in as text. */
void json_int(cJSON *object, const char *key, int64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRId64, value);
    cJSON_AddRawToObject(object, key, text);
}

void json_int_or_null(cJSON *object, const char *key, int64_t value, bool is_null)
{
    if (is_null)
        cJSON_AddNullToObject(object, key);
    else
        json_int(object, key, value);
}

void json_real(cJSON *object, const char *key, double value)
{
    cJSON_AddNumberToObject(object, key, value);
}

void json_real_or_null(cJSON *object, const char *key, double value, bool is_null)
{
    if (is_null)
        cJSON_AddNullToObject(object, key);
    else
        json_real(object, key, value);
}

void json_bool(cJSON *object, const char *key, bool value)
{
    cJSON_AddBoolToObject(object, key, value);
}

void json_string(cJSON *object, const char *key, const char *value)
{
    if (value)
        cJSON_AddStringToObject(object, key, value);
    else
        cJSON_AddNullToObject(object, key);
}

void json_ints(cJSON *object, const char *key, const int32_t *values, int64_t count)
{
    cli_text text = { 0 };
    for (int64_t i = 0; i < count; i++)
        cli_print(&text, "%c%d", i ? ',' : '[', values[i]);
    cli_print(&text, count ? "]" : "[]");
    json_raw(object, key, &text);
}

void json_strings(cJSON *object, const char *key, const char *const *values, int64_t count)
{
    cJSON *array = json_add_array(object, key);
    for (int64_t i = 0; i < count; i++)
        cJSON_AddItemToArray(array, cJSON_CreateString(values[i]));
}

void json_raw(cJSON *object, const char *key, cli_text *text)
{
    cli_append(text, "", 1);
    cJSON_AddRawToObject(object, key, text->data);
    free(text->data);
    *text = (cli_text){ 0 };
}

cJSON *json_add_object(cJSON *object, const char *key)
{
    return cJSON_AddObjectToObject(object, key);
}

cJSON *json_add_array(cJSON *object, const char *key)
{
    return cJSON_AddArrayToObject(object, key);
}

void json_shape(cJSON *object, const ekv_batch *batch)
{
    json_int(object, "q_heads", batch->q_heads);
    json_int(object, "kv_heads", batch->kv_heads);
    json_int(object, "head_dim", batch->head_dim);
    json_int(object, "page_size", batch->page_size);
    json_string(object, "dtype", cli_dtype_name(batch->kv_dtype));
}

cJSON *json_append_object(cJSON *array)
{
    cJSON *object = cJSON_CreateObject();
    cJSON_AddItemToArray(array, object);
    return object;
}

void json_system(cJSON *object, ekv_system system, const ekv_system_model *model)
{
    cJSON *constants = json_add_object(object, ekv_system_name(system));
    json_real(constants, "cta_gb_per_s", model->cta_gb_per_s);
    json_real(constants, "sm_gb_per_s", model->sm_gb_per_s);
    json_real(constants, "total_gb_per_s", model->total_gb_per_s);
    json_real(constants, "tile_us", model->tile_us);
    json_real(constants, "launch_us", model->launch_us);
    json_real(constants, "merge_us", model->merge_us);
}
