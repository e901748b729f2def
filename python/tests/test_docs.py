# SPDX-License-Identifier: Apache-2.0
"""Every ```python block of the documents runs, each in a process of its own, and prints what the ```text block after
it under `<!-- output -->` says (`...` and varying numbers as in tests/check_docs.py); and the examples in Python."""

import os
import pathlib
import subprocess
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


def run(arguments, folder):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    result = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=300,
                            env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("code, shown", [pytest.param(*pair, id=pair[0].where) for pair in blocks()])
def test_block(code, shown, tmp_path):
    (tmp_path / "block.py").write_text(code.text)
    output = run(["block.py"], tmp_path)
    if shown:
        vary = shown.mark == check_docs.OUTPUT_NUMBERS_VARY
        assert check_docs.matches(shown.text, output, vary), f"the output is\n{output}"


def test_there_are_blocks():
    found = [code.where for code, _ in blocks()]
    assert sum(where.startswith("README.md") for where in found) == 4
    assert sum(where.startswith("docs/python.md") for where in found) >= 6


def test_example_of_imbalance(tmp_path):
    output = run([ROOT / "examples/imbalance.py", "figure.png"], tmp_path)
    assert "flashinfer-tensor-core" in output and (tmp_path / "figure.png").stat().st_size > 10_000
    assert (tmp_path / "figure-slots.png").exists()
