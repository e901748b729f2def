#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time that one decode call takes on the host, from Python, in us.

    python/bench/host_time.py [--device cuda|cpu] [--csv FILE] [--at-most US]

Calls come in rounds of 50, which fit the launch queue; the GPU is idle before each, and its work is not waited for
within it.  Rows and columns take turns, round by round, so that a clock that changes is the same to all.  One small
batch, so that the GPU is not what limits.  Rows: the operators themselves (evenkv::decode_out and evenkv::decode, the
low-level registration), the functions over them, and for comparison torch's scaled_dot_product_attention.  Columns:
the whole call; the same with a function that does nothing in the place of ekv_decode, which is what Python, torch's
dispatcher and this package take; and that without libevenkv_python.so, as with torch before 2.10.

--at-most US    exit status 1 if evenkv::decode_out takes longer, all in all"""

import argparse
import csv
import ctypes
import statistics
import sys
import time

import torch

import evenkv
import evenkv.flash_attn
import evenkv.flashinfer
import evenkv.torch
from evenkv import _calls, _torch_ops

ROUNDS, CALLS = 100, 50


def measure(rows, ways, synchronize):
    """(median, 10th percentile) of the rounds' mean, us, by (row, column)."""
    times = {(name, column): [] for name, _ in rows for column in ways}
    for turn in range(-2, ROUNDS):  # two rounds to warm up
        for column, (_calls.describe, _calls.launch) in ways.items():
            for name, call in rows:
                synchronize()
                begin = time.perf_counter()
                for _ in range(CALLS):
                    call()
                if turn >= 0:
                    times[name, column].append((time.perf_counter() - begin) / CALLS * 1e6)
    synchronize()
    return {key: (statistics.median(all_rounds), sorted(all_rounds)[ROUNDS // 10])
            for key, all_rounds in times.items()}


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


def nothing():
    """Address of a C function to stand for ekv_decode: fegetround reads no argument, and returns 0 by default."""
    return ctypes.cast(ctypes.CDLL("libm.so.6").fegetround, ctypes.c_void_p).value


def columns():
    """(name, functions of _calls) of each way to measure."""
    found = {"call": (_calls.describe, _calls.launch)}
    if _calls.NATIVE:
        found["without_ekv_decode"] = _calls.load_native(nothing())
    return found | {"without_ekv_decode_in_python": _calls.load_python(nothing())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", metavar="FILE", help="write the rows there too")
    parser.add_argument("--at-most", type=float, metavar="US")
    arguments = parser.parse_args()
    synchronize = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    ways, rows = columns(), []
    print(f"{'':50}" + "".join(f"{name:>30}" for name in ways))
    with torch.inference_mode():
        named = calls(arguments.device)
        measured = measure(named, ways, synchronize)
    for name, _ in named:
        row = {"call": name}
        for column in ways:
            median, low = measured[name, column]
            row |= {f"{column}_us": f"{median:.2f}", f"{column}_p10_us": f"{low:.2f}"}
        rows.append(row | {"device": arguments.device, "torch": torch.__version__, "python": sys.version.split()[0]})
        print(f"{name:36} {'median (p10)':13}" + "".join(
            f"{row[f'{c}_us']:>21} ({row[f'{c}_p10_us']:>6})" for c in ways), flush=True)
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    took = float(rows[0]["call_us"])
    if arguments.at_most and took > arguments.at_most:
        sys.exit(f"{rows[0]['call']} takes {took} us on the host; at most {arguments.at_most} us are wanted")


if __name__ == "__main__":
    main()
