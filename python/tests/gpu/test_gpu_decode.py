# SPDX-License-Identifier: Apache-2.0
"""evenkv.torch on a CUDA device: results, streams, lifetimes, refusals."""

import gc

import pytest
import torch

import cases
import evenkv
import evenkv.flash_attn
import evenkv.flashinfer
import evenkv.torch
from evenkv import _calls

pytestmark = pytest.mark.gpu

ON_DEVICE = ("even", "even-invariant", "fa3", "fa3-nosplit", "fa3-vllm")
TYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("block", range(20))
def test_500_random_cases_against_sdpa(block):
    for seed in range(1000 + 25 * block, 1025 + 25 * block):
        case = cases.make(seed, TYPES[seed % 2], max_len=1500)
        what = f"seed {seed}"
        out, lse = evenkv.torch.decode(*case.arguments, return_lse=True)
        cases.check(out, case, lse=lse, what=what)
        by_csr = evenkv.torch.decode(case.q, case.k, case.v, case.csr)
        cases.check(by_csr, case, what=f"{what}, csr")
        host_lens = evenkv.torch.decode(case.q, case.k, case.v, case.table, case.seq_lens.cpu())
        cases.check(host_lens, case, what=f"{what}, lengths on the host")


@pytest.mark.parametrize("native", [True, False])
def test_calls_in_c_and_in_python(native, monkeypatch):
    """libevenkv_python.so has to be there: all other tests go through it."""
    assert _calls.NATIVE
    describe, launch = _calls.load_native() if native else _calls.load_python()
    monkeypatch.setattr(_calls, "describe", describe)
    monkeypatch.setattr(_calls, "launch", launch)
    for seed in range(900, 912):
        case = cases.make(seed, TYPES[seed % 2])
        out, lse = evenkv.torch.decode(*case.arguments, return_lse=True)
        cases.check(out, case, lse=lse, what=f"seed {seed}")
        cases.check(evenkv.torch.decode(case.q, case.k, case.v, case.csr), case, what=f"seed {seed}, csr")


@pytest.mark.parametrize("planner", ON_DEVICE)
def test_planners_on_the_gpu(planner):
    for seed in range(6):
        case = cases.make(seed)
        cases.check(evenkv.torch.decode(*case.arguments, planner=planner), case, what=f"{planner}, seed {seed}")


@pytest.mark.parametrize("planner", [name for name in evenkv.planners() if name != "flashinfer-cuda-core"])
def test_planners_on_the_host(planner):
    for seed in range(6):
        case = cases.make(seed)
        out = evenkv.torch.decode(*case.arguments[:4], case.seq_lens.cpu(), planner=planner)
        cases.check(out, case, what=f"{planner}, seed {seed}")


def test_invariant_is_invariant():
    """A request's output is the same bit for bit in whatever batch."""
    case = cases.make(8, max_batch=9, page_sizes=(16,))
    all_of_it = evenkv.torch.decode(*case.arguments, planner="even-invariant", max_seq_len=4096)
    for b in range(len(case.q)):
        alone = evenkv.torch.decode(case.q[b : b + 1], case.k, case.v, case.table[b : b + 1], case.seq_lens[b : b + 1],
                                    planner="even-invariant", max_seq_len=4096)
        assert torch.equal(alone[0], all_of_it[b])


def test_views_workspace_and_outputs_of_the_caller():
    case = cases.make(21, page_sizes=(16,))
    layers = torch.stack((torch.stack((case.k, case.v)), torch.stack((case.v, case.k))))
    size = evenkv.torch.workspace_size(*case.arguments)
    wide = torch.full((*case.q.shape[:2], case.q.shape[2] + 8), 7.0, dtype=case.q.dtype, device="cuda")
    lse = torch.full((2, *case.q.shape[:2]), 7.0, device="cuda")
    evenkv.torch.decode(case.q, layers[0, 0], layers[1, 0], case.table, case.seq_lens, out=wide[..., :-8], lse=lse[1],
                        workspace=torch.empty(size, dtype=torch.uint8, device="cuda"), scale=0.2, sm_margin=20)
    cases.check(wide[..., :-8], case, scale=0.2, lse=lse[1])
    assert torch.all(wide[..., -8:] == 7) and torch.all(lse[0] == 7)
    hnd = evenkv.torch.decode(case.q, case.k.transpose(1, 2).contiguous(), case.v.transpose(1, 2).contiguous(),
                              case.table, case.seq_lens, layout="HND")
    cases.check(hnd, case)
    rows = torch.arange(len(case.q), dtype=torch.int32, device="cuda").flip(0)
    flipped = evenkv.torch.decode(case.q, case.k, case.v, case.table.flip(0), case.seq_lens, table_rows=rows)
    cases.check(flipped, case)


def test_empty_requests_and_an_empty_batch():
    case = cases.make(22)
    lens = torch.zeros_like(case.seq_lens)
    out, lse = evenkv.torch.decode(*case.arguments[:4], lens, return_lse=True)
    assert torch.all(out == 0) and torch.all(lse == -torch.inf)
    assert evenkv.torch.decode(case.q[:0], case.k, case.v, case.table[:0], lens[:0]).shape[0] == 0


