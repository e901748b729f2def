#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the imbalance of a decode batch: who waits for whom, under which planner.

    examples/imbalance.py [FILE.png]

Cells as in a notebook; needs matplotlib (pip install .[plot])."""

# %% A batch: one request of 128 holds 80 % of half a million KV tokens.
import sys

import matplotlib

if len(sys.argv) > 1:
    matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import evenkv

kv_lens = np.full(128, 826)
kv_lens[0] = 419_430

# %% What a serving engine runs for it, and who waits for whom.
print(evenkv.explain(kv_lens))

# %% The same batch under four planners: how long, how busy, and why the end drags on.
planners = ["flashinfer-tensor-core", "fa3-nosplit", "fa3", "even"]
simulations = [evenkv.simulate(kv_lens, planner=name, events=True) for name in planners]
for s in simulations:
    print(f"{s.planner:24} {s.time_us:7.0f} us  imbalance {s.imbalance:6.2f}  SMs busy {s.sm_busy_share:4.0%}  "
          f"{s.tail_cause or '-'}")

# %% When each tile ran: a colour for each request, a row for each slot of an SM.
figure, axes = plt.subplots(2, 2, figsize=(14, 9), layout="constrained")
for s, ax in zip(simulations, axes.flat):
    evenkv.plot_timeline(s, ax)

# %% How the tokens lie on the slots.
figure2, ax = plt.subplots(figsize=(10, 4), layout="constrained")
for s in simulations:
    slots = s.events["sm"] * s.slots_per_sm + s.events["slot"]
    tokens = np.bincount(slots, s.events["kv_end"] - s.events["kv_begin"], s.num_sms * s.slots_per_sm)
    ax.plot(np.linspace(0, 1, len(tokens)), np.sort(tokens) / tokens.mean(), label=s.planner)
ax.set_yscale("symlog", linthresh=1)
ax.set_xlabel("slots, from the idlest to the busiest")
ax.set_ylabel("KV tokens / mean")
ax.legend()

# %% In a script: to files; in a notebook: shown by it.
if len(sys.argv) > 1:
    figure.savefig(sys.argv[1], dpi=80)
    figure2.savefig(sys.argv[1].replace(".png", "-slots.png"), dpi=80)
else:
    plt.show()
