# SPDX-License-Identifier: Apache-2.0
"""Every ```python block of the documents runs by itself, and prints what the ```text block after
it under `<!-- output -->` says (`...` and varying numbers as in tests/check_docs.py); and the examples in Python."""

import pathlib
import runpy
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
import check_docs  # noqa: E402


def blocks():
    for path in check_docs.documents():
        code = None
        for block in check_docs.blocks_of(path):
            if block.language == "python":
                if code:
                    yield code, None
                code = block
            elif code:
                shown = block.language == "text" and block.mark in (check_docs.OUTPUT, check_docs.OUTPUT_NUMBERS_VARY)
                yield code, block if shown else None
                code = None
        if code:
            yield code, None


@pytest.mark.parametrize("code, shown", [pytest.param(*pair, id=pair[0].where) for pair in blocks()])
def test_block(code, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code.text, code.where, "exec"), {"__name__": "__main__"})
    output = capsys.readouterr().out
    if shown:
        vary = shown.mark == check_docs.OUTPUT_NUMBERS_VARY
        assert check_docs.matches(shown.text, output, vary), f"the output is\n{output}"


def test_there_are_blocks():
    found = [code.where for code, _ in blocks()]
    assert sum(where.startswith("README.md") for where in found) == 4
    assert sum(where.startswith("docs/python.md") for where in found) >= 6


def test_example_of_imbalance(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["imbalance.py", str(tmp_path / "figure.png")])
    runpy.run_path(str(ROOT / "examples/imbalance.py"), run_name="__main__")
    assert "flashinfer-tensor-core" in capsys.readouterr().out
    assert (tmp_path / "figure.png").stat().st_size > 10_000 and (tmp_path / "figure-slots.png").exists()
