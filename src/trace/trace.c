/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/trace.h"

#include "base/context.h"
#include "base/number.h"
#include "base/status.h"
#include "trace/trace_rows.h"

#include <inttypes.h>
#include <string.h>

struct ekv_trace {
    ekv_lines lines;
    ekv_trace_format format;
    ekv_csv_layout layout;
    ekv_line first; /* a first line that is a row already; size 0: none is left */
    int64_t rows;   /* read so far, bad ones included */
    bool started;   /* first_ns is set */
    int64_t first_ns, last_ns;
};

static const char *const format_names[] = {
    [EKV_TRACE_AUTO] = "auto",
    [EKV_TRACE_AZURE] = "azure",
    [EKV_TRACE_MOONCAKE] = "mooncake",
    [EKV_TRACE_BURSTGPT] = "burstgpt",
};
enum { NUM_FORMATS = sizeof format_names / sizeof format_names[0] };

const char *ekv_trace_format_name(int32_t index)
{
    return index >= 0 && index < NUM_FORMATS ? format_names[index] : NULL;
}

ekv_status ekv_trace_format_find(const char *name, ekv_trace_format *format)
{
    for (int32_t i = 0; i < NUM_FORMATS; i++)
        if (!strcmp(name, format_names[i])) {
            *format = (ekv_trace_format)i;
            return EKV_OK;
        }
    char quoted[EKV_QUOTE_SIZE];
    return ekv_fail(EKV_ERROR_NOT_FOUND, "no trace format '%s'; there are auto, azure, mooncake and burstgpt",
                    ekv_quote(name, strlen(name), quoted));
}

ekv_trace_format ekv_trace_format_get(const ekv_trace *trace)
{
    return trace->format;
}

/* Puts file, line and row before the text of an error, and after it what a line without an end suggests. */
static ekv_status fail_at(const ekv_trace *trace, ekv_status status, const ekv_line *line)
{
    char row[32] = "";
    if (trace->rows)
        snprintf(row, sizeof row, " (row %" PRId64 ")", trace->rows);
    return ekv_fail(status, "%s, line %" PRId64 "%s: %s%s", trace->lines.name, trace->lines.line, row, ekv_last_error(),
                    line->cut ? "; the file ends within this line, so it seems to be cut short" : "");
}

static ekv_status detect(ekv_line line, ekv_trace_format *format)
{
    if (line.size && *line.text == '{')
        *format = EKV_TRACE_MOONCAKE;
    else if (ekv_csv_header_matches(line, ekv_azure_columns))
        *format = EKV_TRACE_AZURE;
    else if (ekv_csv_header_matches(line, ekv_burstgpt_columns))
        *format = EKV_TRACE_BURSTGPT;
    else {
        char quoted[EKV_QUOTE_SIZE];
        return ekv_fail(EKV_ERROR_PARSE,
                        "'%s' is neither the header of an Azure or BurstGPT CSV nor a row of Mooncake JSON lines",
                        ekv_quote(line.text, line.size, quoted));
    }
    return EKV_OK;
}

/* The next line that is not blank, trimmed. */
static ekv_status next_line(ekv_trace *trace, ekv_line *line, bool *end)
{
    ekv_status status;
    do {
        if ((status = ekv_lines_next(&trace->lines, line, end)) || *end)
            return status;
        *line = ekv_line_trim(*line);
    } while (!line->size);
    return EKV_OK;
}

static ekv_status read_beginning(ekv_trace *trace, ekv_trace_format format)
{
    ekv_line line;
    bool end;
    ekv_status status = next_line(trace, &line, &end);
    if (status)
        return status;
    if (end)
        return ekv_fail(EKV_ERROR_PARSE, "%s is empty", trace->lines.name);
    if (format == EKV_TRACE_AUTO && (status = detect(line, &format)))
        return fail_at(trace, status, &line);
    trace->format = format;
    if (format == EKV_TRACE_MOONCAKE)
        trace->first = line; /* stays where it is until the next line is read */
    else if ((status = ekv_csv_read_header(line, format == EKV_TRACE_AZURE ? ekv_azure_columns : ekv_burstgpt_columns,
                                           &trace->layout)))
        return fail_at(trace, status, &line);
    return EKV_OK;
}

