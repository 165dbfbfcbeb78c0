#!/usr/bin/env python3
"""Make the committed subset of the model conformance kit: six folders, scenarios of one sequence.

usage: make_subset.py KIT_DIR OUT_DIR      (with mlx 0.32.4 for the safetensors)
The kit's README states how its values were made (mlx-lm 0.32.2 on mlx 0.32.4, CPU).
"""
import json
import os
import shutil
import sys

import mlx.core as mx

FOLDERS = ["llama_bias_tied", "llama_bf16_q4", "llama_q_mixed", "llama_rope_llama3", "llama_q8_g32", "llama_sliding"]
BOUNDED_OR_QUANTISED = ["llama_q8_g32"]  # where the scenarios over other caches than the model's own are kept too

kit, out = sys.argv[1:3]
for name in FOLDERS:
    os.makedirs(f"{out}/{name}", exist_ok=True)
    for file in os.listdir(f"{kit}/{name}"):
        if file.startswith(("config", "model")):
            shutil.copyfile(f"{kit}/{name}/{file}", f"{out}/{name}/{file}")
    expected = json.load(open(f"{kit}/{name}/expected.json"))
    own = [s for s in expected["scenarios"] if s.get("cache") == "default" and s["id"] != "kvconvert"]
    expected["scenarios"] = [s for s in expected["scenarios"] if "runs" in s] if name in BOUNDED_OR_QUANTISED else own
    json.dump(expected, open(f"{out}/{name}/expected.json", "w"))
    wanted = {s[key] for s in expected["scenarios"] for key in ("f32_logits", "f32_decode") if key in s}
    wanted |= {run[key] for s in expected["scenarios"] for run in s["runs"] for key in ("logits", "decode")}
    arrays = mx.load(f"{kit}/{name}/expected.safetensors")
    mx.save_safetensors(f"{out}/{name}/expected.safetensors", {key: arrays[key] for key in sorted(wanted)})
