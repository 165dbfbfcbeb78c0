"""Quantises every folder of the model kit with `reprise quantize` and lets mlx-lm read the result: its logits must be those
that this mlx-lm gives for its own quantisation of the same weights.

python compare_quantized.py --program build/release/bin/reprise --kit ../shared/models [--only NAME …]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model, quantize_model

PROMPT = [8, 66, 37, 18, 60, 61, 58, 11, 33, 22, 54]


def logits(model):
    return model(mx.array([PROMPT]))[0].astype(mx.float32)


def compare(program, folder, bits, group_size, mode):
    """Returns the relative difference, or a string that says what went wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        command = [program, "quantize", str(folder), str(out)]
        command += ["--mode", mode] if mode != "affine" else ["--bits", str(bits), "--group-size", str(group_size)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            return run.stderr.strip()
        try:
            ours, _ = load_model(out)
            got = logits(ours)
        except Exception as error:  # whatever mlx-lm refuses is what this script looks for
            return f"mlx-lm: {type(error).__name__}: {str(error)[:300]}"
    theirs, config = load_model(folder)
    theirs, _ = quantize_model(theirs, config, group_size, bits, mode=mode)
    want = logits(theirs)
    return float(mx.abs(got - want).max() / mx.abs(want).max())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--tolerance", type=float, default=2e-2)
    args = parser.parse_args()
    failed = passed = 0
    for folder in sorted(args.kit.iterdir()):
        if not (folder / "config.json").is_file() or (args.only and folder.name not in args.only):
            continue
        config = json.loads((folder / "config.json").read_text().replace("Infinity", "1e38"))
        if "quantization" in config or "quantization_config" in config:
            continue
        for bits, group_size, mode in ((4, 32, "affine"), (8, 64, "affine"), (4, 32, "mxfp4")):
            result = compare(args.program, folder, bits, group_size, mode)
            good = isinstance(result, float) and result <= args.tolerance
            passed += good
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {folder.name} {mode} {bits} {group_size}: {result}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


sys.exit(main())
