/* SPDX-License-Identifier: Apache-2.0 */
#include "sim_view.h"

#include "base/portable.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ROWS = 16, WIDE = 88, HALF = 46 };

/* Busy time of a group of SMs in a column of time, as a share of all that it could be. */
typedef struct panel {
    int32_t rows, columns, sms_per_row;
    double us_per_column;
    double *busy;  /* [rows][columns], slot microseconds */
    bool *longest; /* [rows][columns], the longest request runs there */
} panel;

static void add_event(panel *p, const ekv_timeline_event *event, bool longest)
{
    const int32_t row = event->sm / p->sms_per_row;
    const int32_t first = (int32_t)(event->start_us / p->us_per_column);
    for (int32_t c = first; c < p->columns && c * p->us_per_column < event->stop_us; c++) {
        const double begin = event->start_us > c * p->us_per_column ? event->start_us : c * p->us_per_column;
        const double end = event->stop_us < (c + 1) * p->us_per_column ? event->stop_us : (c + 1) * p->us_per_column;
        p->busy[row * p->columns + c] += end - begin;
        if (longest)
            p->longest[row * p->columns + c] = true;
    }
}

static panel make_panel(const cli_sim_view *view, int32_t columns, double us)
{
    panel p = { .columns = columns, .us_per_column = us > 0 ? us / columns : 1 };
    p.sms_per_row = (int32_t)ekv_ceil_div(view->info.num_sms, MAX_ROWS);
    p.rows = (int32_t)ekv_ceil_div(view->info.num_sms, p.sms_per_row);
    const size_t cells = (size_t)p.rows * (size_t)columns;
    p.busy = cli_alloc(cells * sizeof *p.busy);
    p.longest = cli_alloc(cells * sizeof *p.longest);
    memset(p.longest, 0, cells * sizeof *p.longest);
    for (size_t i = 0; i < cells; i++)
        p.busy[i] = 0;
    for (int64_t i = 0; i < view->info.num_events; i++) {
        ekv_timeline_event event;
        if (!ekv_timeline_event_get(view->timeline, i, &event))
            add_event(&p, &event, view->plan->tiles[event.tile].request == view->longest);
    }
    return p;
}

static void print_row(cli_text *text, const cli_sim_view *view, const panel *p, int32_t row)
{
    static const char shades[] = ".:-=+*%";
    const int32_t first = row * p->sms_per_row;
    const int32_t sms = (int32_t)ekv_min(p->sms_per_row, view->info.num_sms - first);
    cli_print(text, "%5d |", first);
    for (int32_t c = 0; c < p->columns; c++) {
        const double share = p->busy[row * p->columns + c] / (p->us_per_column * sms * view->info.slots_per_sm);
        const int32_t shade = (int32_t)ekv_min((int64_t)(share * 7), 6);
        const char mark = share < 1e-3 ? ' ' : p->longest[row * p->columns + c] ? '#' : shades[shade];
        cli_print(text, "%c", mark);
    }
    cli_print(text, "|");
}

/* width: 0 for the last of a line. */
static void print_title(cli_text *text, const cli_sim_view *view, int32_t width)
{
    char title[96];
    snprintf(title, sizeof title, "%s, %.1f us", view->plan->planner->name, view->info.time_us);
    cli_print(text, "%5s  %-*s%s", "SM", width, title, width ? " " : "");
}

static void print_axis(cli_text *text, const panel *p, bool last)
{
    char end[32];
    snprintf(end, sizeof end, "%.0f us", p->us_per_column * p->columns);
    cli_print(text, "%5s  0%*s%s", "", p->columns - 1, end, last ? "" : " ");
}

static void print_panels(cli_text *text, const cli_sim_view *views, int32_t count, int32_t columns, double us)
{
    panel panels[2];
    int32_t rows = 0;
    for (int32_t i = 0; i < count; i++) {
        panels[i] = make_panel(&views[i], columns, us);
        rows = (int32_t)ekv_max(rows, panels[i].rows);
    }
    cli_print(text, "\n");
    for (int32_t i = 0; i < count; i++)
        print_title(text, &views[i], i + 1 < count ? columns : 0);
    cli_print(text, "\n");
    for (int32_t row = 0; row < rows; row++) {
        for (int32_t i = 0; i < count; i++)
            print_row(text, &views[i], &panels[i], row);
        cli_print(text, "\n");
    }
    for (int32_t i = 0; i < count; i++) {
        print_axis(text, &panels[i], i + 1 == count);
        free(panels[i].busy);
        free(panels[i].longest);
    }
    cli_print(text, "\n");
}

void cli_sim_picture(cli_text *text, const cli_sim_view *views, int32_t count)
{
    double us = 0;
    for (int32_t i = 0; i < count; i++)
        us = views[i].info.time_us > us ? views[i].info.time_us : us;
    if (count == 2)
        print_panels(text, views, 2, HALF, us);
    else
        for (int32_t i = 0; i < count; i++)
            print_panels(text, &views[i], 1, WIDE, us);
    cli_print(text, "  # the longest request runs there; . to %% share of the slots with a tile; blank: idle\n");
}
