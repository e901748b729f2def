#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode attention of other libraries on this CPU, in turn with evenkv on the same lengths.

    python3 -m venv peers && peers/bin/pip install onnxruntime onnx numpy torch    # those that are missing are left out
    peers/bin/python bench/peers/cpu_peers.py --evenkv build/release/evenkv --threads 2 --csv peers.csv

onnxruntime: the operator GroupQueryAttention of its CPU provider; K and V padded to the longest request, which is its
layout, in buffers that past and present share, so that a step copies nothing; one new token a request.  torch:
scaled_dot_product_attention(enable_gqa=True), called request by request, since a padded batch would read the padding.
Each round runs every one of them once, then evenkv; the caches hold what the others have read meanwhile, which at the
default size is more than a last-level cache of up to 128 MiB has.  kv_gb_per_s counts K and V of real tokens.
"""
import argparse
import csv
import json
import statistics
import subprocess
import sys
import time

DTYPES = ("fp16", "fp32")


def lengths(dist, batch, tokens):
    """As evenkv's --dist uniform and skewNN, the long request first."""
    hot = tokens * int(dist[4:]) // 100 if dist.startswith("skew") else 0
    rest, count = tokens - hot, batch - (1 if hot else 0)
    return ([hot] if hot else []) + [rest // count + (1 if i < rest % count else 0) for i in range(count)]


def onnxruntime_decode(kv_len, shape, dtype, threads):
    import numpy
    import onnx
    import onnxruntime

    q_heads, kv_heads, dim = shape
    batch, longest = len(kv_len), max(kv_len)
    element = numpy.float16 if dtype == "fp16" else numpy.float32
    kind = onnx.TensorProto.FLOAT16 if dtype == "fp16" else onnx.TensorProto.FLOAT
    made = onnx.helper.make_tensor_value_info
    cache = [batch, kv_heads, longest, dim]
    node = onnx.helper.make_node(
        "GroupQueryAttention", ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total"],
        ["output", "present_key", "present_value"], domain="com.microsoft", num_heads=q_heads, kv_num_heads=kv_heads)
    graph = onnx.helper.make_graph(
        [node], "decode",
        [made("query", kind, [batch, 1, q_heads * dim]), made("key", kind, [batch, 1, kv_heads * dim]),
         made("value", kind, [batch, 1, kv_heads * dim]), made("past_key", kind, cache),
         made("past_value", kind, cache),
         made("seqlens_k", onnx.TensorProto.INT32, [batch]), made("total", onnx.TensorProto.INT32, [1])],
        [made("output", kind, [batch, 1, q_heads * dim]), made("present_key", kind, cache),
         made("present_value", kind, cache)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17),
                                                         onnx.helper.make_opsetid("com.microsoft", 1)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    random = numpy.random.default_rng(1)

    def tensor(*sizes):
        return onnxruntime.OrtValue.ortvalue_from_numpy(random.uniform(-1, 1, sizes).astype(element))

    values = {"query": tensor(batch, 1, q_heads * dim), "key": tensor(batch, 1, kv_heads * dim),
              "value": tensor(batch, 1, kv_heads * dim), "past_key": tensor(*cache), "past_value": tensor(*cache),
              "seqlens_k": onnxruntime.OrtValue.ortvalue_from_numpy(numpy.array(kv_len, numpy.int32) - 1),
              "total": onnxruntime.OrtValue.ortvalue_from_numpy(numpy.array([longest], numpy.int32))}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("present_key", values["past_key"])
    binding.bind_ortvalue_output("present_value", values["past_value"])
    binding.bind_output("output")
    return lambda: session.run_with_iobinding(binding)


def torch_decode(kv_len, shape, dtype, threads):
    import torch

    q_heads, kv_heads, dim = shape
    torch.set_num_threads(threads)
    kind = torch.float16 if dtype == "fp16" else torch.float32
    requests = [(torch.rand(1, q_heads, 1, dim).to(kind), torch.rand(1, kv_heads, n, dim).to(kind),
                 torch.rand(1, kv_heads, n, dim).to(kind)) for n in kv_len]

    def decode():
        for q, k, v in requests:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return decode


PEERS = {"onnxruntime:GroupQueryAttention": onnxruntime_decode, "torch:scaled_dot_product_attention": torch_decode}


def evenkv_rows(arguments, dist, dtype, repeat):
    """One run of the tool, whose own plain read takes turns with its decodes."""
    q_heads, kv_heads, dim = arguments.shape
    command = [arguments.evenkv, "bench", "--backend", "cpu", "--threads", str(arguments.threads), "--dists", dist,
               "--batches", str(arguments.batch), "--tokens", str(arguments.tokens), "--dtype", dtype, "--q-heads",
               str(q_heads), "--kv-heads", str(kv_heads), "--head-dim", str(dim), "--repeat", str(repeat), "--no-check",
               "--json"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


def measure(arguments, dist, dtype):
    kv_len = lengths(dist, arguments.batch, arguments.tokens)
    q_heads, kv_heads, dim = arguments.shape
    kv_bytes = 2 * sum(kv_len) * kv_heads * dim * (2 if dtype == "fp16" else 4)
    times, decodes = {}, {}
    for name, make in PEERS.items():
        try:
            decodes[name] = make(kv_len, arguments.shape, dtype, arguments.threads)
            decodes[name]()
        except ImportError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
            decodes.pop(name, None)
    ours, reads = [], []
    for _ in range(arguments.repeat):
        for name, decode in decodes.items():
            begin = time.perf_counter()
            decode()
            times.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)
        row = evenkv_rows(arguments, dist, dtype, 1)
        ours.append(row["median_us"])
        reads.append(row["read_us"])
    times["even"] = ours
    read = statistics.median(reads)
    for name, values in times.items():
        median = statistics.median(values)
        yield {"planner": name, "dist": dist, "batch": arguments.batch, "total_tokens": arguments.tokens,
               "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "dtype": dtype, "median_us": f"{median:.1f}",
               "min_us": f"{min(values):.1f}", "kv_gb_per_s": f"{kv_bytes / median / 1e3:.2f}",
               "share_of_read": f"{read / median:.4f}", "backend": "cpu" if name == "even" else "peer",
               "threads": arguments.threads}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evenkv", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--dists", default="uniform,skew80")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split("/"))), default=(32, 4, 128),
                        help="query heads/KV heads/head_dim (default 32/4/128)")
    parser.add_argument("--csv")
    arguments = parser.parse_args()
    rows = [row for dist in arguments.dists.split(",") for dtype in arguments.dtypes.split(",")
            for row in measure(arguments, dist, dtype)]
    with open(arguments.csv, "w", newline="") if arguments.csv else sys.stdout as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
