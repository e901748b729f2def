#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode attention of other systems on this GPU, in turn with evenkv in one process: the same batches, K, V, Q, page
tables, flush, clock and plain read as evenkv bench (docs/bench.md), the same columns of CSV.

    python3 -m venv peers && peers/bin/pip install torch numpy flashinfer-python tokenspeed-fa3
    EVENKV_LIBRARY=build/release/libevenkv.so peers/bin/python bench/peers/gpu_peers.py --csv peers.csv

What is not installed is a line `absent: NAME (why)`.  Rows of others have the backend `peer`.  What a system plans is
outside of the times (plan_us is the host's time for it): FlashInfer's plan(), FlashAttention's
get_scheduler_metadata(), and evenkv's plan, made on the GPU by a run before.  The two rows NAME:in-call plan on the GPU
in the timed call: evenkv from device lengths, FlashAttention by the kernel that it launches first.
max_rel_err is against evenkv's output; in the rows of evenkv, against a float32 softmax of some of the requests.
"""
import argparse
import csv
import ctypes
import importlib
import importlib.metadata
import math
import pathlib
import statistics
import subprocess
import sys
import time
import typing

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

COLUMNS = ("planner,dist,batch,total_tokens,page_size,q_heads,kv_heads,head_dim,dtype,median_us,min_us,p95_us,"
           "kv_gb_per_s,share_of_read,plan_us,max_rel_err,backend,kernel,dispatch,hot,layout,flush,device,driver,"
           "commit").split(",")
HEAD_DIM = 128
ELEMENT = 2  # bytes, of bf16
TABLE = [(dist, batch) for batch in (16, 64, 297, 512, 992, 2048) for dist in ("uniform", "skew80")]
TABLE_TOKENS = 524288
TABLE_HEADS = (32, 4)
TRAFFIC_HEADS = ((32, 4), (8, 1), (16, 2), (64, 8))
FLUSH_BYTES = 256 << 20  # as src/cuda/cuda_bench.c
MAX_ERROR = 2e-2  # of two results in bf16 whose P is bf16 too; measured are up to 6e-3
WORKSPACE = 512 << 20  # bytes, of FlashInfer's partial results
PLANS = 5  # timed


# ---- Batches -------------------------------------------------------------------------------------------------------


class Cell(typing.NamedTuple):
    dist: str
    hot: str
    kv_len: list
    q_heads: int
    kv_heads: int

    def pages(self, page_size):
        return sum(-(-n // page_size) for n in self.kv_len)

    @property
    def kv_bytes(self):
        return 2 * sum(self.kv_len) * self.kv_heads * HEAD_DIM * ELEMENT

    @property
    def qo_bytes(self):
        return 2 * len(self.kv_len) * self.q_heads * HEAD_DIM * ELEMENT


def lengths(dist, batch, tokens):
    """As evenkv's --dist uniform and skewNN, the long request first."""
    hot = [tokens * int(dist[4:]) // 100] if dist.startswith("skew") else []
    rest, count = tokens - sum(hot), batch - len(hot)
    return hot + [rest // count + (i < rest % count) for i in range(count)]


def table_cells():
    return [Cell(dist, "first", lengths(dist, batch, TABLE_TOKENS), *TABLE_HEADS) for dist, batch in TABLE]


def traffic_cells(path, heads):
    """Of each line of lengths of a file, as evenkv's --dists file."""
    lines = [line for line in pathlib.Path(path).read_text().splitlines() if line.strip()]
    return [Cell(f"file{number}", "na", [int(n) for n in line.split(",")], *pair)
            for pair in heads for number, line in enumerate(lines, 1)]


class Batch:
    """Tensors of one cell: q, out [B, q_heads, D]; k, v [pages, page_size, kv_heads, D]; the page table three times."""

    def __init__(self, cell, page_size, k, v, page_list):
        """k, v: bf16, of as many pages as page_list has, all of which may be used.  page_list: int32, their order."""
        device, size = k.device, len(cell.kv_len)
        self.page_size, self.q_heads, self.kv_heads, self.size = page_size, cell.q_heads, cell.kv_heads, size
        self.k, self.v = k, v
        self.q = torch.empty(size, cell.q_heads, HEAD_DIM, dtype=k.dtype, device=device).uniform_(-4, 4)
        self.host_lengths = torch.tensor(cell.kv_len, dtype=torch.int32)
        pages = (self.host_lengths + page_size - 1) // page_size
        self.host_indptr = torch.zeros(size + 1, dtype=torch.int32)
        self.host_indptr[1:] = pages.cumsum(0)
        self.host_last = self.host_lengths - (pages - 1) * page_size
        self.lengths, self.indptr, self.last = (
            each.to(device) for each in (self.host_lengths, self.host_indptr, self.host_last))
        self.indices = page_list[: int(self.host_indptr[-1])].contiguous()
        column = torch.arange(int(pages.max()), device=device)
        entry = self.indptr[:-1, None].long() + column
        self.block_table = torch.where(column < pages.to(device)[:, None],
                                       self.indices[entry.clamp(max=len(self.indices) - 1)], 0).to(torch.int32)


class Memory:
    """One block: K, V and as much as the largest Q and O.  K and V are those of the number of KV heads asked for."""

    def __init__(self, cells, page_size, device):
        self.page_size = page_size
        self.num_pages = {c.kv_heads: 0 for c in cells}
        for cell in cells:
            self.num_pages[cell.kv_heads] = max(self.num_pages[cell.kv_heads], cell.pages(page_size))
        kv = max(2 * pages * self._page_elements(heads) for heads, pages in self.num_pages.items())
        self.block = torch.empty(kv + max(c.qo_bytes for c in cells) // ELEMENT, dtype=torch.bfloat16, device=device)
        self.block.uniform_(-1, 1)
        generator = torch.Generator().manual_seed(1)
        self.lists = {heads: torch.randperm(pages, generator=generator).to(device, torch.int32)
                      for heads, pages in self.num_pages.items()}

    def _page_elements(self, kv_heads):
        return self.page_size * kv_heads * HEAD_DIM

    def batch(self, cell):
        pages, size = self.num_pages[cell.kv_heads], self._page_elements(cell.kv_heads)
        k, v = self.block[: 2 * pages * size].view(2, pages, self.page_size, cell.kv_heads, HEAD_DIM)
        return Batch(cell, self.page_size, k, v, self.lists[cell.kv_heads])


# ---- Systems -------------------------------------------------------------------------------------------------------


class Job(typing.NamedTuple):
    plan: typing.Optional[typing.Callable]  # None: nothing is planned apart from run
    run: typing.Callable  # enqueues one decode, returns its output


def version(module):
    """The installed package that has a module, and its version; the module where none says that it has it."""
    packages = importlib.metadata.packages_distributions().get(module)
    return f"{packages[0]} {importlib.metadata.version(packages[0])}" if packages else module


def evenkv_planned():
    import evenkv
    from evenkv.flashinfer import BatchDecodeWithPagedKVCacheWrapper

    def prepare(batch):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
        wrapper.plan(batch.indptr, batch.indices, batch.last, batch.q_heads, batch.kv_heads, HEAD_DIM, batch.page_size,
                     q_data_type=torch.bfloat16)
        out = torch.empty_like(batch.q)
        return Job(None, lambda: wrapper.run(batch.q, (batch.k, batch.v), out=out))

    return f"evenkv {evenkv.__version__}", prepare


def evenkv_in_call():
    import evenkv
    import evenkv.torch

    def prepare(batch):
        out = torch.empty_like(batch.q)
        table = (batch.indptr, batch.indices)
        return Job(None, lambda: evenkv.torch.decode(batch.q, batch.k, batch.v, table, batch.lengths, out=out))

    return f"evenkv {evenkv.__version__}", prepare


def flashinfer_decode(use_tensor_cores):
    def load():
        import flashinfer

        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=use_tensor_cores,
                                                                backend="fa2")

        def prepare(batch):
            out = torch.empty_like(batch.q)
            return Job(lambda: wrapper.plan(batch.host_indptr, batch.indices, batch.host_last, batch.q_heads,
                                            batch.kv_heads, HEAD_DIM, batch.page_size, q_data_type=torch.bfloat16,
                                            kv_data_type=torch.bfloat16),
                       lambda: wrapper.run(batch.q, (batch.k, batch.v), out=out))

        return version("flashinfer"), prepare

    return load


def flashinfer_batch_attention():
    import flashinfer

    wrapper = flashinfer.BatchAttention("NHD")

    def prepare(batch):
        out = torch.empty_like(batch.q)
        lse = torch.empty(batch.q.shape[:2], dtype=torch.float32, device=batch.q.device)
        one_each = torch.arange(batch.size + 1, dtype=torch.int32)
        return Job(lambda: wrapper.plan(one_each, batch.host_indptr, batch.indices, batch.host_lengths, batch.q_heads,
                                        batch.kv_heads, HEAD_DIM, HEAD_DIM, batch.page_size, causal=False,
                                        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16),
                   lambda: wrapper.run(batch.q, (batch.k, batch.v), out=out, lse=lse)[0])

    return version("flashinfer"), prepare


def flash_attention_module():
    """The interface of whatever build of FlashAttention-3 is installed; those of fa3-fwd on PyPI know no pages."""
    missing = []
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing.append(str(error))
    raise ImportError("; ".join(missing))


def flash_attention(num_splits, in_call=False):
    def load():
        module = flash_attention_module()

        def prepare(batch):
            q, keys = batch.q.unsqueeze(1), batch.block_table.shape[1] * batch.page_size
            options = {"num_splits": num_splits}

            def plan():
                options["scheduler_metadata"] = module.get_scheduler_metadata(
                    batch.size, 1, keys, batch.q_heads, batch.kv_heads, HEAD_DIM, batch.lengths,
                    qkv_dtype=torch.bfloat16, page_size=batch.page_size, num_splits=num_splits)

            def run():
                return module.flash_attn_with_kvcache(q, batch.k, batch.v, cache_seqlens=batch.lengths,
                                                      page_table=batch.block_table, **options).squeeze(1)

            return Job(None if in_call else plan, run)

        return version(module.__name__), prepare

    return load


class System(typing.NamedTuple):
    """load: imports it, returns (package and version, prepare); prepare(batch) returns a Job."""

    name: str
    backend: str
    load: typing.Callable


# The first is always measured: it is what the others are compared with.
SYSTEMS = (
    System("even", "cuda", evenkv_planned),
    System("even:in-call", "cuda", evenkv_in_call),
    System("flashinfer-cuda-core", "peer", flashinfer_decode(False)),
    System("flashinfer-tensor-core", "peer", flashinfer_decode(True)),
    System("flashinfer-batch-attention", "peer", flashinfer_batch_attention),
    System("fa3", "peer", flash_attention(0)),
    System("fa3:in-call", "peer", flash_attention(0, in_call=True)),
    System("fa3-nosplit", "peer", flash_attention(1)),
)


def one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def load_systems(names):
    """(system, kernel, prepare) of those that are there; lines on stdout for the others."""
    loaded = []
    for system in SYSTEMS:
        if names and system.name not in names and system is not SYSTEMS[0]:
            continue
        try:
            loaded.append((system, *system.load()))
        except Exception as error:  # whatever another package does while it is imported
            if system is SYSTEMS[0]:
                raise
            print(f"absent: {system.name} ({one_line(error)})", flush=True)
    return loaded


# ---- Time ----------------------------------------------------------------------------------------------------------


class Machine:
    """The GPU of the process: its clock and its plain read."""

    MAX_WRITES = 64

    def __init__(self):
        self.driver_library = ctypes.CDLL("libcuda.so.1")
        self.device = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
        number = ctypes.c_int()
        self.driver_library.cuDriverGetVersion(ctypes.byref(number))
        self.driver = f"{number.value // 1000}.{number.value % 1000 // 10}"
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.byte, self.writes = 0, 4
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.reads = {}

    def _write(self):
        self.byte = (self.byte + 1) % 256
        status = self.driver_library.cuMemsetD8Async(
            ctypes.c_void_p(self.flush.data_ptr()), ctypes.c_ubyte(self.byte), ctypes.c_size_t(FLUSH_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if status:
            raise RuntimeError(f"cuMemsetD8Async returned CUDA error {status}")

    def time(self, run):
        """us between two events round run, after writes of the flush that last until the host has enqueued it all:
        else it is timed again after more of them."""
        while True:
            for _ in range(self.writes):
                self._write()
            self.begin.record()
            run()
            self.end.record()
            ahead = not self.begin.query()
            self.end.synchronize()
            if ahead:
                return self.begin.elapsed_time(self.end) * 1e3
            if self.writes >= self.MAX_WRITES:
                raise RuntimeError(f"the host is not done before {self.writes} writes of 256 MiB are: it waits, or "
                                   "takes too long")
            self.writes *= 2

    def synchronize(self):
        torch.cuda.synchronize()

    def read(self, memory, size, rounds):
        """us of the best plain read of the first `size` bytes; None where none can be made."""
        if size not in self.reads:
            try:
                self.reads[size] = self._time_reads(memory, size, rounds)
            except Exception as error:
                print(f"absent: plain read ({one_line(error)})", flush=True)
                self.reads[size] = None
        return self.reads[size]

    def _time_reads(self, memory, size, rounds):
        import plain_read

        best, shape = math.inf, ""
        for text, read in plain_read.readers(memory, size):
            read()
            median = statistics.median(self.time(read) for _ in range(rounds))
            best, shape = min((best, shape), (median, text))
        print(f"plain read of {size / 1e6:.1f} MB: {best:.2f} us, {size / best / 1e3:.1f} GB/s ({shape})", flush=True)
        return best


# ---- One cell ------------------------------------------------------------------------------------------------------


def relative_error(out, reference):
    """The largest error of a row over the row's largest value, over all rows [..., D]: as evenkv bench."""
    out, reference = out.float(), reference.float()
    error = (out - reference).abs().amax(-1)
    return float((error / reference.abs().amax(-1)).nan_to_num(nan=math.inf).max())


def reference_of(batch, request):
    """float32 [q_heads, D]."""
    begin, end = batch.host_indptr[request : request + 2].tolist()
    pages = batch.indices[begin:end].long()
    k, v = (cache[pages].flatten(0, 1)[: int(batch.host_lengths[request])].float() for cache in (batch.k, batch.v))
    q = batch.q[request].float().view(batch.kv_heads, -1, HEAD_DIM)
    weights = torch.einsum("hgd,nhd->hgn", q, k).div_(math.sqrt(HEAD_DIM)).softmax(-1)
    return torch.einsum("hgn,nhd->hgd", weights, v).reshape(batch.q_heads, HEAD_DIM)


def some_requests(batch):
    """Numbers of the longest, the shortest, the first, the last and some between."""
    found = {0, batch.size - 1, int(batch.host_lengths.argmax()), int(batch.host_lengths.argmin())}
    return sorted(found | set(range(0, batch.size, -(-batch.size // 4))))


class Entry:
    def __init__(self, system, kernel, job):
        self.system, self.kernel, self.job = system, kernel, job
        self.plan_us, self.error, self.times = None, math.inf, []


def prepare(machine, batch, loaded, cell, absent):
    """Entries of the systems that take the batch, planned, checked and warm."""
    entries, expected = [], None
    for system, kernel, make in loaded:
        if system.name in absent:
            continue
        try:
            entry = Entry(system, kernel, make(batch))
            if entry.job.plan:
                entry.job.plan()  # may compile
                entry.plan_us = plan_time(machine, entry.job.plan)
            entry.job.run()
            out = entry.job.run().clone()
            machine.synchronize()
        except Exception as error:
            if system is SYSTEMS[0]:
                raise
            absent.add(system.name)
            print(f"absent: {system.name} ({cell.dist}, batch {batch.size}, {cell.q_heads}/{cell.kv_heads} heads, and "
                  f"from there on: {one_line(error)})", flush=True)
            machine.synchronize()  # an error that stays ends the run here
            continue
        if expected is None:
            expected = out
        if system.backend == "cuda":
            some = some_requests(batch)
            entry.error = relative_error(out[some], torch.stack([reference_of(batch, request) for request in some]))
        else:
            entry.error = relative_error(out, expected)
        entries.append(entry)
    return entries


def plan_time(machine, plan):
    """us of the host until it and what it has enqueued are done."""
    times = []
    for _ in range(PLANS):
        machine.synchronize()
        begin = time.perf_counter()
        plan()
        machine.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def row_of(entry, cell, read_us, fixed):
    times = sorted(entry.times)
    median = statistics.median(times)
    row = {"planner": entry.system.name, "dist": cell.dist, "batch": len(cell.kv_len),
           "total_tokens": sum(cell.kv_len), "q_heads": cell.q_heads, "kv_heads": cell.kv_heads, "head_dim": HEAD_DIM,
           "dtype": "bf16", "median_us": f"{median:.2f}", "min_us": f"{times[0]:.2f}",
           "p95_us": f"{times[math.ceil(len(times) * 0.95) - 1]:.2f}",
           "kv_gb_per_s": f"{cell.kv_bytes / median / 1e3:.2f}",
           "share_of_read": f"{read_us / median:.4f}" if read_us else "",
           "plan_us": "" if entry.plan_us is None else f"{entry.plan_us:.2f}", "max_rel_err": f"{entry.error:.3e}",
           "backend": entry.system.backend, "kernel": entry.kernel, "dispatch": "na", "hot": cell.hot, "layout": "nhd",
           "flush": "write256MiB"}
    return row | fixed


def measure(machine, memory, cell, loaded, rounds, absent):
    """The cell's rows.  One run of each system in turn, round after round."""
    batch = memory.batch(cell)
    read_us = machine.read(memory.block, cell.kv_bytes + cell.qo_bytes, rounds)
    entries = prepare(machine, batch, loaded, cell, absent)
    for _ in range(rounds):
        for entry in [entry for entry in entries if entry.system.name not in absent]:
            try:
                entry.times.append(machine.time(entry.job.run))
            except RuntimeError as error:
                if entry.system is SYSTEMS[0]:
                    raise
                absent.add(entry.system.name)
                print(f"absent: {entry.system.name} ({cell.dist}, batch {batch.size}, and from there on: "
                      f"{one_line(error)})", flush=True)
                machine.synchronize()
    fixed = {"page_size": memory.page_size, "device": machine.device, "driver": machine.driver}
    return [row_of(entry, cell, read_us, fixed) for entry in entries if len(entry.times) == rounds]


# ---- All of them ---------------------------------------------------------------------------------------------------


def this_commit():
    result = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def run(arguments, machine, cells, device):
    """Returns how many rows are wrong."""
    loaded = load_systems(arguments.systems)
    torch.manual_seed(1)
    memory = Memory(cells, arguments.page_size, device)
    commit, absent, wrong = arguments.commit or this_commit(), set(), 0
    with open(arguments.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for cell in cells:
            for row in measure(machine, memory, cell, loaded, arguments.rounds, absent):
                writer.writerow(row | {"commit": commit})
                bad = not float(row["max_rel_err"]) <= MAX_ERROR
                wrong += bad
                print(f"{cell.dist:9} {row['batch']:>5} {cell.q_heads:>3}/{cell.kv_heads} {row['planner']:27} "
                      f"{row['median_us']:>9} us {row['share_of_read']:>7} of read{'  WRONG' * bad}", flush=True)
            file.flush()
    return wrong


def pairs(text):
    return [tuple(map(int, pair.split("/"))) for pair in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", required=True, help="written cell by cell")
    parser.add_argument("--rounds", type=int, default=20, help="timed runs of each (default 20)")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--batches", default="table,traffic", help="table: 524,288 tokens, 12 cells; traffic: a file's")
    parser.add_argument("--traffic", default=ROOT / "data" / "traffic.txt")
    parser.add_argument("--heads", type=pairs, default=TRAFFIC_HEADS, help="query/KV heads of the traffic, a list")
    parser.add_argument("--systems", type=lambda text: text.split(","),
                        help=f"of {', '.join(system.name for system in SYSTEMS[1:])} (default all)")
    parser.add_argument("--commit", help="of evenkv (default: that of the checkout)")
    arguments = parser.parse_args()
    chosen = arguments.batches.split(",")
    cells = table_cells() if "table" in chosen else []
    cells += traffic_cells(arguments.traffic, arguments.heads) if "traffic" in chosen else []
    if not torch.cuda.is_available():
        raise SystemExit("gpu_peers: torch finds no GPU")
    begin = time.monotonic()
    wrong = run(arguments, Machine(), cells, "cuda")
    print(f"{len(cells)} cells, {wrong} rows wrong, {time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
