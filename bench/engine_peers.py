#!/usr/bin/env python3
"""Many conversations at once: Reprise, llama-server and mlx_lm.server over the same traces, on an idle machine.

Four parts. `throughput`: answers' tokens a second, the engines in turns, so many conversations at a time. `first_token`:
over a prefix that was computed before, and over none. `hit_rates`: how much of the prompts the engines had, on short
traces, since mlx-lm is slow here. `edits`: tokens computed again after a change in a long prompt, model by model. All
engines answer the same token ids with as many tokens; mlx_lm.server gets and gives text. engine_peers.sh calls this with
all paths.
"""
import argparse
import os
import signal
import statistics
import sys

from engine_peers_edits import ALLOWANCE, EDITS, edits
from engine_peers_servers import LlamaServer, MlxLmServer, longest, made_trace, median_of, replay, reprise
from peers import number_text, positive, words, write_json
from peers_machine import say, undisturbed

PARTS = ("throughput", "first_token", "hit_rates", "edits")
TRACES = ("multi-turn", "shared-prefix", "fork", "document", "edit")
ENGINES = ("reprise", "llama_server", "mlx_lm")
TOTALS = {1: 6, 4: 10, 16: 20}  # conversations of a trace, by how many go at a time
PREFIX, QUESTION = 1500, 8
DEMANDS = {"ratio": 1.5, "warm": 0.03}


# --- measuring -------------------------------------------------------------------------------------------------------

def slots_context(trace, slots):
    """Enough for all slots at once, and some to spare."""
    return slots * (longest(trace) + 64)


def llama(args, trace, at_a_time):
    if args.flash_attention is None:
        args.flash_attention = faster_attention(args)
    return llama_with(args, trace, at_a_time, args.flash_attention)


def llama_with(args, trace, at_a_time, flash_attention):
    more = ["--flash-attn", flash_attention]
    with LlamaServer(args, at_a_time, slots_context(trace, at_a_time), more=more) as server:
        return replay(server, trace, at_a_time)


def faster_attention(args):
    """llama-server's flash attention, on or off, whichever answers faster here."""
    trace = made_trace(args, "multi-turn", min(4, args.total or 4), args.scale, args.answer, args.seed)
    speeds = {way: llama_with(args, trace, len(trace), way)["completion_tps"] for way in ("on", "off")}
    best = max(speeds, key=speeds.get)
    found = ", ".join(f"{way} {tps:.1f} tokens/s" for way, tps in speeds.items())
    say(f"llama-server's flash attention: {best} ({found})")
    return best


MEASURES = {"reprise": reprise, "llama_server": llama}


def both(args, title, trace, at_a_time, rounds):
    """{engine: figures}: medians over rounds, the engines in turns."""
    seen = {engine: [] for engine in MEASURES if engine in args.engines}
    for number in range(rounds):
        for engine, runs in seen.items():
            say(f"{title}, {at_a_time} at a time, round {number + 1} of {rounds}: {engine}")
            runs.append(undisturbed(args, lambda engine=engine: MEASURES[engine](args, trace, at_a_time)))
    return {engine: median_run(runs) for engine, runs in seen.items()}


