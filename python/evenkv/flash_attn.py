# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache in the manner of FlashAttention (hopper/flash_attn_interface.py of Dao-AILab/flash-attention,
version 3; block_table, cache_batch_idx and alibi_slopes as in version 2): the same names, arguments and conventions,
the LSE in natural logarithm.  What evenkv cannot do is refused; docs/python.md has the table."""

import torch

from . import errors
from .torch import decode

__all__ = ["flash_attn_with_kvcache"]


def _append(k_cache, v_cache, k, v, seq_lens, page_table):
    """Writes token seq_lens[b] of each request.  Requests without room (a length or a page below 0, as the padding of
    engines has) write nothing: they repeat what the first one with room writes."""
    page_size = k_cache.shape[1]
    rows = torch.arange(len(seq_lens), device=seq_lens.device)
    slot = (seq_lens // page_size).clamp(0, page_table.shape[1] - 1).long()
    pages = page_table[rows, slot].long()
    room = (seq_lens >= 0) & (pages >= 0)
    source = torch.where(room, rows, room.int().argmax())
    pages, tokens, room = pages[source].clamp(min=0), (seq_lens.long() % page_size)[source], room[source, None, None]
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[pages, tokens] = torch.where(room, new[source], cache[pages, tokens])


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
                            cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                            scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                            return_softmax_lse=False, *, block_table=None, alibi_slopes=None, planner="even"):
    """Attention of one query token a request over its KV cache.

    q: [batch_size, 1, nheads, headdim].
    k_cache, v_cache: [num_blocks, page_block_size, nheads_k, headdim] with a page table; else [batch_size_cache,
        seqlen_cache, nheads_k, headdim].
    k, v: [batch_size, 1, nheads_k, headdim]: the new token, which is first written to the cache at cache_seqlens.
    cache_seqlens: int32 [batch_size], or an int for all: tokens in the cache, before k and v.  None: all of it.
    cache_batch_idx: int32 [batch_size]: index of each request in a cache without page table.
    page_table (block_table in version 2): int32 [batch_size, max_num_blocks_per_seq].
    softmax_scale: None for 1/sqrt(headdim).
    causal, num_splits, pack_gqa, scheduler_metadata, max_seqlen_q: change nothing; the planner decides on splits.
    sm_margin: SMs left to others.
    planner: of evenkv.

    Returns out [batch_size, 1, nheads, headdim], or (out, lse) with lse float32 [batch_size, nheads, 1]."""
    refused = {"qv": qv, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_leftpad": cache_leftpad,
               "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": rotary_seqlens,
               "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "alibi_slopes": alibi_slopes}
    for name, value in refused.items():
        if value is not None:
            raise errors.Unsupported(f"{name} is given; evenkv takes None only")
    # A causal mask of the last token hides nothing, so a window that only looks ahead is none.
    if window_size[0] != -1 or attention_chunk or softcap:
        raise errors.Unsupported(f"window_size is {tuple(window_size)}, attention_chunk {attention_chunk} and softcap "
                                 f"{softcap}; evenkv takes no window to the left (-1), 0 and 0 only")
    if q.dim() != 4 or q.shape[1] != 1:
        raise errors.Unsupported(f"q is {tuple(q.shape)}; evenkv decodes one query token a request, [batch_size, 1, "
                                 "nheads, headdim]")
    if page_table is not None and block_table is not None:
        raise errors.InvalidArgument("page_table and block_table are both given; they are the same thing")
    page_table = page_table if page_table is not None else block_table
    if page_table is not None and cache_batch_idx is not None:
        raise errors.InvalidArgument("cache_batch_idx goes with a cache without page table")
    if (k is None) != (v is None):
        raise errors.InvalidArgument(f"{'v' if k is None else 'k'} is given alone; k and v come together")
    batch_size = q.shape[0]
    if page_table is None:  # one page a request
        index = cache_batch_idx
        if index is None:
            index = torch.arange(batch_size, dtype=torch.int32, device=q.device)
        page_table = index.to(torch.int32).view(-1, 1)
    if cache_seqlens is None:
        cache_seqlens = page_table.shape[1] * k_cache.shape[1]
    if not isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = torch.full((batch_size,), cache_seqlens, dtype=torch.int32, device=q.device)
    if k is not None:
        for name, new in (("k", k), ("v", v)):
            if new.shape != (batch_size, 1, *k_cache.shape[2:]):
                raise errors.Unsupported(f"{name} is {tuple(new.shape)}; evenkv takes one new token a request, "
                                         f"{[batch_size, 1, *k_cache.shape[2:]]}")
        _append(k_cache, v_cache, k[:, 0], v[:, 0], cache_seqlens, page_table)
        cache_seqlens = cache_seqlens + 1
    result = decode(q[:, 0], k_cache, v_cache, page_table, cache_seqlens, scale=softmax_scale,
                    return_lse=return_softmax_lse, planner=planner, sm_margin=sm_margin)
    if return_softmax_lse:
        return result[0].unsqueeze(1), result[1].unsqueeze(2)
    return result.unsqueeze(1)
