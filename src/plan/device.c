/* SPDX-License-Identifier: Apache-2.0
 * Device models: `key = value` lines, '#' to the end of a line is a comment, keys in any order, each once. */
#include "base/context.h"
#include "base/embedded.h"
#include "base/number.h"
#include "base/status.h"
#include "plan/plan.h"

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

extern const ekv_embedded ekv_device_models[]; /* data/devices, embedded by the build */

static const char *const system_names[EKV_NUM_SYSTEMS] = {
    [EKV_SYSTEM_EVENKV] = "evenkv",
    [EKV_SYSTEM_FLASHINFER_CUDA_CORE] = "flashinfer-cuda-core",
    [EKV_SYSTEM_FLASHINFER_TENSOR_CORE] = "flashinfer-tensor-core",
    [EKV_SYSTEM_FA3] = "fa3",
    [EKV_SYSTEM_FLASHINFER_BATCH_ATTENTION] = "flashinfer-batch-attention",
    [EKV_SYSTEM_FLASHINFER_XQA] = "flashinfer-xqa",
};

const char *ekv_system_name(int32_t index)
{
    return index >= 0 && index < EKV_NUM_SYSTEMS ? system_names[index] : NULL;
}

typedef enum key_kind { KEY_NAME, KEY_SMS, KEY_INT32, KEY_INT64, KEY_DOUBLE } key_kind;

typedef struct device_key {
    const char *name;
    key_kind kind;
    size_t offset; /* in ekv_device */
    double smallest, largest;
} device_key;

/* The ranges of the first lines are those that plans take; the others only keep nonsense out. */
#define KEY(kind, member, smallest, largest)                           \
    {                                                                  \
#member, kind, offsetof(ekv_device, member), smallest, largest \
    }
static const device_key keys[] = {
    KEY(KEY_NAME, name, 1, sizeof((ekv_device *)0)->name - 1),
    KEY(KEY_SMS, num_sms, 1, 65536),
    KEY(KEY_INT32, sm_arch, 0, 999),
    KEY(KEY_INT32, ctas_per_sm, 1, 64),
    KEY(KEY_INT32, request_cost_tokens, 0, 65536),
    KEY(KEY_DOUBLE, read_gb_per_s_nominal, 0, 1e6),
    KEY(KEY_DOUBLE, read_gb_per_s, 0, 1e6),
    KEY(KEY_DOUBLE, bf16_tflops, 0, 1e6),
    KEY(KEY_INT64, l2_bytes, 0, 0x1p40),
    KEY(KEY_INT64, memory_bytes, 0, 0x1p50),
    KEY(KEY_INT32, projected, 0, 1),
};
#undef KEY

enum { NUM_KEYS = sizeof keys / sizeof keys[0] };

/* Constants of a system, `SYSTEM.constant`; a device has all of a system or none.  offset: in ekv_system_model. */
#define CONSTANT(member, smallest, largest)                                        \
    {                                                                              \
#member, KEY_DOUBLE, offsetof(ekv_system_model, member), smallest, largest \
    }
static const device_key constants[] = {
    CONSTANT(cta_gb_per_s, 1e-6, 1e6), CONSTANT(sm_gb_per_s, 1e-6, 1e6), CONSTANT(total_gb_per_s, 1e-6, 1e6),
    CONSTANT(tile_us, 0, 1e6),         CONSTANT(launch_us, 0, 1e6),      CONSTANT(merge_us, 0, 1e6),
};
#undef CONSTANT

enum { NUM_CONSTANTS = sizeof constants / sizeof constants[0] };

typedef struct parser {
    char origin[EKV_PATH_SIZE];
    int line;
    bool seen[NUM_KEYS];
    bool seen_constants[EKV_NUM_SYSTEMS][NUM_CONSTANTS];
    bool sms_auto; /* num_sms = auto */
    ekv_device device;
} parser;

/* A part of the text, not terminated. */
typedef struct span {
    const char *text;
    size_t size;
} span;

static span trim(span s)
{
    while (s.size && (s.text[0] == ' ' || s.text[0] == '\t'))
        s.text++, s.size--;
    while (s.size && (s.text[s.size - 1] == ' ' || s.text[s.size - 1] == '\t' || s.text[s.size - 1] == '\r'))
        s.size--;
    return s;
}

/* s up to the first c, or all of it. */
static span until(span s, char c)
{
    const char *found = s.size ? memchr(s.text, c, s.size) : NULL;
    return found ? (span){ s.text, (size_t)(found - s.text) } : s;
}

static bool equals(span s, const char *word)
{
    return s.size == strlen(word) && !memcmp(s.text, word, s.size);
}

