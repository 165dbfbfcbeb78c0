#!/usr/bin/env python3
"""Make the committed subset of the model conformance kit: a model for every family of caches.

usage: make_subset.py KIT_DIR OUT_DIR      (OUT_DIR's other folders, which make_model.py made, stay)
The kit's README states how its values were made (mlx-lm 0.32.2 on mlx 0.32.4, CPU).
"""
import shutil
import sys

FOLDERS = {  # and whether hf/, the original layout of the same weights, comes along
    "llama_q8_g32": False,  # growing, quantised and rotating caches; quantised weights
    "llama_q_mixed": False,  # weights of several widths
    "llama_bf16_q4": False,  # bfloat16 beside its float32 reference
    "llama_sliding": False,  # rings and growing caches
    "llama4": False,  # chunked caches
    "falcon_mamba": False,  # recurrent state alone
    "falcon_h1": True,  # lists of recurrent state and attention
    "deepseek_v3_q4": False,  # caches of latents
}

kit, out = sys.argv[1:3]
for name, with_hf in FOLDERS.items():
    shutil.rmtree(f"{out}/{name}", ignore_errors=True)
    shutil.copytree(f"{kit}/{name}", f"{out}/{name}", ignore=None if with_hf else shutil.ignore_patterns("hf"))
