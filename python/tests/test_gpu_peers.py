# SPDX-License-Identifier: Apache-2.0
"""bench/peers/gpu_peers.py without a GPU: its batches, its CSV, and what it does with systems that are missing, refuse
or are wrong.  The clock stands still; FlashInfer and FlashAttention are played by evenkv's own calls of their kind."""

import argparse
import csv
import importlib.util
import pathlib
import sys
import types

import pytest
import torch

import evenkv.flash_attn
import evenkv.flashinfer

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE_SIZE = 16


def load_script():
    spec = importlib.util.spec_from_file_location("gpu_peers", ROOT / "bench/peers/gpu_peers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_peers = load_script()


class StandingClock:
    """In place of gpu_peers.Machine."""

    device, driver = "none", "0.0"

    def __init__(self):
        self.runs = 0

    def time(self, run):
        run()
        self.runs += 1
        return float(self.runs)

    def synchronize(self):
        pass

    def read(self, memory, size, rounds):
        assert memory.nbytes >= size
        return 10.0


class Decode(evenkv.flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    factor = 1.0

    def __init__(self, workspace, layout, use_tensor_cores, backend):
        assert backend == "fa2"
        super().__init__(workspace, layout, use_tensor_cores=use_tensor_cores)

    def run(self, *arguments, **keywords):
        return super().run(*arguments, **keywords).mul_(self.factor)


class BatchAttention:
    def __init__(self, layout):
        self.layout = layout

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len, q_heads, kv_heads, dim_qk, dim_vo, page_size, causal,
             q_data_type, kv_data_type):
        assert qo_indptr.tolist() == list(range(len(kv_len) + 1)) and not causal
        self.table, self.kv_len = (kv_indptr, kv_indices), kv_len

    def run(self, q, kv, out, lse):
        return evenkv.torch.decode(q, *kv, self.table, self.kv_len, out=out, lse=lse), lse


def flash_attn(refusal=None):
    def scheduler_metadata(batch_size, max_q, max_k, q_heads, kv_heads, head_dim, lengths, qkv_dtype, page_size,
                           num_splits):
        assert max_q == 1 and max_k >= int(lengths.max()) and max_k % page_size == 0
        return torch.zeros(1)

    def decode(q, k, v, **keywords):
        if refusal:
            raise RuntimeError(refusal)
        return evenkv.flash_attn.flash_attn_with_kvcache(q, k, v, **keywords)

    return types.SimpleNamespace(__name__="flash_attn_interface", get_scheduler_metadata=scheduler_metadata,
                                 flash_attn_with_kvcache=decode)


@pytest.fixture
def peers(monkeypatch):
    """Installs the stand-ins."""
    flashinfer = types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Decode, BatchAttention=BatchAttention)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn())
    monkeypatch.setattr(gpu_peers, "WORKSPACE", 1 << 20)


CELLS = [gpu_peers.Cell("skew80", "first", gpu_peers.lengths("skew80", 5, 1000), 16, 2),
         gpu_peers.Cell("file1", "na", [33, 1, 16, 700], 8, 1)]


def run(tmp_path, rounds=20, systems=None):
    """(rows, how many were wrong)"""
    path = tmp_path / "peers.csv"
    arguments = argparse.Namespace(csv=str(path), rounds=rounds, page_size=PAGE_SIZE, systems=systems, commit="c0ffee")
    wrong = gpu_peers.run(arguments, StandingClock(), CELLS, "cpu")
    with open(path, newline="") as file:
        return list(csv.DictReader(file)), wrong


def test_columns_are_those_of_evenkv_bench():
    with open(ROOT / "bench/results/h200-2026-12-01/traffic.csv", newline="") as file:
        assert next(csv.reader(file)) == gpu_peers.COLUMNS


def test_batches_are_those_of_the_measured_systems():
    cells = gpu_peers.traffic_cells(ROOT / "data/traffic.txt", gpu_peers.TRAFFIC_HEADS)
    found = {(cell.dist, len(cell.kv_len), sum(cell.kv_len), cell.q_heads, cell.kv_heads) for cell in cells}
    with open(ROOT / "data/h200-traffic.csv", newline="") as file:
        measured = {(f"file{row['batch_line']}", *(int(row[name]) for name in ("batch", "total_tokens", "q_heads",
                                                                                 "kv_heads")))
                    for row in csv.DictReader(file) if row["page_size"] == "16"}
    assert len(cells) == len(found) == 48 and len(found & measured) >= 36
    table = gpu_peers.table_cells()
    assert len(table) == 12 and {sum(cell.kv_len) for cell in table} == {524288}
    assert {cell.kv_len[0] for cell in table if cell.dist == "skew80"} == {419430}
    assert gpu_peers.lengths("uniform", 3, 11) == [4, 4, 3]


