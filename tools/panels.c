/* SPDX-License-Identifier: Apache-2.0 */
#include "panels.h"

#include "base/embedded.h"
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const ekv_embedded panels_program[]; /* one entry */

static bool has_word(const cli_text *list, const char *word)
{
    const size_t size = strlen(word);
    for (size_t i = 0; i + size <= list->size; i++)
        if (!memcmp(list->data + i, word, size) && (i == 0 || list->data[i - 1] == ' ') &&
            (i + size == list->size || list->data[i + size] == ' '))
            return true;
    return false;
}

static void add_word(cli_text *list, const char *word)
{
    if (!has_word(list, word))
        cli_print(list, "%s%s", list->size ? " " : "", word);
}

void cli_panels_add(cli_panels *panels, const char *panel, const char *series, double x, double y)
{
    add_word(&panels->panels, panel);
    add_word(&panels->series, series);
    cli_print(&panels->rows, "%s,%s,%.9g,%.9g\n", panel, series, x, y);
}

void cli_panels_mark(cli_panels *panels, const char *panel, double x, const char *label)
{
    cli_print(&panels->marks, "%s%s:%.9g:%s", panels->marks.size ? " " : "", panel, x, label);
}

static void print_list(cli_text *program, const char *name, const cli_text *list)
{
    bench_print_string(program, name, list->data ? list->data : "", list->size);
}

static void print_text(cli_text *program, const char *name, const char *text)
{
    bench_print_string(program, name, text ? text : "", text ? strlen(text) : 0);
}

ekv_status cli_panels_plot(const cli_panels *panels, const char *path)
{
    cli_text program = { 0 }, out = { 0 };
    cli_print(&program, "$rows << END_OF_ROWS\n%.*sEND_OF_ROWS\n", (int)panels->rows.size, panels->rows.data);
    cli_print(&out, "%s%s", path[0] == '/' ? "" : "./", path);
    print_list(&program, "out", &out);
    print_list(&program, "panels", &panels->panels);
    print_list(&program, "series", &panels->series);
    print_list(&program, "marks", &panels->marks);
    print_text(&program, "x_label", panels->x_label);
    print_text(&program, "y_label", panels->y_label);
    print_text(&program, "note", panels->note);
    cli_print(&program, "log_x = %d\nlog_y = %d\ndiagonal = %d\nonly_points = %d\n%s", !panels->linear_x,
              !panels->linear_y, panels->diagonal, panels->points, panels_program[0].text);
    ekv_status status = bench_run_gnuplot(&program);
    free(out.data);
    free(program.data);
    return status;
}

void cli_panels_free(cli_panels *panels)
{
    free(panels->rows.data);
    free(panels->panels.data);
    free(panels->series.data);
    free(panels->marks.data);
    *panels = (cli_panels){ 0 };
}
