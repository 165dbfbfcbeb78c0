"""LRUPromptCache and PromptTrie: mlx-lm's results, with our rules where mlx-lm breaks its own."""

import random
import threading
import unittest

import mlx.core as mx

from reprise.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    LRUPromptCache,
    PromptTrie,
    PromptTrieResult,
    RotatingKVCache,
)

MODEL = ("model", None, 1)


class Foreign:
    """A cache of somebody else: no position, no fork."""

    def __init__(self, value, trimmable=True):
        self.value = value
        self.trimmable = trimmable
        self.trimmed = 0

    @property
    def nbytes(self):
        return len(self.value)

    def is_trimmable(self):
        return self.trimmable

    def trim(self, n):
        self.trimmed += n
        return n


def numbered(tokens, cls=KVCache, **kwargs):
    """A prompt cache of one layer whose rows are the tokens."""
    cache = cls(**kwargs)
    if tokens:
        rows = mx.array(tokens, dtype=mx.float32).reshape(1, 1, len(tokens), 1)
        cache.update_and_fetch(rows, rows)
    return [cache]


def rows(prompt_cache):
    cache = prompt_cache[0]
    return [] if cache.offset == 0 else [int(x) for x in cache.keys_and_values()[0].flatten().tolist()]


class PromptTrieTest(unittest.TestCase):
    def test_search_finds_exact_shorter_and_longer(self):
        trie = PromptTrie()
        self.assertIsNone(trie.add(MODEL, [1, 2], "ab"))
        self.assertIsNone(trie.add(MODEL, [1, 2, 3, 4], "abcd"))
        self.assertIsNone(trie.add(MODEL, [1, 2, 3, 5, 6], "abcef"))
        self.assertEqual(trie.search(MODEL, [1, 2]), PromptTrieResult(MODEL, [1, 2], None, None, 0))
        self.assertEqual(trie.search(MODEL, [1, 2, 3]), PromptTrieResult(MODEL, None, [1, 2], [1, 2, 3, 4], 3))
        self.assertEqual(trie.search(MODEL, [7]), PromptTrieResult(MODEL, None, None, None, 0))
        self.assertEqual(trie.search("other", [1]), PromptTrieResult("other", None, None, None, 0))

    def test_one_token_and_no_token_are_keys(self):
        trie = PromptTrie()
        trie.add(MODEL, [], "root")
        trie.add(MODEL, [5], "five")
        self.assertEqual(trie.search(MODEL, []).exact, [])
        self.assertEqual(trie.search(MODEL, [5, 6]).shorter, [5])
        self.assertEqual(trie.search(MODEL, [6]).shorter, [])
        self.assertEqual(trie.get(MODEL, []), "root")
        self.assertEqual(trie.pop(MODEL, [5]), "five")
        self.assertEqual(trie.search(MODEL, [5]), PromptTrieResult(MODEL, None, [], None, 0))

    def test_add_returns_what_it_replaces(self):
        trie = PromptTrie()
        trie.add(MODEL, [1], "a")
        self.assertEqual(trie.add(MODEL, [1], "b"), "a")
        self.assertEqual(trie.get(MODEL, [1]), "b")

    def test_what_is_not_stored_raises_key_error(self):
        trie = PromptTrie()
        for call in (trie.get, trie.pop, trie.pop_prefixes):
            with self.assertRaises(KeyError):
                call(MODEL, [1])
        trie.add(MODEL, [1, 2], "ab")
        for tokens in ([1], [1, 2, 3], [2]):
            with self.assertRaises(KeyError):
                trie.get(MODEL, tokens)
            with self.assertRaises(KeyError):
                trie.pop(MODEL, tokens)

    def test_pop_prefixes_takes_proper_prefixes_with_their_lengths(self):
        trie = PromptTrie()
        for tokens in ([], [1], [1, 2], [1, 2, 3]):
            trie.add(MODEL, tokens, len(tokens))
        self.assertEqual(trie.pop_prefixes(MODEL, [1, 2, 3], 1), [(1, 1), (2, 2)])
        self.assertEqual(trie.pop_prefixes(MODEL, [1, 2, 3]), [(0, 0)])
        self.assertEqual(trie.get(MODEL, [1, 2, 3]), 3)

    def test_tokens_may_be_what_no_model_has(self):
        # The server's stand-ins for images are negative and of 60 bits.
        trie = PromptTrie()
        image = -1 - (1 << 59)
        trie.add(MODEL, [1, image, image, "word", 2], "image")
        self.assertEqual(trie.get(MODEL, [1, image, image, "word", 2]), "image")
        self.assertEqual(trie.search(MODEL, [1, image, 9]).longer, [1, image, image, "word", 2])
        self.assertEqual(trie.search(MODEL, [1, image - 1]).common_prefix, 1)
        self.assertEqual(trie.search(MODEL, [1, -1, -1]).common_prefix, 1)

    def test_agrees_with_a_dict_of_keys(self):
        rng = random.Random(5)
        trie, keys = PromptTrie(), {}
        for step in range(2000):
            tokens = tuple(rng.choice([0, 1, -7]) for _ in range(rng.randrange(6)))
            if rng.random() < 0.5:
                self.assertEqual(trie.add(MODEL, tokens, step), keys.get(tokens))
                keys[tokens] = step
            elif tokens in keys:
                self.assertEqual(trie.pop(MODEL, tokens), keys.pop(tokens))
            else:
                with self.assertRaises(KeyError):
                    trie.pop(MODEL, tokens)
            result = trie.search(MODEL, tokens)
            self.assertEqual(result.exact is not None, tokens in keys)
            if result.exact is None:
                prefixes = [k for k in keys if tokens[: len(k)] == k]
                self.assertEqual(result.shorter, max(prefixes, key=len, default=None))
                common = max((len(shared(k, tokens)) for k in keys), default=0)
                self.assertEqual(result.common_prefix, common)
                longer = [k for k in keys if k[:common] == tokens[:common]] if common else []
                self.assertEqual(
                    None if result.longer is None else len(result.longer), min(map(len, longer), default=None)
                )


