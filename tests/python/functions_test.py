"""The functions over the caches of all layers."""

import unittest
from types import SimpleNamespace

import mlx.core as mx

from reprise.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    cache_length,
    can_trim_prompt_cache,
    check_prompt_cache,
    fork_prompt_cache,
    make_prompt_cache,
    maybe_quantize_kv_cache,
    prompt_cache_nbytes,
    trim_prompt_cache,
)
from reprise.errors import FailedPreconditionError, InvalidArgumentError

try:
    import mlx_lm.models.cache as theirs
except ImportError:
    theirs = None


def fill(cache, count, dims=1):
    rows = mx.broadcast_to(mx.arange(count, dtype=mx.float32).reshape(1, 1, count, 1), (1, 1, count, dims))
    cache.update_and_fetch(rows, rows)
    return cache


def model_of(*caches):
    return SimpleNamespace(make_cache=lambda: list(caches))


def class_names(caches):
    return [type(c).__name__ for c in caches]


class Foreign:
    """A cache of somebody else, as mlx-lm's server is given in its tests."""

    nbytes = 7

    def __init__(self, fails=False):
        self.fails = fails
        self.trimmed = 0

    def is_trimmable(self):
        return True

    def size(self):
        return 2

    def trim(self, n):
        if self.fails:
            raise RuntimeError("trim")
        self.trimmed += n
        return n


class MakePromptCacheTest(unittest.TestCase):
    def test_a_model_without_make_cache_gets_one_a_layer(self):
        model = SimpleNamespace(layers=[1, 2, 3])
        self.assertEqual(class_names(make_prompt_cache(model)), ["KVCache"] * 3)
        for cache in make_prompt_cache(model, 16):
            self.assertEqual((type(cache), cache.max_size, cache.keep), (RotatingKVCache, 16, 4))

    def test_the_bound_reaches_models_that_make_their_own(self):
        window, state, chunked = RotatingKVCache(max_size=8), ArraysCache(2), ChunkedKVCache(4)
        model = model_of(KVCache(), window, state, chunked, CacheList(ArraysCache(1), CacheList(KVCache())))
        caches = make_prompt_cache(model, max_kv_size=16)
        self.assertEqual(
            class_names(caches), ["RotatingKVCache", "RotatingKVCache", "ArraysCache", "ChunkedKVCache", "CacheList"]
        )
        self.assertEqual((caches[0].max_size, caches[0].keep), (16, 4))
        self.assertIs(caches[1], window)
        self.assertIs(caches[2], state)
        self.assertEqual((caches[4][1][0].max_size, caches[4][1][0].keep), (16, 4))
        self.assertEqual(class_names(make_prompt_cache(model))[0], "KVCache")

    def test_a_bound_in_which_only_the_kept_tokens_fit_is_refused(self):
        for size in (4, 0, -1):
            for model in (SimpleNamespace(layers=[1]), model_of(ArraysCache(1))):
                with self.assertRaises(InvalidArgumentError):
                    make_prompt_cache(model, size)

    @unittest.skipIf(theirs is None, "needs mlx-lm")
    def test_caches_of_mlx_lm_become_ours(self):
        original = {name: vars(theirs)[name] for name in ("KVCache", "RotatingKVCache", "ArraysCache", "CacheList")}
        if original["KVCache"] is KVCache:
            self.skipTest("mlx-lm runs on our caches already")
        filled = fill(original["KVCache"](), 3)
        state = original["ArraysCache"](2, left_padding=[1])
        other = Foreign()
        caches = make_prompt_cache(
            model_of(
                filled,
                original["RotatingKVCache"](max_size=8, keep=2),
                original["CacheList"](state, original["KVCache"]()),
                other,
            )
        )
        self.assertEqual([type(c) for c in caches], [KVCache, RotatingKVCache, CacheList, Foreign])
        self.assertEqual((caches[0].offset, caches[0].keys_and_values()[0].flatten().tolist()), (3, [0, 1, 2]))
        self.assertEqual((caches[1].max_size, caches[1].keep), (8, 2))
        self.assertEqual([type(c) for c in caches[2].caches], [ArraysCache, KVCache])
        self.assertEqual(caches[2][0].left_padding.tolist(), [1])
        self.assertIs(caches[3], other)


