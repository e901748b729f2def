# SPDX-License-Identifier: Apache-2.0
"""evenkv.torch on the CPU: against the reference and torch's own attention, as operators, under torch.compile."""

import threading

import numpy as np
import pytest
import torch

import evenkv
import evenkv.torch
import reference
from evenkv import _calls, _torch_ops

TYPES = [torch.float32, torch.float16, torch.bfloat16]


def tensors(problem, dtype=torch.float32, device="cpu"):
    """(q, k, v, table, seq_lens)"""
    floats = (torch.from_numpy(x).to(device, dtype) for x in (problem.q, problem.k, problem.v))
    return (*floats, *(torch.from_numpy(x).to(device) for x in (problem.table, problem.seq_lens)))


def rounded(dtype):
    return None if dtype == torch.float32 else getattr(__import__("ml_dtypes"), "bfloat16") if (
        dtype == torch.bfloat16) else np.float16


def numpy(tensor):
    return tensor.detach().float().cpu().numpy()


def sdpa(problem, dtype, device="cpu"):
    """torch's scaled_dot_product_attention, request by request."""
    q, k, v, table, seq_lens = tensors(problem, dtype, device)
    out = torch.zeros_like(q)
    for b, n in enumerate(problem.seq_lens):
        if n:
            pages = table[b, : -(-int(n) // k.shape[1])].long()
            keys, values = (x[pages].flatten(0, 1)[:n].transpose(0, 1) for x in (k, v))
            group = q.shape[1] // k.shape[2]
            keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
            out[b] = torch.nn.functional.scaled_dot_product_attention(q[b, :, None], keys, values)[:, 0]
    return out


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", range(20))
def test_decode_agrees_with_reference_and_sdpa(seed, dtype):
    problem = reference.problem(100 + seed, rounded=rounded(dtype))
    expected, expected_lse = problem.attention()
    name = str(dtype).removeprefix("torch.")
    out, lse = evenkv.torch.decode(*tensors(problem, dtype), return_lse=True)
    assert reference.close(numpy(out), expected, name), f"seed {problem.seed}"
    assert reference.close_lse(numpy(lse), expected_lse)
    error = np.abs(numpy(out) - numpy(sdpa(problem, dtype)))
    assert np.all(error <= 4 * reference.bound(expected, expected.spread, name))  # torch has errors of its own
    q, k, v, _, _ = tensors(problem, dtype)
    csr = tuple(map(torch.from_numpy, problem.csr))
    assert torch.equal(evenkv.torch.decode(q, k, v, csr), out)
    _, base2 = evenkv.torch.decode(q, k, v, csr, return_lse=True, lse_base="2")
    assert reference.close_lse(numpy(base2), expected_lse, base2=True)


@pytest.mark.parametrize("planner", list(evenkv.planners()))
def test_every_planner(planner):
    problem = reference.problem(4, head_dims=(128,), groups=(8,))
    if planner == "flashinfer-cuda-core":
        with pytest.raises(NotImplementedError, match="resident_ctas"):
            evenkv.torch.decode(*tensors(problem), planner=planner)
        return
    for _ in range(2):  # made, then updated
        out = evenkv.torch.decode(*tensors(problem), planner=planner)
        assert reference.close(numpy(out), problem.attention()[0], "float32")


def test_even_invariant_grows():
    """Its plan has room for a number of tokens; longer lengths get a new one."""
    cache = torch.ones(400, 16, 1, 64)
    table = torch.arange(400, dtype=torch.int32)[None]
    for length in (1, 6400):
        out = evenkv.torch.decode(torch.ones(1, 1, 64), cache, cache, table, torch.tensor([length], dtype=torch.int32),
                                  planner="even-invariant")
        assert torch.allclose(out, torch.ones(1, 1, 64))


def test_views_of_larger_caches():
    problem = reference.problem(11)
    expected = problem.attention()[0]
    q, k, v, table, lens = tensors(problem)
    layers = torch.stack((torch.stack((k, v)), torch.stack((v, k))))  # [layer, 2, pages, ...]
    assert reference.close(numpy(evenkv.torch.decode(q, layers[0, 0], layers[1, 0], table, lens)), expected, "float32")
    hnd_k, hnd_v = (x.transpose(1, 2).contiguous() for x in (k, v))
    assert reference.close(numpy(evenkv.torch.decode(q, hnd_k, hnd_v, table, lens, layout="HND")), expected, "float32")
    by_view = evenkv.torch.decode(q, hnd_k.transpose(1, 2), hnd_v.transpose(1, 2), table, lens)
    assert reference.close(numpy(by_view), expected, "float32")
    qkv = torch.cat((q, torch.zeros_like(q)), 1)  # a slice of a fused projection
    assert reference.close(numpy(evenkv.torch.decode(qkv[:, : q.shape[1]], k, v, table, lens)), expected, "float32")
    big = torch.full((table.shape[0] + 4, table.shape[1] + 3), -1, dtype=torch.int32)  # a slice of an engine's table
    rows = torch.arange(table.shape[0], dtype=torch.int32).flip(0) + 2
    big[rows.long(), : table.shape[1]] = table
    sliced = evenkv.torch.decode(q, k, v, big[:, : table.shape[1]], lens, table_rows=rows)
    assert reference.close(numpy(sliced), expected, "float32")


def test_outputs_of_the_caller():
    problem = reference.problem(12)
    expected, expected_lse = problem.attention(0.2)
    arguments = tensors(problem)
    wide = torch.full((*arguments[0].shape[:2], arguments[0].shape[2] + 8), 7.0)
    lse = torch.full((2, *arguments[0].shape[:2]), 7.0)
    out = wide[..., 8:]
    assert evenkv.torch.decode(*arguments, out=out, lse=lse[1], scale=0.2) is out
    assert reference.close(numpy(out), expected, "float32") and reference.close_lse(numpy(lse[1]), expected_lse)
    assert torch.all(wide[..., :8] == 7) and torch.all(lse[0] == 7)
    only_lse = torch.empty_like(lse[0])
    out2, returned = evenkv.torch.decode(*arguments, lse=only_lse, return_lse=True, scale=0.2)
    assert returned is only_lse and torch.equal(only_lse, lse[1]) and torch.equal(out2, out)


def test_workspace_of_the_caller():
    problem = reference.problem(13)
    arguments = tensors(problem)
    size = evenkv.torch.workspace_size(*arguments)
    for shift in range(0, 300, 60):
        memory = torch.empty(size + shift, dtype=torch.uint8)[shift:]
        out = evenkv.torch.decode(*arguments, workspace=memory)
        assert reference.close(numpy(out), problem.attention()[0], "float32")
    with pytest.raises(evenkv.EvenkvError, match="workspace has 256 bytes") as caught:
        evenkv.torch.decode(*arguments, workspace=memory[:256])
    assert caught.value.status == "EKV_ERROR_WORKSPACE_TOO_SMALL"


def test_no_requests_and_no_tokens():
    cache = torch.zeros(1, 16, 2, 64)
    empty = torch.zeros(0, 2, 64)
    lens = torch.zeros(0, dtype=torch.int32)
    assert evenkv.torch.decode(empty, cache, cache, torch.zeros(0, 3, dtype=torch.int32), lens).shape == (0, 2, 64)
    out, lse = evenkv.torch.decode(torch.ones(3, 2, 64), cache[:0], cache[:0], torch.zeros(3, 0, dtype=torch.int32),
                                   torch.zeros(3, dtype=torch.int32), return_lse=True)
    assert torch.all(out == 0) and torch.all(lse == -torch.inf)
    indptr = torch.zeros(4, dtype=torch.int32)
    out = evenkv.torch.decode(torch.ones(3, 2, 64), cache, cache, (indptr, lens, indptr[:3]))
    assert torch.all(out == 0)


def test_merge_states():
    problem = reference.problem(15, max_len=300)
    q, k, v, table, lens = tensors(problem)
    page_size = k.shape[1]
    half = (lens // 2 // page_size) * page_size  # whole pages
    first = evenkv.torch.decode(q, k, v, table, half, return_lse=True)
    width = table.shape[1]
    place = torch.arange(width) + half[:, None] // page_size
    rest = table.gather(1, place.clamp(max=width - 1).long())
    second = evenkv.torch.decode(q, k, v, rest, lens - half, return_lse=True)
    states, lse = (torch.stack(pair) for pair in zip(first, second))
    merged, merged_lse = evenkv.torch.merge_states(states, lse)
    expected, expected_lse = problem.attention()
    assert reference.close(numpy(merged), expected, "float32")
    assert reference.close_lse(numpy(merged_lse), expected_lse)


def test_threads_share_nothing_that_matters():
    problems = [reference.problem(seed) for seed in (20, 20, 21, 22)]
    wrong = []

    def work(problem):
        expected = problem.attention()[0]
        arguments = tensors(problem)
        for _ in range(30):
            if not reference.close(numpy(evenkv.torch.decode(*arguments)), expected, "float32"):
                wrong.append(problem.seed)

    threads = [threading.Thread(target=work, args=(problem,)) for problem in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- Refusals ------------------------------------------------------------------------------------------------------

CACHE = torch.zeros(2, 16, 2, 64)
INT = torch.int32
GOOD = dict(q=torch.zeros(1, 4, 64), k_cache=CACHE, v_cache=CACHE, page_table=torch.tensor([[0, 1]], dtype=INT),
            seq_lens=torch.tensor([20], dtype=INT))


def ints(*values):
    return torch.tensor(values, dtype=INT)


@pytest.mark.parametrize("change, error, text", [
    (dict(q=torch.zeros(4, 64)), ValueError, r"q is \(4, 64\)"),
    (dict(q=torch.zeros(1, 4, 64, dtype=torch.float64)), ValueError, "q is .*float64"),
    (dict(q=torch.zeros(1, 3, 64)), ValueError, "q has 3 heads"),
    (dict(q=torch.zeros(1, 4, 128)[..., ::2]), ValueError, "q has strides"),
    (dict(k_cache=CACHE.half()), ValueError, "k_cache is .*float16"),
    (dict(k_cache=CACHE[..., :32]), ValueError, "k_cache"),
    (dict(v_cache=CACHE[:1]), ValueError, "v_cache is"),
    (dict(v_cache=CACHE[0]), ValueError, "v_cache is"),
    (dict(page_table=torch.tensor([[0, 1]])), ValueError, "block_table is .*int64"),
    (dict(page_table=ints(0, 1)), ValueError, "block_table is"),
    (dict(page_table=ints(0, 1)[None].expand(2, 2)), ValueError, "block_table is"),
    (dict(page_table=ints(0, 2)[None]), ValueError, "page 1 of request 0 is 2"),
    (dict(page_table=ints(0)[None]), ValueError, "block_table_width is 1; request 0 of kv_len 20 needs 2"),
    (dict(page_table=5), ValueError, "page_table is a int"),
    (dict(page_table=(ints(0, 2, 3), ints(0, 1))), ValueError, "indptr is"),
    (dict(page_table=(ints(0, 2), torch.zeros(2))), ValueError, "indices is"),
    (dict(page_table=(ints(0, 2), ints(0, 1)), seq_lens=None), ValueError, "seq_lens is None"),
    (dict(seq_lens=torch.tensor([20])), ValueError, "seq_lens is .*int64"),
    (dict(seq_lens=ints(20, 1)), ValueError, "seq_lens is"),
    (dict(seq_lens=ints(-1)), ValueError, "-1"),
    (dict(table_rows=ints(-1)), ValueError, r"block_table_rows\[0\] is -1"),
    (dict(page_table=(ints(0, 2), ints(0, 1)), table_rows=ints(0)), ValueError, "table_rows goes with"),
    (dict(table_rows=ints(1)), ValueError, "table_rows has 1; block_table has 1 rows"),
    (dict(page_table=(ints(0, 3), ints(0, 1))), ValueError, "indptr has 3; indices has 2"),
    (dict(page_table=(ints(1, 0), ints(0, 1))), ValueError, "must not fall"),
    (dict(q=torch.zeros(2, 4, 64), page_table=ints(0, 1)[None].expand(2, 2), seq_lens=ints(20, 0, 20)[::2]),
     ValueError, "seq_lens has strides"),
    (dict(scale=0.0), ValueError, "scale is 0"),
    (dict(scale=float("inf")), ValueError, "scale is inf"),
    (dict(layout="DHN"), ValueError, "layout is 'DHN'"),
    (dict(lse_base="10"), ValueError, "lse_base is '10'"),
    (dict(planner="odd"), LookupError, "odd"),
    (dict(out=torch.zeros(1, 4, 63)), ValueError, "out is"),
    (dict(out=torch.zeros(1, 64, 4).transpose(1, 2)), ValueError, "out has strides"),
    (dict(out=torch.zeros(1, 1, 64).expand(1, 4, 64)), ValueError, "out_stride_head is 0"),
    (dict(lse=torch.zeros(4)), ValueError, "lse is"),
    (dict(q=torch.zeros(1, 4, 64, requires_grad=True)), NotImplementedError, "no backward"),
])  # fmt: skip
def test_refusals_name_the_argument(change, error, text):
    evenkv.torch.decode(**GOOD)
    with pytest.raises(error, match=text) as caught:
        evenkv.torch.decode(**(GOOD | change))
    assert isinstance(caught.value, evenkv.EvenkvError)
    evenkv.torch.decode(**GOOD)


# ---- Calls in C and in Python --------------------------------------------------------------------------------------


@pytest.fixture(params=["C", "Python"])
def calls(request, monkeypatch):
    describe, launch = _calls.load_native() if request.param == "C" else _calls.load_python()
    monkeypatch.setattr(_calls, "describe", describe)
    monkeypatch.setattr(_calls, "launch", launch)


def test_calls_are_made_in_c():
    """Wherever torch has the exchange API; this package comes with the C part."""
    assert _calls.NATIVE == hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


@pytest.mark.parametrize("seed", range(12))
def test_both_ways_agree_with_the_reference(calls, seed):
    problem = reference.problem(300 + seed)
    expected, expected_lse = problem.attention()
    q, k, v, table, lens = tensors(problem)
    out, lse = evenkv.torch.decode(q, k, v, table, lens, return_lse=True)
    assert reference.close(out.numpy(), expected, "float32") and reference.close_lse(lse.numpy(), expected_lse)
    csr = tuple(map(torch.from_numpy, problem.csr))
    assert torch.equal(evenkv.torch.decode(q, k, v, csr), out)
    rows = torch.arange(len(q), dtype=torch.int32).flip(0)
    given = torch.full_like(q, 7)
    evenkv.torch.decode(q, k, v, table.flip(0), lens, table_rows=rows, out=given)
    assert torch.equal(given, out)


def test_both_ways_take_nothing_for_a_table(calls):
    q, cache = torch.ones(2, 4, 64), torch.ones(1, 16, 2, 64)
    for table in (torch.zeros(2, 0, dtype=torch.int32), (ints(0, 0, 0), ints()[:0])):
        assert torch.all(evenkv.torch.decode(q, cache, cache, table, ints(0, 0)) == 0)


def test_both_ways_refuse(calls):
    with pytest.raises(ValueError, match="q is"):
        evenkv.torch.decode(**GOOD | dict(q=torch.zeros(*[1] * 11)))
    with pytest.raises(ValueError, match=r"block_table\[0\]\[0\]|page"):
        evenkv.torch.decode(**GOOD | dict(page_table=ints(7, 7)[None]))
    with pytest.raises(RuntimeError):
        evenkv.torch.decode(**GOOD | dict(q=torch.zeros(1, 4, 64).to_sparse()))


@pytest.mark.parametrize("change", [
    lambda t: t[:1], lambda t: t.double(), lambda t: t.transpose(0, 1), lambda t: t[None], lambda t: None,
    lambda t: t.view(torch.int32), lambda t: t.bfloat16().repeat_interleave(2, 2)[..., ::2]])  # fmt: skip
def test_descriptions_tell_tensors_apart(calls, change):
    tensor, same, others = torch.zeros(3, 4, 8), torch.ones(3, 4, 8), [torch.zeros(1)] * 8
    what, addresses = _calls.describe(tensor, *others)
    again, others_addresses = _calls.describe(same, *others)
    assert what == again and hash(what) == hash(again) and addresses != others_addresses
    assert _calls.describe(change(tensor), *others)[0] != what


def test_addresses_are_those_of_views(calls):
    whole = torch.zeros(4, 8)
    kept = [whole[i] for i in range(4)]
    addresses = _calls.describe(*kept, *[None] * 5)[1]
    if isinstance(addresses, bytes):
        addresses = tuple(np.frombuffer(addresses, np.int64).tolist())
    assert addresses == (*(view.data_ptr() for view in kept), *[0] * 5)


def test_c_calls_refuse_what_is_no_tensor():
    describe, launch = _calls.load_native()
    with pytest.raises(TypeError, match="9 arguments"):
        describe(torch.zeros(1))
    with pytest.raises(RuntimeError):
        describe(*[1] * 9)
    with pytest.raises(TypeError, match="8 arguments"):
        launch(0)
    with pytest.raises(TypeError):
        launch(1, 1, 1, 1, 1, None, False, False)


def test_a_missing_or_foreign_c_part_is_named(monkeypatch):
    monkeypatch.setattr(_calls, "_find", lambda: None)
    with pytest.raises(ImportError, match="no libevenkv_python.so"):
        _calls.load_native()
    monkeypatch.setattr(_calls, "_find", lambda: "libm.so.6")
    with pytest.raises(ImportError, match="libm.so.6 cannot be used"):
        _calls.load_native()


# ---- Operators and compilation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [_torch_ops.decode, _torch_ops.decode_lse])
def test_opcheck_of_decode(operator):
    q, k, v, table, lens = tensors(reference.problem(30))
    torch.library.opcheck(operator, (q, k, v, lens, table, None, None, None, 0.0, _torch_ops.Options().text()))


def test_opcheck_of_the_others():
    q, k, v, table, lens = tensors(reference.problem(30))
    options = _torch_ops.Options().text()
    torch.library.opcheck(_torch_ops.decode_out, (q, k, v, lens, table, None, None, None, torch.empty_like(q),
                                                  torch.empty(q.shape[:2]), 0.0, options))
    torch.library.opcheck(_torch_ops.merge_states, (torch.randn(2, 3, 64), torch.randn(2, 3), "e"))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_keeps_one_graph(backend):
    problem = reference.problem(31, max_batch=4)
    q, k, v, table, lens = tensors(problem)
    csr = tuple(map(torch.from_numpy, problem.csr))

    def layer(q, k, v, table, lens, out):
        first, lse = evenkv.torch.decode(q * 2, k, v, table, lens, return_lse=True)
        second = evenkv.torch.decode(q + 0, k, v, csr, scale=0.25)
        evenkv.torch.decode(q, k, v, table, lens, out=out)
        return first + 1, lse, second, out * 3

    from torch._dynamo.testing import CompileCounter
    counter = CompileCounter()
    torch.compile(layer, backend=counter, fullgraph=True)(q, k, v, table, lens, torch.empty_like(q))
    assert counter.frame_count == 1
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(2):
        for a, b in zip(compiled(q, k, v, table, lens, torch.empty_like(q)),
                        layer(q, k, v, table, lens, torch.empty_like(q))):
            assert torch.allclose(a, b, atol=1e-6)
        lens = (lens // 2).clone()
    torch._dynamo.reset()


def test_strides_of_small_tensors_are_part_of_the_signature():
    """The same shapes with other strides must not be taken for those seen before."""
    two = GOOD | dict(q=torch.zeros(2, 4, 64), page_table=ints(0, 1)[None].expand(2, 2).contiguous())
    evenkv.torch.decode(**two | dict(seq_lens=ints(20, 20), table_rows=ints(0, 1)))
    with pytest.raises(ValueError, match="seq_lens has strides"):
        evenkv.torch.decode(**two | dict(seq_lens=ints(20, 0, 20)[::2], table_rows=ints(0, 1)))
    with pytest.raises(ValueError, match="table_rows has strides"):
        evenkv.torch.decode(**two | dict(seq_lens=ints(20, 20), table_rows=ints(0, 9, 1)[::2]))


def test_signatures_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(_torch_ops, "_MAX_SIGNATURES", 8)
    monkeypatch.setattr(_torch_ops, "_signatures", {})
    cache = torch.ones(4, 16, 1, 64)
    table = torch.arange(4, dtype=INT)[None]
    for i in range(40):
        out = evenkv.torch.decode(torch.ones(1, 1, 64), cache, cache, table, ints(i + 1), scale=1.0 + i)
        assert torch.allclose(out, torch.ones(1, 1, 64))
    assert len(_torch_ops._signatures) <= 8
