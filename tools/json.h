/* SPDX-License-Identifier: Apache-2.0
 * JSON output over cJSON: integers of 64 bits print exactly, and memory never runs out quietly. */
#ifndef EVENKV_TOOLS_JSON_H
#define EVENKV_TOOLS_JSON_H

#include "cli.h"

#include <cjson/cJSON.h>

/* A new object; owned by the caller until json_print. */
cJSON *json_object(void);
/* Prints the object as one line to the text and frees it. */
void json_print(cli_text *text, cJSON *object);

/* Each adds a member to the object; json_add_* return what they have added where it takes members itself. */
void json_int(cJSON *object, const char *key, int64_t value);
void json_int_or_null(cJSON *object, const char *key, int64_t value, bool is_null);
void json_real(cJSON *object, const char *key, double value);
void json_real_or_null(cJSON *object, const char *key, double value, bool is_null);
void json_bool(cJSON *object, const char *key, bool value);
void json_string(cJSON *object, const char *key, const char *value); /* NULL: null */
void json_ints(cJSON *object, const char *key, const int32_t *values, int64_t count);
/* count strings */
void json_strings(cJSON *object, const char *key, const char *const *values, int64_t count);
/* Text that is JSON already. */
void json_raw(cJSON *object, const char *key, cli_text *text);
cJSON *json_add_object(cJSON *object, const char *key);
cJSON *json_add_array(cJSON *object, const char *key);
/* A member named as the system, with its constants. */
void json_system(cJSON *object, ekv_system system, const ekv_system_model *model);
/* What the batches of a command have in common: heads, head_dim, page size, dtype of K and V. */
void json_shape(cJSON *object, const ekv_batch *batch);
/* Appends a new object to an array. */
cJSON *json_append_object(cJSON *array);

#endif
