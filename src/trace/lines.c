/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/lines.h"

#include "base/status.h"
#include "trace/grow.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

enum { FIRST_CAPACITY = 1 << 16, LONGEST_LINE = 64 << 20 };

static ekv_status fail_errno(const char *name, int error)
{
    char reason[128];
    if (strerror_r(error, reason, sizeof reason))
        snprintf(reason, sizeof reason, "error %d", error);
    return ekv_fail(error == ENOENT ? EKV_ERROR_NOT_FOUND : EKV_ERROR_IO, "%s: %s", name, reason);
}

ekv_status ekv_lines_open(ekv_context *context, const char *path, ekv_lines *lines)
{
    char shown[EKV_PATH_SIZE];
    FILE *file = fopen(path, "rb");
    if (!file)
        return fail_errno(ekv_show_path(path, shown), errno);
    ekv_lines_attach(context, file, path, lines);
    lines->owns_file = true;
    return EKV_OK;
}

void ekv_lines_attach(ekv_context *context, FILE *file, const char *name, ekv_lines *lines)
{
    *lines = (ekv_lines){ .context = context, .file = file };
    ekv_show_path(name, lines->name);
}

void ekv_lines_close(ekv_lines *lines)
{
    ekv_release(lines->context, lines->buffer);
    if (lines->owns_file)
        fclose(lines->file);
}

/* Moves the unread bytes to the front, makes room and reads more. */
static ekv_status fill(ekv_lines *lines)
{
    size_t unread = lines->end - lines->begin;
    if (lines->begin)
        memmove(lines->buffer, lines->buffer + lines->begin, unread);
    lines->begin = 0;
    lines->end = unread;
    if (unread + 1 >= lines->capacity) { /* one byte stays for the terminator */
        if (lines->capacity >= LONGEST_LINE)
            return ekv_fail(EKV_ERROR_PARSE, "%s, line %" PRId64 ": longer than %d bytes", lines->name, lines->line + 1,
                            LONGEST_LINE);
        size_t capacity = lines->capacity ? lines->capacity * 2 : FIRST_CAPACITY;
        char *buffer = ekv_grow(lines->context, lines->buffer, unread, capacity);
        if (!buffer)
            return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "%s, line %" PRId64 ": no memory for %zu bytes", lines->name,
                            lines->line + 1, capacity);
        lines->buffer = buffer;
        lines->capacity = capacity;
    }
    size_t got = fread(lines->buffer + unread, 1, lines->capacity - unread - 1, lines->file);
    if (!got && ferror(lines->file))
        return fail_errno(lines->name, errno);
    lines->file_ended = got == 0;
    lines->end += got;
    lines->buffer[lines->end] = 0;
    return EKV_OK;
}

/* How files begin that people pass by mistake. */
static ekv_status check_beginning(ekv_lines *lines)
{
    static const struct {
        const char *bytes;
        size_t size;
        const char *what, *remedy;
    } kinds[] = {
        { "\x1f\x8b", 2, "compressed with gzip", "gunzip it first" },
        { "\x28\xb5\x2f\xfd", 4, "compressed with zstd", "run zstd -d on it first" },
        { "\xfd"
          "7zXZ",
          5, "compressed with xz", "run xz -d on it first" },
        { "BZh", 3, "compressed with bzip2", "run bzip2 -d on it first" },
        { "PK\x03\x04", 4, "a zip archive", "unzip it first" },
        { "PAR1", 4, "a Parquet file", "convert it to CSV first" },
        { "\xff\xfe", 2, "UTF-16 text", "convert it to UTF-8 first" },
        { "\xfe\xff", 2, "UTF-16 text", "convert it to UTF-8 first" },
    };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (lines->end >= kinds[i].size && !memcmp(lines->buffer, kinds[i].bytes, kinds[i].size))
            return ekv_fail(EKV_ERROR_PARSE, "%s is %s; %s", lines->name, kinds[i].what, kinds[i].remedy);
    if (lines->end >= 3 && !memcmp(lines->buffer, "\xef\xbb\xbf", 3)) /* UTF-8 byte order mark */
        lines->begin = 3;
    return EKV_OK;
}

static ekv_status check_text(const ekv_lines *lines, const ekv_line *line)
{
    for (size_t i = 0; i < line->size; i++) {
        unsigned char byte = (unsigned char)line->text[i];
        if ((byte < 0x20 && byte != '\t') || byte == 0x7F)
            return ekv_fail(EKV_ERROR_PARSE, "%s, line %" PRId64 ": holds the byte 0x%02x; this is no text file",
                            lines->name, lines->line, byte);
    }
    return EKV_OK;
}

ekv_status ekv_lines_next(ekv_lines *lines, ekv_line *line, bool *end)
{
    const char *newline = NULL;
    size_t searched = 0;
    for (;;) {
        size_t unread = lines->end - lines->begin;
        if (unread > searched)
            newline = memchr(lines->buffer + lines->begin + searched, '\n', unread - searched);
        if (newline || lines->file_ended)
            break;
        searched = unread;
        const bool first = !lines->buffer;
        ekv_status status = fill(lines);
        if (status || (first && (status = check_beginning(lines))))
            return status;
    }
    *end = !newline && lines->begin == lines->end;
    if (*end)
        return EKV_OK;
    line->text = lines->buffer + lines->begin;
    line->size = (size_t)((newline ? newline : lines->buffer + lines->end) - line->text);
    line->cut = !newline;
    lines->begin += line->size + (newline != NULL);
    lines->line++;
    if (line->size && line->text[line->size - 1] == '\r')
        line->size--;
    return check_text(lines, line);
}

ekv_line ekv_line_trim(ekv_line line)
{
    while (line.size && (*line.text == ' ' || *line.text == '\t')) {
        line.text++;
        line.size--;
    }
    while (line.size && (line.text[line.size - 1] == ' ' || line.text[line.size - 1] == '\t'))
        line.size--;
    return line;
}
