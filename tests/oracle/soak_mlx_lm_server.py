#!/usr/bin/env python3
"""Soak test of mlx-lm's own server on Reprise's caches: mixed traffic for a given time, memory and answers watched.

Starts `python -m reprise.mlx_lm server …` (with --baseline `python -m mlx_lm server …`) on a loopback port and drives
it from several client threads: chat and text completions, streamed and whole, shared system prompts, conversations
that grow, prompts of one token to several hundred, streams that the client cuts, bad requests, stop words, log
probabilities. Reference requests at temperature 0 are repeated all the time; their tokens and log probabilities must
stay those of the fresh server and of mlx-lm's own generation, whatever the prompt cache has gone through.

    python tests/oracle/soak_mlx_lm_server.py --variant llama --minutes 5            # a tiny random model made here
    python tests/oracle/soak_mlx_lm_server.py --model DIR --minutes 60 --clients 2   # a real one
    python tests/oracle/soak_mlx_lm_server.py --list                                 # the variants

Prints the tallies, the memory at marks, a fitted slope, and a verdict. Memory is *growing* if, after the warm-up (the
first quarter), the fitted line and the lower quartile from the second to the last quarter rise by more than the
allowance, a fourth of it in each of the two steps between these quarters: a single step is no leak. The allowance is
8 MB or 5 % of the resident set; beside what the server's prompt cache holds, 2 MB or 5 % of what malloc has handed out
and 1 MB or 10 % of MLX's active memory. Runs of less than two minutes are not judged.
Exits 1 on growth, a wrong answer, or an unexpected error. Needs mlx-lm 0.32; development only.
"""
import argparse
import http.client
import json
import os
import random
import re
import runpy
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from soak_traffic import Client, Referee, Tally, answer_of, difference, reference_cases

KV8 = ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "16"]
VARIANTS = {  # name: (tiny model or None for --model, draft model or None, flags of mlx-lm's server)
    "llama": ("llama", None, []),
    "llama-bytes": ("llama", None, ["--prompt-cache-size", "6", "--prompt-cache-bytes", "1MB"]),
    "llama-kv8": ("llama", None, KV8 + ["--prompt-cache-size", "40"]),
    "llama-draft": ("llama", "llama_draft", ["--prompt-cache-size", "40"]),
    "sliding": ("sliding", None, ["--prompt-cache-size", "20"]),
    "sliding-kv8": ("sliding", None, KV8),
    "gemma": ("gemma", None, []),
    "hybrid": ("hybrid", None, ["--prompt-cache-size", "6"]),
}
STEP = ["--prefill-step-size", "64"]  # several chunks in most prompts

# Sizes chosen so that a head dimension divides into groups of 32 and windows wrap in the first prompt already.
BASE = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0,
        "bos_token_id": 256, "eos_token_id": 258}
TINY = {
    "llama": BASE | {"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": False},
    "llama_draft": BASE | {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False},
    "sliding": BASE | {"model_type": "llama", "num_hidden_layers": 3, "tie_word_embeddings": False,
                       "sliding_window": 24,
                       "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma": BASE | {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 24,
                     "sliding_window_pattern": 3, "query_pre_attn_scalar": 32, "rope_local_base_freq": 10000.0},
    "hybrid": BASE | {"model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [1, 3], "norm_eps": 1e-5,
                      "hidden_size": 128, "block_dim": 128, "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.0,
                      "block_multiple_of": 8, "block_auto_adjust_ff_dim": True, "conv_L_cache": 3, "conv_bias": False},
}
TEMPLATE = ("{% for message in messages %}"
            "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


# ---- tiny models ----------------------------------------------------------------------------------------------------

def make_tiny(name, folder):
    """Write a model folder with random weights whose answers depend on the whole context; one token per byte."""
    import importlib

    import mlx.core as mx
    from mlx.utils import tree_flatten
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = TINY[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(7 + len(name))
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = {}
    for key, value in tree_flatten(model.parameters()):
        # Attention that tells positions apart, and answers that hang on it: default weights attend almost evenly.
        factor = 3.0 if re.search(r"[qkv]_proj|o_proj|out_proj", key) else 1.0
        weights[key] = mx.random.normal(value.shape) * 0.3 if value.ndim == 1 and "gemma" in name else value * factor
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|endoftext|>",
        "chat_template": TEMPLATE}))
    return folder


