/* SPDX-License-Identifier: Apache-2.0
 * What a backend is: functions that src/api calls after it has checked the arguments.  A backend reads struct
 * ekv_plan and no planner. */
#ifndef EVENKV_PLAN_BACKEND_H
#define EVENKV_PLAN_BACKEND_H

#include "plan/plan.h"

#include <stdbool.h>

typedef struct ekv_backend_ops {
    /* True if k, v, page table and the rest of ekv_tensors are host memory, which src/api then checks. */
    bool host_tensors;
    /* What this backend cannot do with the plan; what no backend can do is refused before.  tensors may be
     * NULL and are as the caller gave them. */
    ekv_status (*supports)(const ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options);
    /* Depends on plan->capacity and fields that no update changes.  Errors: OVERFLOW. */
    ekv_status (*workspace_size)(const ekv_plan *plan, size_t *size);
    /* tensors: resolved (plan/tensors.h).  workspace: aligned to EKV_ARENA_ALIGN, workspace_size() bytes. */
    ekv_status (*decode)(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options,
                         void *workspace);
    /* args: strides filled in. */
    ekv_status (*merge_states)(ekv_context *context, const ekv_merge_args *args);
    /* Describes the device that the context runs on. */
    ekv_status (*detect)(ekv_context *context, ekv_device *device);
} ekv_backend_ops;

#endif