def shared(a, b):
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return a[:length]


class LRUPromptCacheTest(unittest.TestCase):
    def test_a_hit_makes_the_entry_the_most_recent(self):
        store = LRUPromptCache(max_size=2)
        for name, tokens in (("a", [1, 2]), ("b", [3, 4])):
            store.insert_cache(MODEL, tokens, [Foreign(name)])
        self.assertEqual(store.fetch_nearest_cache(MODEL, [1, 2, 9])[0][0].value, "a")
        store.insert_cache(MODEL, [5, 6], [Foreign("c")])
        self.assertIsNone(store.fetch_nearest_cache(MODEL, [3, 4])[0])
        self.assertEqual(store.fetch_nearest_cache(MODEL, [1, 2])[0][0].value, "a")

    def test_a_stored_single_token_serves_what_begins_with_it(self):
        store = LRUPromptCache()
        store.insert_cache(MODEL, [7], [Foreign("seven")])
        cache, rest = store.fetch_nearest_cache(MODEL, [7, 8, 9])
        self.assertEqual((cache[0].value, rest), ("seven", [8, 9]))

    def test_a_longer_entry_is_trimmed_and_one_token_is_left(self):
        store = LRUPromptCache()
        store.insert_cache(MODEL, [1, 2, 3, 4], numbered([1, 2, 3, 4]))
        for asked, reused in (([1, 2, 9], 2), ([1, 2], 1), ([1, 2, 3, 4], 3), ([1], 0)):
            cache, rest = store.fetch_nearest_cache(MODEL, asked)
            self.assertEqual(rest, asked[reused:])
            self.assertEqual(rows(cache), asked[:reused])
        # The stored entry is what it was.
        self.assertEqual(rows(store.fetch_nearest_cache(MODEL, [1, 2, 3, 4, 5])[0]), [1, 2, 3, 4])

    def test_a_hit_is_private(self):
        store = LRUPromptCache()
        mine = numbered([1, 2])
        store.insert_cache(MODEL, [1, 2], mine)
        row = mx.full((1, 1, 1, 1), 3.0)
        mine[0].update_and_fetch(row, row)  # the caller goes on with what it gave
        first, _ = store.fetch_nearest_cache(MODEL, [1, 2, 5])
        first[0].update_and_fetch(row, row)
        second, rest = store.fetch_nearest_cache(MODEL, [1, 2, 6])
        self.assertEqual((rows(second), rest), ([1, 2], [6]))

    def test_a_hit_costs_no_copy_of_the_rows(self):
        cache = KVCache()
        rows_of_4_mib = mx.zeros((1, 1, 1 << 14, 32))
        cache.update_and_fetch(rows_of_4_mib, rows_of_4_mib)
        del rows_of_4_mib
        store = LRUPromptCache()
        tokens = [1] * (1 << 14)
        store.insert_cache(MODEL, tokens, [cache])
        before = mx.get_active_memory()
        hits = [store.fetch_nearest_cache(MODEL, tokens + [2])[0] for _ in range(5)]
        mx.eval([c.state for hit in hits for c in hit])
        self.assertLess(mx.get_active_memory() - before, 1 << 16)

    def test_what_is_stored_has_been_evaluated(self):
        # Another thread could not evaluate it, and its graph would hold what it was made from.
        store = LRUPromptCache()
        store.insert_cache(MODEL, [1, 2], numbered([1, 2]))
        found = []
        thread = threading.Thread(target=lambda: found.append(rows(store.fetch_nearest_cache(MODEL, [1, 2, 3])[0])))
        thread.start()
        thread.join()
        self.assertEqual(found, [[1, 2]])

    def test_a_whole_hit_that_cannot_give_one_token_back_falls_back(self):
        store = LRUPromptCache()
        wrapped = dict(cls=RotatingKVCache, max_size=2)
        store.insert_cache(MODEL, [1, 2], numbered([1, 2], **wrapped))
        store.insert_cache(MODEL, [1, 2, 3], numbered([1, 2, 3], **wrapped))
        self.assertEqual(len(store), 2)
        cache, rest = store.fetch_nearest_cache(MODEL, [1, 2, 3])
        self.assertEqual((cache[0].offset, rest), (2, [3]))
        store.trim_to(n_sequences=0)
        store.insert_cache(MODEL, [1, 2, 3], numbered([1, 2, 3], **wrapped))
        self.assertEqual(store.fetch_nearest_cache(MODEL, [1, 2, 3]), (None, [1, 2, 3]))

    def test_a_longer_entry_that_cannot_be_trimmed_leaves_the_shorter_one(self):
        store = LRUPromptCache()
        store.insert_cache(MODEL, [1], [Foreign("short", trimmable=False)])
        store.insert_cache(MODEL, [1, 2, 3], [Foreign("long", trimmable=False)])
        cache, rest = store.fetch_nearest_cache(MODEL, [1, 2, 4])
        self.assertEqual((cache[0].value, rest), ("short", [2, 4]))

    def test_prefixes_go_when_trimming_gives_them(self):
        store = LRUPromptCache()
        for n in (0, 1, 3):
            store.insert_cache(MODEL, [1, 2, 3][:n], numbered([1, 2, 3][:n]))
        self.assertEqual(len(store), 1)
        state = ArraysCache(1)
        state[0] = mx.zeros((1, 4))
        store.insert_cache("recurrent", [1], [state])
        store.insert_cache("recurrent", [1, 2], [state])
        self.assertEqual(len(store), 3)

    def test_prefixes_stay_when_trimming_does_not_give_them(self):
        # Two chunks have slid away: only one token can be given back with all that the shorter history needs.
        slid = numbered([1, 2, 3, 4, 5], cls=ChunkedKVCache, chunk_size=2)
        slid[0].maybe_trim_front()
        self.assertEqual((slid[0].is_trimmable(), slid[0].max_trim()), (True, 1))
        store = LRUPromptCache()
        for n in (3, 4):
            store.insert_cache(MODEL, [1, 2, 3, 4, 5][:n], [Foreign("x" * n, trimmable=False)])
        store.insert_cache(MODEL, [1, 2, 3, 4, 5], slid)
        self.assertEqual((len(store), store.nbytes), (2, 3 + slid[0].nbytes))
        self.assertEqual(store.fetch_nearest_cache(MODEL, [1, 2, 3, 9])[0][0].value, "xxx")
        self.assertEqual(store.fetch_nearest_cache(MODEL, [1, 2, 9])[0], None)

    def test_limits_hold_after_every_call_and_bytes_are_counted(self):
        rng = random.Random(3)
        store = LRUPromptCache(max_size=4, max_bytes=40)
        for _ in range(2000):
            tokens = [rng.randrange(3) for _ in range(rng.randrange(5))]
            cache_type = rng.choice(["assistant", "user", "system"])
            what = rng.random()
            if what < 0.6:
                trimmable = rng.random() < 0.5
                store.insert_cache(
                    MODEL, tokens, [Foreign("x" * rng.randrange(60), trimmable)], cache_type=cache_type
                )
            elif what < 0.9:
                store.fetch_nearest_cache(MODEL, tokens)
            else:
                store.trim_to(n_sequences=rng.randrange(5), n_bytes=rng.randrange(50))
            entries = [entry for order in store._orders.values() for _, _, entry in order.values()]
            self.assertEqual(store.nbytes, sum(entry.nbytes for entry in entries))
            self.assertEqual(store.nbytes, sum(s["n_bytes"] for s in store.stats_by_type().values()))
            self.assertEqual(len(store), sum(s["n_sequences"] for s in store.stats_by_type().values()))
            self.assertLessEqual(len(store), 4)
            self.assertLessEqual(store.nbytes, 40)
            self.assertEqual(len(entries), len(store._trie._values))

    def test_what_exceeds_the_budget_evicts_nothing(self):
        store = LRUPromptCache(max_bytes=5)
        self.assertTrue(store.insert_cache(MODEL, [1], [Foreign("abc")]))
        self.assertFalse(store.insert_cache(MODEL, [2], [Foreign("abcdef")]))
        self.assertFalse(store.insert_cache(MODEL, [1], [Foreign("abcdef")]))
        self.assertEqual((len(store), store.nbytes), (1, 3))
        self.assertEqual(store.fetch_nearest_cache(MODEL, [1, 2])[0][0].value, "abc")
        self.assertFalse(LRUPromptCache(max_size=0).insert_cache(MODEL, [1], [Foreign("a")]))

    def test_the_key_is_as_long_as_what_is_stored(self):
        store = LRUPromptCache()
        # The last token was sampled but not fed; a draft model's layer is one more behind.
        self.assertTrue(store.insert_cache(MODEL, [1, 2, 3, 4], numbered([1, 2, 3]) + numbered([1, 2])))
        cache, rest = store.fetch_nearest_cache(MODEL, [1, 2, 3, 4, 5])
        self.assertEqual(([c.offset for c in cache], rest), ([2, 2], [3, 4, 5]))
        # More rows than the key has tokens.
        store.insert_cache("more", [1, 2], numbered([1, 2, 3]))
        self.assertEqual(rows(store.fetch_nearest_cache("more", [1, 2, 9])[0]), [1, 2])
        # A wrapped ring cannot be brought to another length.
        ring = numbered([1, 2, 3], cls=RotatingKVCache, max_size=2)
        with self.assertLogs("reprise", "WARNING"):
            self.assertFalse(store.insert_cache("ring", [1, 2], ring))
        self.assertEqual(store.fetch_nearest_cache("ring", [1, 2])[0], None)

    def test_an_unknown_type_is_refused(self):
        store = LRUPromptCache()
        with self.assertRaises(ValueError):
            store.insert_cache(MODEL, [1], [Foreign("a")], cache_type="tool")
        self.assertEqual(len(store), 0)

    def test_models_do_not_mix(self):
        store = LRUPromptCache()
        store.insert_cache("a", [1], [Foreign("a")])
        self.assertIsNone(store.fetch_nearest_cache("b", [1, 2])[0])

    def test_threads_may_share_one(self):
        store = LRUPromptCache(max_size=3, max_bytes=30)
        errors = []

        def work(seed):
            rng = random.Random(seed)
            try:
                for _ in range(300):
                    tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
                    store.insert_cache(MODEL, tokens, [Foreign("x" * rng.randrange(12))])
                    store.fetch_nearest_cache(MODEL, tokens + [1])
            except Exception as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])
        self.assertEqual(store.nbytes, sum(entry.nbytes for entry in store._trie._values.values()))


if __name__ == "__main__":
    unittest.main()
