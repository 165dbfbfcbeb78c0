#!/usr/bin/env python3
"""What mlx-lm's sample_utils keeps and changes, for tests/sampling/sampling_golden_test.cpp.

Made with mlx-lm 0.32.2, mlx 0.32.4 (CPU). usage: make_goldens.py OUT.safetensors

Tensors: `logprobs` [3, V], a row each that is flat, peaked and full of ties; `kept.<n>` bool [3, V], true where the
filters of case n leave a token; `logits` [2, V]; `processed.<n>` [2, V]. Metadata: `kept.<n>` and `processed.<n>`, the
case's parameters as `name=value` words; `context` is a list of ids, `bias` one of id:value.
"""
import sys

import mlx.core as mx
from mlx_lm import sample_utils

V = 499
mx.random.seed(7)


def normalised(logits):
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


flat = mx.random.normal((V,)) * 0.05
peaked = mx.random.normal((V,)) * 3
ties = mx.round(mx.random.normal((V,)) * 2)
logprobs = normalised(mx.stack([flat, peaked, ties]))
tensors, metadata = {"logprobs": logprobs}, {}

# Everything up to the draw: the draw itself is replaced by what it is given.
sample_utils.categorical_sampling = lambda filtered, temp: filtered
FILTERS = [
    dict(top_p=0.5), dict(top_p=0.9), dict(top_p=0.999), dict(top_p=1e-7), dict(top_p=0.0), dict(top_p=1.0),
    dict(min_p=0.05), dict(min_p=0.5), dict(min_p=1.0), dict(min_p=0.5, min_tokens_to_keep=7),
    dict(min_p=1.0, min_tokens_to_keep=40), dict(min_p=0.0, min_tokens_to_keep=40),
    dict(top_k=1), dict(top_k=7), dict(top_k=V - 1),
    dict(xtc_probability=1.0, xtc_threshold=0.05), dict(xtc_probability=1.0, xtc_threshold=0.0),
    dict(xtc_probability=1.0, xtc_threshold=0.5), dict(xtc_probability=1.0, xtc_threshold=0.002),
    dict(xtc_probability=1.0, xtc_threshold=0.002, xtc_special_tokens=list(range(0, V, 2))),
    dict(top_p=0.9, top_k=40), dict(top_p=0.8, min_p=0.05, min_tokens_to_keep=3),
    dict(top_p=0.95, min_p=0.02, xtc_probability=1.0, xtc_threshold=0.03, top_k=20),
    dict(top_p=0.5, min_p=0.3, min_tokens_to_keep=60, xtc_probability=1.0, xtc_threshold=0.01, top_k=5),
]
for number, case in enumerate(FILTERS):
    kept = sample_utils.make_sampler(temp=1.0, **case)(logprobs) > -float("inf")
    tensors[f"kept.{number}"] = kept
    words = {k: ",".join(map(str, v)) if isinstance(v, list) else v for k, v in case.items()}
    metadata[f"kept.{number}"] = " ".join(f"{k}={v}" for k, v in words.items())

logits = mx.random.normal((2, V)) * 4
tensors["logits"] = logits
CONTEXT = [3, 9, 3, 250, 498, 0, 3, 17, 250, 9]
PROCESSORS = [
    dict(repetition_penalty=1.3), dict(repetition_penalty=0.5), dict(repetition_penalty=1.3, repetition_context_size=4),
    dict(presence_penalty=0.7), dict(presence_penalty=-0.7), dict(presence_penalty=2.0, presence_context_size=3),
    dict(frequency_penalty=0.4), dict(frequency_penalty=-1.5), dict(frequency_penalty=0.4, frequency_context_size=5),
    dict(logit_bias={0: 2.5, 250: -100.0, 498: 0.5}),
    dict(logit_bias={3: 1.0}, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
         repetition_context_size=8, presence_context_size=6, frequency_context_size=9),
]
for number, case in enumerate(PROCESSORS):
    changed = mx.array(logits)
    for process in sample_utils.make_logits_processors(**case):
        changed = process(mx.array(CONTEXT), changed)
    tensors[f"processed.{number}"] = changed
    words = {k: ",".join(f"{i}:{b}" for i, b in v.items()) if isinstance(v, dict) else v for k, v in case.items()}
    words["context"] = ",".join(map(str, CONTEXT))
    metadata[f"processed.{number}"] = " ".join(f"{k}={v}" for k, v in words.items())

mx.save_safetensors(sys.argv[1], tensors, metadata=metadata)
