#!/usr/bin/env python3
"""Reprise, llama.cpp and mlx-lm side by side: medians over alternating rounds on an idle machine, and their ratios.

Figures, in tokens per second:
  decode     64 tokens after one, greedy
  prefill    a prompt of 512 tokens
  decode_4k  64 tokens after 4,000 cached ones

llama.cpp's figure is the better of flash attention on and off. Engines that are slow here get fewer tokens (the table says
which). peers.sh calls this with all paths; for the other options see --help.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

# Per figure: what it is made of, and the fewer tokens that mlx-lm gets on a CPU.
FIGURES = {
    "decode": dict(prompt=1, depth=0, decode=64, slow=dict(decode=8)),
    "prefill": dict(prompt=512, depth=0, decode=0, slow=dict(prompt=64)),
    "decode_4k": dict(prompt=1, depth=4000, decode=64, slow=dict(decode=4)),
}
ENGINES = ("reprise", "llama_cpp", "mlx_lm")
ATTEMPTS = 3  # at a measurement that others disturb
NAMES = dict(reprise="Reprise", llama_cpp="llama.cpp", mlx_lm="mlx-lm")


def fail(text):
    print(f"peers.py: {text}", file=sys.stderr)
    sys.exit(1)


def say(text):
    print(text, file=sys.stderr, flush=True)


# --- an idle machine -------------------------------------------------------------------------------------------------

def processor_ticks():
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    return sum(fields), fields[3] + fields[4]  # all, idle


def process_ticks():
    ticks = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                text = stat.read()
        except OSError:
            continue  # it has ended
        name, rest = text[text.index("(") + 1:text.rindex(")")], text[text.rindex(")") + 2:].split()
        ticks[pid] = (name, int(rest[11]) + int(rest[12]))
    return ticks


def busy_share(seconds=1.0):
    """The share of all processors in use over `seconds`, and who used them most."""
    total, idle = processor_ticks()
    before = process_ticks()
    time.sleep(seconds)
    total_now, idle_now = processor_ticks()
    used = {}
    for pid, (name, ticks) in process_ticks().items():
        used[f"{name} ({pid})"] = ticks - before.get(pid, (name, ticks))[1]
    busiest = [name for name, ticks in sorted(used.items(), key=lambda item: -item[1])[:3] if ticks > 0]
    return 1 - (idle_now - idle) / max(total_now - total, 1), busiest


def wait_until_idle(args):
    if args.force or not os.path.exists("/proc/stat"):
        return
    until = time.monotonic() + args.wait
    told = False
    while True:
        share, busiest = busy_share()
        if share <= args.idle:
            return
        if time.monotonic() > until:
            fail(f"the machine is not idle ({share:.0%} in use, most by {', '.join(busiest)}); "
                 "figures taken now would be wrong. --wait SECONDS waits longer, --force measures all the same")
        if not told:
            say(f"waiting for an idle machine ({share:.0%} in use, most by {', '.join(busiest)})")
            told = True


def child_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def undisturbed(args, run):
    """What run() returns, from a try during which nobody else used the processors."""
    for _ in range(ATTEMPTS):
        wait_until_idle(args)
        if args.force or not os.path.exists("/proc/stat"):
            return run()
        total, idle = processor_ticks()
        own = child_seconds()
        result = run()
        total_now, idle_now = processor_ticks()
        own_ticks = (child_seconds() - own) * os.sysconf("SC_CLK_TCK")
        others = (total_now - total - (idle_now - idle) - own_ticks) / max(total_now - total, 1)
        if others <= args.idle:
            return result
        say(f"others used {others:.0%} of the processors meanwhile: once more")
    fail(f"the machine did not stay idle in {ATTEMPTS} tries; --force measures all the same")


# --- the engines -----------------------------------------------------------------------------------------------------

def output_of(command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        fail(f"{' '.join(command)} failed: {(result.stderr or result.stdout).strip()[-500:]}")
    return result.stdout


def last_json_line(text):
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def flags_of(counts):
    return [word for key in ("prompt", "depth", "decode") for word in (f"--{key}", str(counts[key]))]


def chosen(result, counts):
    return result["prefill_tps"] if counts["decode"] == 0 else result["decode_tps"]


def run_reprise(args, counts):
    return {"": chosen(last_json_line(output_of([args.program, args.model, *flags_of(counts)])), counts)}


def run_mlx_lm(args, counts):
    command = [sys.executable, args.mlx_lm_bench, f"{args.peers}/smollm2-mlx", *flags_of(counts)]
    return {"": chosen(last_json_line(output_of(command)), counts)}


def run_llama_cpp(args, counts):
    prompt = counts["prompt"] if counts["decode"] == 0 else 0
    command = [f"{args.peers}/bin/llama-bench", "-m", f"{args.peers}/smollm2.gguf", "-t", str(args.threads),
               "-p", str(prompt), "-n", str(counts["decode"]), "-d", str(counts["depth"]), "-fa", "0,1", "-r", "1",
               "-o", "json"]
    return {str(run["flash_attn"]): run["avg_ts"] for run in json.loads(output_of(command))}


RUN = dict(reprise=run_reprise, llama_cpp=run_llama_cpp, mlx_lm=run_mlx_lm)


def counts_for(figure, engine, args):
    counts = {key: value for key, value in FIGURES[figure].items() if key != "slow"}
    if engine in args.slow:
        counts.update(FIGURES[figure]["slow"])
    return counts


def measure(args):
    """{figure: {engine: median, None where it was not measured}}; of llama.cpp's two ways the better median."""
    seen = {(figure, engine): {} for figure in args.figures for engine in args.engines}
    for number in range(args.rounds):
        for figure in args.figures:
            for engine in args.engines:
                if engine in args.slow and (figure == "decode_4k" and not args.slow_4k or number >= args.slow_rounds):
                    continue
                say(f"round {number + 1} of {args.rounds}: {figure}, {NAMES[engine]}")
                result = undisturbed(args, lambda: RUN[engine](args, counts_for(figure, engine, args)))
                for way, value in result.items():
                    seen[figure, engine].setdefault(way, []).append(value)
    best = {key: max(map(statistics.median, ways.values()), default=None) for key, ways in seen.items()}
    return {figure: {engine: best.get((figure, engine)) for engine in ENGINES} for figure in args.figures}


