/* SPDX-License-Identifier: Apache-2.0
 * Fits a system's constants on a device to measured times. */
#ifndef EVENKV_SIM_CALIBRATE_H
#define EVENKV_SIM_CALIBRATE_H

#include "sim/timeline.h"

/* A plan, made for the device that the constants are fitted for, and what it took there. */
typedef struct ekv_sim_row {
    const ekv_plan *plan;
    double measured_us; /* > 0 */
} ekv_sim_row;

/* Least squares on ln(simulated / measured) over the rows, by Levenberg-Marquardt from several starts; deterministic.
 * Sets device->systems[system]; on error the device is untouched.
 * Errors: INVALID_ARGUMENT (no rows, a time that is not positive), those of ekv_simulate. */
ekv_status ekv_sim_calibrate(ekv_context *context, const ekv_sim_row *rows, int64_t num_rows, ekv_system system,
                             ekv_device *device);

#endif
