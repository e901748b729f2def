/* SPDX-License-Identifier: Apache-2.0
 * Runs plans over batches of random tensors on a backend, times them and compares them with the reference.
 *
 *     cli_execution execution = { 0 };
 *     cli_execution_create(cli, &shape, limits, &execution);
 *     for each batch:  cli_execution_set_batch(&execution, &batch);
 *         for each plan:   cli_job_create(&execution, plan, &job);
 *             cli_job_check(...);  cli_job_time(...) as often as wanted, jobs in any order;
 *             cli_job_free(&execution, &job);
 *     cli_execution_free(&execution);
 *
 * Functions that can fail leave what was created to the _free function, which takes it in any state. */
#ifndef EVENKV_TOOLS_EXECUTION_H
#define EVENKV_TOOLS_EXECUTION_H

#include "cli.h"
#include "cpu/tolerance.h"
#include "cuda/cuda_timeline.h"

typedef struct cli_execution cli_execution;

/* A plan with what its decode needs. */
typedef struct cli_job {
    ekv_plan *plan; /* borrowed */
    ekv_decode_options options;
    void *workspace; /* memory of the backend */
    size_t workspace_size;
    void *graph;                   /* CUDA with --graph: the captured decode */
    const char *kernel;            /* its name */
    int32_t threads, shared_bytes; /* of a CTA; 0 on the CPU */
    int32_t resident_ctas;         /* an SM, of the kernel as it is; 0 on the CPU */
    ekv_dtype p_dtype;             /* as in ekv_row_shape */
} cli_job;

/* O and LSE of a decode in host memory; owned by the execution until its next decode. */
typedef struct cli_outputs {
    void *o;
    float *lse;
    bool guards_intact; /* nothing was written round them */
} cli_outputs;

/* A backend: where tensors lie and how its clock works.  state of the execution is its own. */
typedef struct cli_backend {
    const char *name;
    ekv_status (*create)(cli_execution *execution);
    void (*free)(cli_execution *execution);
    /* execution->batch is set; sets tensors and, where a reference is wanted, reference. */
    ekv_status (*set_batch)(cli_execution *execution);
    /* Fills in all but plan. */
    ekv_status (*prepare)(cli_execution *execution, cli_job *job);
    void (*release)(cli_execution *execution, cli_job *job);
    ekv_status (*time)(cli_execution *execution, cli_job *job, double *us);
    /* Time of planning on the device, for a plan of options.on_device; NULL: there are none. */
    ekv_status (*time_plan)(cli_execution *execution, ekv_plan *plan, double *us);
    /* Decodes into outputs that were NaN. */
    ekv_status (*decode)(cli_execution *execution, cli_job *job, cli_outputs *outputs);
    /* Reads execution->bytes by launch shape `shape` and describes it in text[0, size); false past the last shape. */
    bool (*read_shape)(const cli_execution *execution, int32_t shape, char *text, size_t size);
    ekv_status (*read)(cli_execution *execution, int32_t shape, double *us);
    /* NULL: this backend keeps none.  The stamps are released by ekv_release. */
    ekv_status (*timeline)(cli_execution *execution, cli_job *job, ekv_cuda_timeline *timeline);
} cli_backend;

extern const cli_backend cli_backend_cpu, cli_backend_cuda;

/* What the largest batch needs. */
typedef struct cli_limits {
    int64_t pages;
    int32_t requests;
    bool with_reference;
    bool poison; /* what no decode may read of K and V is NaN; costs time for each batch */
} cli_limits;

struct cli_execution {
    cli_state *cli;
    const cli_backend *backend;
    cli_limits limits;
    bool cold;            /* caches are flushed before each timed decode or read */
    char flush[32];       /* how: a word for tables */
    char driver[16];      /* version of the GPU's, or "none" */
    ekv_batch batch;      /* of cli_execution_set_batch; at first the shape */
    ekv_tensors *tensors; /* of the backend */
    ekv_reference *reference;
    int64_t kv_bytes; /* of K and V that a decode has to read */
    int64_t bytes;    /* those and Q and O */
    void *state;      /* of the backend */
};

/* Figures of the times of one thing, us. */
typedef struct cli_times {
    int32_t count;
    double median_us, min_us, p95_us;
} cli_times;

/* Sorts times[count], count >= 1. */
cli_times cli_times_of(double *times, int32_t count);

/* The backend of --backend, else CUDA where there is a GPU, else the CPU; sets the options to it.  Errors:
 * BACKEND_UNAVAILABLE, INVALID_ARGUMENT (options that the backend has no use for). */
ekv_status cli_backend_choose(cli_state *cli);
/* Timed runs: --repeat, else the backend's own. */
int32_t cli_repeat(const cli_state *cli);

/* Start *execution with {0}.  shape: a batch whose lengths are not looked at.  cli_backend_choose has been called. */
ekv_status cli_execution_create(cli_state *cli, const ekv_batch *shape, cli_limits limits, cli_execution *execution);
/* batch: of the shape and within the limits; kv_len must outlive its use. */
ekv_status cli_execution_set_batch(cli_execution *execution, const ekv_batch *batch);
void cli_execution_free(cli_execution *execution);
/* The limits that the batches of a list set. */
void cli_limits_add(cli_limits *limits, const ekv_batch *batch);

/* Errors: those of ekv_backend_supports, OUT_OF_MEMORY, DRIVER. */
ekv_status cli_job_create(cli_execution *execution, ekv_plan *plan, cli_job *job);
void cli_job_free(cli_execution *execution, cli_job *job);
/* us: one decode, cold where the execution is. */
ekv_status cli_job_time(cli_execution *execution, cli_job *job, double *us);

typedef struct cli_check {
    ekv_comparison comparison; /* where there is a reference */
    bool guards_intact;
    bool same_bits; /* two decodes gave the same O and LSE */
    bool passed;    /* all of the above and the tolerance */
} cli_check;

/* Decodes twice. */
ekv_status cli_job_check(cli_execution *execution, cli_job *job, cli_check *check);
/* Says on stderr what is wrong with a check that did not pass, and sets the exit code. */
void cli_check_report(cli_state *cli, const char *what, const cli_check *check);

/* Monotonic, us. */
double cli_now_us(void);

/* Median time of planning, us: of ekv_plan_update with the same lengths, or, for a plan of options.on_device, of what
 * each decode does for it on the GPU, which its time includes. */
ekv_status cli_plan_time(cli_execution *execution, ekv_plan *plan, int32_t repeat, double *us);

/* A plain read of execution->bytes: median time of the fastest launch shape. */
typedef struct cli_read {
    double us;
    char shape[64];
    int32_t index; /* of the shape */
} cli_read;
ekv_status cli_read_time(cli_execution *execution, int32_t repeat, cli_read *read);

/* All of the above for one plan. */
typedef struct cli_result {
    double plan_us;
    cli_times decode;
    double kv_gb_per_s; /* kv_bytes over the median, 1e9 bytes/s */
    cli_check check;
    char kernel[64];
} cli_result;

/* timeline: NULL, or receives one from a backend that keeps them. */
ekv_status cli_execute(cli_execution *execution, ekv_plan *plan, int32_t repeat, ekv_cuda_timeline *timeline,
                       cli_result *result);

#endif
