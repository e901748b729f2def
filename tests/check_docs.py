#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the documents are true as far as a program can: of every Markdown file,
  ```sh    runs, from the root of a scratch copy of the tree in which build/release is the build under test;
  ```text  after the comment `<!-- output -->` is what the sh block before it prints to stdout; `...` stands for any
           text within a line, and alone on a line for any lines; runs of spaces may differ in length;
           after `<!-- output, numbers vary -->` any number stands for any number;
  ```c     compiles after #include <evenkv/evenkv.h>, as it stands or as the body of a function that has the
           variables of FRAGMENT below;
  ```json  parses, as one value or as one a line;
  ```python  is for python/tests/test_docs.py, and so is the output after it;
  links to files lead somewhere; and the README's tables are those of the measurements in MEASURED.
`<!-- not run: REASON -->` (or not compiled, not parsed) on the line before a block exempts it."""

import argparse
import csv
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXEMPT = re.compile(r"<!-- not (run|compiled|parsed): \S.*-->")
MEASURED = {  # of a README table by its first heading: the CSVs, and their column of names
    "system, us": (["data/h200-systems.csv"], "system"),
    "planner, us": (["bench/results/h200-2026-12-01/mma.csv", "bench/results/h200-2026-12-01/simt.csv"], "planner"),
}
OUTPUT = "<!-- output -->"
OUTPUT_NUMBERS_VARY = "<!-- output, numbers vary -->"
ELSEWHERE = object()  # the output of a block that another test runs
BLOCK_SECONDS = 120
FRAGMENT = """
ekv_status fragment(ekv_context *context, ekv_batch batch, ekv_device device, ekv_plan *plan, ekv_tensors tensors,
                    const int32_t *kv_len, int32_t batch_size, void *workspace, size_t size);
ekv_status fragment(ekv_context *context, ekv_batch batch, ekv_device device, ekv_plan *plan, ekv_tensors tensors,
                    const int32_t *kv_len, int32_t batch_size, void *workspace, size_t size)
{
    (void)context, (void)batch, (void)device, (void)plan, (void)tensors, (void)kv_len, (void)batch_size;
    (void)workspace, (void)size;
    {
%s
    }
    return EKV_OK;
}
"""


class Block:
    def __init__(self, path, line, language, mark, text):
        self.where = f"{path.relative_to(ROOT)}:{line}"
        self.language, self.mark, self.text = language, mark, text


def documents():
    tops = [path for path in ROOT.glob("*.md")]
    return sorted(tops + [path for top in ("docs", "data", "examples") for path in (ROOT / top).rglob("*.md")])


def blocks_of(path):
    """The fenced blocks; a block's mark is the last non-empty line before it."""
    mark, block = "", None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if block:
            if line.strip() == "```":
                yield Block(path, *block[:3], "\n".join(block[3]) + "\n")
                mark, block = "", None
            else:
                block[3].append(line)
        elif line.startswith("```"):
            block = (number, line[3:].strip(), mark, [])
        elif line.strip():
            mark = line.strip()
    if block:
        raise SystemExit(f"{path}:{block[0]}: block without an end")


def scratch_copy(folder, build):
    """A copy of the tree, so that a block may write where it likes."""
    tree = pathlib.Path(folder) / "evenkv"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns("build", ".git", ".cache", "__pycache__"))
    (tree / "build").mkdir()
    (tree / "build/release").symlink_to(pathlib.Path(build).resolve())
    return tree


def run_shell(block, tree):
    """(stdout, what is wrong or None)"""
    run = subprocess.run(["sh", "-euc", block.text], cwd=tree, stdin=subprocess.DEVNULL, capture_output=True,
                         text=True, timeout=BLOCK_SECONDS, env=os.environ | {"EKV_NUM_THREADS": "2"})
    return run.stdout, f"exit status {run.returncode}: {run.stderr.strip()}" if run.returncode else None


def matches(expected, output, numbers_vary):
    lines = []
    for line in expected.splitlines():
        if line.strip() == "...":
            lines.append(r"(?:[^\n]*\n)*?")
        else:
            text = re.escape(line.rstrip()).replace(r"\.\.\.", r"[^\n]*?")
            if numbers_vary:
                text = re.sub(r"(?<!\w)\d+(\\\.\d+)?(e(\\-|\\\+)\d+)?", r"[-+.\\de]+", text)
            lines.append(re.sub(r"(\\ ){2,}", r"[ ]+", text) + r"[ ]*\n")
    return re.fullmatch("".join(lines), output if output.endswith("\n") else output + "\n")


