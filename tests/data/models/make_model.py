#!/usr/bin/env python3
"""Make a folder of the model conformance kit from a config.json: random weights, and what mlx-lm gives for them.

usage: make_model.py FOLDER [SEED]     (with mlx-lm 0.32.2 on mlx 0.32.4)
FOLDER/config.json names the architecture and its sizes; model.safetensors, expected.json and expected.safetensors are
written beside it. For float32 models whose layers have a KVCache or a RotatingKVCache each.

Scenarios: `main`, 21 tokens in one pass, in chunks and one by one, then 12 greedy ones; `long`, where layers have a
window: the same over three windows and 7 tokens; `batch`, three rows of unequal length, each with what it gives alone.
Every value is mlx-lm's with its caches, and must equal what it gives for all tokens at once without any. Models in which
two tokens come too close to be told apart are passed over, so that greedy tokens must be the same everywhere.
"""
import json
import os
import sys

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

TOLERANCE = 1e-4  # of the largest logit: what float32 sums in another order come to, with room
MARGIN = 2e-3  # between the two largest logits
DECODED = 12
ROWS = (9, 4, 13)
CACHES = ("KVCache", "RotatingKVCache")


def random_weight(path, weight):
    """No weight is as mlx-lm makes it: a norm of ones or a bias of zeros would hide that it is missing."""
    if path.endswith("bias"):
        return 0.3 * mx.random.normal(weight.shape)
    if weight.ndim == 1:
        return mx.random.uniform(0.5, 1.5, weight.shape)
    return 1.5 * mx.random.normal(weight.shape) / weight.shape[-1] ** 0.5


def feed(model, tokens, cache):
    logits = model(mx.array([tokens]), cache=cache)[0].astype(mx.float32)
    mx.eval(logits, [layer.state for layer in cache])
    return logits


def facts(cache):
    return [{"class": type(c).__name__, "offset": c.offset, "nbytes": c.nbytes} for c in cache]


def relative_error(got, want):
    return (mx.abs(got - want).max() / mx.abs(want).max()).item()


class TooClose(Exception):
    """Two tokens are all but equally likely."""


def greedy(logits):
    first, second = sorted(logits.tolist(), reverse=True)[:2]
    if first - second < MARGIN * mx.abs(logits).max().item():
        raise TooClose
    return mx.argmax(logits).item()


def run(model, prompt, chunks, steps=DECODED):
    cache = make_prompt_cache(model)
    if not all(type(c).__name__ in CACHES for c in cache):
        sys.exit(f"each layer must have one of {', '.join(CACHES)}, but got {[type(c).__name__ for c in cache]}")
    parts, at = [], 0
    for size in chunks:
        parts.append(feed(model, prompt[at : at + size], cache))
        at += size
    logits, after_prefill = mx.concatenate(parts), facts(cache)
    tokens, rows = [greedy(logits[-1])], []
    for _ in range(steps):
        rows.append(feed(model, tokens[-1:], cache)[0])
        tokens.append(greedy(rows[-1]))
    decode = mx.stack(rows)
    whole = model(mx.array([prompt + tokens[:-1]]))[0]
    if relative_error(mx.concatenate([logits, decode]), whole) > TOLERANCE / 10:
        sys.exit("mlx-lm's caches do not give what it gives without them")
    return {"logits": logits, "decode": decode, "tokens": tokens, "after": (after_prefill, facts(cache))}


def random_prompt(length, vocab_size):
    return mx.random.randint(4, vocab_size, (length,)).tolist()


def sequence(model, name, prompt, chunkings, arrays):
    runs = []
    for run_id, chunks in chunkings.items():
        got = run(model, prompt, chunks)
        if not runs:
            arrays |= {f"{name}.logits": got["logits"], f"{name}.decode": got["decode"]}
        elif got["tokens"] != runs[0]["tokens"]:
            raise TooClose
        runs.append({
            "id": run_id, "chunks": chunks, "logits": f"{name}.logits", "logit_rows": [0, len(prompt)],
            "tokens": got["tokens"], "decode": f"{name}.decode", "cache_after_prefill": got["after"][0],
            "cache_after_decode": got["after"][1], "tol": TOLERANCE,
        })
    return {"id": name, "cache": "default", "prompt": prompt, "runs": runs}


