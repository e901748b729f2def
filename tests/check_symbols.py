#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks what the libraries show: the shared one exports exactly the functions that the header declares, needs only
libc, libm and pthread and has no executable stack; the static one has no global symbol outside ekv_*."""

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# libdl and libpthread are part of libc since glibc 2.34; the linker may still name them.
MAY_NEED = re.compile(r"(libc|libm|libpthread|libdl|libgcc_s|ld-linux.*)\.so\.\d+")


def lines_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def symbols(nm, *arguments):
    """Names of the defined global symbols."""
    found = (line.split() for line in lines_of(nm, "-g", "--defined-only", *arguments))
    return {fields[2] for fields in found if len(fields) == 3}


def main():
    parser = argparse.ArgumentParser()
    for name in ("shared", "static", "nm", "readelf"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    errors = []

    header = (ROOT / "include/evenkv/evenkv.h").read_text()
    declared = set(re.findall(r"^EKV_API [^;(]*?\b(ekv_\w+)\(", header, re.M))
    exported = symbols(args.nm, "-D", args.shared)
    if not declared:
        errors.append("found no declaration in the header")
    errors += [f"exported but not declared: {name}" for name in sorted(exported - declared)]
    errors += [f"declared but not exported: {name}" for name in sorted(declared - exported)]

    everything = symbols(args.nm, args.static)
    if not exported <= everything:
        errors.append("the static library lacks exported functions")
    errors += [f"global in the static library: {name}" for name in sorted(everything) if not name.startswith("ekv_")]

    for line in lines_of(args.readelf, "-dlW", args.shared):
        if "GNU_STACK" in line and "E" in line.split()[-2]:
            errors.append(f"executable stack: {line.strip()}")
        needed = re.search(r"\(NEEDED\).*\[(.*)\]", line)
        if needed and not MAY_NEED.fullmatch(needed[1]):
            errors.append(f"needs {needed[1]}")

    print(*errors, f"check_symbols: {len(exported)} exported functions, {len(errors)} errors", sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
