# SPDX-License-Identifier: Apache-2.0
"""The `evenkv` command that the wheel carries: finds it, runs it, and is it (`main`)."""

import json
import os
import re
import subprocess
import sys

from . import _library, errors


def path():
    """Of the command.  Raises ImportError where the package was built without it."""
    found = _library.find("the evenkv command", "EVENKV_COMMAND", _library._PACKAGE / "bin" / "evenkv",
                          _library._TREE / "build" / "release" / "evenkv")
    if not found:
        raise ImportError("this build of the package has no evenkv command (it needs cJSON: libcjson-dev and "
                          "pkg-config when the wheel is built); EVENKV_COMMAND names another one")
    return found


def text(arguments):
    """What the command prints.  arguments: list of str.  Raises the exception of its error line."""
    result = subprocess.run([str(path()), *arguments], capture_output=True, text=True)
    if result.returncode:
        match = re.fullmatch(r"evenkv: (.*) \((EKV_\w+)\)\n?", result.stderr, re.DOTALL)
        if not match:
            raise errors.EvenkvError(f"evenkv {arguments[0]} ended with {result.returncode}: {result.stderr.strip()}")
        raise errors.of_status(match[2], match[1])
    return result.stdout


def objects(arguments):
    """What the command prints with --json, parsed: a list of one value a line."""
    return [json.loads(line) for line in text([*arguments, "--json"]).splitlines()]


def main():
    os.execv(path(), ["evenkv", *sys.argv[1:]])