def median_run(runs):
    """The run whose speed is the median."""
    return sorted(runs, key=lambda run: run["completion_tps"])[(len(runs) - 1) // 2]


def throughput(args):
    for name in args.traces:
        for at_a_time in args.at_a_time:
            total = args.total or TOTALS.get(at_a_time, max(6, at_a_time))
            trace = made_trace(args, name, total, args.scale, args.answer, args.seed)
            runs = both(args, name, trace, at_a_time, args.rounds)
            for run in runs.values():
                run.pop("each")
                run.pop("trace", None)  # the name of a file that is gone
            cell = {"trace": name, "at_a_time": at_a_time, "conversations": len(trace), **runs}
            if len(runs) == 2:
                cell["ratio"] = runs["reprise"]["completion_tps"] / runs["llama_server"]["completion_tps"]
                cell["met"] = cell["ratio"] >= DEMANDS["ratio"]
            yield cell


def first_token(args):
    """Three prefixes, each asked three questions, the last one twice: the first is cold, those after it are warm, and of a
    prompt that comes again all but one token is there."""
    prefix, trace = max(1, round(PREFIX * args.scale)), []
    for seed in range(3):
        for number, (_, turns) in enumerate(made_trace(args, "shared-prefix", 3, args.scale, 4, seed)):
            tokens = turns[0]["prompt_tokens"]
            question = tokens[-QUESTION:]
            trace.append((f"{seed}.{number}", [{**turns[0], "prompt_tokens": tokens[:prefix] + question}]))
        trace.append((f"{seed}.again", trace[-1][1]))
    found = {"prefix": prefix, "question": QUESTION}
    for engine, run in both(args, "first token", trace, 1, args.rounds).items():
        cold, warm, again = (median_of(run["each"], lambda request, ends=ends: request["conversation"].endswith(ends))
                             for ends in ((".0",), (".1", ".2"), (".again",)))
        found[engine] = {"cold_ms": cold, "warm_ms": warm, "again_ms": again, "warm_share": warm / cold}
    if "reprise" in found:
        found["met"] = found["reprise"]["warm_share"] <= DEMANDS["warm"]
    if "llama_server" in found and "reprise" in found:
        found["met"] = found["met"] and found["reprise"]["warm_ms"] <= found["llama_server"]["warm_ms"]
    yield found


def hit_rates(args):
    for name in args.traces:
        trace = made_trace(args, name, args.short_total, args.short_scale, args.short_answer, args.seed)
        cell = {"trace": name, "conversations": len(trace), "scale": args.short_scale}
        for engine in args.engines:
            say(f"hit rates, {name}: {engine}")
            if engine == "mlx_lm":
                with MlxLmServer(args) as server:
                    run = replay(server, trace, 1)
            else:
                run = MEASURES[engine](args, trace, 1)
            cell[engine] = {key: run[key] for key in ("prompt_tokens", "cached_tokens", "hit_rate")}
        yield cell


# --- what is printed -------------------------------------------------------------------------------------------------

YES_NO = {True: "yes", False: "NO", None: "-"}


def print_rows(title, rows):
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                        for i, (cell, width) in enumerate(zip(row, widths))).rstrip())


def number(found, *keys):
    for key in keys:
        found = (found or {}).get(key)
    return number_text(found)


def percent(found, *keys):
    for key in keys:
        found = (found or {}).get(key)
    return "-" if found is None else f"{100 * found:.1f} %"


def print_throughput(found):
    rows = [["trace", "at a time", "tokens/s", "llama-server", "ratio", f">= {DEMANDS['ratio']}", "first token ms p50",
             "p90", "p99", "llama-server p50", "p90", "p99", "had", "llama-server"]]
    for cell in found:
        ours, theirs = cell.get("reprise"), cell.get("llama_server")
        rows.append([cell["trace"], str(cell["at_a_time"]), number(ours, "completion_tps"),
                     number(theirs, "completion_tps"), number(cell, "ratio"), YES_NO[cell.get("met")],
                     *(number(run, "ttft_ms", p) for run in (ours, theirs) for p in ("p50", "p90", "p99")),
                     percent(ours, "hit_rate"), percent(theirs, "hit_rate")])
    print_rows("answers, and how much of the prompts was there", rows)
    ratios = [cell["ratio"] for cell in found if "ratio" in cell]
    if ratios:
        print(f"ratio: {min(ratios):.2f} to {max(ratios):.2f}, geometric mean {statistics.geometric_mean(ratios):.2f}")