def compile_c(block, cc):
    for source in (block.text, FRAGMENT % block.text):
        run = subprocess.run([cc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unused", "-fsyntax-only", "-I",
                              str(ROOT / "include"), "-x", "c", "-"], capture_output=True, text=True,
                             input="#include <evenkv/evenkv.h>\n" + source)
        if run.returncode == 0:
            return None
    return run.stderr.strip()


def parse_json(block):
    try:
        json.loads(block.text)
    except ValueError:
        try:
            for line in block.text.splitlines():
                json.loads(line)
        except ValueError as error:
            return str(error)
    return None


def check_links(path):
    for match in re.finditer(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in match[1] and not (path.parent / match[1]).exists():
            yield f"{path.relative_to(ROOT)}: link to {match[1]}, which does not exist"


def measured_times(paths, name):
    times = {}
    for path in paths:
        with open(ROOT / path, newline="") as file:
            times.update({(row[name], row["dist"], int(row["batch"])): float(row["median_us"])
                          for row in csv.DictReader(file) if row["total_tokens"] == "524288"})
    return times


def check_table():
    """README rows `| system (`name`) | time | ... |` under a header of `distribution, B=batch` cells."""
    columns, cells, times = [], 0, {}
    for line in (ROOT / "README.md").read_text().splitlines():
        fields = [field.strip() for field in line.strip("|").split("|")]
        heads = [re.fullmatch(r"(\w+), B=(\d+)", field) for field in fields]
        system = re.search(r"\(`([\w-]+)`\)", fields[0])
        if line.startswith("|") and any(heads):
            columns = [(head[1], int(head[2])) if head else None for head in heads]
            times = measured_times(*MEASURED[fields[0]])
        elif line.startswith("|") and system and columns:
            for column, field in zip(columns, fields):
                if column:
                    cells += 1
                    measured = times.get((system[1], *column))
                    if measured is None or f"{int(measured + 0.5):,}" != field:
                        yield f"README.md: {system[1]} at {column} is {measured} in the data, {field} in the table"
    if not cells:
        yield "README.md: found no table of measurements"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True, help="folder that has the evenkv command")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("documents", nargs="*", type=pathlib.Path, help="default: all")
    args = parser.parse_args()
    paths = [path.resolve() for path in args.documents] or documents()
    errors = list(check_table()) + [error for path in paths for error in check_links(path)]
    counts = dict.fromkeys(("run", "compared", "compiled", "parsed", "exempt"), 0)

    with tempfile.TemporaryDirectory() as folder:
        tree = scratch_copy(folder, args.build)
        output = None  # of the last sh block
        for block in (block for path in paths for block in blocks_of(path)):
            wrong = None
            if EXEMPT.fullmatch(block.mark):
                kind = "exempt"
                output = None
            elif block.language == "sh":
                kind = "run"
                output, wrong = run_shell(block, tree)
            elif block.language == "python":
                output = ELSEWHERE
                continue
            elif block.language == "text" and output is ELSEWHERE:
                continue
            elif block.language == "text" and block.mark in (OUTPUT, OUTPUT_NUMBERS_VARY):
                kind = "compared"
                if output is None or not matches(block.text, output, block.mark == OUTPUT_NUMBERS_VARY):
                    wrong = f"not the output of the sh block before it, which is:\n{output}"
            elif block.language == "c":
                kind, wrong = "compiled", compile_c(block, args.cc)
            elif block.language == "json":
                kind, wrong = "parsed", parse_json(block)
            elif block.language == "text":
                continue
            else:
                kind, wrong = "exempt", f"block of unknown language '{block.language}'"
            counts[kind] += 1
            if wrong:
                errors.append(f"{block.where}: {wrong}")

    print(*errors, "check_docs: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()) +
          f", {len(errors)} errors", sep="\n")
    return 1 if errors or not counts["run"] and not args.documents else 0


if __name__ == "__main__":
    sys.exit(main())
