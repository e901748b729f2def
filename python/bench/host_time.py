#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time that one decode call takes on the host, from Python, in us.

    python/bench/host_time.py [--device cuda|cpu] [--csv FILE]

Calls come in rounds of 50, which fit the launch queue; the GPU is idle before each, and its work is not waited for
within it.  One small batch, so that the GPU is not what limits.  Rows: the operator itself (evenkv::decode_out, the
low-level registration), the functions over it, and for comparison torch's scaled_dot_product_attention."""

import argparse
import csv
import statistics
import sys
import time

import torch

import evenkv
import evenkv.flash_attn
import evenkv.flashinfer
import evenkv.torch
from evenkv import _torch_ops

ROUNDS, CALLS = 200, 50


def measure(call, synchronize):
    """(median, 10th percentile) of the rounds' mean, us."""
    for _ in range(20):
        call()
    times = []
    for _ in range(ROUNDS):
        synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    synchronize()
    return statistics.median(times), sorted(times)[ROUNDS // 10]


def calls(device):
    """(name, function) rows."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batch, q_heads, kv_heads, head_dim, page_size, width = 4, 8, 1, 128, 16, 8
    q = torch.randn(batch, q_heads, head_dim, device=device, dtype=dtype)
    k, v = torch.randn(2, batch * width, page_size, kv_heads, head_dim, device=device, dtype=dtype)
    table = torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width)
    lens = torch.tensor([100, 5, 17, 64], dtype=torch.int32, device=device)
    out = torch.empty_like(q)
    options = _torch_ops.Options().text()
    inputs = (q, k, v, lens, table, None, None, None)
    wrapper = evenkv.flashinfer.BatchDecodeWithPagedKVCacheWrapper()
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * width
    wrapper.plan(indptr, table.flatten(), torch.full_like(lens, page_size), q_heads, kv_heads, head_dim, page_size,
                 q_data_type=dtype)
    dense = [torch.randn(batch, q_heads, n, head_dim, device=device, dtype=dtype) for n in (1, 128, 128)]
    return [
        ("evenkv::decode_out operator", lambda: _torch_ops.decode_out(*inputs, out, None, 0.0, options)),
        ("evenkv::decode operator", lambda: _torch_ops.decode(*inputs, 0.0, options)),
        ("evenkv.torch.decode, out given", lambda: evenkv.torch.decode(q, k, v, table, lens, out=out)),
        ("evenkv.torch.decode", lambda: evenkv.torch.decode(q, k, v, table, lens)),
        ("flashinfer wrapper run, out given", lambda: wrapper.run(q, (k, v), out=out)),
        ("flash_attn_with_kvcache", lambda: evenkv.flash_attn.flash_attn_with_kvcache(
            q[:, None], k, v, cache_seqlens=lens, page_table=table)),
        ("torch scaled_dot_product_attention", lambda: torch.nn.functional.scaled_dot_product_attention(*dense)),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", help="write the rows there too")
    arguments = parser.parse_args()
    synchronize = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    rows = []
    with torch.inference_mode():
        for name, call in calls(arguments.device):
            median, low = measure(call, synchronize)
            rows.append({"call": name, "median_us": f"{median:.2f}", "p10_us": f"{low:.2f}", "device": arguments.device,
                         "torch": torch.__version__, "python": sys.version.split()[0]})
            print(f"{name:40} {median:8.2f} us, 10th percentile {low:.2f}")
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
