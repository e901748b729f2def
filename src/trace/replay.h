/* SPDX-License-Identifier: Apache-2.0
 * Continuous batching: turns the requests of a trace, which have arrival times and total lengths only, into
 * decode batches.  The rule, step by step:
 *
 * 1. Requests wait in order of arrival (first come, first served).  At the start of a step those that have
 *    arrived are admitted while the batch has fewer than max_batch requests and the tokens that all admitted
 *    requests will hold at their largest stay within token_budget.  The first that does not fit makes all
 *    behind it wait.  So token_budget is never passed and nothing is evicted.
 * 2. Prefill takes no time and makes the first output token.  So a request of `input` and `output` tokens is in
 *    output - 1 decode steps, with kv_len = input + tokens generated so far = input + 1, ..., input + output - 1:
 *    the KV entry of the token that is the query is in the cache when attention runs.  A request with output
 *    <= 1 is in no decode step; it is counted as skipped and holds nothing.
 * 3. A step takes step_seconds, or what step_time says.  Then every request has one token more, and those that
 *    have all their tokens leave.
 * 4. Where no request is resident, time jumps to the next arrival: there are no empty steps.
 *
 * Memory grows with the resident requests only: who waits is still in the source. */
#ifndef EVENKV_TRACE_REPLAY_H
#define EVENKV_TRACE_REPLAY_H

#include "trace/lengths.h"
#include "trace/trace.h"

/* One decode step. */
typedef struct ekv_replay_step {
    int64_t index;         /* from 0 */
    double start;          /* seconds of replayed time, from the first arrival */
    double seconds;        /* how long the step takes */
    const int32_t *kv_len; /* [batch_size], in order of admission; owned by the replay, valid until its next call */
    int32_t batch_size;    /* >= 1 */
    int64_t total_tokens;  /* sum of kv_len */
    bool draining;         /* the last request came in an earlier step: from here on the batch only shrinks */
} ekv_replay_step;

typedef struct ekv_replay_options {
    double speedup;       /* arrivals come this many times faster; > 0 */
    double step_seconds;  /* > 0; what a step takes where step_time is NULL */
    int32_t max_batch;    /* most requests in a step; 0: no limit */
    int64_t token_budget; /* most KV tokens resident at a time; 0: no limit */
    /* How long a step takes (closed loop); called once a step, with all of *step set but seconds.  What it
     * stores must be finite and > 0; an error that it returns ends the replay.  NULL: step_seconds. */
    ekv_status (*step_time)(void *user, const ekv_replay_step *step, double *seconds);
    void *step_time_user;
    /* Called where a request has left: how long it was in decode steps, and in how many.  NULL: nobody asks. */
    void (*finished)(void *user, double seconds, int32_t steps);
    void *finished_user;
} ekv_replay_options;
/* As fast as recorded, 30 ms a step, no limits. */
#define EKV_REPLAY_OPTIONS_INIT            \
    {                                      \
        1.0, 0.030, 0, 0, NULL, 0, NULL, 0 \
    }

/* Where requests come from: as ekv_trace_next, in order of arrival.  A source of one's own can filter, for
 * instance give a replica every fourth request. */
typedef ekv_status (*ekv_replay_source)(void *user, ekv_trace_row *row, bool *end);

/* ekv_trace_next as a source; user is the ekv_trace. */
ekv_status ekv_replay_source_trace(void *user, ekv_trace_row *row, bool *end);

typedef struct ekv_replay ekv_replay;

/* options: NULL for the defaults; copied.  The context and the source's user must outlive the replay.
 * Errors: INVALID_ARGUMENT, OUT_OF_MEMORY. */
ekv_status ekv_replay_create(ekv_context *context, const ekv_replay_options *options, ekv_replay_source source,
                             void *user, ekv_replay **replay);
void ekv_replay_free(ekv_replay *replay);

/* The next step, or *end where all requests are done (then *step is untouched).
 * Errors: those of the source and of step_time, INVALID_ARGUMENT (what step_time stored), CAPACITY (a request
 * alone needs more than token_budget; names it), OVERFLOW (input + output passes 2^31-1), OUT_OF_MEMORY.
 * A call after one that failed tries again. */
ekv_status ekv_replay_next(ekv_replay *replay, ekv_replay_step *step, bool *end);

/* Counters up to the last step that ekv_replay_next gave. */
typedef struct ekv_replay_counts {
    int64_t steps;
    int64_t admitted; /* requests that have entered a batch */
    int64_t finished; /* of these, those that have left */
    int64_t skipped;  /* requests without a decode step */
} ekv_replay_counts;
void ekv_replay_counts_get(const ekv_replay *replay, ekv_replay_counts *counts);

/* Replays up to the first draining step and draws `samples` of the steps before it, each equally likely and none
 * twice (reservoir sampling, seeded, the same on every machine).  Draining steps are left out because they show
 * where the recording was cut, not what a server does.  *list holds the batches in the order of their steps.
 * Errors: those of ekv_replay_next, INVALID_ARGUMENT (samples < 1), CAPACITY (fewer such steps than samples). */
ekv_status ekv_replay_sample(ekv_replay *replay, int64_t samples, uint64_t seed, ekv_lengths_list **list);

/* What `--trace PATH --sample SAMPLES --seed SEED` means: open, replay, sample. */
ekv_status ekv_lengths_from_trace(ekv_context *context, const char *path, ekv_trace_format format,
                                  const ekv_replay_options *options, int64_t samples, uint64_t seed,
                                  ekv_lengths_list **list);

#endif
