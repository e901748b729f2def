/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/calibrate.h"

#include "base/status.h"
#include "sim/linear_solve.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* The constants are fitted as logarithms, so that none can become negative.  What is nearly 0 has no slope there, which
 * LOWEST_US keeps it from; below that it is 0. */
enum { NUM_CONSTANTS = 6, MAX_STEPS = 60, TRIAL_STEPS = 5, NUM_STARTS = 5 };
static const double lowest_us = 0.05;

typedef struct fit {
    ekv_timeline timeline;
    const ekv_sim_row *rows;
    int64_t num_rows;
    ekv_system system;
    ekv_device device;
    double *residuals; /* [num_rows] */
    double *slopes;    /* [NUM_CONSTANTS][num_rows] */
} fit;

static void set_constants(ekv_system_model *model, const double logs[NUM_CONSTANTS])
{
    double us[3];
    for (int i = 0; i < 3; i++)
        us[i] = exp(logs[3 + i]) > 1.1 * lowest_us ? exp(logs[3 + i]) : 0;
    *model = (ekv_system_model){ exp(logs[0]), exp(logs[1]), exp(logs[2]), us[0], us[1], us[2] };
}

/* Keeps the constants where a simulation takes them and where they still mean something. */
static void clamp(double logs[NUM_CONSTANTS])
{
    for (int i = 0; i < NUM_CONSTANTS; i++)
        logs[i] = fmin(fmax(logs[i], log(lowest_us)), log(1e6));
}

/* residuals: [num_rows]; *sum: of their squares. */
static ekv_status evaluate(fit *f, const double logs[NUM_CONSTANTS], double *residuals, double *sum)
{
    set_constants(&f->device.systems[f->system], logs);
    *sum = 0;
    for (int64_t i = 0; i < f->num_rows; i++) {
        ekv_status status = ekv_timeline_run(&f->timeline, f->rows[i].plan, &f->device, (int32_t)f->system, false);
        if (status)
            return status;
        residuals[i] = log(f->timeline.info.time_us / f->rows[i].measured_us);
        *sum += residuals[i] * residuals[i];
    }
    return EKV_OK;
}

static ekv_status differentiate(fit *f, const double logs[NUM_CONSTANTS])
{
    const double step = 0.01; /* of a logarithm: large against the kinks of the event order, small against the fit */
    for (int c = 0; c < NUM_CONSTANTS; c++) {
        double moved[NUM_CONSTANTS], sum, *slopes = f->slopes + c * f->num_rows;
        memcpy(moved, logs, sizeof moved);
        moved[c] += step;
        ekv_status status = evaluate(f, moved, slopes, &sum);
        if (status)
            return status;
        for (int64_t i = 0; i < f->num_rows; i++)
            slopes[i] = (slopes[i] - f->residuals[i]) / step;
    }
    return EKV_OK;
}

/* Solves (J'J + damping * diag) x = -J'r. */
static void solve(const fit *f, double damping, double x[NUM_CONSTANTS])
{
    double a[NUM_CONSTANTS][NUM_CONSTANTS + 1] = { { 0 } };
    for (int r = 0; r < NUM_CONSTANTS; r++) {
        const double *row = f->slopes + r * f->num_rows;
        for (int c = 0; c < NUM_CONSTANTS; c++)
            for (int64_t i = 0; i < f->num_rows; i++)
                a[r][c] += row[i] * f->slopes[c * f->num_rows + i];
        for (int64_t i = 0; i < f->num_rows; i++)
            a[r][NUM_CONSTANTS] -= row[i] * f->residuals[i];
        a[r][r] = a[r][r] * (1 + damping) + 1e-9; /* a constant without effect stays where it is */
    }
    ekv_linear_solve(a[0], NUM_CONSTANTS, 1, x); /* by no more than e at a time */
}

