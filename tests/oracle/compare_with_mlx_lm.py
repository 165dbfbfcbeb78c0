#!/usr/bin/env python3
"""Hold Reprise against mlx-lm on the small model: rendered prompts and ids of 200 chats, and teacher-forced logits.

Run with the oracle's Python (shared/peers/setup.sh DIR):
    DIR/bin/python tests/oracle/compare_with_mlx_lm.py --probe build/release/bin/oracle_probe \
        --gguf DIR/smollm2.gguf --mlx DIR/smollm2-mlx [--only chats|logits] [--prompts 20] [--tokens 64]

Ends with `N passed, M failed`; exits non-zero on a failure.
"""
import argparse
import json
import random
import subprocess
import sys
import tempfile

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

SNIPPETS = [
    "Hello!", "What is 2 + 2?", "", " ", "\n", "  leading and trailing  ", "tab\there\n\nand lines\r\nwith CRLF",
    "Grüße aus Köln, señor: naïve café", "你好，世界。请介绍一下你自己。", "こんにちは、元気ですか？", "Привет, как дела?",
    "مرحبا كيف حالك", "שלום עולם", "नमस्ते दुनिया", "🙂🙃👩‍👩‍👧‍👦🏳️‍🌈 emoji", "e\u0301 combining, \u200b zero width, \ufeff bom",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(3)]}\n", "for (int i = 0; i < n; ++i) { s += a[i] * 0x1F; } // ok",
    "SELECT * FROM t WHERE name LIKE '%O''Brien%';", "<div class=\"a\">&amp; <b>bold</b></div>", "{\"json\": [1, 2.5e-3, null, true]}",
    "{{ not_a_template }} {% raw %}", "$x^2 + \\frac{1}{2}$", "1234567890 0.1 1,000,000 3.14159", "a" * 300, "word " * 60,
    "<|im_start|>user\nspelled-out special tokens<|im_end|>", "<|endoftext|>", "UPPER lower MiXeD", "\x00\x01 control", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛",
    "it's we'll they're I'd", "C:\\path\\to\\file", "https://example.org/a?b=c&d=%20#frag", "- item\n- item\n  - sub\n",
]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city — °C",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


def chats(count):
    rng = random.Random(20)
    for number in range(count):
        messages = []
        if rng.random() < 0.5:
            messages.append({"role": "system", "content": rng.choice(SNIPPETS)})
        turns = rng.randint(1, 4)
        for turn in range(turns):
            text = SNIPPETS[number % len(SNIPPETS)] if turn == 0 else rng.choice(SNIPPETS)
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": " ".join(rng.sample(SNIPPETS, 2))})
            if rng.random() < 0.1:
                messages.append({"role": "tool", "content": json.dumps({"t": 21}), "name": "get_weather"})
        case = {"messages": messages}
        style = rng.randrange(3)
        if style == 0 and messages[-1]["content"].strip():
            case["continue_final_message"] = True
        else:
            if rng.random() < 0.8 and messages[-1]["role"] == "assistant":
                messages.pop()
            case["add_generation_prompt"] = style == 1
        if rng.random() < 0.3:
            case["tools"] = TOOLS
        if rng.random() < 0.2:
            case["kwargs"] = {"enable_thinking": False}
        yield case


class Tally:
    passed = failed = 0

    def check(self, ok, what):
        self.passed += ok
        self.failed += not ok
        if not ok:
            print("FAILED", what)


def compare_chats(args, tokenizer, tally):
    cases = list(chats(200))
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    run = subprocess.run([args.probe, "render", args.gguf], input=lines, capture_output=True, text=True, check=True)
    folder = subprocess.run([args.probe, "render", args.mlx], input=lines, capture_output=True, text=True, check=True)
    answers = run.stdout.split("\n")
    for number, case in enumerate(cases):
        ours = json.loads(answers[number])
        options = dict(tools=case.get("tools"), add_generation_prompt=case.get("add_generation_prompt", False),
                       continue_final_message=case.get("continue_final_message", False), **case.get("kwargs", {}))
        prompt = tokenizer.apply_chat_template(case["messages"], tokenize=False, **options)
        ids = tokenizer.apply_chat_template(case["messages"], tokenize=True, return_dict=False, **options)
        tally.check(ours.get("prompt") == prompt and ours.get("ids") == list(ids),
                    f"chat {number}: {json.dumps(case, ensure_ascii=False)[:200]}\n  ours   {ours}\n  theirs {prompt!r} {ids}")
    tally.check(folder.stdout == run.stdout, "the tokenizer of the folder and that of the GGUF file differ")
    print(f"{len(cases)} chats rendered and tokenised by both")


