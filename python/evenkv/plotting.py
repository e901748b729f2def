# SPDX-License-Identifier: Apache-2.0
"""Timelines through matplotlib, the optional extra `plot`."""

import numpy as np


def plot_timeline(simulation, axes=None, *, title=None):
    """Draws when and where each tile ran: time from left to right, a row for each slot of each SM, a colour for each
    request, so that the request everybody waits for is the one that sticks out.

    simulation: of evenkv.simulate(..., events=True).
    axes: matplotlib axes to draw on; None: new ones.

    Returns the axes."""
    events = simulation.events
    if events is None:
        raise ValueError("the simulation has no events; evenkv.simulate(..., events=True) keeps them")
    import matplotlib.pyplot as plt

    if axes is None:
        axes = plt.subplots(figsize=(10, 5), layout="constrained")[1]
    rows = events["sm"] * simulation.slots_per_sm + events["slot"]
    colours = plt.get_cmap("tab20")(np.asarray(events["request"]) % 20)
    axes.barh(rows, events["stop_us"] - events["start_us"], left=events["start_us"], height=1.0, color=colours,
              linewidth=0)
    axes.axvline(simulation.time_us, color="black", linewidth=0.8)
    axes.set_xlabel("us")
    axes.set_ylabel(f"slot ({simulation.num_sms} SMs x {simulation.slots_per_sm})")
    axes.set_xlim(0, simulation.time_us * 1.02)
    axes.set_ylim(-0.5, simulation.num_sms * simulation.slots_per_sm - 0.5)
    axes.set_title(title or f"{simulation.planner} on {simulation.device}: {simulation.time_us:.0f} us, SMs busy "
                   f"{simulation.sm_busy_share:.0%}")
    return axes
