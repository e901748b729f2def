#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""coverage.py BUILD_DIR: line coverage of src/ and tools/ by file, from the .gcda files that the tests left in a build
of the coverage preset.  A line of a header counts once, whichever files include it."""

import collections
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    lines = collections.defaultdict(dict)  # file -> line -> executed
    for data in sorted(build.rglob("*.gcda")):
        run = subprocess.run(["gcov", "--json-format", "--stdout", str(data)], cwd=build, check=True,
                             capture_output=True, text=True)
        for text in run.stdout.splitlines():
            for file in json.loads(text)["files"]:
                path = (build / file["file"]).resolve()
                if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in ("src", "tools"):
                    continue
                executed = lines[str(path.relative_to(ROOT))]
                for line in file["lines"]:
                    number = line["line_number"]
                    executed[number] = executed.get(number, False) or line["count"] > 0

    total = hit = 0
    for name in sorted(lines):
        covered = sum(lines[name].values())
        missed = [str(number) for number, executed in sorted(lines[name].items()) if not executed]
        shown = "  not: " + " ".join(missed[:12]) if missed else ""
        print(f"{covered / len(lines[name]):7.1%}  {name}{shown}{' ...' if len(missed) > 12 else ''}")
        total, hit = total + len(lines[name]), hit + covered
    if not total:
        print("coverage: no .gcda files; run make coverage", file=sys.stderr)
        return 1
    print(f"{hit / total:7.1%}  of {total} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
