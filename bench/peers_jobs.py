"""What peers.py runs: jobs, each of one engine, each giving numbers by name. Part of peers.py.

A name is `figure` or `figure.part`; llama.cpp's end in the way they were reached (`decode/fa0`): the best way counts.
Counts of tokens and all else that the engines share are here, so that nobody gets another task than the others.
"""
import http.client
import json
import os
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Callable

from peers_machine import Child, fail, json_of, output_of

ENGINES = ("reprise", "llama_cpp", "mlx_lm")
NAMES = dict(reprise="Reprise", llama_cpp="llama.cpp", mlx_lm="mlx-lm")
PROMPT = 512
DECODE = 64
DEEP = 4000
DEEP_PROMPT = 64
BATCH = 8
TWO_SECONDS = 60  # for two processes at once, which some engines do not finish
TURN, TURN_CACHED = 16, 2000
MEMORY = 4096
SAVED = 2000
MLX_LM = dict(prompt=64, decode=8)  # it takes minutes for what the others do in seconds


@dataclass
class Job:
    engine: str
    figures: set  # that need it
    run: Callable  # args, the names that need not be measured again → {name: number}
    rounds: str = "all"  # "all", "deep" (some), "once"
    ways: dict = field(default_factory=dict)  # name → its ways, of which slow ones are left out after the first round

    def __str__(self):
        return f"{', '.join(sorted(self.figures))}: {NAMES[self.engine]}"


# --- Reprise ---------------------------------------------------------------------------------------------------------

def bench(args, prompt, decode, depth=0, repeat=3, more=()):
    return json_of([args.program, "bench", "--model", args.model, "--threads", args.threads, "--prompt", prompt,
                    "--decode", decode, "--depth", depth, "--repeat", repeat, "--json", *more])


def reprise_decode(args, _):
    found = bench(args, 1, DECODE)
    return {"decode": found["decode_tps"], "weights_nbytes": found["weights_nbytes"], "target": found["target"]}


def reprise_second_turn(args, _):
    return {"ttft_second_turn": bench(args, TURN, 0, depth=TURN_CACHED, repeat=5)["ttft_ms"],
            "ttft_second_turn.empty": bench(args, TURN, 0, repeat=5)["ttft_ms"],
            "ttft_second_turn.cold": bench(args, TURN_CACHED + TURN, 0, repeat=1)["ttft_ms"]}


def reprise_load(args, _):
    seconds = [Child([args.program, "generate", "--model", args.model, "--threads", args.threads, "--prompt", "hello",
                      "--ignore-chat-template", "--max-tokens", 1, "--temp", 0]).end()[1] for _ in range(3)]
    return {"load": statistics.median(seconds)}


def reprise_peak_memory(args, _):
    command = [args.program, "bench", "--model", args.model, "--threads", args.threads, "--prompt", MEMORY, "--decode",
               0, "--repeat", 1, "--json"]
    return {"peak_memory": Child(command).end()[2] / 2**20}


def reprise_save_load(args, _):
    found = json_of([f"{args.programs}/save_load", "--model", args.model, "--tokens", SAVED, "--threads", args.threads,
                     "--folder", args.programs])
    return {f"save_load.{part}": found[f"{part}_s"] for part in ("prefill", "save", "load")}


def stream(args, _):
    return {"stream": json_of([f"{args.programs}/stream", "--threads", args.threads])["gb_per_s"]}


def gemm(args, _):
    found = json_of([f"{args.programs}/gemm", "--threads", args.threads])
    return {"gemm": found["reprise_gflops"], "gemm.openblas": found["openblas_gflops"]}


def reprise_two(args, _):
    command = [args.program, "bench", "--model", args.model, "--threads", args.threads, "--prompt", 1, "--decode", 128,
               "--repeat", 4, "--json"]
    return two_at_once(command, lambda text: json.loads(text.splitlines()[-1])["decode_tps"], 4 * 128)


def two_at_once(command, speed_of, tokens):
    alone = speed_of(output_of(command))
    both = [Child(command, TWO_SECONDS) for _ in range(2)]
    speeds = []
    for child in both:
        text = child.end(may_time_out=True)[0]
        # One that does not end is slower than its tokens over that time.
        speeds.append(tokens / TWO_SECONDS if text is None else speed_of(text))
    return {"two_processes.alone": alone, "two_processes.together": statistics.mean(speeds)}


# --- llama.cpp -------------------------------------------------------------------------------------------------------

def llama_command(args, *more):
    return [f"{args.peers}/bin/llama-bench", "-m", f"{args.peers}/smollm2.gguf", "-t", args.threads, "-o", "json", *more]


def median_speed(run):
    return statistics.median(run["samples_ts"])


def llama_bench(args, skip, tests, more=(), kinds=(0, 1)):
    """tests: name → (-p, -n). Each with flash attention off and on, but for what `skip` names."""
    found = {}
    for kind in kinds:
        wanted = {name: test for name, test in tests.items() if f"{name}/fa{kind}" not in skip}
        if not wanted:
            continue
        prompts = [str(p) for p, n in wanted.values() if p] or ["0"]
        decodes = [str(n) for p, n in wanted.values() if n] or ["0"]
        runs = json.loads(output_of(llama_command(args, "-p", ",".join(prompts), "-n", ",".join(decodes), "-fa", kind,
                                                  *more)))
        for name, (p, n) in wanted.items():
            run = [run for run in runs if run["n_prompt"] == p and run["n_gen"] == n][0]
            found[f"{name}/fa{kind}"] = median_speed(run)
            found["model_size"] = run["model_size"]
    return found


