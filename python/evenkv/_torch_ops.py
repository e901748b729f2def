# SPDX-License-Identifier: Apache-2.0
"""The custom operators evenkv::decode, decode_lse, decode_out and merge_states, by the low-level registration
(torch.library.Library): a call then costs the dispatcher and this file, no checks of torch's own.

What a call needs beyond its addresses follows from shapes, strides, dtypes and options alone.  It is worked out once
for each such signature and kept (_Signature); a call looks it up and enters ekv_decode.  Plans belong to signatures:
on a GPU one for each stream (an ekv_plan has one copy of its records, so its decodes have to be ordered) and one more
for all captures of graphs; on the CPU one.  All plans of CUDA tensors whose lengths live on the GPU are made there
(on_device), so nothing waits and nothing is read back."""

import contextlib
import ctypes
import functools
import math
import os
import threading
import typing
import weakref

import torch

from . import _abi, _calls, _cuda, errors
from ._library import HOST, Plan, check, context, lib

_current_device = torch._C._cuda_getDevice if torch.cuda.is_available() else None
_current_stream = torch._C._cuda_getCurrentRawStream if torch.cuda.is_available() else None
_is_capturing = torch._C._cuda_isCurrentStreamCapturing if torch.cuda.is_available() else None

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_ALIGN = 256  # of a workspace, evenkv.h
_MAX_BOUND = 2**30  # of a length
_MAX_SIGNATURES = 2048  # older half dropped beyond: a plan of 1,024 requests keeps about 100 KB of GPU memory


# ---- Checks of one signature ---------------------------------------------------------------------------------------


def _describe(tensor):
    return f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"


def _refuse(name, tensor, wanted):
    raise errors.InvalidArgument(f"{name} is {_describe(tensor)}; it must be {wanted}")


def _check_floats(name, tensor, shape, dtype, device):
    """shape: of ints, None for any size."""
    if tensor.dim() != len(shape) or any(w is not None and w != s for w, s in zip(shape, tensor.shape)):
        _refuse(name, tensor, "[" + ", ".join("*" if w is None else str(w) for w in shape) + "]")
    if tensor.dtype != dtype:
        _refuse(name, tensor, f"{dtype}")
    if tensor.device != device:
        _refuse(name, tensor, f"on {device}, where q is")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise errors.InvalidArgument(f"{name} has strides {tensor.stride()}; the last dimension must be contiguous")