static ekv_status create(ekv_context *context, const char *name, ekv_trace **trace)
{
    ekv_trace *created = ekv_alloc(context, sizeof *created);
    if (!created)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory to read %s", name);
    *created = (ekv_trace){ .format = EKV_TRACE_AUTO };
    *trace = created;
    return EKV_OK;
}

/* With lines open: reads the beginning and gives the trace, or frees it. */
static ekv_status finish(ekv_trace *created, ekv_trace_format format, ekv_trace **trace)
{
    ekv_status status = read_beginning(created, format);
    if (status)
        ekv_trace_free(created);
    else
        *trace = created;
    return status;
}

ekv_status ekv_trace_open(ekv_context *context, const char *path, ekv_trace_format format, ekv_trace **trace)
{
    ekv_trace *created = NULL;
    ekv_status status = create(context, path, &created);
    if (status)
        return status;
    if ((status = ekv_lines_open(context, path, &created->lines))) {
        ekv_release(context, created);
        return status;
    }
    return finish(created, format, trace);
}

ekv_status ekv_trace_open_file(ekv_context *context, FILE *file, const char *name, ekv_trace_format format,
                               ekv_trace **trace)
{
    ekv_trace *created = NULL;
    ekv_status status = create(context, name, &created);
    if (status)
        return status;
    ekv_lines_attach(context, file, name, &created->lines);
    return finish(created, format, trace);
}

void ekv_trace_free(ekv_trace *trace)
{
    if (!trace)
        return;
    ekv_lines_close(&trace->lines);
    ekv_release(trace->lines.context, trace);
}

static ekv_status read_row(const ekv_trace *trace, ekv_line line, ekv_raw_row *row)
{
    ekv_status status = EKV_OK;
    switch (trace->format) {
    case EKV_TRACE_AUTO: break; /* never: read_beginning has replaced it */
    case EKV_TRACE_AZURE: status = ekv_azure_read_row(line, &trace->layout, row); break;
    case EKV_TRACE_MOONCAKE: status = ekv_mooncake_read_row(line, row); break;
    case EKV_TRACE_BURSTGPT: status = ekv_burstgpt_read_row(line, &trace->layout, row); break;
    }
    if (!status && trace->started && row->time_ns < trace->last_ns)
        return ekv_fail(EKV_ERROR_PARSE, "the time goes back by %g s; rows must be sorted by arrival",
                        (double)(trace->last_ns - row->time_ns) / 1e9);
    return status;
}

ekv_status ekv_trace_next(ekv_trace *trace, ekv_trace_row *row, bool *end)
{
    ekv_line line = trace->first;
    trace->first.size = 0;
    if (!line.size) {
        bool file_ended;
        ekv_status status = next_line(trace, &line, &file_ended);
        if (status)
            return status;
        if (file_ended && !trace->rows)
            return ekv_fail(EKV_ERROR_PARSE, "%s has a header but no rows", trace->lines.name);
        if (file_ended) {
            *end = true;
            return EKV_OK;
        }
    }
    trace->rows++;
    ekv_raw_row raw = { 0, 0, 0 };
    ekv_status status = read_row(trace, line, &raw);
    if (status)
        return fail_at(trace, status, &line);
    if (!trace->started)
        trace->first_ns = raw.time_ns;
    trace->started = true;
    trace->last_ns = raw.time_ns;
    *row = (ekv_trace_row){ .row = trace->rows,
                            .arrival = (double)(raw.time_ns - trace->first_ns) / 1e9,
                            .input_tokens = raw.input_tokens,
                            .output_tokens = raw.output_tokens };
    *end = false;
    return EKV_OK;
}
