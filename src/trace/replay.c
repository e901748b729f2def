/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/replay.h"

#include "base/rng.h"
#include "base/status.h"
#include "trace/grow.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

struct ekv_replay {
    ekv_context *context;
    ekv_replay_options options;
    ekv_replay_source source;
    void *source_user;

    /* Resident requests, in order of admission. */
    int32_t *kv_len;      /* [capacity] now */
    int32_t *last_kv_len; /* [capacity] in the last step of each */
    int32_t *num_steps;   /* [capacity] of each in all */
    double *admitted_at;  /* [capacity] */
    int32_t batch_size, capacity;
    int64_t total_tokens;    /* sum of kv_len */
    int64_t reserved_tokens; /* sum of last_kv_len: what they hold at their largest */

    ekv_trace_row waiting; /* first in the queue; the others are still in the source */
    bool has_waiting, source_ended;
    bool draining; /* the last request was in an earlier step */

    double now;          /* start of the next step; of the current one while in_step */
    double step_seconds; /* of the current step */
    bool in_step;        /* the last call gave a step, which is still to be finished */
    ekv_replay_counts counts;
};

ekv_status ekv_replay_source_trace(void *user, ekv_trace_row *row, bool *end)
{
    return ekv_trace_next(user, row, end);
}

static ekv_status check_options(const ekv_replay_options *options)
{
    if (!(options->speedup > 0) || isinf(options->speedup))
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "speedup is %g; it must be > 0", options->speedup);
    if (!(options->step_seconds > 0) || isinf(options->step_seconds))
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "the step time is %g s; it must be > 0", options->step_seconds);
    if (options->max_batch < 0)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "max_batch is %" PRId32 "; it must be >= 0", options->max_batch);
    if (options->token_budget < 0)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "token_budget is %" PRId64 "; it must be >= 0",
                        options->token_budget);
    return EKV_OK;
}

ekv_status ekv_replay_create(ekv_context *context, const ekv_replay_options *options, ekv_replay_source source,
                             void *user, ekv_replay **replay)
{
    const ekv_replay_options defaults = EKV_REPLAY_OPTIONS_INIT;
    if (!options)
        options = &defaults;
    ekv_status status = check_options(options);
    if (status)
        return status;
    ekv_replay *created = ekv_alloc(context, sizeof *created);
    if (!created)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a replay");
    *created = (ekv_replay){ .context = context, .options = *options, .source = source, .source_user = user };
    *replay = created;
    return EKV_OK;
}

void ekv_replay_free(ekv_replay *replay)
{
    if (!replay)
        return;
    ekv_release(replay->context, replay->kv_len);
    ekv_release(replay->context, replay->last_kv_len);
    ekv_release(replay->context, replay->num_steps);
    ekv_release(replay->context, replay->admitted_at);
    ekv_release(replay->context, replay);
}

void ekv_replay_counts_get(const ekv_replay *replay, ekv_replay_counts *counts)
{
    *counts = replay->counts;
}

/* The end of a step: every request has one token more, and those in their last step leave. */
static void finish_step(ekv_replay *replay)
{
    const ekv_replay_options *options = &replay->options;
    int32_t kept = 0;
    replay->now += replay->step_seconds;
    for (int32_t i = 0; i < replay->batch_size; i++) {
        const int32_t kv_len = replay->kv_len[i], last = replay->last_kv_len[i];
        if (kv_len == last) {
            replay->total_tokens -= kv_len;
            replay->reserved_tokens -= last;
            if (options->finished)
                options->finished(options->finished_user, replay->now - replay->admitted_at[i], replay->num_steps[i]);
            continue;
        }
        replay->kv_len[kept] = kv_len + 1;
        replay->last_kv_len[kept] = last;
        replay->num_steps[kept] = replay->num_steps[i];
        replay->admitted_at[kept] = replay->admitted_at[i];
        kept++;
    }
    replay->total_tokens += kept;
    replay->counts.finished += replay->batch_size - kept;
    replay->batch_size = kept;
    replay->in_step = false;
    replay->draining = replay->source_ended && !replay->has_waiting;
}

