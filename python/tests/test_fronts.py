# SPDX-License-Identifier: Apache-2.0
"""The fronts of FlashInfer and FlashAttention, on the CPU: their conventions, and what they refuse."""

import math

import numpy as np
import pytest
import torch

import evenkv
import evenkv.flash_attn
import evenkv.flashinfer
import reference
from evenkv import _torch_ops
from test_torch import ints, numpy, tensors


def planned(problem, layout="NHD", **keywords):
    wrapper = evenkv.flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, layout, **keywords)
    plan(wrapper, problem)
    return wrapper


def plan(wrapper, problem, **keywords):
    q, k, *_ = tensors(problem)
    arguments = dict(q_data_type=torch.float32) | keywords
    wrapper.plan(*map(torch.from_numpy, problem.csr), q.shape[1], k.shape[2], q.shape[2], k.shape[1], **arguments)


@pytest.mark.parametrize("seed", range(6))
def test_flashinfer_run(seed):
    problem = reference.problem(40 + seed)
    expected, expected_lse = problem.attention()
    q, k, v, _, _ = tensors(problem)
    wrapper = planned(problem)
    for cache in ((k, v), torch.stack((k, v), 1)):
        out, lse = wrapper.run(q, cache, return_lse=True)
        assert reference.close(numpy(out), expected, "float32")
        assert reference.close_lse(numpy(lse), expected_lse, base2=True)
    mine, mine_lse = torch.empty_like(q), torch.empty(q.shape[:2])
    assert wrapper.run(q, (k, v), out=mine, lse=mine_lse) is mine and torch.equal(mine, out)
    assert torch.equal(mine_lse, lse)
    hnd = tuple(x.transpose(1, 2).contiguous() for x in (k, v))
    assert torch.equal(planned(problem, "HND").run(q, hnd), out)
    assert reference.close(numpy(planned(problem, planner="fa3").forward(q, (k, v))), expected, "float32")


def test_flashinfer_scale_and_lengths():
    problem = reference.problem(50)
    q, k, v, _, lens = tensors(problem)
    wrapper = planned(problem)
    plan(wrapper, problem, sm_scale=0.4, seq_lens=lens, data_type="float32", q_data_type=None)
    assert reference.close(numpy(wrapper.run(q, (k, v))), problem.attention(0.4)[0], "float32")


def test_flashinfer_replans():
    wrapper = None
    for seed in (60, 61, 62):
        problem = reference.problem(seed)
        wrapper = wrapper or planned(problem)
        plan(wrapper, problem)
        q, k, v, _, _ = tensors(problem)
        for _ in range(2):
            assert reference.close(numpy(wrapper.run(q, (k, v))), problem.attention()[0], "float32")


def test_flashinfer_plans_end_with_their_wrapper():
    problem = reference.problem(63)
    q, k, v, _, _ = tensors(problem)
    before = len(_torch_ops._signatures), len(_torch_ops._plans)
    wrapper = planned(problem)
    wrapper.run(q, (k, v))
    assert (len(_torch_ops._signatures), len(_torch_ops._plans)) == (before[0] + 1, before[1] + 1)
    del wrapper
    assert (len(_torch_ops._signatures), len(_torch_ops._plans)) == before


def test_flashinfer_graph_buffers():
    problem = reference.problem(51)
    indptr, indices, last = map(torch.from_numpy, problem.csr)
    buffers = (torch.zeros_like(indptr), torch.zeros(len(indices) + 9, dtype=torch.int32), torch.zeros_like(last))
    wrapper = planned(problem, use_cuda_graph=True, paged_kv_indptr_buffer=buffers[0],
                      paged_kv_indices_buffer=buffers[1], paged_kv_last_page_len_buffer=buffers[2])
    assert wrapper.is_cuda_graph_enabled
    assert torch.equal(buffers[0], indptr) and torch.equal(buffers[1][: len(indices)], indices)
    q, k, v, _, _ = tensors(problem)
    assert reference.close(numpy(wrapper.run(q, (k, v))), problem.attention()[0], "float32")
    with pytest.raises(ValueError, match="has to stay at"):
        wrapper.plan(ints(0, 0), ints(), ints(0), 4, 2, 64, 16, q_data_type=torch.float32)
    with pytest.raises(ValueError, match="its buffer has"):
        wrapper.plan(indptr, torch.zeros(len(indices) + 10, dtype=torch.int32), last, 4, 2, 64, 16,
                     q_data_type=torch.float32)
    with pytest.raises(ValueError, match="needs paged_kv_indptr_buffer"):
        planned(problem, use_cuda_graph=True)


