# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs and torch.compile on a CUDA device: captured once, replayed with other lengths."""

import pytest
import torch

import cases
import evenkv
import evenkv.flashinfer
import evenkv.torch

pytestmark = pytest.mark.gpu


def length_sets(case):
    """The longest first; one with empty requests, as the padding of engines; and the first again."""
    lens = case.seq_lens
    drawn = (torch.rand(len(lens), device="cuda") * (lens + 1)).int()
    return [lens.clone(), lens // 2, drawn, torch.where(torch.arange(len(lens), device="cuda") % 2 == 0, lens, 0),
            torch.zeros_like(lens), lens.clone()]


@pytest.mark.parametrize("warm", [True, False], ids=["after a warm-up", "at the first call"])
@pytest.mark.parametrize("planner", ["even", "even-invariant", "fa3", "fa3-vllm"])
@pytest.mark.parametrize("table", ["block table", "csr"])
def test_replays_with_other_lengths(planner, table, warm):
    case = cases.make(60 + warm + 2 * (table == "csr"), max_len=1500, max_batch=7)
    lens = case.seq_lens.clone()
    pages = case.table if table == "block table" else case.csr[:2]

    def layers():  # two layers, as they share a plan
        first, lse = evenkv.torch.decode(case.q, case.k, case.v, pages, lens, planner=planner, return_lse=True)
        return first, lse, evenkv.torch.decode(case.q, case.k, case.v, pages, lens, planner=planner, scale=0.1)

    if not warm:
        evenkv._torch_ops._signatures.clear()
    else:
        with torch.cuda.stream(torch.cuda.Stream()):
            layers()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, lse, second = layers()
    for i, other in enumerate(length_sets(case)):
        lens.copy_(other)
        graph.replay()
        cases.check(first, case, lens, lse=lse, what=f"replay {i}")
        cases.check(second, case, lens, scale=0.1, what=f"replay {i}, second layer")
        eager = layers()  # outside of the graph, in between
        cases.check(eager[0], case, lens, what=f"eager {i}")


def test_lengths_on_the_host_cannot_be_captured():
    case = cases.make(65)
    lens = case.seq_lens.cpu()  # waits, which a capture would not survive
    x = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(NotImplementedError, match="seq_lens is on the CPU while"):
            evenkv.torch.decode(*case.arguments[:4], lens)
        x += 1
    graph.replay()
    assert x.item() == 1, "the refusal has harmed the capture"


def test_flashinfer_graph_replays_with_other_page_tables():
    case = cases.make(66, max_batch=6)
    indptr, indices, last = case.csr
    buffers = [torch.zeros_like(x) for x in (indptr, indices, last)]
    wrapper = evenkv.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda"), use_cuda_graph=True,
        paged_kv_indptr_buffer=buffers[0], paged_kv_indices_buffer=buffers[1],
        paged_kv_last_page_len_buffer=buffers[2])
    page_size = case.k.shape[1]

    def plan(lens):
        pages = -(-lens // page_size)
        new_indptr = torch.cat((torch.zeros(1, dtype=torch.int32, device="cuda"), pages.cumsum(0).int()))
        new_indices = torch.cat([case.table[b, :n] for b, n in enumerate(pages.tolist())])
        wrapper.plan(new_indptr, new_indices, torch.where(pages > 0, lens - (pages - 1) * page_size, 0).int(),
                     case.q.shape[1], case.k.shape[2], case.q.shape[2], page_size, q_data_type=case.q.dtype)

    plan(case.seq_lens)
    wrapper.run(case.q, (case.k, case.v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [wrapper.run(case.q, (case.k, case.v)) for _ in range(2)]
    for lens in length_sets(case):
        plan(lens)
        graph.replay()
        for out in outs:
            cases.check(out, case, lens)


def captured():
    """Signatures that a capture has seen."""
    return [s for s in evenkv._torch_ops._signatures.values() if evenkv._torch_ops._CAPTURE in s.entries]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode):
    """One graph, and with reduce-overhead in CUDA graphs of inductor's: a run to warm up, one to capture, replays."""
    case = cases.make(70, max_batch=5)
    q, k, v, table, lens = case.arguments

    def step(q, k, v, table, lens):
        out, lse = evenkv.torch.decode(q * 1.0, k, v, table, lens, return_lse=True)
        return out + 0.0, lse

    torch._dynamo.reset()
    evenkv._torch_ops._signatures.clear()
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for i, other in enumerate(length_sets(case) * 2):
        out, lse = compiled(q, k, v, table, other)
        cases.check(out.clone(), case, other, lse=lse.clone(), what=f"run {i}")
    assert bool(captured()) == (mode == "reduce-overhead"), "whether inductor has made a CUDA graph"
    torch._dynamo.reset()


def test_plans_keep_nothing_of_a_pool():
    """What they keep must not come from the allocator of torch: in the warm-up of a graph its memory belongs to the
    graph's pool."""
    case = cases.make(71, max_batch=5, max_len=4000)
    lens, out = case.seq_lens.cpu(), torch.empty_like(case.q)
    evenkv._torch_ops._signatures.clear()
    pool = torch.cuda.MemPool()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.cuda.use_mem_pool(pool):
        for planner in ("even", "even-invariant", "fa3"):
            evenkv.torch.decode(*case.arguments[:4], lens, out=out, planner=planner)
            evenkv.torch.decode(*case.arguments, out=out, planner=planner)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
    del pool
    cases.check(out, case)
