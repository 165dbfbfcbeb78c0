"""Errors of the cache classes: the kind of exception that callers of mlx-lm expect, a message that helps, an object
that is what it was; and no call that ends the process."""
import os
import pathlib
import subprocess
import sys
import unittest

from cache_support import (ATTENTION, BATCHES, CLASSES, IS_REFERENCE, REFERENCE, SUBJECT, CacheTestCase, filled, frozen,
                           make, mx, ours_only, required_here, rows, slot)

FOLDER = pathlib.Path(__file__).parent


class SameErrorsTest(CacheTestCase):
    """What mlx-lm refuses ours refuse with the same kind of exception, and stay what they are."""

    def check_same(self, name, call, counts=(3, 1), kinds=None):
        for module in (SUBJECT, REFERENCE):
            cache = filled(module, name, counts)
            before = frozen(cache.state)
            with self.subTest(name, module=module.__name__):
                with self.assertRaises(kinds) as caught:
                    call(cache, module)
                if module is SUBJECT and not IS_REFERENCE:
                    self.check(cache.state, before, "the object after the error")
                    self.assertTrue(str(caught.exception).strip("'\" "), "a message")

    def test_left_padding_of_a_filled_batch(self):
        for name in BATCHES:
            self.check_same(name, lambda cache, _: cache.prepare(left_padding=[1, 1, 1]), kinds=ValueError)

    def test_decoding_before_finalize(self):
        def decode(cache, _):
            cache.prepare(lengths=[1, 2, 1], right_padding=[1, 0, 1])
            cache.update_and_fetch(*rows(1, 1, 3))

        for module in (SUBJECT, REFERENCE):
            self.assertRaises(RuntimeError, decode, filled(module, "BatchRotatingKVCache"), module)

    def test_merging_rings_of_different_sizes(self):
        for merge in ("RotatingKVCache", "BatchRotatingKVCache"):
            for module in (SUBJECT, REFERENCE):
                rings = [module.RotatingKVCache(8), module.RotatingKVCache(9)]
                self.assertRaises(ValueError, getattr(module, merge).merge, rings)

    def test_rows_that_do_not_fit(self):
        """Other heads, other sizes: mlx says so when the slices are assigned."""
        for name in ATTENTION:
            batch = 3 if name in BATCHES else 1
            values = rows(1, 3, batch)[1]
            for wrong in ((mx.zeros((batch, 5, 1, 32)), values), (mx.zeros((batch, 2, 1, 48)), values), (mx.zeros((batch + 1, 2, 1, 32)), values)):
                self.check_same(name, lambda cache, _: cache.update_and_fetch(*wrong), kinds=ValueError)

    def test_arguments_of_other_kinds(self):
        keys, values = rows(1)
        for name in ATTENTION:
            for wrong in ((None, None), ("keys", values), ([1], [2]), (1, 2)):
                self.check_same(name, lambda cache, _: cache.update_and_fetch(*wrong),
                                kinds=(AttributeError, TypeError))
                with self.assertRaises(TypeError):
                    if IS_REFERENCE:
                        raise TypeError
                    filled(SUBJECT, name).update_and_fetch(*wrong)

    def test_slots_that_are_not_there(self):
        for index in (2, -3, 99):
            self.check_same("ArraysCache", lambda cache, _: cache[index], kinds=IndexError)
            self.check_same("ArraysCache", lambda cache, _: cache.__setitem__(index, slot(1)), kinds=IndexError)
            self.check_same("CacheList", lambda cache, _: cache[index], kinds=IndexError)
        self.check_same("ArraysCache", lambda cache, _: cache["x"], kinds=TypeError)
        self.check_same("ArraysCache", lambda cache, _: cache[None], kinds=TypeError)

    def test_rows_that_are_not_there(self):
        for name in BATCHES:
            for index in (3, 99, -4):
                self.check_same(name, lambda cache, _: cache.extract(index), kinds=(IndexError, ValueError))

    def test_missing_arguments(self):
        for name in ATTENTION:
            self.check_same(name, lambda cache, _: cache.update_and_fetch(), kinds=TypeError)
            self.check_same(name, lambda cache, _: cache.trim(), kinds=TypeError)
        for name in ("RotatingKVCache", "ChunkedKVCache", "ArraysCache", "BatchKVCache", "BatchRotatingKVCache"):
            for module in (SUBJECT, REFERENCE):
                self.assertRaises(TypeError, getattr(module, name))

    def test_bits_that_mlx_does_not_know(self):
        for bits in (7, 0, 1, 9, 16, -4):
            for module in (SUBJECT,) if bits != 7 else (SUBJECT, REFERENCE):
                if module is REFERENCE or not IS_REFERENCE:
                    with self.assertRaises(ValueError):
                        module.QuantizedKVCache(32, bits).update_and_fetch(*rows(1))
        for module in (SUBJECT, REFERENCE):
            self.assertRaises(ValueError, filled(module, "KVCache").to_quantized, 48, 4)
            self.assertRaises(ValueError, filled(module, "KVCache").to_quantized, 32, 7)

    def test_merging_nothing(self):
        for name in ("KVCache", "RotatingKVCache", "BatchKVCache", "BatchRotatingKVCache", "ArraysCache", "CacheList"):
            for module in (SUBJECT, REFERENCE):
                self.assertRaises((ValueError, IndexError, TypeError), getattr(module, name).merge, [])

    def test_empty_caches_have_no_rows(self):
        for name in ATTENTION:
            for module in (SUBJECT, REFERENCE):
                if (name, module) != ("ConcatenateKVCache", REFERENCE) and (name, IS_REFERENCE) != (
                        "ConcatenateKVCache", True):
                    self.assertRaises((ValueError, TypeError, AttributeError), make(module, name).keys_and_values)

    def test_read_only_names(self):
        for name in CLASSES:
            self.check_same(name, lambda cache, _: setattr(cache, "nbytes", 1), kinds=AttributeError)

    def test_unknown_attributes(self):
        for name in CLASSES:
            self.check_same(name, lambda cache, _: cache.no_such_name, kinds=AttributeError)
        self.check_same("KVCache", lambda cache, _: cache.extract(0), kinds=AttributeError)

    def test_tries_and_stores(self):
        for module in (SUBJECT, REFERENCE):
            trie = module.PromptTrie()
            trie.add("m", [1, 2], "value")
            for call in (lambda: trie.get("m", [1]), lambda: trie.get("m", [3]), lambda: trie.get("other", [1]),
                         lambda: trie.pop("m", [1, 3]), lambda: trie.pop("m", [1])):
                self.assertRaises(KeyError, call)
            self.assertEqual(trie.get("m", [1, 2]), "value")
            store = module.LRUPromptCache()
            self.assertRaises((KeyError, ValueError),
                              lambda: store.insert_cache("m", [1], [], cache_type="no such type"))

    def test_state_of_what_cannot_be_saved(self):
        class Odd(SUBJECT._BaseCache):
            state = [object()]

        with self.assertRaises((ValueError, TypeError)):
            SUBJECT.save_prompt_cache("never_written.safetensors", [Odd()])
        self.assertFalse(os.path.exists("never_written.safetensors"))

    def test_loading_what_is_not_there(self):
        for module in (SUBJECT, REFERENCE):
            with self.assertRaises((RuntimeError, OSError)):
                module.load_prompt_cache("no/such/file.safetensors")


