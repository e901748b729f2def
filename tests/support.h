/* SPDX-License-Identifier: Apache-2.0
 * What several test programs of decode share: contexts, a plan with its cache and workspace, and one call that
 * decodes and checks everything that can be checked.  Functions fail the running cmocka test. */
#ifndef EVENKV_TESTS_SUPPORT_H
#define EVENKV_TESTS_SUPPORT_H

#include "base/rng.h"
#include "cpu/random_cache.h"
#include "cpu/tile_kernel.h"
#include "cpu/tolerance.h"
#include "plan/plan.h"

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Fails with ekv_last_error(). */
#define assert_ok(call) support_assert_ok((call), #call, __FILE__, __LINE__)
void support_assert_ok(ekv_status status, const char *call, const char *file, int line);

/* Fails unless the call fails with `status` and ekv_last_error() contains each of the texts (NULL-terminated). */
#define assert_fails(call, status, ...) \
    support_assert_fails((call), (status), #call, __FILE__, __LINE__, (const char *const[]){ __VA_ARGS__, NULL })
void support_assert_fails(ekv_status got, ekv_status wanted, const char *call, const char *file, int line,
                          const char *const *texts);

ekv_context *support_context(int32_t num_threads);

/* A device of so many SMs, one CTA each. */
ekv_device support_device(int32_t num_sms);

/* One of count values. */
int32_t support_pick(ekv_rng *rng, const int32_t *values, int32_t count);
#define PICK(rng, ...)                                    \
    support_pick((rng), (const int32_t[]){ __VA_ARGS__ }, \
                 (int32_t)(sizeof((const int32_t[]){ __VA_ARGS__ }) / sizeof(int32_t)))

/* The CPU kernel that the environment's EKV_TEST_KERNEL names, and that support_set_up then forces on batches that it
 * can do; NULL where it names none.  Ends the program with the exit code of a skipped test where this CPU lacks it. */
const ekv_cpu_kernel *support_forced_kernel(void);

/* Changes dtypes and head_dim to what the forced kernel can do, if there is one. */
void support_fit_kernel(ekv_batch *batch);

/* A plan, and tensors and workspace to run it with. */
typedef struct decode_setup {
    ekv_plan *plan;
    ekv_random_cache *cache;
    ekv_tensors *tensors; /* of the cache */
    ekv_decode_options options;
    unsigned char *memory; /* the workspace between guard bands */
    void *workspace;
    size_t workspace_size;
} decode_setup;

/* Either status is an error that the planner or the plan returned, and *setup is untouched, or EKV_OK. */
ekv_status support_set_up(ekv_context *context, const char *planner, const ekv_batch *batch, const ekv_device *device,
                          const ekv_plan_options *options, const ekv_random_cache_options *cache_options,
                          decode_setup *setup);
void support_tear_down(decode_setup *setup);

/* Decodes into NaN outputs over a workspace full of NaN and checks the guard bands. */
ekv_status support_decode(decode_setup *setup);

/* The largest error over its tolerance against the reference; what: named in a failure. */
ekv_comparison support_compare(const decode_setup *setup);
void support_assert_right(const decode_setup *setup, const char *what);

/* support_set_up, support_decode and support_assert_right, all of which must succeed. */
void support_run(ekv_context *context, const char *planner, const ekv_batch *batch, const ekv_device *device,
                 const ekv_plan_options *options, const ekv_random_cache_options *cache_options, decode_setup *setup);

/* Fails unless request ra of a and request rb of b have the same bits of O and LSE. */
void support_assert_same_request(const decode_setup *a, int32_t ra, const decode_setup *b, int32_t rb,
                                 const char *what);
/* ... all requests. */
void support_assert_same(const decode_setup *a, const decode_setup *b, const char *what);

#endif
