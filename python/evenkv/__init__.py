# SPDX-License-Identifier: Apache-2.0
"""evenkv: decode attention for LLM serving whose time follows the number of KV tokens in the batch.

    evenkv.decode, evenkv.merge_states     on NumPy and DLPack arrays in CPU memory
    evenkv.torch                           on torch tensors, CPU and CUDA
    evenkv.flashinfer, evenkv.flash_attn   the calls of FlashInfer and FlashAttention
    evenkv.hf                              an attention implementation for Hugging Face transformers
    evenkv.plan, evenkv.explain            what a planner makes of a batch, and who waits for whom
    evenkv.simulate, evenkv.plot_timeline  how long it would take on a GPU, and when each tile ran

docs/python.md is the guide."""

import importlib

from ._library import lib as _lib
from .arrays import decode, merge_states
from .dlpack import dlpack
from .errors import BackendUnavailable, EvenkvError, InvalidArgument, NotFound, OutOfMemory, Unsupported
from .planning import Explanation, Plan, Simulation, devices, explain, plan, planners, simulate, systems
from .plotting import plot_timeline

__version__ = _lib.ekv_version_string().decode()
__all__ = ["BackendUnavailable", "EvenkvError", "Explanation", "InvalidArgument", "NotFound", "OutOfMemory", "Plan",
           "Simulation", "Unsupported", "decode", "devices", "dlpack", "explain", "merge_states", "plan", "planners",
           "plot_timeline", "simulate", "systems"]  # fmt: skip
_LAZY = ("flash_attn", "flashinfer", "hf", "torch")  # they import torch


def __getattr__(name):
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
