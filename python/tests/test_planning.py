# SPDX-License-Identifier: Apache-2.0
"""evenkv.plan, explain and the lists, against the command, which has tests of its own."""

import dataclasses
import json
import subprocess

import numpy as np
import pytest

import evenkv
from evenkv import _command

SKEW = [419430] + [826] * 127


def command(*arguments):
    result = subprocess.run([_command.path(), *arguments, "--json"], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


@pytest.mark.parametrize("planner", list(evenkv.planners()))
def test_a_plan_is_that_of_the_command(planner):
    plan = evenkv.plan(SKEW, planner=planner, tiles=True)
    expected = command("plan", "--planner", planner, "--tiles", "--kv-lens", ",".join(map(str, SKEW)))
    for name, value in expected.items():
        found = getattr(plan, name)
        if name == "tiles":
            assert len(found["request"]) == plan.num_tiles == len(value)
            for key in set(value[0]) & set(found):
                values = [-1 if row[key] is None else row[key] for row in value]  # no slot
                assert values == found[key].tolist(), key
        elif name == "grid" or name == "warnings":
            assert list(found) == value
        elif name == "workspace_bytes":
            assert found > 0
        elif isinstance(value, float):
            assert found == pytest.approx(value)
        else:
            assert np.array_equal(found, value), name


def test_options_reach_the_planner():
    assert evenkv.plan(SKEW, ctas_per_sm=1).ctas == 132
    assert evenkv.plan(SKEW, ctas_per_sm=1, sm_margin=32).ctas == 100
    assert evenkv.plan(SKEW, planner="fa3", dispatch="grid").dispatch == "grid"
    assert evenkv.plan([5], device="this").device == "cpu"
    text = "\n".join(line for line in command_text("devices", "--device", "h20").splitlines())
    assert evenkv.plan(SKEW, device=text).ctas == evenkv.plan(SKEW, device="h20").ctas


def command_text(*arguments):
    return subprocess.run([_command.path(), *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arguments, error, text", [
    (dict(kv_lens=[]), ValueError, "kv_lens"),
    (dict(kv_lens=[1.5]), ValueError, "float64"),
    (dict(kv_lens=[-1]), ValueError, "-1"),
    (dict(kv_lens=[5], planner="odd"), LookupError, "odd"),
    (dict(kv_lens=[5], device="h999"), LookupError, "h999"),
    (dict(kv_lens=[5], dtype="int4"), LookupError, "int4"),
    (dict(kv_lens=[5], speed=11), ValueError, "speed is no option"),
    (dict(kv_lens=[5], dispatch="lottery"), LookupError, "lottery"),
    (dict(kv_lens=[5], sm_margin=132), ValueError, "132"),
    (dict(kv_lens=[5], planner="flashinfer-cuda-core", head_dim=64), NotImplementedError, "resident_ctas"),
])  # fmt: skip
def test_refusals(arguments, error, text):
    with pytest.raises(error, match=text):
        evenkv.plan(**arguments)


def test_explain():
    explanation = evenkv.explain(SKEW)
    assert explanation.tail["request"] == 0 and explanation.tail["stands_out"]
    assert [row["planner"] for row in explanation.planners] == list(evenkv.planners())
    assert explanation.sglang["flashinfer_planner"] == "flashinfer-tensor-core"
    assert "BatchPrefillWithPagedKVCacheKernel" in str(explanation)
    with pytest.raises(LookupError, match="h999"):
        evenkv.explain(SKEW, device="h999")


def test_explain_takes_long_batches():
    assert evenkv.explain(np.full(30_000, 100_000)).batch == 30_000  # more than a command line holds


@pytest.mark.parametrize("planner", ["even", "fa3", "flashinfer-tensor-core"])
def test_a_simulation_is_that_of_the_command(planner):
    simulation = evenkv.simulate(SKEW, planner=planner, events=True)
    expected = command("simulate", "--planner", planner, "--kv-lens", ",".join(map(str, SKEW)))
    shared = set(expected) & {field.name for field in dataclasses.fields(simulation)}
    assert len(shared) >= 20
    for name in shared:
        value = expected[name]
        found = getattr(simulation, name)
        assert found == (pytest.approx(value) if isinstance(value, float) else value), name
    events = simulation.events
    assert len(events["tile"]) == simulation.num_tiles == len(set(events["tile"].tolist()))
    assert (events["stop_us"] >= events["start_us"]).all() and events["sm"].max() < simulation.num_sms
    assert sum(events["kv_end"] - events["kv_begin"]) % sum(SKEW) == 0
    assert evenkv.simulate(SKEW, planner=planner) == dataclasses.replace(simulation, events=None)


def test_a_simulation_shows_the_tail():
    simulation = evenkv.simulate(SKEW, planner="flashinfer-tensor-core")
    assert simulation.tail_request == 0 and simulation.tail_cause == "long tile"
    assert simulation.time_us > 5 * evenkv.simulate(SKEW).time_us
    assert evenkv.simulate(SKEW, system="fa3").system == "fa3" in evenkv.systems()
    with pytest.raises(LookupError, match="odd"):
        evenkv.simulate(SKEW, system="odd")
    with pytest.raises(ValueError, match="events=True"):
        evenkv.plot_timeline(simulation)


def test_plot_timeline(tmp_path):
    simulation = evenkv.simulate([5000, 100, 0, 300], events=True)
    axes = evenkv.plot_timeline(simulation, title="four requests")
    assert axes.get_title() == "four requests" and len(axes.patches) == simulation.num_tiles
    axes.figure.savefig(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 5000
    assert evenkv.plot_timeline(simulation, axes) is axes


def test_lists():
    assert [device["name"] for device in evenkv.devices()] == [
        row["name"] for row in map(json.loads, command_text("devices", "--json").splitlines())
        if not row["this_machine"]]
    assert all(summary for summary in evenkv.planners().values())
    assert evenkv.__version__ == command_text("--version").split()[1]
