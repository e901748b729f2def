# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command share.  The environment names the tool (EVENKV) and may ask to rewrite the golden
texts (EVENKV_UPDATE_GOLDENS=1)."""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
TOOL = os.environ["EVENKV"]
SKEW80 = "--batch 128 --tokens 524288 --dist skew80"


class CliTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def file(self, name, content):
        path = pathlib.Path(self.folder.name) / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def tool(self, *arguments, environment=None):
        """Runs the tool on arguments, of which those with blanks are several."""
        words = [word for argument in arguments for word in str(argument).split(" ")]
        return subprocess.run([TOOL, *words], capture_output=True, text=True, cwd=ROOT, timeout=120,
                              env={**os.environ, **(environment or {})})

    def succeed(self, *arguments):
        result = self.tool(*arguments)
        self.assertEqual((result.returncode, result.stderr), (0, ""), arguments)
        return result.stdout

    def objects(self, *arguments):
        return [json.loads(line) for line in self.succeed(*arguments, "--json").splitlines()]

    def refuse(self, code, status, *parts_then_arguments):
        """The last argument is the command line; those before it must stand in the error line."""
        *parts, line = parts_then_arguments
        result = self.tool(line)
        self.check_error(result, code, status, *parts)

    def check_error(self, result, code, status, *parts):
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertEqual(result.stdout or "", "")
        self.assertRegex(result.stderr, rf"\Aevenkv: [^\n]+ \({status}\)\n\Z")
        for part in parts:
            self.assertIn(part, result.stderr)

    def golden(self, name, text):
        """Compares all but workspace sizes, which differ with the number of threads, and predicted times, which follow
        the constants of the devices."""
        text = re.sub(r"\d+(?= bytes on the CPU backend)", "N", text)
        text = re.sub(r"(?m)^(\w\S+ +(?:grid|queue|range) .*\S) +\d+$", r"\1 N", text)
        text = re.sub(r" +\d+\.\d us +\d+\.\d\d x even.*", " N us N x even", text)
        path = GOLDEN / name
        if os.environ.get("EVENKV_UPDATE_GOLDENS"):
            path.write_text(text)
        self.assertEqual(text, path.read_text())
