# SPDX-License-Identifier: Apache-2.0
"""How far the shipped constants are from the measurements, and fitting."""
import csv
import json
import random
import re
import unittest

from evenkv_cli import ROOT, CliTest

TABLE = "data/h200-systems.csv"
# median and 95th percentile of |simulated / measured - 1| on rows that the fit did not see
ACCURACY = {"flashinfer-cuda-core": (0.05, 0.20), "flashinfer-tensor-core": (0.03, 0.10), "fa3": (0.03, 0.10),
            "fa3-nosplit": (0.03, 0.10), "flashinfer-batch-attention": (0.05, 0.20), "flashinfer-xqa": (0.05, 0.20)}


def percentile(values, share):
    return sorted(values)[max(-(-int(len(values) * share * 1000) // 1000), 1) - 1]


class CalibrateTest(CliTest):
    def rows(self, *arguments):
        return self.objects("calibrate --residuals --from", *arguments)[0]["rows"]

    def test_accuracy_on_rows_that_the_fit_did_not_see(self):
        rows = self.rows(TABLE, "--fit none")
        with open(ROOT / TABLE, newline="") as file:
            self.assertEqual(len(rows), sum(row["system"] in ACCURACY for row in csv.DictReader(file)))
        for planner, (median, p95) in ACCURACY.items():
            judged = [row for row in rows if row["planner"] == planner][1::2]
            self.assertEqual(len(judged), 72)
            errors = [abs(row["simulated_us"] / row["measured_us"] - 1) for row in judged]
            self.assertLessEqual(percentile(errors, 0.5), median, planner)
            self.assertLessEqual(percentile(errors, 0.95), p95, planner)

    def test_cliffs_are_between_the_same_batch_sizes(self):
        rows = self.rows(TABLE, "--fit none")
        cliffs = 0
        for planner in ACCURACY:
            for dist in ("uniform", "skew40", "skew60", "skew80", "2x40"):
                line = [row for row in rows if (row["planner"], row["dist"]) == (planner, dist) and
                        row["total_tokens"] == 524288]
                steps = {key: [b[key] / a[key] for a, b in zip(line, line[1:])]
                         for key in ("measured_us", "simulated_us")}
                for i, (measured, simulated) in enumerate(zip(steps["measured_us"], steps["simulated_us"])):
                    where = (planner, dist, line[i]["batch"], line[i + 1]["batch"])
                    if measured >= 2:
                        cliffs += 1
                        self.assertGreater(simulated, 1.6, where)
                    if simulated >= 2:
                        self.assertGreater(measured, 1.6, where)
        self.assertGreaterEqual(cliffs, 12)

    def test_read_rate_of_the_cpu(self):
        [probe] = self.objects("calibrate --device cpu --threads 3 --repeat 2")
        self.assertEqual((probe["device"], [read["threads"] for read in probe["reads"]]), ("cpu", [1, 3]))
        self.assertGreater(probe["read_bytes"], 256 << 20)
        for read in probe["reads"]:
            self.assertAlmostEqual(read["gb_per_s"] * read["read_us"] * 1e3, probe["read_bytes"], delta=1)
            self.assertIn("thread", read["shape"])
        self.assertEqual(len(self.objects("calibrate --device cpu --threads 1 --repeat 1")[0]["reads"]), 1)
        text = self.succeed("calibrate --device cpu --threads 1 --repeat 1")
        self.assertRegex(text, r"plain read of 268\.6 MB.*\nthreads +GB/s  fastest way\n +1 +[0-9.]+  1 thread ")

    def test_even_on_our_own_measurements(self):
        folder = max((ROOT / "bench/results").glob("h200-*")).relative_to(ROOT)
        rows = self.rows(f"{folder}/mma.csv,{folder}/traffic.csv",
                         "--kv-lens @data/traffic.txt --planner even --fit none")
        errors = [abs(row["simulated_us"] / row["measured_us"] - 1) for row in rows]
        self.assertLessEqual(percentile(errors, 0.5), 0.05)
        self.assertLessEqual(percentile(errors, 0.95), 0.15)

    def test_fit_and_save(self):
        path = self.file("fitted.device", "")
        [first] = self.objects("calibrate --planner flashinfer-xqa --save", path, "--from", TABLE)
        self.assertEqual(list(first["systems"]), ["flashinfer-xqa"])
        self.assertEqual((first["planners"]["flashinfer-xqa"]["fitted"]["rows"],
                          first["planners"]["flashinfer-xqa"]["judged"]["rows"]), (72, 72))
        with open(path) as file:
            text = file.read()
        source = "# fitted to 72 rows of data/h200-systems.csv"
        self.assertEqual(len(re.findall(rf"(?m)^flashinfer-xqa\.\w+ += \S+ +{source}$", text)), 6)
        self.assertEqual(len(re.findall(r"(?m)^fa3\.", text)), 6)
        [second] = self.objects("calibrate --planner flashinfer-xqa --fit none --device", path, "--from", TABLE)
        self.assertEqual(second["systems"], {})
        self.assertAlmostEqual(second["planners"]["flashinfer-xqa"]["judged"]["median"],
                               (first["planners"]["flashinfer-xqa"]["fitted"]["median"] +
                                first["planners"]["flashinfer-xqa"]["judged"]["median"]) / 2, delta=0.005)
        # A device of which nothing is known but what calibrate found.
        text = re.sub(r"(?m)^[\w-]+\.\w+ +=.*\n", "", text).replace("= h200", "= mine")
        bare = self.file("bare.device", text)
        self.refuse(1, "EKV_ERROR_UNSUPPORTED", "mine has no constants", f"calibrate --fit none --device {bare} "
                    f"--planner fa3 --from {TABLE}")
        self.succeed(f"calibrate --device {bare} --planner flashinfer-xqa --from {TABLE} --save {bare}")
        self.succeed(f"simulate --device {bare} --planner flashinfer-xqa --batch 4 --tokens 8000")

    def test_text(self):
        text = self.succeed("calibrate --fit none --planner fa3,fa3-nosplit --residuals --from", TABLE)
        self.assertRegex(text, r"(?m)^fa3 +judged +144 ")
        self.assertEqual(len(re.findall(r"(?m)^fa3-nosplit +\S+ +\d+ +\d+ +16 +32/4 ", text)), 144)

    def test_mutated_tables(self):
        """Whatever is in the file: rows and a result, or one line of error; never a crash."""
        with open(ROOT / TABLE, "rb") as file:
            good = b"".join(file.readlines()[:12])
        for seed in range(150):
            rng = random.Random(seed)
            table = bytearray(good)
            for _ in range(rng.randrange(1, 6)):
                where = rng.randrange(len(table))
                piece = rng.choice([bytes([rng.randrange(256)]), b",", b"\n", b"", b"-", b"9" * 20, b"file1", b"2x99"])
                table[where:where + rng.randrange(0, 4)] = piece
            result = self.tool("calibrate --fit none --from", self.file("t.csv", bytes(table)))
            with self.subTest(seed=seed):
                self.assertIn(result.returncode, (0, 1, 2), result.stderr)
                if result.returncode:
                    self.assertRegex(result.stderr, r"\Aevenkv: [^\n]+ \(EKV_ERROR_\w+\)\n\Z")

    def test_errors(self):
        head = "planner,dist,batch,total_tokens,page_size,q_heads,kv_heads,median_us\n"
        good = "fa3,uniform,4,8192,16,32,4,100\n"
        for option in ("--page-size 1", "--repeat 3", "--backend cuda"):
            self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", option.split()[0], "does not go with --from",
                        f"calibrate {option} --from {TABLE}")
        for arguments in ("--save x", "--residuals", "--page-size 8", "--kv-lens 5", "--planner even"):
            self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", arguments.split()[0], "not with --device cpu alone",
                        f"calibrate --device cpu {arguments}")
        self.refuse(1, "EKV_ERROR_NOT_FOUND", "no-such", "calibrate --from no-such.csv")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "does not go with --fit none",
                    f"calibrate --fit none --save x --from {TABLE}")
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "no row of the planners",
                    f"calibrate --planner even --from {TABLE}")
        self.refuse(1, "EKV_ERROR_INVALID_ARGUMENT", "2 rows of fa3; 6 constants",
                    f"calibrate --fit all --from {self.file('few.csv', head + good + good)}")
        for text, part in (("", "no row"), (head, "no row"), ("planner,dist\n", "no column batch"),
                           (head.replace("dist,", "") + "x\n", "neither column dist nor batch_line"),
                           (head + "peer-x" + good[3:], "no row"),
                           (head + good.replace("uniform", "round"), "round"),
                           (head + good.replace(",4,8192", ",0,8192"), "batch"),
                           (head + good.replace("8192", "3"), ":2: 3 tokens are fewer"),
                           (head + good.replace(",100", ",0"), "median_us"),
                           (head + good.replace(",100", ",1e3x"), "median_us"),
                           (head + good.replace(",100", ",nan"), "median_us"),
                           (head + good.replace(",100", ",100,7"), "other than 8 fields"),
                           (head + good.replace("uniform", "file3"), "--kv-lens @FILE says which"),
                           (head + good.replace(",4,100", ",5,100"), "q_heads 32 is not a multiple")):
            result = self.tool("calibrate --from", self.file("bad.csv", text))
            self.assertIn(result.returncode, (1, 2))
            self.assertRegex(result.stderr, r"\Aevenkv: [^\n]+\n\Z")
            self.assertIn(part, result.stderr)

    def test_without_a_table(self):
        """It measures on a GPU, or says that there is none; what it has no use for is refused before."""
        for option in ("--kv-lens 5", "--planner fa3", "--residuals", "--fit odd", "--plot x.svg", "--backend cpu",
                       "--request-cost 4"):
            self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", option.split(" ")[0], f"calibrate {option}")
        result = self.tool("calibrate --repeat 3 --json")
        if result.returncode:
            self.check_error(result, 1, "EKV_ERROR_BACKEND_UNAVAILABLE",
                             "calibrate needs --from FILE, --device cpu, or a GPU")
            return
        measured = json.loads(result.stdout)
        self.assertTrue(measured["passed"])
        self.assertGreater(measured["token_us"], 0)
        self.assertEqual((len(measured["equal_requests"]), len(measured["request_costs"])), (12, 36))


if __name__ == "__main__":
    unittest.main()
