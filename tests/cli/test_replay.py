# SPDX-License-Identifier: Apache-2.0
import shutil
import unittest

from evenkv_cli import DATA, CliTest

TOY = f"--device {DATA / 'toy.device'} --q-heads 8 --kv-heads 2 --layers 10 --weights-gb 2"
# Arrivals in ms; a request of n output tokens is in n - 1 decode steps.
THREE = ('{"timestamp": 0, "input_length": 1000, "output_length": 3}\n'
         '{"timestamp": 0, "input_length": 200, "output_length": 5}\n'
         '{"timestamp": 60000, "input_length": 9, "output_length": 1}\n'
         '{"timestamp": 60000, "input_length": 5000, "output_length": 2}\n')


class ReplayTest(CliTest):
    def replay(self, *arguments):
        return self.objects("replay", *arguments)[0]

    def attention(self, kv_lens, planner):
        """us of a layer"""
        [row] = self.objects(f"simulate --kv-lens {kv_lens} --planner {planner} --q-heads 8 --kv-heads 2 --device "
                             f"{DATA / 'toy.device'}")
        return row["time_us"]

    def test_by_hand(self):
        trace = self.file("t.jsonl", THREE)
        batches = ("1001,201", "1002,202", "203", "204", "5001")
        for planner in ("fa3", "even"):
            steps = [10 * self.attention(batch, planner) for batch in batches]
            result = self.replay(TOY, "--step-base-us 100 --planners", planner, "--trace", trace)
            p = result["planners"][planner]
            self.assertEqual((result["steps"], p["steps"], p["finished"], p["skipped"]), (5, 5, 3, 1))
            self.assertEqual(result["step_base_us"], 100)
            self.assertAlmostEqual(p["total_s"] * 1e6, sum(steps), places=3)
            self.assertAlmostEqual(p["mean_us"], sum(steps) / 5, places=3)
            self.assertAlmostEqual(p["max_us"], max(steps), places=3)
            self.assertAlmostEqual(p["p50_us"], sorted(steps)[2], delta=1e-3 * max(steps))
            self.assertAlmostEqual(p["attention_share"], sum(steps) / (sum(steps) + 500), places=6)
            times = sorted([(steps[0] + steps[1] + 200) / 2, (sum(steps[:4]) + 400) / 4, steps[4] + 100])
            self.assertAlmostEqual(p["tpot_p50_us"], times[1], delta=1e-3 * times[1])
            self.assertAlmostEqual(p["tpot_p99_us"], times[2], delta=1e-3 * times[2])
            self.assertAlmostEqual(p["seconds"], 60 + (steps[4] + 100) / 1e6, places=6)
            self.assertAlmostEqual(p["tokens_per_s"], 7 / p["seconds"], places=6)
            worst = steps.index(max(steps))
            lengths = [int(n) for n in batches[worst].split(",")]
            self.assertEqual((p["worst"]["kv_len"], p["worst"]["step"]), (lengths, worst))
            self.assertEqual((p["max_batch"], p["mean_batch"]), (2, 1.4))
            self.assertTrue(p["projected"])

    def test_fixed_step_shows_all_planners_the_same_batches(self):
        line = "--trace data/azure-conv-1000.csv --planners fa3,flashinfer-tensor-core,even --speedup 4"
        p = self.replay(line, "--fixed-step --step-ms 30")["planners"]
        self.assertEqual(len({(r["steps"], r["mean_batch"], r["seconds"]) for r in p.values()}), 1)
        self.assertTrue(all(abs(r["tpot_p50_us"] - 30000) < 31 for r in p.values()))
        closed = self.replay(line)["planners"]
        self.assertNotEqual(closed["fa3"]["steps"], closed["even"]["steps"])

    def test_slow_attention_grows_the_batch(self):
        p = self.replay("--trace data/azure-conv-1000.csv --planners fa3-nosplit,even --step-base-us 1000 --speedup 4"
                        " --tp 4")["planners"]
        self.assertGreater(p["fa3-nosplit"]["mean_batch"], 1.2 * p["even"]["mean_batch"])
        self.assertEqual(p["fa3-nosplit"]["past_threshold_share"], 1)
        self.assertEqual(p["even"]["past_threshold_share"], 0)

    def test_replicas_share_the_requests(self):
        line = "--trace data/azure-conv-1000.csv --planners even --speedup 4"
        one, two = (self.replay(line, "--replicas", n)["planners"]["even"] for n in (1, 2))
        self.assertEqual(one["finished"] + one["skipped"], 1000)
        self.assertEqual(two["finished"] + two["skipped"], 1000)
        self.assertLess(two["mean_batch"], one["mean_batch"])

    def test_memory_caps_admission(self):
        line = "--trace data/azure-conv-1000.csv --planners even --speedup 50"
        wide, tight = (self.replay(line, "--kv-memory", gb) for gb in (80, 2))
        self.assertEqual(tight["token_budget"], 2 * 10**9 // (2 * 4 * 128 * 2 * 48))
        self.assertLess(tight["planners"]["even"]["max_batch"], wide["planners"]["even"]["max_batch"])
        default = self.replay(line)
        self.assertEqual(default["token_budget"], int((150.754820096 - 61) * 1e9 / (2 * 4 * 128 * 2 * 48)))
        self.refuse(1, "EKV_ERROR_CAPACITY", "even: row", f"replay {line} --kv-memory 0.05")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "raise --tp", f"replay {line} --model llama3-405b")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "give --kv-memory", f"replay {line} --device cpu")

    def test_worst_batch_opens_in_simulate(self):
        path = self.file("worst", "")
        result = self.replay("--trace data/azure-conv-1000.csv --planners fa3,even --speedup 4 --worst", path)
        with open(path) as file:
            lines = file.read().splitlines()
        self.assertEqual([line.split(":")[0] for line in lines[::2]], ["# fa3", "# even"])
        rows = self.objects("simulate --planner fa3,even --kv-lens", "@" + path)
        for row, planner in ((rows[0], "fa3"), (rows[3], "even")):
            self.assertEqual(row["planner"], planner)
            self.assertAlmostEqual(row["time_us"] * 48, result["planners"][planner]["max_us"], delta=0.01)

    def test_text_says_what_is_not_modelled(self):
        text = self.succeed("replay --trace data/azure-conv-1000.csv --planners fa3,even --device h20 --tp 4",
                            "--replicas 2")
        self.assertIn("2 servers of 4 h20s (projected)", text)
        self.assertIn("Prefill, communication between ranks and the rest of a step are not modelled.", text)
        self.assertIn("Projected: constants of h20", text)
        self.assertNotIn("rojected", self.succeed("replay --trace data/azure-conv-1000.csv --planners even"))

    def test_golden(self):
        self.golden("replay.txt", self.succeed("replay --planners fa3,even --step-base-us 100", TOY, "--trace",
                                               self.file("t.jsonl", THREE)).replace(self.folder.name, "FOLDER"))

    def test_same_bytes(self):
        line = "replay --trace data/azure-conv-1000.csv --speedup 10 --json"
        self.assertEqual(self.succeed(line), self.succeed(line))

    @unittest.skipUnless(shutil.which("gnuplot"), "no gnuplot")
    def test_plot(self):
        path = self.file("r.svg", "")
        self.succeed("replay --trace data/azure-conv-1000.csv --planners fa3,even --plot", path)
        with open(path) as file:
            self.assertIn("time/output-token", file.read())

    def test_errors(self):
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "replay needs --trace", "replay")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "--sample does not go",
                    "replay --trace data/azure-conv-1000.csv --sample 3")
        self.refuse(1, "EKV_ERROR_NOT_FOUND", "no-such", "replay --trace no-such")
        self.refuse(1, "EKV_ERROR_UNSUPPORTED", "fa3: device a100",
                    "replay --trace data/azure-conv-1000.csv --device a100 --planners even,fa3")
        self.refuse(1, "EKV_ERROR_PARSE", "t.jsonl", f"replay --trace {self.file('t.jsonl', THREE + 'x')}")
        self.refuse(1, "EKV_ERROR_IO", "no/such",
                    "replay --trace data/azure-conv-1000.csv --planners even --worst no/such")
        result = self.tool("replay --trace data/azure-conv-1000.csv --device a100 --planners all --resident-ctas 4")
        self.assertEqual(result.returncode, 0)
        self.assertIn("fa3 left out", result.stderr)


if __name__ == "__main__":
    unittest.main()