/* Brings the next request that has a decode step to the head of the queue, where one is left. */
static ekv_status fetch_waiting(ekv_replay *replay)
{
    while (!replay->has_waiting && !replay->source_ended) {
        ekv_status status = replay->source(replay->source_user, &replay->waiting, &replay->source_ended);
        if (status || replay->source_ended)
            return status;
        replay->has_waiting = replay->waiting.output_tokens > 1;
        replay->counts.skipped += !replay->has_waiting;
    }
    return EKV_OK;
}

/* kv_len of a request in its last step. */
static int64_t last_length(const ekv_trace_row *row)
{
    return (int64_t)row->input_tokens + row->output_tokens - 1;
}

static ekv_status check_request(const ekv_replay *replay)
{
    const ekv_trace_row *row = &replay->waiting;
    if (last_length(row) > INT32_MAX)
        return ekv_fail(EKV_ERROR_OVERFLOW,
                        "row %" PRId64 " of the trace: %" PRId32 " input and %" PRId32
                        " output tokens make a kv_len over %d",
                        row->row, row->input_tokens, row->output_tokens, INT32_MAX);
    if (replay->options.token_budget && last_length(row) > replay->options.token_budget)
        return ekv_fail(EKV_ERROR_CAPACITY,
                        "row %" PRId64 " of the trace needs %" PRId64 " resident tokens; the token budget is %" PRId64,
                        row->row, last_length(row), replay->options.token_budget);
    return EKV_OK;
}

static bool fits(const ekv_replay *replay)
{
    const ekv_replay_options *options = &replay->options;
    const int32_t max_batch = options->max_batch ? options->max_batch : INT32_MAX;
    return replay->batch_size < max_batch &&
           (!options->token_budget || replay->reserved_tokens + last_length(&replay->waiting) <= options->token_budget);
}

static bool grow(void **array, const ekv_replay *replay, int32_t capacity, size_t element)
{
    void *grown = ekv_grow(replay->context, *array, (size_t)replay->batch_size * element, (size_t)capacity * element);
    if (grown)
        *array = grown;
    return grown != NULL;
}

static ekv_status reserve(ekv_replay *replay)
{
    if (replay->batch_size < replay->capacity)
        return EKV_OK;
    if (replay->capacity > INT32_MAX / 2)
        return ekv_fail(EKV_ERROR_OVERFLOW, "more than %" PRId32 " resident requests", replay->capacity);
    const int32_t capacity = replay->capacity ? replay->capacity * 2 : 64;
    if (!grow((void **)&replay->kv_len, replay, capacity, sizeof *replay->kv_len) ||
        !grow((void **)&replay->last_kv_len, replay, capacity, sizeof *replay->last_kv_len) ||
        !grow((void **)&replay->num_steps, replay, capacity, sizeof *replay->num_steps) ||
        !grow((void **)&replay->admitted_at, replay, capacity, sizeof *replay->admitted_at))
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for %" PRId32 " resident requests", capacity);
    replay->capacity = capacity;
    return EKV_OK;
}

/* Admits what has arrived and fits; where nobody is resident, time jumps to the next arrival first. */
static ekv_status admit(ekv_replay *replay)
{
    for (;;) {
        ekv_status status = fetch_waiting(replay);
        if (status || !replay->has_waiting)
            return status;
        const double arrival = replay->waiting.arrival / replay->options.speedup;
        if (arrival > replay->now) {
            if (replay->batch_size)
                return EKV_OK;
            replay->now = arrival;
        }
        if ((status = check_request(replay)))
            return status;
        if (!fits(replay))
            return EKV_OK;
        if ((status = reserve(replay)))
            return status;
        const int32_t i = replay->batch_size++;
        replay->kv_len[i] = replay->waiting.input_tokens + 1;
        replay->last_kv_len[i] = (int32_t)last_length(&replay->waiting);
        replay->num_steps[i] = replay->waiting.output_tokens - 1;
        replay->admitted_at[i] = replay->now;
        replay->total_tokens += replay->kv_len[i];
        replay->reserved_tokens += replay->last_kv_len[i];
        replay->has_waiting = false;
        replay->counts.admitted++;
    }
}

