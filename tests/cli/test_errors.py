# SPDX-License-Identifier: Apache-2.0
import gzip
import os
import re
import subprocess

from evenkv_cli import ROOT, TOOL, CliTest

INVALID = "EKV_ERROR_INVALID_ARGUMENT"
NOT_FOUND = "EKV_ERROR_NOT_FOUND"
PARSE = "EKV_ERROR_PARSE"
AZURE = ("TIMESTAMP,ContextTokens,GeneratedTokens\n"
         "2023-11-16 18:15:46.6805900,374,44\n"
         "2023-11-16 18:15:50.9951690,396,109\n")


class Usage(CliTest):
    def test_commands(self):
        manual = (ROOT / "docs" / "cli.md").read_text(encoding="ascii")
        for command in ("plan", "explain", "run", "bench", "demo", "devices", "simulate", "replay",
                        "calibrate", "info"):
            help_text = self.succeed(command, "--help")
            self.assertIn("--output", help_text)
            self.assertEqual(help_text, self.succeed("help", command))
            self.assertIn(f"\n  {command} ", self.succeed("help"))
            for option in re.findall(r"^  (--[a-z-]+)", help_text, re.MULTILINE):
                if option != "--help":
                    self.assertRegex(manual, rf"`[^`]*{option}\b")
        self.golden("help.txt", self.succeed("help"))
        self.golden("help-plan.txt", self.succeed("plan --help"))
        self.assertEqual(self.succeed("--help"), self.succeed("help"))
        self.assertRegex(self.succeed("--version"), r"\Aevenkv \d+\.\d+\.\d+\n\Z")

    def test_no_command(self):
        result = subprocess.run([TOOL], capture_output=True, text=True)
        self.check_error(result, 2, INVALID, "no command")

    def test_unknown_names(self):
        for command in ("simulation", "Plan", "--plan"):
            self.refuse(2, NOT_FOUND, f"'{command}'", command)
            self.refuse(2, NOT_FOUND, f"'{command}'", f"help {command}")
        self.refuse(2, INVALID, "--page-sizes", "plan --kv-lens 5 --page-sizes 4")
        self.refuse(2, INVALID, "'5'", "plan --kv-lens 5 5")
        self.refuse(2, INVALID, "--trace", "devices --trace x")
        self.refuse(2, NOT_FOUND, "'evn'", "even-invariant", "plan --kv-lens 5 --planner evn")
        self.refuse(2, NOT_FOUND, "''", "plan --kv-lens 5 --planner even,")
        self.refuse(2, INVALID, "twice", "plan --kv-lens 5 --planner even,even")
        self.refuse(2, NOT_FOUND, "'b300'", "h200", "plan --kv-lens 5 --device b300")
        self.refuse(2, NOT_FOUND, "'gpt9'", "plan --kv-lens 5 --model gpt9")
        self.refuse(2, NOT_FOUND, "'int4'", "fp8_e4m3", "plan --kv-lens 5 --dtype int4")
        self.refuse(2, NOT_FOUND, "'ring'", "queue", "plan --kv-lens 5 --dispatch ring")
        self.refuse(2, NOT_FOUND, "'zipf'", "plan --batch 4 --tokens 400 --dist zipf")
        self.refuse(2, NOT_FOUND, "'top'", "plan --batch 4 --tokens 400 --dist skew80 --hot top")
        self.refuse(2, NOT_FOUND, "'rocm'", "run --kv-lens 5 --backend rocm")

    def test_option_syntax(self):
        self.refuse(2, INVALID, "--kv-lens", "needs a value", "plan --kv-lens")
        self.refuse(2, INVALID, "--page-size", "needs a value", "plan --page-size --json")
        self.refuse(2, INVALID, "--kv-lens", "empty", "plan --kv-lens=")
        self.refuse(2, INVALID, "--json", "no value", "plan --kv-lens 5 --json=yes")
        self.refuse(2, INVALID, "--page-size", "twice", "plan --kv-lens 5 --page-size 4 --page-size 4")
        self.assertEqual(self.objects("plan --kv-lens=5,6"), self.objects("plan --kv-lens 5,6"))

    def test_lengths_are_needed_once(self):
        self.refuse(2, INVALID, "--kv-lens", "plan")
        self.refuse(2, INVALID, "--kv-lens", "plan --kv-lens 5 --batch 4 --tokens 40")
        self.refuse(2, INVALID, "--tokens", "plan --batch 4")
        self.refuse(2, INVALID, "--batch", "plan --tokens 4")
        self.refuse(2, INVALID, "--speedup", "plan --kv-lens 5 --speedup 2")
        self.refuse(2, INVALID, "--speedup", "run --kv-lens 5 --seed 3 --speedup 2")
        self.refuse(2, INVALID, "--seed", "plan --kv-lens 5 --seed 3")
        self.refuse(2, INVALID, "--hot does not go with --kv-lens", "plan --kv-lens 5 --hot last")
        self.refuse(2, INVALID, "--dist does not go with --kv-lens", "plan --kv-lens 5 --dist skew80")
        self.refuse(2, INVALID, "--batch does not go with --trace", "plan --trace x --batch 4 --tokens 40")
        self.refuse(2, INVALID, "--trace does not go with --kv-lens", "plan --trace x --kv-lens 5")
        self.refuse(2, INVALID, "--kv-lens @ needs the name of a file", "plan --kv-lens @")
        self.refuse(2, INVALID, "--planner", "explain --kv-lens 5 --planner even")

    def test_numbers(self):
        for value in ("0", "-1", "1e3", "0x10", "12a", "+5", "1.5", "99999999999", "nan"):
            self.refuse(2, PARSE, "--page-size", value, f"plan --kv-lens 5 --page-size {value}")
        for value in ("0", "-1", "nan", "inf", "1e999", "fast"):
            self.refuse(2, PARSE, "--step-ms", value, f"plan --trace x --step-ms {value}")
        self.refuse(2, PARSE, "--q-heads", "plan --kv-lens 5 --q-heads 0")
        self.refuse(2, PARSE, "--kv-heads", "plan --kv-lens 5 --kv-heads 0")
        self.refuse(2, PARSE, "--head-dim", "plan --kv-lens 5 --head-dim 0")
        self.refuse(2, PARSE, "--batch", "plan --batch 0 --tokens 5")

    def test_lengths(self):
        for text in ("-1", "5,-7", "x", "5,,6", "5,x", "2147483648", "99999999999999999999", "1.5"):
            self.refuse(2, PARSE, f"plan --kv-lens {text}")

    def test_shapes(self):
        self.refuse(2, INVALID, "q_heads 30", "kv_heads 4", "plan --kv-lens 5 --q-heads 30")
        self.refuse(2, INVALID, "q_heads 32", "--tp 3", "plan --kv-lens 5 --tp 3")
        self.refuse(2, INVALID, "kv_heads 6", "--tp 4", "plan --kv-lens 5 --q-heads 24 --kv-heads 6 --tp 4")
        self.refuse(2, INVALID, "--tp 8", "kv_heads 6", "plan --kv-lens 5 --q-heads 48 --kv-heads 6 --tp 8")

    def test_infeasible_distributions(self):
        self.refuse(2, INVALID, "plan --batch 9 --tokens 8")
        self.refuse(2, INVALID, "plan --batch 3 --tokens 800 --dist 3x20")
        for dist in ("skew0", "skew100", "4x25", "0x10", "skew"):
            self.refuse(2, NOT_FOUND, dist, f"plan --batch 8 --tokens 800 --dist {dist}")

    def test_planner_options_against_the_device(self):
        self.refuse(2, INVALID, "sm_margin", "132", "plan --kv-lens 5 --sm-margin 132")
        self.refuse(2, INVALID, "heads_per_tile 3", "plan --kv-lens 5 --heads-per-tile 3")

    def test_context(self):
        result = self.tool("plan --kv-lens 5", environment={"EKV_NUM_THREADS": "many"})
        self.check_error(result, 1, INVALID, "many")


