#!/usr/bin/env python3
"""Attention over a quantised cache: ours beside mlx-lm's, in one Python process. Needs mlx-lm and package `reprise`.

Prints milliseconds, the fastest and the median of rounds in which the two take turns, and mlx-lm's fastest by ours. On
a machine that others use, the fastest says more, and on a CPU --cpu-time, which leaves out what others take.
"""
import argparse
import statistics
import time

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention as theirs

from reprise._core import quantized_scaled_dot_product_attention as ours

SHAPES = {"smollm2": (9, 3, 64), "llama3": (32, 8, 128)}  # H, Hkv, D
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def numbers(text):
    return [int(number) for number in text.split(",")]


def milliseconds(clock, attend, queries, keys, values, mask, group_size, bits):
    mine = queries + 0  # mlx-lm's scales the array it is given
    mx.eval(mine)
    start = clock()
    out = attend(mine, keys, values, queries.shape[-1] ** -0.5, mask, group_size, bits)
    mx.eval(out)
    return (clock() - start) * 1e3


def measure(args, shape, length, size, bits):
    heads, kv_heads, dim = SHAPES[shape]
    dtype = DTYPES[args.dtype]
    queries = mx.random.normal((1, heads, length, dim)).astype(dtype)
    keys, values = (mx.quantize(mx.random.normal((1, kv_heads, size, dim)).astype(dtype), args.group_size, bits)
                    for _ in range(2))
    mx.eval(queries, keys, values)
    clock = time.process_time if args.cpu_time else time.perf_counter
    call = queries, keys, values, None if length == 1 else "causal", args.group_size, bits
    times = {theirs: [], ours: []}
    deadline = time.monotonic() + args.seconds
    while len(times[ours]) < args.rounds or (time.monotonic() < deadline and len(times[ours]) < 50):
        for attend, of_one in times.items():
            of_one.append(milliseconds(clock, attend, *call))
        if time.monotonic() > deadline + 20 * args.seconds:
            break
    fastest = [min(of_one) for of_one in times.values()]
    medians = [statistics.median(of_one) for of_one in times.values()]
    print(f"| {shape} | {bits} | {length} | {size} | {fastest[0]:.2f} | {fastest[1]:.2f} | {medians[0]:.2f} | "
          f"{medians[1]:.2f} | {fastest[0] / fastest[1]:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="smollm2,llama3", help="of " + ", ".join(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--lengths", type=numbers, default=[1, 8, 64, 256], help="queries (L)")
    parser.add_argument("--sizes", type=numbers, default=[256, 1024, 4096], help="keys (S)")
    parser.add_argument("--bits", type=numbers, default=[8, 4])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="at least so many")
    parser.add_argument("--seconds", type=float, default=0.5, help="at least so long, for each row")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of all threads instead of the clock's")
    args = parser.parse_args()
    print("| shape | bits | L | S | mlx-lm, fastest | ours, fastest | mlx-lm, median | ours, median | times faster |")
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in args.shapes.split(","):
        for bits in args.bits:
            for length in args.lengths:
                for size in args.sizes:
                    measure(args, shape, length, size, bits)


if __name__ == "__main__":
    main()
