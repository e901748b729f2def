/* SPDX-License-Identifier: Apache-2.0
 * Simulation: checks of arguments, then the event loop. */
#include "base/status.h"
#include "plan/imbalance.h"
#include "sim/timeline.h"

#include <inttypes.h>

ekv_status ekv_simulate(ekv_plan *plan, const ekv_device *device, const ekv_sim_options *options,
                        ekv_timeline **timeline)
{
    if (!plan || !timeline)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", plan ? "timeline" : "plan");
    ekv_sim_options read = EKV_SIM_OPTIONS_INIT;
    ekv_device model = EKV_DEVICE_INIT;
    ekv_status status;
    if ((status = ekv_struct_read(&read, sizeof read, options, sizeof read, "ekv_sim_options")) ||
        (status = ekv_device_read(device ? device : &plan->device, &model)))
        return status;
    if (read.system < -1 || read.system >= EKV_NUM_SYSTEMS)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "system is %d; it must be -1..%d", read.system,
                        EKV_NUM_SYSTEMS - 1);
    if (read.events < 0 || read.events > 1)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "events is %d; it must be 0 or 1", read.events);
    ekv_timeline *created = ekv_alloc(plan->context, sizeof *created);
    if (!created)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a timeline");
    *created = (ekv_timeline){ .context = plan->context };
    if ((status = ekv_timeline_run(created, plan, &model, read.system, read.events))) {
        ekv_timeline_free(created);
        return status;
    }
    const ekv_imbalance load = ekv_plan_imbalance(plan);
    created->info.imbalance = load.mean_tokens > 0 ? (double)load.max_tokens / load.mean_tokens : 1.0;
    *timeline = created;
    return EKV_OK;
}

void ekv_timeline_free(ekv_timeline *timeline)
{
    if (!timeline)
        return;
    ekv_timeline_clear(timeline);
    ekv_release(timeline->context, timeline);
}

ekv_status ekv_timeline_info_get(const ekv_timeline *timeline, ekv_timeline_info *info)
{
    if (!timeline)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "timeline is NULL");
    return ekv_struct_write(info, &timeline->info, sizeof timeline->info, sizeof timeline->info, "ekv_timeline_info");
}

ekv_status ekv_timeline_event_get(const ekv_timeline *timeline, int64_t index, ekv_timeline_event *event)
{
    if (!timeline || !event)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", timeline ? "event" : "timeline");
    if (index < 0 || index >= timeline->info.num_events)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "event index is %" PRId64 "; the timeline has %" PRId64 " events",
                        index, timeline->info.num_events);
    *event = timeline->events[index];
    return EKV_OK;
}
