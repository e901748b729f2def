/* SPDX-License-Identifier: Apache-2.0
 * What a trace format has to supply to the reader in trace.c. */
#ifndef EVENKV_TRACE_TRACE_ROWS_H
#define EVENKV_TRACE_TRACE_ROWS_H

#include "trace/lines.h"
#include "trace/trace.h"

enum { EKV_TRACE_FIELDS = 3 }; /* time, input tokens, output tokens */

/* Where a CSV has its fields. */
typedef struct ekv_csv_layout {
    int32_t columns;                  /* of the header */
    int32_t column[EKV_TRACE_FIELDS]; /* of each field */
} ekv_csv_layout;

typedef struct ekv_raw_row {
    int64_t time_ns; /* since an origin of the format's own, >= 0 */
    int32_t input_tokens, output_tokens;
} ekv_raw_row;

/* The latest time that is accepted, in seconds since a format's origin: in ns it fits int64.  For times since
 * 1970 it is the year 2255. */
#define EKV_TRACE_LAST_SECOND INT64_C(9000000000)

/* Names of the columns of a CSV format, in the order of the fields. */
extern const char *const ekv_azure_columns[EKV_TRACE_FIELDS];
extern const char *const ekv_burstgpt_columns[EKV_TRACE_FIELDS];

/* True if the header has one of the token columns. */
bool ekv_csv_header_matches(ekv_line header, const char *const columns[EKV_TRACE_FIELDS]);
/* Errors of all below: PARSE with the offending value, to which the caller adds file and line. */
ekv_status ekv_csv_read_header(ekv_line header, const char *const columns[EKV_TRACE_FIELDS], ekv_csv_layout *layout);
ekv_status ekv_azure_read_row(ekv_line line, const ekv_csv_layout *layout, ekv_raw_row *row);
ekv_status ekv_burstgpt_read_row(ekv_line line, const ekv_csv_layout *layout, ekv_raw_row *row);
ekv_status ekv_mooncake_read_row(ekv_line line, ekv_raw_row *row);

#endif
