#!/usr/bin/env python3
"""Hold Reprise against llama.cpp on one GGUF file: ids and decoded texts, rendered chats, the likeliest next token.

    tests/oracle/compare_with_llama_cpp.py --server LLAMA_SERVER --probe build/release/bin/oracle_probe --model FILE.gguf \
        [--only ids|chats|top] [--texts 4000] [--prompts 20] [--tokens 64] [--temperature 0] [--chat-template NAME] [--golden OUT.json]

With --golden OUT.json, `ids` writes what tests/data/text/gemma3.json is: llama.cpp's ids of --texts texts; `top` writes the
ids that were fed and llama.cpp's likeliest.

--server-model FILE: what llama.cpp loads in place of --model. With quantised weights it rounds activations to 8 bits, which
moves the likeliest token in 3 of 100 places; with the same weights unpacked (unpack_gguf.py) it is near exact.

Starts llama-server on one thread and ends it. `top` feeds both the same text, token by token, and counts at how many
places both have the same likeliest next token (at least --least percent). Ends with `N passed, M failed`; exits
non-zero on a failure. Needs nothing beyond Python.
"""
import argparse
import json
import pathlib
import random
import socket
import subprocess
import sys
import time
import unicodedata
import urllib.request

SNIPPETS = [
    "Hello!", "What is 2 + 2?", "", " ", "  ", "\n", "\n\n\n", "  leading and trailing  ", "tab\there\n\nand lines\r\nwith CRLF",
    "Grüße aus Köln, señor: naïve café", "你好，世界。请介绍一下你自己。", "こんにちは、元気ですか？", "Привет, как дела?", "안녕하세요 세계",
    "مرحبا كيف حالك", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "ελληνικά", "ქართული", "հայերեն", "தமிழ்", "বাংলা", "ᚠᛇᚻ", "𐍈𐌰",
    "🙂🙃👩‍👩‍👧‍👦🏳️‍🌈 emoji", "e\u0301 combining, \u200b zero width, \ufeff bom", "def f(x):\n    return {'a': [x ** 2 for _ in range(3)]}\n",
    "for (int i = 0; i < n; ++i) { s += a[i] * 0x1F; } // ok", "\t\t\tif x:\n\t\t\t\tpass", "<div class=\"a\">&amp; <b>bold</b></div>",
    "{\"json\": [1, 2.5e-3, null, true]}", "$x^2 + \\frac{1}{2}$", "1234567890 0.1 1,000,000", "a" * 300, "word " * 60, " " * 97,
    "\n" * 71, "\u2581\u2581 already\u2581spelled", "UPPER lower MiXeD", "\x01\x02 control", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛", "it's we'll they're I'd",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "<bos>twice<bos>", "<eos>", "<pad><unk><mask>", "<table><tr><td>x</td></tr></table>",
    "[multimodal]", "<unused17>", "<unused99999>", "<0x0A>", "<start_of_turn", "start_of_turn>", "<<bos>>", "<s>[INST] x [/INST]</s>",
    "<|im_start|>user\nx<|im_end|>", "\u00a0nbsp\u3000ideographic", "\u2028line\u2029paragraph", "ﬁ ligature Å K", "\ud7ff\ue000 private", "\U0010ffff",
]


def random_text(rng):
    style = rng.randrange(6)
    if style == 0:
        return "".join(rng.choice(SNIPPETS) for _ in range(rng.randint(1, 4)))
    if style == 1:  # any character that exists
        return "".join(chr(c) for c in (rng.randrange(0x20000) for _ in range(rng.randint(1, 40)))
                       if unicodedata.category(chr(c)) not in ("Cs",) and c)
    if style == 2:  # one script
        base = rng.choice([0x20, 0xA0, 0x100, 0x370, 0x400, 0x530, 0x590, 0x600, 0x900, 0xE00, 0x10A0, 0x1100, 0x3040, 0x4E00, 0xAC00,
                           0x1F300])
        return "".join(rng.choice([chr(base + rng.randrange(90)), " "]) for _ in range(rng.randint(1, 60)))
    if style == 3:  # spaces and lines
        return "".join(rng.choice([" ", "  ", "\n", "\n\n", "\t", "\r\n", "a", ".", "\u2581"]) for _ in range(rng.randint(1, 50)))
    if style == 4:
        return "".join(rng.choice("aeinorst<>_|[]/0123 ") for _ in range(rng.randint(1, 60)))
    return " ".join(rng.choice(rng.choice(SNIPPETS).split() or ["x"]) for _ in range(rng.randint(1, 30)))


