/* SPDX-License-Identifier: Apache-2.0 */
#include "sim_view.h"

#include "base/portable.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Pixels. */
enum { LEFT = 64, RIGHT = 16, TOP = 62, BOTTOM = 66, PLOT_WIDTH = 520, PLOT_HEIGHT = 396, GAP = 56 };

/* Okabe and Ito's colours, which the colour-blind tell apart; they differ in brightness too, for print. */
static const char longest_color[] = "#D55E00";
static const char *const colors[] = { "#56B4E9", "#0072B2" }; /* other requests, in turn */
static const char overhead_color[] = "#BBBBBB";

typedef struct scale {
    double us;    /* of the whole axis */
    double left;  /* of the panel */
    double slots; /* of the panel */
} scale;

static double x_of(const scale *s, double us)
{
    return s->left + us / s->us * PLOT_WIDTH;
}

static double y_of(const scale *s, double slot)
{
    return TOP + slot / s->slots * PLOT_HEIGHT;
}

/* Distance of ticks: 1, 2 or 5 times a power of ten, at most ten of them. */
static double tick_of(double range)
{
    double tick = pow(10, floor(log10(range / 10)));
    while (range / tick > 10)
        tick *= range / tick > 20 && range / tick <= 50 ? 5 : 2;
    return tick;
}

static void print_axes(cli_text *svg, const cli_sim_view *view, const scale *s, int32_t index)
{
    const ekv_timeline_info *info = &view->info;
    cli_print(svg, "<text x=\"%.1f\" y=\"22\" font-size=\"15\" font-weight=\"bold\">%s%s</text>\n", s->left,
              view->plan->planner->name, info->projected ? " (projected)" : "");
    cli_print(svg, "<text x=\"%.1f\" y=\"42\" font-size=\"12\">%.1f us, SMs busy %.1f %%, tail %.1f us%s%s</text>\n",
              s->left, info->time_us, 100 * info->sm_busy_share, info->tail_us, info->tail_cause ? ": " : "",
              cli_tail_name(info->tail_cause));
    const double step = tick_of(s->us);
    for (double us = 0; us <= s->us * 1.0001; us += step)
        cli_print(svg,
                  "<path d=\"M%.1f %d v5\" stroke=\"black\"/><text x=\"%.1f\" y=\"%d\" font-size=\"11\" "
                  "text-anchor=\"middle\">%g</text>\n",
                  x_of(s, us), TOP + PLOT_HEIGHT, x_of(s, us), TOP + PLOT_HEIGHT + 18, us);
    cli_print(svg, "<text x=\"%.1f\" y=\"%d\" font-size=\"12\" text-anchor=\"middle\">time, us</text>\n",
              s->left + PLOT_WIDTH / 2.0, TOP + PLOT_HEIGHT + 34);
    const double sms = tick_of(info->num_sms);
    for (double sm = 0; sm <= info->num_sms; sm += ceil(sms))
        cli_print(svg,
                  "<path d=\"M%.1f %.1f h-5\" stroke=\"black\"/><text x=\"%.1f\" y=\"%.1f\" font-size=\"11\" "
                  "text-anchor=\"end\">%g</text>\n",
                  s->left, y_of(s, sm * info->slots_per_sm), s->left - 8, y_of(s, sm * info->slots_per_sm) + 4, sm);
    if (index == 0)
        cli_print(svg,
                  "<text transform=\"translate(%.1f %d) rotate(-90)\" font-size=\"12\" text-anchor=\"middle\">"
                  "SM</text>\n",
                  s->left - 42, TOP + PLOT_HEIGHT / 2);
}

static void print_bar(cli_text *svg, const scale *s, double start_us, double stop_us, const char *color)
{
    if (stop_us > start_us)
        cli_print(svg, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\"/>\n", x_of(s, start_us), TOP,
                  x_of(s, stop_us) - x_of(s, start_us), PLOT_HEIGHT, color);
}

