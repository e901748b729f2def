# SPDX-License-Identifier: Apache-2.0
# Panels to one scale.  Run by the tool (panels.c), which has this file inside.  Variables:
#   $rows        panel,series,x,y
#   out          FILE.svg or FILE.png
#   panels       names, blanks between
#   series       names, blanks between; "fit" is a line, "even" is thick
#   marks        panel:x:label, blanks between; _ stands for a blank in a label
#   x_label, y_label, note
#   log_x, log_y, diagonal (y = x), only_points

# A macro, as a plot style cannot be an expression.
style_of = only_points ? "points" : "linespoints"
set datafile separator comma
set datafile missing NaN
count = words(panels)
columns = count < 2 ? 1 : count == 2 || count == 4 ? 2 : 3
rows = (count + columns - 1) / columns
size_x = columns == 1 ? 640 : columns == 2 ? 820 : 1110
size_y = 90 + 330 * rows
if (out[strlen(out) - 3:] eq ".png") {
    set terminal pngcairo size 2 * size_x, 2 * size_y font "sans,11" fontscale 2 linewidth 2 pointscale 2 background "white"
} else {
    set terminal svg size size_x, size_y font "sans-serif,11" linewidth 1 background "white"
}
set output out

# Colours of Okabe and Ito, which the colour-blind tell apart; points tell lines apart in grey.
array color[10] = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#444444", "#8B6F47", "#6A5ACD", \
                   "#999999"]
array point[10] = [5, 7, 9, 13, 11, 4, 6, 8, 2, 1]
# Planners look the same in every figure.
known = "fa3 even-invariant flashinfer-tensor-core flashinfer-batch-attention even fa3-nosplit flashinfer-cuda-core " \
      . "flashinfer-xqa fa3-vllm none"
place(name) = sum [k = 1:words(known)] (word(known, k) eq name ? k : 0)
look(s) = place(word(series, s)) > 0 ? place(word(series, s)) : (s - 1) % 10 + 1
width(s) = word(series, s) eq "even" ? 2.6 : 1.4
x_of(panel, name) = strcol(1) eq panel && strcol(2) eq name ? column(3) : NaN
blanks(label) = strstrt(label, "_") ? blanks(label[:strstrt(label, "_") - 1] . " " . label[strstrt(label, "_") + 1:]) : label

stats $rows using 3 name "X" nooutput
stats $rows using 4 name "Y" nooutput
low = log_y ? Y_min * 0.8 : 0
high = log_y ? Y_max * 1.35 : Y_max * 1.08
x_low = log_x ? X_min / 1.15 : 0
x_high = log_x ? X_max * 1.15 : X_max * 1.04

set xtics nomirror out
set ytics nomirror out
set border 3
set grid ytics lc rgb "#E0E0E0" lw 1
set format x "%.0f"
set format y "%.0f"
head = 52.0 / size_y # the key
foot = (note eq "" ? 6.0 : 28.0) / size_y
set multiplot
panel_w = 1.0 / columns
panel_h = (1.0 - head - foot) / rows
unset key
do for [i = 1:count] {
    panel = word(panels, i)
    col = (i - 1) % columns
    row = (i - 1) / columns
    set lmargin at screen col * panel_w + 72.0 / size_x
    set rmargin at screen (col + 1) * panel_w - 16.0 / size_x
    set tmargin at screen 1.0 - head - row * panel_h - 34.0 / size_y
    set bmargin at screen 1.0 - head - (row + 1) * panel_h + 64.0 / size_y
    set title panel font ",13" offset 0, 0.1 noenhanced
    set ylabel (col == 0 ? y_label : "") offset 1.6, 0
    set xlabel x_label offset 0, 0.6
    unset logscale
    if (log_x) { set logscale x (X_max / X_min > 5000 ? 10 : 2) }
    if (log_y) { set logscale y }
    set xrange [x_low:x_high]
    set yrange [low:high]
    set xtics autofreq
    set ytics autofreq
    if (log_x && X_max < 10000) { set xtics (1, 4, 16, 64, 256, 1024, 4096) }
    if (log_x && X_max >= 10000 && X_min >= 1000) {
        set xtics ("64K" 65536, "128K" 131072, "256K" 262144, "512K" 524288, "1M" 1048576, "2M" 2097152)
    }
    if (log_x && diagonal) { set xtics (10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000) }
    if (!log_x) { set xtics X_max / 4 < 1 ? 1 : 10 ** floor(log10(X_max / 2)) * (X_max / 10 ** floor(log10(X_max / 2)) > 10 ? 5 : 2) }
    if (log_y) {
        set ytics (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)
    }
    unset arrow
    unset label
    do for [m = 1:words(marks)] {
        mark = word(marks, m)
        colon = strstrt(mark, ":")
        rest = mark[colon + 1:]
        second = strstrt(rest, ":")
        if (mark[:colon - 1] eq panel) {
            at = real(rest[:second - 1])
            set arrow from first at, graph 0 to first at, graph 1 nohead lc rgb "#606060" dt 3 lw 1.4
            # To the left of the line in the right half of the panel, else to the right.
            half = log_x ? sqrt(x_low * x_high) : x_high / 2
            if (at > half) {
                set label blanks(rest[second + 1:]) at first at, graph 1 offset -0.5, -0.7 right font ",9" noenhanced textcolor rgb "#404040"
            } else {
                set label blanks(rest[second + 1:]) at first at, graph 1 offset 0.5, -0.7 left font ",9" noenhanced textcolor rgb "#404040"
            }
        }
    }
    if (diagonal) {
        set arrow from first (x_low > low ? x_low : low), first (x_low > low ? x_low : low) \
            to first (x_high < high ? x_high : high), first (x_high < high ? x_high : high) nohead lc rgb "black" lw 1
    }
    plot for [s = 1:words(series)] $rows using (word(series, s) eq "fit" ? NaN : x_of(panel, word(series, s))):4 \
             with @style_of lc rgb color[look(s)] pt point[look(s)] ps (only_points ? 0.4 : 0.55) lw width(s), \
         $rows using (x_of(panel, "fit")):4 with lines lc rgb "black" dt 2 lw 1.4
}

# The key, above the panels.
unset arrow
unset label
unset title
unset xlabel
unset ylabel
unset border
unset tics
unset logscale
unset grid
set key at screen 0.5, 1.0 - 8.0 / size_y center top maxrows 2 horizontal Left reverse width 2 samplen 2.5
set lmargin at screen 0
set rmargin at screen 1
set bmargin at screen 0
set tmargin at screen 1
set xrange [0:1]
set yrange [0:1]
if (note ne "") {
    set label note at screen 0.5, 12.0 / size_y center font ",9" textcolor rgb "#404040" noenhanced
}
named(s) = word(series, s) eq "fit" ? "" : word(series, s)
if (strstrt(" " . series . " ", " fit ")) {
    plot for [s = 1:words(series)] NaN with @style_of lc rgb color[look(s)] pt point[look(s)] ps 0.8 lw width(s) \
             title named(s) noenhanced, NaN with lines lc rgb "black" dt 2 lw 1.4 title "least squares"
} else {
    plot for [s = 1:words(series)] NaN with @style_of lc rgb color[look(s)] pt point[look(s)] ps 0.8 lw width(s) \
        title named(s) noenhanced
}
unset multiplot
set output