class TrimTest(unittest.TestCase):
    def test_all_layers_move_by_the_minimum(self):
        caches = [fill(KVCache(), 5), CacheList(fill(KVCache(), 3), fill(KVCache(), 4)), fill(RotatingKVCache(8), 6)]
        self.assertTrue(can_trim_prompt_cache(caches))
        self.assertTrue(can_trim_prompt_cache(caches, 3))
        self.assertFalse(can_trim_prompt_cache(caches, 4))
        self.assertEqual(trim_prompt_cache(caches, 9), 3)
        self.assertEqual((caches[0].offset, caches[1][0].offset, caches[1][1].offset, caches[2].offset), (2, 0, 1, 3))

    def test_one_layer_that_cannot_stops_all(self):
        caches = [fill(KVCache(), 5), ArraysCache(1)]
        self.assertFalse(can_trim_prompt_cache(caches))
        self.assertEqual((trim_prompt_cache(caches, 1), caches[0].offset), (0, 5))
        wrapped = [fill(KVCache(), 5), fill(RotatingKVCache(4), 5)]
        self.assertEqual((trim_prompt_cache(wrapped, 1), wrapped[0].offset), (0, 5))

    def test_no_layers(self):
        self.assertTrue(can_trim_prompt_cache([]))
        self.assertEqual(trim_prompt_cache([], 3), 0)
        self.assertEqual((cache_length([]), prompt_cache_nbytes([]), fork_prompt_cache([])), (0, 0, []))

    def test_negative_numbers_are_refused(self):
        caches = [fill(KVCache(), 5)]
        for call in (trim_prompt_cache, can_trim_prompt_cache):
            with self.assertRaises(InvalidArgumentError):
                call(caches, -1)
        self.assertEqual(caches[0].offset, 5)

    def test_other_objects_are_trimmed_as_mlx_lm_does(self):
        caches = [Foreign(), Foreign()]
        self.assertTrue(can_trim_prompt_cache(caches, 100))
        self.assertEqual(trim_prompt_cache(caches, 4), 4)
        self.assertEqual([c.trimmed for c in caches], [4, 4])

    def test_a_layer_that_fails_leaves_all_as_they_were(self):
        ours, foreign = fill(KVCache(), 5), Foreign()
        with self.assertRaisesRegex(RuntimeError, "trim"):
            trim_prompt_cache([ours, foreign, Foreign(fails=True)], 2)
        self.assertEqual((ours.offset, foreign.trimmed), (5, 0))


class WholeTest(unittest.TestCase):
    def test_length_and_bytes(self):
        caches = [fill(KVCache(), 5), ArraysCache(1), CacheList(fill(KVCache(), 7)), Foreign()]
        self.assertEqual(cache_length(caches), 7)
        self.assertEqual(prompt_cache_nbytes(caches), caches[0].nbytes + caches[2].nbytes + 7)

    def test_a_fork_is_independent(self):
        caches = [fill(KVCache(), 5), CacheList(fill(KVCache(), 5))]
        fork = fork_prompt_cache(caches)
        fill(fork[0], 1)
        fill(caches[1][0], 2)
        self.assertEqual((caches[0].offset, fork[0].offset), (5, 6))
        self.assertEqual((caches[1][0].offset, fork[1][0].offset), (7, 5))

    def test_check_names_the_layer_that_differs(self):
        caches = [fill(KVCache(), 5), ArraysCache(1), fill(KVCache(), 5)]
        check_prompt_cache(caches)
        check_prompt_cache(caches, 5)
        caches[2].trim(1)
        for layers in (caches, caches + [Foreign()]):
            with self.assertRaisesRegex(FailedPreconditionError, "layer 2"):
                check_prompt_cache(layers)
        with self.assertRaises(FailedPreconditionError):
            check_prompt_cache([fill(KVCache(), 5), Foreign()], 4)


class MaybeQuantizeTest(unittest.TestCase):
    def quantize(self, caches, start=0, group_size=32, bits=8):
        maybe_quantize_kv_cache(caches, quantized_kv_start=start, kv_group_size=group_size, kv_bits=bits)

    def test_layers_at_the_start_are_replaced_in_the_callers_list(self):
        inner = CacheList(fill(KVCache(), 5, 32))
        caches = [fill(KVCache(), 5, 32), fill(KVCache(), 4, 32), ArraysCache(1), inner, Foreign()]
        self.quantize(caches, start=5, bits=4)
        self.assertEqual(class_names(caches), ["QuantizedKVCache", "KVCache", "ArraysCache", "CacheList", "Foreign"])
        self.assertEqual((caches[0].offset, caches[0].group_size, caches[0].bits), (5, 32, 4))
        self.assertEqual(type(inner[0]), KVCache)
        before = caches[0]
        self.quantize(caches, start=5, bits=4)
        self.assertIs(caches[0], before)

    def test_windows_are_quantised_at_any_fill(self):
        caches = [fill(RotatingKVCache(max_size=4, keep=1), n, 32) for n in (2, 4, 7)]
        self.quantize(caches)
        self.assertEqual(class_names(caches), ["QuantizedRotatingKVCache"] * 3)
        self.assertEqual([c.offset for c in caches], [2, 4, 7])

    def test_a_head_size_that_does_not_fit_is_told_by_the_first_call(self):
        # Long before the start, and with nothing replaced.
        caches = [fill(KVCache(), 5, 32), fill(KVCache(), 5, 48)]
        for start in (5000, 0):
            with self.assertRaisesRegex(InvalidArgumentError, "layer 1.*but got 32 for 48"):
                self.quantize(caches, start=start)
            self.assertEqual(class_names(caches), ["KVCache", "KVCache"])

    def test_numbers_that_mlx_does_not_know_are_refused(self):
        for group_size, bits in ((48, 8), (32, 7)):
            with self.assertRaises(InvalidArgumentError):
                self.quantize([KVCache()], group_size=group_size, bits=bits)

    def test_no_bits_no_change(self):
        caches = [fill(KVCache(), 5, 48)]
        maybe_quantize_kv_cache(caches, 0, 7, None)
        self.assertEqual(class_names(caches), ["KVCache"])


if __name__ == "__main__":
    unittest.main()
