# SPDX-License-Identifier: Apache-2.0
"""Finds and loads libevenkv, turns its statuses into exceptions, and owns its contexts."""

import ctypes
import os
import pathlib
import threading
import weakref

from . import _abi, _cuda, errors

_PACKAGE = pathlib.Path(__file__).resolve().parent
_TREE = _PACKAGE.parents[1]  # of a checkout, used through PYTHONPATH=python
FOLDERS = (_PACKAGE / "lib", _TREE / "build" / "release")  # where libraries are


def find(name, variable, *places):
    """The first that exists of the file that an environment variable names and the places; None if there is none."""
    if os.environ.get(variable):
        path = pathlib.Path(os.environ[variable])
        if not path.is_file():
            raise ImportError(f"{variable} is {path}, which is not a file; it should name {name}")
        return path
    return next((path for path in places if path.is_file()), None)


def _load():
    path = find("libevenkv.so", "EVENKV_LIBRARY", *(folder / "libevenkv.so" for folder in FOLDERS))
    if not path:
        raise ImportError(f"libevenkv.so is neither in {FOLDERS[0]} nor in a build of this tree; "
                          "`pip install .` or `make build` makes it, and EVENKV_LIBRARY names another one")
    library = ctypes.CDLL(str(path))
    _abi.declare(library)
    return library


lib = _load()


def check(status):
    """Raises the exception of a status other than EKV_OK."""
    if status:
        raise errors.of_status(status, lib.ekv_last_error().decode(errors="replace"))


# ---- Contexts ------------------------------------------------------------------------------------------------------

HOST = -2  # of ekv_context_options.cuda_device: no GPU

_contexts = {}
_contexts_lock = threading.Lock()


def context(cuda_device=HOST):
    """The context of a CUDA device, or without one; made at its first use, and kept until the process ends: plans
    of any thread may use it."""
    found = _contexts.get(cuda_device)
    if found is None:
        with _contexts_lock:
            found = _contexts.get(cuda_device)
            if found is None:
                made = ctypes.c_void_p()
                check(lib.ekv_context_create(_abi.ContextOptions(cuda_device=cuda_device), made))
                found = _contexts[cuda_device] = made.value
    return found


def _forget_contexts():
    # The pool's threads do not survive a fork; a child that used them would wait forever.
    _contexts.clear()


os.register_at_fork(after_in_child=_forget_contexts)


# ---- Plans ---------------------------------------------------------------------------------------------------------


def _free_of_gpu(handle):
    with _cuda.allocation_allowed():
        lib.ekv_plan_free(handle)


class Plan:
    """Owns an ekv_plan.  By one thread at a time, which `lock` is for."""

    def __init__(self, planner, batch, device, options, context_handle):
        """planner: str.  batch, device, options: structs of _abi.  batch.kv_len is read before this returns."""
        made = ctypes.c_void_p()
        check(lib.ekv_plan_create(context_handle, planner.encode(), batch, device, options, made))
        self.handle = made.value
        self.lock = threading.Lock()
        on_gpu = options is not None and options.cuda
        self._free = weakref.finalize(self, _free_of_gpu if on_gpu else lib.ekv_plan_free, self.handle)
        self._free.atexit = False  # the driver may be gone by then, and the process gives all back

    def workspace_size(self, backend):
        """Bytes that ekv_decode needs."""
        size = ctypes.c_size_t()
        check(lib.ekv_workspace_size(self.handle, backend, size))
        return size.value

    def info(self):
        """ekv_plan_info; its pointers are valid until the next update."""
        info = _abi.PlanInfo()
        check(lib.ekv_plan_info_get(self.handle, info))
        return info
