# SPDX-License-Identifier: Apache-2.0
import json
import os
import pathlib
import subprocess
import unittest
import xml.etree.ElementTree as xml

from evenkv_cli import DATA, ROOT, SKEW80, TOOL, CliTest

TOY = "--device tests/data/toy.device"
KEYS = ("planner,system,device,projected,batch,total_tokens,q_heads,kv_heads,head_dim,page_size,dtype,dispatch,num_sms,"
        "slots_per_sm,num_ctas,num_tiles,time_us,launch_us,merge_us,sm_busy_share,tail_us,tail_tile,tail_request,"
        "tail_cause,kv_gb_per_s,imbalance,kv_bytes,q_bytes,o_bytes,partial_bytes,table_bytes").split(",")


class SimulateTest(CliTest):
    def test_golden_two_side_by_side(self):
        self.golden("simulate-two.txt", self.succeed("simulate --kv-lens 40000,900,900,900,17,0 --planner "
                                                     "fa3-nosplit,even", TOY))

    def test_golden_table(self):
        self.golden("simulate-table.txt", self.succeed("simulate --batch 18 --tokens 65536 --planner "
                                                       "fa3,fa3-nosplit,flashinfer-tensor-core,even --no-picture", TOY))

    def test_golden_one(self):
        self.golden("simulate-one.txt", self.succeed("simulate --batch 9 --tokens 30000 --planner fa3", TOY))

    def test_files_are_written_all_or_none(self):
        line = "simulate --batch 8 --tokens 8192 --no-picture"
        kept = self.file("kept.json", "kept")
        missing = os.path.join(self.folder.name, "no", "such.svg")
        self.refuse(1, "EKV_ERROR_IO", missing, f"{line} --planner fa3 --timeline {kept} --gantt {missing}")
        self.refuse(1, "EKV_ERROR_IO", missing, f"{line} --timeline {kept} --output {missing}")
        self.refuse(1, "EKV_ERROR_IO", "/dev/full", f"{line} --timeline {kept} --output /dev/full")
        with open("/dev/full", "w") as full:
            result = subprocess.run([TOOL, *f"{line} --timeline {kept}".split()], stdout=full, stderr=subprocess.PIPE,
                                    text=True, cwd=ROOT, timeout=120)
        self.check_error(result, 1, "EKV_ERROR_IO", "stdout")
        self.assertEqual(os.listdir(self.folder.name), ["kept.json"])
        self.assertEqual(pathlib.Path(kept).read_text(), "kept")
        link = os.path.join(self.folder.name, "link")
        os.symlink(kept, link)
        self.succeed(f"{line} --timeline {link}")
        self.assertTrue(os.path.islink(link))
        self.assertIn("traceEvents", json.loads(pathlib.Path(kept).read_text()))

    def test_json(self):
        [fa3, even] = self.objects("simulate", SKEW80)
        for row in (fa3, even):
            self.assertEqual(list(row), KEYS)
            self.assertEqual((row["device"], row["projected"], row["batch"]), ("h200", False, 128))
            self.assertGreaterEqual(row["kv_bytes"], 524288 * 4 * 512)
            self.assertTrue(0 < row["sm_busy_share"] <= 1)
        self.assertEqual((fa3["system"], even["system"]), ("fa3", "evenkv"))
        [h20] = self.objects("simulate --planner fa3 --device h20", SKEW80)
        self.assertTrue(h20["projected"])
        self.assertGreaterEqual(h20["time_us"], 900)

    def test_same_bytes(self):
        line = f"simulate --planner all --batch 50 --tokens 100000 --dist 2x40 --resident-ctas 4 --json"
        self.assertEqual(self.succeed(line), self.succeed(line))

    def test_a_kernel_of_ours_under_their_schedule(self):
        own, ours = (self.objects("simulate --planner fa3", SKEW80, *system)[0]
                     for system in ([], ["--system evenkv"]))
        self.assertEqual((own["system"], ours["system"], own["num_tiles"]), ("fa3", "evenkv", ours["num_tiles"]))
        self.assertNotEqual(own["time_us"], ours["time_us"])

    def test_projected_is_said(self):
        self.assertIn("Projected: constants of h20", self.succeed("simulate --device h20 --planner even", SKEW80))
        self.assertNotIn("rojected", self.succeed("simulate --planner even", SKEW80))

    def test_timeline(self):
        path = self.file("t.json", "")
        [row] = self.objects("simulate --batch 40 --tokens 60000 --planner fa3 --timeline", path, TOY)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
        tiles = [event for event in events if event.get("cat") == "tile"]
        self.assertEqual(len(tiles), row["num_tiles"])
        self.assertEqual(sorted(event["args"]["tile"] for event in tiles), list(range(row["num_tiles"])))
        ends = {}
        for event in sorted(tiles, key=lambda event: event["ts"]):
            self.assertGreaterEqual(event["ts"] + 1e-6, ends.get(event["tid"], 0))  # a track an SM slot
            ends[event["tid"]] = event["ts"] + event["dur"]
        self.assertAlmostEqual(max(ends.values()), row["time_us"] - row["launch_us"] - row["merge_us"], delta=0.01)
        names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
        self.assertEqual(len(names), 16)

    def test_gantt(self):
        path = self.file("g.svg", "")
        self.succeed("simulate --batch 40 --tokens 60000 --planner fa3,even --no-picture --gantt", path, TOY)
        root = xml.parse(path).getroot()
        texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        self.assertIn("fa3 (projected)", texts)
        self.assertIn("even (projected)", texts)
        paths = [e.get("d") for e in root.iter("{http://www.w3.org/2000/svg}path") if e.get("fill", "none") != "none"]
        tiles = sum(row["num_tiles"] for row in self.objects("simulate --batch 40 --tokens 60000", TOY))
        self.assertEqual(sum(path.count("M") for path in paths), tiles)

    def test_several_batches(self):
        path = self.file("lens", "300,17,0\n64,64\n")
        rows = self.objects("simulate --planner even --kv-lens", "@" + path)
        self.assertEqual([row["batch"] for row in rows], [3, 2])
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "--gantt draws one batch",
                    f"simulate --planner even --kv-lens @{path} --gantt g.svg")

    def test_extremes(self):
        self.succeed("simulate --kv-lens 0,0,0 --planner all --resident-ctas 2")
        [row] = self.objects("simulate --batch 20000 --tokens 20000 --planner even --no-picture")
        self.assertGreater(row["time_us"], 0)
        [row] = self.objects("simulate --kv-lens 2000000000 --planner even")
        self.assertGreater(row["time_us"], 1e5)

    def test_devices_without_constants(self):
        self.refuse(1, "EKV_ERROR_UNSUPPORTED", "device a100 has no constants of fa3",
                    f"simulate --planner fa3 --device a100 {SKEW80}")
        result = self.tool("simulate --planner all --device a100", SKEW80)
        self.assertEqual(result.returncode, 0)
        self.assertIn("fa3 left out: device a100 has no constants", result.stderr)

    def test_errors(self):
        self.refuse(2, "EKV_ERROR_INVALID_ARGUMENT", "simulate needs lengths", "simulate")
        self.refuse(2, "EKV_ERROR_NOT_FOUND", "none of own, evenkv", f"simulate --system fa3 {SKEW80}")
        self.refuse(1, "EKV_ERROR_IO", "no/such/file", f"simulate {SKEW80} --timeline no/such/file")
        self.refuse(1, "EKV_ERROR_IO", "no/such/file", f"simulate {SKEW80} --gantt no/such/file")
        text = (DATA / "toy.device").read_text()
        for bad, part in ((text.replace("fa3.tile_us           = 1\n", ""), "lacks fa3.tile_us"),
                          (text + "fa3.tile_us = 2\n", "fa3.tile_us is repeated"),
                          (text.replace("fa3.tile_us ", "fa3.tiles_us "), "'fa3.tiles_us' is not a key"),
                          (text.replace("fa3.tile_us ", "fa4.tile_us "), "'fa4.tile_us' is not a key"),
                          (text.replace("= 60\n", "= -60\n"), "fa3.sm_gb_per_s"),
                          (text.replace("= 60\n", "= nan\n"), "fa3.sm_gb_per_s"),
                          (text.replace("= 60\n", "= 0\n"), "fa3.sm_gb_per_s")):
            self.refuse(1, "EKV_ERROR_PARSE", part, f"simulate {SKEW80} --device {self.file('bad.device', bad)}")


if __name__ == "__main__":
    unittest.main()
