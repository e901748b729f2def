# SPDX-License-Identifier: Apache-2.0
"""Memory of a CUDA device that lives as long as a plan, straight from the driver.

Not from torch's allocator: what that gives out may belong to the private pool of a CUDA graph (torch.cuda.MemPool, and
the warm-up of torch.compile's reduce-overhead mode), and whoever owns the pool takes it back."""

import contextlib
import ctypes
import functools
import weakref

from . import errors

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def _driver():
    return ctypes.CDLL("libcuda.so.1")


def _check(function, *arguments):
    result = getattr(_driver(), function)(*arguments)
    if result:
        raise errors.of_status("EKV_ERROR_OUT_OF_MEMORY" if result == _OUT_OF_MEMORY else "EKV_ERROR_DRIVER",
                               f"{function} returned CUDA error {result}")


@contextlib.contextmanager
def allocation_allowed():
    """Allocating and freeing would invalidate a capture, of any thread, unless this thread's mode is relaxed for it."""
    mode = ctypes.c_int(_RELAXED)
    _check("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _check("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@functools.cache
def _primary_context(index):
    """That of torch, which keeps it until the process ends, and so may this."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check("cuDeviceGet", ctypes.byref(device), index)
    _check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextlib.contextmanager
def _entered(index):
    _check("cuCtxPushCurrent_v2", _primary_context(index))
    try:
        with allocation_allowed():
            yield
    finally:
        _check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def _free(index, address):
    """Waits for what runs on the device, so that kernels may still use the memory when its owner ends."""
    with _entered(index):
        _check("cuMemFree_v2", ctypes.c_uint64(address))


class Memory:
    """size bytes at `address`, aligned to 256 bytes, on device `index`."""

    def __init__(self, size, index, make_room):
        """make_room: called where there is none, before a second try."""
        address = ctypes.c_uint64()
        with _entered(index):
            for last in (False, True):
                try:
                    _check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
                    break
                except errors.EvenkvError as error:
                    if last or error.status != "EKV_ERROR_OUT_OF_MEMORY":
                        raise
                    make_room()
        self.address = address.value
        weakref.finalize(self, _free, index, self.address).atexit = False