@pytest.mark.parametrize("name, value", [
    ("pos_encoding_mode", "ROPE_LLAMA"), ("window_left", 128), ("logits_soft_cap", 30.0), ("rope_scale", 1.0),
    ("rope_theta", 1e4), ("fixed_split_size", 4), ("disable_split_kv", True), ("q_len_per_req", 2),
    ("kv_data_type", torch.float16), ("o_data_type", torch.float16), ("block_tables", ints(0)),
])  # fmt: skip
def test_flashinfer_plan_refuses(name, value):
    problem = reference.problem(52)
    wrapper = planned(problem)
    with pytest.raises(NotImplementedError, match=name):
        plan(wrapper, problem, **{name: value})


@pytest.mark.parametrize("name, value", [("q_scale", 0.5), ("k_scale", 0.5), ("v_scale", 2.0), ("window_left", 5),
                                         ("sinks", torch.zeros(4))])
def test_flashinfer_run_refuses(name, value):
    problem = reference.problem(52)
    q, k, v, _, _ = tensors(problem)
    with pytest.raises(NotImplementedError, match=name):
        planned(problem).run(q, (k, v), **{name: value})


def test_flashinfer_refuses_other_shapes_and_order():
    problem = reference.problem(52)
    q, k, v, _, _ = tensors(problem)
    wrapper = planned(problem)
    with pytest.raises(ValueError, match="plan had"):
        wrapper.run(q[:, :, :32], (k[..., :32], v[..., :32]))
    with pytest.raises(ValueError, match="plan had"):
        wrapper.run(q.half(), (k.half(), v.half()))
    with pytest.raises(ValueError, match="paged_kv_cache"):
        wrapper.run(q, k)
    with pytest.raises(NotImplementedError, match="positional"):
        wrapper.run(q, (k, v), 1.0)
    with pytest.raises(ValueError, match="after plan"):
        evenkv.flashinfer.BatchDecodeWithPagedKVCacheWrapper().run(q, (k, v))
    with pytest.raises(NotImplementedError, match="kv_layout"):
        evenkv.flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, "DHN")


def test_flashinfer_merge():
    torch.manual_seed(0)
    v, s = torch.randn(5, 3, 4, 64), torch.randn(5, 3, 4)
    merged, merged_s = evenkv.flashinfer.merge_states(v, s)
    weights = torch.exp2(s.double())
    expected = (weights[..., None] * v).sum(1) / weights.sum(1)[..., None]
    assert torch.allclose(merged.double(), expected, atol=1e-6)
    assert torch.allclose(merged_s.double(), weights.sum(1).log2(), atol=1e-6)
    first = evenkv.flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    both = evenkv.flashinfer.merge_state(*first, v[:, 2], s[:, 2])
    assert torch.allclose(both[0], merged, atol=1e-6) and torch.allclose(both[1], merged_s, atol=1e-6)


# ---- FlashAttention ------------------------------------------------------------------------------------------------

flash = evenkv.flash_attn.flash_attn_with_kvcache


@pytest.mark.parametrize("seed", range(6))
def test_flash_attn_paged(seed):
    problem = reference.problem(70 + seed)
    expected, expected_lse = problem.attention()
    q, k, v, table, lens = tensors(problem)
    out, lse = flash(q[:, None], k, v, cache_seqlens=lens, page_table=table, num_splits=3, causal=True,
                     return_softmax_lse=True)
    assert out.shape == (q.shape[0], 1, *q.shape[1:]) and lse.shape == (*q.shape[:2], 1)
    assert reference.close(numpy(out[:, 0]), expected, "float32")
    assert reference.close_lse(numpy(lse[..., 0]), expected_lse)
    assert torch.equal(flash(q[:, None], k, v, cache_seqlens=lens, block_table=table), out)
    scaled = flash(q[:, None], k, v, cache_seqlens=lens, page_table=table, softmax_scale=0.2)
    assert reference.close(numpy(scaled[:, 0]), problem.attention(0.2)[0], "float32")


