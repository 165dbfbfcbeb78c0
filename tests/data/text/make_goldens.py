#!/usr/bin/env python3
"""Makes the goldens of tests/text: what Hugging Face's libraries answer.

Made with transformers 5.24.0, tokenizers 0.23.3, jinja2 3.1.6, sentencepiece 0.2.3 (see `versions` in each file).
usage: make_goldens.py SMOLLM2_FOLDER   (a folder with the model's tokenizer.json and tokenizer_config.json)
"""
import hashlib
import io
import json
import os
import random
import sys

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import jinja2
import sentencepiece
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.utils.chat_template_utils import render_jinja_template

HERE = os.path.dirname(os.path.abspath(__file__))
VERSIONS = dict(transformers=transformers.__version__, tokenizers=tokenizers.__version__, jinja2=jinja2.__version__,
                sentencepiece=sentencepiece.__version__)

TEXTS = [
    "", " ", "  ", "\n", "\n\n \t", "Hello, world!", " leading and trailing ", "I'm sure it's THEY'LL'd've",
    "tabs\tand\r\nreturns\r", "1234567 and 3.14, 10,000", "naïve café — “quotes” … Ångström", "e\u0301 combining a\u0308",
    "你好，世界！今天是2026年8月13日", "日本語のテキスト、カタカナ", "안녕하세요 세계", "Привет, мир", "สวัสดีครับ", "مرحبا بالعالم",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 end", "def f(x):\n    return x ** 2  # square\n\n\nprint(f(3))", "a" * 40, "    " * 9 + "x",
    "https://example.org/a_b?c=d&e=%20", "{\"key\": [1, 2.5, null, true]}", "CamelCaseWords andSNAKE_CASE",
    "mixed123numbers456", "\u00a0nbsp\u2003em\u200bzero", "⅓ ½ ² ①", "x\u0000y\u001b", "<s>not special</s>", "▁▁ blocks ▁",
]

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}"
         + r"|\p{N}{1,3}" + TAIL)
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*" + r"|\p{N}" + TAIL
DEEPSEEK3 = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
             r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
             r"|\s*[\r\n]+|\s+(?!\S)|\s+"]
PRE = dict(
    [("default", (None, [], True, False)), ("gpt-2", (None, [], True, False)), ("olmo", ("NFC", [], True, False)),
     ("smollm", (None, ["digits"], True, False)), ("command-r", ("NFC", ["digits"], True, False)),
     ("llama-bpe", (None, [LLAMA3], False, True)), ("dbrx", (None, [LLAMA3], False, False)),
     ("qwen2", ("NFC", [QWEN2], False, False)), ("stablelm2", (None, [QWEN2], False, False)),
     ("qwen35", ("NFC", [QWEN35], False, False)), ("gpt-4o", (None, [O200K], False, False)),
     ("tekken", (None, [TEKKEN], False, True)), ("deepseek-v3", (None, DEEPSEEK3, False, False))])


def write(name, value):
    with io.open(os.path.join(HERE, name), "w", encoding="utf-8", newline="\n") as out:
        json.dump(value, out, ensure_ascii=False, separators=(",", ":"))
        out.write("\n")


