/* SPDX-License-Identifier: Apache-2.0
 * The context: allocator, log, thread pool, and what the CUDA backend hangs on it. */
#ifndef EVENKV_BASE_CONTEXT_H
#define EVENKV_BASE_CONTEXT_H

#include "base/pool.h"
#include "evenkv/evenkv.h"

struct ekv_plan;

/* The copies of a plan that a GPU reads: src/plan calls, src/cuda answers. */
typedef struct ekv_plan_copies {
    /* Once, for a plan that is built.  Sets plan->cuda. */
    ekv_status (*create)(struct ekv_plan *plan);
    void (*free)(struct ekv_plan *plan);
    /* Around each build: waits until the buffer that is going to be written is free, then writes it. */
    ekv_status (*begin_update)(struct ekv_plan *plan);
    void (*end_update)(struct ekv_plan *plan);
} ekv_plan_copies;

struct ekv_context {
    ekv_context_options options; /* resolved: alloc, free and num_threads are set */
    ekv_pool *pool;
    void *cuda; /* owned by src/cuda; NULL where there is no driver or no CUDA build */
    void (*cuda_free)(void *cuda);
    const ekv_plan_copies *plan_copies;
    char cuda_missing[256]; /* why cuda is NULL */
};

/* ekv_context_create without any GPU. */
ekv_status ekv_context_create_host(const ekv_context_options *options, ekv_context **context);

/* Threads of a context whose options name no number: EKV_NUM_THREADS, else ekv_num_cpus(), 1..1024.
 * Errors: INVALID_ARGUMENT (the variable). */
ekv_status ekv_default_threads(int32_t *num_threads);

/* size > 0.  Returns NULL when the allocator does; the caller reports EKV_ERROR_OUT_OF_MEMORY. */
void *ekv_alloc(ekv_context *context, size_t size);
void ekv_release(ekv_context *context, void *pointer);

__attribute__((format(printf, 3, 4))) void ekv_log(ekv_context *context, ekv_log_level level, const char *format, ...);

#endif