/* From *logs down to where no step helps, max_steps at most. */
static ekv_status descend(fit *f, int32_t max_steps, double logs[NUM_CONSTANTS], double *sum)
{
    double damping = 0.01;
    ekv_status status = evaluate(f, logs, f->residuals, sum);
    for (int32_t step = 0; step < max_steps && !status; step++) {
        if ((status = differentiate(f, logs)))
            return status;
        const double before = *sum;
        for (int attempt = 0; attempt < 8; attempt++) {
            double x[NUM_CONSTANTS], moved[NUM_CONSTANTS], moved_sum;
            solve(f, damping, x);
            for (int c = 0; c < NUM_CONSTANTS; c++)
                moved[c] = logs[c] + x[c];
            clamp(moved);
            /* The slopes are still needed; residuals are made anew where the step is taken. */
            double *scratch = f->slopes + NUM_CONSTANTS * f->num_rows;
            if ((status = evaluate(f, moved, scratch, &moved_sum)))
                return status;
            if (moved_sum < *sum) {
                memcpy(logs, moved, sizeof moved);
                memcpy(f->residuals, scratch, (size_t)f->num_rows * sizeof *scratch);
                *sum = moved_sum;
                damping = fmax(damping / 4, 1e-6);
                break;
            }
            damping *= 4;
        }
        if (*sum > before * (1 - 1e-5))
            break;
    }
    return status;
}

/* Starts: a CTA alone at shares of an SM's part of the memory. */
static void start_at(const ekv_device *device, int32_t start, double logs[NUM_CONSTANTS])
{
    static const double cta_share[NUM_STARTS] = { 0.5, 1.2, 0.9, 1.5, 0.25 };
    static const double sm_share[NUM_STARTS] = { 6, 2, 2, 3, 0.5 };
    double total = device->read_gb_per_s > 0 ? device->read_gb_per_s : 0.87 * device->read_gb_per_s_nominal;
    if (total <= 0)
        total = 50; /* a CPU of which nothing is known */
    logs[0] = log(total / device->num_sms * cta_share[start]);
    logs[1] = log(total / device->num_sms * sm_share[start]);
    logs[2] = log(total);
    logs[3] = log(1.0);
    logs[4] = log(8.0);
    logs[5] = log(3.0);
    clamp(logs);
}

/* A few steps from every start, then down from the best. */
static ekv_status fit_all(fit *f, ekv_device *device)
{
    double best_sum = INFINITY, best[NUM_CONSTANTS] = { 0 };
    for (int32_t start = 0; start < NUM_STARTS; start++) {
        double logs[NUM_CONSTANTS], sum;
        start_at(device, start, logs);
        ekv_status status = descend(f, TRIAL_STEPS, logs, &sum);
        if (status)
            return status;
        if (sum < best_sum) {
            best_sum = sum;
            memcpy(best, logs, sizeof best);
        }
    }
    ekv_status status = descend(f, MAX_STEPS, best, &best_sum);
    if (!status)
        set_constants(&device->systems[f->system], best);
    return status;
}

ekv_status ekv_sim_calibrate(ekv_context *context, const ekv_sim_row *rows, int64_t num_rows, ekv_system system,
                             ekv_device *device)
{
    if (num_rows < NUM_CONSTANTS)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%" PRId64 " rows of %s; %d constants need at least as many",
                        num_rows, ekv_system_name((int32_t)system), NUM_CONSTANTS);
    for (int64_t i = 0; i < num_rows; i++)
        if (!(rows[i].measured_us > 0) || isinf(rows[i].measured_us))
            return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "row %" PRId64 ": measured %g us; it must be above 0", i,
                            rows[i].measured_us);
    fit f = { .timeline.context = context, .rows = rows, .num_rows = num_rows, .system = system, .device = *device };
    f.residuals = ekv_alloc(context, (size_t)num_rows * (NUM_CONSTANTS + 2) * sizeof *f.residuals);
    if (!f.residuals)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory to fit %" PRId64 " rows", num_rows);
    f.slopes = f.residuals + num_rows;
    ekv_status status = fit_all(&f, device);
    ekv_timeline_clear(&f.timeline);
    ekv_release(context, f.residuals);
    return status;
}
