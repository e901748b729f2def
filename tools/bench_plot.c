/* SPDX-License-Identifier: Apache-2.0
 * Runs gnuplot on the program of bench_plot.gp, which is embedded. */
#include "base/embedded.h"
#include "base/number.h"
#include "base/status.h"
#include "bench.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern const ekv_embedded bench_plot_program[]; /* one entry */

ekv_status bench_check_plot(const char *path)
{
    const char *ending = strrchr(path, '.');
    char quoted[EKV_QUOTE_SIZE];
    if (ending && (!strcmp(ending, ".svg") || !strcmp(ending, ".png")))
        return EKV_OK;
    return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "--plot '%s' ends neither in .svg nor in .png",
                    ekv_quote(path, strlen(path), quoted));
}

/* As gnuplot quotes it. */
void bench_print_string(cli_text *text, const char *name, const char *value, size_t size)
{
    cli_print(text, "%s = '", name);
    for (size_t i = 0; i < size; i++)
        cli_print(text, value[i] == '\'' ? "''" : "%c", value[i]);
    cli_print(text, "'\n");
}

/* The distinct values of a column, blanks between; lines of a file count as one. */
static void list_column(const cli_text *csv, int column, cli_text *list)
{
    const char *end = csv->data + csv->size;
    cli_print(list, " ");
    for (const char *line = memchr(csv->data, '\n', csv->size); line && line + 1 < end;
         line = memchr(line + 1, '\n', (size_t)(end - line - 1))) {
        const char *field = line + 1;
        for (int c = 0; c < column; c++)
            field += strcspn(field, ",") + 1;
        char value[64];
        snprintf(value, sizeof value, " %.*s ", (int)strcspn(field, ","), field);
        if (!strncmp(value, " file", 5))
            strcpy(value, " file ");
        cli_append(list, "", 1);
        list->size--;
        if (!strstr(list->data, value))
            cli_print(list, "%s", value + 1);
    }
}

/* data: a here-document, so that gnuplot needs no file but the one that it writes. */
static void print_program(const cli_text *csv, const char *path, cli_text *program)
{
    cli_text dists = { 0 }, planners = { 0 };
    list_column(csv, 1, &dists);
    list_column(csv, 0, &planners);
    cli_print(program, "$csv << END_OF_CSV\n%.*sEND_OF_CSV\ncsv = '$csv'\n", (int)csv->size, csv->data);
    cli_text out = { 0 }; /* gnuplot takes | at the beginning for a command to pipe to, and cannot quote ' there */
    cli_print(&out, "%s%s", path[0] == '/' ? "" : "./", path);
    bench_print_string(program, "out", out.data, out.size);
    bench_print_string(program, "dists", dists.data, dists.size);
    bench_print_string(program, "planners", planners.data, planners.size);
    cli_print(program, "thresholds = ''\nnote = ''\n%s", bench_plot_program[0].text);
    free(out.data);
    free(dists.data);
    free(planners.data);
}

static ekv_status feed(const cli_text *program, FILE *pipe)
{
    const bool written = fwrite(program->data, 1, program->size, pipe) == program->size;
    const int status = pclose(pipe);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        return ekv_fail(EKV_ERROR_NOT_FOUND, "--plot needs gnuplot, which is not installed");
    if (WIFSIGNALED(status))
        return ekv_fail(EKV_ERROR_IO, "gnuplot ended by signal %d", WTERMSIG(status));
    if (!written || status)
        return ekv_fail(EKV_ERROR_IO, "gnuplot failed with status %d", WEXITSTATUS(status));
    return EKV_OK;
}

ekv_status bench_run_gnuplot(const cli_text *program)
{
    FILE *pipe = popen("exec gnuplot - >/dev/null 2>&1", "w");
    return pipe ? feed(program, pipe) : ekv_fail(EKV_ERROR_SYSTEM, "cannot start gnuplot: %s", strerror(errno));
}

ekv_status bench_try_plot(const char *path)
{
    cli_text nothing = { 0 };
    cli_print(&nothing, "exit\n");
    ekv_status status = bench_run_gnuplot(&nothing);
    free(nothing.data);
    if (status)
        return status;
    const bool existed = !access(path, F_OK);
    FILE *file = fopen(path, "ab");
    if (!file || fclose(file))
        return cli_fail_file(EKV_ERROR_IO, "write to", path);
    if (!existed)
        remove(path);
    return EKV_OK;
}

ekv_status bench_plot(const cli_text *csv, const char *path)
{
    cli_text program = { 0 };
    print_program(csv, path, &program);
    ekv_status status = bench_run_gnuplot(&program);
    free(program.data);
    return status;
}
