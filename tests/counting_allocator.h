/* SPDX-License-Identifier: Apache-2.0
 * An allocator for ekv_context_options that counts, remembers its last block and fails on demand. */
#ifndef EVENKV_TESTS_COUNTING_ALLOCATOR_H
#define EVENKV_TESTS_COUNTING_ALLOCATOR_H

#include "evenkv/evenkv.h"

#include <stdlib.h>

typedef struct counting_allocator {
    int64_t calls;   /* of alloc, the failed ones too */
    int64_t live;    /* blocks not freed */
    int64_t fail_at; /* the call of this index and all later ones fail; -1: none */
    void *last;      /* block of the last call */
    size_t last_size;
} counting_allocator;

static inline void *counting_alloc(size_t size, void *user)
{
    counting_allocator *a = user;
    const int64_t call = a->calls++;
    if (a->fail_at >= 0 && call >= a->fail_at)
        return NULL;
    void *block = malloc(size);
    if (block) {
        a->live++;
        a->last = block;
        a->last_size = size;
    }
    return block;
}

static inline void counting_free(void *pointer, void *user)
{
    counting_allocator *a = user;
    a->live--;
    free(pointer);
}

static inline ekv_context_options counting_options(counting_allocator *allocator)
{
    *allocator = (counting_allocator){ .fail_at = -1 };
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.alloc = counting_alloc;
    options.free = counting_free;
    options.alloc_user = allocator;
    options.num_threads = 2;
    return options;
}

#endif
