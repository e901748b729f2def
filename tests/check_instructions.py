#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Instructions of a decode on the CPU, counted by callgrind, against those on record: a kernel that got slower shows
without a clock.  The counts hold for one compiler, so this skips under any other.

    tests/check_instructions.py --evenkv build/release/evenkv --compiler "GNU 12.2.0"
    tests/check_instructions.py ... --update      writes what it counts to the record
"""
import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

RECORD = pathlib.Path(__file__).parent / "data" / "instructions.json"
SKIPPED = 77
ALLOWED = 0.02  # of the count on record; runs of one binary differ by less than a thousandth
KERNELS = ["generic", "avx2"]  # valgrind has no AVX-512
DTYPES = ["bf16", "fp16", "fp32"]
DECODES = 3  # of `run --repeat 1 --no-check`: two that are compared and one that is timed
SHAPE = ["--q-heads", "32", "--kv-heads", "4", "--head-dim", "128", "--kv-lens", "1000,24"]


def count(evenkv, kernel, dtype):
    """Instructions of one ekv_decode; None where the CPU, as valgrind shows it, lacks the kernel."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=ekv_decode", evenkv,
               "run", "--backend", "cpu", "--planner", "even", "--threads", "1", "--repeat", "1", "--no-check",
               "--no-flush", "--kernel", kernel, "--dtype", dtype, *SHAPE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "EKV_ERROR_UNSUPPORTED" in result.stderr:
        return None
    found = re.search(r"Collected : (\d+)", result.stderr)
    if result.returncode or not found:
        sys.exit(f"{' '.join(command)}:\n{result.stderr}")
    return int(found.group(1)) // DECODES


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--evenkv", required=True)
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    if not shutil.which("valgrind"):
        print("check_instructions: skipped: no valgrind")
        return SKIPPED
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"compiler": None, "counts": {}}
    if not arguments.update and arguments.compiler != record["compiler"]:
        print(f"check_instructions: skipped: counts are on record for {record['compiler']}, this is "
              f"{arguments.compiler}")
        return SKIPPED
    counts, failed = {}, False
    for kernel in KERNELS:
        for dtype in DTYPES:
            key = f"{kernel} {dtype}"
            counts[key] = count(arguments.evenkv, kernel, dtype)
            expected = record["counts"].get(key)
            if counts[key] is None:
                print(f"{key}: skipped, no such kernel on this CPU")
                counts[key] = expected
            elif arguments.update:
                print(f"{key}: {counts[key]} instructions")
            elif expected is None or abs(counts[key] - expected) > ALLOWED * expected:
                print(f"{key}: {counts[key]} instructions, on record are {expected}")
                failed = True
            else:
                print(f"{key}: {counts[key]} instructions, as on record")
    if arguments.update:
        record = {"compiler": arguments.compiler, "shape": " ".join(SHAPE), "counts": counts}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        return 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
