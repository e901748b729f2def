/* SPDX-License-Identifier: Apache-2.0 */
#include "support.h"

#include "base/arena.h"
#include "cpu/convert.h"
#include "plan/tensors.h"

enum { GUARD_BYTES = 4096, GUARD = 0x5A };

void support_assert_ok(ekv_status status, const char *call, const char *file, int line)
{
    if (status)
        fail_msg("%s:%d: %s: %s: %s", file, line, call, ekv_status_name(status), ekv_last_error());
}

void support_assert_fails(ekv_status got, ekv_status wanted, const char *call, const char *file, int line,
                          const char *const *texts)
{
    if (got != wanted)
        fail_msg("%s:%d: %s: %s (%s) instead of %s", file, line, call, ekv_status_name(got),
                 got ? ekv_last_error() : "", ekv_status_name(wanted));
    for (; *texts; texts++)
        if (!strstr(ekv_last_error(), *texts))
            fail_msg("%s:%d: %s: no '%s' in '%s'", file, line, call, *texts, ekv_last_error());
}

ekv_context *support_context(int32_t num_threads)
{
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.num_threads = num_threads;
    options.cuda_device = -2; /* none */
    ekv_context *context = NULL;
    assert_ok(ekv_context_create(&options, &context));
    return context;
}

ekv_device support_device(int32_t num_sms)
{
    ekv_device device = EKV_DEVICE_INIT;
    snprintf(device.name, sizeof device.name, "test-%d", num_sms);
    device.num_sms = num_sms;
    device.ctas_per_sm = 1;
    return device;
}

int32_t support_pick(ekv_rng *rng, const int32_t *values, int32_t count)
{
    return values[ekv_rng_below(rng, count)];
}

/* ---- Kernels ------------------------------------------------------------------------------------------ */

const ekv_cpu_kernel *support_forced_kernel(void)
{
    enum { SKIPPED = 77 };
    const char *name = getenv("EKV_TEST_KERNEL");
    if (!name)
        return NULL;
    bool runs_here;
    const ekv_cpu_kernel *kernel = NULL;
    for (int32_t i = 0; (kernel = ekv_cpu_kernel_at(i, &runs_here)) && strcmp(kernel->name, name) != 0;)
        i++;
    if (kernel && runs_here)
        return kernel;
    printf("skipped: %s kernel %s\n", kernel ? "this CPU cannot run" : "this build has no", name);
    exit(SKIPPED);
}

static bool can_force(const ekv_batch *batch)
{
    const ekv_cpu_kernel *forced = support_forced_kernel(), *kernel;
    return forced && ekv_cpu_kernel_choose(batch, forced->id, &kernel) == EKV_OK;
}

void support_fit_kernel(ekv_batch *batch)
{
    const ekv_cpu_kernel *kernel = support_forced_kernel();
    if (!kernel)
        return;
    const int32_t step = kernel->head_dim_step;
    batch->head_dim = (batch->head_dim + step - 1) / step * step;
    if (kernel->bf16_only)
        batch->q_dtype = batch->kv_dtype = EKV_DTYPE_BF16;
}

/* ---- Set-up ------------------------------------------------------------------------------------------ */

ekv_status support_set_up(ekv_context *context, const char *planner, const ekv_batch *batch, const ekv_device *device,
                          const ekv_plan_options *options, const ekv_random_cache_options *cache_options,
                          decode_setup *setup)
{
    const ekv_random_cache_options defaults = EKV_RANDOM_CACHE_OPTIONS_INIT;
    decode_setup made = { .options = EKV_DECODE_OPTIONS_INIT };
    ekv_status status = ekv_plan_create(context, planner, batch, device, options, &made.plan);
    if (status)
        return status;
    assert_ok(
        ekv_random_cache_create(context, &made.plan->batch, cache_options ? cache_options : &defaults, &made.cache));
    assert_ok(ekv_workspace_size(made.plan, EKV_BACKEND_CPU, &made.workspace_size));
    const size_t size = ((made.workspace_size + EKV_ARENA_ALIGN - 1) / EKV_ARENA_ALIGN + 1) * EKV_ARENA_ALIGN;
    made.memory = aligned_alloc(EKV_ARENA_ALIGN, size + 2 * GUARD_BYTES);
    assert_non_null(made.memory);
    made.workspace = made.memory + GUARD_BYTES;
    made.tensors = ekv_random_cache_tensors(made.cache);
    if (can_force(&made.plan->batch))
        made.options.kernel = support_forced_kernel()->id;
    *setup = made;
    return EKV_OK;
}

