#!/usr/bin/env python3
"""Reprise, llama.cpp and mlx-lm side by side: medians over alternating rounds on an idle machine, and their ratios.

Every engine gets the same model, the same counts of tokens and the same number of threads, one engine at a time. Sampling is
part of Reprise's steps; llama.cpp's figure is the better of flash attention on and off (a way that is 10 % behind in the
first round is left out of the others), and no sampling is part of its own. Figures after thousands of tokens get fewer
rounds. peers.sh calls this with all paths.
"""
import argparse
import json
import os
import statistics

from peers_chart import chart
from peers_figures import FIGURES, parts_text, results
from peers_jobs import ENGINES, JOBS, NAMES
from peers_machine import say, undisturbed


# --- measuring -------------------------------------------------------------------------------------------------------

def rounds_of(job, args):
    return {"all": args.rounds, "deep": min(args.deep_rounds, args.rounds), "once": 1}[job.rounds]


def slow_ways(seen, job):
    """Of each name's ways those that were far behind the best."""
    slow = set()
    for names in job.ways.values():
        medians = {way: statistics.median(seen[way]) for way in names if way in seen}
        slow |= {way for way, value in medians.items() if value < 0.9 * max(medians.values())}
    return slow


def measure(args):
    """{engine: {name: median}}; of a name that was reached in several ways the best is there as well."""
    seen = {engine: {} for engine in ENGINES}
    jobs = [job for job in JOBS if job.engine in args.engines and job.figures & set(args.figures)]
    for number in range(args.rounds):
        for job in jobs:
            if number >= rounds_of(job, args):
                continue
            say(f"round {number + 1} of {rounds_of(job, args)}: {job}")
            skip = slow_ways(seen[job.engine], job)
            for name, value in undisturbed(args, lambda: job.run(args, skip)).items():
                seen[job.engine].setdefault(name, []).append(value)
    return {engine: medians_of(numbers) for engine, numbers in seen.items()}


def medians_of(numbers):
    medians = {name: statistics.median(values) if isinstance(values[0], (int, float)) else values[0]
               for name, values in numbers.items()}
    for name in list(medians):
        figure, _, way = name.partition("/")
        if not way:
            continue
        best = max if FIGURES[figure].higher_is_better else min
        medians[figure] = best(medians.get(figure, medians[name]), medians[name])
    return medians


# --- what is printed -------------------------------------------------------------------------------------------------

def number_text(value):
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def print_table(found):
    yes_no = {True: "yes", False: "NO", None: "-"}
    rows = [["figure", *(NAMES[engine] for engine in ENGINES), "unit", "/llama.cpp", "/mlx-lm", "demand", "met", "goal"]]
    for figure in found:
        goal = "-" if figure["goal"] is None else f"{figure['goal']}: {yes_no[figure['goal_met']]}"
        rows.append([figure["figure"], *(number_text(figure[engine]) for engine in ENGINES), figure["unit"],
                     *(number_text(figure["ratio"].get(engine)) for engine in ("llama_cpp", "mlx_lm")),
                     figure["demand"], yes_no[figure["met"]], goal])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.rjust(width) if 1 <= i <= 3 or 5 <= i <= 6 else cell.ljust(width)
                        for i, (cell, width) in enumerate(zip(row, widths))).rstrip())


def words(choices):
    def parse(text):
        found = [word for word in text.split(",") if word]
        unknown = [word for word in found if word not in choices]
        if unknown or not found:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or text!r} is none of {', '.join(choices)}")
        return found
    return parse


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def write_json(file, data):
    with open(file, "w") as out:
        json.dump(data, out, indent=1)
        out.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="reprise")
    parser.add_argument("--programs", required=True, help="the folder of the measuring programs (stream, gemm, save_load)")
    parser.add_argument("--model", required=True, help="the model that Reprise gets")
    parser.add_argument("--peers", required=True, help="the folder that setup.sh has made")
    parser.add_argument("--mlx-lm-bench", required=True, help="mlx_lm_bench.py")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--deep-rounds", type=positive, default=2, help="rounds after thousands of tokens [2]")
    parser.add_argument("--figures", type=words(list(FIGURES)), default=list(FIGURES), help=f"of {','.join(FIGURES)}")
    parser.add_argument("--engines", type=words(list(ENGINES)), default=list(ENGINES), help=f"of {','.join(ENGINES)}")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0))
                        if hasattr(os, "sched_getaffinity") else os.cpu_count(), help="of each engine [all]")
    parser.add_argument("--idle", type=float, default=0.06, help="share of the processors that may be in use [0.06]")
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for an idle machine [120]")
    parser.add_argument("--force", action="store_true", help="measure whatever else is running")
    parser.add_argument("--json", help="writes a list of {figure, reprise, llama_cpp, mlx_lm, …} there")
    parser.add_argument("--svg", help="draws a chart there")
    args = parser.parse_args()
    os.environ.pop("REPRISE_NUM_THREADS", None)

    medians = measure(args)
    found = results(medians, args.figures)
    print_table(found)
    print(f"\nmedians, {args.threads} threads for each engine, instruction set {medians['reprise'].get('target', '-')}")
    for line in parts_text(medians):
        print(line)
    if args.json:
        write_json(args.json, found)
    if args.svg:
        with open(args.svg, "w") as out:
            out.write(chart(found, args.threads))


if __name__ == "__main__":
    main()
