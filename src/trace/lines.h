/* SPDX-License-Identifier: Apache-2.0
 * A text file line by line; what is no text is refused with the reason. */
#ifndef EVENKV_TRACE_LINES_H
#define EVENKV_TRACE_LINES_H

#include "base/number.h"

#include <stdbool.h>
#include <stdio.h>

typedef struct ekv_lines {
    ekv_context *context;
    FILE *file;
    bool owns_file;
    char name[EKV_PATH_SIZE]; /* what to call the file in errors */
    char *buffer;             /* unread bytes are buffer[begin, end) */
    size_t capacity, begin, end;
    bool file_ended;
    int64_t line; /* number of the line given last, from 1 */
} ekv_lines;

typedef struct ekv_line {
    const char *text; /* [size], valid until the next call.  What follows is the line end (LF or CRLF), or 0 at the end
                       * of the file: one more byte can always be read */
    size_t size;
    bool cut; /* the file ends without a line end after this line */
} ekv_line;

/* Errors: NOT_FOUND, IO. */
ekv_status ekv_lines_open(ekv_context *context, const char *path, ekv_lines *lines);
/* For an open file, which stays the caller's. */
void ekv_lines_attach(ekv_context *context, FILE *file, const char *name, ekv_lines *lines);
void ekv_lines_close(ekv_lines *lines);

/* The next line, or *end where there is none.
 * Errors: IO, OUT_OF_MEMORY, PARSE (compressed, UTF-16, a control character, a line longer than 64 MiB). */
ekv_status ekv_lines_next(ekv_lines *lines, ekv_line *line, bool *end);

/* Without the blanks and tabs at both ends. */
ekv_line ekv_line_trim(ekv_line line);

#endif