def print_first_token(found):
    found = found[0]
    rows = [["engine", "cold ms", "warm ms", "warm, of cold", "same prompt again ms"]]
    rows += [[engine, number(found, engine, "cold_ms"), number(found, engine, "warm_ms"),
              percent(found, engine, "warm_share"), number(found, engine, "again_ms")]
             for engine in ENGINES if engine in found]
    print_rows(f"first token, {found['question']} tokens after a prefix of {found['prefix']:,}", rows)
    print(f"wanted: at most {DEMANDS['warm']:.0%} of cold, and no more than llama-server: {YES_NO[found.get('met')]}")


def print_hit_rates(found):
    rows = [["trace", "conversations", *ENGINES]]
    rows += [[cell["trace"], str(cell["conversations"]), *(percent(cell, engine, "hit_rate") for engine in ENGINES)]
             for cell in found]
    print_rows("prompt tokens that were there, short traces, one conversation at a time", rows)


def print_edits(found):
    rows = [["model", *(f"{text}{place}" for place in EDITS for text in ("Reprise, ", "llama-server, ", "mlx-lm, ")),
             f">= prefix - {ALLOWANCE}", "Reprise, restarted"]]
    for model in found:
        cells = [str(model[place][engine]) if model[place][engine] is not None else "-"
                 for place in EDITS for engine in ENGINES]
        met = all(model[place]["met"] for place in EDITS)
        rows.append([model["model"], *cells, YES_NO[met], str(model["after_restart"])])
    places = " and ".join(f"{at} ({place})" for place, at in EDITS.items())
    print_rows(f"tokens computed of a prompt of {found[0]['prompt']:,} after an edit at {places}", rows)


RUN = {"throughput": throughput, "first_token": first_token, "hit_rates": hit_rates, "edits": edits}
PRINT = {"throughput": print_throughput, "first_token": print_first_token, "hit_rates": print_hit_rates,
         "edits": print_edits}


def numbers(text):
    return [positive(word) for word in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="reprise")
    parser.add_argument("--model", required=True, help="the model that Reprise gets: SmolLM2")
    parser.add_argument("--gemma3", help="Gemma 3 270M, for `edits`")
    parser.add_argument("--peers", required=True, help="the folder that setup.sh has made")
    parser.add_argument("--models", required=True, help="the folder of small models, for `edits`")
    parser.add_argument("--parts", type=words(PARTS), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--engines", type=words(ENGINES), default=list(ENGINES), help=f"of {','.join(ENGINES)}")
    parser.add_argument("--traces", type=words(TRACES), default=list(TRACES), help=f"of {','.join(TRACES)}")
    parser.add_argument("--at-a-time", type=numbers, default=list(TOTALS), help="conversations at a time [1,4,16]")
    parser.add_argument("--total", type=positive, help=f"conversations of a trace [{TOTALS}, by how many at a time]")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the lengths of prompts [1]")
    parser.add_argument("--answer", type=positive, default=64, help="tokens of an answer [64]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=positive, default=1)
    parser.add_argument("--short-total", type=positive, default=3, help="the same for `hit_rates` [3]")
    parser.add_argument("--short-scale", type=float, default=0.05, help="[0.05]")
    parser.add_argument("--short-answer", type=positive, default=4, help="[4]")
    parser.add_argument("--flash-attention", choices=("on", "off", "auto"),
                        help="of llama-server [whichever of on and off is faster]")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0))
                        if hasattr(os, "sched_getaffinity") else os.cpu_count(), help="of each engine [all]")
    parser.add_argument("--idle", type=float, default=0.06, help="share of the processors that may be in use [0.06]")
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for an idle machine [120]")
    parser.add_argument("--force", action="store_true", help="measure whatever else is running")
    parser.add_argument("--json", help="writes {part: figures} there")
    args = parser.parse_args()
    os.environ.pop("REPRISE_NUM_THREADS", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with us

    found = {"threads": args.threads}
    for part in args.parts:
        rows = found[part] = []
        try:
            for row in RUN[part](args):
                rows.append(row)
                if args.json:
                    write_json(args.json, found)
        finally:  # also of what an interrupt ends
            if rows:
                PRINT[part](rows)
                sys.stdout.flush()


if __name__ == "__main__":
    main()
