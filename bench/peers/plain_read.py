# SPDX-License-Identifier: Apache-2.0
"""A kernel that only reads: the plain read of evenkv bench (src/cuda/kernels) written in Triton, so that a process of
PyTorch can time it under its own flush."""

import torch
import triton
import triton.language as tl

# Threads a CTA, CTAs an SM, 16-byte loads in flight a thread: those of evenkv bench (src/cuda/cuda_bench.c).
SHAPES = ((128, 8, 8), (128, 8, 16), (256, 4, 8), (256, 8, 4), (256, 8, 8), (512, 2, 8), (512, 4, 4), (1024, 2, 4))
MAX_CTAS_PER_SM = 8


@triton.jit
def read_kernel(data, sink, count, BLOCK: tl.constexpr):
    """data: int32 [count]; sink: int32 [CTAs].  CTAs take blocks in turn."""
    within = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = block.to(tl.int64) * BLOCK + within
        total ^= tl.load(data + at, mask=at < count, other=0)
    tl.store(sink + tl.program_id(0), tl.xor_sum(total))


def readers(memory, size):
    """(what the shape is, a call that enqueues a read of the first `size` bytes) of each shape.

    memory: a contiguous tensor on a GPU; size: a multiple of 64, at most its bytes."""
    data = memory.view(torch.int32)
    num_sms = torch.cuda.get_device_properties(memory.device).multi_processor_count
    sink = torch.empty(num_sms * MAX_CTAS_PER_SM, dtype=torch.int32, device=memory.device)
    for threads, ctas, loads in SHAPES:
        def read(threads=threads, ctas=ctas, loads=loads):
            read_kernel[(num_sms * ctas,)](data, sink, size // 4, BLOCK=threads * loads * 4, num_warps=threads // 32)

        yield f"{threads} threads x {ctas} CTAs an SM x {loads} loads", read
