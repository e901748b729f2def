/* SPDX-License-Identifier: Apache-2.0 */
#include "trace_tests.h"

#include "base/rng.h"
#include "base/status.h"
#include "trace/replay.h"

#include <math.h>

#define AZURE_SAMPLE EVENKV_TEST_DATA "/../../data/azure-conv-1000.csv"

/* Requests out of an array. */
typedef struct array_source {
    const ekv_trace_row *rows;
    int64_t count, next;
} array_source;

static ekv_status next_of_array(void *user, ekv_trace_row *row, bool *end)
{
    array_source *source = user;
    *end = source->next == source->count;
    if (!*end) {
        *row = source->rows[source->next++];
        row->row = source->next;
    }
    return EKV_OK;
}

/* ---- By hand ----------------------------------------------------------------------------------------- */

enum { MOST_REQUESTS = 4 };
typedef struct expected_step {
    double start;
    int32_t kv_len[MOST_REQUESTS]; /* up to the first 0 */
} expected_step;

static int32_t count_lengths(const expected_step *step)
{
    int32_t count = 0;
    while (count < MOST_REQUESTS && step->kv_len[count])
        count++;
    return count;
}

/* Replays rows and compares every step; the expected ones end with one without requests. */
static void assert_steps(ekv_context *context, const ekv_trace_row *rows, int64_t num_rows,
                         const ekv_replay_options *options, const expected_step *expected)
{
    array_source source = { rows, num_rows, 0 };
    ekv_replay *replay = NULL;
    ekv_replay_step step = { 0 };
    bool end = false;
    assert_int_equal(ekv_replay_create(context, options, next_of_array, &source, &replay), EKV_OK);
    int64_t index = 0;
    for (; count_lengths(&expected[index]); index++) {
        if (ekv_replay_next(replay, &step, &end))
            fail_msg("%s", ekv_last_error());
        assert_false(end);
        assert_int_equal(step.index, index);
        assert_float_equal(step.start, expected[index].start, 1e-9);
        assert_int_equal(step.batch_size, count_lengths(&expected[index]));
        int64_t total = 0;
        for (int32_t i = 0; i < step.batch_size; i++) {
            assert_int_equal(step.kv_len[i], expected[index].kv_len[i]);
            total += step.kv_len[i];
        }
        assert_int_equal(step.total_tokens, total);
    }
    for (int again = 0; again < 2; again++) {
        assert_int_equal(ekv_replay_next(replay, &step, &end), EKV_OK);
        assert_true(end);
    }
    ekv_replay_counts counts;
    ekv_replay_counts_get(replay, &counts);
    assert_int_equal(counts.steps, index);
    assert_int_equal(counts.admitted, counts.finished);
    assert_int_equal(counts.admitted + counts.skipped, num_rows);
    ekv_replay_free(replay);
}

/* Row numbers are set by the source. */
static const ekv_trace_row three_requests[] = {
    { 0, 0, 10, 3 }, { 0, 0.5, 20, 4 }, { 0, 2, 99, 1 }, { 0, 2, 98, 0 }, { 0, 100, 5, 2 },
};
enum { THREE_REQUESTS = sizeof three_requests / sizeof three_requests[0] };

static ekv_replay_options one_second_steps(void)
{
    ekv_replay_options options = EKV_REPLAY_OPTIONS_INIT;
    options.step_seconds = 1;
    return options;
}

/* The rule: in for output - 1 steps from input + 1 tokens on, joining at the next step, time jumping over gaps. */
static void requests_join_grow_and_leave(void **state)
{
    ekv_replay_options options = one_second_steps();
    static const expected_step expected[] = { { 0, { 11 } }, { 1, { 12, 21 } }, { 2, { 22 } },
                                              { 3, { 23 } }, { 100, { 6 } },    { 0, { 0 } } };
    assert_steps(*state, three_requests, THREE_REQUESTS, &options, expected);
}

static void arrivals_come_faster_by_the_speedup(void **state)
{
    ekv_replay_options options = one_second_steps();
    options.speedup = 50;
    static const expected_step expected[] = {
        { 0, { 11 } }, { 1, { 12, 21 } }, { 2, { 22, 6 } }, { 3, { 23 } }, { 0, { 0 } }
    };
    assert_steps(*state, three_requests, THREE_REQUESTS, &options, expected);
}

