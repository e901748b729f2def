/* SPDX-License-Identifier: Apache-2.0 */
#include "replay_run.h"

#include "base/portable.h"
#include "plan/plan.h"
#include "sim/timeline.h"
#include "systems.h"
#include "trace/replay.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Distributions ----------------------------------------------------------------------------------- */

/* Bins of 0.1 % from a nanosecond to half a year, in us. */
static const double bin_ratio = 1.001, smallest = 1e-3;
enum { REPLAY_BINS = 37000 };

static void add_value(replay_values *v, double value)
{
    const double bin = log(fmax(value, smallest) / smallest) / log(bin_ratio);
    v->weights[bin < REPLAY_BINS ? (int32_t)bin : REPLAY_BINS - 1]++;
    v->count++;
    v->sum += value;
    v->largest = fmax(v->largest, value);
}

double replay_quantile(const replay_values *v, double share)
{
    double below = 0;
    for (int32_t i = 0; i < REPLAY_BINS && v->count > 0; i++) {
        below += v->weights[i];
        if (below >= share * v->count)
            return fmin(smallest * pow(bin_ratio, i + 0.5), v->largest);
    }
    return v->largest;
}

double replay_mean(const replay_values *v)
{
    return v->count > 0 ? v->sum / v->count : 0;
}

/* ---- One replica ------------------------------------------------------------------------------------- */

typedef struct replica {
    cli_state *cli;
    const replay_server *server;
    replay_result *result;
    int32_t index;
    ekv_trace *trace;
    ekv_plan *plan;
    int32_t plan_batch; /* requests that the plan has room for */
    ekv_timeline timeline;
    double attention_us; /* of the current step, all layers */
} replica;

/* Every replicas-th request of the trace. */
static ekv_status next_request(void *user, ekv_trace_row *row, bool *end)
{
    replica *r = user;
    ekv_status status;
    do
        status = ekv_trace_next(r->trace, row, end);
    while (!status && !*end && (row->row - 1) % r->server->replicas != r->index);
    return status;
}

/* A plan with room for more requests than there are now; empty ones hold the places. */
static ekv_status create_plan(replica *r, const ekv_replay_step *step)
{
    ekv_batch batch = r->server->shape;
    batch.batch_size = (int32_t)ekv_min((int64_t)step->batch_size * 2, INT32_MAX / 8);
    int32_t *kv_len = cli_alloc((size_t)batch.batch_size * sizeof *kv_len);
    memset(kv_len, 0, (size_t)batch.batch_size * sizeof *kv_len);
    memcpy(kv_len, step->kv_len, (size_t)step->batch_size * sizeof *kv_len);
    batch.kv_len = kv_len;
    ekv_plan_free(r->plan);
    r->plan = NULL;
    ekv_status status = ekv_plan_create(r->cli->context, r->result->planner, &batch, &r->server->device,
                                        &r->cli->options.plan, &r->plan);
    r->plan_batch = status ? 0 : batch.batch_size;
    free(kv_len);
    return status;
}

static ekv_status plan_step(replica *r, const ekv_replay_step *step)
{
    ekv_status status = EKV_ERROR_CAPACITY;
    if (step->batch_size <= r->plan_batch)
        status = ekv_plan_update(r->plan, step->kv_len, step->batch_size);
    if (status != EKV_ERROR_CAPACITY)
        return status;
    status = create_plan(r, step);
    return status ? status : ekv_plan_update(r->plan, step->kv_len, step->batch_size);
}

static void keep_worst(replica *r, const ekv_replay_step *step)
{
    replay_result *result = r->result;
    result->worst_step = step->index;
    result->worst_replica = r->index;
    result->worst_batch = step->batch_size;
    const size_t size = (size_t)step->batch_size * sizeof *step->kv_len;
    result->worst_kv_len = cli_realloc(result->worst_kv_len, size);
    memcpy(result->worst_kv_len, step->kv_len, size);
}