def test_flash_attn_unpaged():
    torch.manual_seed(0)
    q, cache = torch.randn(3, 1, 4, 64), torch.randn(2, 5, 40, 2, 64)
    k, v = cache
    index, lens = ints(4, 0, 2), ints(40, 1, 17)
    out = flash(q, k, v, cache_seqlens=lens, cache_batch_idx=index)
    expected, _ = reference.attention(q[:, 0], k, v, index[:, None], lens)
    assert reference.close(numpy(out[:, 0]), expected, "float32")
    whole = flash(q, k[:3], v[:3])
    expected, _ = reference.attention(q[:, 0], k, v, np.arange(3)[:, None], [40] * 3)
    assert reference.close(numpy(whole[:, 0]), expected, "float32")
    assert torch.equal(flash(q, k[:3], v[:3], cache_seqlens=40), whole)


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("first_is_padding", [False, True])
def test_flash_attn_appends_the_new_token(padding, first_is_padding):
    problem = reference.problem(80, page_sizes=(4,))
    q, k, v, table, lens = tensors(problem)
    k, v = k.nan_to_num(0), v.nan_to_num(0)
    table = torch.arange(table.numel(), dtype=torch.int32).view_as(table)
    k = torch.randn(table.numel() + 1, *k.shape[1:])
    v = torch.randn_like(k)
    lens = lens.clamp(max=table.shape[1] * 4 - 1)
    if padding:  # rows of a captured graph: no pages, a length of -1
        place = slice(0, padding) if first_is_padding else slice(len(lens) - padding, None)
        padding = min(padding, len(lens))
        lens[place], table[place] = -1, -1
    new_k, new_v = torch.randn(len(lens), 1, *k.shape[2:]), torch.randn(len(lens), 1, *k.shape[2:])
    want_k, want_v = k.clone(), v.clone()
    for b, n in enumerate(lens.tolist()):
        if n >= 0:
            want_k[table[b, n // 4], n % 4], want_v[table[b, n // 4], n % 4] = new_k[b, 0], new_v[b, 0]
    out = flash(q[:, None], k, v, new_k, new_v, cache_seqlens=lens, page_table=table, causal=True)
    assert torch.equal(k, want_k) and torch.equal(v, want_v)
    expected, _ = reference.attention(q, k, v, table.clamp(min=0), (lens + 1).tolist())
    assert reference.close(numpy(out[:, 0]), expected, "float32")


def test_flash_attn_append_with_padding_only():
    k, v = torch.randn(2, 3, 4, 1, 64)
    before = k.clone(), v.clone()
    new = torch.randn(2, 1, 1, 64)
    out = flash(torch.randn(2, 1, 1, 64), k, v, new, new, cache_seqlens=ints(-1, -1), page_table=ints(-1, -1)[:, None])
    assert torch.all(out == 0) and torch.equal(k, before[0]) and torch.equal(v, before[1])


@pytest.mark.parametrize("name, value", [
    ("qv", 1), ("rotary_cos", 1), ("rotary_sin", 1), ("cache_leftpad", 1), ("cu_seqlens_q", 1),
    ("cu_seqlens_k_new", 1), ("rotary_seqlens", 1), ("q_descale", 1), ("k_descale", 1), ("v_descale", 1),
    ("alibi_slopes", 1), ("window_size", (128, 0)), ("attention_chunk", 64), ("softcap", 30.0),
])  # fmt: skip
def test_flash_attn_refuses(name, value):
    cache = torch.zeros(1, 16, 1, 64)
    with pytest.raises(NotImplementedError, match=name):
        flash(torch.zeros(1, 1, 1, 64), cache, cache, cache_seqlens=5, **{name: value})


def test_flash_attn_refuses_shapes():
    cache = torch.zeros(1, 16, 1, 64)
    q = torch.zeros(1, 1, 1, 64)
    with pytest.raises(NotImplementedError, match="one query token"):
        flash(torch.zeros(1, 2, 1, 64), cache, cache)
    with pytest.raises(NotImplementedError, match="one new token"):
        flash(q, cache, cache, torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 64), cache_seqlens=3)
    with pytest.raises(ValueError, match="v is|k is given alone"):
        flash(q, cache, cache, q, cache_seqlens=3)
    with pytest.raises(ValueError, match="both given"):
        flash(q, cache, cache, page_table=ints(0)[None], block_table=ints(0)[None])
    with pytest.raises(ValueError, match="without page table"):
        flash(q, cache, cache, page_table=ints(0)[None], cache_batch_idx=ints(0))


def test_lse_bases_are_those_of_the_originals():
    problem = reference.problem(90)
    q, k, v, table, lens = tensors(problem)
    _, natural = flash(q[:, None], k, v, cache_seqlens=lens, page_table=table, return_softmax_lse=True)
    _, base2 = planned(problem).run(q, (k, v), return_lse=True)
    finite = torch.isfinite(base2)
    assert torch.allclose(natural[..., 0][finite] * math.log2(math.e), base2[finite], atol=1e-5)
