#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of CONTRIBUTING.md that a program can check."""

import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOP = ("include", "src", "tools", "bench", "tests", "fuzz", "examples", "python", "scripts", "cmake", "docs", ".ci")
C_SUFFIXES = (".c", ".h", ".cu", ".cuh", ".cpp")
CODE_SUFFIXES = C_SUFFIXES + (".py", ".sh", ".cmake", ".toml")
DATA_FOLDERS = ("data", "corpus", "results", "figures")  # what programs wrote
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70  # of C; the rule is "about 60".  Kernels in .cu may be longer.
MAX_COLUMNS = 120
# clang-format's output differs between versions; this one formatted the tree (Debian 12).
CLANG_FORMAT_MAJOR = 14


def sources():
    for path in sorted(ROOT.glob("*")):
        if path.is_file() and path.name != "LICENSE" and path.suffix in (".md", ".txt", ""):
            yield path
    for top in TOP:
        for path in sorted((ROOT / top).rglob("*")):
            inside = path.relative_to(ROOT).parts
            if path.is_file() and "__pycache__" not in inside and not any(part in DATA_FOLDERS for part in inside):
                yield path


def is_script(text):
    return text.startswith("#!")


def function_lengths(text):
    """(line, lines) of each function body: braces in column 0, as clang-format leaves them."""
    begin = None
    for number, line in enumerate(text.splitlines(), 1):
        if line == "{":
            begin = number
        elif line.startswith("}") and begin:
            yield begin, number - begin + 1
            begin = None


def check_text(path, text):
    lines = text.splitlines()
    code = path.suffix in CODE_SUFFIXES or is_script(text) or path.name in ("Makefile", "CMakeLists.txt")
    if not text.isascii():
        yield "not ASCII"
    if "\r" in text:
        yield "has carriage returns"
    if text and not text.endswith("\n"):
        yield "does not end with a newline"
    if path.stem in ("utils", "util", "helpers", "misc"):
        yield "a file is named after what is in it"
    for number, line in enumerate(lines, 1):
        if line != line.rstrip() and path.suffix != ".md":
            yield f"line {number}: trailing white space"
        if code and len(line) > MAX_COLUMNS:
            yield f"line {number}: {len(line)} columns"
        if code and "\t" in line and path.name != "Makefile":
            yield f"line {number}: tab"
    if not code:
        return
    if len(lines) > MAX_FILE_LINES:
        yield f"{len(lines)} lines; at most {MAX_FILE_LINES}"
    if path.name != "CMakeLists.txt" and "SPDX-License-Identifier: Apache-2.0" not in "\n".join(lines[:4]):
        yield "no SPDX line at the top"
    if path.suffix in (".c", ".h"):
        for begin, length in function_lengths(text):
            if length > MAX_FUNCTION_LINES:
                yield f"line {begin}: function of {length} lines; split it"


def unformatted(paths):
    """C files that clang-format would change; None where the right version is not installed."""
    if not shutil.which("clang-format"):
        return None
    version = subprocess.run(["clang-format", "--version"], capture_output=True, text=True, check=True).stdout
    if not re.search(rf"version {CLANG_FORMAT_MAJOR}\.", version):
        return None
    run = subprocess.run(["clang-format", "--dry-run", *map(str, paths)], capture_output=True, text=True, check=True)
    return sorted({match[1] for match in re.finditer(r"^(.+?):\d+:\d+: warning", run.stderr, re.M)})


def main():
    paths = list(sources())
    breaches = [(path, reason) for path in paths for reason in check_text(path, path.read_text(errors="replace"))]
    formatted = unformatted([path for path in paths if path.suffix in C_SUFFIXES])
    if formatted is None:
        print(f"check_style: no clang-format {CLANG_FORMAT_MAJOR} here, formatting not checked")
    for name in formatted or ():
        breaches.append((pathlib.Path(name), "not formatted; run make format"))
    for path, reason in breaches:
        print(f"{path.relative_to(ROOT)}: {reason}")
    print(f"check_style: {len(paths)} files, {len(breaches)} breaches")
    return 1 if breaches or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