class OwnErrorsTest(CacheTestCase):
    """What the requirements refuse and mlx-lm takes."""

    def check_refused(self, cache, call, words, kind=ValueError):
        before = frozen(cache.state)
        with self.assertRaises(kind) as caught:
            call()
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.check(cache.state, before, "the object after the error")

    @required_here("Z8", "trims a negative number")
    def test_negative_trims(self):
        for name in ATTENTION:
            cache = filled(SUBJECT, name)
            self.check_refused(cache, lambda: cache.trim(-1), ["-1", "trim"])
        self.assertRaises(ValueError, SUBJECT.trim_prompt_cache, [filled(SUBJECT, "KVCache")], -1)

    @required_here("M1", "masks of no tokens or of no window")
    def test_masks_of_nothing(self):
        for name in ("KVCache", "QuantizedKVCache", "BatchKVCache", "BatchRotatingKVCache", "RotatingKVCache"):
            cache = filled(SUBJECT, name)
            for arguments in ({"N": 0}, {"N": -1}, {"N": 2, "window_size": -1}):
                arguments = dict({"return_array": True, "window_size": None}, **arguments)
                self.check_refused(cache, lambda: cache.make_mask(**arguments), ["mask"])

    @required_here("F1", "the kept tokens fill the ring")
    def test_rings_without_room(self):
        for arguments in ((0,), (-1,), (4, 4), (4, 5), (4, -1)):
            self.assertRaises(ValueError, SUBJECT.RotatingKVCache, *arguments)

    @required_here("F1", "max_kv_size 4 leaves no room beside the kept tokens")
    def test_small_max_kv_size(self):
        class Model:
            layers = [None]
        with self.assertRaises(ValueError) as caught:
            SUBJECT.make_prompt_cache(Model(), max_kv_size=4)
        self.assertIn("4", str(caught.exception))

    @required_here("Z5", "no tokens on an empty cache make a buffer")
    def test_no_rows_for_an_empty_cache(self):
        for name in ATTENTION:
            cache = make(SUBJECT, name)
            self.check_refused(cache, lambda: cache.update_and_fetch(*rows(0, 1, 3 if name in BATCHES else 1)), [])

    @required_here("Q3", "a head size that the group does not divide")
    def test_head_sizes_that_groups_do_not_divide(self):
        cache = SUBJECT.QuantizedKVCache(64, 4)
        self.check_refused(cache, lambda: cache.update_and_fetch(*rows(1)), ["64", "32"])
        self.assertEqual(cache.nbytes, 0)

    @ours_only
    def test_every_error_is_ours_and_names_the_function(self):
        import reprise.errors
        cache = filled(SUBJECT, "KVCache")
        calls = [lambda: cache.trim(-1), lambda: cache.update_and_fetch(mx.zeros((1, 5, 1, 32)), rows(1)[1]),
                 lambda: SUBJECT.RotatingKVCache(4, 4), lambda: SUBJECT.KVCache().keys_and_values(),
                 lambda: SUBJECT.BatchKVCache([-1]), lambda: filled(SUBJECT, "BatchKVCache").filter([7]),
                 lambda: cache.make_mask(0), lambda: SUBJECT.load_prompt_cache("no_such_file.safetensors")]
        for call in calls:
            with self.assertRaises(reprise.errors.Error) as caught:
                call()
            self.assertRegex(str(caught.exception), r"^\[\w+((\.|::)\w+)*\] .*")

    @ours_only
    def test_kinds(self):
        from reprise import errors
        for cls, kinds in {errors.InvalidArgumentError: (ValueError,), errors.FailedPreconditionError: (RuntimeError,),
                           errors.NotFoundError: (FileNotFoundError,), errors.CorruptDataError: (ValueError,),
                           errors.UnsupportedError: (NotImplementedError,),
                           errors.ResourceExhaustedError: (MemoryError,)}.items():
            for kind in kinds:
                self.assertTrue(issubclass(cls, kind) and issubclass(cls, errors.Error))
        with self.assertRaises(FileNotFoundError):
            SUBJECT.load_prompt_cache("no_such_file.safetensors")
        with self.assertRaises(NotImplementedError):
            SUBJECT.ConcatenateKVCache.merge([]) if hasattr(SUBJECT.ConcatenateKVCache, "merge") else \
                SUBJECT.CacheList.merge([SUBJECT.CacheList(SUBJECT.ConcatenateKVCache())] * 2)

    @ours_only
    def test_a_list_changes_in_all_children_or_in_none(self):
        """[L3]"""
        cache = SUBJECT.CacheList(filled(SUBJECT, "BatchKVCache"), filled(SUBJECT, "BatchRotatingKVCache"))
        self.check_refused(cache, lambda: cache.filter([0, 9]), [])
        self.check_refused(cache, lambda: cache.prepare(left_padding=[1, 1, 1]), [])
        other = SUBJECT.CacheList(filled(SUBJECT, "BatchKVCache"), SUBJECT.BatchRotatingKVCache(9, [0]))
        self.check_refused(cache, lambda: cache.extend(other), [])
        cache = SUBJECT.CacheList(filled(SUBJECT, "KVCache"), filled(SUBJECT, "KVCache", (1,)))
        self.assertEqual(cache.trim(3), 1)
        self.assertEqual([child.offset for child in cache.caches], [3, 0])


