# SPDX-License-Identifier: Apache-2.0
# Draws the CSV of `evenkv bench`: time against batch size, a panel a distribution, a line a planner, the plain read
# as a line.  Run by `evenkv bench --plot`, which has this file inside, and by scripts/plot-bench.  Variables:
#   csv         the file
#   out         FILE.svg or FILE.png
#   dists       distributions, blanks between; one of them may be `file`, all the lines of a file
#   planners    planners, blanks between
#   thresholds  BATCH:LABEL, blanks between, marked by vertical lines; may be ""
#   note        a line under the panels; may be ""

set datafile separator comma
set datafile missing NaN
columns = words(dists) < 2 ? 1 : words(dists) == 2 || words(dists) == 4 ? 2 : 3
rows = (words(dists) + columns - 1) / columns
size_x = columns == 1 ? 620 : 370 * columns
size_y = 120 + 300 * rows
if (out[strlen(out) - 3:] eq ".png") {
    set terminal pngcairo size 2 * size_x, 2 * size_y font "sans,11" fontscale 2 linewidth 2 pointscale 2 background "white"
} else {
    set terminal svg size size_x, size_y font "sans-serif,11" linewidth 1 background "white"
}
set output out

# Colours of Okabe and Ito, which the colour-blind tell apart; points tell lines apart in grey.  A planner looks the same
# in every figure.
known = "even even-invariant fa3 fa3-nosplit flashinfer-tensor-core flashinfer-cuda-core flashinfer-batch-attention " \
      . "flashinfer-xqa none fa3-vllm"
array color[11] = ["#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#444444", "#CC79A7", "#8B6F47", "#999999", \
                   "#6A5ACD", "#882255"]
array point[11] = [7, 6, 5, 4, 9, 11, 13, 2, 1, 3, 8]
number(planner) = sum [k = 1:words(known)] (word(known, k) eq planner ? k : 0)
look(planner) = number(planner) > 0 ? number(planner) : 11
width(planner) = planner eq "even" ? 2.6 : 1.3

is_file(dist) = dist eq "file"
has_dist(dist) = is_file(dist) ? strcol(2)[:4] eq "file" : strcol(2) eq dist
place(dist) = is_file(dist) ? real(strcol(2)[5:]) : column(3)
x_of(planner, dist) = strcol(1) eq planner && has_dist(dist) ? place(dist) : NaN
plain_x(dist) = has_dist(dist) ? place(dist) : NaN

set xtics nomirror out
set ytics nomirror out
set border 3
set grid ytics lc rgb "#E0E0E0" lw 1
set format y "%.0f"

# One range for all panels, so that they compare.
stats csv skip 1 using 10 name "TIME" nooutput
stats csv skip 1 using (column(10) * column(14)) name "READ" nooutput
low = (TIME_min < READ_min ? TIME_min : READ_min) * 0.8
high = TIME_max * 1.3
stats csv skip 1 using (strcol(2)[:4] eq "file" ? NaN : column(3)) name "BATCH" nooutput

head = 76.0 / size_y # the key
foot = (note eq "" ? 4.0 : 26.0) / size_y
set multiplot
panel_w = 1.0 / columns
panel_h = (1.0 - head - foot) / rows
unset key
do for [i = 1:words(dists)] {
    dist = word(dists, i)
    col = (i - 1) % columns
    row = (i - 1) / columns
    left = col * panel_w + 70.0 / size_x
    right = (col + 1) * panel_w - 12.0 / size_x
    top = 1.0 - head - row * panel_h - 44.0 / size_y
    bottom = 1.0 - head - (row + 1) * panel_h + 46.0 / size_y
    set lmargin at screen left
    set rmargin at screen right
    set tmargin at screen top
    set bmargin at screen bottom
    set title (is_file(dist) ? "batches of the file" : dist) font ",13" offset 0, 0.1
    set ylabel (col == 0 ? "time, us" : "") offset 2.2, 0
    set logscale y
    set yrange [low:high]
    set ytics (1, 2, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000, 2000, 3000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)
    unset arrow
    unset label
    if (is_file(dist)) {
        unset logscale x
        set xrange [0.5:*]
        set xtics 1
        set xlabel "line of the file" offset 0, 0.8
    } else {
        set logscale x 2
        set xrange [BATCH_min / 1.15:BATCH_max * 1.15]
        set xtics 4
        set xlabel "requests" offset 0, 0.8
        do for [t = 1:words(thresholds)] {
            mark = word(thresholds, t)
            colon = strstrt(mark, ":")
            at = real(mark[:colon - 1])
            set arrow from first at, graph 0 to first at, graph 1 nohead lc rgb "#808080" dt 3 lw 1
            set label mark[colon + 1:] at first at, graph 1 offset 0, 0.5 center font ",8" noenhanced \
                textcolor rgb "#606060"
        }
    }
    # The last planner is drawn on top.
    plot csv skip 1 using (plain_x(dist)):(column(10) * column(14)) smooth unique with lines lc rgb "black" dt 2 lw 1.6, \
         for [p = 1:words(planners)] name = word(planners, p) csv skip 1 using (x_of(name, dist)):10 \
             with linespoints lc rgb color[look(name)] pt point[look(name)] ps 0.55 lw width(name)
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
set key at screen 0.5, 1.0 - 6.0 / size_y center top maxrows 3 vertical Left reverse width 2 samplen 2.5
set lmargin at screen 0
set rmargin at screen 1
set bmargin at screen 0
set tmargin at screen 1
set xrange [0:1]
set yrange [0:1]
if (note ne "") {
    set label note at screen 0.5, 10.0 / size_y center font ",9" textcolor rgb "#404040"
}
plot for [p = 1:words(planners)] name = word(planners, p) NaN with linespoints lc rgb color[look(name)] \
         pt point[look(name)] ps 0.8 lw width(name) title name, \
     NaN with lines lc rgb "black" dt 2 lw 1.6 title "plain read"
unset multiplot
set output
