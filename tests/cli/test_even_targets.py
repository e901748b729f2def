# SPDX-License-Identifier: Apache-2.0
"""scripts/even-targets on rows whose answer is known."""
import pathlib
import subprocess

from evenkv_cli import ROOT, CliTest

COLUMNS = ("planner,dist,batch,total_tokens,page_size,q_heads,kv_heads,head_dim,dtype,median_us,min_us,"
           "p95_us,kv_gb_per_s,share_of_read,plan_us,max_rel_err,backend,kernel,dispatch,hot,layout,flush,device,"
           "driver,commit")


def row(planner="even", dist="uniform", batch=16, tokens=524288, us=100.0, share=0.96, heads=(32, 4), page=16,
        hot="first", layout="nhd", backend="cuda"):
    return (f"{planner},{dist},{batch},{tokens},{page},{heads[0]},{heads[1]},128,bf16,{us},1,1,1,{share},1,1e-3,"
            f"{backend},ekv_mma_bf16_d128_n8,range,{hot},{layout},write256MiB,h200,13.0,abc")


class EvenTargets(CliTest):
    def run_script(self, *files):
        paths = [self.file(f"{i}.csv", "\n".join([COLUMNS, *rows]) + "\n") for i, rows in enumerate(files)]
        return subprocess.run([ROOT / "scripts" / "even-targets", *paths], capture_output=True, text=True, timeout=60)

    def table(self, *files):
        result = self.run_script(*files)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        lines = [line.strip("| ").split(" | ") for line in result.stdout.splitlines() if line.startswith("| ")]
        return {line[0]: line[1:] for line in lines[1:]}, result.stdout

    def test_shares_and_who_counts(self):
        table, _ = self.table([row(share=0.98), row(dist="skew80", us=104, share=0.94), row(batch=2048, share=0.951),
                               row(heads=(8, 1), share=0.85), row(layout="hnd", share=0.99), row(page=1, share=0.93),
                               row(planner="fa3", share=0.1)],
                              [row(share=0.1)])  # the first file counts
        self.assertEqual(table["524,288 tokens, up to 512 requests: share"][:3], [">= 0.97", "1 of 2", "0.940"])
        self.assertEqual(table["524,288 tokens, up to 2,048 requests: share"][:3], [">= 0.95", "2 of 3", "0.940"])
        self.assertEqual(table["slowest / fastest distribution"][:3], ["<= 1.03", "0 of 1", "1.040"])
        self.assertEqual(table["8/1 heads: share"][:3], [">= 0.9", "0 of 1", "0.850"])
        self.assertEqual(table["HND: share"][1], "1 of 1")
        self.assertEqual(table["page 1, 524,288 tokens: share"][-1],
                         "uniform, 16 requests, 524288 tokens, 32/4 heads page 1")
        self.assertNotIn("lines: a, us", table)

    def test_hot_request_and_invariant(self):
        """Times of one file each: the first is of a slower GPU."""
        table, _ = self.table([row(dist="skew80", us=150), row(batch=4, us=100)],
                              [row(dist="skew80", us=100), row(dist="skew80", us=102, hot="last"),
                               row(planner="even-invariant", dist="skew80", us=104),
                               row("even-invariant", batch=4, us=300)])
        self.assertEqual(table["long request first, in the middle, last"][1:3], ["0 of 1", "1.020"])
        self.assertEqual(table["even-invariant over even"][1:3], ["1 of 1", "1.040"])
        self.assertNotIn("even-invariant over even, from 256 requests", table)

    def test_lines(self):
        sizes = (65536, 131072, 262144, 524288, 1048576)
        straight = [row(tokens=size, us=6 + size * 5e-4, share=0.9) for size in sizes]
        bent = [row(dist=f"file{i}", tokens=size, us=12 + size * 5e-4 + (i == 3) * 30, share=0.9)
                for i, size in enumerate(sizes, 1)]
        table, text = self.table(straight + bent)
        self.assertRegex(text, r"uniform, 16 requests +5 +6\.0 +0\.5000 +1\.000000 +5\.4 +0\.4500")
        self.assertEqual(table["lines: R^2"][:2], [">= 0.999", "1 of 2"])
        self.assertEqual(table["lines: a, us"][1], "1 of 2")
        self.assertEqual(table["lines: a, us"][-1], "traffic-like, 16 requests")

    def test_others_and_traffic(self):
        tokens = sum(map(int, (ROOT / "data" / "traffic.txt").read_text().splitlines()[0].split(",")))
        beside = [row(us=100), row("even:in-call", us=104), row("fa3", us=98, backend="peer"),
                  row("flashinfer:tc", us=150, backend="peer"), row("fa3:in-call", us=1, backend="peer")]
        traffic = [row(dist="file1", batch=23, tokens=tokens, share=0.95, hot="na"),
                   row(dist="file1", batch=23, tokens=tokens - 1, share=0.1, hot="na")]  # another file's
        table, _ = self.table(beside, traffic)
        self.assertEqual(table["524,288 tokens: the best other of the run over even"][1:3], ["0 of 1", "0.980"])
        self.assertEqual(table["planning within the call, from lengths: us"][:3], ["<= 3", "0 of 1", "4.0"])
        self.assertEqual(table["traffic, over 256 MB of KV, 32/4 heads, pages 1, 16, 64: share"][1:3],
                         ["1 of 1", "0.950"])

    def test_no_rows(self):
        result = self.run_script([])
        self.assertEqual(result.returncode, 1)
        self.assertIn("no rows", result.stderr)

    def test_files_that_are_no_results(self):
        for text in (b"system,dist\nfa3,uniform\n", f"{COLUMNS}\n{row()[:60]}\n".encode(),
                     f"{COLUMNS}\n{row(us='slow')}\n".encode(), b"\xff\xfe", None):
            path = pathlib.Path(self.folder.name) / "broken.csv"
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_bytes(text)
            result = subprocess.run([ROOT / "scripts" / "even-targets", path], capture_output=True, text=True,
                                    timeout=60)
            self.assertEqual((result.returncode, result.stdout), (1, ""))
            self.assertRegex(result.stderr, r"\Aeven-targets: .*broken\.csv.*\n\Z")
