/* SPDX-License-Identifier: Apache-2.0
 * Any bytes, read as a trace of each format, replayed, and read as a text of lengths: rows and steps keep their
 * contract, and what is refused is named. */
#include "fuzz.h"

#include "trace/replay.h"

#include <string.h>

static void check_failure(ekv_status status)
{
    FUZZ_CHECK(status == EKV_ERROR_PARSE);
    FUZZ_CHECK(!strncmp(ekv_last_error(), "fuzz", 4));
}

/* Reads on after bad rows, to the end. */
static void read_rows(ekv_context *context, ekv_trace *trace)
{
    (void)context;
    ekv_trace_row row, before = { 0, 0, 0, 0 };
    for (bool end = false; !end;) {
        ekv_status status = ekv_trace_next(trace, &row, &end);
        if (status) {
            check_failure(status);
            if (!strstr(ekv_last_error(), "(row ")) /* the file itself is at fault, not a row */
                return;
        } else if (!end) {
            FUZZ_CHECK(row.row > before.row && row.arrival >= before.arrival && row.arrival <= 1e10);
            FUZZ_CHECK(row.input_tokens >= 0 && row.output_tokens >= 0);
            before = row;
        }
    }
}

static void replay_rows(ekv_context *context, ekv_trace *trace)
{
    enum { MOST_STEPS = 1000 }; /* a request may have 2^31 */
    ekv_replay_options options = EKV_REPLAY_OPTIONS_INIT;
    options.max_batch = 8;
    options.token_budget = 100000;
    ekv_replay *replay = NULL;
    FUZZ_CHECK(!ekv_replay_create(context, &options, ekv_replay_source_trace, trace, &replay));
    ekv_replay_step step = { 0 };
    double time = 0;
    bool end = false;
    for (int i = 0; i < MOST_STEPS && !end; i++) {
        ekv_status status = ekv_replay_next(replay, &step, &end);
        if (status || end)
            break;
        FUZZ_CHECK(step.index == i && step.start >= time);
        FUZZ_CHECK(step.batch_size >= 1 && step.batch_size <= 8 && step.total_tokens <= 100000);
        time = step.start + step.seconds;
        int64_t total = 0;
        for (int32_t b = 0; b < step.batch_size; b++) {
            FUZZ_CHECK(step.kv_len[b] >= 1);
            total += step.kv_len[b];
        }
        FUZZ_CHECK(total == step.total_tokens);
    }
    ekv_replay_free(replay);
}

/* fmemopen takes no empty buffer on every system. */
static FILE *open_bytes(const uint8_t *data, size_t size)
{
    FILE *file = size ? fmemopen((void *)(uintptr_t)data, size, "rb") : fopen("/dev/null", "rb");
    FUZZ_CHECK(file);
    return file;
}

static void read_trace(ekv_context *context, const uint8_t *data, size_t size, ekv_trace_format format,
                       void (*use)(ekv_context *context, ekv_trace *trace))
{
    FILE *file = open_bytes(data, size);
    ekv_trace *trace = NULL;
    ekv_status status = ekv_trace_open_file(context, file, "fuzz", format, &trace);
    if (status)
        check_failure(status);
    else
        use(context, trace);
    ekv_trace_free(trace);
    fclose(file);
}

static void read_lengths(ekv_context *context, const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    FUZZ_CHECK(text);
    memcpy(text, data, size);
    text[size] = 0;
    ekv_lengths_list *list = NULL;
    ekv_status status = ekv_lengths_from_text(context, text, &list);
    FUZZ_CHECK(status == EKV_OK || status == EKV_ERROR_PARSE);
    FUZZ_CHECK((status == EKV_OK) == (list != NULL));
    if (list) {
        const ekv_lengths *batch = &list->batches[0];
        FUZZ_CHECK(list->count == 1 && batch->batch_size >= 1);
        int64_t total = 0;
        for (int32_t b = 0; b < batch->batch_size; b++) {
            FUZZ_CHECK(batch->kv_len[b] >= 0);
            total += batch->kv_len[b];
        }
        FUZZ_CHECK(total == batch->total_tokens);
    }
    ekv_lengths_free(list);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static ekv_context *context;
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.num_threads = 1;
    if (!context)
        FUZZ_CHECK(!ekv_context_create(&options, &context));
    read_trace(context, data, size, EKV_TRACE_AUTO, replay_rows);
    for (int32_t format = 0; ekv_trace_format_name(format); format++)
        read_trace(context, data, size, (ekv_trace_format)format, read_rows);
    read_lengths(context, data, size);
    return 0;
}
