/* SPDX-License-Identifier: Apache-2.0
 * The trace that the tool makes of a GPU's stamps. */
#include "../tools/timeline.h"
#include "base/number.h"
#include "base/status.h"
#include "plan/plan.h"

#include <cjson/cJSON.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* The tool's option reader, which comes along with the names of dispatches, wants it. */
ekv_status cli_usage(cli_state *cli, ekv_status status)
{
    (void)cli;
    return status;
}

enum { SMS = 6, CTAS_PER_SM = 2 };

static const int32_t kv_len[] = { 4096, 64, 0, 640 };

static ekv_plan *make_plan(ekv_context *context, const char *planner)
{
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = 4;
    batch.kv_len = kv_len;
    batch.q_heads = 8;
    batch.kv_heads = 2;
    batch.head_dim = 64;
    ekv_device device = EKV_DEVICE_INIT;
    assert_int_equal(ekv_device_find("h200", &device), EKV_OK);
    device.num_sms = SMS;
    ekv_plan *plan;
    assert_int_equal(ekv_plan_create(context, planner, &batch, &device, NULL, &plan), EKV_OK);
    return plan;
}

/* As CTAs take tiles in turn, two of them on an SM at a time; the last SM gets none.  A tile takes as many ns as it has
 * tokens, and one more; merges follow, out of order, and the second half of their heads is never written. */
static ekv_cuda_timeline make_stamps(const ekv_plan *plan)
{
    const int32_t ctas = (SMS - 1) * CTAS_PER_SM;
    const int64_t begin = INT64_C(1700000000000000000); /* %globaltimer is of that size */
    int64_t free_at[(SMS - 1) * CTAS_PER_SM], last = begin;
    ekv_cuda_timeline recorded = { .num_tiles = plan->num_tiles,
                                   .num_merges = plan->num_merges * plan->heads,
                                   .heads = plan->heads };
    recorded.stamps = calloc((size_t)(recorded.num_tiles + recorded.num_merges), sizeof *recorded.stamps);
    for (int32_t i = 0; i < ctas; i++)
        free_at[i] = begin + 10 * i;
    for (int64_t t = 0; t < recorded.num_tiles; t++) {
        const int32_t cta = (int32_t)(t % ctas);
        ekv_stamp *stamp = &recorded.stamps[t];
        *stamp =
            (ekv_stamp){ .start_ns = free_at[cta], .index = (int32_t)t, .sm = cta % (SMS - 1), .cta = cta, .kind = 1 };
        stamp->stop_ns = stamp->start_ns + plan->tiles[t].kv_end - plan->tiles[t].kv_begin + 1;
        free_at[cta] = stamp->stop_ns + 5;
        last = ekv_max(last, stamp->stop_ns);
    }
    for (int64_t m = 0; m < recorded.num_merges; m++)
        if (m % plan->heads < plan->heads - 1)
            recorded.stamps[recorded.num_tiles + m] =
                (ekv_stamp){ .start_ns = last - m, .stop_ns = last + 20, .kind = 2 };
    return recorded;
}

static cJSON *write_and_parse(const cli_timeline *timeline)
{
    cli_text text = { 0 };
    cli_timeline_write(timeline, &text);
    cJSON *trace = cJSON_ParseWithLength(text.data, text.size);
    free(text.data);
    assert_non_null(trace);
    return trace;
}

static double number(const cJSON *event, const char *key)
{
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(event, key);
    assert_true(cJSON_IsNumber(value));
    return value->valuedouble;
}

static const char *string(const cJSON *event, const char *key)
{
    const char *value = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(event, key));
    assert_non_null(value);
    return value;
}

/* process: from 0, in the order in which they were added. */
static bool is_slice(const cJSON *event, int32_t process)
{
    return !strcmp(string(event, "ph"), "X") && number(event, "pid") == process + 1;
}

/* ---- The format -------------------------------------------------------------------------------------- */

static int32_t id_of(const cJSON *event, const char *key)
{
    const double id = number(event, key);
    assert_true(id >= 1 && id <= INT32_MAX && id == (int32_t)id); /* 0 is a kernel's idle task to Perfetto */
    return (int32_t)id;
}

/* How many events there are of the kind and name for a process, and for one thread of it where tid is not 0. */
static int32_t count_named(const cJSON *events, const char *name, int32_t pid, int32_t tid)
{
    int32_t count = 0;
    const cJSON *event;
    cJSON_ArrayForEach(event, events) count += !strcmp(string(event, "ph"), "M") &&
                                               !strcmp(string(event, "name"), name) && id_of(event, "pid") == pid &&
                                               (!tid || id_of(event, "tid") == tid);
    return count;
}

/* Metadata: what it names, by the argument of that kind. */
static void check_metadata(const cJSON *event)
{
    const cJSON *arguments = cJSON_GetObjectItemCaseSensitive(event, "args");
    const char *name = string(event, "name");
    assert_null(cJSON_GetObjectItemCaseSensitive(event, "ts")); /* it holds for the whole trace */
    assert_int_equal(cJSON_GetArraySize(arguments), 1);
    if (!strcmp(name, "thread_sort_index"))
        assert_true(number(arguments, "sort_index") == number(event, "tid"));
    else
        assert_true((!strcmp(name, "process_name") || !strcmp(name, "thread_name")) && string(arguments, "name")[0]);
}

/* What Chrome's Trace Event Format asks of complete events (X) and metadata (M), the only ones here; every process and
 * thread that has slices has a name, and has it once. */
