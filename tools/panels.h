/* SPDX-License-Identifier: Apache-2.0
 * Figures of several panels to one scale, drawn by gnuplot: the program is panels.gp, which is embedded. */
#ifndef EVENKV_TOOLS_PANELS_H
#define EVENKV_TOOLS_PANELS_H

#include "cli.h"

/* Start with {0}.  Names of panels and series have neither blanks nor commas. */
typedef struct cli_panels {
    cli_text rows;   /* panel,series,x,y */
    cli_text panels; /* names, blanks between, in order */
    cli_text series; /* the same */
    cli_text marks;  /* panel:x:label, blanks between: dotted vertical lines; _ stands for a blank in a label */
    const char *x_label, *y_label;
    const char *note; /* a line at the foot */
    bool linear_x, linear_y;
    bool diagonal; /* draw y = x */
    bool points;   /* only points, but for the series "fit" */
} cli_panels;

/* Adds a point, and its panel and series to the lists where they are new. */
void cli_panels_add(cli_panels *panels, const char *panel, const char *series, double x, double y);
void cli_panels_mark(cli_panels *panels, const char *panel, double x, const char *label);
/* path: FILE.svg or FILE.png.  Errors: those of bench_plot. */
ekv_status cli_panels_plot(const cli_panels *panels, const char *path);
void cli_panels_free(cli_panels *panels);

#endif