class Files(CliTest):
    def lens(self, content, status, *parts):
        path = self.file("lens", content)
        self.refuse(1, status, "lens", *parts, f"plan --kv-lens @{path}")

    def test_length_files(self):
        self.refuse(1, NOT_FOUND, "no-such-file", "plan --kv-lens @/no-such-file")
        self.lens("", PARSE)
        self.lens("# nothing\n\n", PARSE)
        self.lens("5,6\n7,-8\n", PARSE, "2", "-8")
        self.lens("5,6\n7,x\n", PARSE, "2", "x")
        self.lens("2147483648\n", PARSE, "2147483648")
        self.lens(b"5,\x00\x01\xff", PARSE)
        self.lens(gzip.compress(b"5,6\n"), PARSE, "compressed")
        self.refuse(1, "EKV_ERROR_IO", "plan --kv-lens @/")

    def test_names_with_control_characters(self):
        for option in ("--kv-lens @", "--trace ", "--kv-lens 5 --device ./", "--kv-lens 5 --output ./no-such-folder/"):
            for character in "\n\r\x1b\x7f":
                status = "EKV_ERROR_IO" if "output" in option else NOT_FOUND
                self.refuse(1, status, "a?b", f"plan {option}a{character}b")

    def test_long_names_leave_room_for_the_reason(self):
        name = "x/../" * 120 + "no-such-file"
        for option in ("--kv-lens @", "--trace ", "--kv-lens 5 --device ./", "--kv-lens 5 --output ./"):
            status = "EKV_ERROR_IO" if "output" in option else NOT_FOUND
            self.refuse(1, status, "...", "x/../no-such-file", "No such file or directory", f"plan {option}{name}")
        long = self.file("n" * 250, "5,x\n")
        self.refuse(1, PARSE, "line 1: kv_len[1] is 'x'", f"plan --kv-lens @{'/./' * 150}{long}")
        self.refuse(1, PARSE, ":1: '5,x' is not `key = value`", f"plan --kv-lens 5 --device {'/./' * 150}{long}")

    def test_nothing_is_printed_where_a_later_batch_fails(self):
        path = self.file("lens", "5\n" + ",".join(["2147483647"] * 600) + "\n")
        self.refuse(1, "EKV_ERROR_OVERFLOW", "1099511627776", f"plan --kv-lens @{path}")

    def trace(self, content, status, *parts):
        path = self.file("trace", content)
        self.refuse(1, status, *parts, f"plan --trace {path}")

    def test_traces(self):
        self.refuse(1, NOT_FOUND, "no-such-file", "plan --trace /no-such-file")
        self.trace("", PARSE, "trace")
        self.trace("a,b,c\n1,2,3\n", PARSE)
        self.trace(AZURE + "2023-11-16 18:15:51.2,7\n", PARSE, "row 3")
        self.trace(AZURE + "2023-11-16 18:15:51.2,7", PARSE, "row 3")
        self.trace(AZURE + "2023-11-16 18:15:51.2,-7,4\n", PARSE, "row 3", "-7")
        self.trace(os.urandom(64) + b"\x00", PARSE)
        self.trace(gzip.compress(AZURE.encode()), PARSE, "compressed")
        self.trace('{"timestamp": 0, "input_length": 7}\n', PARSE, "row 1")
        self.trace('{"timestamp": 0, "input_length": 7, "output_length"', PARSE)
        self.refuse(1, PARSE, f"plan --trace {self.file('trace', AZURE)} --trace-format burstgpt")
        self.refuse(1, "EKV_ERROR_CAPACITY", f"plan --trace {self.file('trace', AZURE)} --sample 1000000")
        crlf = self.file("crlf", AZURE.replace("\n", "\r\n"))
        self.assertEqual(self.objects(f"plan --trace {crlf}"), self.objects(f"plan --trace {self.file('lf', AZURE)}"))

    def device(self, change, *parts):
        text = change((ROOT / "data" / "devices" / "h200.device").read_text())
        self.refuse(1, PARSE, "my.device", *parts, f"plan --kv-lens 5 --device {self.file('my.device', text)}")

    def test_devices(self):
        self.device(lambda text: text + "colour = green\n", "colour")
        self.device(lambda text: text.replace("num_sms", "# num_sms"), "num_sms")
        self.device(lambda text: text.replace("= 4800", "= nan"), "nan")
        self.device(lambda text: text.replace("= 132", "= 0"), "num_sms", "0")
        self.device(lambda text: text + "num_sms = 5\n", "repeated")
        self.device(lambda text: "\x00" + text)
        self.device(lambda text: text + "#" * (1 << 16), "larger than")
        self.refuse(1, NOT_FOUND, "no/such", "plan --kv-lens 5 --device no/such")
        good = self.file("good.device", "\ufeff" + (ROOT / "data" / "devices" / "h20.device").read_text())
        self.assertEqual(self.objects(f"plan --kv-lens 500 --device {good}"),
                         self.objects("plan --kv-lens 500 --device h20"))
        self.assertEqual(self.succeed("devices --device h20"), (ROOT / "data" / "devices" / "h20.device").read_text())

    def test_device_list(self):
        devices = self.objects("devices")
        self.assertEqual([device["name"] for device in devices if not device["this_machine"]],
                         sorted([device["name"] for device in devices if not device["this_machine"]],
                                key=["a100", "h100", "h200", "h20", "cpu"].index))
        self.assertEqual(sum(device["this_machine"] for device in devices), 1)
        [h200] = [device for device in devices if device["name"] == "h200" and not device["this_machine"]]
        self.assertEqual((h200["num_sms"], h200["sm_arch"], h200["projected"]), (132, 90, False))


