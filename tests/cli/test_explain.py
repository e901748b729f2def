# SPDX-License-Identifier: Apache-2.0
from evenkv_cli import SKEW80, CliTest


class ExplainTest(CliTest):
    def explain(self, *arguments):
        [explanation] = self.objects("explain", *arguments)
        return explanation, {entry["planner"]: entry for entry in explanation["planners"]}

    def test_text(self):
        self.golden("explain-skew80.txt", self.succeed("explain", SKEW80))
        self.golden("explain-a100-group1.txt", self.succeed("explain --model llama2-7b --device a100 --resident-ctas 6",
                                                            "--kv-lens 4096,100,100"))

    def test_words(self):
        text = " ".join(self.succeed("explain", SKEW80).split())
        for words in ("Request 0 has 419430 of the batch's 524288 KV tokens, 80.0 %",
                      "BatchPrefillWithPagedKVCacheKernel", "a decode shows a prefill kernel",
                      "flashinfer-cuda-core (a path not taken by SGLang for this batch) From 297 requests",
                      "flashinfer-tensor-core (SGLang: with --attention-backend flashinfer) From 66 requests",
                      "fa3 (SGLang: the default) Above 992 requests", "What even does instead"):
            self.assertIn(words, text)

    def test_thresholds(self):
        for device, cuda_core, tensor_core in (("h200", 297, 66), ("h20", 176, 39)):
            _, planners = self.explain(SKEW80, "--device", device)
            thresholds = {name: planners[name]["threshold"] for name in planners}
            self.assertEqual({name: [thresholds[name][key] for key in ("batch", "condition", "reached")]
                              for name in ("flashinfer-cuda-core", "flashinfer-tensor-core", "fa3")},
                             {"flashinfer-cuda-core": [cuda_core, ">=", False],
                              "flashinfer-tensor-core": [tensor_core, ">=", True], "fa3": [992, ">", False]})
            self.assertIsNone(thresholds["even"])

    def test_thresholds_are_where_splitting_ends(self):
        """Each planner's own plans on both sides of the threshold that explain prints."""
        for planner in ("flashinfer-cuda-core", "flashinfer-tensor-core", "flashinfer-xqa", "fa3"):
            for heads in ("--q-heads 32 --kv-heads 4", "--q-heads 8 --kv-heads 1", "--q-heads 64 --kv-heads 8"):
                _, planners = self.explain(heads, SKEW80)
                threshold = planners[planner]["threshold"]
                first = threshold["batch"] + (threshold["condition"] == ">")  # that does not split
                for batch, splits in ((first - 2, True), (first, False)):  # one less may leave no room for a split
                    [plan] = self.objects("plan --dist skew80 --tokens 1000000 --batch", batch, heads,
                                          "--planner", planner)
                    self.assertEqual(max(plan["num_splits"]) > 1, splits, (planner, heads, batch))
                    _, again = self.explain("--dist skew80 --tokens 1000000 --batch", batch, heads)
                    self.assertEqual(again[planner]["threshold"]["reached"], not splits)

    def test_sglang_choice(self):
        def choice(*arguments):
            explanation, _ = self.explain("--kv-lens 100,5", *arguments)
            sglang = explanation["sglang"]
            return sglang["attention_backend"], sglang["planner"], sglang["flashinfer_planner"]
        self.assertEqual(choice(), ("fa3", "fa3", "flashinfer-tensor-core"))
        self.assertEqual(choice("--q-heads 12"), ("fa3", "fa3", "flashinfer-cuda-core"))
        self.assertEqual(choice("--q-heads 16"), ("fa3", "fa3", "flashinfer-tensor-core"))
        self.assertEqual(choice("--q-heads 4 --dtype fp8_e4m3"), ("fa3", "fa3", "flashinfer-tensor-core"))
        self.assertEqual(choice("--dtype fp8_e5m2"), ("triton", None, "flashinfer-tensor-core"))
        self.assertEqual(choice("--device a100"), ("flashinfer", "flashinfer-tensor-core", "flashinfer-tensor-core"))
        self.assertEqual(choice("--device a100 --q-heads 4"),
                         ("flashinfer", "flashinfer-cuda-core", "flashinfer-cuda-core"))
        self.assertEqual(choice("--device cpu"), (None, None, None))

    def test_paths(self):
        _, planners = self.explain(SKEW80)
        self.assertEqual({name: entry["sglang_path"] for name, entry in planners.items() if entry["sglang_path"]},
                         {"fa3": "the default", "flashinfer-tensor-core": "with --attention-backend flashinfer",
                          "fa3-nosplit": "with --enable-deterministic-inference"})

    def test_kernels(self):
        _, planners = self.explain(SKEW80)
        self.assertEqual(planners["flashinfer-tensor-core"]["kernels"], ["BatchPrefillWithPagedKVCacheKernel"])
        self.assertEqual(planners["flashinfer-cuda-core"]["kernels"],
                         ["BatchDecodeWithPagedKVCacheKernel", "PersistentVariableLengthMergeStatesKernel"])
        self.assertEqual(planners["fa3"]["kernels"], ["flash::prepare_varlen_num_blocks_kernel",
                                                      "flash::FlashAttnFwdSm90", "flash::FlashAttnFwdCombine"])

    def test_tail(self):
        explanation, planners = self.explain(SKEW80, "--hot last")
        self.assertEqual(explanation["tail"]["request"], 127)
        self.assertEqual(explanation["tail"]["kv_len"], 419430)
        self.assertIs(explanation["tail"]["stands_out"], True)
        self.assertGreater(planners["flashinfer-tensor-core"]["against_even"], 45)
        self.assertEqual(planners["even"]["against_even"], 1)
        for lengths, stands_out in (("--batch 1024 --tokens 524288", False), ("--kv-lens 1", False),
                                    ("--kv-lens 16,16,3", False), ("--kv-lens 17", True)):  # a block has 16 tokens
            explanation, _ = self.explain(lengths)
            self.assertIs(explanation["tail"]["stands_out"], stands_out, lengths)
            text = " ".join(self.succeed("explain", lengths).split())
            self.assertEqual(("Everybody waits" in text, "makes no tail" in text), (stands_out, not stands_out))

    def test_numbers_are_those_of_plan(self):
        _, planners = self.explain(SKEW80)
        for plan in self.objects("plan --planner all", SKEW80):
            for key in ("max_cta_tokens", "mean_cta_tokens", "imbalance"):
                self.assertEqual(plan[key], planners[plan["planner"]][key])
            self.assertEqual(plan["num_splits"][0], planners[plan["planner"]]["tail_num_splits"])

    def test_refusals_are_told(self):
        _, planners = self.explain("--kv-lens 5 --q-heads 24 --kv-heads 4")
        self.assertIn("--resident-ctas", planners["flashinfer-cuda-core"]["refused"])
        self.assertIn("refused", self.succeed("explain --kv-lens 5 --q-heads 24 --kv-heads 4"))

    def test_empty_batch(self):
        self.assertIn("No request has KV tokens", self.succeed("explain --kv-lens 0,0"))
