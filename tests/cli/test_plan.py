# SPDX-License-Identifier: Apache-2.0
import collections
import json

from evenkv_cli import DATA, ROOT, SKEW80, CliTest

PLAN_KEYS = ["planner", "device", "batch", "dispatch", "grid", "ctas", "split_kv", "num_work_items", "num_tiles",
             "kv_chunk_tokens", "num_splits", "num_splits_bound", "batch_order", "max_cta_tokens", "mean_cta_tokens",
             "imbalance", "workspace_bytes", "warnings"]


class PlanTest(CliTest):
    def test_text(self):
        self.golden("plan-even-skew80.txt", self.succeed("plan", SKEW80))
        self.golden("plan-all-skew80.txt", self.succeed("plan --planner all", SKEW80))
        self.golden("plan-tiles.txt", self.succeed("plan --kv-lens 300,17,0 --planner flashinfer-cuda-core --tiles"))
        two = self.file("two", "5,17\n\n# a comment\n300\r\n")
        self.golden("plan-two-batches.txt", self.succeed(f"plan --kv-lens @{two} --planner none,fa3"))

    def test_json_keys(self):
        for planner in ("even", "none", "fa3", "flashinfer-cuda-core"):
            [plan] = self.objects("plan --kv-lens 5,17 --planner", planner)
            self.assertEqual(list(plan), PLAN_KEYS)
        [plan] = self.objects("plan --kv-lens 5,17 --tiles")
        self.assertEqual(list(plan), PLAN_KEYS + ["tiles"])

    def test_json_values(self):
        [plan] = self.objects("plan", SKEW80, "--planner flashinfer-tensor-core")
        self.assertEqual(plan["planner"], "flashinfer-tensor-core")
        self.assertEqual(plan["device"], "h200")
        self.assertEqual(plan["batch"], 128)
        self.assertEqual(plan["dispatch"], "grid")
        self.assertEqual(plan["grid"], [128, 1, 4])
        self.assertEqual(plan["ctas"], 512)
        self.assertIs(plan["split_kv"], False)
        self.assertEqual(plan["num_splits"], [1] * 128)
        self.assertIsNone(plan["num_splits_bound"])
        self.assertEqual(plan["batch_order"], list(range(128)))
        self.assertAlmostEqual(plan["mean_cta_tokens"], 524288 * 4 / 264)
        self.assertAlmostEqual(plan["imbalance"], plan["max_cta_tokens"] / plan["mean_cta_tokens"])
        [plan] = self.objects("plan", SKEW80, "--planner fa3")
        self.assertEqual((plan["dispatch"], plan["grid"]), ("queue", [132, 1, 1]))
        self.assertIsNone(plan["kv_chunk_tokens"])
        self.assertGreater(plan["num_splits"][0], 1)
        [plan] = self.objects("plan", SKEW80, "--planner fa3 --hot last")
        self.assertEqual(plan["batch_order"][0], 127)  # the longest splits come first
        [plan] = self.objects("plan", SKEW80, "--planner even")
        self.assertEqual((plan["dispatch"], plan["ctas"]), ("range", 264))

    def test_tiles_cover_every_token(self):
        lengths = [5000, 17, 0, 256]
        for planner in ("none", "even", "even-invariant", "flashinfer-cuda-core", "fa3"):
            [plan] = self.objects("plan --tiles --planner", planner, "--kv-lens", ",".join(map(str, lengths)))
            self.assertEqual(len(plan["tiles"]), plan["num_tiles"])
            tokens = collections.Counter()
            for tile in plan["tiles"]:
                for head in range(tile["head"], tile["head"] + tile["head_count"]):
                    tokens[tile["request"], head] += tile["kv_end"] - tile["kv_begin"]
            self.assertEqual({key: count for key, count in tokens.items() if count},
                             {(b, h): n for b, n in enumerate(lengths) for h in range(4) if n})

    def test_tiles_of_a_range_are_in_cta_order(self):
        [plan] = self.objects("plan --tiles --kv-lens 5000,17,0,256")
        ctas = [tile["cta"] for tile in plan["tiles"]]
        self.assertEqual(ctas, sorted(ctas))
        load = collections.Counter()
        for tile in plan["tiles"]:
            load[tile["cta"]] += (tile["kv_end"] - tile["kv_begin"]) * tile["head_count"]
        self.assertEqual(max(load.values()), plan["max_cta_tokens"])

    def test_several_batches_and_planners_are_lines(self):
        path = self.file("three", "5,17\n1\n2,3,4\n")
        plans = self.objects(f"plan --kv-lens @{path} --planner none,even")
        self.assertEqual([(plan["batch"], plan["planner"]) for plan in plans],
                         [(b, p) for b in (2, 1, 3) for p in ("none", "even")])

    def test_large_batch(self):
        path = self.file("lens", ",".join(["1000"] * 65536))
        [plan] = self.objects(f"plan --kv-lens @{path}")
        self.assertEqual(len(plan["num_splits"]), 65536)

    def test_integers_print_exactly(self):
        [plan] = self.objects("plan --kv-lens 2147483647 --planner none --no-pack-gqa --q-heads 4096 --sm-margin 131")
        self.assertEqual(plan["max_cta_tokens"], 2147483647 * 4096 // 2)
        self.assertNotIn("e+", self.succeed("plan --kv-lens 2147483647 --planner none --json"))

    def test_distributions(self):
        for options, tail in (("--dist uniform", [4096] * 2), ("--dist skew80", [6553, 1639]),
                              ("--dist skew80 --hot last", [1639, 6553])):
            [plan] = self.objects("plan --tiles --planner none --batch 2 --tokens 8192", options)
            self.assertEqual([tile["kv_end"] for tile in plan["tiles"][:2]], tail)

    def test_heads(self):
        def heads(*options):
            [plan] = self.objects("plan --kv-lens 64 --planner none --no-pack-gqa", *options)
            [packed] = self.objects("plan --kv-lens 64 --planner none", *options)
            return plan["num_tiles"], packed["num_tiles"]
        self.assertEqual(heads(), (32, 4))
        self.assertEqual(heads("--model llama3-70b"), (64, 8))
        self.assertEqual(heads("--model llama3-70b --tp 8"), (8, 1))
        self.assertEqual(heads("--model llama3-70b-tp8"), (8, 1))
        self.assertEqual(heads("--model llama3-70b --tp 16"), (4, 1))  # each KV head on two ranks
        self.assertEqual(heads("--model llama3-70b --q-heads 32"), (32, 8))

    def test_trace(self):
        arguments = f"plan --trace {ROOT}/data/azure-conv-1000.csv --sample 3 --planner none"
        plans = self.objects(arguments)
        self.assertEqual(len(plans), 3)
        self.assertEqual(plans, self.objects(arguments, "--seed 1"))
        self.assertNotEqual(plans, self.objects(arguments, "--seed 2"))
        [busy] = self.objects(f"plan --trace {ROOT}/data/azure-conv-1000.csv --speedup 4 --max-batch 9 --planner none")
        self.assertLessEqual(busy["batch"], 9)

    def test_graph_padding_fault_is_flagged(self):
        lengths = ",".join(["0"] * 15 + ["65536"])
        [plan] = self.objects("plan --planner flashinfer-cuda-core --cuda-graph --resident-ctas 2",
                              "--q-heads 64 --kv-heads 8 --kv-lens", lengths)
        self.assertEqual(plan["num_work_items"], 48)
        self.assertEqual(plan["grid"][0], 33)
        self.assertTrue(any("48 work items for 33 slots" in text for text in plan["warnings"]), plan["warnings"])
        self.assertTrue(any("breaks an invariant" in text for text in plan["warnings"]), plan["warnings"])

    def test_all_leaves_out_what_cannot_take_the_batch(self):
        result = self.tool("plan --planner all --kv-lens 5 --q-heads 24 --kv-heads 4 --json")
        self.assertEqual(result.returncode, 0)
        self.assertRegex(result.stderr, r"\Aevenkv: flashinfer-cuda-core left out: .*\(EKV_ERROR_UNSUPPORTED\)\n\Z")
        self.assertNotIn("flashinfer-cuda-core", [json.loads(line)["planner"] for line in result.stdout.splitlines()])
        self.refuse(1, "EKV_ERROR_UNSUPPORTED", "--resident-ctas",
                  "plan --planner flashinfer-cuda-core --kv-lens 5 --q-heads 24 --kv-heads 4")
        self.refuse(1, "EKV_ERROR_UNSUPPORTED", "group 8 on the cpu",
                  "plan --planner flashinfer-cuda-core --kv-lens 5 --device cpu")

    def test_a_batch_that_no_planner_takes_is_an_error(self):
        path = self.file("lens", ",".join(["2147483647"] * 600) + "\n")
        for command in ("plan", "plan --json"):
            result = self.tool(f"{command} --planner all --kv-lens @{path}")
            self.assertEqual((result.returncode, result.stdout), (1, ""))
            self.assertRegex(result.stderr, r"\nevenkv: the sum of kv_len .*1099511627776 \(EKV_ERROR_OVERFLOW\)\n\Z")

    def test_output_file(self):
        path = self.file("plan.json", "")
        self.assertEqual(self.succeed(f"plan --kv-lens 5 --json --output {path}"), "")
        with open(path, encoding="utf-8") as written:
            self.assertEqual(written.read(), self.succeed("plan --kv-lens 5 --json"))


class GoldenPlans(CliTest):
    """Outputs of the original code on an H200, through the command line."""

    KEYS = {"flashinfer-cuda-core": ("split_kv", "num_work_items", "kv_chunk_tokens", "num_splits"),
            "flashinfer-tensor-core": ("split_kv", "num_work_items", "kv_chunk_tokens", "num_splits"),
            "fa3": ("num_splits_bound", "num_splits")}

    def test_every_row(self):
        shapes = collections.defaultdict(list)
        with open(DATA / "golden-plans.jsonl", encoding="utf-8") as rows:
            for row in map(json.loads, rows):
                shapes[row["q_heads"], row["kv_heads"], row["head_dim"], row["page_size"]].append(row)
        self.assertEqual(sum(map(len, shapes.values())), 320)
        for (q_heads, kv_heads, head_dim, page_size), rows in shapes.items():
            path = self.file("lens", "".join(",".join(map(str, row["kv_len"])) + "\n" for row in rows))
            for planner, keys in self.KEYS.items():
                plans = self.objects(f"plan --planner {planner} --device h200 --q-heads {q_heads}",
                                     f"--kv-heads {kv_heads} --head-dim {head_dim} --page-size {page_size}",
                                     f"--kv-lens @{path}")
                self.assertEqual(len(plans), len(rows))
                for row, plan in zip(rows, plans):
                    expected = {key: row[planner][key] for key in keys}
                    if expected["num_splits"] == 1:  # short for all requests in one
                        expected["num_splits"] = [1] * len(row["kv_len"])
                    self.assertEqual({key: plan[key] for key in keys}, expected, (row["id"], planner))
