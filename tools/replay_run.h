/* SPDX-License-Identifier: Apache-2.0
 * A trace through servers whose attention runs by one planner's plans. */
#ifndef EVENKV_TOOLS_REPLAY_RUN_H
#define EVENKV_TOOLS_REPLAY_RUN_H

#include "workload.h"

/* A distribution of positive values, in memory that does not grow: quantiles are exact to 0.1 %. */
typedef struct replay_values {
    double *weights; /* [REPLAY_BINS] by the logarithm of the value; owned */
    double count, sum, largest;
} replay_values;

/* What all planners share. */
typedef struct replay_server {
    ekv_device device;
    ekv_batch shape; /* of a rank */
    int32_t layers, replicas;
    double step_base_us;
    int64_t token_budget; /* KV tokens that a server holds */
    bool fixed_step;      /* a step takes replay.step_seconds */
} replay_server;

typedef struct replay_result {
    const char *planner;
    ekv_status status;
    char error[512]; /* of the status */
    bool projected;
    int64_t steps, finished, skipped, past_threshold;
    double tokens;            /* generated in decode steps */
    double seconds;           /* until the last replica is done */
    double busy_us;           /* sum of step times */
    replay_values attention;  /* us, all layers, by step */
    replay_values token_time; /* us a token (TPOT), by request */
    double mean_batch;
    int32_t largest_batch;
    int64_t worst_step; /* of the longest attention; and in which replica */
    int32_t worst_replica, worst_batch;
    int32_t *worst_kv_len; /* [worst_batch], owned */
} replay_result;

/* Replays the whole trace through every replica.  On an error result->status and error say which.  May run on several
 * threads of the context's at a time, each with its own result, which is {0} but for the planner. */
void replay_run(cli_state *cli, const replay_server *server, replay_result *result);
void replay_result_free(replay_result *result);

/* The value that a share of the weight does not exceed; 0 where there is none. */
double replay_quantile(const replay_values *values, double share);
double replay_mean(const replay_values *values);

#endif
