# SPDX-License-Identifier: Apache-2.0
"""Errors of the library as exceptions.  Each has the text of ekv_last_error, which names the offending value, and
the name of its ekv_status in `status`."""

from . import _abi


class EvenkvError(RuntimeError):
    """Base of all errors that libevenkv reports."""

    status = "EKV_ERROR_UNKNOWN"

    def __init__(self, text, status=None):
        super().__init__(text)
        if status:
            self.status = status


class InvalidArgument(EvenkvError, ValueError):
    """An argument is outside what its description allows."""

    status = "EKV_ERROR_INVALID_ARGUMENT"


class Unsupported(EvenkvError, NotImplementedError):
    """Legal, but this build, backend or front cannot do it; nothing is silently ignored."""

    status = "EKV_ERROR_UNSUPPORTED"


class NotFound(EvenkvError, LookupError):
    """No planner, device or model of that name."""

    status = "EKV_ERROR_NOT_FOUND"


class BackendUnavailable(EvenkvError):
    """This machine or build has no driver, device or kernels for the backend."""

    status = "EKV_ERROR_BACKEND_UNAVAILABLE"


class OutOfMemory(EvenkvError, MemoryError):
    """Memory ran out."""

    status = "EKV_ERROR_OUT_OF_MEMORY"


_CLASSES = {kind.status: kind for kind in (InvalidArgument, Unsupported, NotFound, BackendUnavailable, OutOfMemory)}
_NAMES = {value: name for name, value in _abi.STATUSES.items()}


def of_status(status, text):
    """The exception for an ekv_status, given as its number or name."""
    name = status if isinstance(status, str) else _NAMES.get(status, "EKV_ERROR_UNKNOWN")
    return _CLASSES.get(name, EvenkvError)(text, name)