/* ---- Values ------------------------------------------------------------------------------------------ */

static ekv_status read_name(parser *p, const char *label, span value)
{
    for (size_t i = 0; i < value.size; i++)
        if (value.text[i] <= ' ' || value.text[i] > '~') {
            char quoted[EKV_QUOTE_SIZE];
            return ekv_fail(EKV_ERROR_PARSE, "%s is '%s'; it must be printable ASCII without spaces", label,
                            ekv_quote(value.text, value.size, quoted));
        }
    if (value.size < 1 || value.size >= sizeof p->device.name) {
        char quoted[EKV_QUOTE_SIZE];
        return ekv_fail(EKV_ERROR_PARSE, "%s is '%s'; it must have 1..%zu characters", label,
                        ekv_quote(value.text, value.size, quoted), sizeof p->device.name - 1);
    }
    memcpy(p->device.name, value.text, value.size);
    return EKV_OK;
}

static ekv_status read_value(parser *p, const device_key *key, span value)
{
    char label[EKV_PATH_SIZE + 64];
    snprintf(label, sizeof label, "%s:%d: %s", p->origin, p->line, key->name);
    void *member = (unsigned char *)&p->device + key->offset;
    switch (key->kind) {
    case KEY_NAME: return read_name(p, label, value);
    case KEY_SMS:
        p->sms_auto = equals(value, "auto");
        if (p->sms_auto)
            return EKV_OK;
        return ekv_parse_int32(value.text, value.size, label, (int32_t)key->smallest, (int32_t)key->largest, member);
    case KEY_INT32:
        return ekv_parse_int32(value.text, value.size, label, (int32_t)key->smallest, (int32_t)key->largest, member);
    case KEY_INT64:
        return ekv_parse_int64(value.text, value.size, label, (int64_t)key->smallest, (int64_t)key->largest, member);
    case KEY_DOUBLE: return ekv_parse_double(value.text, value.size, label, key->smallest, key->largest, member);
    }
    return EKV_OK;
}

/* ---- Lines ------------------------------------------------------------------------------------------- */

/* Control bytes mean that this is no text; the bytes of UTF-8 may stand in comments. */
static ekv_status check_text(const parser *p, span line)
{
    for (size_t i = 0; i < line.size; i++) {
        unsigned char c = (unsigned char)line.text[i];
        bool end_of_line = c == '\r' && i + 1 == line.size;
        if ((c < 0x20 && c != '\t' && !end_of_line) || c == 0x7F)
            return ekv_fail(EKV_ERROR_PARSE, "%s:%d: byte 0x%02X at column %zu is not text", p->origin, p->line, c,
                            i + 1);
    }
    return EKV_OK;
}

/* `SYSTEM.constant`; *found: whether name is one. */
static ekv_status read_constant(parser *p, span name, span value, bool *found)
{
    const span system = until(name, '.');
    *found = false;
    if (system.size == name.size)
        return EKV_OK;
    const span constant = { system.text + system.size + 1, name.size - system.size - 1 };
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++)
        for (int i = 0; i < NUM_CONSTANTS && equals(system, ekv_system_name(s)); i++) {
            if (!equals(constant, constants[i].name))
                continue;
            *found = true;
            if (p->seen_constants[s][i])
                return ekv_fail(EKV_ERROR_PARSE, "%s:%d: %s.%s is repeated", p->origin, p->line, ekv_system_name(s),
                                constants[i].name);
            p->seen_constants[s][i] = true;
            char label[EKV_PATH_SIZE + 64];
            snprintf(label, sizeof label, "%s:%d: %s.%s", p->origin, p->line, ekv_system_name(s), constants[i].name);
            unsigned char *model = (unsigned char *)&p->device.systems[s];
            return ekv_parse_double(value.text, value.size, label, constants[i].smallest, constants[i].largest,
                                    (double *)(void *)(model + constants[i].offset));
        }
    return EKV_OK;
}

