/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[512];

ekv_status ekv_fail(ekv_status status, const char *format, ...)
{
    /* By way of a copy: an argument may be the old text itself. */
    char text[sizeof last_error];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    memcpy(last_error, text, sizeof text);
    return status;
}

const char *ekv_last_error(void)
{
    return last_error;
}

#define EKV_TEXT(macro) EKV_TEXT_(macro)
#define EKV_TEXT_(macro) #macro

const char *ekv_version_string(void)
{
    return EKV_TEXT(EKV_VERSION_MAJOR) "." EKV_TEXT(EKV_VERSION_MINOR) "." EKV_TEXT(EKV_VERSION_PATCH);
}

const char *ekv_status_name(ekv_status status)
{
    switch (status) {
#define EKV_STATUS_CASE(name, value, text) \
    case name: return #name;
        EKV_STATUS_LIST(EKV_STATUS_CASE)
#undef EKV_STATUS_CASE
    }
    return "EKV_ERROR_UNKNOWN";
}

const char *ekv_status_text(ekv_status status)
{
    switch (status) {
#define EKV_STATUS_CASE(name, value, text) \
    case name: return text;
        EKV_STATUS_LIST(EKV_STATUS_CASE)
#undef EKV_STATUS_CASE
    }
    return "not a status of this version";
}

/* *given: the struct_size that a caller's struct starts with. */
static ekv_status read_struct_size(const void *source, size_t smallest, const char *name, size_t *given)
{
    memcpy(given, source, sizeof *given);
    if (*given < smallest || *given > 65536)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s.struct_size is %zu; start the struct with its _INIT", name,
                        *given);
    return EKV_OK;
}

ekv_status ekv_struct_read(void *target, size_t size, const void *source, size_t smallest, const char *name)
{
    if (!source)
        return EKV_OK;
    size_t given;
    ekv_status status = read_struct_size(source, smallest, name, &given);
    if (status)
        return status;
    const unsigned char *bytes = source;
    for (size_t i = size; i < given; i++)
        if (bytes[i])
            return ekv_fail(EKV_ERROR_UNSUPPORTED, "%s has members newer than evenkv %s that are not zero", name,
                            ekv_version_string());
    memcpy(target, source, given < size ? given : size);
    memcpy(target, &size, sizeof size);
    return EKV_OK;
}

ekv_status ekv_struct_write(void *target, const void *source, size_t size, size_t smallest, const char *name)
{
    if (!target)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
    size_t given;
    ekv_status status = read_struct_size(target, smallest, name, &given);
    if (status)
        return status;
    memset(target, 0, given);
    memcpy(target, source, given < size ? given : size);
    memcpy(target, &given, sizeof given);
    return EKV_OK;
}
