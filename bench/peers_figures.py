"""The figures of peers.py: what is made of the measured numbers, and what is demanded of it. Part of peers.py."""
from dataclasses import dataclass
from typing import Callable, Optional

from peers_jobs import BATCH, DECODE, DEEP, DEEP_PROMPT, MEMORY, MLX_LM, PROMPT, SAVED, TURN, TURN_CACHED

NOISE = 1.02  # by which two figures may differ that are to be equal


@dataclass
class Figure:
    title: str
    unit: str
    values: Callable  # numbers by engine → {engine: value, None where there is none}
    demand: str
    met: Callable  # numbers by engine → bool, None where something is missing
    higher_is_better: bool = True
    goal: Optional[str] = None
    reached: Callable = lambda n: None  # the goal, as `met`


class Missing(Exception):
    pass


class Numbers:
    """n.reprise("decode"), n.llama_cpp("decode"): medians; Missing for what was not measured."""

    def __init__(self, medians):
        self.medians = medians  # engine → name → number

    def of(self, engine, name):
        found = self.medians.get(engine, {}).get(name)
        if found is None:
            raise Missing(name)
        return found

    def reprise(self, name):
        return self.of("reprise", name)

    def llama_cpp(self, name):
        return self.of("llama_cpp", name)

    def mlx_lm(self, name):
        return self.of("mlx_lm", name)


def tried(function, numbers):
    try:
        return function(numbers)
    except Missing:
        return None


def plain(name):
    return lambda n: {engine: tried(lambda n, engine=engine: n.of(engine, name), n)
                      for engine in ("reprise", "llama_cpp", "mlx_lm")}


def ours(function):
    return lambda n: {"reprise": tried(function, n)}


def at_least(name, llama_cpp, mlx_lm=None):
    def met(n):
        good = n.reprise(name) >= llama_cpp * n.llama_cpp(name)
        return good and (mlx_lm is None or n.reprise(name) >= mlx_lm * n.mlx_lm(name))
    return met


def save_load_share(n):
    return 100 * (n.reprise("save_load.save") + n.reprise("save_load.load")) / n.reprise("save_load.prefill")


def bandwidth_share(n):
    return 100 * n.reprise("decode") * n.reprise("weights_nbytes") / (n.reprise("stream") * 1e9)


def llama_bandwidth_share(n):
    return 100 * n.llama_cpp("decode") * n.llama_cpp("model_size") / (n.reprise("stream") * 1e9)


def gemm_share(n):
    return 100 * n.reprise("gemm") / n.reprise("gemm.openblas")


def slowdown(engine):
    return lambda n: n.of(engine, "two_processes.alone") / n.of(engine, "two_processes.together")


def second_turn_is_cheap(n):
    warm = n.reprise("ttft_second_turn")
    return warm <= 2 * n.reprise("ttft_second_turn.empty") and warm <= 0.03 * n.reprise("ttft_second_turn.cold")


