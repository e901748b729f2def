/* SPDX-License-Identifier: Apache-2.0
 * The context of a test program that needs but one, and the fixtures of its group of tests. */
#ifndef EVENKV_TESTS_ONE_CONTEXT_H
#define EVENKV_TESTS_ONE_CONTEXT_H

#include "evenkv/evenkv.h"

enum { CONTEXT_THREADS = 3 }; /* few works divide evenly among them */
static ekv_context *context;  /* without a GPU */

static inline int create_context(void **state)
{
    (void)state;
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.num_threads = CONTEXT_THREADS;
    options.cuda_device = -2; /* none */
    return ekv_context_create(&options, &context);
}

static inline int free_context(void **state)
{
    (void)state;
    ekv_context_free(context);
    return 0;
}

#endif