static ekv_status time_step(void *user, const ekv_replay_step *step, double *seconds)
{
    replica *r = user;
    replay_result *result = r->result;
    ekv_status status = plan_step(r, step);
    if (status || (status = ekv_timeline_run(&r->timeline, r->plan, &r->server->device, r->cli->options.system, false)))
        return status;
    r->attention_us = r->server->layers * r->timeline.info.time_us;
    if (r->attention_us > result->attention.largest)
        keep_worst(r, step);
    add_value(&result->attention, r->attention_us);
    result->past_threshold += cli_threshold_of(r->plan).reached;
    result->projected = r->timeline.info.projected;
    result->tokens += step->batch_size;
    result->largest_batch = (int32_t)ekv_max(result->largest_batch, step->batch_size);
    if (!r->server->fixed_step)
        *seconds = (r->server->step_base_us + r->attention_us) / 1e6;
    result->busy_us += *seconds * 1e6;
    return EKV_OK;
}

static void finish_request(void *user, double seconds, int32_t steps)
{
    replica *r = user;
    add_value(&r->result->token_time, seconds * 1e6 / steps);
}

static ekv_status run_steps(replica *r, ekv_replay *replay)
{
    ekv_replay_step step = { 0 };
    ekv_replay_counts counts;
    for (bool end = false; !end;) {
        ekv_status status = ekv_replay_next(replay, &step, &end);
        if (status)
            return status;
    }
    ekv_replay_counts_get(replay, &counts);
    r->result->steps += counts.steps;
    r->result->finished += counts.finished;
    r->result->skipped += counts.skipped;
    if (counts.steps)
        r->result->seconds = fmax(r->result->seconds, step.start + step.seconds);
    return EKV_OK;
}

static ekv_status run_replica(cli_state *cli, const replay_server *server, int32_t index, replay_result *result)
{
    const cli_options *options = &cli->options;
    replica r = { .cli = cli, .server = server, .result = result, .index = index, .timeline.context = cli->context };
    ekv_replay_options replay_options = EKV_REPLAY_OPTIONS_INIT;
    replay_options.speedup = options->speedup;
    replay_options.step_seconds = options->step_ms / 1e3;
    replay_options.max_batch = options->max_batch;
    replay_options.token_budget = server->token_budget;
    replay_options.step_time = time_step;
    replay_options.step_time_user = replay_options.finished_user = &r;
    replay_options.finished = finish_request;
    ekv_replay *replay = NULL;
    ekv_status status = ekv_trace_open(cli->context, options->trace, (ekv_trace_format)options->trace_format, &r.trace);
    if (!status)
        status = ekv_replay_create(cli->context, &replay_options, next_request, &r, &replay);
    if (!status)
        status = run_steps(&r, replay);
    ekv_replay_free(replay);
    ekv_trace_free(r.trace);
    ekv_plan_free(r.plan);
    ekv_timeline_clear(&r.timeline);
    return status;
}

/* ---- A planner --------------------------------------------------------------------------------------- */

static void start_values(replay_values *v)
{
    *v = (replay_values){ .weights = cli_alloc(REPLAY_BINS * sizeof *v->weights) };
    for (int32_t i = 0; i < REPLAY_BINS; i++)
        v->weights[i] = 0;
}

void replay_run(cli_state *cli, const replay_server *server, replay_result *result)
{
    start_values(&result->attention);
    start_values(&result->token_time);
    for (int32_t i = 0; i < server->replicas && !result->status; i++)
        result->status = run_replica(cli, server, i, result);
    if (result->status)
        snprintf(result->error, sizeof result->error, "%s", ekv_last_error()); /* the text is this thread's */
    result->mean_batch = result->steps ? result->tokens / (double)result->steps : 0;
}

void replay_result_free(replay_result *result)
{
    free(result->attention.weights);
    free(result->token_time.weights);
    free(result->worst_kv_len);
}
