#!/usr/bin/env python3
"""mlx-lm generating on its own caches and on ours, in turns in one process. Needs mlx-lm and the package `reprise`.

Prints tokens a second and processor seconds (which leave out what others take of the machine), the best round of each,
and the share of tokens on which the two agree (over a quantised cache the rounding differs, and greedy decoding parts
where two tokens are about equal).
"""
import argparse
import contextlib
import time

import mlx.core as mx
from mlx_lm import load, stream_generate

import reprise.mlx_lm

TEXT = "The cache keeps the keys and values of every token, so that a longer prompt costs only what is new in it. "


def generate(model, tokenizer, prompt, args):
    tokens, last, start = [], None, time.process_time()
    for last in stream_generate(model, tokenizer, prompt, max_tokens=args.decode, kv_bits=args.kv_bits,
                                kv_group_size=args.kv_group_size, quantized_kv_start=0):
        tokens.append(last.token)
    return tokens, last.prompt_tps, last.generation_tps, time.process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, as mlx_lm.load takes it")
    parser.add_argument("--prompt", type=int, default=300, help="tokens")
    parser.add_argument("--decode", type=int, default=16, help="tokens")
    parser.add_argument("--kv-bits", type=int, default=None)
    parser.add_argument("--kv-group-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    ids = tokenizer.encode(TEXT)
    prompt = (ids * (args.prompt // len(ids) + 1))[:args.prompt]
    kinds = {"mlx-lm": contextlib.nullcontext, "reprise": reprise.mlx_lm.installed}
    results = {name: [] for name in kinds}
    for round_ in range(args.rounds):
        for name, context in kinds.items():
            with context():
                mx.clear_cache()
                results[name].append(generate(model, tokenizer, prompt, args))
                _, prefill, decode, seconds = results[name][-1]
                print(f"round {round_ + 1}, {name}: prefill {prefill:.1f}, decode {decode:.1f}, "
                      f"processor {seconds:.1f} s", flush=True)

    print("| caches | prefill, tokens/s | decode, tokens/s | processor, s |\n|---|---|---|---|")
    for name, rounds in results.items():
        _, prefill, decode, seconds = zip(*rounds)
        print(f"| {name} | {max(prefill):.1f} | {max(decode):.1f} | {min(seconds):.1f} |")
    theirs, ours = (rounds[0][0] for rounds in results.values())
    print(f"{sum(a == b for a, b in zip(theirs, ours))} of {len(theirs)} tokens are the same")


if __name__ == "__main__":
    main()
