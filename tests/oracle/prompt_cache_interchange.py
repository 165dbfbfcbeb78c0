#!/usr/bin/env python3
"""Exchanges prompt-cache files between mlx-lm and Reprise, both ways, and has each side continue the other's.

    python prompt_cache_interchange.py TOOL            TOOL: build/<preset>/bin/prompt_cache_tool
    python prompt_cache_interchange.py --golden FOLDER  writes the files of tests/data/cache that this mlx-lm makes

mlx-lm 0.32 and later use the current layout, 0.31 and earlier the legacy one; the installed version decides.
"""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (ArraysCache, BatchRotatingKVCache, CacheList, ChunkedKVCache, KVCache,
                                 load_prompt_cache, save_prompt_cache, trim_prompt_cache)

VERSION = version("mlx-lm")
LEGACY = tuple(int(part) for part in VERSION.split(".")[:2]) < (0, 32)
HEADS, KEY_SIZE, VALUE_SIZE = 2, 4, 6
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# layers, rows, rows trimmed off again, dtype
CASES = [(2, 5, 0, "float32"), (2, 7, 2, "float16"), (3, 9, 4, "bfloat16"), (12, 3, 0, "float32"),
         (1, 256, 0, "float32"), (2, 300, 45, "bfloat16")]
METADATA = {"model": "test/model", "text": "é中 \"quoted\"\nline", "empty": ""}


def sample(layer, begin, end, dtype):
    """tests/cache/sample_rows.h has the same rule."""
    def block(size, sign):
        head, row, feature = np.meshgrid(np.arange(HEADS), np.arange(begin, end), np.arange(size), indexing="ij")
        number = (31 * layer + 7 * row + 3 * head + feature) % 251
        return mx.array((sign * number / 8).astype(np.float32)[None]).astype(DTYPES[dtype])
    return block(KEY_SIZE, 1), block(VALUE_SIZE, -1)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.all(a == b))


def make_cache(layers, rows, trim, dtype):
    cache = [KVCache() for _ in range(layers)]
    for layer, c in enumerate(cache):
        if rows:
            c.update_and_fetch(*sample(layer, 0, rows, dtype))
    if trim:
        trim_prompt_cache(cache, trim)
    return cache


def read_header(path):
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8:8 + length])


