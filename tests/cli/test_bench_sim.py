# SPDX-License-Identifier: Apache-2.0
import csv
import shutil
import unittest

from evenkv_cli import DATA, CliTest
from test_bench import COLUMNS

TOY = f"--device {DATA / 'toy.device'}"


class BenchSimTest(CliTest):
    def test_a_sweep_that_fails_leaves_the_csv_alone(self):
        kept = self.file("kept.csv", "kept")
        result = self.tool("bench --sim --batches 8 --tokens 8192 --planners flashinfer-cuda-core --device a100 --csv",
                           kept)
        self.assertEqual(result.returncode, 1)
        with open(kept) as file:
            self.assertEqual(file.read(), "kept")

    def test_csv_has_the_columns_of_measured_rows(self):
        path = self.file("out.csv", "")
        self.succeed("bench --sim --dists uniform,skew80 --batches 4,16 --tokens 8192,16384 --planners fa3,even --csv",
                     path)
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(list(rows[0]), COLUMNS)
        self.assertEqual(len(rows), 16)
        self.assertEqual({(row["backend"], row["device"], row["flush"], row["hot"]) for row in rows},
                         {("sim", "h200", "model", "first")})
        self.assertEqual([row["planner"] for row in rows], ["fa3"] * 8 + ["even"] * 8)
        # calibrate reads it back; a fit of a simulation is exact.
        [again] = self.objects("calibrate --fit none --from", path)
        for planner in ("fa3", "even"):
            self.assertLess(again["planners"][planner]["judged"]["worst"], 1e-3)

    def test_json_agrees_with_simulate(self):
        rows = self.objects("bench --sim --dists skew40 --batches 40 --tokens 65536 --planners fa3,even", TOY)
        singles = self.objects("simulate --dist skew40 --batch 40 --tokens 65536 --planner fa3,even", TOY)
        for row, single in zip(rows, singles):
            for key in ("planner", "tail_us", "tail_cause", "kv_gb_per_s", "num_tiles", "imbalance", "projected"):
                self.assertEqual(row[key], single[key])
            self.assertEqual(row["median_us"], single["time_us"])

    def test_preset_decode_imbalance(self):
        for device, cuda_core, tensor_core in (("h200", 297, 66), ("h20", 176, 39)):
            rows = self.objects("bench --preset decode-imbalance --device", device)
            self.assertEqual(len(rows), 5 * 5 * 27)
            limits = {row["planner"]: row["threshold"] for row in rows}
            self.assertEqual(limits, {"flashinfer-cuda-core": cuda_core, "flashinfer-tensor-core": tensor_core,
                                      "fa3-nosplit": None, "fa3": 993, "even": None})
            skewed = {(row["planner"], row["batch"]): row["median_us"] for row in rows if row["dist"] == "skew80"}
            self.assertGreater(skewed["fa3", 1024], 5 * skewed["fa3", 992])
            self.assertLess(skewed["even", 2048], 1.3 * skewed["even", 4])

    def test_preset_linearity(self):
        text = self.succeed("bench --preset linearity --planners fa3-nosplit,even --batches 16,128")
        self.assertRegex(text, r"(?m)^even +skew80 +128 +6 +\d+\.\d +4\d\d\.\d +(1\.00000|0\.9999\d) +\d\.\d$")
        self.assertIn("even                        10 of 10 lines", text)
        objects = self.objects("bench --preset linearity --planners even --batches 16 --dists uniform")
        self.assertEqual(len(objects), 7)  # six sizes and their line
        fit, rows = objects[-1], objects[:-1]
        mean_x = sum(row["total_tokens"] for row in rows) / 6
        mean_y = sum(row["median_us"] for row in rows) / 6
        slope = (sum((row["total_tokens"] - mean_x) * (row["median_us"] - mean_y) for row in rows) /
                 sum((row["total_tokens"] - mean_x) ** 2 for row in rows))
        self.assertAlmostEqual(fit["b_us_per_million_tokens"], slope * 1e6, delta=0.01)
        self.assertAlmostEqual(fit["a_us"], mean_y - slope * mean_x, delta=0.01)
        worst = max(abs(row["median_us"] - fit["a_us"] - slope * row["total_tokens"]) / row["median_us"]
                    for row in rows)
        self.assertAlmostEqual(fit["worst_residual"], worst, delta=1e-4)

    def test_linearity_over_a_trace(self):
        objects = self.objects("bench --preset linearity --trace data/azure-conv-1000.csv --sample 30 --planners even")
        self.assertEqual(len(objects), 31)
        self.assertEqual((objects[-1]["dist"], objects[-1]["batch"], objects[-1]["points"]), ("trace", None, 30))
        self.assertGreater(objects[-1]["r_squared"], 0.9)

    @unittest.skipUnless(shutil.which("gnuplot"), "no gnuplot")
    def test_plots(self):
        sweep = "--planners fa3,even --batches 4,128 --dists uniform,skew80"
        for name, arguments in (("a.svg", f"--preset decode-imbalance {sweep}"),
                                ("b.svg", f"--preset linearity {sweep}"),
                                ("c.png", "--preset linearity --trace data/azure-conv-1000.csv --sample 20"),
                                ("d.svg", f"--sim {sweep} --tokens 4096,8192")):
            path = self.file(name, "")
            self.succeed("bench", arguments, "--plot", path)
            with open(path, "rb") as file:
                content = file.read()
            self.assertGreater(len(content), 4000, name)
            if name.endswith("svg"):
                for word in (b"fa3", b"even", b"uniform", b"simulated on h200"):
                    self.assertIn(word, content)
        with open(self.folder.name + "/a.svg", "rb") as file:
            self.assertIn(b"no split from 993", file.read())

    def test_what_cannot_be_is_left_out(self):
        result = self.tool("bench --sim --dists 2x40 --batches 2,4 --tokens 4096")
        self.assertEqual(result.returncode, 0)
        self.assertIn("batch 2, 4096 tokens left out", result.stderr)
        result = self.tool("bench --sim --batches 4 --tokens 4096 --planners fa3,even --device a100")
        self.assertEqual(result.returncode, 0)
        self.assertIn("fa3 left out", result.stderr)
        self.refuse_planner()

    def refuse_planner(self):
        result = self.tool("bench --sim --batches 4 --tokens 4096 --planners fa3 --device a100")
        self.assertEqual((result.returncode, result.stdout), (1, ""))

    def test_errors(self):
        cell = "--batches 4 --tokens 4096"
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "--backend does not go", f"bench --sim --backend cpu {cell}")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "--repeat does not go", f"bench --sim --repeat 3 {cell}")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "--trace goes with",
                    "bench --sim --trace data/azure-conv-1000.csv")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "--trace goes with", "bench --trace data/azure-conv-1000.csv")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "--sample goes with --trace",
                    f"bench --backend cpu --sample 3 {cell}")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "--system goes with --sim",
                    f"bench --backend cpu --system evenkv {cell}")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "--dists does not go with --trace",
                    "bench --preset linearity --dists uniform --trace data/azure-conv-1000.csv")
        self.refuse(2, "EKV_ERROR_NOT_FOUND", "decode-imbalance, linearity", "bench --preset no")
        self.refuse(1, "EKV_ERROR_IO", "no/such", f"bench --sim --csv no/such {cell}")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", ".svg", f"bench --sim --plot x.pdf {cell}")


if __name__ == "__main__":
    unittest.main()
