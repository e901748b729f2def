# SPDX-License-Identifier: Apache-2.0
"""Decode attention on torch tensors, on the CPU and on CUDA devices.

Everything runs on the current stream of the tensors' device and only enqueues there: no synchronisation, nothing is
read back.  Conventions: scale multiplies Q.K^T; the log-sum-exp (LSE) is natural unless lse_base says "2"; strides
are torch's, so that any view of a larger cache is taken without a copy as long as its last dimension is contiguous."""

import torch

from . import _torch_ops, errors

__all__ = ["decode", "merge_states", "workspace_size"]


def _split_table(page_table):
    """(block table, None, None) or (indptr, indices, last_page_len)."""
    if isinstance(page_table, torch.Tensor):
        return page_table, None, None
    if isinstance(page_table, tuple) and len(page_table) in (2, 3):
        return page_table[0], page_table[1], page_table[2] if len(page_table) == 3 else None
    raise errors.InvalidArgument(f"page_table is a {type(page_table).__name__}; it must be a block table [batch_size, "
                                 "width] or a tuple (indptr, indices, last_page_len)")


def csr_seq_lens(indptr, last_page_len, page_size):
    """KV lengths, int32 [batch_size], of FlashInfer's page table: all pages but the last are full.  On its device."""
    pages = indptr[1:] - indptr[:-1]
    return ((pages - 1) * page_size + last_page_len).clamp_(min=0).to(torch.int32)


def decode(q, k_cache, v_cache, page_table, seq_lens=None, *, scale=None, out=None, lse=None, return_lse=False,
           planner="even", workspace=None, layout="NHD", lse_base="e", table_rows=None, max_seq_len=0, sm_margin=0):
    """Attention of one query token a request over its paged KV cache: softmax(scale * Q K^T) V.

    q: [batch_size, q_heads, head_dim]; fp32 (CPU only), fp16 or bf16.
    k_cache, v_cache: [pages, page_size, kv_heads, head_dim] (layout "NHD") or [pages, kv_heads, page_size, head_dim]
        ("HND"), of q's dtype.  q_heads is a multiple of kv_heads.
    page_table: either a block table, int32 [batch_size, width]: entry p of a row is the page with tokens
        [p * page_size, (p + 1) * page_size) of its request, entries past the length are not read; or a tuple
        (indptr, indices, last_page_len) of int32 [batch_size + 1], [entries], [batch_size]: request b has pages
        indices[indptr[b] : indptr[b + 1]].  last_page_len may be left out or None where seq_lens is given.
    seq_lens: int32 [batch_size], KV tokens of each request, the new one included; 0 gives 0 and an LSE of -inf.  On
        q's device; with CUDA tensors also on the CPU: the plan is then made on the host.  May be None with
        last_page_len.
    scale: None for 1/sqrt(head_dim).
    out: like q, any strides with a contiguous last dimension; lse: float32 [batch_size, q_heads].  Written to where
        given.
    return_lse: also return the LSE.
    planner: with lengths on a GPU even, even-invariant, fa3, fa3-nosplit or fa3-vllm; else any.
    workspace: memory to use in place of own one: contiguous, on q's device, of workspace_size() bytes.
    table_rows: int32 [batch_size]: the row of each request in the block table, where it is not the request's number.
    max_seq_len: an upper bound of seq_lens on a GPU, 0: what the page table can hold, rounded up to a power of two.
        fa3 takes its number of splits from it, even-invariant its memory.
    sm_margin: SMs left to others.

    Lengths and table entries on a GPU are not checked; on the CPU they are.

    Returns out, or (out, lse)."""
    table, indices, last_page_len = _split_table(page_table)
    if seq_lens is None:
        if last_page_len is None:
            raise errors.InvalidArgument("seq_lens is None; only a page table with last_page_len tells the lengths")
        seq_lens = csr_seq_lens(table, last_page_len, k_cache.shape[1 if layout == "NHD" else 2])
    if scale == 0:
        raise errors.InvalidArgument("scale is 0; None stands for 1/sqrt(head_dim)")
    if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
        raise errors.Unsupported("q, k_cache or v_cache requires grad, and there is no backward pass; call decode "
                                 "under torch.no_grad() or torch.inference_mode()")
    inputs = (q, k_cache, v_cache, seq_lens, table, indices, table_rows, workspace)
    options = f"{planner} {layout} {lse_base} {max_seq_len} {sm_margin} 0 True"  # _torch_ops.Options
    if out is None and lse is None:
        return (_torch_ops.decode_lse if return_lse else _torch_ops.decode)(*inputs, scale or 0.0, options)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if lse is None and return_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _torch_ops.decode_out(*inputs, out, lse, scale or 0.0, options)
    return (out, lse) if return_lse else out


def workspace_size(q, k_cache, v_cache, page_table, seq_lens, *, planner="even", layout="NHD", table_rows=None,
                   max_seq_len=0, sm_margin=0):
    """Bytes of a workspace that suffices for decode with arguments of these shapes, wherever it begins; on the CPU, and
    with even-invariant, for these lengths."""
    table, indices, _ = _split_table(page_table)
    options = _torch_ops.Options(planner, layout, max_seq_len=max_seq_len, sm_margin=sm_margin)
    return _torch_ops.workspace_size(q, k_cache, v_cache, seq_lens, table, indices, table_rows, options.text())


def merge_states(states, lse, *, lse_base="e"):
    """Merges attention states over disjoint sets of tokens, in their order.

    states: [num_states, ..., head_dim], fp32, fp16 or bf16; lse: float32 [num_states, ...], -inf for an empty state.

    Returns ([..., head_dim], [...]); rows whose states are all empty are 0 and -inf."""
    return _torch_ops.merge_states(states, lse, lse_base)
