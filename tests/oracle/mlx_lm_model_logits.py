"""Logits of every model that mlx-lm's test_models builds, over caches. Imported by mlx_lm_test_worker.py.

The tests themselves look at shapes only and evaluate nothing. Here the same models, with the same weights, process and
decode tokens over the caches that `make_prompt_cache` gives them, so that the two ways of running can be compared.
"""
from __future__ import annotations

import copy
import pathlib
import sys
from typing import Any, Callable

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

CHUNKS = (9, 1, 1, 6, 1, 1, 1, 7, 1, 1)  # chunks and single tokens in turn, past the small windows of these models
PROMPTS = (5, 11, 3)  # of a batch
LARGEST = 10_000_000  # weights; what is larger takes too long without a GPU


def tokens(begin: int, count: int, vocabulary: int) -> list[int]:
    return [(7 * i + 3) % min(vocabulary, 1000) for i in range(begin, begin + count)]


def lively(model: Any) -> None:
    """Makes every weight float32, and none zero everywhere: what is zero would hide what it is multiplied by."""
    mx.random.seed(1)
    model.update(tree_map(lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p,
                          model.parameters()))
    parameters = tree_flatten(model.parameters())
    zero = [(name, mx.random.uniform(-0.1, 0.1, p.shape)) for name, p in parameters
            if mx.issubdtype(p.dtype, mx.floating) and not mx.any(p).item()]
    model.update(tree_unflatten(zero), strict=False)
    mx.eval(model.parameters())


def logits_of(output: Any) -> np.ndarray:
    return np.array(getattr(output, "logits", output).astype(mx.float32))


def run_solo(model: Any, vocabulary: int) -> dict[str, np.ndarray]:
    """One sequence in chunks; then the same over a copy and over a trimmed cache, where it can be trimmed."""
    from mlx_lm.models import cache as caches

    cache = caches.make_prompt_cache(model)
    begin, outputs = 0, []
    for count in CHUNKS:
        outputs.append(logits_of(model(mx.array([tokens(begin, count, vocabulary)]), cache=cache)))
        begin += count
    result = {"chunks": np.concatenate(outputs, axis=1)}
    other = copy.deepcopy(cache)
    calls = (("original", cache, begin), ("copy", other, begin + 50), ("original again", cache, begin + 1))
    for name, one, start in calls:
        result[name] = logits_of(model(mx.array([tokens(start, 1, vocabulary)]), cache=one))
    if caches.can_trim_prompt_cache(cache):
        result["trimmed by"] = np.array([caches.trim_prompt_cache(cache, 4)])
        result["trimmed"] = logits_of(model(mx.array([tokens(90, 2, vocabulary)]), cache=cache))
    return result


def run_batch(model: Any, vocabulary: int) -> dict[str, np.ndarray]:
    """Rows of unequal length decoded together, the middle one leaving halfway."""
    from mlx_lm.generate import _merge_caches
    from mlx_lm.models.cache import make_prompt_cache

    solo = []
    for count in PROMPTS:
        solo.append(make_prompt_cache(model))
        model(mx.array([tokens(count, count, vocabulary)]), cache=solo[-1])
        mx.eval([c.state for c in solo[-1]])
    batch = _merge_caches(solo)
    outputs = {}
    for step in range(4):
        if step == 2:
            for layer in batch:
                layer.filter([0, 2])
        rows = len(PROMPTS) if step < 2 else 2
        inputs = mx.array([tokens(row + 10 * step, 1, vocabulary) for row in range(rows)])
        outputs[f"batch step {step}"] = logits_of(model(inputs, cache=batch))
    one = [layer.extract(1) for layer in batch]
    outputs["extracted row"] = logits_of(model(mx.array([tokens(77, 1, vocabulary)]), cache=one))
    return outputs


def record(runner: Callable, folder: str, current: Callable[[], str]) -> Callable:
    """`model_test_runner` of test_models, which then also writes the model's logits into `folder`.

    What a run cannot do is written in place of the logits: it has to be the same both ways too. Models of more than
    LARGEST weights are left out.
    """
    counts: dict[str, int] = {}

    def run(self: Any, model: Any, model_type: str, vocabulary: int, layers: int) -> None:
        runner(self, model, model_type, vocabulary, layers)
        size = sum(p.size for _, p in tree_flatten(model.parameters()))
        print(f"{model_type}: {size} weights", file=sys.stderr)
        if size > LARGEST:
            return
        key = f"{current()} {model_type}"
        counts[key] = counts.get(key, 0) + 1
        results: dict[str, np.ndarray] = {}
        for name, part in (("weights", lively_weights), ("solo", run_solo), ("batch", run_batch)):
            try:
                results |= part(model, vocabulary)
            except Exception as error:
                results[f"{name}: error"] = np.array(type(error).__name__)
                results[f"{name}: text"] = np.array(str(error))
        np.savez(pathlib.Path(folder) / f"{key} {counts[key]}.npz", **results)

    return run


def lively_weights(model: Any, vocabulary: int) -> dict[str, np.ndarray]:
    lively(model)
    return {}


def differences(before: pathlib.Path, ours: pathlib.Path, tolerance: float) -> list[str]:
    """What two files of logits differ in, a line each. `tolerance` is relative to the largest logit."""
    with np.load(before) as a, np.load(ours) as b:
        lines = []
        for name in sorted(set(a.files) | set(b.files)):
            if name.endswith(": text"):
                continue
            if name not in a.files or name not in b.files:
                have, lack = (b, "only on Reprise's caches") if name in b.files else (a, "only on mlx-lm's caches")
                text = f"{have[name]}: {have[name.replace(': error', ': text')]}" if name.endswith(": error") else ""
                lines.append(f"{name} {lack} {text}".rstrip())
            elif a[name].dtype.kind != "f":
                if not np.array_equal(a[name], b[name]):
                    lines.append(f"{name}: {a[name]} → {b[name]}")
            elif a[name].shape != b[name].shape:
                lines.append(f"{name}: shape {a[name].shape} → {b[name].shape}")
            elif not np.array_equal(np.isfinite(a[name]), np.isfinite(b[name])):
                lines.append(f"{name}: NaN or infinite at other places")
            else:
                finite = np.isfinite(a[name])
                largest = np.max(np.abs(a[name][finite]), initial=1e-6)
                worst = np.max(np.abs(a[name] - b[name])[finite], initial=0) / largest
                if worst > tolerance:
                    lines.append(f"{name}: differ by {worst:.1e} of the largest logit")
    return lines
