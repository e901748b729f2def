# SPDX-License-Identifier: Apache-2.0
"""Calls in the manner of FlashInfer (flashinfer/decode.py and cascade.py of flashinfer-ai/flashinfer, 0.6): the same
names, arguments and conventions, LSE in base 2 included.  What evenkv cannot do is refused; docs/python.md has the
table."""

import itertools
import math
import weakref

import torch

from . import _torch_ops, errors
from .torch import csr_seq_lens

__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "merge_state", "merge_states"]

_owners = itertools.count(1)


def _refuse_unless(name, value, *accepted):
    if not any(value is a or value == a for a in accepted):
        raise errors.Unsupported(f"{name} is {value!r}; evenkv takes {' or '.join(map(repr, accepted))} only")


def _dtype(name, value):
    if value is None or isinstance(value, torch.dtype):
        return value
    found = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(found, torch.dtype):
        raise errors.InvalidArgument(f"{name} is {value!r}; it must be a torch.dtype or its name")
    return found


class BatchDecodeWithPagedKVCacheWrapper:
    """plan once for a batch, then run for every layer.

    plan makes no plan on the host: it keeps the page table and the lengths, and the first run after it makes the plan
    on the GPU (in a CUDA graph, each run).  So it never waits, and page tables may lie on the GPU.

    float_workspace_buffer: memory for partial results, on the tensors' device.  None: taken as needed.
    kv_layout: "NHD" or "HND".
    use_cuda_graph with the three buffers: plan copies the page table into them, so that a captured run sees it.
    planner: of evenkv; the tensor cores are used whatever use_tensor_cores says."""

    def __init__(self, float_workspace_buffer=None, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
                 paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
                 backend="auto", jit_args=None, *, planner="even"):
        _refuse_unless("kv_layout", kv_layout, "NHD", "HND")
        _refuse_unless("jit_args", jit_args, None)
        _refuse_unless("backend", backend, "auto", "evenkv")
        self._workspace = float_workspace_buffer
        self._layout = kv_layout
        self._planner = planner
        self._owner = next(_owners)
        weakref.finalize(self, _torch_ops.forget, self._owner).atexit = False
        self._use_tensor_cores = use_tensor_cores
        self._buffers = None
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            if not all(isinstance(buffer, torch.Tensor) for buffer in buffers):
                raise errors.InvalidArgument("use_cuda_graph needs paged_kv_indptr_buffer, paged_kv_indices_buffer and "
                                             "paged_kv_last_page_len_buffer")
            if len(buffers[0]) != len(buffers[2]) + 1:
                raise errors.InvalidArgument(f"paged_kv_indptr_buffer has {len(buffers[0])} entries and "
                                             f"paged_kv_last_page_len_buffer {len(buffers[2])}; batch_size + 1 and "
                                             "batch_size are needed")
            self._buffers = buffers
            self._seq_lens_buffer = torch.zeros_like(buffers[2])
        self._table = None
        self._planned = set()  # streams that have seen a run since the last plan

    @property
    def use_tensor_cores(self):
        return self._use_tensor_cores

    @property
    def is_cuda_graph_enabled(self):
        return self._buffers is not None

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer=None):
        """int_workspace_buffer: not used."""
        self._workspace = float_workspace_buffer

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
             o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True,
             block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1):
        """indptr, indices, last_page_len: int32 [batch_size + 1], [entries], [batch_size], on the CPU or the tensors'
        device; moved to that of indices, or of the buffers.  Lengths are (pages - 1) * page_size + last_page_len.
        logits_soft_cap 0 is none."""
        _refuse_unless("pos_encoding_mode", pos_encoding_mode, "NONE")
        _refuse_unless("window_left", window_left, -1)
        _refuse_unless("logits_soft_cap", logits_soft_cap, None, 0)
        _refuse_unless("rope_scale", rope_scale, None)
        _refuse_unless("rope_theta", rope_theta, None)
        _refuse_unless("block_tables", block_tables, None)
        _refuse_unless("fixed_split_size", fixed_split_size, None)
        _refuse_unless("disable_split_kv", disable_split_kv, False)
        _refuse_unless("q_len_per_req", q_len_per_req, 1)
        q_dtype = _dtype("q_data_type", data_type if data_type is not None else q_data_type)
        kv_dtype = _dtype("kv_data_type", kv_data_type) or q_dtype
        _refuse_unless("kv_data_type", kv_dtype, q_dtype)
        _refuse_unless("o_data_type", _dtype("o_data_type", o_data_type), None, q_dtype)
        if sm_scale is not None and (not math.isfinite(sm_scale) or sm_scale == 0):
            raise errors.InvalidArgument(f"sm_scale is {sm_scale}; it must be finite and not 0")
        self._shape = (len(last_page_len), num_qo_heads, num_kv_heads, head_dim, page_size)
        self._dtype = q_dtype
        self._scale = sm_scale or 0.0
        self._keep_table(indptr, indices, last_page_len, seq_lens, page_size, non_blocking)
        self._planned.clear()

    begin_forward = plan

    def _keep_table(self, indptr, indices, last_page_len, seq_lens, page_size, non_blocking):
        if self._buffers is None:
            device = self._workspace.device if self._workspace is not None else indices.device
            indptr, indices, last_page_len = (tensor.to(device, torch.int32, non_blocking=non_blocking)
                                              for tensor in (indptr, indices, last_page_len))
            lengths = (csr_seq_lens(indptr, last_page_len, page_size) if seq_lens is None
                       else seq_lens.to(device, torch.int32, non_blocking=non_blocking))
            self._table = (indptr, indices, lengths)
            return
        table, entries, last = self._buffers
        if len(last_page_len) != len(last):
            raise errors.InvalidArgument(f"the batch is {len(last_page_len)} requests; in a CUDA graph it has to stay "
                                         f"at the buffers' {len(last)}")
        if len(indices) > len(entries):
            raise errors.InvalidArgument(f"indices has {len(indices)} entries; its buffer has {len(entries)}")
        table.copy_(indptr, non_blocking=non_blocking)
        entries[: len(indices)].copy_(indices, non_blocking=non_blocking)
        last.copy_(last_page_len, non_blocking=non_blocking)
        self._seq_lens_buffer.copy_(csr_seq_lens(table, last, page_size) if seq_lens is None else seq_lens,
                                    non_blocking=non_blocking)
        self._table = (table, entries, self._seq_lens_buffer)

    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
            return_lse=False, enable_pdl=None, window_left=None, sinks=None):
        """q: [batch_size, num_qo_heads, head_dim].
        paged_kv_cache: (k_cache, v_cache), each [pages, page_size, num_kv_heads, head_dim] for NHD or [pages,
        num_kv_heads, page_size, head_dim] for HND; or one tensor [pages, 2, ...] with K at 0 and V at 1.

        Returns out, or (out, lse): lse float32 [batch_size, num_qo_heads], base 2."""
        if self._table is None:
            raise errors.InvalidArgument("run comes after plan")
        if args:
            raise errors.Unsupported(f"run takes no positional arguments beyond q and paged_kv_cache; {len(args)} "
                                     "are given (FlashInfer has them for jit_args)")
        for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            _refuse_unless(name, scale, None, 1.0)
        _refuse_unless("window_left", window_left, None, -1)
        _refuse_unless("sinks", sinks, None)
        if isinstance(paged_kv_cache, torch.Tensor):
            if paged_kv_cache.dim() != 5 or paged_kv_cache.shape[1] != 2:
                raise errors.InvalidArgument(f"paged_kv_cache is {tuple(paged_kv_cache.shape)}; it must be [pages, 2, "
                                             "...] of 5 dimensions, or (k_cache, v_cache)")
            k_cache, v_cache = paged_kv_cache.unbind(1)
        else:
            k_cache, v_cache = paged_kv_cache
        self._check_shapes(q, k_cache)
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        indptr, indices, lengths = self._table
        # A compiled graph runs more often than it is traced, and a captured one is replayed after other plans.
        always = self._buffers is not None or torch.compiler.is_compiling()
        stream = None if always or not q.is_cuda else torch._C._cuda_getCurrentRawStream(q.get_device())
        replan = always or stream not in self._planned
        options = f"{self._planner} {self._layout} 2 0 0 {self._owner} {replan}"  # _torch_ops.Options
        _torch_ops.decode_out(q, k_cache, v_cache, lengths, indptr, indices, None, self._workspace, out, lse,
                              self._scale, options)
        if not always:
            self._planned.add(stream)
        return (out, lse) if return_lse else out

    forward = run

    def forward_return_lse(self, *args, **keywords):
        return self.run(*args, **keywords, return_lse=True)

    run_return_lse = forward_return_lse

    def end_forward(self):
        """Nothing to do."""

    def _check_shapes(self, q, k_cache):
        token, head = (1, 2) if self._layout == "NHD" else (2, 1)
        found = (q.shape[0], q.shape[1], k_cache.shape[head], q.shape[2], k_cache.shape[token])
        if found != self._shape or q.dtype != self._dtype:
            names = "batch_size, num_qo_heads, num_kv_heads, head_dim, page_size"
            raise errors.InvalidArgument(f"q and paged_kv_cache have ({names}) = {found} of {q.dtype}; plan had "
                                         f"{self._shape} of {self._dtype}")


def merge_state(v_a, s_a, v_b, s_b):
    """v_a, v_b: [seq_len, num_heads, head_dim]; s_a, s_b: float32 [seq_len, num_heads], LSE in base 2.  Returns the
    merged (v, s)."""
    return _torch_ops.merge_states(torch.stack((v_a, v_b)), torch.stack((s_a, s_b)), "2")


def merge_states(v, s):
    """v: [seq_len, num_states, num_heads, head_dim]; s: float32 [seq_len, num_states, num_heads], LSE in base 2.
    Returns the merged (v, s)."""
    return _torch_ops.merge_states(v.transpose(0, 1), s.transpose(0, 1), "2")
