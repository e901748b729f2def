/* SPDX-License-Identifier: Apache-2.0
 * The planner table: one line a planner, in the order in which they are listed. */
#include "plan/plan.h"

#include <string.h>

#define EKV_PLANNERS(X)                       \
    X(ekv_planner_none)                       \
    X(ekv_planner_flashinfer_cuda_core)       \
    X(ekv_planner_flashinfer_tensor_core)     \
    X(ekv_planner_flashinfer_batch_attention) \
    X(ekv_planner_flashinfer_xqa)             \
    X(ekv_planner_fa3)                        \
    X(ekv_planner_fa3_nosplit)                \
    X(ekv_planner_fa3_vllm)                   \
    X(ekv_planner_even)                       \
    X(ekv_planner_even_invariant)

#define EKV_PLANNER_DECLARE(object) extern const ekv_planner object;
EKV_PLANNERS(EKV_PLANNER_DECLARE)
#undef EKV_PLANNER_DECLARE

static const ekv_planner *const planners[] = {
#define EKV_PLANNER_ENTRY(object) &object,
    EKV_PLANNERS(EKV_PLANNER_ENTRY)
#undef EKV_PLANNER_ENTRY
};

enum { NUM_PLANNERS = sizeof planners / sizeof planners[0] };

const ekv_planner *ekv_planner_find(const char *name)
{
    for (int i = 0; i < NUM_PLANNERS; i++)
        if (!strcmp(planners[i]->name, name))
            return planners[i];
    return NULL;
}

const char *ekv_planner_name(int32_t index)
{
    return index >= 0 && index < NUM_PLANNERS ? planners[index]->name : NULL;
}

const char *ekv_planner_summary(const char *name)
{
    const ekv_planner *planner = name ? ekv_planner_find(name) : NULL;
    return planner ? planner->summary : NULL;
}
