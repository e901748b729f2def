/* SPDX-License-Identifier: Apache-2.0 */
#include "base/context.h"

#include "base/number.h"
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EKV_MAX_THREADS = 1024 };

static void *default_alloc(size_t size, void *user)
{
    (void)user;
    return malloc(size);
}

static void default_free(void *pointer, void *user)
{
    (void)user;
    free(pointer);
}

void *ekv_alloc(ekv_context *context, size_t size)
{
    return context->options.alloc(size, context->options.alloc_user);
}

void ekv_release(ekv_context *context, void *pointer)
{
    if (pointer)
        context->options.free(pointer, context->options.alloc_user);
}

void ekv_log(ekv_context *context, ekv_log_level level, const char *format, ...)
{
    if (!context->options.log)
        return;
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    context->options.log(level, text, context->options.log_user);
}

ekv_status ekv_default_threads(int32_t *num_threads)
{
    const char *text = getenv("EKV_NUM_THREADS");
    if (text && *text) {
        if (ekv_parse_int32(text, strlen(text), "EKV_NUM_THREADS", 1, EKV_MAX_THREADS, num_threads))
            return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s", ekv_last_error());
        return EKV_OK;
    }
    const int32_t cpus = ekv_num_cpus();
    *num_threads = cpus > EKV_MAX_THREADS ? EKV_MAX_THREADS : cpus;
    return EKV_OK;
}

static ekv_status resolve_threads(int32_t *num_threads)
{
    if (*num_threads < 0 || *num_threads > EKV_MAX_THREADS)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "num_threads is %d; it must be 0..%d", *num_threads,
                        EKV_MAX_THREADS);
    return *num_threads > 0 ? EKV_OK : ekv_default_threads(num_threads);
}

static ekv_status check_cuda_device(int32_t device)
{
    if (device < -2)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "cuda_device is %d; it must be -2 or more", device);
    return EKV_OK;
}

ekv_status ekv_context_create_host(const ekv_context_options *options, ekv_context **context)
{
    if (!context)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "context is NULL");
    ekv_context_options resolved = EKV_CONTEXT_OPTIONS_INIT;
    ekv_status status =
        ekv_struct_read(&resolved, sizeof resolved, options, sizeof(ekv_context_options), "ekv_context_options");
    if (status)
        return status;
    if (!resolved.alloc != !resolved.free)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "ekv_context_options: alloc and free go together");
    if (!resolved.alloc) {
        resolved.alloc = default_alloc;
        resolved.free = default_free;
    }
    if ((status = check_cuda_device(resolved.cuda_device)) || (status = resolve_threads(&resolved.num_threads)))
        return status;

    ekv_context *created = resolved.alloc(sizeof *created, resolved.alloc_user);
    if (!created)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a context of %zu bytes", sizeof *created);
    *created = (ekv_context){ .options = resolved };
    status = ekv_pool_create(created, resolved.num_threads, &created->pool);
    if (status) {
        ekv_release(created, created);
        return status;
    }
    snprintf(created->cuda_missing, sizeof created->cuda_missing, "the context was created without a GPU");
    *context = created;
    return EKV_OK;
}

void ekv_context_free(ekv_context *context)
{
    if (!context)
        return;
    if (context->cuda)
        context->cuda_free(context->cuda);
    ekv_pool_free(context->pool);
    ekv_release(context, context);
}
