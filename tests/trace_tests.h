/* SPDX-License-Identifier: Apache-2.0
 * What test_lengths and test_trace share: files to read, and an allocator that fails. */
#ifndef EVENKV_TESTS_TRACE_TESTS_H
#define EVENKV_TESTS_TRACE_TESTS_H

#include "evenkv/evenkv.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* Asserts the status and that the text has each of the parts, separated by '|'. */
static inline void assert_fails(ekv_status status, ekv_status expected, const char *parts)
{
    if (status != expected)
        fail_msg("%s, not %s: %s", ekv_status_name(status), ekv_status_name(expected), ekv_last_error());
    char copy[256], *rest = copy;
    snprintf(copy, sizeof copy, "%s", parts);
    for (char *part; (part = strsep(&rest, "|"));)
        if (!strstr(ekv_last_error(), part))
            fail_msg("'%s' is not in: %s", part, ekv_last_error());
}

/* Writes a new file and gives its path, "/tmp/evenkv-XXXXXX".  The test removes it. */
typedef char temporary_path[32];
static inline void write_temporary(const void *bytes, size_t size, temporary_path path)
{
    strcpy(path, "/tmp/evenkv-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *file = fdopen(fd, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

typedef struct failing_allocator {
    int64_t left;  /* allocations that still succeed; negative: all */
    int64_t live;  /* blocks that are not freed yet */
    int64_t bytes; /* ever given out */
} failing_allocator;

static inline void *failing_alloc(size_t size, void *user)
{
    failing_allocator *allocator = user;
    if (allocator->left == 0)
        return NULL;
    allocator->left -= allocator->left > 0;
    allocator->live++;
    allocator->bytes += (int64_t)size;
    return malloc(size);
}

static inline void failing_free(void *pointer, void *user)
{
    failing_allocator *allocator = user;
    allocator->live -= pointer != NULL;
    free(pointer);
}

static inline ekv_context *failing_context(failing_allocator *allocator)
{
    *allocator = (failing_allocator){ -1, 0, 0 };
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.alloc = failing_alloc;
    options.free = failing_free;
    options.alloc_user = allocator;
    options.num_threads = 1;
    ekv_context *context = NULL;
    assert_int_equal(ekv_context_create(&options, &context), EKV_OK);
    return context;
}

/* Runs `create` with 0, 1, 2, ... successful allocations until it succeeds: each failure must be OUT_OF_MEMORY,
 * leave *result NULL and leak nothing.  Returns how often it failed. */
static inline int64_t walk_allocation_failures(ekv_status (*create)(ekv_context *context, void **result),
                                               void (*release)(void *result))
{
    failing_allocator allocator;
    ekv_context *context = failing_context(&allocator);
    const int64_t live = allocator.live;
    for (int64_t allowed = 0;; allowed++) {
        void *result = NULL;
        allocator.left = allowed;
        ekv_status status = create(context, &result);
        allocator.left = -1;
        if (!status)
            release(result);
        else
            assert_null(result);
        assert_int_equal(allocator.live, live);
        if (!status) {
            ekv_context_free(context);
            return allowed;
        }
        assert_fails(status, EKV_ERROR_OUT_OF_MEMORY, "no memory");
    }
}

static inline int create_context(void **state)
{
    return ekv_context_create(NULL, (ekv_context **)state);
}

static inline int free_context(void **state)
{
    ekv_context_free(*state);
    return 0;
}

#endif
