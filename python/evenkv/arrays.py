# SPDX-License-Identifier: Apache-2.0
"""Decode attention on NumPy arrays and whatever speaks DLPack in CPU memory (torch, JAX, CuPy's pinned memory); no
torch needed.  bfloat16 is that of ml_dtypes."""

import ctypes

import ml_dtypes
import numpy as np

from . import _abi, errors
from ._library import Plan, check, context, lib
from .dlpack import asarray

DTYPES = {np.dtype(np.float32): "fp32", np.dtype(np.float16): "fp16", np.dtype(ml_dtypes.bfloat16): "bf16"}
_ALIGN = 256  # of a workspace, evenkv.h


def _floats(name, value, shape, dtype=None):
    """shape: of ints, None for any size."""
    array = asarray(value, name)
    wanted = "[" + ", ".join("*" if w is None else str(w) for w in shape) + "]"
    if array.ndim != len(shape) or any(w is not None and w != s for w, s in zip(shape, array.shape)):
        raise errors.InvalidArgument(f"{name} has shape {array.shape}; it must be {wanted}")
    if array.dtype != dtype if dtype else array.dtype not in DTYPES:
        raise errors.InvalidArgument(f"{name} is {array.dtype}; it must be {dtype or 'float32, float16 or bfloat16'}")
    if array.size and (any(stride % array.itemsize for stride in array.strides)
                       or array.shape[-1] > 1 and array.strides[-1] != array.itemsize):
        raise errors.InvalidArgument(f"{name} has strides of {array.strides} bytes; they must be whole elements, and "
                                     "the last dimension contiguous")
    return array


def _ints(name, value, ndim):
    """Lengths and tables are small: they are copied where they are not dense int32."""
    array = asarray(value, name)
    if array.ndim != ndim or array.size and array.dtype.kind not in "iu":
        raise errors.InvalidArgument(f"{name} is {array.dtype} of shape {array.shape}; it must be integers of {ndim} "
                                     "dimensions")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise errors.InvalidArgument(f"{name} has {array.max()}; it must fit 32 bits")
    return np.ascontiguousarray(array, np.int32)


def _elements(array, axis):
    return array.strides[axis] // array.itemsize


def _output(name, value, shape, dtype):
    """A new array, or the caller's, which is written to."""
    if value is None:
        return np.empty(shape, dtype), None
    array = _floats(name, value, shape, np.dtype(dtype))
    if not array.flags.writeable:
        raise errors.InvalidArgument(f"{name} is read-only")
    return array, value