def batch(model, vocab_size, arrays):
    rows = [random_prompt(length, vocab_size) for length in ROWS]
    alone = [run(model, row, [len(row)], steps=6) for row in rows]
    arrays["batch.last"] = mx.stack([row["logits"][-1] for row in alone])
    arrays["batch.decode"] = mx.stack([row["decode"] for row in alone], axis=1)
    tokens = [row["tokens"] for row in alone]
    return {"id": "batch", "kind": "batch", "rows": rows, "last_logits": "batch.last", "decode": "batch.decode",
            "tokens": tokens, "tol": TOLERANCE}


def layer_outputs(model, prompt):
    """[layers, E]: each layer's output at the last position; None where layers are of several classes or give more."""
    outputs = []
    kind = type(model.layers[0])
    call = kind.__call__

    def recorded(self, *args, **kwargs):
        outputs.append(call(self, *args, **kwargs))
        return outputs[-1]

    kind.__call__ = recorded
    try:
        model(mx.array([prompt]))
    finally:
        kind.__call__ = call
    if len(outputs) != len(model.layers) or not all(isinstance(output, mx.array) for output in outputs):
        return None
    return mx.stack([output[0, -1] for output in outputs])


def make(config, seed):
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.update(tree_map_with_path(random_weight, model.parameters()))
    mx.eval(model.parameters())
    vocab_size, arrays = config["vocab_size"], {}
    chunkings = {"oneshot": [21], "chunked": [5, 7, 1, 8], "tokenwise": [1] * 21}
    scenarios = [sequence(model, "main", random_prompt(21, vocab_size), chunkings, arrays)]
    window = max((getattr(c, "max_size", 0) for c in make_prompt_cache(model)), default=0)
    if window:
        length = 3 * window + 7
        chunkings = {"oneshot": [length], "chunked": [window + 2, 1, length - window - 3], "tokenwise": [1] * length}
        scenarios.append(sequence(model, "long", random_prompt(length, vocab_size), chunkings, arrays))
    scenarios.append(batch(model, vocab_size, arrays))
    outputs = layer_outputs(model, scenarios[0]["prompt"])
    if outputs is not None:
        arrays["debug.layer_outputs"] = outputs
    expected = {
        "format": 1,
        "model_type": config["model_type"],
        "dtype": "float32",
        "made_with": {"mlx": mx.__version__, "mlx_lm": mlx_lm.__version__, "device": "cpu", "seed": seed},
        "caches": [c["class"] for c in scenarios[0]["runs"][0]["cache_after_prefill"]],
        "debug": {} if outputs is None else {"layer_outputs": "debug.layer_outputs", "states": []},
        "scenarios": scenarios,
    }
    return dict(tree_flatten(model.parameters())), expected, arrays


def main(folder, first_seed=0):
    mx.set_default_device(mx.cpu)
    with open(f"{folder}/config.json") as file:
        config = json.load(file)
    for seed in range(int(first_seed), int(first_seed) + 1000):
        try:
            weights, expected, arrays = make(config, seed)
            break
        except TooClose:
            continue
    else:
        sys.exit("no seed gave tokens that can be told apart")
    mx.save_safetensors(f"{folder}/model.safetensors", weights, metadata={"format": "mlx"})
    mx.save_safetensors(f"{folder}/expected.safetensors", arrays)
    with open(f"{folder}/expected.json", "w") as file:
        json.dump(expected, file)
        file.write("\n")
    size = sum(entry.stat().st_size for entry in os.scandir(folder))
    print(f"{folder}: seed {expected['made_with']['seed']}, {sorted(arrays)}, {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