static void the_default_step_is_30_ms(void **state)
{
    static const expected_step expected[] = { { 0, { 11 } },    { 0.03, { 12 } }, { 0.5, { 21 } }, { 0.53, { 22 } },
                                              { 0.56, { 23 } }, { 100, { 6 } },   { 0, { 0 } } };
    assert_steps(*state, three_requests, THREE_REQUESTS, NULL, expected);
}

static void a_request_joins_the_step_that_starts_when_it_arrives(void **state)
{
    static const ekv_trace_row rows[] = { { 0, 0, 1, 3 }, { 0, 0, 2, 2 }, { 0, 1, 3, 2 } };
    ekv_replay_options options = one_second_steps();
    static const expected_step expected[] = { { 0, { 2, 3 } }, { 1, { 3, 4 } }, { 0, { 0 } } };
    assert_steps(*state, rows, 3, &options, expected);
}

static void the_batch_limit_makes_requests_wait(void **state)
{
    ekv_replay_options options = one_second_steps();
    options.max_batch = 1;
    static const expected_step expected[] = { { 0, { 11 } }, { 1, { 12 } },  { 2, { 21 } }, { 3, { 22 } },
                                              { 4, { 23 } }, { 100, { 6 } }, { 0, { 0 } } };
    assert_steps(*state, three_requests, THREE_REQUESTS, &options, expected);
}

/* At their largest the first two need 12 and 23 tokens, the third 2. */
static const ekv_trace_row budget_requests[] = { { 0, 0, 10, 3 }, { 0, 0.5, 20, 4 }, { 0, 0.6, 1, 2 } };

static void the_token_budget_makes_requests_wait_in_order(void **state)
{
    ekv_replay_options options = one_second_steps();
    options.token_budget = 34; /* not 12 + 23; the third would fit and still waits its turn */
    static const expected_step of_34[] = { { 0, { 11 } }, { 1, { 12 } }, { 2, { 21, 2 } },
                                           { 3, { 22 } }, { 4, { 23 } }, { 0, { 0 } } };
    assert_steps(*state, budget_requests, 3, &options, of_34);
    options.token_budget = 35; /* 12 + 23, not 12 + 23 + 2 */
    static const expected_step of_35[] = {
        { 0, { 11 } }, { 1, { 12, 21 } }, { 2, { 22, 2 } }, { 3, { 23 } }, { 0, { 0 } }
    };
    assert_steps(*state, budget_requests, 3, &options, of_35);
    options.token_budget = 37;
    static const expected_step of_37[] = {
        { 0, { 11 } }, { 1, { 12, 21, 2 } }, { 2, { 22 } }, { 3, { 23 } }, { 0, { 0 } }
    };
    assert_steps(*state, budget_requests, 3, &options, of_37);
}

static ekv_status one_second_a_request(void *user, const ekv_replay_step *step, double *seconds)
{
    int64_t *calls = user;
    assert_int_equal(step->index, (*calls)++);
    *seconds = step->batch_size;
    return EKV_OK;
}

static void a_step_takes_what_step_time_says(void **state)
{
    int64_t calls = 0;
    ekv_replay_options options = EKV_REPLAY_OPTIONS_INIT;
    options.step_time = one_second_a_request;
    options.step_time_user = &calls;
    static const expected_step expected[] = { { 0, { 11 } }, { 1, { 12, 21 } }, { 3, { 22 } },
                                              { 4, { 23 } }, { 100, { 6 } },    { 0, { 0 } } };
    assert_steps(*state, three_requests, THREE_REQUESTS, &options, expected);
    assert_int_equal(calls, 5);
}

static void gaps_cost_no_steps(void **state)
{
    static const ekv_trace_row rows[] = { { 0, 0, 7, 2 }, { 0, 1e9, 8, 2 }, { 0, 8e9, 9, 2 } };
    static const expected_step expected[] = { { 0, { 8 } }, { 1e9, { 9 } }, { 8e9, { 10 } }, { 0, { 0 } } };
    assert_steps(*state, rows, 3, NULL, expected);
}