class Interchange:
    def __init__(self, tool, folder):
        self.tool, self.folder, self.checks = tool, pathlib.Path(folder), 0

    def run(self, *words):
        result = subprocess.run([self.tool, *map(str, words)], capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"FAILED: {' '.join(map(str, words))}: {result.stderr.strip()}")
        return result.stdout

    def check(self, ok, what):
        self.checks += 1
        if not ok:
            raise SystemExit(f"FAILED: {what}")

    def ours_to_oracle(self, layers, rows, trim, dtype):
        path = self.folder / "ours.safetensors"
        layout = ["layout=legacy"] if LEGACY else ["tokens=1"]
        self.run("write-sample", path, f"layers={layers}", f"rows={rows}", f"trim={trim}", f"dtype={dtype}", *layout,
                 *[f"{key}:{value}" for key, value in METADATA.items()])
        cache, metadata = load_prompt_cache(str(path), return_metadata=True)
        what = f"mlx-lm {VERSION} on our {layers}×({rows}-{trim}) {dtype}"
        self.check(metadata == METADATA, f"{what}: metadata {metadata}")
        self.check(len(cache) == layers, f"{what}: {len(cache)} layers")
        length = rows - trim
        for step, count in enumerate((3, 1, 1)):
            for layer, c in enumerate(cache):
                self.check(c.offset == length, f"{what}: offset {c.offset}")
                shown = c.update_and_fetch(*sample(layer, length, length + count, dtype))
                wanted = sample(layer, 0, length + count, dtype)
                self.check(all(map(same, shown, wanted)), f"{what}: layer {layer} at step {step}")
            length += count

    def oracle_to_ours(self, layers, rows, trim, dtype):
        path, out = self.folder / "theirs.safetensors", self.folder / "shown.safetensors"
        save_prompt_cache(str(path), make_cache(layers, rows, trim, dtype), METADATA)
        what = f"ours on {layers}×({rows}-{trim}) {dtype} of mlx-lm {VERSION}"
        told = json.loads(self.run("describe", path))
        self.check(told["metadata"] == METADATA, f"{what}: metadata {told['metadata']}")
        self.check(told["layout"] == ("legacy" if LEGACY else "current"), f"{what}: layout")
        self.check(told["layers"] == [{"class": "KVCache", "length": rows - trim, "empty": rows == 0}] * layers,
                   f"{what}: {told['layers']}")
        self.run("continue", path, 4, out)
        shown = mx.load(str(out))
        for layer in range(layers):
            wanted = sample(layer, 0, rows - trim + 4, dtype)
            got = shown[f"{layer}.keys"], shown[f"{layer}.values"]
            self.check(all(map(same, got, wanted)), f"{what}: layer {layer}")

    def header_trees(self):
        """The same names, classes and kinds; shapes differ, since our files hold valid rows only."""
        ours, theirs = self.folder / "ours.safetensors", self.folder / "theirs.safetensors"
        self.run("write-sample", ours, "layers=12", "rows=3", *(["layout=legacy"] if LEGACY else []), "a:b")
        save_prompt_cache(str(theirs), make_cache(12, 3, 0, "float32"), {"a": "b"})
        a, b = read_header(ours), read_header(theirs)
        metas = [{k: v for k, v in h.pop("__metadata__").items() if LEGACY or k != "2.0"} for h in (a, b)]
        self.check({k: v["dtype"] for k, v in a.items()} == {k: v["dtype"] for k, v in b.items()}, "tensor names")
        kinds = [sorted((m[k], m[k[:-1] + "1"]) for k in m if not LEGACY and k[:2] == "2." and k[-2:] == ".0") for m in metas]
        self.check(kinds[0] == kinds[1], "kinds")
        rest = [{k: v for k, v in m.items() if LEGACY or k[:2] != "2."} for m in metas]
        self.check(rest[0] == rest[1], f"metadata {rest}")

    def shown_by(self, cache, given, path="0"):
        """What prompt_cache_tool's go_on notes, of an mlx-lm cache."""
        out = {}
        if isinstance(cache, CacheList):
            for i, child in enumerate(cache.caches):
                out |= self.shown_by(child, given, f"{path}.{i}")
        elif isinstance(cache, ArraysCache):
            out |= {f"{path}.slot{i}": slot for i, slot in enumerate(cache.cache) if slot is not None}
        else:
            for field in ("_right_padding", "_lengths"):  # from_state forgets them
                if "Batch" in type(cache).__name__ and not hasattr(cache, field):
                    setattr(cache, field, None)
            for step in range(3):
                name = f"{path}.step{step}"
                shown = cache.update_and_fetch(given[f"{name}.keys"], given[f"{name}.values"])
                flat = [a for part in shown for a in (part if isinstance(part, (list, tuple)) else [part])]
                # Copies: later updates of a full ring change what it has shown.
                out |= {f"{name}.shown{i}": mx.array(np.array(a.astype(mx.float32))).astype(a.dtype)
                        if a.dtype != mx.uint32 else mx.array(np.array(a)) for i, a in enumerate(flat)}
        return out

    def mend(self, cache, file):
        """What the loader of 0.31 and earlier gets wrong about files of its own."""
        if isinstance(cache, ChunkedKVCache):
            cache.offset = cache.start_position + cache.keys.shape[2]
        elif isinstance(cache, BatchRotatingKVCache):
            cache.rotated = read_header(file)["__metadata__"]["0.0.3"] == "True"

    def state(self, name):
        """One state of tests/cache/cache_samples.cpp, both ways."""
        files = [self.folder / f"{part}.safetensors" for part in ("ours", "out", "theirs", "shown", "copy")]
        ours, out, theirs, shown, copy = files
        self.run("write-state", name, ours, out, *(["layout=legacy"] if LEGACY else []))
        wanted = mx.load(str(out))
        cache, metadata = load_prompt_cache(str(ours), return_metadata=True)
        self.check(metadata == {"sample": name} and len(cache) == 1, f"{name}: metadata {metadata}")
        if LEGACY:
            self.mend(cache[0], ours)
        save_prompt_cache(str(theirs), cache, metadata)
        told = self.shown_by(cache[0], wanted)
        self.check(set(told) == {n for n in wanted if ".shown" in n or ".slot" in n}, f"{name}: {sorted(told)}")
        for what, value in told.items():
            self.check(same(value, wanted[what]), f"mlx-lm {VERSION} goes on with our {name}: {what}")
        a, b = read_header(ours), read_header(theirs)
        for header in (a, b):
            header["__metadata__"].pop("" if LEGACY else "2.0", None)
        # The numbering of kinds is free.
        self.check(sorted(a["__metadata__"].values()) == sorted(b["__metadata__"].values()), f"{name}: metadata")
        self.check({k: v.get("dtype") for k, v in a.items()} == {k: v.get("dtype") for k, v in b.items()},
                   f"{name}: tensors")
        self.run("continue-state", theirs, out, shown, copy)
        got = mx.load(str(shown))
        self.check(set(got) == set(told), f"{name}: {sorted(got)}")
        for what, value in got.items():
            self.check(same(value, wanted[what]), f"ours go on with mlx-lm {VERSION}'s {name}: {what}")
        if "layers" not in read_header(ours)["__metadata__"]["2.0"]:
            self.check(copy.read_bytes() == ours.read_bytes(), f"{name}: our file of mlx-lm's differs from our own")

    def run_all(self):
        for name in json.loads(self.run("samples", "legacy" if LEGACY else "current")):
            self.state(name)
        for case in CASES:
            self.ours_to_oracle(*case)
            self.oracle_to_ours(*case)
        self.header_trees()
        if not LEGACY:
            self.ours_to_oracle(2, 0, 0, "float32")  # empty caches
            self.oracle_to_ours(2, 0, 0, "float32")
            self.ours_to_oracle(2, 5, 5, "float32")  # trimmed to nothing


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--golden":
        path = pathlib.Path(sys.argv[2]) / f"kv_bfloat16_mlx_lm_{VERSION}.safetensors"
        save_prompt_cache(str(path), make_cache(2, 7, 2, "bfloat16"), METADATA)
        print(path)
        return
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        interchange = Interchange(sys.argv[1], folder)
        interchange.run_all()
    print(f"mlx-lm {VERSION}: {interchange.checks} checks passed")


if __name__ == "__main__":
    main()
