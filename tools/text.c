/* SPDX-License-Identifier: Apache-2.0
 * Text in memory, and files read into it. */
#include "base/number.h"
#include "base/status.h"
#include "cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WIDTH = 100 };

void *cli_realloc(void *pointer, size_t size)
{
    void *memory = realloc(pointer, size ? size : 1);
    if (!memory) {
        fprintf(stderr, "evenkv: no memory for %zu bytes (%s)\n", size, ekv_status_name(EKV_ERROR_OUT_OF_MEMORY));
        exit(CLI_FAILURE);
    }
    return memory;
}

void *cli_alloc(size_t size)
{
    return cli_realloc(NULL, size);
}

static void reserve(cli_text *text, size_t size)
{
    if (text->capacity - text->size >= size)
        return;
    text->capacity = 2 * text->capacity + size;
    text->data = cli_realloc(text->data, text->capacity);
}

void cli_append(cli_text *text, const char *bytes, size_t size)
{
    if (!size)
        return;
    reserve(text, size);
    memcpy(text->data + text->size, bytes, size);
    text->size += size;
}

static void print_list(cli_text *text, const char *format, va_list arguments)
{
    va_list copy;
    va_copy(copy, arguments);
    const int size = vsnprintf(NULL, 0, format, copy);
    va_end(copy);
    if (size <= 0)
        return;
    reserve(text, (size_t)size + 1);
    vsnprintf(text->data + text->size, (size_t)size + 1, format, arguments);
    text->size += (size_t)size;
}

void cli_print(cli_text *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print_list(text, format, arguments);
    va_end(arguments);
}

void cli_wrap(cli_text *text, int indent, const char *paragraph)
{
    int column = 0;
    for (const char *word = paragraph; *word;) {
        const int size = (int)strcspn(word, " ");
        if (column && column + 1 + size > WIDTH) {
            cli_print(text, "\n");
            column = 0;
        }
        cli_print(text, "%*s%.*s", column ? 1 : indent, "", size, word);
        column += (column ? 1 : indent) + size;
        word += size;
        word += strspn(word, " ");
    }
    cli_print(text, "\n");
}

void cli_wrapf(cli_text *text, int indent, const char *format, ...)
{
    cli_text line = { 0 };
    va_list arguments;
    va_start(arguments, format);
    print_list(&line, format, arguments);
    va_end(arguments);
    cli_append(&line, "", 1);
    cli_wrap(text, indent, line.data);
    free(line.data);
}

void cli_progress(const char *text)
{
    if (!isatty(STDERR_FILENO))
        return;
    fprintf(stderr, "\r\033[K%s", text ? text : "");
    fflush(stderr);
}

ekv_status cli_fail_file(ekv_status status, const char *what, const char *path)
{
    char shown[EKV_PATH_SIZE];
    return ekv_fail(status, "cannot %s '%s': %s", what, ekv_show_path(path, shown), strerror(errno));
}

static ekv_status read_all(FILE *file, const char *path, size_t limit, char **text, size_t *size)
{
    char *bytes = cli_alloc(limit + 1);
    char shown[EKV_PATH_SIZE];
    const size_t count = fread(bytes, 1, limit + 1, file);
    ekv_status status = EKV_OK;
    if (ferror(file))
        status = cli_fail_file(EKV_ERROR_IO, "read", path);
    else if (count > limit)
        status = ekv_fail(EKV_ERROR_PARSE, "'%s' is larger than %zu bytes", ekv_show_path(path, shown), limit);
    if (status) {
        free(bytes);
        return status;
    }
    bytes[count] = 0;
    *text = bytes;
    *size = count;
    return EKV_OK;
}

ekv_status cli_read_file(const char *path, size_t limit, char **text, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return cli_fail_file(errno == ENOENT ? EKV_ERROR_NOT_FOUND : EKV_ERROR_IO, "open", path);
    ekv_status status = read_all(file, path, limit, text, size);
    fclose(file);
    return status;
}
