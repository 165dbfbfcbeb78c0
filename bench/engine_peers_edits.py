"""How much of a prompt is computed again after an edit, model by model. Part of engine_peers.py.

A prompt of PROMPT tokens is answered, then the same with EDITED tokens changed in its middle, or near its end. Reprise
and llama-server run the model; of mlx-lm its caches and the store of its server are asked, which need no weights.
"""
import json
import os
import random
import tempfile

from engine_peers_servers import LlamaServer, replay, reprise
from peers_machine import say

PROMPT = 2000
EDITED = 20
ANSWER = 8
EDITS = {"middle": 1000, "end": 1900}  # where the changed tokens begin
ALLOWANCE = 512  # tokens before an edit that may be computed again

# Of models/ in the folder of test data: sliding windows, recurrent layers, both in one layer, and neither.
KIT = ("llama", "llama_sliding", "gemma3_text", "gpt_oss", "mamba", "mamba2", "falcon_h1", "jamba", "qwen3_next",
       "recurrent_gemma", "lfm2")
# As much of GGUF models' configurations as decides on their caches.
SMOLLM2 = {"model_type": "llama", "vocab_size": 49152}
GEMMA3 = {"model_type": "gemma3_text", "num_hidden_layers": 18, "sliding_window": 512, "sliding_window_pattern": 6,
          "vocab_size": 262144}


def edit_trace(vocab, at, seed):
    """Two requests: the prompt, and the prompt edited."""
    chance = random.Random(seed)
    first, last = (100, vocab - 1) if vocab > 200 else (2, vocab - 1)
    prompt = [chance.randint(first, last) for _ in range(PROMPT)]
    edited = prompt[:at] + [first + (token - first + 1) % (last - first + 1) for token in prompt[at:at + EDITED]]
    edited += prompt[at + EDITED:]
    turns = [{"prompt_tokens": tokens, "max_tokens": ANSWER} for tokens in (prompt, edited)]
    return [("edit", turns)]


def computed(requests):
    return requests[-1]["prompt_tokens"] - requests[-1]["cached_tokens"]


# --- mlx-lm ----------------------------------------------------------------------------------------------------------

# For configurations that name only what matters.
MODEST = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2,
          "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": 96}


def mlx_lm_caches(config):
    """What its model of this configuration makes."""
    import importlib
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import MODEL_REMAPPING
    kind = config["model_type"]
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    arguments = module.ModelArgs.from_dict({**MODEST, **config})
    return lambda: make_prompt_cache(module.Model(arguments))


def advance(cache, count):
    """As if a model had run over so many tokens more."""
    import mlx.core as mx
    if hasattr(cache, "caches"):
        for part in cache.caches:
            advance(part, count)
    elif hasattr(cache, "update_and_fetch"):
        cache.update_and_fetch(mx.zeros((1, 1, count, 4)), mx.zeros((1, 1, count, 4)))
    else:
        for i in range(len(cache.cache)):
            cache[i] = mx.zeros((1, 1))


def mlx_lm_computed(config, trace):
    from mlx_lm.models.cache import LRUPromptCache
    make = mlx_lm_caches(config)
    store = LRUPromptCache()
    rest = []
    for turn in trace[0][1]:
        prompt = list(turn["prompt_tokens"])
        cache, rest = store.fetch_nearest_cache("model", prompt)
        cache = cache or make()
        for layer in cache:
            if rest:
                advance(layer, len(rest))
            for _ in range(turn["max_tokens"] - 1):
                advance(layer, 1)
        # The last token of an answer has not been through the model.
        store.insert_cache("model", prompt + [0] * (turn["max_tokens"] - 1), cache)
    return len(rest)


# --- the table -------------------------------------------------------------------------------------------------------

def kit_model(source, folder):
    """The model with room for the prompt in its positions, and some tokenizer. Returns its configuration."""
    with open(f"{source}/config.json") as file:
        config = json.load(file)
    config["max_position_embeddings"] = max(config.get("max_position_embeddings") or 0, 2 * PROMPT)
    with open(f"{folder}/config.json", "w") as file:
        json.dump(config, file)
    for name in os.listdir(source):
        if name.startswith("model"):
            os.symlink(os.path.abspath(f"{source}/{name}"), f"{folder}/{name}")
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    with open(f"{folder}/tokenizer.json", "w") as file:
        json.dump({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
                   "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}, file)
    return config


def after_restart(args, trace, model):
    """Tokens that a second process computes of the first prompt, over the folder of the first."""
    once = [(name, turns[:1]) for name, turns in trace]
    with tempfile.TemporaryDirectory() as folder:
        more = ["--cache-dir", f"{folder}/cache"]
        reprise(args, once, 1, model, more)
        return computed(reprise(args, once, 1, model, more)["each"])


def row(args, name, model, config, gguf=None):
    """{model, edit: {engine: tokens}, …} of one model."""
    say(f"edits: {name}")
    found = {"model": name, "prompt": PROMPT, "after_restart": None}
    for place, at in EDITS.items():
        trace = edit_trace(config["vocab_size"], at, f"{name}{place}")
        numbers = {"at": at, "reprise": computed(reprise(args, trace, 1, model)["each"]), "llama_server": None,
                   "mlx_lm": mlx_lm_computed(config, trace)}
        if gguf and "llama_server" in args.engines:
            with LlamaServer(args, 1, 2 * PROMPT, gguf) as server:
                numbers["llama_server"] = computed(replay(server, trace, 1)["each"])
        numbers["met"] = at - (PROMPT - numbers["reprise"]) <= ALLOWANCE
        found[place] = numbers
    found["after_restart"] = after_restart(args, edit_trace(config["vocab_size"], EDITS["middle"], name), model)
    return found


def edits(args):
    for name in KIT:
        source = f"{args.models}/{name}"
        if not os.path.exists(f"{source}/config.json"):
            say(f"edits: there is no {source}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = kit_model(source, folder)
            yield row(args, name, folder, config)
    yield row(args, "SmolLM2 135M", args.model, SMOLLM2, f"{args.peers}/smollm2.gguf")
    if args.gemma3:
        yield row(args, "Gemma 3 270M", args.gemma3, GEMMA3, args.gemma3)
    else:
        say("edits: Gemma 3 270M is not there: ./run fetch gemma3 gets it")
