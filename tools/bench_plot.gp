# SPDX-License-Identifier: Apache-2.0
# Draws the CSV of `evenkv bench`: time against batch size, a panel a distribution, a line a planner, the plain read
# as a line.  Run by `evenkv bench --plot`, which has this file inside, and by scripts/plot-bench.  Variables:
#   csv         the file
#   out         FILE.svg or FILE.png
#   dists       distributions, blanks between; one of them may be `file`, all the lines of a file
#   planners    planners, blanks between
#   thresholds  BATCH:LABEL, blanks between; may be ""
#   note        a line under the panels; may be ""

set datafile separator comma
set datafile missing NaN
columns = words(dists) < 2 ? 1 : words(dists) == 2 || words(dists) == 4 ? 2 : 3
rows = (words(dists) + columns - 1) / columns
size_x = 60 + 330 * columns
size_y = 110 + 250 * rows
if (out[strlen(out) - 3:] eq ".png") {
    set terminal pngcairo size 2 * size_x, 2 * size_y font "sans,20" linewidth 2 background "white"
} else {
    set terminal svg size size_x, size_y font "sans-serif,11" linewidth 1 background "white"
}
set output out

# Colours of Okabe and Ito, which the colour-blind tell apart; points tell lines apart in grey.
array color[9] = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8B4513", "#999999", "#882255"]
array point[9] = [7, 5, 9, 13, 4, 6, 8, 12, 2]

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
stats csv using 10 name "TIME" nooutput skip 1
stats csv using (column(10) * column(14)) name "READ" nooutput skip 1
low = (TIME_min < READ_min ? TIME_min : READ_min) * 0.8
high = TIME_max * 1.3
stats csv using (strcol(2)[:4] eq "file" ? NaN : column(3)) name "BATCH" nooutput skip 1

head = 34.0 / size_y
foot = (note eq "" ? 8.0 : 24.0) / size_y
key_height = 44.0 / size_y
set multiplot
panel_w = 1.0 / columns
panel_h = (1.0 - head - foot - key_height) / rows
unset key
do for [i = 1:words(dists)] {
    dist = word(dists, i)
    col = (i - 1) % columns
    row = (i - 1) / columns
    left = col * panel_w + 62.0 / size_x
    right = (col + 1) * panel_w - 12.0 / size_x
    top = 1.0 - head - key_height - row * panel_h - 22.0 / size_y
    bottom = 1.0 - head - key_height - (row + 1) * panel_h + 40.0 / size_y
    set lmargin at screen left
    set rmargin at screen right
    set tmargin at screen top
    set bmargin at screen bottom
    set title (is_file(dist) ? "batches of the file" : dist) offset 0, -0.5
    set ylabel (col == 0 ? "time, us" : "") offset 1, 0
    set logscale y
    set yrange [low:high]
    unset arrow
    unset label
    if (is_file(dist)) {
        unset logscale x
        set xrange [0.5:*]
        set xtics 1
        set xlabel "line of the file" offset 0, 0.5
    } else {
        set logscale x 2
        set xrange [BATCH_min / 1.15:BATCH_max * 1.15]
        set xtics 4
        set xlabel "requests" offset 0, 0.5
        do for [t = 1:words(thresholds)] {
            mark = word(thresholds, t)
            colon = strstrt(mark, ":")
            at = real(mark[:colon - 1])
            set arrow from first at, graph 0 to first at, graph 1 nohead lc rgb "#808080" dt 3 lw 1
            set label mark[colon + 1:] at first at, graph 0.99 offset 0.4, 0 rotate by -90 left \
                font ",8" textcolor rgb "#606060"
        }
    }
    plot for [p = 1:words(planners)] csv using (x_of(word(planners, p), dist)):10 skip 1 with linespoints \
             lc rgb color[(p - 1) % 9 + 1] pt point[(p - 1) % 9 + 1] ps 0.55 lw (word(planners, p)[:4] eq "even" ? 2.2 : 1.3), \
         csv using (plain_x(dist)):(column(10) * column(14)) skip 1 smooth unique with lines \
             lc rgb "black" dt 2 lw 1.6
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
set key at screen 0.5, 1.0 - 8.0 / size_y center top maxrows 2 horizontal width 1 samplen 2.5
set lmargin at screen 0
set rmargin at screen 1
set bmargin at screen 0
set tmargin at screen 1
set xrange [0:1]
set yrange [0:1]
if (note ne "") {
    set label note at screen 0.5, 10.0 / size_y center font ",9" textcolor rgb "#404040"
}
plot for [p = 1:words(planners)] NaN with linespoints lc rgb color[(p - 1) % 9 + 1] pt point[(p - 1) % 9 + 1] \
         ps 0.8 lw (word(planners, p)[:4] eq "even" ? 2.2 : 1.3) title word(planners, p), \
     NaN with lines lc rgb "black" dt 2 lw 1.6 title "plain read"
unset multiplot
set output
