# SPDX-License-Identifier: Apache-2.0
"""evenkv.plan, explain and the lists, against the command, which has tests of its own."""

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
    assert evenkv.explain(np.full(100_000, 100_000)).batch == 100_000


def test_lists():
    assert [device["name"] for device in evenkv.devices()] == [
        row["name"] for row in map(json.loads, command_text("devices", "--json").splitlines())
        if not row["this_machine"]]
    assert all(summary for summary in evenkv.planners().values())
    assert evenkv.__version__ == command_text("--version").split()[1]
