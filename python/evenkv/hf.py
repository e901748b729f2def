# SPDX-License-Identifier: Apache-2.0
"""evenkv as an attention implementation of Hugging Face transformers (written against 5.17 and 5.24).

    import evenkv.hf
    evenkv.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="evenkv")
    model.generate(...)            # decode steps by evenkv, prefill by sdpa
    model.generate_batch(...)      # continuous batching: decode steps by evenkv, straight from the paged cache

A decode step is a forward pass with one query token a request and no gradients.  Continuous batching takes only "sdpa",
"eager" and names with "flash" in them, of which it expects FlashAttention's functions; register() therefore also adds
CONTINUOUS ("evenkv_flash_2"), hands transformers our functions for it where it would import flash_attn, and lets the
continuous batching manager go from "evenkv" to it and back.  These two hooks are not public in transformers; they are
looked for by name, and register() says so if one is gone."""

import functools
import inspect
import threading

import torch

from . import errors
from .flash_attn import flash_attn_with_kvcache as _with_kvcache
from .torch import decode

__all__ = ["CONTINUOUS", "NAME", "register"]

NAME = "evenkv"
CONTINUOUS = "evenkv_flash_2"  # "flash" and, for the block table, "2" are what transformers looks for


# ---- generate: decode from a contiguous cache ----------------------------------------------------------------------


def _cache_ratio(cache):
    """Of a cache [batch, kv_heads, tokens, head_dim] as one line of tokens: how many tokens of the line lie between two
    requests; 0 for one request, None if there is no such line."""
    batch_stride, _, token_stride, last = cache.stride()
    if last != 1 or not token_stride:
        return None
    if cache.shape[0] == 1:
        return 0
    return None if batch_stride % token_stride else batch_stride // token_stride


def _as_pages(cache, ratio, page_size):
    """The same memory as pages [pages, page_size, kv_heads, head_dim]."""
    batch, heads, tokens, head_dim = cache.shape
    _, head_stride, token_stride, _ = cache.stride()
    pages = ((batch - 1) * ratio + tokens) // page_size
    return cache.as_strided((pages, page_size, heads, head_dim),
                            (page_size * token_stride, token_stride, head_stride, 1))


def _make_table(mask, batch, tokens, ratio, page_size, device):
    """(block table, lengths).  mask: bool [batch, tokens], the tokens that count; None: all of them."""
    begin = torch.arange(batch, device=device, dtype=torch.int32)[:, None] * (ratio // page_size)
    if mask is None:
        entries = torch.arange(tokens // page_size, device=device, dtype=torch.int32)[None]
        return begin + entries, torch.full((batch,), tokens, dtype=torch.int32, device=device)
    order = torch.argsort(mask.to(torch.uint8), dim=1, descending=True, stable=True).to(torch.int32)
    return begin + order, mask.sum(1, dtype=torch.int32)


_whole = threading.local()  # the last table without a mask, which follows from the shape alone


def _table_of(mask, key, ratio, page_size):
    """The layers of a step share a mask, and so the table made of it, which is kept with the mask.  Nothing is kept of
    a graph's memory."""
    shape = (key.shape[0], key.shape[2], ratio, page_size, key.device)
    flat = None if mask is None else mask.expand(shape[0], 1, 1, shape[1])[:, 0, 0]
    if torch.compiler.is_compiling() or key.is_cuda and torch.cuda.is_current_stream_capturing():
        return _make_table(flat, *shape)
    owner = _whole if mask is None else mask
    kept = getattr(owner, "_evenkv_table", None)
    if kept is None or kept[0] != shape:
        kept = owner._evenkv_table = (shape, _make_table(flat, *shape))
    return kept[1]


def _refuse_extras(module, extras):
    for name in ("softcap", "s_aux", "position_bias"):
        if extras.get(name) is not None:
            raise errors.Unsupported(f"{type(module).__name__} asks for {name}, which evenkv does not have; use "
                                     "attn_implementation=\"sdpa\" or \"eager\" for this model")


def _decode_step(module, query, key, value, mask, scaling):
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != 1):
        raise errors.Unsupported(f"attention_mask is {mask.dtype} of shape {tuple(mask.shape)}; in a decode step "
                                 "evenkv takes bool [batch, 1, 1, tokens] only")
    if key.shape != value.shape:
        raise errors.Unsupported(f"key is {tuple(key.shape)} and value {tuple(value.shape)}; evenkv wants them alike")
    ratio = _cache_ratio(key)
    if ratio is None or ratio != _cache_ratio(value):
        key, value = key.contiguous(), value.contiguous()
        ratio = _cache_ratio(key)
    tokens = key.shape[2]
    page_size = 16 if mask is None and tokens % 16 == 0 and ratio % 16 == 0 else 1
    table, lengths = _table_of(mask, key, ratio, page_size)
    out = decode(query[:, :, 0], _as_pages(key, ratio, page_size), _as_pages(value, ratio, page_size), table, lengths,
                 scale=scaling)
    return out.unsqueeze(1), None


def attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **extras):
    """query: [batch, q_heads, query_tokens, head_dim]; key, value: [batch, kv_heads, tokens, head_dim]; attention_mask:
    as sdpa's.  Returns (out [batch, query_tokens, q_heads, head_dim], None)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.shape[2] == 1 and not (torch.is_grad_enabled() and query.requires_grad):
        _refuse_extras(module, extras)
        return _decode_step(module, query, key, value, attention_mask, scaling)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **extras)


# ---- Continuous batching: FlashAttention's functions ---------------------------------------------------------------


def _varlen_by_mask(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal):
    """Through torch's scaled_dot_product_attention with one mask over all requests, as transformers' sdpa does; reads
    nothing back, so that a CUDA graph can capture it."""
    q_place, k_place = (torch.arange(len(x), device=x.device, dtype=torch.int32) for x in (q, k))
    q_of, k_of = (torch.searchsorted(cu[1:].contiguous(), place, right=True, out_int32=True)
                  for cu, place in ((cu_seqlens_q, q_place), (cu_seqlens_k, k_place)))
    requests = len(cu_seqlens_q) - 1
    mask = q_of[:, None] == k_of[None]
    if causal:  # the last query sees all
        from_end_q = cu_seqlens_q[(q_of + 1).clamp(max=requests)] - q_place
        from_end_k = cu_seqlens_k[(k_of + 1).clamp(max=requests)] - k_place
        mask &= from_end_k[None] >= from_end_q[:, None]
    mask |= (q_of == requests)[:, None]  # rows of padding: anything but NaN
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), attn_mask=mask[None, None], scale=scale)
    return out[0].transpose(0, 1).contiguous()


def _varlen_by_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal):
    """Through the FlashAttention 2 that torch carries; causal from the bottom right."""
    return torch.ops.aten._flash_attention_forward(
        q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0,
        causal, False, scale=scale)[0]


def _varlen_decode(q, k, v, cu_seqlens_k, scale):
    """One query a request, over keys that lie one after the other: pages of one token."""
    indptr = cu_seqlens_k[: len(q) + 1].contiguous()
    if len(indptr) < len(q) + 1:  # rows of padding
        indptr = torch.cat((indptr, indptr[-1:].expand(len(q) + 1 - len(indptr))))
    indices = torch.arange(len(k), dtype=torch.int32, device=k.device)
    return decode(q, k.unsqueeze(1), v.unsqueeze(1), (indptr, indices), indptr[1:] - indptr[:-1], scale=scale)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
                           causal=False, window_size=(-1, -1)):
    """q: [tokens, nheads, headdim]; k, v: [tokens, nheads_k, headdim]; cu_seqlens: int32 [batch + 1].  One query token
    a request: by evenkv.  Else by FlashAttention where torch's fits, or by scaled_dot_product_attention."""
    if window_size[0] != -1:
        raise errors.Unsupported(f"window_size is {tuple(window_size)}; evenkv has no sliding window")
    if max_seqlen_q == 1:
        return _varlen_decode(q, k, v, cu_seqlens_k, softmax_scale)
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256:
        return _varlen_by_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
    return _varlen_by_mask(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None,
                            softmax_scale=None, causal=False, window_size=(-1, -1)):
    """evenkv.flash_attn's, with the parameters that transformers may fill; it asks the signature for them."""
    return _with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, page_table=block_table,
                         softmax_scale=softmax_scale, causal=causal, window_size=window_size)