def byte_level_golden():
    """A tiny byte-level BPE, trained across word boundaries, so that its ids show where each pre-tokenizer splits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=480, min_frequency=1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=["<|end|>", "<|start|>"], show_progress=False, max_token_length=12)
    pieces = [text[i:i + 9] for text in TEXTS for i in range(0, len(text), 3)]
    tokenizer.train_from_iterator(pieces, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    tokens = [t for t, _ in sorted(trained["vocab"].items(), key=lambda item: item[1])] + ["<tool>"]
    types = [3, 3] + [1] * (len(tokens) - 3) + [4]
    texts = TEXTS + ["<|start|>user\nhi<|end|>\n<tool>x</tool>"]
    cases, json_file = {}, None
    for name, (normalizer, splits, gpt2, ignore_merges) in PRE.items():
        made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m) for m in trained["merges"]],
                                    ignore_merges=ignore_merges))
        made.normalizer = normalizers.NFC() if normalizer else None
        steps = [pre_tokenizers.Digits(individual_digits=True) if s == "digits" else pre_tokenizers.Split(Regex(s), "isolated")
                 for s in splits]
        made.pre_tokenizer = pre_tokenizers.Sequence(steps + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)])
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == 3])
        made.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == 4])
        cases[name] = [made.encode(text, add_special_tokens=False).ids for text in texts]
        if name == "smollm":
            json_file = made.to_str()
            rng = random.Random(7)
            random_ids = [[rng.randrange(len(tokens)) for _ in range(40)] for _ in range(20)]
            decoded = [[ids, made.decode(ids, skip_special_tokens=False), made.decode(ids, skip_special_tokens=True)]
                       for ids in random_ids]
    # For the other pre-tokenizers: only the texts (by number) that they split otherwise.
    differing = {name: {i: ids for i, ids in enumerate(all_ids) if ids != cases["default"][i]}
                 for name, all_ids in cases.items() if name != "default"}
    write("byte_level.json", dict(versions=VERSIONS, tokenizer=json.loads(json_file), texts=texts, ids=cases["default"],
                                  differing=differing, decoded=decoded))


def sentencepiece_golden():
    model = io.BytesIO()
    corpus = [t for t in TEXTS if t.strip() and "\x00" not in t] * 3
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=model, model_type="bpe", vocab_size=520, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.98, minloglevel=2,
        split_digits=True, allow_whitespace_only_pieces=True)
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens, scores, types = [p.piece for p in proto.pieces], [p.score for p in proto.pieces], [p.type for p in proto.pieces]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = sorted(((s, t[:i], t[i:]) for t, s in zip(tokens, scores) for i in range(1, len(t)) if t[:i] in vocab and t[i:] in vocab),
                    key=lambda m: (m[0], len(m[1]), len(m[2])), reverse=True)
    out = {}
    texts = TEXTS + ["<s>[INST] Hi [/INST] there</s><s>again"]
    for prefix in (True, False):
        made = Tokenizer(models.BPE(vocab=vocab, merges=[m[1:] for m in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        made.normalizer = normalizers.Sequence(([normalizers.Prepend("▁")] if prefix else []) + [normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
                                         + ([decoders.Strip(" ", 1, 0)] if prefix else []))
        made.add_special_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == 3])
        ids = [made.encode(text, add_special_tokens=False).ids for text in texts]
        decoded = [made.decode(i, skip_special_tokens=True) for i in ids]
        out["prefix" if prefix else "plain"] = dict(ids=ids, decoded=decoded)
    # SentencePiece itself agrees wherever the text holds no special token (it keeps those as text).
    own = [processor.encode(text) for text in texts]
    agree = sum(a == b for a, b in zip(own, out["prefix"]["ids"]))
    assert agree >= len(texts) - 4, [(t, a, b) for t, a, b in zip(texts, own, out["prefix"]["ids"]) if a != b]
    write("sentencepiece.json", dict(versions=VERSIONS, tokens=tokens, scores=scores, types=types, texts=texts, **out))


TOOLS = [dict(type="function", function=dict(
    name="get_weather", description="Weather at a place, in °C & <units>", parameters=dict(
        type="object", properties=dict(place=dict(type="string", description="City \"name\""), days=dict(type="integer")),
        required=["place"]))),
    dict(type="function", function=dict(name="now", description="", parameters=dict(type="object", properties={})))]
CALL = dict(role="assistant", content="", tool_calls=[dict(id="call_1", type="function", function=dict(
    name="get_weather", arguments=dict(place="Köln 你好", days=3, ratio=1.0, tiny=1e-7, big=1e20, none=None, yes=True)))])
# role and content first: the order in which the C++ interface puts them.
RESULT = dict(role="tool", content="{\"temp\": 21.5}", name="get_weather", tool_call_id="call_1")
CHATS = dict(
    plain=[dict(role="user", content="Hello")],
    system=[dict(role="system", content="  Be brief. "), dict(role="user", content="Hi 😀\n"), dict(role="assistant", content=" Hello! "),
            dict(role="user", content="Bye")],
    empty=[dict(role="user", content=""), dict(role="assistant", content=""), dict(role="user", content=" ")],
    tools=[dict(role="user", content="Weather in Köln?"), CALL, RESULT, dict(role="user", content="Thanks")],
    open=[dict(role="user", content="Write: a b c"), dict(role="assistant", content="a b ")],
    parts=[dict(role="user", content=[dict(type="text", text="one"), dict(type="image"), dict(type="text", text="two ")])],
    reasoning=[dict(role="user", content="2+2?"), dict(role="assistant", content="4", reasoning_content="easy\n"), dict(role="user", content="ok")],
    unordered=[dict(role="assistant", content="I start"), dict(role="assistant", content="again")],
)


KWARGS = dict(n=7, neg=-7, s="Hello World foo", l=[3, 1, 2], d={"b": 1, "a": 2, "10": 3}, e=[], big=123456789012345678,
              nested=[dict(x=dict(y=1), g="u"), dict(x=dict(y=0), g="v"), dict(x=dict(y=5), g="u")])


def template_golden():
    with io.open(os.path.join(HERE, "templates.jinja.txt"), encoding="utf-8", newline="") as file:
        blocks = file.read().split("\n======\n")
    templates = {}
    for block in blocks:
        name, source = block.split("\n", 1)
        templates[name] = source
    special = dict(bos_token="<s>", eos_token="</s>")
    cases = []
    for name, source in templates.items():
        chats = CHATS if name.startswith("chat ") else dict(tools=CHATS["tools"])
        for chat_name, messages in chats.items():
            for mode in ("plain", "generate", "continue") if name.startswith("chat ") else ("plain",):
                if mode == "continue" and messages[-1]["role"] != "assistant":
                    continue
                for tools in (None, TOOLS) if name.startswith("chat ") and chat_name in ("tools", "plain") else (TOOLS,):
                    case = dict(template=name, chat=chat_name, mode=mode, tools=tools is not None)
                    try:
                        rendered, _ = render_jinja_template(
                            [[{k: v for k, v in m.items() if v is not None} for m in messages]], tools=tools, chat_template=source,
                            continue_final_message=mode == "continue", add_generation_prompt=mode == "generate",
                            enable_thinking=chat_name == "reasoning", **special,
                            **(KWARGS if name.startswith("language") else {}))
                        # Long texts by their hash, but for one a template.
                        whole = len(rendered[0]) < 700 or (mode, chat_name) == ("plain", "tools")
                        case["text" if whole else "sha256"] = (
                            rendered[0] if whole else hashlib.sha256(rendered[0].encode()).hexdigest()[:16])
                    except Exception as error:
                        case["fails"] = type(error).__name__
                    cases.append(case)
    write("templates.json", dict(versions=VERSIONS, chats=CHATS, tools=TOOLS, kwargs=KWARGS, cases=cases))


def smollm2_golden(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rng = random.Random(3)
    words = [t for t in TEXTS if t] + ["user", "<|im_end|>", "<|im_start|>system", "OK", "\\n", "```py\nx=1\n```", "🙂", "ß", "漢字"]
    chats = []
    for number in range(200):
        messages = []
        if number % 3 == 0:
            messages.append(dict(role="system", content=rng.choice(words)))
        for turn in range(rng.randrange(1, 4)):
            text = "" if rng.random() < 0.1 else rng.choice(["", " ", "\n"]).join(rng.sample(words, rng.randrange(1, 4)))
            messages.append(dict(role="user" if turn % 2 == 0 else "assistant", content=text))
        mode = ["plain", "generate", "continue"][number % 3] if messages[-1]["role"] != "system" else "plain"
        tools = number % 5 == 0
        try:
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=mode == "generate",
                                                   continue_final_message=mode == "continue", tools=TOOLS if tools else None)
        except ValueError:
            mode = "generate"
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=TOOLS if tools else None)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded == prompt
        joined = ",".join(map(str, ids))
        case = dict(messages=[[m["role"], m["content"]] for m in messages], mode=mode, tools=tools, count=len(ids),
                    prompt=hashlib.sha256(prompt.encode()).hexdigest()[:16], ids=hashlib.sha256(joined.encode()).hexdigest()[:16])
        if number < 6:
            case.update(prompt_text=prompt, ids_list=ids)
        chats.append(case)
    write("smollm2.json", dict(versions=VERSIONS, tools=TOOLS, chats=chats))


byte_level_golden()
sentencepiece_golden()
template_golden()
smollm2_golden(sys.argv[1])