# ---- the server process ---------------------------------------------------------------------------------------------

def heap():
    """Bytes that malloc has handed out, in all its arenas; 0 where the C library cannot tell.

    The resident set of a server that starts a thread a request wanders with free pieces in malloc's arenas; this does
    not.
    """
    import ctypes

    class Mallinfo(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = Mallinfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def watch(path, leak_bytes):
    """Thread in the server process: MLX's memory and the server's prompt cache, as one JSON line a second."""
    import gc
    import weakref

    import mlx.core as mx

    # Looked for before the first request, and held weakly: the server destroys its objects in the thread that made
    # them.
    found, kept = None, []
    while found is None:
        time.sleep(0.1)
        if "mlx_lm.server" in sys.modules:
            found = next((weakref.ref(o) for o in gc.get_objects() if type(o).__name__ == "LRUPromptCache"), None)
    with open(path, "a", buffering=1) as out:
        while True:
            kept.append(bytearray(os.urandom(leak_bytes)) if leak_bytes else None)
            store = found()
            line = {"t": time.time(), "active": mx.get_active_memory(), "cache": mx.get_cache_memory(),
                    "peak": mx.get_peak_memory(), "threads": threading.active_count(), "heap": heap()}
            if store is not None:
                line |= {"entries": len(store), "store": store.nbytes,
                         "classes": [type(store).__module__, sys.modules["mlx_lm.models.cache"].KVCache.__module__]}
            del store
            out.write(json.dumps(line) + "\n")
            time.sleep(1)


def serve(argv):
    """Child: `--serve MODULE STATS LEAK server …` runs MODULE as `python -m` does, watched."""
    module, stats, leak, *arguments = argv
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with Ctrl-C ignored
    fill_word_caches()
    threading.Thread(target=watch, args=(stats, int(leak)), daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fill_word_caches():
    """From now on a tokenizer that is loaded has seen 10,000 words. It remembers the first so many (up to 13 MB of
    them), which in mixed traffic takes an hour and looks like a leak."""
    from transformers import AutoTokenizer

    load = AutoTokenizer.from_pretrained

    def load_and_fill(*args, **kwargs):
        tokenizer = load(*args, **kwargs)
        letters = "bcdfghjklmnpqrstvwxz"
        for number in range(10_000):
            word = [letters[number // 20**place % 20] for place in range(4)]
            tokenizer.encode("qx" + "".join(word))
        return tokenizer

    AutoTokenizer.from_pretrained = load_and_fill


def plain(argv):
    """Child: `--plain MODEL CASES KV_BITS` prints tokens and log probabilities of mlx-lm's own generation per case."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    folder, cases, bits = argv[0], json.loads(argv[1]), int(argv[2])
    model, tokenizer = load(folder)
    kv = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 16} if bits else {}
    answers = []
    for path, body in cases:
        if "messages" in body:
            ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=True,
                                                return_dict=False)
        else:
            ids = tokenizer.encode(body["prompt"])
        answer = []
        for token, logprobs in generate_step(mx.array(ids), model, max_tokens=body["max_tokens"], prefill_step_size=64,
                                             **kv):
            answer.append([int(token), logprobs[token].item()])
            if int(token) in tokenizer.eos_token_ids:
                break
        answers.append(answer)
    print(json.dumps(answers))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, args, model, draft, flags, work):
        self.port, self.log, self.stats = free_port(), work / "server.log", work / "stats.jsonl"
        module = "mlx_lm" if args.baseline else "reprise.mlx_lm"
        command = [sys.executable, __file__, "--serve", module, str(self.stats), str(args.leak), "server",
                   "--model", str(model), "--port", str(self.port), *STEP, *flags]
        if draft:
            command += ["--draft-model", str(draft)]
        environment = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", PYTHONFAULTHANDLER="1",
                           TOKENIZERS_PARALLELISM="false")
        self.process = subprocess.Popen(command, stdout=open(self.log, "w"), stderr=subprocess.STDOUT, env=environment)
        end = time.time() + 180
        while True:
            try:
                if self.stats.exists() and self.request("GET", "/health")[0] == 200:
                    break
            except OSError:
                pass
            if self.process.poll() is not None or time.time() > end:
                self.process.kill()
                raise SystemExit(f"the server did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.3)

    def request(self, method, path, body=None, timeout=300):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def memory(self):
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024

    def stop(self):
        """Ctrl-C, as a user would; returns the exit status, None if that did not end it (then the log has stacks)."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            time.sleep(2)
            self.process.kill()
            self.process.wait()
            return None


# ---- memory ---------------------------------------------------------------------------------------------------------

def slope(points):
    """Least squares of y over x; 0 for fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return 0.0
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


def judge(name, samples, least, share, lines):
    """samples: (requests so far, bytes). Returns whether memory grows by the criterion at the top of this file."""
    if len(samples) < 30:
        lines.append(f"{name}: {len(samples)} samples are too few to judge")
        return False
    quarter = len(samples) // 4
    after = samples[quarter:]
    marks = [statistics.quantiles([v for _, v in samples[i * quarter:(i + 1) * quarter]], n=4)[0] for i in range(4)]
    per_request = slope(after)
    fitted, stepped = per_request * (after[-1][0] - after[0][0]), marks[3] - marks[1]
    allowance = max(least, share * marks[1])
    steps = (marks[2] - marks[1], marks[3] - marks[2])
    growing = min(fitted, stepped, *(4 * step for step in steps)) > allowance
    mega = " ".join(f"{m / 1e6:.1f}" for m in marks)
    lines.append(f"{name}: end of warm-up {samples[quarter][1] / 1e6:.1f} MB, end {samples[-1][1] / 1e6:.1f}; lower "
                 f"quartiles of the quarters {mega}; slope {per_request * 1000 / 1e6:+.3f} MB per 1,000 requests, "
                 f"fitted rise {fitted / 1e6:+.2f}, allowed {allowance / 1e6:.2f} MB: "
                 f"{'GROWING' if growing else 'flat'}")
    return growing


def read_stats(path, history):
    """The watcher's lines as (requests at that time, line)."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    result, at = [], 0
    for line in lines:
        while at + 1 < len(history) and history[at + 1][0] <= line["t"]:
            at += 1
        if history and line["t"] >= history[0][0]:
            result.append((history[at][1], line))
    return result


def check_bounds(flags, stats, tally):
    """The store's limits hold at all times (mlx-lm's own exceed theirs)."""
    entries = int(flags[flags.index("--prompt-cache-size") + 1]) if "--prompt-cache-size" in flags else 10
    limit = flags[flags.index("--prompt-cache-bytes") + 1] if "--prompt-cache-bytes" in flags else None
    for _, line in stats:
        if line.get("entries", 0) > entries or (limit and line.get("store", 0) > float(limit.removesuffix("MB")) * 1e6):
            tally.fault(f"the prompt cache holds {line['entries']} entries of {line['store']} bytes: limits {entries}, "
                        f"{limit}")


# ---- main -----------------------------------------------------------------------------------------------------------

def log_faults(text, tally):
    """What the log of the server says went wrong; a client that hangs up is no fault."""
    if "generation thread died" in text:
        tally.fault("log: generation thread died: " + text[text.index("generation thread died"):][:500])
    for leak in re.findall(r"nanobind: leaked.*|Fatal Python error.*|Segmentation fault.*", text):
        tally.fault("log: " + leak)
    for line in text.splitlines():  # lines of several threads are mixed: look at the exceptions only
        if re.match(r"\w[\w.]*(Error|Exception|Exit)\b", line) and \
                not re.match(r"BrokenPipeError|ConnectionResetError|ConnectionAbortedError", line):
            tally.fault("log: " + line)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="llama", choices=list(VARIANTS), help="model and flags (default llama)")
    parser.add_argument("--list", action="store_true", help="print the variants and end")
    parser.add_argument("--model", help="use this model folder with the variant's flags")
    parser.add_argument("--baseline", action="store_true", help="mlx-lm on its own caches")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between a client's requests")
    parser.add_argument("--reference-pause", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--words", type=int, default=60, help="longest ordinary prompt (tiny models: 7 tokens a word)")
    parser.add_argument("--tolerance", type=float, default=5e-3, help="of log probabilities (bfloat16 models: 0.25)")
    parser.add_argument("--no-plain", action="store_true", help="do not compare with mlx-lm's own generation")
    parser.add_argument("--work", help="folder for models, log and samples (default: a temporary one)")
    parser.add_argument("--leak", type=int, default=0, help="bytes the server loses a second: the verdict must notice")
    parser.add_argument("server_flags", nargs="*", help="after --: further flags of mlx-lm's server")
    return parser.parse_args()


def main():
    args = parse()
    if args.list:
        for name, (model, draft, flags) in VARIANTS.items():
            print(f"{name:12} model {model}{f', draft {draft}' if draft else ''} {' '.join(flags)}")
        return 0
    temporary = tempfile.TemporaryDirectory()
    work = Path(args.work or temporary.name).resolve()
    work.mkdir(parents=True, exist_ok=True)
    (work / "stats.jsonl").unlink(missing_ok=True)
    tiny, draft, flags = VARIANTS[args.variant]
    model = Path(args.model) if args.model else make_tiny(tiny, work / tiny)
    draft = draft and (args.model or make_tiny(draft, work / draft))
    flags = flags + args.server_flags
    bits = int(flags[flags.index("--kv-bits") + 1]) if "--kv-bits" in flags else 0
    print(f"{'mlx-lm' if args.baseline else 'reprise'}, {args.variant}, {model.name}, {args.minutes:g} minutes, "
          f"{args.clients} clients, seed {args.seed}, flags {' '.join(STEP + flags)}", flush=True)

    cases, tally = reference_cases(random.Random(args.seed), bits > 0, args.words), Tally()
    expected = None
    if not args.no_plain and not (bits and "sliding" in args.variant):  # mlx-lm cannot quantise a rotating cache
        out = subprocess.run([sys.executable, __file__, "--plain", str(model), json.dumps(cases), str(bits)],
                             capture_output=True, text=True)
        if out.returncode:
            raise SystemExit(f"mlx-lm's own generation failed:\n{out.stderr[-2000:]}")
        expected = json.loads(out.stdout)

    server = Server(args, model, draft, flags, work)
    try:
        answers = []
        for number, (path, body) in enumerate(cases):
            steps, cached = answer_of(server, path, body)
            answers.append(steps)
            if number <= 5 and cached and "messages" not in body:
                tally.fault(f"reference {number}: {cached} tokens cached on a fresh server")
            if expected is not None:
                want = [(token, logprob, 0.0) for token, logprob in expected[number]]
                parted = difference(steps, want, args.tolerance)
                if parted:
                    tally.mismatch(f"reference {number} against mlx-lm's own generation: {parted}")
        start = time.time()
        end = start + 60 * args.minutes
        threads = [Client(i, args, server, tally, end) for i in range(args.clients)]
        threads.append(Referee(args, server, tally, cases, answers, end))
        for thread in threads:
            thread.start()
        resident, history = [], []
        while time.time() < end and server.process.poll() is None:
            time.sleep(max(0.1, min(3, end - time.time())))
            history.append((time.time(), tally.requests))
            resident.append((tally.requests, server.memory()))
            if len(resident) % 20 == 0:
                print(f"  {(time.time() - start) / 60:5.1f} min: {tally.requests} requests, RSS "
                      f"{resident[-1][1] / 1e6:.1f} MB, {len(tally.unexpected)} unexpected, "
                      f"{len(tally.wrong)} wrong", flush=True)
        for thread in threads:
            thread.join(timeout=330)
            if thread.is_alive():
                tally.fault(f"{type(thread).__name__} still waits for an answer after the end")
        if server.process.poll() is not None:
            tally.fault(f"the server ended by itself: {server.process.returncode}")
        elif server.request("GET", "/health")[0] != 200:
            tally.fault("the server says that it is not healthy")
    finally:
        status = server.stop()
    text, ending = server.log.read_text(errors="replace"), ""
    # mlx-lm's server aborts after Ctrl-C on its own caches too: MLX's stream threads are joined by nobody.
    joined_by_nobody = "terminate called without an active exception"
    if status == -signal.SIGABRT and joined_by_nobody in text:
        text, ending = text.split(joined_by_nobody)[0], " (aborts at exit, as mlx-lm alone does)"
    elif status != 0:
        tally.fault(f"exit status of the server after Ctrl-C: {status}")
    log_faults(text, tally)

    stats = read_stats(server.stats, history)
    package = "mlx_lm" if args.baseline else "reprise"
    if not stats or not all(name.split(".")[0] == package for name in stats[-1][1].get("classes", [""])):
        tally.fault(f"the server's caches should be {package}'s, but its last sample is {stats[-1:]}")
    if not args.baseline:
        check_bounds(flags, stats, tally)
    lines = []
    growing = False
    if args.minutes >= 2:
        growing = judge("RSS", resident, 8e6, 0.05, lines)
        beside = [(n, s["active"] - s.get("store", 0)) for n, s in stats]
        in_use = [(n, s["heap"] - s.get("store", 0)) for n, s in stats]
        growing |= judge("malloc beside the prompt cache", in_use, 2e6, 0.05, lines)
        growing |= judge("MLX active beside the prompt cache", beside, 1e6, 0.10, lines)
    report(args, tally, stats, lines, time.time() - start)
    bad = growing or tally.wrong or tally.unexpected
    memory = "GROWING" if growing else "flat" if args.minutes >= 2 else "not judged"
    print(f"verdict: memory {memory}, {len(tally.wrong)} wrong answers, "
          f"{len(tally.unexpected)} unexpected errors{ending}")
    return 1 if bad else 0


def report(args, tally, stats, lines, seconds):
    print(f"{tally.requests} requests in {seconds:.0f} s; {tally.tokens} tokens generated, {tally.prompt_tokens} "
          f"prompt tokens, {tally.cached} of them cached; {tally.references} references, {tally.warm} of them warm")
    for kind, count in sorted(tally.kinds.items()):
        print(f"  {count:7} {kind}")
    for kind, count in sorted(tally.expected.items()):
        print(f"  {count:7} refused, {kind}")
    for text, count in Counter(tally.unexpected).most_common(12):
        print(f"  UNEXPECTED {count} times: {text}")
    for text in tally.wrong[:12]:
        print(f"  WRONG {text}")
    if stats:
        last = stats[-1][1]
        print(f"MLX peak {last['peak'] / 1e6:.1f} MB, its cache {last['cache'] / 1e6:.1f} MB, {last['threads']} "
              f"threads; prompt cache {last.get('entries', '?')} entries, {last.get('store', 0) / 1e6:.2f} MB, at most "
              f"{max(s.get('store', 0) for _, s in stats) / 1e6:.2f} MB")
    print("\n".join(lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    elif sys.argv[1:2] == ["--plain"]:
        plain(sys.argv[2:])
    else:
        sys.exit(main())