class HostileCallsTest(unittest.TestCase):
    """Each group in a process of its own. mlx-lm itself does not stand them: MLX ends the process for some."""

    def run_group(self, group):
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(FOLDER), *filter(None, sys.path)]))
        result = subprocess.run([sys.executable, str(FOLDER / "hostile_calls.py"), group], capture_output=True, text=True,
                                env=environment, timeout=240)
        told = f"{group}: exit {result.returncode}\n{result.stdout[-1500:]}\n{result.stderr[-3000:]}"
        self.assertEqual(result.returncode, 0, told)
        self.assertRegex(result.stdout, r"ok \d+ calls\n$", told)
        if group != "pickles":  # Python itself complains of damaged bytearrays
            self.assertEqual(result.stderr, "", told)

    def test_a_crash_is_seen(self):
        code = "import os; os.abort()"
        self.assertNotEqual(subprocess.run([sys.executable, "-c", code], capture_output=True).returncode, 0)


for _group in ("methods", "keywords", "constructors", "fields", "uninitialised", "functions", "helpers", "pickles",
               "threads", "loops", "leftovers"):
    def _run(self, group=_group):
        if IS_REFERENCE and group in ("methods", "keywords", "constructors", "fields", "functions", "helpers"):
            self.skipTest("mlx-lm does not stand them")
        self.run_group(group)

    setattr(HostileCallsTest, f"test_{_group}", _run)


if __name__ == "__main__":
    unittest.main()