def test_page_tables_agree():
    memory = gpu_peers.Memory(CELLS, PAGE_SIZE, "cpu")
    for cell in CELLS:
        batch = memory.batch(cell)
        assert len(set(batch.indices.tolist())) == cell.pages(PAGE_SIZE) == len(batch.indices)
        assert batch.k.shape == batch.v.shape and batch.k.data_ptr() != batch.v.data_ptr()
        for request, tokens in enumerate(cell.kv_len):
            begin, end = batch.indptr[request : request + 2].tolist()
            assert (end - begin - 1) * PAGE_SIZE + int(batch.last[request]) == tokens
            assert batch.block_table[request, : end - begin].tolist() == batch.indices[begin:end].tolist()
            assert not batch.block_table[request, end - begin :].any()


def test_rows(peers, tmp_path, capsys):
    rows, wrong = run(tmp_path)
    assert "absent" not in capsys.readouterr().out
    assert wrong == 0 and len(rows) == len(CELLS) * len(gpu_peers.SYSTEMS)
    assert [row["planner"] for row in rows[: len(gpu_peers.SYSTEMS)]] == [s.name for s in gpu_peers.SYSTEMS]
    for row in rows:
        assert list(row) == gpu_peers.COLUMNS
        assert row["backend"] == ("cuda" if row["planner"].startswith("even") else "peer")
        assert float(row["max_rel_err"]) < 1e-2
        planned = row["backend"] == "peer" and not row["planner"].endswith(":in-call")
        assert bool(row["plan_us"]) == planned and row["commit"] == "c0ffee"
    # The clock counts runs, eight to a round: the first system's times are 1, 9, ..., 153.
    first = rows[0]
    assert [first[name] for name in ("median_us", "min_us", "p95_us")] == ["77.00", "1.00", "145.00"]
    assert first["kv_gb_per_s"] == f"{2 * 1000 * 2 * 128 * 2 / 77 / 1e3:.2f}"
    assert first["share_of_read"] == f"{10 / 77:.4f}"
    assert float(first["max_rel_err"]) > 0  # against another computation


def test_what_is_not_installed_is_reported(peers, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    rows, wrong = run(tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("absent: ")]
    assert [line.split()[1] for line in lines] == ["flashinfer-cuda-core", "flashinfer-tensor-core",
                                                   "flashinfer-batch-attention"]
    assert all("ModuleNotFoundError" in line for line in lines)
    assert wrong == 0 and len(rows) == len(CELLS) * 5


def test_what_refuses_a_batch_is_reported(peers, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn("This build does not support\npaged KV."))
    rows, _ = run(tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("absent: ")]
    assert [line.split()[1] for line in lines] == ["fa3", "fa3:in-call", "fa3-nosplit"]
    assert all("This build does not support paged KV." in line for line in lines)
    assert not any(row["planner"].startswith("fa3") for row in rows)


def test_what_fails_while_it_is_timed_is_reported(peers, monkeypatch, tmp_path, capsys):
    def time(self, run):
        self.runs += 1
        if self.runs == 3:
            raise RuntimeError("the host waits")
        return 1.0

    monkeypatch.setattr(StandingClock, "time", time)
    rows, _ = run(tmp_path)
    assert "absent: flashinfer-cuda-core (skew80, batch 5, and from there on: RuntimeError: the host waits)" \
        in capsys.readouterr().out
    assert len(rows) == len(CELLS) * (len(gpu_peers.SYSTEMS) - 1)


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_wrong_results_are_found(peers, monkeypatch, tmp_path, capsys, factor):
    monkeypatch.setattr(Decode, "factor", factor)
    rows, wrong = run(tmp_path, systems=["flashinfer-cuda-core", "fa3"])
    assert wrong == len(CELLS) and capsys.readouterr().out.count("WRONG") == wrong
    assert [row["planner"] for row in rows] == ["even", "flashinfer-cuda-core", "fa3"] * len(CELLS)
    for row in rows:
        assert (float(row["max_rel_err"]) > gpu_peers.MAX_ERROR) == (row["planner"] == "flashinfer-cuda-core")


class Event:
    """Of a GPU that reaches `begin` before the host is done, `late` times."""

    def __init__(self, late):
        self.late = late

    def query(self):
        self.late -= 1
        return self.late >= 0

    def elapsed_time(self, end):
        return 0.25  # ms

    def record(self):
        pass

    synchronize = record


@pytest.mark.parametrize("late, writes", [(0, 4), (2, 4 + 8 + 16)])
def test_a_time_that_has_the_host_in_it_is_taken_again(monkeypatch, late, writes):
    machine, done = object.__new__(gpu_peers.Machine), []
    machine.begin, machine.end, machine.writes = Event(late), Event(0), 4
    monkeypatch.setattr(gpu_peers.Machine, "_write", lambda self: done.append(1))
    runs = []
    assert machine.time(lambda: runs.append(1)) == 250
    assert len(done) == writes and len(runs) == late + 1


def test_a_run_that_waits_for_the_gpu_is_no_time(monkeypatch):
    machine = object.__new__(gpu_peers.Machine)
    machine.begin, machine.end, machine.writes = Event(1000), Event(0), 4
    monkeypatch.setattr(gpu_peers.Machine, "_write", lambda self: None)
    with pytest.raises(RuntimeError, match="64 writes"):
        machine.time(lambda: None)