def _check_ints(name, tensor, shape, devices):
    if tensor.dtype != torch.int32:
        _refuse(name, tensor, "torch.int32")
    if tensor.dim() != len(shape) or any(w is not None and w != s for w, s in zip(shape, tensor.shape)):
        _refuse(name, tensor, "[" + ", ".join("*" if w is None else str(w) for w in shape) + "]")
    if tensor.device not in devices:
        _refuse(name, tensor, "on " + " or ".join(str(device) for device in devices))
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise errors.InvalidArgument(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")


def _next_power_of_two(value):
    return 1 << max(value - 1, 0).bit_length()


class Options(typing.NamedTuple):
    """What a call asks for beyond its tensors.  Travels through the dispatcher as one string, which costs less than
    its members and is a constant in a compiled graph."""

    planner: str = "even"
    layout: str = "NHD"  # of a page: NHD or HND
    lse_base: str = "e"  # e or 2
    max_seq_len: int = 0  # an upper bound of the lengths; 0: from the page table
    sm_margin: int = 0
    owner: int = 0  # plans of an owner are its own; 0: nobody's
    replan: bool = True  # on the GPU; False: the lengths are those of the last call with this owner

    def text(self):
        return " ".join(map(str, self))


@functools.lru_cache(maxsize=1024)
def _parse(text):
    planner, layout, lse_base, max_seq_len, sm_margin, owner, replan = text.split(" ")
    return Options(planner, layout, lse_base, int(max_seq_len), int(sm_margin), int(owner), replan == "True")


class _Signature:
    """What all calls with these shapes, strides, dtypes, devices and options share."""

    def __init__(self, q, k_cache, v_cache, seq_lens, table, indices, table_rows, out, lse, scale, options):
        """table: the block table where indices is None, else indptr.  scale: 0 for 1/sqrt(head_dim)."""
        self.options = options = _parse(options)
        self.batch = self._read_floats(q, k_cache, v_cache, scale)
        self.batch_size = self.batch.batch_size
        self.on_gpu = q.device.type == "cuda"
        self.on_device = self.on_gpu and seq_lens.device.type == "cuda"
        self.device, self.index = q.device, q.device.index
        self.csr = indices is not None
        self._check_outputs(q, out, lse)
        _check_ints("seq_lens", seq_lens, (self.batch_size,), {q.device, torch.device("cpu")})
        width = self._read_table(table, indices, table_rows)
        # On the GPU bounds take the place of lengths.  They are rounded up, so that a growing table keeps its plan.
        tokens = max(width, 1) * self.batch.page_size
        self.bound = min(options.max_seq_len or _next_power_of_two(tokens), _MAX_BOUND) if self.on_device else 0
        if indices is None:
            # A length within the bound must not seem to pass the table; the caller answers for lengths on a GPU.
            bound_width = -(-self.bound // self.batch.page_size) if self.on_device else 0
            self.fields |= {"block_table_stride": table.stride(0), "block_table_width": max(width, bound_width)}
        self.plan_key = (options.planner, self.device, self.on_device, bytes(self.batch), self.bound,
                         options.max_seq_len, options.sm_margin, options.owner)
        self.entries = {}  # by stream, or _CAPTURE

    def _read_floats(self, q, k_cache, v_cache, scale):
        layout = self.options.layout
        if q.dim() != 3:
            _refuse("q", q, "[batch_size, q_heads, head_dim]")
        if q.dtype not in DTYPES:
            _refuse("q", q, "torch.float32, torch.float16 or torch.bfloat16")
        if layout not in _abi.LAYOUTS:
            raise errors.InvalidArgument(f"layout is {layout!r}; it must be 'NHD' or 'HND'")
        if self.options.lse_base not in ("e", "2"):
            raise errors.InvalidArgument(f"lse_base is {self.options.lse_base!r}; it must be 'e' or '2'")
        if not math.isfinite(scale):
            raise errors.InvalidArgument(f"scale is {scale}; it must be finite")
        batch_size, q_heads, head_dim = q.shape
        _check_floats("q", q, q.shape, q.dtype, q.device)
        _check_floats("k_cache", k_cache, (None, None, None, head_dim), q.dtype, q.device)
        _check_floats("v_cache", v_cache, k_cache.shape, q.dtype, q.device)
        token, head = (1, 2) if layout == "NHD" else (2, 1)
        page_size, kv_heads = k_cache.shape[token], k_cache.shape[head]
        if page_size < 1 or head_dim < 1:
            raise errors.InvalidArgument(f"k_cache is {_describe(k_cache)}; page_size and head_dim must be at least 1")
        if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
            raise errors.InvalidArgument(f"q has {q_heads} heads and k_cache {kv_heads}; a multiple is needed")
        q_stride, k_stride, v_stride = q.stride(), k_cache.stride(), v_cache.stride()
        self.fields = {
            "q_stride_request": q_stride[0], "q_stride_head": q_stride[1],
            "k_stride_page": k_stride[0], "k_stride_token": k_stride[token], "k_stride_head": k_stride[head],
            "v_stride_page": v_stride[0], "v_stride_token": v_stride[token], "v_stride_head": v_stride[head],
            "num_pages": k_cache.shape[0], "sm_scale": scale,
        }
        dtype = _abi.DTYPES[DTYPES[q.dtype]]
        return _abi.Batch(batch_size=batch_size, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
                          page_size=page_size, q_dtype=dtype, kv_dtype=dtype, layout=_abi.LAYOUTS[layout])

    def _check_outputs(self, q, out, lse):
        if out is not None:
            _check_floats("out", out, q.shape, q.dtype, q.device)
            self.fields |= {"o_stride_request": out.stride(0), "o_stride_head": out.stride(1)}
        if lse is not None:
            if lse.dtype != torch.float32 or lse.shape != q.shape[:2] or lse.device != q.device:
                _refuse("lse", lse, f"{list(q.shape[:2])} of torch.float32 on {q.device}")
            self.fields |= {"lse_stride_request": lse.stride(0), "lse_stride_head": lse.stride(1)}

    def _read_table(self, table, indices, table_rows):
        """Checks it.  Returns the most pages that a request can have in it."""
        devices = {self.device}
        if indices is None:
            _check_ints("block_table", table, (self.batch_size if table_rows is None else None, None), devices)
            if table_rows is not None:
                _check_ints("table_rows", table_rows, (self.batch_size,), devices)
            return table.shape[1]
        if table_rows is not None:
            raise errors.InvalidArgument("table_rows goes with a block table, not with indptr and indices")
        _check_ints("indptr", table, (self.batch_size + 1,), devices)
        _check_ints("indices", indices, (None,), devices)
        return indices.shape[0]


# ---- Plans ---------------------------------------------------------------------------------------------------------

_CAPTURE = "capture"
_signatures = {}
_plans = weakref.WeakValueDictionary()  # by plan_key and stream; signatures own them
_captured = []  # plans that graphs use, for good: nobody says when a graph ends
_table_lock = threading.RLock()  # collecting garbage may call forget anywhere


def _forget():
    _signatures.clear()
    _captured.clear()


os.register_at_fork(after_in_child=_forget)


def _device_of(handle):
    device = _abi.Device()
    check(lib.ekv_device_detect(handle, device))
    return device


def _create_plan(signature, lengths):
    """lengths: ctypes array of the batch's lengths or bounds."""
    handle = context(signature.index if signature.on_gpu else HOST)
    options = _abi.PlanOptions(sm_margin=signature.options.sm_margin, cuda=signature.on_gpu,
                               on_device=signature.on_device, table_width=signature.options.max_seq_len)
    signature.batch.kv_len = ctypes.addressof(lengths)
    try:
        with _cuda.allocation_allowed() if signature.on_gpu else contextlib.nullcontext():
            return Plan(signature.options.planner, signature.batch, _device_of(handle), options, handle)
    finally:
        signature.batch.kv_len = None


def _bounds(signature):
    return (ctypes.c_int32 * signature.batch_size)(*[signature.bound] * signature.batch_size)


class _Entry:
    """A plan and the structs of a signature's calls with it, on one stream."""

    def __init__(self, signature, plan, stream):
        backend = _abi.BACKEND_CUDA if signature.on_gpu else _abi.BACKEND_CPU
        base = _abi.LSE_BASE2 if signature.options.lse_base == "2" else _abi.LSE_NATURAL
        self.tensors = _abi.Tensors(**signature.fields)
        self.options = _abi.DecodeOptions(backend=backend, lse_base=base, stream=stream or None)
        self.tensors_address, self.options_address = map(ctypes.addressof, (self.tensors, self.options))
        self.planned = False  # on the GPU: the plan's records are those of some lengths
        self.replan, self.csr = signature.options.replan, signature.csr
        self.plan, self.lock, self.handle = plan, plan.lock, plan.handle
        self.size = plan.workspace_size(backend)
        self.workspace = None  # address of the plan's own, taken at the first use

    def own_workspace(self, device):
        """The address of memory that lives as long as the plan: its stream or the lock orders the uses."""
        if self.plan.workspace is None:
            if device.type == "cuda":
                memory = _cuda.Memory(self.size, device.index, torch.cuda.empty_cache)
                self.plan.workspace = memory, memory.address
            else:
                self.plan.workspace = _new_workspace(self.size, device)
        self.workspace = self.plan.workspace[1]
        return self.workspace


def _shared_plan(key, make):
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = make()
        plan.workspace = None  # (what owns it, its address)
    return plan


def _add_entry(signature, place, stream, make):
    """place: stream, or _CAPTURE: the plan of captures outlives the graphs, and is that of all graphs of these shapes:
    their replays have to be ordered among each other."""
    with _table_lock:
        entry = signature.entries.get(place)
        if entry is None:
            plan = _shared_plan((signature.plan_key, place), make)
            entry = signature.entries[place] = _Entry(signature, plan, stream)
            if place is _CAPTURE and plan not in _captured:
                _captured.append(plan)
        return entry


def _remember(key, signature):
    # Plans must not end during a capture, which the freeing of memory would invalidate.
    if len(_signatures) >= _MAX_SIGNATURES and not (signature.on_gpu and torch.cuda.is_current_stream_capturing()):
        with _table_lock:
            for old in list(_signatures)[: _MAX_SIGNATURES // 2]:
                _signatures.pop(old, None)
    _signatures[key] = signature


def forget(owner):
    """Lets go of an owner's plans, unless a capture would suffer from it."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    with _table_lock:
        for key, signature in list(_signatures.items()):
            if signature.options.owner == owner:
                _signatures.pop(key, None)


# ---- Calls ---------------------------------------------------------------------------------------------------------

# Names of ekv_tensors in error texts, as the caller knows them.
_NAMES = (("tensors.page_indptr", "indptr"), ("page_indptr", "indptr"), ("tensors.page_indices", "indices"),
          ("tensors.block_table_rows", "table_rows"), ("tensors.block_table", "block_table"),
          ("tensors.kv_len", "seq_lens"), ("tensors.lse", "lse"), ("tensors.sm_scale", "scale"),
          ("tensors.q", "q"), ("tensors.k", "k_cache"), ("tensors.v", "v_cache"), ("tensors.o", "out"))


def _fail(status):
    text = lib.ekv_last_error().decode(errors="replace")
    for name, known in _NAMES:
        text = text.replace(name, known)
    raise errors.of_status(status, text)


def _given_workspace(given, size, device):
    """The first aligned address in the caller's workspace."""
    if given.device != device or not given.is_contiguous():
        raise errors.InvalidArgument(f"workspace is {_describe(given)}; it must be contiguous and on {device}")
    address = given.data_ptr()
    start = -(-address // _ALIGN) * _ALIGN
    if address + given.nbytes < start + size:
        raise errors.of_status(
            "EKV_ERROR_WORKSPACE_TOO_SMALL",
            f"workspace has {given.nbytes} bytes from address {address}; this call needs {size} from an address that "
            f"is a multiple of {_ALIGN}: see evenkv.torch.workspace_size")
    return start


def _new_workspace(size, device):
    memory = torch.empty(size + _ALIGN, dtype=torch.uint8, device=device)
    return memory, -(-memory.data_ptr() // _ALIGN) * _ALIGN


def _host_plan(signature, seq_lens):
    """Made on the host from these lengths.  seq_lens: contiguous, on the CPU."""
    lengths = (ctypes.c_int32 * signature.batch_size).from_address(seq_lens.data_ptr())
    return _create_plan(signature, lengths)


def _decode_by_host_plan(signature, stream, addresses, seq_lens, workspace):
    entry = signature.entries.get(stream)
    if entry is None:
        entry = _add_entry(signature, stream, stream, lambda: _host_plan(signature, seq_lens))
    with entry.lock:
        status = lib.ekv_plan_update(entry.handle, seq_lens.data_ptr(), signature.batch_size)
        if not status:
            memory = (entry.workspace or entry.own_workspace(signature.device) if workspace is None else
                      _given_workspace(workspace, entry.size, signature.device))
            status = _calls.launch(entry.handle, entry.tensors_address, entry.options_address, memory, entry.size,
                                   addresses, False, entry.csr)
            if status:
                _fail(status)
    if status == _abi.STATUSES["EKV_ERROR_CAPACITY"]:  # even-invariant has room for a number of tokens
        with _table_lock:
            _plans.pop((signature.plan_key, stream), None)
            signature.entries.pop(stream, None)
        _add_entry(signature, stream, stream, lambda: _host_plan(signature, seq_lens))
        _decode_by_host_plan(signature, stream, addresses, seq_lens, workspace)
    elif status:
        _fail(status)


def _check_table_on_cpu(table, indices, table_rows):
    """What the library cannot know, as it is not told how much there is."""
    if indices is not None and (largest := int(table.max())) > indices.shape[0]:
        raise errors.InvalidArgument(f"indptr has {largest}; indices has {indices.shape[0]} entries")
    if table_rows is not None and (largest := int(table_rows.max())) >= table.shape[0]:
        raise errors.InvalidArgument(f"table_rows has {largest}; block_table has {table.shape[0]} rows")


def _decode_cuda(signature, addresses, seq_lens, workspace):
    """With the signature's device current."""
    stream = _current_stream(signature.index)
    capturing = _is_capturing()
    if not signature.on_device:
        if capturing:
            raise errors.Unsupported("seq_lens is on the CPU while a CUDA graph is captured; lengths have to be on "
                                     f"{signature.device} then, with planner even, even-invariant or fa3")
        return _decode_by_host_plan(signature, stream, addresses, seq_lens, workspace)
    entry = signature.entries.get(_CAPTURE if capturing else stream)
    if entry is None:
        entry = _add_entry(signature, _CAPTURE if capturing else stream, stream,
                           lambda: _create_plan(signature, _bounds(signature)))
    with entry.lock:
        if workspace is not None:
            memory = _given_workspace(workspace, entry.size, signature.device)
        elif capturing:  # from the graph's pool, which is free for what follows in the graph after this call
            workspace, memory = _new_workspace(entry.size, signature.device)
            entry.options.stream = stream or None
        else:
            memory = entry.workspace or entry.own_workspace(signature.device)
        # A graph has to plan in itself: what was planned outside of it is gone when it is replayed.
        status = _calls.launch(entry.handle, entry.tensors_address, entry.options_address, memory, entry.size,
                               addresses, capturing or entry.replan or not entry.planned, entry.csr)
        if status:
            _fail(status)
        entry.planned = True


def _decode(q, k_cache, v_cache, seq_lens, table, indices, table_rows, workspace, out, lse, scale, options):
    try:
        what, addresses = _calls.describe(q, k_cache, v_cache, seq_lens, table, indices, table_rows, out, lse)
    except Exception:  # a tensor without strides, say, which _Signature refuses by name
        _Signature(q, k_cache, v_cache, seq_lens, table, indices, table_rows, out, lse, scale, options)
        raise
    key = (what, scale, options)
    signature = _signatures.get(key)
    if signature is None:
        signature = _Signature(q, k_cache, v_cache, seq_lens, table, indices, table_rows, out, lse, scale, options)
        _remember(key, signature)
    if not signature.batch_size:
        return
    if not signature.on_gpu:
        _check_table_on_cpu(table, indices, table_rows)
        _decode_by_host_plan(signature, 0, addresses, seq_lens, workspace)
    elif _current_device() == signature.index:
        _decode_cuda(signature, addresses, seq_lens, workspace)
    else:
        with torch.cuda.device(signature.index):
            _decode_cuda(signature, addresses, seq_lens, workspace)


# ---- Registration --------------------------------------------------------------------------------------------------

_library = torch.library.Library("evenkv", "DEF")
_INPUTS = ("Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, Tensor table, Tensor? indices, "
           "Tensor? table_rows, Tensor? workspace")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_library.define(f"decode({_INPUTS}, float scale, str options) -> Tensor", tags=_TAGS)
_library.define(f"decode_lse({_INPUTS}, float scale, str options) -> (Tensor, Tensor)", tags=_TAGS)
_library.define(f"decode_out({_INPUTS}, Tensor(a!) out, Tensor(b!)? lse, float scale, str options) -> ()", tags=_TAGS)
_library.define("merge_states(Tensor states, Tensor lse, str lse_base) -> (Tensor, Tensor)", tags=_TAGS)


def _new_out(q):
    if q.dim() != 3:
        _refuse("q", q, "[batch_size, q_heads, head_dim]")
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _new_lse(q):
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def _decode_op(q, k_cache, v_cache, seq_lens, table, indices, table_rows, workspace, scale, options):
    out = _new_out(q)
    _decode(q, k_cache, v_cache, seq_lens, table, indices, table_rows, workspace, out, None, scale, options)
    return out


def _decode_lse_op(q, k_cache, v_cache, seq_lens, table, indices, table_rows, workspace, scale, options):
    out, lse = _new_out(q), _new_lse(q)
    _decode(q, k_cache, v_cache, seq_lens, table, indices, table_rows, workspace, out, lse, scale, options)
    return out, lse


def _decode_fake(q, k_cache, v_cache, seq_lens, table, indices, table_rows, workspace, scale, options):
    return _new_out(q)


def _decode_lse_fake(q, k_cache, v_cache, seq_lens, table, indices, table_rows, workspace, scale, options):
    return _new_out(q), _new_lse(q)


def _decode_out_fake(q, k_cache, v_cache, seq_lens, table, indices, table_rows, workspace, out, lse, scale, options):
    return None


def _merge_op(states, lse, lse_base):
    """states: [num_states, ..., head_dim]; lse: [num_states, ...], float32."""
    if states.dtype not in DTYPES:
        _refuse("states", states, "torch.float32, torch.float16 or torch.bfloat16")
    if lse.dtype != torch.float32 or lse.shape != states.shape[:-1] or lse.device != states.device:
        _refuse("lse", lse, f"{list(states.shape[:-1])} of torch.float32 on {states.device}")
    if states.dim() < 2 or not states.shape[0] or not states.shape[-1]:
        _refuse("states", states, "[num_states, ..., head_dim] with at least one of each")
    states, lse = states.contiguous(), lse.contiguous()
    merged, merged_lse = _merge_fake(states, lse, lse_base)
    on_gpu = states.device.type == "cuda"
    arguments = _abi.MergeArgs(
        backend=_abi.BACKEND_CUDA if on_gpu else _abi.BACKEND_CPU, num_states=states.shape[0], rows=merged_lse.numel(),
        head_dim=states.shape[-1], part_dtype=_abi.DTYPES[DTYPES[states.dtype]], o_parts=states.data_ptr(),
        lse_parts=lse.data_ptr(), o_dtype=_abi.DTYPES[DTYPES[states.dtype]], o=merged.data_ptr(),
        lse=merged_lse.data_ptr(), lse_base=_abi.LSE_BASE2 if lse_base == "2" else _abi.LSE_NATURAL,
        stream=(torch._C._cuda_getCurrentRawStream(states.device.index) or None) if on_gpu else None)
    check(lib.ekv_merge_states(context(states.device.index if on_gpu else HOST), arguments))
    return merged, merged_lse


def _merge_fake(states, lse, lse_base):
    return (torch.empty(states.shape[1:], dtype=states.dtype, device=states.device),
            torch.empty(states.shape[1:-1], dtype=torch.float32, device=states.device))


for _key in ("CPU", "CUDA"):
    _library.impl("decode", _decode_op, _key)
    _library.impl("decode_lse", _decode_lse_op, _key)
    _library.impl("decode_out", _decode, _key)
    _library.impl("merge_states", _merge_op, _key)
torch.library.register_fake("evenkv::decode", _decode_fake, lib=_library)
torch.library.register_fake("evenkv::decode_lse", _decode_lse_fake, lib=_library)
torch.library.register_fake("evenkv::decode_out", _decode_out_fake, lib=_library)
torch.library.register_fake("evenkv::merge_states", _merge_fake, lib=_library)

decode = torch.ops.evenkv.decode.default
decode_lse = torch.ops.evenkv.decode_lse.default
decode_out = torch.ops.evenkv.decode_out.default
merge_states = torch.ops.evenkv.merge_states.default


def workspace_size(q, k_cache, v_cache, seq_lens, table, indices, table_rows, options):
    """Bytes of a workspace that suffices for such a call, those for alignment included."""
    signature = _Signature(q, k_cache, v_cache, seq_lens, table, indices, table_rows, None, None, 0.0, options)
    if not signature.batch_size:
        return 0
    lengths = (_bounds(signature) if signature.on_device else
               (ctypes.c_int32 * signature.batch_size)(*seq_lens.tolist()))
    plan = _create_plan(signature, lengths)
    return plan.workspace_size(_abi.BACKEND_CUDA if signature.on_gpu else _abi.BACKEND_CPU) + _ALIGN