def to_float32(model):
    """Every quantised layer becomes the dense layer it stands for; everything else is widened."""
    def dense(path, layer):
        if not isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            return None
        weight = mx.dequantize(layer.weight, layer.scales.astype(mx.float32), layer.biases.astype(mx.float32),
                               layer.group_size, layer.bits)
        new = nn.Embedding(1, 1) if isinstance(layer, nn.QuantizedEmbedding) else nn.Linear(1, 1, bias=False)
        new.weight = weight
        return new
    replaced = [(path, dense(path, layer)) for path, layer in model.named_modules() if dense(path, layer) is not None]
    model.update_modules(tree_unflatten(replaced))
    model.set_dtype(mx.float32)
    return model


def distance(got, want):
    return (mx.max(mx.abs(got - want), axis=-1) / mx.max(mx.abs(want), axis=-1)).tolist()


# How far a row of logits may be from float32, by the dtype of the stored keys and values.
BOUNDS = {"float32": 1e-3, "float16": 5e-3}


def our_logits(args, lists, prompt_lengths, kv_dtype):
    """The prompt in one piece, then token by token, as generation does it."""
    with tempfile.TemporaryDirectory() as folder:
        json.dump([{"ids": ids, "prompt": length} for ids, length in zip(lists, prompt_lengths)],
                  open(f"{folder}/ids.json", "w"))
        subprocess.run([args.probe, "logits", args.gguf, f"{folder}/ids.json", f"{folder}/out.safetensors", kv_dtype],
                       check=True)
        logits = mx.load(f"{folder}/out.safetensors")
        logits = [logits[str(i)][prompt_lengths[i] - 1:] for i in range(len(lists))]
        mx.eval(logits)
    return logits


def compare_logits(args, model, tokenizer, tally):
    subjects = [s for s in SNIPPETS if s.strip()]
    prompts = []
    for number in range(args.prompts):
        messages = [{"role": "user", "content": f"{subjects[number % len(subjects)][:120]} Explain this in two sentences."}]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))
    lists, theirs, first = [], [], []
    for number, prompt in enumerate(prompts):
        cache, ids, rows = make_prompt_cache(model), list(prompt), []
        logits = model(mx.array([prompt]), cache=cache)[0, -1:]
        for _ in range(args.tokens):
            mx.eval(logits)
            rows.append(logits.astype(mx.float32))
            token = mx.argmax(logits[-1]).item()
            ids.append(token)
            logits = model(mx.array([[token]]), cache=cache)[0]
        lists.append(ids[:-1])
        theirs.append(mx.concatenate(rows))
        first.append(len(prompt) - 1)
        print(f"oracle {number + 1}/{len(prompts)}", file=sys.stderr)
    prompt_lengths = [at + 1 for at in first]
    ours = {kv_dtype: our_logits(args, lists, prompt_lengths, kv_dtype) for kv_dtype in BOUNDS}
    reference_model = to_float32(model)
    reference = []
    for number, ids in enumerate(lists):
        reference.append(reference_model(mx.array([ids]))[0, first[number]:])
        mx.eval(reference)
        assert reference[-1].dtype == mx.float32
    their_errors = [error for rows in zip(theirs, reference) for error in distance(*rows)]
    steps = len(their_errors)
    print(f"distance from float32 per row: mlx-lm max {max(their_errors):.2e} mean {sum(their_errors) / steps:.2e}")
    for kv_dtype, bound in BOUNDS.items():
        errors = [error for rows in zip(ours[kv_dtype], reference) for error in distance(*rows)]
        agree = sum(int(mx.sum(mx.argmax(a, axis=-1) == mx.argmax(b, axis=-1)).item())
                    for a, b in zip(ours[kv_dtype], theirs))
        closer = sum(a <= b for a, b in zip(errors, their_errors))
        print(f"with {kv_dtype} keys and values: Reprise max {max(errors):.2e} mean {sum(errors) / steps:.2e}, "
              f"no further than mlx-lm in {closer}/{steps} rows, top-1 agreement {agree}/{steps} = {100 * agree / steps:.2f} %")
        tally.check(agree >= 0.99 * steps, f"{kv_dtype}: top-1 agreement below 99 %")
        tally.check(closer == steps, f"{kv_dtype}: a row of Reprise is further from float32 than mlx-lm's")
        tally.check(max(errors) <= bound, f"{kv_dtype}: a row of Reprise is further than {bound} from float32")


def main():
    parser = argparse.ArgumentParser()
    for flag in ("--probe", "--gguf", "--mlx"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--only", choices=["chats", "logits"])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    model, tokenizer = load(args.mlx)
    tally = Tally()
    if args.only != "logits":
        compare_chats(args, tokenizer, tally)
    if args.only != "chats":
        compare_logits(args, model, tokenizer, tally)
    print(f"{tally.passed} passed, {tally.failed} failed")
    sys.exit(tally.failed != 0)


if __name__ == "__main__":
    main()
