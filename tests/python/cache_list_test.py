"""CacheList: all of its children do what is asked, or none has."""

import copy
import pickle
import unittest

import mlx.core as mx

from reprise.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    _BaseCache,
)
from reprise.errors import CorruptDataError, InvalidArgumentError, UnsupportedError


def fill(cache, count, batch=1):
    rows = mx.arange(count, dtype=mx.float32).reshape(1, 1, count, 1) + mx.zeros((batch, 1, 1, 1))
    cache.update_and_fetch(rows, rows)
    return cache


class Foreign:
    """A cache of somebody else, with plain attributes that it changes in place."""

    def __init__(self):
        self.lengths = mx.array([1, 2])
        self.log = []

    def is_trimmable(self):
        return True

    def trim(self, n):
        self.lengths -= n
        self.log.append(n)
        return n

    def filter(self, rows):
        self.lengths = self.lengths[mx.array(rows)]
        self.log.append("filter")

    def size(self):
        return 0


class Failing(Foreign):
    def trim(self, n):
        raise RuntimeError("trim")

    def filter(self, rows):
        raise RuntimeError("filter")


class CacheListTest(unittest.TestCase):
    def test_it_is_what_mlx_lm_reads(self):
        first, second = KVCache(), KVCache()
        caches = CacheList(first, second)
        self.assertIs(caches[0], first)
        self.assertIs(caches.caches[1], second)
        self.assertTrue(caches)
        self.assertIsInstance(caches, _BaseCache)
        for absent in ("make_mask", "bits", "advance", "to_quantized", "keys", "offset", "update_and_fetch"):
            self.assertFalse(hasattr(caches, absent), absent)
        caches.caches = [second, first]
        self.assertIs(caches[0], second)

    def test_sizes(self):
        caches = CacheList(fill(KVCache(), 3), fill(KVCache(), 5))
        self.assertEqual((caches.size(), caches.length(), caches.position), (5, 5, 3))
        self.assertEqual(caches.nbytes, caches[0].nbytes + caches[1].nbytes)
        self.assertFalse(caches.empty())
        self.assertTrue(CacheList(KVCache(), fill(KVCache(), 1)).empty())
        nothing = CacheList()
        self.assertEqual((nothing.size(), nothing.length(), nothing.position, nothing.max_trim()), (0, 0, None, 0))
        self.assertTrue(nothing.empty())

    def test_length_counts_what_size_does_not(self):
        caches = CacheList(fill(ConcatenateKVCache(), 4), CacheList(ArraysCache(2)))
        self.assertEqual((caches.size(), caches.length(), caches.position), (0, 4, 4))

    def test_trim_takes_the_common_minimum(self):
        caches = CacheList(fill(KVCache(), 3), fill(KVCache(), 5))
        self.assertEqual(caches.max_trim(), 3)
        self.assertEqual(caches.trim(4), 3)
        self.assertEqual([c.offset for c in caches.caches], [0, 2])
        with self.assertRaises(InvalidArgumentError):
            caches.trim(-1)
        nested = CacheList(fill(KVCache(), 3), CacheList(fill(KVCache(), 2)))
        self.assertEqual(nested.trim(9), 2)
        self.assertEqual((nested[0].offset, nested[1][0].offset), (1, 0))

    def test_trim_is_refused_with_a_child_that_cannot(self):
        ring = fill(RotatingKVCache(max_size=2), 3)
        for other in (ring, ArraysCache(1)):
            caches = CacheList(fill(KVCache(), 3), other)
            self.assertFalse(caches.is_trimmable())
            self.assertEqual((caches.max_trim(), caches.trim(1), caches[0].offset), (0, 0, 3))

    def test_a_child_that_fails_leaves_all_as_they_were(self):
        for operation in ("trim", "filter"):
            batch = fill(BatchKVCache([0, 1]), 4, batch=2)
            foreign = Foreign()
            inner = CacheList(fill(BatchKVCache([0, 0]), 4, batch=2))
            caches = CacheList(batch, foreign, inner, Failing())
            with self.assertRaisesRegex(RuntimeError, operation):
                caches.trim(1) if operation == "trim" else caches.filter([1])
            self.assertIs(caches[0], batch)
            self.assertIs(caches[2], inner)
            self.assertEqual(batch.offset.tolist(), [4, 3])
            self.assertEqual(inner[0].offset.tolist(), [4, 4])
            self.assertEqual((foreign.lengths.tolist(), foreign.log), ([1, 2], []))

    def test_a_child_without_the_operation_is_told_before_anything_happens(self):
        batch = fill(BatchKVCache([0, 1]), 4, batch=2)
        caches = CacheList(batch, KVCache())
        for call in (
            lambda: caches.filter([0]),
            lambda: caches.prepare(lengths=[1, 2], right_padding=[1, 0]),
            lambda: caches.finalize(),
            lambda: caches.extract(0),
            lambda: caches.extend(caches),
        ):
            with self.assertRaises(UnsupportedError):
                call()
        self.assertEqual(batch.offset.tolist(), [4, 3])

    def test_children_keep_their_identity(self):
        batch, state = fill(BatchKVCache([0, 1]), 4, batch=2), ArraysCache(1)
        state[0] = mx.arange(2).reshape(2, 1)
        caches = CacheList(batch, state)
        caches.filter([1])
        self.assertIs(caches[0], batch)
        self.assertIs(caches[1], state)
        self.assertEqual(batch.offset.tolist(), [3])
        self.assertEqual(state[0].tolist(), [[1]])

    def test_merge_extend_extract(self):
        def make(count):
            state = ArraysCache(1)
            state[0] = mx.full((1, 2), count)
            return CacheList(fill(KVCache(), count), state)

        merged = CacheList.merge([make(2), make(3)])
        self.assertEqual([type(c).__name__ for c in merged.caches], ["BatchKVCache", "ArraysCache"])
        merged.extend(make(1).merge([make(1)]))
        self.assertEqual(merged[0].offset.tolist(), [2, 3, 1])
        row = merged.extract(1)
        self.assertEqual((type(row[0]).__name__, row[0].offset, row[1][0].tolist()), ("KVCache", 3, [[3, 3]]))
        with self.assertRaises(InvalidArgumentError):
            CacheList.merge([])
        with self.assertRaises(InvalidArgumentError):
            CacheList.merge([make(1), CacheList(KVCache())])
        with self.assertRaises(InvalidArgumentError):
            merged.extend(CacheList(merged[0]))
        self.assertEqual(merged[0].offset.tolist(), [2, 3, 1])

    def test_prepare_and_finalize_reach_all(self):
        caches = CacheList(BatchKVCache([0, 0]), ArraysCache(1))
        caches.prepare(lengths=[1, 3], right_padding=[2, 0])
        self.assertEqual(caches[1].lengths.tolist(), [1, 3])
        fill(caches[0], 3, batch=2)
        caches.finalize()
        self.assertEqual(caches[0].offset.tolist(), [1, 3])
        self.assertIsNone(caches[1].lengths)

    def test_copies_are_forks(self):
        def from_state(caches):
            return CacheList.from_state(caches.state)

        def pickled(caches):
            return pickle.loads(pickle.dumps(caches))

        for make_copy in (CacheList.fork, copy.copy, copy.deepcopy, from_state, pickled):
            caches = CacheList(fill(KVCache(), 3), CacheList(fill(KVCache(), 2)))
            other = make_copy(caches)
            self.assertEqual((other[0].offset, other[1][0].offset), (3, 2))
            fill(other[0], 2)
            self.assertEqual((caches[0].offset, other[0].offset), (3, 5))
            fill(caches[1][0], 3)
            self.assertEqual((caches[1][0].offset, other[1][0].offset), (5, 2))

    def test_a_derived_class_and_its_attributes_are_kept(self):
        class Derived(CacheList):
            pass

        caches = Derived(KVCache())
        caches.note = ["n"]
        other = copy.deepcopy(caches)
        self.assertIs(type(other), Derived)
        self.assertEqual(other.note, ["n"])
        self.assertIsNot(other.note, caches.note)

    def test_state(self):
        caches = CacheList(fill(KVCache(), 3), ArraysCache(2))
        self.assertEqual([name for _, name in caches.state], ["KVCache", "ArraysCache"])
        other = CacheList()
        other.state = caches.state
        self.assertEqual(other[0].offset, 3)
        before = other.caches
        for name in ("NoSuchCache", "make_prompt_cache", 5):
            with self.assertRaises(CorruptDataError):
                other.state = [((None, None, 0), "KVCache"), ((), name)]
            self.assertIs(other.caches, before)


if __name__ == "__main__":
    unittest.main()
