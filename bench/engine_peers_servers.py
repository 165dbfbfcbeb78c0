"""The engines of engine_peers.py: each answers token ids, and tells how many of a prompt's tokens it had. Part of it.

Reprise replays a trace in its own process (`reprise bench engine`); the others are servers, and the client here replays
the same trace in the same order: so many conversations at a time, a thread each, that do little but wait.
"""
import http.client
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time

from peers_machine import Child, fail

SECONDS = 1800  # that a replay may take
STARTING = 120  # that a server may take until it answers


# --- traces ----------------------------------------------------------------------------------------------------------

def read_trace(lines):
    """[(conversation, [turn, …])], in the order in which conversations begin."""
    conversations = {}
    for line in lines.splitlines():
        turn = json.loads(line)
        conversations.setdefault(turn["conversation"], []).append(turn)
    return list(conversations.items())


def trace_lines(trace):
    return "".join(json.dumps({**turn, "conversation": name}) + "\n" for name, turns in trace for turn in turns)


def prompt_of(turn, said):
    if "prompt_tokens" in turn:
        return list(turn["prompt_tokens"])
    return said[turn.get("after", len(said) - 1)] + turn["new_tokens"]


def longest(trace):
    """Tokens of the longest conversation."""
    most = 0
    for _, turns in trace:
        lengths = []
        for turn in turns:
            before = 0 if "prompt_tokens" in turn else lengths[turn.get("after", len(lengths) - 1)]
            lengths.append(before + len(turn.get("prompt_tokens", turn.get("new_tokens"))) + turn["max_tokens"])
        most = max(most, *lengths)
    return most


# --- figures ---------------------------------------------------------------------------------------------------------