static void lengths_may_reach_the_largest_int(void **state)
{
    static const ekv_trace_row rows[] = { { 0, 0, INT32_MAX - 1, 2 } };
    static const expected_step expected[] = { { 0, { INT32_MAX } }, { 0, { 0 } } };
    assert_steps(*state, rows, 1, NULL, expected);
}

static void no_requests_give_no_steps(void **state)
{
    static const expected_step expected[] = { { 0, { 0 } } };
    assert_steps(*state, NULL, 0, NULL, expected);
    assert_steps(*state, three_requests + 2, 2, NULL, expected);
}

/* ---- Against a replay that keeps everything ----------------------------------------------------------- */

enum { RANDOM_ROWS = 60 };

/* The requests of step after step by the definition: looks at all requests anew each time.  Returns the number
 * of requests in the batch at `now` and moves admitted on. */
static int32_t slow_step(const ekv_trace_row *rows, int32_t *generated, int32_t *admitted, double now,
                         const ekv_replay_options *options, int32_t *kv_len)
{
    for (; *admitted < RANDOM_ROWS && rows[*admitted].arrival / options->speedup <= now; (*admitted)++) {
        const ekv_trace_row *next = &rows[*admitted];
        if (next->output_tokens <= 1)
            continue;
        int64_t resident = 0, tokens = next->input_tokens + next->output_tokens - 1;
        for (int32_t i = 0; i < *admitted; i++)
            if (generated[i] < rows[i].output_tokens && rows[i].output_tokens > 1) {
                resident++;
                tokens += rows[i].input_tokens + rows[i].output_tokens - 1;
            }
        if ((options->max_batch && resident >= options->max_batch) ||
            (options->token_budget && tokens > options->token_budget))
            break;
    }
    int32_t batch_size = 0;
    for (int32_t i = 0; i < *admitted; i++)
        if (generated[i] < rows[i].output_tokens && rows[i].output_tokens > 1)
            kv_len[batch_size++] = rows[i].input_tokens + generated[i]++;
    return batch_size;
}

static void random_traces_agree_with_the_slow_replay(void **state)
{
    for (uint64_t seed = 1; seed <= 300; seed++) {
        ekv_rng rng = { seed };
        ekv_trace_row rows[RANDOM_ROWS];
        double arrival = 0;
        int64_t tokens_to_come = 0;
        for (int32_t i = 0; i < RANDOM_ROWS; i++) {
            arrival += ekv_rng_below(&rng, 4) ? ekv_rng_unit(&rng) * 0.2 : (double)ekv_rng_below(&rng, 4);
            rows[i] = (ekv_trace_row){ 0, i ? arrival : 0, (int32_t)ekv_rng_below(&rng, 50),
                                       (int32_t)ekv_rng_below(&rng, 40) };
            tokens_to_come += rows[i].output_tokens > 1 ? rows[i].output_tokens - 1 : 0;
        }
        ekv_replay_options options = EKV_REPLAY_OPTIONS_INIT;
        options.speedup = 1 + (double)ekv_rng_below(&rng, 4);
        options.max_batch = (int32_t)ekv_rng_below(&rng, 12);
        options.token_budget = ekv_rng_below(&rng, 2) ? 0 : 90 + ekv_rng_below(&rng, 500);
        array_source source = { rows, RANDOM_ROWS, 0 };
        ekv_replay *replay = NULL;
        assert_int_equal(ekv_replay_create(*state, &options, next_of_array, &source, &replay), EKV_OK);

        int32_t generated[RANDOM_ROWS], admitted = 0, kv_len[RANDOM_ROWS];
        for (int32_t i = 0; i < RANDOM_ROWS; i++)
            generated[i] = 1; /* by prefill */
        ekv_replay_step step;
        bool end;
        for (;;) {
            if (ekv_replay_next(replay, &step, &end))
                fail_msg("seed %d: %s", (int)seed, ekv_last_error());
            if (end)
                break;
            int32_t batch_size = slow_step(rows, generated, &admitted, step.start, &options, kv_len);
            if (batch_size != step.batch_size || memcmp(kv_len, step.kv_len, (size_t)batch_size * sizeof *kv_len))
                fail_msg("seed %d, step %d at %g s: another batch (%d, not %d requests)", (int)seed, (int)step.index,
                         step.start, step.batch_size, batch_size);
            if (options.token_budget && step.total_tokens > options.token_budget)
                fail_msg("seed %d, step %d: over the budget", (int)seed, (int)step.index);
            tokens_to_come -= step.batch_size;
        }
        if (tokens_to_come)
            fail_msg("seed %d: %d tokens were never generated", (int)seed, (int)tokens_to_come);
        ekv_replay_free(replay);
    }
}