/* A path of one colour holds all its rectangles, which keeps the file small.  color: -1 the longest request's. */
static void print_tiles(cli_text *svg, const cli_sim_view *view, const scale *s, int32_t color)
{
    cli_print(svg, "<path fill=\"%s\" d=\"", color < 0 ? longest_color : colors[color]);
    for (int64_t i = 0; i < view->info.num_events; i++) {
        ekv_timeline_event event;
        if (ekv_timeline_event_get(view->timeline, i, &event))
            continue;
        const int32_t request = view->plan->tiles[event.tile].request;
        if (color < 0 ? request != view->longest : request == view->longest || request % 2 != color)
            continue;
        const double slot = (double)event.sm * view->info.slots_per_sm + event.slot;
        const double left = x_of(s, event.start_us), right = x_of(s, event.stop_us);
        const double top = y_of(s, slot), height = y_of(s, slot + 1) - top;
        /* A thin line is left between tiles that are wide enough for it. */
        cli_print(svg, "M%.2f %.2fh%.2fv%.2fh%.2fz", left, top, fmax(right - left - 0.3, 0.15), height * 0.92,
                  -fmax(right - left - 0.3, 0.15));
    }
    cli_print(svg, "\"/>\n");
}

static void print_panel(cli_text *svg, const cli_sim_view *view, int32_t index, double us)
{
    const scale s = { us, LEFT + index * (double)(PLOT_WIDTH + GAP),
                      (double)view->info.num_sms * view->info.slots_per_sm };
    print_bar(svg, &s, 0, view->info.launch_us, overhead_color);
    print_bar(svg, &s, view->info.time_us - view->info.merge_us, view->info.time_us, overhead_color);
    for (int32_t color = 0; color < 2; color++)
        print_tiles(svg, view, &s, color);
    print_tiles(svg, view, &s, -1);
    cli_print(svg, "<path d=\"M%.1f %d v%d h%d\" stroke=\"black\" fill=\"none\"/>\n", s.left, TOP, PLOT_HEIGHT,
              PLOT_WIDTH);
    cli_print(svg, "<path d=\"M%.2f %d v%d\" stroke=\"black\" stroke-dasharray=\"4 3\" fill=\"none\"/>\n",
              x_of(&s, view->info.time_us), TOP, PLOT_HEIGHT);
    print_axes(svg, view, &s, index);
}

static void print_legend(cli_text *svg)
{
    const struct {
        const char *color, *text;
    } entries[] = { { longest_color, "longest request" },
                    { colors[0], "other requests" },
                    { colors[1], "(in turn)" },
                    { overhead_color, "launch, merge" } };
    double x = LEFT;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        cli_print(svg,
                  "<rect x=\"%.1f\" y=\"%d\" width=\"14\" height=\"10\" fill=\"%s\"/><text x=\"%.1f\" y=\"%d\" "
                  "font-size=\"11\">%s</text>\n",
                  x, TOP + PLOT_HEIGHT + 46, entries[i].color, x + 19, TOP + PLOT_HEIGHT + 55, entries[i].text);
        x += i == 1 ? 104 : i == 2 ? 88 : 120;
    }
}

void cli_sim_gantt(cli_text *svg, const cli_sim_view *views, int32_t count)
{
    double us = 0;
    for (int32_t i = 0; i < count; i++)
        us = fmax(us, views[i].info.time_us);
    us = us > 0 ? us * 1.02 : 1;
    const int32_t width = LEFT + RIGHT + count * PLOT_WIDTH + (count - 1) * GAP, height = TOP + PLOT_HEIGHT + BOTTOM;
    cli_print(svg,
              "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
              "font-family=\"sans-serif\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
              width, height, width, height);
    for (int32_t i = 0; i < count; i++)
        print_panel(svg, &views[i], i, us);
    print_legend(svg);
    cli_print(svg, "</svg>\n");
}