FIGURES = {
    "decode": Figure(
        f"decode, {DECODE} tokens", "tokens/s", plain("decode"),
        ">= 1.5 x llama.cpp, 20 x mlx-lm", at_least("decode", 1.5, 20),
        goal="1.7 x llama.cpp", reached=at_least("decode", 1.7)),
    "prefill": Figure(
        f"prefill, {PROMPT} tokens", "tokens/s", plain("prefill"),
        ">= 2 x llama.cpp, 35 x mlx-lm", at_least("prefill", 2, 35),
        goal="3.2 x llama.cpp", reached=at_least("prefill", 3.2)),
    "decode_4k": Figure(
        f"decode after {DEEP:,} tokens", "tokens/s", plain("decode_4k"),
        ">= 2 x llama.cpp", at_least("decode_4k", 2),
        goal="3 x llama.cpp", reached=at_least("decode_4k", 3)),
    "decode_4k_q8": Figure(
        f"the same, 8-bit keys/values", "tokens/s", plain("decode_4k_q8"),
        ">= 2 x llama.cpp, no slower than float16",
        lambda n: at_least("decode_4k_q8", 2)(n) and n.reprise("decode_4k_q8") * NOISE >= n.reprise("decode_4k"),
        goal="3 x llama.cpp", reached=at_least("decode_4k_q8", 3)),
    "prefill_4k": Figure(
        f"prefill of {DEEP_PROMPT} after {DEEP:,}", "tokens/s", plain("prefill_4k"),
        ">= 2 x llama.cpp", at_least("prefill_4k", 2),
        goal="3 x llama.cpp", reached=at_least("prefill_4k", 3)),
    "decode_batch8": Figure(
        f"decode, {BATCH} sequences together", "tokens/s", plain("decode_batch8"),
        ">= 4 x one sequence", lambda n: n.reprise("decode_batch8") >= 4 * n.reprise("decode")),
    "ttft_second_turn": Figure(
        f"first token, {TURN} new after {TURN_CACHED:,}", "ms", plain("ttft_second_turn"),
        "<= 2 x the same on an empty cache, <= 3 % of cold", second_turn_is_cheap, higher_is_better=False),
    "load": Figure(
        "process start to one token", "s", plain("load"),
        "<= llama.cpp", lambda n: n.reprise("load") <= n.llama_cpp("load"), higher_is_better=False),
    "peak_memory": Figure(
        f"peak memory, {MEMORY:,} tokens", "MiB", plain("peak_memory"),
        "<= 1.1 x llama.cpp", lambda n: n.reprise("peak_memory") <= 1.1 * n.llama_cpp("peak_memory"),
        higher_is_better=False),
    "save_load": Figure(
        f"save + load of {SAVED:,} tokens", "% of prefill", ours(save_load_share),
        "<= 5 %", lambda n: save_load_share(n) <= 5, higher_is_better=False),
    "bandwidth_share": Figure(
        "decode's share of the memory rate", "%",
        lambda n: {"reprise": tried(bandwidth_share, n), "llama_cpp": tried(llama_bandwidth_share, n)},
        ">= 50 %", lambda n: bandwidth_share(n) >= 50, goal="60 %", reached=lambda n: bandwidth_share(n) >= 60),
    "gemm_share": Figure(
        "prefill's linear layers, of OpenBLAS", "%", ours(gemm_share),
        ">= 70 %", lambda n: gemm_share(n) >= 70, goal="130 %", reached=lambda n: gemm_share(n) >= 130),
    "two_processes": Figure(
        "two processes at once: slowdown of each", "x",
        lambda n: {engine: tried(slowdown(engine), n) for engine in ("reprise", "llama_cpp")},
        "<= llama.cpp", lambda n: slowdown("reprise")(n) <= slowdown("llama_cpp")(n) * NOISE, higher_is_better=False),
}


def results(medians, names):
    """A list of one dictionary per figure: its id as `figure`, a number or None for each engine, and what it means."""
    numbers = Numbers(medians)
    found = []
    for name in names:
        figure = FIGURES[name]
        values = {engine: None for engine in ("reprise", "llama_cpp", "mlx_lm")}
        values.update(figure.values(numbers))
        own = values["reprise"]
        ratio = {engine: own / values[engine] for engine in ("llama_cpp", "mlx_lm")
                 if own is not None and values[engine] is not None}
        found.append({"figure": name, **values, "unit": figure.unit, "title": figure.title,
                      "higher_is_better": figure.higher_is_better, "ratio": ratio, "demand": figure.demand,
                      "met": tried(figure.met, numbers), "goal": figure.goal,
                      "goal_met": tried(figure.reached, numbers)})
    return found


def parts_text(medians):
    """What the figures that are made of several numbers were made of."""
    n = Numbers(medians)
    lines = [
        lambda n: f"ttft_second_turn: {n.reprise('ttft_second_turn'):.1f} ms; the same {TURN} tokens on an empty cache "
                  f"{n.reprise('ttft_second_turn.empty'):.1f} ms; all {TURN_CACHED + TURN:,} cold "
                  f"{n.reprise('ttft_second_turn.cold'):.0f} ms",
        lambda n: f"load: llama.cpp as a benchmark of one token {n.llama_cpp('load/bench'):.3f} s, as a server that "
                  f"answers one {n.llama_cpp('load/server'):.3f} s; the better counts",
        lambda n: f"save_load: prefill {n.reprise('save_load.prefill'):.3f} s, save {n.reprise('save_load.save'):.3f} s, "
                  f"load {n.reprise('save_load.load'):.3f} s",
        lambda n: f"bandwidth_share: {n.reprise('weights_nbytes') / 1e6:.1f} MB a token, memory read at "
                  f"{n.reprise('stream'):.1f} GB/s (bench/stream.cpp)",
        lambda n: f"gemm_share: {n.reprise('gemm'):.1f} GOP/s beside OpenBLAS' {n.reprise('gemm.openblas'):.1f} GFLOP/s "
                  "(bench/gemm.cpp)",
        lambda n: f"two_processes: Reprise {n.reprise('two_processes.alone'):.1f} alone, "
                  f"{n.reprise('two_processes.together'):.1f} tokens/s each of two; llama.cpp "
                  f"{n.llama_cpp('two_processes.alone'):.1f} and {n.llama_cpp('two_processes.together'):.1f}",
    ]
    found = [text for text in (tried(line, n) for line in lines) if text]
    if n.medians.get("mlx_lm"):
        found.append(f"mlx-lm got fewer tokens (prefill {MLX_LM['prompt']}, decode {MLX_LM['decode']}) and one round")
    return found