static ekv_status time_step(const ekv_replay *replay, ekv_replay_step *step)
{
    step->seconds = replay->options.step_seconds;
    if (!replay->options.step_time)
        return EKV_OK;
    ekv_status status = replay->options.step_time(replay->options.step_time_user, step, &step->seconds);
    if (!status && (!(step->seconds > 0) || isinf(step->seconds)))
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "step %" PRId64 " takes %g s; it must take more than 0",
                        step->index, step->seconds);
    return status;
}

ekv_status ekv_replay_next(ekv_replay *replay, ekv_replay_step *step, bool *end)
{
    if (replay->in_step)
        finish_step(replay);
    ekv_status status = admit(replay);
    if (status)
        return status;
    *end = replay->batch_size == 0;
    if (*end)
        return EKV_OK;
    ekv_replay_step next = { .index = replay->counts.steps,
                             .start = replay->now,
                             .kv_len = replay->kv_len,
                             .batch_size = replay->batch_size,
                             .total_tokens = replay->total_tokens,
                             .draining = replay->draining };
    if ((status = time_step(replay, &next)))
        return status;
    replay->step_seconds = next.seconds;
    replay->in_step = true;
    replay->counts.steps++;
    *step = next;
    return EKV_OK;
}

/* ---- Sampling ---------------------------------------------------------------------------------------- */

static int by_index(const void *a, const void *b)
{
    const int64_t x = ((const ekv_lengths *)a)->index, y = ((const ekv_lengths *)b)->index;
    return (x > y) - (x < y);
}

/* Fills an empty list. */
static ekv_status sample(ekv_replay *replay, int64_t samples, uint64_t seed, ekv_lengths_list *list)
{
    ekv_rng rng = { seed };
    for (int64_t seen = 0;; seen++) {
        ekv_replay_step step;
        bool end;
        ekv_status status = ekv_replay_next(replay, &step, &end);
        if (status)
            return status;
        if (end || step.draining)
            break;
        /* Vitter's algorithm R: step number `seen` is kept with probability samples / (seen + 1). */
        int64_t place = seen < samples ? seen : ekv_rng_below(&rng, seen + 1);
        if (place >= samples)
            continue;
        status = place == list->count ? ekv_lengths_append(list, step.kv_len, step.batch_size, step.index)
                                      : ekv_lengths_replace(list, place, step.kv_len, step.batch_size, step.index);
        if (status)
            return status;
    }
    if (list->count < samples)
        return ekv_fail(EKV_ERROR_CAPACITY,
                        "the trace gives %" PRId64 " decode steps up to its last request; %" PRId64
                        " samples are too many",
                        list->count, samples);
    qsort(list->batches, (size_t)list->count, sizeof *list->batches, by_index);
    return EKV_OK;
}

ekv_status ekv_replay_sample(ekv_replay *replay, int64_t samples, uint64_t seed, ekv_lengths_list **list)
{
    if (samples < 1)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "samples is %" PRId64 "; it must be >= 1", samples);
    ekv_lengths_list *created = NULL;
    ekv_status status = ekv_lengths_create(replay->context, &created);
    if (status)
        return status;
    if ((status = sample(replay, samples, seed, created)))
        ekv_lengths_free(created);
    else
        *list = created;
    return status;
}

ekv_status ekv_lengths_from_trace(ekv_context *context, const char *path, ekv_trace_format format,
                                  const ekv_replay_options *options, int64_t samples, uint64_t seed,
                                  ekv_lengths_list **list)
{
    ekv_trace *trace = NULL;
    ekv_replay *replay = NULL;
    ekv_status status = ekv_trace_open(context, path, format, &trace);
    if (status)
        return status;
    if (!(status = ekv_replay_create(context, options, ekv_replay_source_trace, trace, &replay))) {
        status = ekv_replay_sample(replay, samples, seed, list);
        ekv_replay_free(replay);
    }
    ekv_trace_free(trace);
    return status;
}