@pytest.mark.parametrize("planner", ["even", "fa3"])
def test_two_streams_at_a_time(planner):
    """The same shapes on both, so that plans and workspaces would collide if they were shared."""
    case = cases.make(23, max_batch=8, max_len=4000)
    streams = [torch.cuda.Stream() for _ in range(2)]
    lens = [case.seq_lens, (case.seq_lens // 3).int()]
    results = [[], []]
    torch.cuda.synchronize()
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(evenkv.torch.decode(*case.arguments[:4], lens[i], planner=planner))
    torch.cuda.synchronize()
    for i in range(2):
        cases.check(results[i][0], case, lens[i])
        assert all(torch.equal(out, results[i][0]) for out in results[i])


def test_borrowed_tensors_may_go_at_once():
    """Everything is let go while the GPU is still busy before the decode; what takes the memory comes later."""
    case = cases.make(24)
    expected = evenkv.torch.decode(*case.arguments)
    for _ in range(5):
        copies = [x.clone() for x in case.arguments]
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        out = evenkv.torch.decode(*copies)
        shapes = [(x.shape, x.dtype) for x in copies]
        del copies
        gc.collect()
        junk = [torch.full(shape, 99, dtype=dtype, device="cuda") for shape, dtype in shapes]
        assert torch.equal(out, expected) and junk


def test_plans_may_go_at_once():
    """A wrapper, its page table, its plan and its workspace end while their kernels wait to run."""
    case = cases.make(25)
    expected = evenkv.torch.decode(case.q, case.k, case.v, case.csr)
    for _ in range(3):
        torch.cuda.synchronize()
        wrapper = plan(evenkv.flashinfer.BatchDecodeWithPagedKVCacheWrapper(), case)
        torch.cuda._sleep(50_000_000)
        out = wrapper.run(case.q, (case.k, case.v))
        del wrapper
        gc.collect()
        junk = [torch.full((1 << 20,), 7, dtype=torch.int32, device="cuda") for _ in range(8)]
        assert torch.equal(out, expected) and junk


def plan(wrapper, case, device="cuda"):
    wrapper.plan(*(x.to(device) for x in case.csr), case.q.shape[1], case.k.shape[2], case.q.shape[2],
                 case.k.shape[1], q_data_type=case.q.dtype)
    return wrapper


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_flashinfer_front(device):
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    wrapper = evenkv.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    for seed in (30, 31, 30):
        case = cases.make(seed)
        plan(wrapper, case, device)
        for _ in range(3):  # the layers of a model: planned once
            out, lse = wrapper.run(case.q, (case.k, case.v), return_lse=True)
            cases.check(out, case, lse=lse * 0.6931471805599453)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
            cases.check(wrapper.run(case.q, (case.k, case.v)), case)


def test_merge_states():
    torch.manual_seed(0)
    states, lse = torch.randn(3, 50, 8, 128, device="cuda").bfloat16(), torch.randn(3, 50, 8, device="cuda")
    lse[1, :7] = -torch.inf
    merged, merged_lse = evenkv.torch.merge_states(states, lse)
    weights = lse.softmax(0)[..., None]
    expected = (weights * states.float()).sum(0)
    assert torch.all((merged.float() - expected).abs() <= 2.0**-8 * (1 + expected.abs()))
    assert torch.allclose(merged_lse, lse.logsumexp(0), atol=1e-5)


def test_flash_attn_front_appends():
    case = cases.make(40, page_sizes=(16,))
    k, v = case.k.nan_to_num(), case.v.nan_to_num()
    lens = (case.seq_lens - 1).clamp(min=-1)  # an empty request becomes padding
    new_k, new_v = (torch.zeros(len(lens), 1, *k.shape[2:], dtype=k.dtype, device="cuda") for _ in range(2))
    for b, n in enumerate(lens.tolist()):
        if n >= 0:
            page, token = case.table[b, n // 16], n % 16
            new_k[b, 0], new_v[b, 0] = k[page, token], v[page, token]
            k[page, token], v[page, token] = 0, 0
    out, lse = evenkv.flash_attn.flash_attn_with_kvcache(case.q[:, None], k, v, new_k, new_v, cache_seqlens=lens,
                                                         page_table=case.table, causal=True, return_softmax_lse=True)
    cases.check(out[:, 0], case, lse=lse[..., 0])


def test_refusals():
    case = cases.make(50)
    q, k, v, table, lens = case.arguments
    decode = evenkv.torch.decode
    with pytest.raises(NotImplementedError, match="fp16"):
        decode(q.float(), k.float(), v.float(), table, lens)
    with pytest.raises(ValueError, match="k_cache is .*on cpu; it must be on cuda:0"):
        decode(q, k.cpu(), v, table, lens)
    with pytest.raises(ValueError, match="block_table is .*on cpu"):
        decode(q, k, v, table.cpu(), lens)
    with pytest.raises(NotImplementedError, match="planner none makes its plan on the host"):
        decode(q, k, v, table, lens, planner="none")
    shifted = torch.empty(k.numel() + 1, dtype=k.dtype, device="cuda")[1:].view_as(k)
    with pytest.raises(NotImplementedError, match="k_cache is .*aligned to 16 bytes"):
        decode(q, shifted, v, table, lens)
    odd = torch.zeros(*k.shape[:3], k.shape[3] + 1, dtype=k.dtype, device="cuda")[..., :-1]
    with pytest.raises(NotImplementedError, match="k_cache_stride.*multiple of 8"):
        decode(q, odd, v, table, lens)
    with pytest.raises(NotImplementedError, match="head_dim 96"):
        decode(q[..., :64].repeat(1, 1, 2)[..., :96].contiguous(), *(torch.zeros(*k.shape[:3], 96, dtype=k.dtype,
                                                                                 device="cuda"),) * 2, table, lens)
    cases.check(decode(q, k, v, table, lens), case)
