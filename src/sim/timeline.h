/* SPDX-License-Identifier: Apache-2.0
 * A simulated execution, and the memory to make the next one in. */
#ifndef EVENKV_SIM_TIMELINE_H
#define EVENKV_SIM_TIMELINE_H

#include "sim/cost.h"

struct ekv_timeline {
    ekv_context *context;
    void *memory; /* of the loop, then of the events in it */
    size_t memory_size;
    ekv_timeline_info info;
    ekv_timeline_event *events; /* [info.num_events], in memory; NULL without them */
};

/* Simulates the plan into *timeline, which is {0} but for the context, or has a simulation already: memory is kept
 * from one to the next.  events: whether to keep them.  system: as ekv_sim_options.system.  The device is complete.
 * Errors: those of ekv_simulate; *timeline then has no simulation. */
ekv_status ekv_timeline_run(ekv_timeline *timeline, const ekv_plan *plan, const ekv_device *device, int32_t system,
                            bool events);

/* Gives back the memory. */
void ekv_timeline_clear(ekv_timeline *timeline);

#endif
