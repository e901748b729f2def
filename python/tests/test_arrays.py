# SPDX-License-Identifier: Apache-2.0
"""evenkv.decode and merge_states on NumPy and DLPack arrays; and that none of it needs torch."""

import gc
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import evenkv
import reference

TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", range(12))
def test_decode_agrees_with_the_reference(seed, dtype):
    problem = reference.problem(seed, rounded=dtype)
    q, k, v = (x.astype(dtype) for x in (problem.q, problem.k, problem.v))
    expected, expected_lse = problem.attention()
    name = np.dtype(dtype).name
    planner = list(evenkv.planners())[seed % 10]
    if planner == "flashinfer-cuda-core":  # it knows the resident CTAs of a few shapes only
        planner = "even"
    out, lse = evenkv.decode(q, k, v, problem.table, problem.seq_lens, return_lse=True, planner=planner)
    assert out.dtype == q.dtype and reference.close(out, expected, name), f"seed {seed}"
    assert reference.close_lse(lse, expected_lse)
    again, lse2 = evenkv.decode(q, k, v, problem.csr, return_lse=True, lse_base="2")
    assert reference.close(again, expected, name) and reference.close_lse(lse2, expected_lse, base2=True)


def test_strided_views_and_layouts_are_taken_without_a_copy():
    problem = reference.problem(3)
    expected, _ = problem.attention()
    both = np.stack((problem.k, problem.v), axis=1)  # [pages, 2, page_size, heads, head_dim], as vLLM has it
    k, v = both[:, 0], both[:, 1]
    assert reference.close(evenkv.decode(problem.q, k, v, problem.table, problem.seq_lens), expected, "float32")
    k, v = (x.transpose(0, 2, 1, 3) for x in (problem.k, problem.v))
    out = evenkv.decode(problem.q, k, v, problem.table, problem.seq_lens, layout="HND")
    assert reference.close(out, expected, "float32")
    wide = np.full((*problem.q.shape[:2], problem.q.shape[2] + 8), 7, np.float32)
    view = wide[..., : problem.q.shape[2]]
    assert evenkv.decode(problem.q, problem.k, problem.v, problem.table, problem.seq_lens, out=view) is view
    assert reference.close(view, expected, "float32") and np.all(wide[..., problem.q.shape[2] :] == 7)


def test_scale_and_outputs_of_the_caller():
    problem = reference.problem(5)
    expected, expected_lse = problem.attention(0.3)
    out, lse = np.empty_like(problem.q), np.empty(problem.q.shape[:2], np.float32)
    returned = evenkv.decode(problem.q, problem.k, problem.v, problem.table, problem.seq_lens, scale=0.3, out=out,
                             lse=lse, return_lse=True)
    assert returned[0] is out and returned[1] is lse
    assert reference.close(out, expected, "float32") and reference.close_lse(lse, expected_lse)


def test_no_requests_and_no_tokens():
    cache = np.zeros((1, 16, 2, 64), np.float32)
    assert evenkv.decode(np.zeros((0, 2, 64), np.float32), cache, cache, np.zeros((0, 1), np.int32), []).shape == (
        0, 2, 64)
    out, lse = evenkv.decode(np.ones((3, 2, 64), np.float32), cache[:0], cache[:0], np.zeros((3, 0), np.int32),
                             [0, 0, 0], return_lse=True)
    assert np.all(out == 0) and np.all(lse == -np.inf)


class Foreign:
    """Speaks DLPack and nothing else."""

    def __init__(self, array):
        self.array = evenkv.dlpack(array)

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("dtype", TYPES)
def test_dlpack_in_and_out(dtype):
    problem = reference.problem(7, rounded=dtype)
    q, k, v = (x.astype(dtype) for x in (problem.q, problem.k, problem.v))
    expected, _ = problem.attention()
    out = np.empty_like(q)
    foreign = Foreign(out)
    k = np.asfortranarray(k.transpose(3, 2, 1, 0)).transpose(3, 2, 1, 0)  # strides travel
    result = evenkv.decode(Foreign(q), Foreign(k), Foreign(v), Foreign(problem.table), Foreign(problem.seq_lens),
                           out=foreign)
    assert result is foreign and reference.close(out, expected, np.dtype(dtype).name)
    gc.collect()
    from evenkv.dlpack import _exported
    assert not _exported  # every capsule has given its memory back


def test_dlpack_keeps_memory_alive():
    from evenkv.dlpack import asarray
    taken = asarray(evenkv.dlpack(np.arange(1000, dtype=np.float32) + 1), "x")
    junk = [np.zeros(1000, np.float32) for _ in range(50)]
    assert np.array_equal(taken, np.arange(1000, dtype=np.float32) + 1) and junk


