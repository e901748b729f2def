# SPDX-License-Identifier: Apache-2.0
import csv
import io
import math
import os
import shutil
import subprocess
import unittest

from evenkv_cli import ROOT, TOOL, CliTest

COLUMNS = ("planner,dist,batch,total_tokens,page_size,q_heads,kv_heads,head_dim,dtype,median_us,min_us,p95_us,"
           "kv_gb_per_s,share_of_read,plan_us,max_rel_err,backend,kernel,dispatch,hot,layout,flush,device,driver,"
           "commit").split(",")
SMALL = "--q-heads 4 --kv-heads 2 --head-dim 64 --backend cpu --repeat 2 --no-flush"


class BenchTest(CliTest):
    def rows(self, *arguments):
        """The CSV of a sweep."""
        path = self.file("out.csv", "")
        self.succeed("bench", *arguments, SMALL, "--csv", path)
        with open(path, newline="") as file:
            text = file.read()
        self.assertEqual(text.splitlines()[0].split(","), COLUMNS)
        return list(csv.DictReader(io.StringIO(text)))

    def test_every_cell_by_every_planner(self):
        rows = self.rows("--planners fa3,even --dists uniform,skew80,2x40 --batches 4,8 --tokens 800,1600")
        cells = [(row["dist"], row["total_tokens"], row["batch"], row["planner"]) for row in rows]
        self.assertEqual(cells, [(dist, tokens, batch, planner) for dist in ("uniform", "skew80", "2x40")
                                 for tokens in ("800", "1600") for batch in ("4", "8") for planner in ("fa3", "even")])

    def test_columns(self):
        [row] = self.rows("--planners fa3 --dists skew80 --batches 8 --tokens 1600 --page-size 8 --dtype fp16",
                          "--layout hnd --hot last --device h200 --kernel generic")
        self.assertEqual([row[key] for key in COLUMNS[:9]], ["fa3", "skew80", "8", "1600", "8", "4", "2", "64", "fp16"])
        self.assertEqual([row[key] for key in COLUMNS[16:24]],
                         ["cpu", "generic", "queue", "last", "hnd", "none", "h200", "none"])
        self.assertRegex(row["commit"], r"\A[0-9a-f]{7,}(-dirty)?\Z|\Aunknown\Z")
        self.assertLessEqual(float(row["min_us"]), float(row["median_us"]))
        self.assertLessEqual(float(row["median_us"]), float(row["p95_us"]))
        self.assertTrue(0 < float(row["max_rel_err"]) < 0.01)
        self.assertGreater(float(row["share_of_read"]), 0)
        rate = 1600 * 2 * 2 * 64 * 2 / float(row["median_us"]) / 1e3
        self.assertTrue(math.isclose(float(row["kv_gb_per_s"]), rate, abs_tol=0.006))

    def test_json_has_the_columns_and_what_explains_them(self):
        [row] = self.objects("bench --planners even --batches 4 --tokens 64", SMALL)
        self.assertEqual(list(row)[:len(COLUMNS)], COLUMNS)
        self.assertEqual((row["repeat"], row["passed"], row["same_bits"]), (2, True, True))
        self.assertEqual(row["read_bytes"], 64 * 2 * 2 * 64 * 2 + 2 * 4 * 4 * 64 * 2)
        self.assertAlmostEqual(row["share_of_read"], row["read_us"] / row["median_us"], delta=0.01)
        self.assertTrue(0 < row["tolerance_ratio"] <= 1)

    def test_file(self):
        path = self.file("lens", "# batches\n300,17,0\n\n64,64\n")
        rows = self.rows("--planners none,even --dists file --kv-lens", "@" + path)
        self.assertEqual([(row["dist"], row["batch"], row["total_tokens"], row["hot"]) for row in rows],
                         [("file2", "3", "317", "na")] * 2 + [("file4", "2", "128", "na")] * 2)
        rows = self.rows("--dists file,uniform --batches 2 --tokens 9 --kv-lens 7,8")
        self.assertEqual([(row["dist"], row["hot"]) for row in rows], [("file1", "na"), ("uniform", "first")])

    def test_text(self):
        text = self.succeed("bench --planners none,even --batches 4 --tokens 64", SMALL)
        self.assertIn("plain read of", text)
        self.assertEqual(sum(line.startswith(("none ", "even ")) for line in text.splitlines()), 2)

    def test_no_check(self):
        [row] = self.rows("--batches 4 --tokens 64 --no-check")
        self.assertEqual(row["max_rel_err"], "")
        [row] = self.objects("bench --batches 4 --tokens 64 --no-check", SMALL)
        self.assertEqual((row["max_rel_err"], row["tolerance_ratio"], row["passed"]), (None, None, True))

    def test_flush(self):
        [row] = self.objects("bench --batches 1 --tokens 64 --q-heads 4 --kv-heads 2 --head-dim 64 --backend cpu",
                             "--repeat 1")
        self.assertRegex(row["flush"], r"\Awrite\d+MiB\Z")

    def test_impossible_cells_are_skipped(self):
        result = self.tool("bench --dists uniform,2x40 --batches 2,9,99999999999 --tokens 8,20 --json", SMALL)
        self.assertEqual(result.returncode, 0)
        self.assertEqual(len(result.stdout.splitlines()), 4)  # uniform: 2 and 9 of 20, 2 of 8; 2x40: 9 of 20
        lines = result.stderr.splitlines()
        self.assertEqual(len(lines), 8)
        for line in lines:
            self.assertRegex(line, r"\Aevenkv: \S+, batch \d+, \d+ tokens left out: .* "
                                   r"\(EKV_ERROR_INVALID_ARGUMENT\)\Z")

    def test_nothing_to_measure_is_an_error(self):
        invalid = "EKV_ERROR_INVALID_ARGUMENT"
        for batches in ("99999999999", "11,12,99999999999"):
            self.refuse(2, invalid, "no batch of the sweep can be", "99999999999",
                        f"bench --batches {batches} --tokens 10 {SMALL}")
        path = self.file("out.csv", "")
        result = self.tool("bench --planners flashinfer-cuda-core --batches 2,4 --tokens 64 --csv", path, SMALL)
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertRegex(result.stderr, r"\nevenkv: no planner takes a batch of the sweep "
                                        r"\(EKV_ERROR_UNSUPPORTED\)\n\Z")

    def test_planners_that_cannot_are_skipped(self):
        result = self.tool("bench --planners flashinfer-cuda-core,even --batches 2 --tokens 64 --json", SMALL)
        self.assertEqual((result.returncode, len(result.stdout.splitlines())), (0, 1))
        self.assertRegex(result.stderr, r"\Aevenkv: uniform, batch 2: flashinfer-cuda-core left out: [^\n]* "
                                        r"\(EKV_ERROR_UNSUPPORTED\)\n\Z")

    def test_usage(self):
        invalid, not_found = "EKV_ERROR_INVALID_ARGUMENT", "EKV_ERROR_NOT_FOUND"
        self.refuse(2, invalid, "--batches", "bench")
        self.refuse(2, invalid, "--tokens", "bench --batches 4")
        self.refuse(2, invalid, "--kv-lens", "bench --dists file")
        self.refuse(2, invalid, "--dists file", "bench --batches 4 --tokens 8 --kv-lens 5")
        self.refuse(2, invalid, "--tokens", "bench --dists file --kv-lens 5 --tokens 8")
        self.refuse(2, invalid, "twice", "bench --dists file,file --kv-lens 5")
        self.refuse(2, invalid, "--planner", "bench --planner even --batches 4 --tokens 8")
        self.refuse(2, invalid, "--batch", "bench --batch 4 --tokens 8")
        self.refuse(2, not_found, "zipf", "bench --dists zipf --batches 4 --tokens 8 --backend cpu")
        self.refuse(2, not_found, "''", "bench --dists uniform, --batches 4 --tokens 8 --backend cpu")
        self.refuse(2, not_found, "'evn'", "bench --planners evn --batches 4 --tokens 8 --backend cpu")
        self.refuse(2, "EKV_ERROR_PARSE", "--batches", "bench --batches 4,x --tokens 8 --backend cpu")
        self.refuse(2, "EKV_ERROR_PARSE", "--tokens", "bench --batches 4 --tokens 1e3 --backend cpu")
        for value in ("", "-3", "0"):
            self.refuse(2, "EKV_ERROR_PARSE", f"--batches is '{value}'; it must be a whole number 1..",
                        f"bench --batches 1,{value},2 --tokens 8 --backend cpu")
        self.refuse(2, invalid, "--kv-lens @ needs", "bench --dists file --kv-lens @ --backend cpu")
        for option in ("--kernel mma", "--graph", "--on-device"):
            self.refuse(2, invalid, option.split()[0], f"bench --batches 4 --tokens 8 --backend cpu {option}")
        self.refuse(2, invalid, "--plot", "bench --batches 4 --tokens 8 --plot x.pdf")

    def test_files_that_cannot_be(self):
        self.refuse(1, "EKV_ERROR_IO", "/no/such/a.csv", f"bench --batches 4 --tokens 8 --csv /no/such/a.csv {SMALL}")
        self.refuse(1, "EKV_ERROR_NOT_FOUND", "no-such-file", f"bench --dists file --kv-lens @/no-such-file {SMALL}")
        self.refuse(1, "EKV_ERROR_IO", "/dev/full", f"bench --batches 4 --tokens 8 --csv /dev/full {SMALL}")

    @unittest.skipUnless(shutil.which("gnuplot"), "no gnuplot")
    def test_plot(self):
        sweep = f"bench --planners fa3,even --dists uniform,skew80 --batches 4,8 --tokens 800 {SMALL}"
        for name, begin in (("a.svg", b"<?xml"), ("b.png", b"\x89PNG")):
            path = self.file(name, "")
            csv_path = self.file("plot.csv", "")
            self.succeed(sweep, "--plot", path, "--csv", csv_path)
            with open(path, "rb") as file:
                self.assertEqual(file.read(len(begin)), begin)
            script = self.file("again-" + name, "")
            subprocess.run([ROOT / "scripts" / "plot-bench", csv_path, "--out", script], check=True, timeout=60)
            with open(script, "rb") as file:
                self.assertEqual(file.read(len(begin)), begin)

    @unittest.skipUnless(shutil.which("gnuplot"), "no gnuplot")
    def test_plot_is_a_file_whatever_its_name(self):
        sweep = f"bench --batches 4,8 --tokens 800 {SMALL}".split()
        names = ("|touch pwned; cat > a.svg", "'; system('touch pwned'); '.svg")
        for name in names:
            subprocess.run([TOOL, *sweep, "--plot", name], check=True, cwd=self.folder.name, stdout=subprocess.DEVNULL)
        self.assertEqual(sorted(os.listdir(self.folder.name)), sorted(names))

    def refuse_plot(self, plot, status, part, environment=None):
        """Before the sweep, which would have begun its CSV."""
        path = os.path.join(self.folder.name, "a.csv")
        result = self.tool("bench --batches 4 --tokens 64 --csv", path, "--plot", plot, SMALL, environment=environment)
        self.check_error(result, 1, status, part)
        self.assertEqual(os.listdir(self.folder.name), [])

    @unittest.skipUnless(shutil.which("gnuplot"), "no gnuplot")
    def test_plot_that_cannot_be_written(self):
        self.refuse_plot("/no-such-folder/a.svg", "EKV_ERROR_IO", "'/no-such-folder/a.svg': No such file or directory")

    def test_plot_without_gnuplot(self):
        self.refuse_plot(os.path.join(self.folder.name, "x.svg"), "EKV_ERROR_NOT_FOUND", "gnuplot",
                         environment={"PATH": self.folder.name})


