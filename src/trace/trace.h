/* SPDX-License-Identifier: Apache-2.0
 * Reads request traces row by row; memory does not grow with the file. */
#ifndef EVENKV_TRACE_TRACE_H
#define EVENKV_TRACE_TRACE_H

#include "evenkv/evenkv.h"

#include <stdbool.h>
#include <stdio.h>

typedef enum ekv_trace_format {
    EKV_TRACE_AUTO = 0,     /* by the first line */
    EKV_TRACE_AZURE = 1,    /* CSV with TIMESTAMP (date and time), ContextTokens, GeneratedTokens */
    EKV_TRACE_MOONCAKE = 2, /* JSON lines with timestamp (ms), input_length, output_length */
    EKV_TRACE_BURSTGPT = 3  /* CSV with Timestamp (s), Request tokens, Response tokens */
} ekv_trace_format;

/* "auto", "azure", "mooncake", "burstgpt"; NULL past the last.  Static storage. */
const char *ekv_trace_format_name(int32_t index);
/* Errors: NOT_FOUND. */
ekv_status ekv_trace_format_find(const char *name, ekv_trace_format *format);

/* One request of a trace. */
typedef struct ekv_trace_row {
    int64_t row;           /* from 1; the header of a CSV is not counted */
    double arrival;        /* seconds since the first row, never less than that of the row before */
    int32_t input_tokens;  /* >= 0 */
    int32_t output_tokens; /* >= 0 */
} ekv_trace_row;

typedef struct ekv_trace ekv_trace;

/* Opens a trace and reads its first line.  The context must outlive the trace.
 * Errors: NOT_FOUND (no such file), IO (with the system's reason), PARSE (empty, compressed, binary, of no
 * known format, a header without a column that is needed), OUT_OF_MEMORY. */
ekv_status ekv_trace_open(ekv_context *context, const char *path, ekv_trace_format format, ekv_trace **trace);
/* The same for an open file, which stays the caller's and must outlive the trace.  name: what to call it in
 * errors; borrowed for as long. */
ekv_status ekv_trace_open_file(ekv_context *context, FILE *file, const char *name, ekv_trace_format format,
                               ekv_trace **trace);
void ekv_trace_free(ekv_trace *trace);

/* The format that was found or forced. */
ekv_trace_format ekv_trace_format_get(const ekv_trace *trace);

/* Reads the next row into *row and clears *end, or sets *end where there is none (then *row is untouched).
 * Errors: IO, OUT_OF_MEMORY, PARSE with file, line, row and the offending value: a column missing or too many,
 * not a number, negative, over 2^31-1, a time that goes back, a last row that is cut short, a file without any
 * row.  The call after a bad row reads the one behind it. */
ekv_status ekv_trace_next(ekv_trace *trace, ekv_trace_row *row, bool *end);

#endif