def _aligned(size):
    memory = np.empty(size + _ALIGN, np.uint8)
    return memory, -(-memory.ctypes.data // _ALIGN) * _ALIGN


def _read_table(page_table, seq_lens, page_size, fields):
    """Fills the page table's fields; (lengths, arrays to keep alive)."""
    if isinstance(page_table, tuple) and len(page_table) in (2, 3):  # a list is rows of a block table
        indptr, indices = _ints("indptr", page_table[0], 1), _ints("indices", page_table[1], 1)
        last = page_table[2] if len(page_table) == 3 else None
        fields |= {"page_indptr": indptr.ctypes.data, "page_indices": indices.ctypes.data or indptr.ctypes.data}
        if indptr.size and indptr.max() > indices.size:
            raise errors.InvalidArgument(f"indptr has {indptr.max()}; indices has {indices.size} entries")
        if last is not None:
            last = _ints("last_page_len", last, 1)
            if last.size != indptr.size - 1:
                raise errors.InvalidArgument(f"last_page_len has {last.size} entries and indptr {indptr.size}; "
                                             "batch_size and batch_size + 1 are needed")
            fields["last_page_len"] = last.ctypes.data
            if seq_lens is None:
                seq_lens = np.maximum((np.diff(indptr) - 1) * page_size + last, 0)
        return seq_lens, (indptr, indices, last), indptr.size - 1
    table = _ints("page_table", page_table, 2)
    fields |= {"block_table": table.ctypes.data, "block_table_stride": table.shape[1],
               "block_table_width": table.shape[1]}
    return seq_lens, (table,), table.shape[0]


def decode(q, k_cache, v_cache, page_table, seq_lens=None, *, scale=None, out=None, lse=None, return_lse=False,
           planner="even", layout="NHD", lse_base="e"):
    """Attention of one query token a request over its paged KV cache: softmax(scale * Q K^T) V, on the CPU.

    q: [batch_size, q_heads, head_dim]; float32, float16 or bfloat16.
    k_cache, v_cache: [pages, page_size, kv_heads, head_dim] (layout "NHD") or [pages, kv_heads, page_size, head_dim]
        ("HND"), of q's dtype, any strides with a contiguous last dimension.
    page_table: block table [batch_size, width], or a tuple (indptr, indices, last_page_len) as FlashInfer has it.
    seq_lens: [batch_size], KV tokens of each request; None with last_page_len.  0 gives 0 and an LSE of -inf.
    scale: None for 1/sqrt(head_dim).
    out: like q, and lse: float32 [batch_size, q_heads]: written to where given.
    lse_base: "e" (natural logarithm) or "2".

    Returns out, or (out, lse) with return_lse.  Arrays are shared with their owners, not copied."""
    q = _floats("q", q, (None, None, None))
    batch_size, q_heads, head_dim = q.shape
    k_cache = _floats("k_cache", k_cache, (None, None, None, head_dim), q.dtype)
    v_cache = _floats("v_cache", v_cache, k_cache.shape, q.dtype)
    if layout not in _abi.LAYOUTS or lse_base not in ("e", "2"):
        raise errors.InvalidArgument(f"layout is {layout!r} and lse_base {lse_base!r}; 'NHD' or 'HND', 'e' or '2'")
    if scale is not None and (not np.isfinite(scale) or scale == 0):
        raise errors.InvalidArgument(f"scale is {scale}; it must be finite and not 0 (None: 1/sqrt(head_dim))")
    token, head = (1, 2) if layout == "NHD" else (2, 1)
    fields = {"num_pages": k_cache.shape[0], "sm_scale": scale or 0.0}
    seq_lens, kept, rows = _read_table(page_table, seq_lens, k_cache.shape[token], fields)
    if seq_lens is None:
        raise errors.InvalidArgument("seq_lens is None; only a page table with last_page_len tells the lengths")
    seq_lens = _ints("seq_lens", seq_lens, 1)
    if rows != batch_size or seq_lens.size != batch_size:
        raise errors.InvalidArgument(f"q has {batch_size} requests, page_table {rows} and seq_lens {seq_lens.size}")
    result, given_out = _output("out", out, q.shape, q.dtype)
    want_lse = return_lse or lse is not None
    result_lse, given_lse = _output("lse", lse, q.shape[:2], np.float32) if want_lse else (None, None)
    if batch_size:
        for name, array, axes in (("q", q, (0, 1)), ("o", result, (0, 1)), ("lse", result_lse, (0, 1))):
            if array is not None:
                fields |= {name: array.ctypes.data, f"{name}_stride_request": _elements(array, axes[0]),
                           f"{name}_stride_head": _elements(array, axes[1])}
        for name, array in (("k", k_cache), ("v", v_cache)):
            fields |= {name: array.ctypes.data or None, f"{name}_stride_page": _elements(array, 0),
                       f"{name}_stride_token": _elements(array, token), f"{name}_stride_head": _elements(array, head)}
        dtype = _abi.DTYPES[DTYPES[q.dtype]]
        batch = _abi.Batch(batch_size=batch_size, kv_len=seq_lens.ctypes.data, q_heads=q_heads,
                           kv_heads=k_cache.shape[head], head_dim=head_dim, page_size=k_cache.shape[token],
                           q_dtype=dtype, kv_dtype=dtype, layout=_abi.LAYOUTS[layout])
        _execute(planner, batch, _abi.Tensors(**fields), lse_base)
    del kept
    out = result if given_out is None else given_out
    return (out, result_lse if given_lse is None else given_lse) if return_lse else out


def _execute(planner, batch, tensors, lse_base):
    device = _abi.Device()
    check(lib.ekv_device_detect(context(), device))
    plan = Plan(planner, batch, device, None, context())
    size = plan.workspace_size(_abi.BACKEND_CPU)
    memory, address = _aligned(size)
    options = _abi.DecodeOptions(lse_base=_abi.LSE_BASE2 if lse_base == "2" else _abi.LSE_NATURAL)
    check(lib.ekv_decode(plan.handle, tensors, options, address, size))
    del memory


def merge_states(states, lse, *, lse_base="e"):
    """Merges attention states over disjoint sets of tokens, in their order.

    states: [num_states, ..., head_dim], float32, float16 or bfloat16; lse: float32 [num_states, ...], -inf for an
    empty state.

    Returns ([..., head_dim], [...]); rows whose states are all empty are 0 and -inf."""
    states, lse = asarray(states, "states"), asarray(lse, "lse")
    if states.dtype not in DTYPES or states.ndim < 2 or not states.shape[0] or not states.shape[-1]:
        raise errors.InvalidArgument(f"states is {states.dtype} of shape {states.shape}; it must be float32, float16 "
                                     "or bfloat16 of [num_states, ..., head_dim]")
    if lse.dtype != np.float32 or lse.shape != states.shape[:-1]:
        raise errors.InvalidArgument(f"lse is {lse.dtype} of shape {lse.shape}; it must be float32 of "
                                     f"{states.shape[:-1]}")
    states, lse = np.ascontiguousarray(states), np.ascontiguousarray(lse)
    merged, merged_lse = np.empty(states.shape[1:], states.dtype), np.empty(lse.shape[1:], np.float32)
    dtype = _abi.DTYPES[DTYPES[states.dtype]]
    check(lib.ekv_merge_states(context(), _abi.MergeArgs(
        num_states=states.shape[0], rows=merged_lse.size, head_dim=states.shape[-1], part_dtype=dtype,
        o_parts=states.ctypes.data, lse_parts=lse.ctypes.data, o_dtype=dtype, o=merged.ctypes.data,
        lse=merged_lse.ctypes.data, lse_base=_abi.LSE_BASE2 if lse_base == "2" else _abi.LSE_NATURAL)))
    return merged, merged_lse