void support_tear_down(decode_setup *setup)
{
    free(setup->memory);
    ekv_random_cache_free(setup->cache);
    ekv_plan_free(setup->plan);
    *setup = (decode_setup){ 0 };
}

ekv_status support_decode(decode_setup *setup)
{
    unsigned char *after = setup->memory + GUARD_BYTES + setup->workspace_size;
    memset(setup->memory, GUARD, GUARD_BYTES);
    memset(setup->workspace, 0xFF, setup->workspace_size);
    memset(after, GUARD, GUARD_BYTES);
    ekv_random_cache_reset(setup->cache);
    ekv_status status =
        ekv_decode(setup->plan, setup->tensors, &setup->options, setup->workspace, setup->workspace_size);
    assert_true(ekv_random_cache_guards_intact(setup->cache));
    int changed = 0;
    for (size_t i = 0; i < GUARD_BYTES; i++)
        changed |= (setup->memory[i] ^ GUARD) | (after[i] ^ GUARD);
    assert_int_equal(changed, 0);
    return status;
}

ekv_comparison support_compare(const decode_setup *setup)
{
    ekv_reference *reference;
    assert_ok(ekv_reference_create(setup->plan->context, &setup->plan->batch, setup->tensors, &reference));
    const ekv_cpu_kernel *kernel;
    assert_ok(ekv_cpu_kernel_choose(&setup->plan->batch, setup->options.kernel, &kernel));
    ekv_comparison comparison =
        ekv_compare(setup->plan, setup->tensors, setup->options.lse_base, kernel->p_dtype, reference);
    ekv_reference_free(reference);
    return comparison;
}

void support_assert_right(const decode_setup *setup, const char *what)
{
    ekv_comparison c = support_compare(setup);
    if (!(c.max_ratio <= 1))
        fail_msg("%s, planner %s: %g times the tolerance at request %d (kv_len %d), head %d, dim %d; error %g", what,
                 setup->plan->planner->name, c.max_ratio, c.request, setup->plan->kv_len[c.request], c.q_head, c.dim,
                 c.max_abs_err);
}

void support_run(ekv_context *context, const char *planner, const ekv_batch *batch, const ekv_device *device,
                 const ekv_plan_options *options, const ekv_random_cache_options *cache_options, decode_setup *setup)
{
    assert_ok(support_set_up(context, planner, batch, device, options, cache_options, setup));
    assert_ok(support_decode(setup));
    support_assert_right(setup, planner);
}

/* ---- Same bits --------------------------------------------------------------------------------------- */

void support_assert_same_request(const decode_setup *a, int32_t ra, const decode_setup *b, int32_t rb, const char *what)
{
    const ekv_batch *batch = &a->plan->batch;
    const size_t row = (size_t)batch->head_dim * (size_t)ekv_dtype_size(batch->q_dtype);
    const ekv_tensors *ta = a->tensors, *tb = b->tensors;
    for (int32_t h = 0; h < batch->q_heads; h++) {
        const void *oa = ekv_element(ta->o, batch->q_dtype, ra * ta->o_stride_request + h * ta->o_stride_head);
        const void *ob = ekv_element(tb->o, batch->q_dtype, rb * tb->o_stride_request + h * tb->o_stride_head);
        if (memcmp(oa, ob, row))
            fail_msg("%s: O of request %d and %d (kv_len %d) differ at head %d", what, ra, rb, a->plan->kv_len[ra], h);
        const float *la = &ta->lse[ra * ta->lse_stride_request + h * ta->lse_stride_head];
        const float *lb = &tb->lse[rb * tb->lse_stride_request + h * tb->lse_stride_head];
        if (memcmp(la, lb, sizeof *la))
            fail_msg("%s: LSE of request %d and %d differ at head %d: %.9g, %.9g", what, ra, rb, h, (double)*la,
                     (double)*lb);
    }
}

void support_assert_same(const decode_setup *a, const decode_setup *b, const char *what)
{
    assert_int_equal(a->plan->batch.batch_size, b->plan->batch.batch_size);
    for (int32_t r = 0; r < a->plan->batch.batch_size; r++)
        support_assert_same_request(a, r, b, r, what);
}