static ekv_status read_line(parser *p, span line)
{
    ekv_status status = check_text(p, line);
    if (status)
        return status;
    span entry = trim(until(line, '#'));
    if (!entry.size)
        return EKV_OK;
    char quoted[EKV_QUOTE_SIZE];
    span left = until(entry, '=');
    if (left.size == entry.size)
        return ekv_fail(EKV_ERROR_PARSE, "%s:%d: '%s' is not `key = value`", p->origin, p->line,
                        ekv_quote(entry.text, entry.size, quoted));
    span name = trim(left), value = trim((span){ left.text + left.size + 1, entry.size - left.size - 1 });
    for (int i = 0; i < NUM_KEYS; i++) {
        if (!equals(name, keys[i].name))
            continue;
        if (p->seen[i])
            return ekv_fail(EKV_ERROR_PARSE, "%s:%d: %s is repeated", p->origin, p->line, keys[i].name);
        p->seen[i] = true;
        return read_value(p, &keys[i], value);
    }
    bool found;
    if ((status = read_constant(p, name, value, &found)) || found)
        return status;
    return ekv_fail(EKV_ERROR_PARSE, "%s:%d: '%s' is not a key of a device", p->origin, p->line,
                    ekv_quote(name.text, name.size, quoted));
}

/* A system has all of its constants or none. */
static ekv_status check_systems(const parser *p)
{
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++) {
        int count = 0, missing = 0;
        for (int i = 0; i < NUM_CONSTANTS; i++) {
            count += p->seen_constants[s][i];
            if (!p->seen_constants[s][i])
                missing = i;
        }
        if (count && count < NUM_CONSTANTS)
            return ekv_fail(EKV_ERROR_PARSE, "%s:%d: the device has constants of %s but lacks %s.%s", p->origin,
                            p->line, ekv_system_name(s), ekv_system_name(s), constants[missing].name);
    }
    return EKV_OK;
}

static ekv_status check_all_seen(const parser *p)
{
    char missing[256] = "";
    for (int i = 0; i < NUM_KEYS; i++)
        if (!p->seen[i]) {
            size_t used = strlen(missing);
            snprintf(missing + used, sizeof missing - used, "%s%s", used ? ", " : "", keys[i].name);
        }
    if (missing[0])
        return ekv_fail(EKV_ERROR_PARSE, "%s:%d: the device lacks %s", p->origin, p->line, missing);
    return EKV_OK;
}

/* auto: this machine's threads, so only a device that is no GPU can have it. */
static ekv_status resolve_sms(parser *p)
{
    if (!p->sms_auto)
        return EKV_OK;
    if (p->device.sm_arch)
        return ekv_fail(EKV_ERROR_PARSE, "%s:%d: num_sms is 'auto', which goes with sm_arch 0 only, not %d", p->origin,
                        p->line, p->device.sm_arch);
    return ekv_default_threads(&p->device.num_sms);
}

ekv_status ekv_device_parse(const char *text, size_t size, const char *origin, ekv_device *device)
{
    if (!text || !origin)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", text ? "origin" : "text");
    parser p = { .line = 1, .device = EKV_DEVICE_INIT };
    ekv_show_path(origin, p.origin);
    span rest = { text, size };
    if (size >= 3 && !memcmp(text, "\xef\xbb\xbf", 3)) /* UTF-8 byte order mark */
        rest = (span){ text + 3, size - 3 };
    ekv_status status;
    while (rest.size) {
        if (p.line == INT_MAX)
            return ekv_fail(EKV_ERROR_PARSE, "%s has more than %d lines", p.origin, INT_MAX);
        span line = until(rest, '\n');
        if ((status = read_line(&p, line)))
            return status;
        size_t taken = line.size < rest.size ? line.size + 1 : line.size;
        rest = (span){ rest.text + taken, rest.size - taken };
        p.line += rest.size > 0;
    }
    if ((status = check_all_seen(&p)) || (status = check_systems(&p)) || (status = resolve_sms(&p)))
        return status;
    return ekv_struct_write(device, &p.device, sizeof p.device, EKV_DEVICE_FIRST_SIZE, "ekv_device");
}

/* ---- Built-in models --------------------------------------------------------------------------------- */

const char *ekv_device_name(int32_t index)
{
    int32_t i = 0;
    while (i < index && ekv_device_models[i].name)
        i++;
    return i == index ? ekv_device_models[i].name : NULL;
}

const char *ekv_device_text(const char *name)
{
    if (name)
        for (const ekv_embedded *model = ekv_device_models; model->name; model++)
            if (!strcmp(model->name, name))
                return model->text;
    return NULL;
}

ekv_status ekv_device_find(const char *name, ekv_device *device)
{
    if (!name)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "name is NULL");
    const char *text = ekv_device_text(name);
    if (text)
        return ekv_device_parse(text, strlen(text), name, device);
    char known[256] = "";
    for (const ekv_embedded *model = ekv_device_models; model->name; model++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", model->name);
    }
    char quoted[EKV_QUOTE_SIZE];
    return ekv_fail(EKV_ERROR_NOT_FOUND, "no device is called '%s'; known are %s",
                    ekv_quote(name, strlen(name), quoted), known);
}