def test_merge_states():
    draw = np.random.default_rng(0)
    parts = draw.standard_normal((3, 4, 5, 64)).astype(np.float32)
    lse = draw.standard_normal((3, 4, 5)).astype(np.float32)
    lse[1] = -np.inf
    lse[:, 2, 3] = -np.inf
    for base, exp, log in (("e", np.exp, np.log), ("2", np.exp2, np.log2)):
        merged, merged_lse = evenkv.merge_states(parts, lse, lse_base=base)
        weights = exp(lse.astype(np.float64))
        total = weights.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            expected = np.nan_to_num((weights[..., None] * parts).sum(0) / total[..., None])
            assert np.allclose(merged, expected, atol=1e-6) and np.allclose(merged_lse, log(total), atol=1e-6)


CACHE = np.zeros((2, 16, 2, 64), np.float32)
GOOD = dict(q=np.zeros((1, 4, 64), np.float32), k_cache=CACHE, v_cache=CACHE, page_table=[[0, 1]], seq_lens=[20])


@pytest.mark.parametrize("change, error, text", [
    (dict(q=np.zeros((1, 4), np.float32)), ValueError, "q has shape"),
    (dict(q=np.zeros((1, 4, 64), np.float64)), ValueError, "q is float64"),
    (dict(q=np.zeros((1, 3, 64), np.float32)), ValueError, "heads"),
    (dict(q=np.zeros((1, 4, 128), np.float32)[..., ::2]), ValueError, "contiguous"),
    (dict(k_cache=CACHE.astype(np.float16)), ValueError, "k_cache is float16"),
    (dict(v_cache=CACHE[:1]), ValueError, "v_cache has shape"),
    (dict(page_table=[[0, 2]]), ValueError, "page 1 of request 0 is 2"),
    (dict(page_table=[[0]]), ValueError, "needs 2 pages"),
    (dict(page_table=[[0.0, 1.0]]), ValueError, "page_table is float64"),
    (dict(page_table=([0, 3], [0, 1], [4]), seq_lens=None), ValueError, "indptr has 3"),
    (dict(page_table=([0, 2], [0, 1], [5])), ValueError, "last_page_len"),
    (dict(page_table=([0, 2], [0, 1], [4, 4])), ValueError, "last_page_len has 2"),
    (dict(seq_lens=None), ValueError, "seq_lens is None"),
    (dict(seq_lens=[-1]), ValueError, "-1"),
    (dict(seq_lens=[2**31]), ValueError, "32 bits"),
    (dict(seq_lens=[1, 2]), ValueError, "seq_lens 2"),
    (dict(scale=0), ValueError, "scale is 0"),
    (dict(scale=float("nan")), ValueError, "scale is nan"),
    (dict(layout="DHN"), ValueError, "layout is 'DHN'"),
    (dict(lse_base="10"), ValueError, "lse_base '10'"),
    (dict(planner="odd"), LookupError, "odd"),
    (dict(out=np.zeros((1, 4, 63), np.float32)), ValueError, "out has shape"),
    (dict(lse=np.zeros((1, 4))), ValueError, "lse is float64"),
])  # fmt: skip
def test_refusals_name_the_argument(change, error, text):
    evenkv.decode(**GOOD)
    with pytest.raises(error, match=text) as caught:
        evenkv.decode(**(GOOD | change))
    assert isinstance(caught.value, evenkv.EvenkvError) and caught.value.status.startswith("EKV_ERROR_")


def test_read_only_out_is_refused():
    out = np.zeros((1, 4, 64), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        evenkv.decode(**GOOD, out=out)


def test_works_without_torch():
    program = """
import sys
sys.modules["torch"] = None  # importing it fails
import numpy as np, evenkv
cache = np.ones((1, 16, 1, 64), np.float32)
assert evenkv.decode(np.ones((1, 1, 64), np.float32), cache, cache, [[0]], [5]).max() == 1
assert evenkv.plan([5, 7]).num_tiles
try:
    evenkv.torch
except ImportError:
    print("fine")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "fine\n", result.stderr


def test_a_forked_child_decodes():
    program = """
import os, sys
import numpy as np, evenkv
cache = np.ones((1, 16, 1, 64), np.float32)
run = lambda: evenkv.decode(np.ones((1, 1, 64), np.float32), cache, cache, [[0]], [5]).max()
assert run() == 1
child = os.fork()
if not child:
    os._exit(0 if run() == 1 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
