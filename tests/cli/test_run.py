# SPDX-License-Identifier: Apache-2.0
from evenkv_cli import ROOT, CliTest

RUN_KEYS = ["planner", "device", "backend", "threads", "batch", "total_tokens", "q_heads", "kv_heads", "head_dim",
            "page_size", "dtype", "layout", "kernel", "dispatch", "num_tiles", "flush", "repeat", "planned_on",
            "plan_us", "median_us", "min_us", "kv_gb_per_s", "checked", "max_abs_err", "max_rel_err",
            "tolerance_ratio", "passed"]
SMALL = "--q-heads 4 --kv-heads 2 --head-dim 64"


class RunTest(CliTest):
    def test_json(self):
        [result] = self.objects("run --kv-lens 500,17,0 --device cpu --threads 3 --repeat 2", SMALL)
        self.assertEqual(list(result), RUN_KEYS)
        self.assertEqual((result["planner"], result["device"], result["backend"]), ("even", "cpu", "cpu"))
        self.assertEqual((result["batch"], result["total_tokens"], result["threads"]), (3, 517, 3))
        self.assertIs(result["passed"], True)
        self.assertGreater(result["tolerance_ratio"], 0)
        self.assertLessEqual(result["tolerance_ratio"], 1)
        self.assertLessEqual(result["min_us"], result["median_us"])
        kv_bytes = 517 * 2 * 2 * 64 * 2
        self.assertAlmostEqual(result["kv_gb_per_s"], kv_bytes / result["median_us"] / 1e3, delta=1e-6)

    def test_planners_dtypes_and_layouts_agree_with_the_reference(self):
        for dtype in ("fp32", "fp16", "bf16"):
            for layout in ("nhd", "hnd"):
                results = self.objects("run --kv-lens 700,17,0,64 --device h200 --planner none,fa3,even,even-invariant",
                                       f"--repeat 1 --dtype {dtype} --layout {layout}", SMALL)
                self.assertEqual(len(results), 4)
                for result in results:
                    self.assertTrue(result["passed"] and result["checked"], result)
                    self.assertEqual((result["dtype"], result["layout"]), (dtype, layout))

    def test_no_check(self):
        [result] = self.objects("run --kv-lens 100 --device cpu --no-check --repeat 1", SMALL)
        self.assertEqual((result["checked"], result["max_rel_err"], result["tolerance_ratio"]), (False, None, None))

    def test_text(self):
        text = self.succeed("run --kv-lens 100,200 --device cpu --planner none,even --repeat 1", SMALL)
        self.assertIn("batch: 2 requests, 300 KV tokens", text)
        self.assertEqual(sum(line.startswith(("none ", "even ")) for line in text.splitlines()), 2)

    def test_what_no_backend_decodes_is_refused(self):
        self.refuse(1, "EKV_ERROR_UNSUPPORTED", "FP8", "run --device cpu --kv-lens 5 --dtype fp8_e4m3")
        self.refuse(1, "EKV_ERROR_UNSUPPORTED", "q_len", "run --device cpu --kv-lens 5 --q-len 2")
        self.refuse(1, "EKV_ERROR_(UNSUPPORTED|BACKEND_UNAVAILABLE)", "run --device h200 --kv-lens 5 --backend cuda")

    def test_demo(self):
        result = self.tool(f"demo --trace {ROOT}/data/azure-conv-1000.csv --speedup 0.05 --sample 1",
                           "--q-heads 1 --kv-heads 1 --head-dim 32")  # small: the sanitizers run it too
        self.assertEqual(result.returncode, 0)
        self.assertRegex(result.stderr, r"\A(evenkv: flashinfer-cuda-core left out: .*\n){2}\Z")
        self.assertIn("replay of", result.stdout)
        self.assertIn("skew80", result.stdout)
        self.assertNotIn("WRONG", result.stdout)
        for planner in ("none", "fa3", "even", "even-invariant"):
            self.assertEqual(sum(line.startswith(planner + " ") for line in result.stdout.splitlines()), 2)
