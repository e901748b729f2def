# SPDX-License-Identifier: Apache-2.0
"""DLPack for NumPy arrays with ml_dtypes' bfloat16, which NumPy itself neither takes nor gives.  Structs and type codes
are those of dlpack.h (dmlc/dlpack, version 0.8, unversioned capsules)."""

import ctypes

import ml_dtypes
import numpy as np

from . import errors

_CPU_MEMORY = (1, 3)  # kDLCPU, kDLCUDAHost
_TYPES = {  # (code, bits): dtype; codes 0 int, 1 uint, 2 float, 4 bfloat
    (0, 32): np.dtype(np.int32),
    (0, 64): np.dtype(np.int64),
    (2, 16): np.dtype(np.float16),
    (2, 32): np.dtype(np.float32),
    (2, 64): np.dtype(np.float64),
    (4, 16): np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: key for key, dtype in _TYPES.items()}


class _Tensor(ctypes.Structure):  # DLTensor
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):  # DLManagedTensor
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_api = ctypes.pythonapi
_api.PyCapsule_GetPointer.restype, _api.PyCapsule_GetPointer.argtypes = ctypes.c_void_p, [ctypes.py_object,
                                                                                          ctypes.c_char_p]
_api.PyCapsule_IsValid.restype, _api.PyCapsule_IsValid.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Memory:
    """What an array over a capsule's memory keeps alive: the capsule, whose end releases the memory."""

    def __init__(self, capsule, interface):
        self.capsule = capsule
        self.__array_interface__ = interface


def asarray(value, name):
    """value as a NumPy array over the same memory where it is an array or speaks DLPack, else a new array."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        return np.asarray(value)
    device = value.__dlpack_device__()
    if device[0] not in _CPU_MEMORY:
        raise errors.Unsupported(f"{name} is on DLPack device {tuple(map(int, device))}; these functions take CPU "
                                 "memory, and evenkv.torch takes CUDA tensors")
    capsule = value.__dlpack__()
    tensor = _Managed.from_address(_api.PyCapsule_GetPointer(capsule, b"dltensor")).tensor
    dtype = _TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise errors.Unsupported(f"{name} has DLPack type (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} "
                                 "lanes); int32, fp32, fp16 and bf16 are taken")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)) if tensor.strides else None
    raw = np.dtype(f"V{dtype.itemsize}") if dtype not in (np.dtype(np.int32), np.dtype(np.int64)) else dtype
    address = (tensor.data or 0) + tensor.byte_offset
    if 0 in shape:
        return np.empty(shape, dtype)
    interface = {"version": 3, "shape": shape, "strides": strides, "typestr": raw.str, "data": (address, False)}
    return np.asarray(_Memory(capsule, interface)).view(dtype)


# ---- Out -----------------------------------------------------------------------------------------------------------

_exported = {}  # address of each _Managed that somebody holds: what it points to


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _release(address):
    _exported.pop(address, None)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _end_capsule(capsule):
    if _api.PyCapsule_IsValid(capsule, b"dltensor"):  # nobody has taken it over
        pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", _api))
        _release(pointer(capsule, b"dltensor"))


class _Exported:
    def __init__(self, array):
        self._array = array

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **unused):
        array = self._array
        extents = ctypes.c_int64 * max(array.ndim, 1)
        shape = extents(*array.shape)
        strides = extents(*(stride // array.itemsize for stride in array.strides))
        code, bits = _CODES[array.dtype]
        managed = _Managed(tensor=_Tensor(data=array.ctypes.data, device_type=1, ndim=array.ndim, code=code, bits=bits,
                                          lanes=1, shape=shape, strides=strides),
                           deleter=ctypes.cast(_release, ctypes.c_void_p))
        address = ctypes.addressof(managed)
        _exported[address] = (managed, shape, strides, array)
        return _api.PyCapsule_New(address, b"dltensor", ctypes.cast(_end_capsule, ctypes.c_void_p))


def dlpack(array):
    """An object with __dlpack__ over a NumPy array's memory, bfloat16 included: torch.from_dlpack(evenkv.dlpack(a)).

    array: fp32, fp16, bf16, int32 or int64, strides in whole elements.  The memory is shared, not copied."""
    if array.dtype not in _CODES or any(stride % array.itemsize for stride in array.strides):
        raise errors.Unsupported(f"array of {array.dtype} with strides {array.strides}: DLPack is made for fp32, fp16, "
                                 "bf16, int32 and int64, strides in whole elements")
    return _Exported(array)