def llama_fast(args, skip):
    return llama_bench(args, skip, {"decode": (0, DECODE), "prefill": (PROMPT, 0)}, ("-r", "3"))


def llama_deep(args, skip):
    return llama_bench(args, skip, {"decode_4k": (0, DECODE), "prefill_4k": (DEEP_PROMPT, 0)},
                       ("-d", str(DEEP), "-r", "2"))


def llama_deep_q8(args, skip):
    # Quantised values need flash attention.
    return llama_bench(args, skip, {"decode_4k_q8": (0, DECODE)},
                       ("-d", str(DEEP), "-r", "2", "-ctk", "q8_0", "-ctv", "q8_0"), kinds=(1,))


def llama_second_turn(args, skip):
    speeds = llama_bench(args, skip, {"ttft_second_turn": (TURN, 0)}, ("-d", str(TURN_CACHED), "-r", "3"), kinds=(0,))
    return {"ttft_second_turn": 1e3 * TURN / speeds["ttft_second_turn/fa0"]}


def llama_load(args, _):
    # The fairest: the whole process of a benchmark that decodes one token, without warm-up.
    seconds = [Child(llama_command(args, "-p", 0, "-n", 1, "-r", 1, "--no-warmup")).end()[1] for _ in range(3)]
    return {"load/bench": statistics.median(seconds),
            "load/server": statistics.median(server_seconds(args) for _ in range(2))}


def server_seconds(args):
    """From the start of llama-server until it has answered one token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = json.dumps({"prompt": [28120], "n_predict": 1, "temperature": 0})
    child = Child([f"{args.peers}/bin/llama-server", "-m", f"{args.peers}/smollm2.gguf", "-t", args.threads, "-c", 512,
                   "--no-warmup", "--host", "127.0.0.1", "--port", port])
    try:
        while time.perf_counter() - child.started < 60:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                if answer.status == 200 and answer.read():
                    return time.perf_counter() - child.started
            except OSError:
                pass  # it does not listen yet
            finally:
                connection.close()
            time.sleep(0.003)
        fail("llama-server did not answer within a minute")
    finally:
        child.timer.cancel()
        child.process.kill()
        child.process.wait()


def llama_peak_memory(args, _):
    return {f"peak_memory/fa{kind}": Child(llama_command(args, "-p", MEMORY, "-n", 0, "-r", 1, "--no-warmup", "-fa",
                                                         kind)).end()[2] / 2**20 for kind in (0, 1)}


def llama_two(args, _):
    return two_at_once(llama_command(args, "-p", 0, "-n", 64, "-r", 2),
                       lambda text: median_speed(json.loads(text)[0]), 2 * 64)


# --- mlx-lm ----------------------------------------------------------------------------------------------------------

def mlx_lm(args, _):
    found = json_of([sys.executable, args.mlx_lm_bench, f"{args.peers}/smollm2-mlx", "--prompt", MLX_LM["prompt"],
                     "--decode", MLX_LM["decode"]])
    return {"prefill": found["prefill_tps"], "decode": found["decode_tps"]}


def ways(*names):
    return {name: [f"{name}/fa0", f"{name}/fa1"] for name in names}


JOBS = [
    Job("reprise", {"decode", "decode_batch8", "bandwidth_share"}, reprise_decode),
    Job("llama_cpp", {"decode", "prefill", "bandwidth_share"}, llama_fast, ways=ways("decode", "prefill")),
    Job("reprise", {"prefill"}, lambda args, _: {"prefill": bench(args, PROMPT, 0)["prefill_tps"]}),
    Job("reprise", {"bandwidth_share"}, stream),
    Job("reprise", {"decode_batch8"},
        lambda args, _: {"decode_batch8": bench(args, 1, DECODE, more=["--batch", BATCH])["decode_tps"]}),
    Job("reprise", {"gemm_share"}, gemm),
    Job("reprise", {"load"}, reprise_load),
    Job("llama_cpp", {"load"}, llama_load),
    Job("reprise", {"decode_4k", "decode_4k_q8"},
        lambda args, _: {"decode_4k": bench(args, 1, DECODE, DEEP)["decode_tps"]}, "deep"),
    Job("reprise", {"decode_4k_q8"},
        lambda args, _: {"decode_4k_q8": bench(args, 1, DECODE, DEEP, more=["--kv-bits", 8])["decode_tps"]}, "deep"),
    Job("reprise", {"prefill_4k"},
        lambda args, _: {"prefill_4k": bench(args, DEEP_PROMPT, 0, DEEP)["prefill_tps"]}, "deep"),
    Job("llama_cpp", {"decode_4k", "prefill_4k"}, llama_deep, "deep", ways("decode_4k", "prefill_4k")),
    Job("llama_cpp", {"decode_4k_q8"}, llama_deep_q8, "once"),
    Job("reprise", {"ttft_second_turn"}, reprise_second_turn, "deep"),
    Job("llama_cpp", {"ttft_second_turn"}, llama_second_turn, "once"),
    Job("reprise", {"peak_memory"}, reprise_peak_memory, "once"),
    Job("llama_cpp", {"peak_memory"}, llama_peak_memory, "once"),
    Job("reprise", {"save_load"}, reprise_save_load, "once"),
    Job("reprise", {"two_processes"}, reprise_two, "once"),
    Job("llama_cpp", {"two_processes"}, llama_two, "once"),
    Job("mlx_lm", {"decode", "prefill"}, mlx_lm, "once"),
]