def texts(count):
    rng = random.Random(7)
    files = sorted(pathlib.Path(__file__).resolve().parents[2].glob("**/*.md"))
    files = [file for file in files if not {"build", ".cache"} & set(file.parts)]
    lines = [line for file in files for line in file.read_text().split("\n\n")]
    found = SNIPPETS + rng.sample(lines, min(len(lines), count // 4))
    while len(found) < count:
        found.append(random_text(rng))
    return found[:count]


class Server:
    def __init__(self, program, model, chat_template):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        extra = ["--chat-template", chat_template] if chat_template else []
        self.process = subprocess.Popen(
            [program, "-m", model, "-t", "1", "-tb", "1", "-c", "2048", "-np", "1", "--no-warmup", "--port", str(self.port), *extra],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            except OSError:
                if self.process.poll() is not None:
                    sys.exit("llama-server ended")
                time.sleep(0.2)
        self.end()
        sys.exit("llama-server does not start")

    def __call__(self, path, **body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=900))

    def end(self):
        self.process.terminate()
        self.process.wait()


def probe(args, command, cases):
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    done = subprocess.run([args.probe, command, args.model], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def compare_ids(args, server):
    cases = texts(args.texts)
    passed = failed = 0
    golden = []
    for text, ours in zip(cases, probe(args, "encode", cases), strict=True):
        theirs = server("tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        decoded = server("detokenize", tokens=theirs)["content"]
        golden.append({"text": text, "ids": theirs, "decoded": None if decoded == "<bos>" + text else decoded})
        if ours["ids"] == theirs and ours["decoded"] == decoded:
            passed += 1
            continue
        failed += 1
        if failed <= 20:
            print(f"{text!r}\n  ours   {ours['ids']}\n         {ours['decoded']!r}\n  theirs {theirs}\n         {decoded!r}")
    print(f"ids: {passed} texts alike, {failed} not")
    if args.golden:
        pathlib.Path(args.golden).write_text("[\n" + ",\n".join(json.dumps(case) for case in golden) + "\n]\n")
    return passed, failed


def compare_chats(args, server):
    rng = random.Random(3)
    cases = []
    for number in range(200):
        messages = []
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": rng.choice(SNIPPETS)})
        for turn in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": SNIPPETS[number % len(SNIPPETS)] if turn == 0 else rng.choice(SNIPPETS)})
            messages.append({"role": "assistant", "content": rng.choice(SNIPPETS)})
        messages.pop()
        cases.append({"messages": messages, "add_generation_prompt": True})
    passed = failed = 0
    for case, ours in zip(cases, probe(args, "render", cases), strict=True):
        # A server puts BOS before the ids, if the vocabulary says so, and takes it off the template's text.
        theirs = server("apply-template", messages=case["messages"])["prompt"]
        ids = server("tokenize", content=theirs, add_special=True, parse_special=True)["tokens"]
        if (ours.get("prompt", "").removeprefix("<bos>"), ours.get("ids")) == (theirs, ids):
            passed += 1
            continue
        failed += 1
        if failed <= 5:
            print(f"{case}\n  ours   {ours}\n  theirs {theirs!r}\n         {ids}")
    print(f"chats: {passed} alike, {failed} not")
    return passed, failed


PASSAGES = [
    "The river rose all night, and by morning the lower fields were under water.", "In 1905, four papers changed physics:",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n", "La capitale de la France est", "Die Würde des Menschen",
    "To bake a loaf of bread, first mix the flour and the water.", "Dear Ms. Hartmann,\n\nthank you for your letter of 3 May.",
    "SELECT name, count(*) FROM orders", "Once upon a time there was a miller who had three sons.", "The cell membrane consists of",
    "Question: Why is the sky blue?\nAnswer:", "El niño caminaba por la playa", "北京是中国的首都，", "Q: What is 17 times 23?\nA:", "The theorem follows "
    "by induction on n.", "A contract is formed when", "const express = require('express');\n", "The history of chess", "Water boils at", "My dog"]


def compare_top(args, server):
    """Each passage's continuation is the server's own: its likeliest tokens, or with --temperature drawn ones. Beside each
    the server tells which were likeliest before it drew."""
    same = total = 0
    margins = []
    lists = []
    theirs = []
    for number in range(args.prompts):
        ids = server("tokenize", content=PASSAGES[number % len(PASSAGES)], add_special=True)["tokens"]
        done = server("completion", prompt=ids, n_predict=args.tokens, temperature=args.temperature, seed=number, return_tokens=True,
                      ignore_eos=True, cache_prompt=False, n_probs=2)
        steps = [step["top_logprobs"] for step in done["completion_probabilities"]]
        lists.append({"ids": ids + done["tokens"][:-1], "prompt": len(ids)})
        theirs.append([(likely[0]["id"], likely[0]["logprob"] - likely[1]["logprob"]) for likely in steps])
        print(f"top: {number + 1} of {args.prompts} by llama.cpp", file=sys.stderr)
    if args.golden:
        pathlib.Path(args.golden).write_text(json.dumps({"lists": lists, "theirs": theirs}))
    for top, ours in zip(theirs, probe(args, "top", lists), strict=True):
        for (wanted, margin), got in zip(top, ours["top"], strict=True):
            total += 1
            same += wanted == got
            if wanted != got:
                margins.append(margin)
    share = 100 * same / total
    print(f"top: {same} of {total} alike ({share:.2f} %); llama.cpp's lead where not: {sorted(round(m, 3) for m in margins)}")
    return (1, 0) if share >= args.least else (0, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--probe", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--server-model")
    parser.add_argument("--only", choices=["ids", "chats", "top"])
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--least", type=float, default=98.0)
    parser.add_argument("--chat-template")
    parser.add_argument("--golden")
    args = parser.parse_args()
    server = Server(args.server, args.server_model or args.model, args.chat_template)
    passed = failed = 0
    try:
        for name, compare in (("ids", compare_ids), ("chats", compare_chats), ("top", compare_top)):
            if args.only in (None, name):
                p, f = compare(args, server)
                passed += p
                failed += f
    finally:
        server.end()
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