class CompareSystems(CliTest):
    def run_script(self, *paths):
        return subprocess.run([ROOT / "scripts" / "compare-systems", "--all", *paths], capture_output=True, text=True,
                              timeout=60)

    def test_ratio_of_shares(self):
        """A run whose plain read is 10 % slower and whose fa3 takes 1.1 times what the original took is level."""
        with open(ROOT / "data" / "h200-systems.csv", newline="") as file:
            originals = [row for row in csv.DictReader(file)
                         if row["system"] == "fa3" and row["total_tokens"] == "524288"]
        lines = [",".join(COLUMNS)]
        for row in originals[:4]:
            batch, us = int(row["batch"]), float(row["median_us"]) * 1.1
            read = 258.11 * 1.1 * (2**30 + 2 * batch * 32 * 128 * 2) / 2**30
            lines.append(f"fa3,{row['dist']},{batch},524288,16,32,4,128,bf16,{us:.3f},1,1,1,{read / us:.6f},1,1e-3,"
                         "cuda,ekv_mma_bf16_d128_n8,queue,first,nhd,write256MiB,h200,13.0,abc")
        result = self.run_script(self.file("ours.csv", "\n".join(lines) + "\n"))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, r"fa3, distributions +4 +1\.000 +1\.000 +4/4")
        self.assertEqual(result.stdout.count("  1.000  ours"), 4)

    def test_no_rows(self):
        result = self.run_script(self.file("ours.csv", ",".join(COLUMNS) + "\n"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("no rows", result.stderr)