class Output(CliTest):
    def test_unwritable_output(self):
        self.refuse(1, "EKV_ERROR_IO", "/no-such-folder/out", "plan --kv-lens 5 --output /no-such-folder/out")
        self.refuse(1, "EKV_ERROR_IO", "/dev/full", "No space", "plan --kv-lens 5 --output /dev/full")

    def test_stdout_closed(self):
        result = subprocess.run(["sh", "-c", '"$0" plan --kv-lens 5 >&-', TOOL], stderr=subprocess.PIPE, text=True)
        self.check_error(result, 1, "EKV_ERROR_IO", "stdout")

    def test_a_file_does_not_take_the_place_of_a_closed_stdout(self):
        path = self.file("out", "kept")
        result = subprocess.run(["sh", "-c", '"$0" plan --kv-lens 5 --output "$1" >&-', TOOL, path])
        self.assertEqual(result.returncode, 0)
        with open(path, encoding="utf-8") as written:
            self.assertEqual(written.read(), self.succeed("plan --kv-lens 5"))

    def test_stdout_full(self):
        with open("/dev/full", "w") as full:
            result = subprocess.run([TOOL, "plan", "--kv-lens", "5"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.check_error(result, 1, "EKV_ERROR_IO", "stdout", "No space")

    def test_reader_gone(self):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            result = subprocess.run([TOOL, "plan", "--kv-lens", "5"], stdout=pipe, stderr=subprocess.PIPE, text=True)
        self.check_error(result, 1, "EKV_ERROR_IO", "stdout", "Broken pipe")