def percentile(values, percent):
    """The nearest rank, as `reprise bench engine` takes it."""
    values = sorted(values)
    return values[max(0, -(-len(values) * percent // 100) - 1)] if values else 0.0


def figures_of(requests, seconds):
    """What `reprise bench engine --json` tells, of requests that a client has seen."""
    prompts, cached = sum(r["prompt_tokens"] for r in requests), sum(r["cached_tokens"] for r in requests)
    answers = sum(r["completion_tokens"] for r in requests)
    first = [r["ttft_ms"] for r in requests]
    gaps = [gap for r in requests for gap in r.pop("gaps_ms")]
    return {"requests": len(requests), "wall_s": seconds, "prompt_tokens": prompts, "cached_tokens": cached,
            "completion_tokens": answers, "hit_rate": cached / prompts if prompts else 0.0,
            "completion_tps": answers / seconds, "prompt_tps": prompts / seconds,
            "ttft_ms": {f"p{p}": percentile(first, p) for p in (50, 90, 99)},
            "inter_token_ms": {f"p{p}": percentile(gaps, p) for p in (50, 90, 99)}, "each": requests}


def replay(server, trace, at_a_time):
    waiting, lock, done, failures = iter(enumerate(trace)), threading.Lock(), {}, []

    def talk():
        while not failures:
            with lock:
                place, (name, turns) = next(waiting, (None, (None, None)))
            if turns is None:
                return
            said = []
            try:
                for number, turn in enumerate(turns):
                    prompt = prompt_of(turn, said)
                    found, answer = server.ask(prompt, turn["max_tokens"])
                    done[place, number] = {"conversation": name, "turn": number, **found}
                    said.append(prompt + answer)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                failures.append(f"{name}, turn {number}: {error!r}")

    clients = [threading.Thread(target=talk) for _ in range(min(at_a_time, len(trace)))]
    started = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    seconds = time.perf_counter() - started
    if failures:
        fail(f"{server.name}: {failures[0]}")
    return figures_of([done[key] for key in sorted(done)], seconds)


# --- Reprise ---------------------------------------------------------------------------------------------------------

def reprise(args, trace, at_a_time, model=None, more=()):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(trace_lines(trace))
        file.flush()
        command = [args.program, "bench", "engine", "--model", model or args.model, "--threads", args.threads,
                   "--trace", file.name, "--conversations", at_a_time, "--json", "--each-request", *more]
        return json.loads(Child(command, SECONDS).end()[0].splitlines()[-1])


def made_trace(args, name, total, scale=1.0, answer=64, seed=0):
    """What `reprise bench engine` makes for the model, with answers of that length."""
    command = [args.program, "bench", "engine", "--model", args.model, "--trace", name, "--total", total,
               "--scale", scale, "--max-tokens", answer, "--seed", seed, "--export", "-"]
    return read_trace(Child(command).end()[0])


# --- servers ---------------------------------------------------------------------------------------------------------

def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """A server that has been started; leaving the `with` block ends it."""

    def __init__(self, command, health):
        self.port = free_port()
        self.child = Child([*command, "--host", "127.0.0.1", "--port", self.port], SECONDS)
        until = time.monotonic() + STARTING
        while True:
            if self.child.process.poll() is not None or time.monotonic() > until:
                text = Child.text(self.child.err).strip()[-500:]
                self.__exit__()
                fail(f"{self.name} does not start: {text}")
            try:
                if self.post_or_get("GET", health).status == 200:
                    return
            except OSError:
                pass  # it does not listen yet
            time.sleep(0.02)

    def post_or_get(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        return connection.getresponse()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.timer.cancel()
        self.child.process.kill()
        self.child.process.wait()


class LlamaServer(Server):
    name = "llama-server"

    def __init__(self, args, slots, context, model=None, more=()):
        super().__init__([f"{args.peers}/bin/llama-server", "-m", model or f"{args.peers}/smollm2.gguf", "-t",
                          args.threads, "-np", slots, "-c", context, "--kv-unified", *more], "/health")

    def ask(self, prompt, count):
        """What happened, and the answer's tokens."""
        begun = time.perf_counter()
        response = self.post_or_get("POST", "/completion", {
            "prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": True,
            "stream": True, "return_tokens": True})
        if response.status != 200:
            raise ValueError(response.read()[:300])
        times, answer, last = [], [], {}
        for line in response:
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            last = json.loads(line[6:])
            if last.get("tokens"):
                answer += last["tokens"]
                times.append(now)
        computed = last["timings"]["prompt_n"]
        return {"prompt_tokens": len(prompt), "cached_tokens": len(prompt) - computed, "completion_tokens": len(answer),
                "ttft_ms": (times[0] - begun) * 1e3 if times else 0.0,
                "gaps_ms": [(b - a) * 1e3 for a, b in zip(times, times[1:])]}, answer


class MlxLmServer(Server):
    """It takes and gives text, and ends an answer where the model does: good for how much of a prompt it had."""
    name = "mlx_lm.server"

    def __init__(self, args):
        from tokenizers import Tokenizer
        folder = f"{args.peers}/smollm2-mlx"
        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        super().__init__([sys.executable, "-m", "mlx_lm", "server", "--model", folder], "/health")

    def ask(self, prompt, count):
        begun = time.perf_counter()
        response = self.post_or_get("POST", "/v1/completions", {
            "prompt": self.tokenizer.decode(prompt, skip_special_tokens=False), "max_tokens": count, "temperature": 0})
        if response.status != 200:
            raise ValueError(response.read()[:300])
        found = json.loads(response.read())
        usage = found["usage"]
        answer = self.tokenizer.encode(found["choices"][0]["text"], add_special_tokens=False).ids
        return {"prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
                "completion_tokens": usage["completion_tokens"], "ttft_ms": (time.perf_counter() - begun) * 1e3,
                "gaps_ms": []}, answer


def median_of(requests, wanted):
    """The median time to the first token of those requests, or none."""
    values = [r["ttft_ms"] for r in requests if wanted(r)]
    return statistics.median(values) if values else None
