/* SPDX-License-Identifier: Apache-2.0
 * Errors: one thread-local text, set where the error is found. */
#ifndef EVENKV_BASE_STATUS_H
#define EVENKV_BASE_STATUS_H

#include "evenkv/evenkv.h"

#include <stddef.h>

/* Sets this thread's ekv_last_error() text (printf style) and returns status, for `return ekv_fail(...)`. */
__attribute__((format(printf, 2, 3))) ekv_status ekv_fail(ekv_status status, const char *format, ...);

/* Copies a caller's struct over defaults: *target holds defaults of `size` bytes; source (NULL: keep them)
 * starts with its own size_t struct_size.  A source smaller than `smallest` (its first published size) is an
 * error; members that it lacks keep their defaults, members newer than this library must be 0. */
ekv_status ekv_struct_read(void *target, size_t size, const void *source, size_t smallest, const char *name);

/* The other way: copies a result of `size` bytes to a caller's struct, which starts with its own struct_size and keeps
 * it.  Members that the caller's lacks are left out, members newer than this library become 0.  A target that is NULL
 * or smaller than `smallest` is an error. */
ekv_status ekv_struct_write(void *target, const void *source, size_t size, size_t smallest, const char *name);

#endif