# ---- Registration --------------------------------------------------------------------------------------------------


def _hook(owner, name):
    found = inspect.getattr_static(owner, name, None)
    if found is None:
        import transformers

        raise errors.Unsupported(f"transformers {transformers.__version__} has no {owner.__name__}.{name}, which "
                                 "evenkv.hf needs for continuous batching; register(continuous=False) does without")
    return found


def _hook_flash_functions():
    from transformers import modeling_flash_attention_utils as utils

    original = _hook(utils, "_lazy_imports")

    @functools.wraps(original)
    def lazy_imports(implementation, *arguments, **keywords):
        if implementation is None or implementation.removeprefix("paged|") != CONTINUOUS:
            return original(implementation, *arguments, **keywords)
        return None, flash_attn_varlen_func, flash_attn_with_kvcache, utils._pad_input, utils._unpad_input

    utils._lazy_imports = lazy_imports


def _hook_manager():
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as manager

    original = _hook(manager, "switch_to_cb_friendly_attn")

    @functools.wraps(original)
    def switch_to_cb_friendly_attn(self, model, *arguments, **keywords):
        if model.config._attn_implementation != NAME:
            return original(self, model, *arguments, **keywords)
        paged = f"paged|{CONTINUOUS}"  # up to transformers 5.22
        model.set_attn_implementation(paged if _takes_paged_names() else CONTINUOUS)
        self._original_attn_impl = NAME

    manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn


def _takes_paged_names():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return "paged|flash_attention_2" in ALL_ATTENTION_FUNCTIONS.valid_keys()


_registered = set()


def register(continuous=True):
    """Makes attn_implementation="evenkv" known to transformers.  continuous: for continuous batching too.  May be
    called more than once."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import sdpa_mask

    if NAME not in _registered:
        AttentionInterface.register(NAME, attention_forward)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        _registered.add(NAME)
    if not continuous or CONTINUOUS in _registered:
        return
    if _takes_paged_names():
        from transformers.integrations.flash_paged import paged_attention_forward

        AttentionInterface.register(f"paged|{CONTINUOUS}", paged_attention_forward)
    else:
        AttentionInterface.register(CONTINUOUS, flash_attention_forward)
    _hook_flash_functions()
    _hook_manager()
    _registered.add(CONTINUOUS)