static void check_format(const cJSON *trace)
{
    const char *unit = string(trace, "displayTimeUnit");
    assert_true(!strcmp(unit, "ns") || !strcmp(unit, "ms"));
    const cJSON *events = cJSON_GetObjectItemCaseSensitive(trace, "traceEvents"), *event;
    assert_true(cJSON_IsArray(events));
    static bool seen[8][8192];
    memset(seen, 0, sizeof seen);
    cJSON_ArrayForEach(event, events)
    {
        const int32_t pid = id_of(event, "pid"), tid = id_of(event, "tid");
        assert_true(string(event, "name")[0] && pid < 8 && tid < 8192 && pid != tid);
        if (!strcmp(string(event, "ph"), "M")) {
            check_metadata(event);
            continue;
        }
        assert_string_equal(string(event, "ph"), "X");
        assert_true(string(event, "cat")[0] && number(event, "ts") >= 0 && number(event, "dur") > 0);
        assert_true(cJSON_IsObject(cJSON_GetObjectItemCaseSensitive(event, "args")));
        if (seen[pid][tid])
            continue;
        seen[pid][tid] = true;
        assert_int_equal(count_named(events, "process_name", pid, 0), 1);
        assert_int_equal(count_named(events, "thread_name", pid, tid), 1);
        assert_int_equal(count_named(events, "thread_sort_index", pid, tid), 1);
    }
}

/* ---- What is in it ----------------------------------------------------------------------------------- */

/* Every tile once, with its numbers and as long as it took. */
static void check_tiles(const cJSON *events, const ekv_plan *plan, int32_t process)
{
    int64_t tiles = 0, merges = 0;
    const cJSON *event;
    cJSON_ArrayForEach(event, events)
    {
        if (!is_slice(event, process))
            continue;
        const cJSON *arguments = cJSON_GetObjectItemCaseSensitive(event, "args");
        merges += !strcmp(string(event, "cat"), "merge");
        if (strcmp(string(event, "cat"), "tile"))
            continue;
        const ekv_tile *tile = &plan->tiles[(int64_t)number(arguments, "tile")];
        const double tokens = tile->kv_end - tile->kv_begin;
        assert_true(number(arguments, "request") == tile->request && number(arguments, "head") == tile->head &&
                    number(arguments, "heads") == tile->head_count && number(arguments, "split") == tile->split &&
                    number(arguments, "tokens") == tokens);
        assert_true(number(event, "dur") > (tokens + 1) / 1e3 - 1e-6 &&
                    number(event, "dur") < (tokens + 1) / 1e3 + 1e-6);
        tiles++;
    }
    assert_int_equal(tiles, plan->num_tiles);
    assert_int_equal(merges, plan->num_merges * (plan->heads - 1));
}

typedef struct slice {
    double tid, start, stop; /* ns */
} slice;

static int by_track(const void *a, const void *b)
{
    const slice *x = a, *y = b;
    const double difference = x->tid != y->tid ? x->tid - y->tid : x->start - y->start;
    return (difference > 0) - (difference < 0);
}

/* The slices of a track, idle ones included, cover the whole time without overlap, and every SM has a track. */
static void check_tracks(const cJSON *events, int32_t process)
{
    static slice slices[4096];
    int32_t count = 0, tracks = 0;
    double end = 0;
    const cJSON *event;
    cJSON_ArrayForEach(event, events)
    {
        if (!is_slice(event, process))
            continue;
        slices[count++] = (slice){ number(event, "tid"), number(event, "ts") * 1e3,
                                   (number(event, "ts") + number(event, "dur")) * 1e3 };
        end = end > slices[count - 1].stop ? end : slices[count - 1].stop;
    }
    qsort(slices, (size_t)count, sizeof *slices, by_track);
    for (int32_t i = 0; i < count; i++) {
        const bool first = !i || slices[i].tid != slices[i - 1].tid;
        const bool last = i + 1 == count || slices[i].tid != slices[i + 1].tid;
        const double expected = first ? 0 : slices[i - 1].stop;
        assert_true(slices[i].start > expected - 1e-3 && slices[i].start < expected + 1e-3);
        assert_true(!last || (slices[i].stop > end - 1e-3 && slices[i].stop < end + 1e-3));
        tracks += first;
    }
    assert_true(tracks >= (SMS - 1) * CTAS_PER_SM + 1);
}

static void test_trace(void **state)
{
    static const char *const planners[] = { "even", "flashinfer-tensor-core", "fa3" };
    ekv_context *context;
    cli_timeline timeline = { 0 };
    ekv_plan *plans[3];
    (void)state;
    assert_int_equal(ekv_context_create(NULL, &context), EKV_OK);
    for (int32_t p = 0; p < 3; p++) {
        plans[p] = make_plan(context, planners[p]);
        ekv_cuda_timeline recorded = make_stamps(plans[p]);
        assert_true(plans[p]->num_merges > 0);
        cli_timeline_add(&timeline, plans[p], 0, &recorded);
        free(recorded.stamps);
    }
    cJSON *trace = write_and_parse(&timeline);
    const cJSON *events = cJSON_GetObjectItemCaseSensitive(trace, "traceEvents");
    check_format(trace);
    for (int32_t p = 0; p < 3; p++) {
        check_tiles(events, plans[p], p);
        check_tracks(events, p);
        ekv_plan_free(plans[p]);
    }
    cJSON_Delete(trace);
    cli_timeline_free(&timeline);
    ekv_context_free(context);
}

static void test_no_decode_at_all(void **state)
{
    (void)state;
    const cli_timeline timeline = { 0 };
    cJSON *trace = write_and_parse(&timeline);
    check_format(trace);
    cJSON_Delete(trace);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_trace), cmocka_unit_test(test_no_decode_at_all) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