/* ---- Errors ------------------------------------------------------------------------------------------ */

static void bad_options_are_refused_with_their_values(void **state)
{
    static const struct {
        ekv_replay_options options;
        const char *parts;
    } cases[] = {
        { { 0, 0.03, 0, 0, NULL, NULL, NULL, NULL }, "speedup is 0" },
        { { -1, 0.03, 0, 0, NULL, NULL, NULL, NULL }, "speedup is -1" },
        { { (double)NAN, 0.03, 0, 0, NULL, NULL, NULL, NULL }, "speedup is" },
        { { (double)INFINITY, 0.03, 0, 0, NULL, NULL, NULL, NULL }, "speedup is inf" },
        { { 1, 0, 0, 0, NULL, NULL, NULL, NULL }, "step time is 0 s" },
        { { 1, -0.5, 0, 0, NULL, NULL, NULL, NULL }, "step time is -0.5 s" },
        { { 1, (double)INFINITY, 0, 0, NULL, NULL, NULL, NULL }, "step time is inf s" },
        { { 1, 0.03, -1, 0, NULL, NULL, NULL, NULL }, "max_batch is -1" },
        { { 1, 0.03, 0, -2, NULL, NULL, NULL, NULL }, "token_budget is -2" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ekv_replay *replay = NULL;
        assert_fails(ekv_replay_create(*state, &cases[i].options, next_of_array, NULL, &replay),
                     EKV_ERROR_INVALID_ARGUMENT, cases[i].parts);
        assert_null(replay);
    }
}

static ekv_status run_to_end(ekv_replay *replay, int64_t *steps)
{
    ekv_replay_step step;
    bool end = false;
    ekv_status status = EKV_OK;
    for (*steps = 0; !status && !end; *steps += !status && !end)
        status = ekv_replay_next(replay, &step, &end);
    return status;
}

static void requests_that_can_never_run_are_named(void **state)
{
    static const ekv_trace_row too_long[] = { { 0, 0, 10, 3 }, { 0, 0, INT32_MAX, 2 } };
    ekv_replay_options options = EKV_REPLAY_OPTIONS_INIT;
    ekv_replay *replay = NULL;
    int64_t steps;
    array_source source = { too_long, 2, 0 };
    assert_int_equal(ekv_replay_create(*state, &options, next_of_array, &source, &replay), EKV_OK);
    assert_fails(run_to_end(replay, &steps), EKV_ERROR_OVERFLOW, "row 2|2147483647 input and 2 output");
    assert_fails(run_to_end(replay, &steps), EKV_ERROR_OVERFLOW, "row 2");
    ekv_replay_free(replay);

    options.token_budget = 22;
    source = (array_source){ budget_requests, 3, 0 };
    assert_int_equal(ekv_replay_create(*state, &options, next_of_array, &source, &replay), EKV_OK);
    assert_fails(run_to_end(replay, &steps), EKV_ERROR_CAPACITY, "row 2|needs 23|budget is 22");
    assert_int_equal(steps, 2); /* those of the first request */
    ekv_replay_free(replay);
}

/* Stores the first of its answers that is not used up; one below -1 makes it fail. */
static ekv_status answer(void *user, const ekv_replay_step *step, double *seconds)
{
    (void)step;
    const double **answers = user;
    *seconds = *(*answers)++;
    return *seconds < -1 ? ekv_fail(EKV_ERROR_DRIVER, "no clock") : EKV_OK;
}

static void a_bad_step_time_is_refused_and_can_be_tried_again(void **state)
{
    static const double answers[] = { 0, -1, (double)NAN, (double)INFINITY, -2, 1, 1 };
    const double *next = answers;
    ekv_replay_options options = EKV_REPLAY_OPTIONS_INIT;
    options.step_time = answer;
    options.step_time_user = &next;
    static const ekv_trace_row rows[] = { { 0, 0, 10, 3 } };
    array_source source = { rows, 1, 0 };
    ekv_replay *replay = NULL;
    int64_t steps;
    assert_int_equal(ekv_replay_create(*state, &options, next_of_array, &source, &replay), EKV_OK);
    assert_fails(run_to_end(replay, &steps), EKV_ERROR_INVALID_ARGUMENT, "step 0 takes 0 s");
    assert_fails(run_to_end(replay, &steps), EKV_ERROR_INVALID_ARGUMENT, "step 0 takes -1 s");
    assert_fails(run_to_end(replay, &steps), EKV_ERROR_INVALID_ARGUMENT, "step 0 takes");
    assert_fails(run_to_end(replay, &steps), EKV_ERROR_INVALID_ARGUMENT, "step 0 takes inf s");
    assert_fails(run_to_end(replay, &steps), EKV_ERROR_DRIVER, "no clock");
    assert_int_equal(run_to_end(replay, &steps), EKV_OK);
    assert_int_equal(steps, 2);
    ekv_replay_free(replay);
}

/* ---- Sampling ---------------------------------------------------------------------------------------- */

static ekv_lengths_list *sample_azure(ekv_context *context, double speedup, int64_t samples, uint64_t seed)
{
    ekv_replay_options options = EKV_REPLAY_OPTIONS_INIT;
    options.speedup = speedup;
    ekv_lengths_list *list = NULL;
    if (ekv_lengths_from_trace(context, AZURE_SAMPLE, EKV_TRACE_AUTO, &options, samples, seed, &list))
        fail_msg("%s", ekv_last_error());
    assert_int_equal(list->count, samples);
    return list;
}

static bool same_lists(const ekv_lengths_list *a, const ekv_lengths_list *b)
{
    bool same = a->count == b->count;
    for (int64_t i = 0; same && i < a->count; i++)
        same = a->batches[i].index == b->batches[i].index && a->batches[i].batch_size == b->batches[i].batch_size &&
               !memcmp(a->batches[i].kv_len, b->batches[i].kv_len, (size_t)a->batches[i].batch_size * 4);
    return same;
}

static void a_seed_gives_the_same_sample_everywhere(void **state)
{
    ekv_lengths_list *first = sample_azure(*state, 4, 6, 1), *again = sample_azure(*state, 4, 6, 1);
    ekv_lengths_list *other = sample_azure(*state, 4, 6, 2);
    assert_true(same_lists(first, again));
    assert_false(same_lists(first, other));
    /* What this seed has to give on every machine. */
    static const int64_t indices[] = { 154, 383, 667, 1283, 1444, 1580 };
    for (int32_t i = 0; i < 6; i++)
        assert_int_equal(first->batches[i].index, indices[i]);
    ekv_lengths_free(first);
    ekv_lengths_free(again);
    ekv_lengths_free(other);
}

static void samples_are_steps_of_the_replay(void **state)
{
    ekv_lengths_list *list = sample_azure(*state, 4, 50, 7);
    ekv_trace *trace = NULL;
    ekv_replay *replay = NULL;
    ekv_replay_options options = EKV_REPLAY_OPTIONS_INIT;
    options.speedup = 4;
    assert_int_equal(ekv_trace_open(*state, AZURE_SAMPLE, EKV_TRACE_AUTO, &trace), EKV_OK);
    assert_int_equal(ekv_replay_create(*state, &options, ekv_replay_source_trace, trace, &replay), EKV_OK);
    int64_t found = 0;
    for (;;) {
        ekv_replay_step step;
        bool end;
        assert_int_equal(ekv_replay_next(replay, &step, &end), EKV_OK);
        if (end)
            break;
        if (found == 50 || list->batches[found].index != step.index)
            continue;
        assert_int_equal(list->batches[found].batch_size, step.batch_size);
        assert_int_equal(list->batches[found].total_tokens, step.total_tokens);
        assert_memory_equal(list->batches[found].kv_len, step.kv_len, (size_t)step.batch_size * 4);
        found++;
    }
    assert_int_equal(found, 50);
    ekv_replay_free(replay);
    ekv_trace_free(trace);
    ekv_lengths_free(list);
}

/* Ten steps in which the first request has 2 to 11 tokens; the second joins in the last of them, and 98 draining
 * steps follow. */
static const ekv_trace_row ten_steps[] = { { 0, 0, 1, 11 }, { 0, 0.265, 1, 100 } };

static ekv_status sample_ten(ekv_context *context, int64_t samples, uint64_t seed, ekv_lengths_list **list)
{
    array_source source = { ten_steps, 2, 0 };
    ekv_replay *replay = NULL;
    assert_int_equal(ekv_replay_create(context, NULL, next_of_array, &source, &replay), EKV_OK);
    ekv_status status = ekv_replay_sample(replay, samples, seed, list);
    ekv_replay_free(replay);
    return status;
}

static void steps_after_the_last_request_has_come_are_draining(void **state)
{
    array_source source = { ten_steps, 2, 0 };
    ekv_replay *replay = NULL;
    ekv_replay_step step;
    bool end = false;
    assert_int_equal(ekv_replay_create(*state, NULL, next_of_array, &source, &replay), EKV_OK);
    for (int32_t i = 0; i < 108; i++) {
        assert_int_equal(ekv_replay_next(replay, &step, &end), EKV_OK);
        assert_false(end);
        assert_int_equal(step.draining, i >= 10);
    }
    assert_int_equal(ekv_replay_next(replay, &step, &end), EKV_OK);
    assert_true(end);
    ekv_replay_free(replay);
}

/* Over 20,000 seeds each of 10 steps is among 3 samples 6,000 times, give or take 65 (one sigma). */
static void every_step_is_equally_likely(void **state)
{
    int32_t drawn[10] = { 0 };
    for (uint64_t seed = 1; seed <= 20000; seed++) {
        ekv_lengths_list *list = NULL;
        assert_int_equal(sample_ten(*state, 3, seed, &list), EKV_OK);
        for (int32_t i = 0; i < 3; i++) {
            assert_int_equal(list->batches[i].kv_len[0], list->batches[i].index + 2);
            assert_true(i == 0 || list->batches[i - 1].index < list->batches[i].index);
            drawn[list->batches[i].index]++;
        }
        ekv_lengths_free(list);
    }
    for (int32_t i = 0; i < 10; i++)
        assert_in_range(drawn[i], 6000 - 5 * 65, 6000 + 5 * 65);
}

static void a_sample_of_all_steps_is_the_replay_without_its_end(void **state)
{
    ekv_lengths_list *list = NULL;
    assert_int_equal(sample_ten(*state, 10, 5, &list), EKV_OK);
    for (int32_t i = 0; i < 10; i++)
        assert_int_equal(list->batches[i].index, i);
    assert_int_equal(list->batches[9].batch_size, 2);
    ekv_lengths_free(list);
}

static void samples_that_do_not_exist_are_refused(void **state)
{
    ekv_lengths_list *list = NULL;
    assert_fails(sample_ten(*state, 11, 1, &list), EKV_ERROR_CAPACITY, "10 decode steps|11 samples");
    assert_fails(sample_ten(*state, INT64_MAX, 1, &list), EKV_ERROR_CAPACITY, "10 decode steps");
    assert_fails(sample_ten(*state, 0, 1, &list), EKV_ERROR_INVALID_ARGUMENT, "samples is 0");
    assert_fails(ekv_lengths_from_trace(*state, "/no/such.csv", EKV_TRACE_AUTO, NULL, 1, 1, &list), EKV_ERROR_NOT_FOUND,
                 "/no/such.csv");
    assert_null(list);
}

/* ---- The trace that comes with the project ------------------------------------------------------------ */

static int compare_int32(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static void the_azure_sample_gives_the_batches_that_the_docs_state(void **state)
{
    enum { STEPS = 1802 };
    ekv_lengths_list *list = sample_azure(*state, 4, STEPS, 1);
    static int32_t sizes[STEPS];
    for (int32_t i = 0; i < STEPS; i++)
        sizes[i] = list->batches[i].batch_size;
    ekv_lengths_free(list);
    qsort(sizes, STEPS, sizeof sizes[0], compare_int32);
    assert_int_equal(sizes[STEPS / 2], 149);
    assert_int_equal(sizes[STEPS - 1], 191);
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

static ekv_status create_sample(ekv_context *context, void **result)
{
    return ekv_lengths_from_trace(context, EVENKV_TEST_DATA "/trace-mooncake.jsonl", EKV_TRACE_AUTO, NULL, 20, 1,
                                  (ekv_lengths_list **)result);
}

static void release_list(void *list)
{
    ekv_lengths_free(list);
}

static void no_memory_is_reported_and_leaks_nothing(void **state)
{
    (void)state;
    assert_true(walk_allocation_failures(create_sample, release_list) > 20);
    ekv_replay_free(NULL);
}

typedef struct finished {
    int32_t count, steps[8];
    double seconds[8];
} finished;

static void note_finished(void *user, double seconds, int32_t steps)
{
    finished *f = user;
    f->seconds[f->count] = seconds, f->steps[f->count++] = steps;
}

static void requests_that_leave_say_how_long_they_took(void **state)
{
    const ekv_trace_row rows[] = { { 0, 0.0, 10, 3 }, { 0, 0.5, 20, 4 }, { 0, 0.6, 5, 1 }, { 0, 100.0, 5, 2 } };
    array_source source = { rows, 4, 0 };
    finished f = { 0 };
    ekv_replay_options options = EKV_REPLAY_OPTIONS_INIT;
    options.step_seconds = 1;
    options.finished = note_finished;
    options.finished_user = &f;
    ekv_replay *replay = NULL;
    ekv_replay_step step;
    assert_int_equal(ekv_replay_create(*state, &options, next_of_array, &source, &replay), EKV_OK);
    for (bool end = false; !end;)
        assert_int_equal(ekv_replay_next(replay, &step, &end), EKV_OK);
    assert_int_equal(f.count, 3); /* one had no decode step */
    for (int i = 0; i < 3; i++) {
        assert_int_equal(f.steps[i], i == 2 ? 1 : i + 2);
        assert_true(fabs(f.seconds[i] - f.steps[i]) < 1e-9);
    }
    ekv_replay_free(replay);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_join_grow_and_leave),
        cmocka_unit_test(arrivals_come_faster_by_the_speedup),
        cmocka_unit_test(the_default_step_is_30_ms),
        cmocka_unit_test(a_request_joins_the_step_that_starts_when_it_arrives),
        cmocka_unit_test(the_batch_limit_makes_requests_wait),
        cmocka_unit_test(the_token_budget_makes_requests_wait_in_order),
        cmocka_unit_test(a_step_takes_what_step_time_says),
        cmocka_unit_test(gaps_cost_no_steps),
        cmocka_unit_test(lengths_may_reach_the_largest_int),
        cmocka_unit_test(no_requests_give_no_steps),
        cmocka_unit_test(random_traces_agree_with_the_slow_replay),
        cmocka_unit_test(bad_options_are_refused_with_their_values),
        cmocka_unit_test(requests_that_can_never_run_are_named),
        cmocka_unit_test(a_bad_step_time_is_refused_and_can_be_tried_again),
        cmocka_unit_test(a_seed_gives_the_same_sample_everywhere),
        cmocka_unit_test(samples_are_steps_of_the_replay),
        cmocka_unit_test(steps_after_the_last_request_has_come_are_draining),
        cmocka_unit_test(every_step_is_equally_likely),
        cmocka_unit_test(a_sample_of_all_steps_is_the_replay_without_its_end),
        cmocka_unit_test(samples_that_do_not_exist_are_refused),
        cmocka_unit_test(the_azure_sample_gives_the_batches_that_the_docs_state),
        cmocka_unit_test(no_memory_is_reported_and_leaks_nothing),
        cmocka_unit_test(requests_that_leave_say_how_long_they_took),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
