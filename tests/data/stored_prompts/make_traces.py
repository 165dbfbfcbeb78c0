"""Records what mlx-lm's TokenBuffer, PromptTrie and LRUPromptCache answer, where they are right.

usage: python make_traces.py > traces.json

Left out, because mlx-lm is wrong or silent there: keys of no token or one token, hits before the last insert (a hit
does not refresh the order), a prompt that is stored itself (no token is left to process), entries above the byte limit,
prefixes popped for a key that is not stored.
"""

import json
import random

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache, PromptTrie, TokenBuffer


def token_buffers():
    cases = []
    for steps in ([1], [255, 1], [256, 1], [257, 1], [3, 300, 5], [100, 156, 1, 255, 1, 600]):
        buffer, answers = TokenBuffer(), []
        for count in steps:
            answers.append(len(buffer.update_and_fetch(mx.arange(count))))
            answers.append(buffer.state.size)
        cases.append({"steps": steps, "sizes_and_capacities": answers})
    return cases


def key(rng, longest=7):
    return [rng.randint(0, 2) for _ in range(rng.randint(2, longest))]


def tries():
    rng, cases = random.Random(1), []
    for _ in range(12):
        trie, stored, steps = PromptTrie(), set(), []
        for number in range(40):
            tokens, op = key(rng), rng.choice(["add", "add", "pop", "pop_prefixes", "search", "search"])
            step = {"op": op, "tokens": tokens}
            if op == "add":
                step["value"] = number
                step["replaced"] = trie.add("m", tokens, number)
                stored.add(tuple(tokens))
            elif op == "search":
                found = trie.search("m", tokens)
                extensions = [k for k in stored if list(k[: found.common_prefix]) == tokens[: found.common_prefix]]
                step["exact"], step["shorter"] = found.exact, found.shorter
                # Which of several equally short ones is free.
                step["longer_length"] = None if found.longer is None else len(found.longer)
                assert found.longer is None or tuple(found.longer) in extensions
                step["common_prefix"] = found.common_prefix
            elif tuple(tokens) not in stored:
                continue
            elif op == "pop":
                step["value"] = trie.pop("m", tokens)
                stored.remove(tuple(tokens))
            else:
                step["popped"] = trie.pop_prefixes("m", tokens)
                for length, _ in step["popped"]:
                    stored.remove(tuple(tokens[:length]))
            steps.append(step)
        cases.append(steps)
    return cases


def filled(tokens, size):
    cache = KVCache()
    rows = mx.zeros((1, 1, len(tokens), size))
    cache.update_and_fetch(rows, rows)
    return [cache]


def stores():
    rng, cases = random.Random(2), []
    for _ in range(8):
        max_size, max_bytes = rng.randint(2, 6), 2048 * rng.randint(4, 14)
        store, steps, inserted = LRUPromptCache(max_size, max_bytes), [], set()
        for _ in range(25):
            tokens, size = key(rng), rng.randint(1, 4)
            cache_type = rng.choice(["assistant", "user", "system"])
            model = rng.choice(["m", "m", "n"])
            store.insert_cache(model, tokens, filled(tokens, size), cache_type=cache_type)
            inserted.add((model, tuple(tokens)))
            steps.append(
                {
                    "model": model,
                    "tokens": tokens,
                    "size": size,
                    "type": cache_type,
                    "sequences": len(store),
                    "bytes": store.nbytes,
                    "stats": store.stats_by_type(),
                }
            )
        fetches = []
        for _ in range(40):
            model, tokens = rng.choice(["m", "m", "n"]), key(rng, 9)
            found = store._trie.search(model, tokens)
            if found.exact is not None:
                continue
            cache, remaining = store.fetch_nearest_cache(model, tokens)
            reused = len(tokens) - len(remaining) if cache else None
            assert cache is None or cache[0].offset == reused
            fetches.append({"model": model, "tokens": tokens, "reused": reused})
        cases.append({"max_size": max_size, "max_bytes": max_bytes, "inserts": steps, "fetches": fetches})
    return cases


print(json.dumps({"token_buffers": token_buffers(), "tries": tries(), "stores": stores()}, separators=(",", ":")))
