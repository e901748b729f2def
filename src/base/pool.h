/* SPDX-License-Identifier: Apache-2.0
 * A persistent pool of threads: the CTAs of the CPU backend. */
#ifndef EVENKV_BASE_POOL_H
#define EVENKV_BASE_POOL_H

#include "evenkv/evenkv.h"

#include <stdbool.h>

typedef struct ekv_pool ekv_pool;

/* num_threads counts the caller of ekv_pool_run.  Errors: OUT_OF_MEMORY, SYSTEM. */
ekv_status ekv_pool_create(ekv_context *context, int32_t num_threads, ekv_pool **pool);
void ekv_pool_free(ekv_pool *pool);
int32_t ekv_pool_num_threads(const ekv_pool *pool);

/* Calls work(argument, thread) once on every thread (0 is the caller) and returns when all have returned.
 * Calls from several threads take turns; no allocation. */
void ekv_pool_run(ekv_pool *pool, void (*work)(void *argument, int32_t thread), void *argument);

/* For work that its threads share out among themselves: as ekv_pool_run, but when the caller's own call has returned
 * nothing is left to begin, so a thread that has not woken up by then is not waited for and does not call it.
 * wake_sleepers: whether to wake threads that sleep.  That costs the caller 3 to 10 us, and they come after 18 to 125
 * us (two cores of a virtual machine); those that still spin after the last run take part in any case. */
void ekv_pool_share(ekv_pool *pool, void (*work)(void *argument, int32_t thread), void *argument, bool wake_sleepers);

/* CPUs that this process may run on, >= 1. */
int32_t ekv_num_cpus(void);

#endif