# --- what is printed -------------------------------------------------------------------------------------------------

def ratio(a, b):
    return f"{a / b:.2f}" if a is not None and b else "-"


def print_table(figures, args):
    columns = ["figure", *(NAMES[engine] for engine in ENGINES), "Reprise/llama.cpp", "Reprise/mlx-lm"]
    rows = [[figure, *("-" if value[engine] is None else f"{value[engine]:.1f}" for engine in ENGINES),
             ratio(value["reprise"], value["llama_cpp"]), ratio(value["reprise"], value["mlx_lm"])]
            for figure, value in figures.items()]
    widths = [max(map(len, column)) for column in zip(columns, *rows)]
    for row in [columns, *rows]:
        print("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                        for i, (cell, width) in enumerate(zip(row, widths))).rstrip())
    print(f"tokens per second, medians of {args.rounds} rounds, {args.threads} threads")
    for engine in args.slow:
        fewer = ", ".join(f"{figure} {' '.join(map(str, FIGURES[figure]['slow'].values()))}"
                          for figure in figures if figures[figure][engine] is not None)
        if fewer:
            print(f"{NAMES[engine]} is slow here and got fewer tokens ({fewer}) and {args.slow_rounds} round(s)")
        if "decode_4k" in figures and figures["decode_4k"][engine] is None:
            print(f"{NAMES[engine]} decode_4k takes minutes and was left out: --slow-4k measures it")


def words(choices):
    def parse(text):
        found = [word for word in text.split(",") if word]
        unknown = [word for word in found if word not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(choices)}")
        return found
    return parse


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="reprise_bench")
    parser.add_argument("--model", required=True, help="the model that Reprise gets")
    parser.add_argument("--peers", required=True, help="the folder that setup.sh has made")
    parser.add_argument("--mlx-lm-bench", required=True, help="mlx_lm_bench.py")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--figures", type=words(list(FIGURES)), default=list(FIGURES), help=f"of {','.join(FIGURES)}")
    parser.add_argument("--engines", type=words(list(ENGINES)), default=list(ENGINES), help=f"of {','.join(ENGINES)}")
    parser.add_argument("--slow", type=words(list(ENGINES)), default=["mlx_lm"],
                        help="engines that get fewer tokens; an empty word for none [mlx_lm]")
    parser.add_argument("--slow-rounds", type=positive, default=1, help="rounds for those [1]")
    parser.add_argument("--slow-4k", action="store_true", help="decode_4k for those too: minutes of prefill")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0))
                        if hasattr(os, "sched_getaffinity") else os.cpu_count(), help="llama.cpp's [all]")
    parser.add_argument("--idle", type=float, default=0.06, help="share of the processors that may be in use [0.06]")
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for an idle machine [120]")
    parser.add_argument("--force", action="store_true", help="measure whatever else is running")
    parser.add_argument("--json", help="writes a list of {figure, reprise, llama_cpp, mlx_lm} there")
    args = parser.parse_args()
    figures = measure(args)
    print_table(figures, args)
    if args.json:
        with open(args.json, "w") as out:
            json.dump([{"figure": figure, **values} for figure, values in figures.items()], out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
