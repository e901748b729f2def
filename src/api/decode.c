/* SPDX-License-Identifier: Apache-2.0
 * Decode: checks of arguments and of what is supported, then one call of the backend. */
#include "api/backend.h"
#include "base/arena.h"
#include "base/status.h"
#include "plan/tensors.h"

#include <inttypes.h>

/* ---- What no backend does yet ------------------------------------------------------------------------ */

static ekv_status check_batch_supported(const ekv_batch *batch)
{
    if (batch->q_dtype > EKV_DTYPE_BF16 || batch->kv_dtype > EKV_DTYPE_BF16)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "%s %d: decode of FP8 is not built yet",
                        batch->q_dtype > EKV_DTYPE_BF16 ? "q_dtype" : "kv_dtype",
                        (int)(batch->q_dtype > EKV_DTYPE_BF16 ? batch->q_dtype : batch->kv_dtype));
    if (batch->q_len != 1)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "q_len %d: decode does one query token a request", batch->q_len);
    if (batch->window_left != -1)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "window_left %d: decode of a sliding window is not built yet",
                        batch->window_left);
    if (batch->soft_cap != 0)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "soft_cap %g: decode with a soft cap is not built yet",
                        (double)batch->soft_cap);
    return EKV_OK;
}

static ekv_status check_tensors_supported(const ekv_tensors *tensors)
{
    if (tensors->k_scale != 1 || tensors->v_scale != 1)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "%s %g: scaled K and V are not built yet",
                        tensors->k_scale != 1 ? "k_scale" : "v_scale",
                        (double)(tensors->k_scale != 1 ? tensors->k_scale : tensors->v_scale));
    if (tensors->sinks)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "sinks: attention sinks are not built yet");
    return EKV_OK;
}

/* tensors: NULL or complete. */
static ekv_status check_supported(const ekv_plan *plan, const ekv_backend_ops *ops, const ekv_tensors *tensors,
                                  const ekv_decode_options *options)
{
    ekv_status status = check_batch_supported(&plan->batch);
    if (!status && tensors)
        status = check_tensors_supported(tensors);
    return status ? status : ops->supports(plan, tensors, options);
}

/* ---- Arguments --------------------------------------------------------------------------------------- */

static ekv_status read_options(const ekv_decode_options *given, ekv_decode_options *options)
{
    *options = (ekv_decode_options)EKV_DECODE_OPTIONS_INIT;
    ekv_status status = ekv_struct_read(options, sizeof *options, given, sizeof *options, "ekv_decode_options");
    if (status)
        return status;
    if ((unsigned)options->kernel > EKV_KERNEL_AMX_BF16)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "kernel %d is not an ekv_kernel", (int)options->kernel);
    if ((unsigned)options->lse_base > EKV_LSE_BASE2)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "lse_base %d is not an ekv_lse_base", (int)options->lse_base);
    return EKV_OK;
}

static ekv_status read_tensors(const ekv_tensors *given, ekv_tensors *tensors)
{
    *tensors = (ekv_tensors)EKV_TENSORS_INIT;
    return ekv_struct_read(tensors, sizeof *tensors, given, sizeof *tensors, "ekv_tensors");
}

static ekv_status check_workspace(const ekv_plan *plan, const ekv_backend_ops *ops, const void *workspace, size_t given)
{
    size_t needed;
    ekv_status status = ops->workspace_size(plan, &needed);
    if (status)
        return status;
    if (given < needed)
        return ekv_fail(EKV_ERROR_WORKSPACE_TOO_SMALL, "the workspace is %zu bytes; this plan needs %zu", given,
                        needed);
    if (needed && !workspace)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "workspace is NULL; this plan needs %zu bytes", needed);
    if ((uintptr_t)workspace % EKV_ARENA_ALIGN)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "workspace is %p; it must be aligned to %d bytes", workspace,
                        EKV_ARENA_ALIGN);
    return EKV_OK;
}

/* FlashInfer's fault: an original launch would drop the work items past its grid. */
static ekv_status check_grid_fits(const ekv_plan *plan)
{
    if (plan->num_work_items > plan->max_work_items)
        return ekv_fail(EKV_ERROR_PLAN_INVALID,
                        "planner %s made %" PRId64 " work items for a grid of %" PRId64 "; see docs/planners.md",
                        plan->planner->name, plan->num_work_items, plan->max_work_items);
    return EKV_OK;
}

/* ---- Public functions -------------------------------------------------------------------------------- */

ekv_status ekv_workspace_size(const ekv_plan *plan, ekv_backend backend, size_t *size)
{
    if (!plan || !size)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", plan ? "size" : "plan");
    const ekv_backend_ops *ops;
    ekv_status status = ekv_backend_find(plan->context, backend, &ops);
    return status ? status : ops->workspace_size(plan, size);
}

ekv_status ekv_backend_supports(const ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options)
{
    if (!plan)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "plan is NULL");
    ekv_decode_options read;
    ekv_tensors complete;
    const ekv_backend_ops *ops;
    ekv_status status;
    if ((status = read_options(options, &read)) || (status = read_tensors(tensors, &complete)) ||
        (status = ekv_backend_find(plan->context, read.backend, &ops)))
        return status;
    return check_supported(plan, ops, tensors ? &complete : NULL, &read);
}

ekv_status ekv_decode(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options, void *workspace,
                      size_t workspace_size)
{
    if (!plan || !tensors)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", plan ? "tensors" : "plan");
    ekv_decode_options read;
    ekv_tensors resolved;
    const ekv_backend_ops *ops;
    ekv_status status;
    if ((status = read_options(options, &read)) || (status = read_tensors(tensors, &resolved)) ||
        (status = ekv_backend_find(plan->context, read.backend, &ops)) ||
        (status = check_supported(plan, ops, &resolved, &read)))
        return status;
    ekv_tensors_set_defaults(&plan->batch, &resolved);
    if ((status = ekv_tensors_check(&plan->batch, &resolved)) ||
        (ops->host_tensors && (status = ekv_tensors_check_pages(&plan->batch, &resolved))) ||
        (status = check_grid_fits(plan)) || (status = check_workspace(plan, ops, workspace, workspace_size)))
        return status;
    return ops->decode(plan, &resolved, &read, workspace);
}
