# SPDX-License-Identifier: Apache-2.0
"""The two steps that every decode of torch tensors takes: describe its tensors, and enter ekv_decode.

By libevenkv_python.so (python/native/calls.c) in about 1 us together, where torch shows DLPack's exchange API (2.10 and
later); else in Python, which takes some 10 us.  Both return what the other takes, but the descriptions of one are not
those of the other."""

import ctypes
import os
import pathlib

import torch

from . import _abi, _library

# Of addresses, in the order of ekv_tensors; of `place` in calls.c.
Q, K, V, KV_LEN, TABLE, INDICES, TABLE_ROWS, O, LSE = range(9)

_EKV_DECODE = ctypes.cast(_library.lib.ekv_decode, ctypes.c_void_p).value


def describe_in_python(*tensors):
    """(what they are, hashable and equal for calls alike; their addresses).  tensors: nine, or None for some."""
    return (tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors),
            tuple(0 if t is None else t.data_ptr() for t in tensors))


def launch_through(decode):
    """launch in Python.  decode: address of ekv_decode."""
    enter = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 4, ctypes.c_size_t)(decode)

    def launch(plan, tensors, options, workspace, workspace_size, addresses, planning, csr):
        """ekv_decode with the tensors at the addresses of describe.  tensors: address of a struct with the rest of
        them; planning: whether to hand it kv_len.  Returns the status."""
        made = _abi.Tensors.from_buffer_copy(ctypes.string_at(tensors, ctypes.sizeof(_abi.Tensors)))
        made.q, made.k, made.v, made.o, made.lse = (addresses[place] for place in (Q, K, V, O, LSE))
        made.kv_len = addresses[KV_LEN] if planning else None
        table = addresses[TABLE] or addresses[Q]  # one without entries is not read, but may not be NULL
        if csr:
            made.page_indptr, made.page_indices = table, addresses[INDICES] or table
        else:
            made.block_table, made.block_table_rows = table, addresses[TABLE_ROWS]
        return enter(plan, ctypes.addressof(made), options, workspace, workspace_size)

    return launch


def _find():
    """libevenkv_python.so, or None."""
    beside = [pathlib.Path(os.environ["EVENKV_LIBRARY"]).parent] if os.environ.get("EVENKV_LIBRARY") else []
    return _library.find("libevenkv_python.so", "EVENKV_PYTHON_LIBRARY",
                         *(folder / "libevenkv_python.so" for folder in (*beside, *_library.FOLDERS)))


def load_native(decode=_EKV_DECODE):
    """(describe, launch) of libevenkv_python.so.  Raises ImportError where it is not there or cannot be used."""
    path, capsule = _find(), getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if path is None or capsule is None:
        raise ImportError("no libevenkv_python.so" if path is None else
                          f"torch {torch.__version__} has no __dlpack_c_exchange_api__")
    try:
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        calls = ctypes.PyDLL(str(path)).evenkv_python_calls
        calls.restype, calls.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.py_object]
        return calls(get_pointer(capsule, b"dlpack_exchange_api"), decode, None)
    except (AttributeError, OSError, TypeError, ValueError) as error:  # another interpreter, another DLPack
        raise ImportError(f"{path} cannot be used: {error}") from error


def load_python(decode=_EKV_DECODE):
    """The same two in Python."""
    return describe_in_python, launch_through(decode)


try:
    describe, launch = load_native()
    NATIVE = True
except ImportError:
    describe, launch = load_python()
    NATIVE = False
