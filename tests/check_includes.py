#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks over all #include lines that dependencies point one way:
base <- plan <- {cpu, cuda, sim} <- trace <- api <- {tools, bench, tests, python}."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Folder -> folders of src/ that it may include.  The trace reader is not part of the library, so that api may
# not use it.
ALLOWED = {
    "include": set(),
    "examples": set(),
    "python": set(),
    "src/base": {"base"},
    "src/plan": {"base", "plan"},
    "src/cpu": {"base", "plan", "cpu"},
    "src/cuda": {"base", "plan", "cuda"},
    "src/sim": {"base", "plan", "sim"},
    "src/trace": {"base", "plan", "trace"},
    "src/api": {"base", "plan", "cpu", "cuda", "sim", "api"},
    "tools": {"base", "plan", "cpu", "cuda", "sim", "trace", "api"},
    "fuzz": {"base", "plan", "cpu", "cuda", "sim", "trace", "api"},
    "bench": {"base", "plan", "cpu", "cuda", "sim", "trace", "api"},
    "tests": {"base", "plan", "cpu", "cuda", "sim", "trace", "api"},
}
# Header of another project -> folders that may include it.
FOREIGN = {
    "cjson/cJSON.h": {"src/trace", "tools", "bench", "tests"},
    "cmocka.h": {"tests"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def folder_of(path):
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "src" else parts[0]


def breach(path, quote, name):
    """Why `path` may not include `name`, or None."""
    folder = folder_of(path)
    if folder not in ALLOWED:
        return f"folder {folder} has no rule in {pathlib.Path(__file__).name}"
    foreign = name if name in FOREIGN else f"cjson/{name}" if name == "cJSON.h" else None
    if foreign:
        return None if folder in FOREIGN[foreign] else f"{name} is not for {folder}"
    if name.startswith("evenkv/"):
        return None
    if name.startswith("../") and (path.parent / name).is_file():
        there = folder_of((path.parent / name).resolve())
        return None if there == folder or (folder, there) == ("tests", "tools") else "leaves the folder"
    top = name.split("/")[0]
    if "/" in name and (ROOT / "src" / top).is_dir():
        return None if top in ALLOWED[folder] else f"{folder} may not depend on src/{top}"
    if quote == '"' and not (path.parent / name).is_file():
        return "no such file beside the including one, nor a folder of src/"
    return None


def main():
    breaches = files = 0
    for top in ("include", "src", "tools", "bench", "fuzz", "tests", "examples", "python"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix not in (".c", ".h", ".cu", ".cuh", ".cpp"):
                continue
            files += 1
            for match in INCLUDE.finditer(path.read_text()):
                reason = breach(path, match[1], match[2])
                if reason:
                    print(f"{path.relative_to(ROOT)}: #include of {match[2]}: {reason}")
                    breaches += 1
    print(f"check_includes: {files} files, {breaches} breaches")
    return 1 if breaches or not files else 0


if __name__ == "__main__":
    sys.exit(main())
