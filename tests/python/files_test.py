"""Prompt-cache files of Python, of the C++ program and of mlx-lm: the same bytes for the same cache, and each reads the
others'.

REPRISE_PROMPT_CACHE_TOOL and REPRISE_PROGRAM name the C++ programs (prompt_cache_tool, reprise); else those of the
newest build folder are used. Without them their tests are skipped.
"""
import json
import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

from cache_support import (BATCHES, CLASSES, IS_REFERENCE, REFERENCE, SUBJECT, CacheTestCase, filled, frozen, loose, mx,
                           ours_only, rows, slot, unpadded)

SOURCE = pathlib.Path(os.environ.get("REPRISE_SOURCE_DIR", pathlib.Path(__file__).parents[2]))
HISTORIES = [(), (3, 1), (12, 1, 1), (300,)]
METADATA = {"model": "some/model", "a.b": "1", "a": "2", "0": "3", "1": "4", "text": "é中 \"quoted\"\nline\t\\", "empty": "",
            "ключ": "значение", "long": "x" * 10000, "2.0": "not the sentinel"}


def program(variable, name):
    """The program, built from the same sources."""
    if variable in os.environ:
        return os.environ[variable]
    found = sorted(SOURCE.glob(f"build/*/bin/{name}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise unittest.SkipTest(f"{name} is not built (or name it in {variable})")
    return str(found[-1])


def run(*words):
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if result.returncode:
        raise AssertionError(f"{' '.join(map(str, words))}: {result.stderr[-2000:]}")
    return result.stdout


def header(path):
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8:8 + length])


class FilesTestCase(CacheTestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def samples(self, module):
        """(name, prompt cache) of every class, also nested, in several states."""
        for name in CLASSES:
            for counts in HISTORIES:
                if name == "ConcatenateKVCache" and not counts and module is REFERENCE:
                    continue  # mlx-lm cannot load its own
                yield f"{name}{counts}", [filled(module, name, counts)]
        trimmed = filled(module, "KVCache", (300, 1))
        trimmed.trim(46)
        yield "trimmed", [trimmed]
        yield "layers", [filled(module, "KVCache", (5,)) for _ in range(12)]
        yield "nested", [module.CacheList(module.CacheList(filled(module, "KVCache", (12, 1)),
                                                           filled(module, "ArraysCache")),
                                          filled(module, "RotatingKVCache", (12, 1)))]
        arrays = module.ArraysCache(3, [1, 0, 2])
        arrays[1] = slot(3, 3)
        arrays.prepare(lengths=[4, 5, 6])
        yield "arrays with paddings", [arrays]
        for dtype in (mx.float16, mx.bfloat16):
            cache = module.KVCache()
            cache.update_and_fetch(*rows(3, dtype=dtype))
            yield str(dtype), [cache]

    def own_samples(self):
        """What mlx-lm's files cannot hold or its classes cannot be."""
        for keep in (0, 2):
            ring = SUBJECT.RotatingKVCache(8, keep)
            for count in (5, 1, 1, 1, 1, 1):
                ring.update_and_fetch(*rows(count))
            yield f"quantised ring that keeps {keep}", [ring.to_quantized(32, 4)]
            if keep:
                yield "batch of rings that keep", [SUBJECT.RotatingKVCache.merge([ring, ring])]
        batch = filled(SUBJECT, "BatchRotatingKVCache", (3, 1))
        yield "quantised batch of rings", [batch.to_quantized(32, 4)]
        yield "quantised batch", [SUBJECT.BatchQuantizedKVCache.merge([filled(SUBJECT, "QuantizedKVCache")] * 2)]
        for name in BATCHES:
            pending = unpadded(SUBJECT, name)
            pending.prepare(lengths=[3, 1, 2], right_padding=[0, 2, 1])
            pending.update_and_fetch(*rows(3, 1, 3))
            yield f"pending {name}", [pending]
        yield "list without children", [SUBJECT.CacheList(SUBJECT.CacheList(), SUBJECT.ArraysCache(0))]
        yield "no layers", []

    def go_on(self, cache):
        """What it shows over more updates, and what it is then; children one by one."""
        if hasattr(cache, "caches"):
            return [self.go_on(child) for child in cache.caches]
        if hasattr(cache, "cache"):
            return [loose(frozen(cache.state)), loose(frozen(cache.make_mask(3)))]
        name = type(cache).__name__
        batch = len(cache.offset.tolist()) if hasattr(cache, "left_padding") else 1
        dtype = cache.keys.dtype if isinstance(cache.keys, mx.array) else mx.float32
        shown = []
        for count in (2, 1, 1):
            if hasattr(cache, "make_mask"):
                shown.append(frozen(cache.make_mask(count, return_array=True, window_size=None)))
            shown.append(frozen(cache.update_and_fetch(*rows(count, 70 + count, batch, dtype))))
            if hasattr(cache, "finalize"):
                cache.finalize()
        if name != "ConcatenateKVCache":
            shown.append(frozen(cache.trim(1)) if cache.is_trimmable() else None)
        shown += [frozen(cache.keys_and_values()), frozen(cache.offset), frozen(cache.size())]
        return loose(shown)

    def check_alike(self, loaded, cache):
        self.assertEqual([type(c).__name__ for c in loaded], [type(c).__name__ for c in cache])
        for one, other in zip(loaded, cache):
            self.assertEqual(self.go_on(one), self.go_on(other))

    def save_again(self, path, copy):
        loaded = SUBJECT.load_prompt_cache_file(path)
        SUBJECT.save_prompt_cache(copy, loaded.cache, loaded.metadata, tokens=loaded.tokens,
                                  model_fingerprint=loaded.model_fingerprint, app_json=loaded.app_json,
                                  layout=loaded.layout)


class RoundTripTest(FilesTestCase):
    def test_every_class_goes_on(self):
        for name, cache in self.samples(SUBJECT):
            with self.subTest(name):
                path = self.folder / "cache.safetensors"
                SUBJECT.save_prompt_cache(str(path), cache, {"sample": name})
                loaded, metadata = SUBJECT.load_prompt_cache(str(path), return_metadata=True)
                path.unlink()
                self.assertEqual(metadata, {"sample": name})
                if IS_REFERENCE:
                    for c in loaded:  # which it forgets
                        if type(c).__name__ in BATCHES:
                            c._right_padding = c._lengths = None
                self.check_alike(loaded, cache)

    @ours_only
    def test_own_classes_go_on(self):
        for name, cache in self.own_samples():
            with self.subTest(name):
                path = SUBJECT.save_prompt_cache(self.folder / "cache", cache)
                self.check_alike(SUBJECT.load_prompt_cache(path), cache)

    @ours_only
    def test_saving_again_gives_the_same_bytes(self):
        for name, cache in [*self.samples(SUBJECT), *self.own_samples()]:
            with self.subTest(name):
                first = SUBJECT.save_prompt_cache(self.folder / "first", cache, METADATA)
                self.save_again(first, self.folder / "second.safetensors")
                self.assertEqual(pathlib.Path(first).read_bytes(), (self.folder / "second.safetensors").read_bytes())
                third = SUBJECT.save_prompt_cache(self.folder / "third", SUBJECT.fork_prompt_cache(cache), METADATA)
                self.assertEqual(pathlib.Path(first).read_bytes(), pathlib.Path(third).read_bytes())

    @ours_only
    def test_what_stands_beside_the_cache(self):
        cache = [filled(SUBJECT, "KVCache")]
        path = SUBJECT.save_prompt_cache(self.folder / "cache", cache, METADATA, tokens=[5, 6, 7, 2 ** 31 - 1],
                                         model_fingerprint="abc", app_json='{"chat":["é"]}')
        loaded = SUBJECT.load_prompt_cache_file(path)
        self.assertEqual((loaded.metadata, loaded.tokens, loaded.model_fingerprint, loaded.app_json, loaded.layout),
                         (METADATA, [5, 6, 7, 2 ** 31 - 1], "abc", '{"chat":["é"]}', "current"))
        plain = SUBJECT.load_prompt_cache_file(SUBJECT.save_prompt_cache(self.folder / "plain", cache))
        self.assertEqual((plain.metadata, plain.tokens, plain.model_fingerprint, plain.app_json), ({}, None, "", ""))

    @ours_only
    def test_only_valid_rows_are_saved(self):
        """[P2], [K4]"""
        path = SUBJECT.save_prompt_cache(self.folder / "cache", [filled(SUBJECT, "KVCache")])
        self.assertEqual(header(path)["0.0"]["shape"], [1, 2, 4, 32])

    @ours_only
    def test_legacy_layout(self):
        for name, cache in self.samples(SUBJECT):
            with self.subTest(name):
                try:
                    path = SUBJECT.save_prompt_cache(self.folder / "cache", cache, {"a": "b"}, layout="legacy")
                except NotImplementedError:
                    continue  # [P7]: what it cannot hold is refused
                loaded = SUBJECT.load_prompt_cache_file(path)
                self.assertEqual((loaded.layout, loaded.metadata), ("legacy", {"a": "b"}))
                self.check_alike(loaded.cache, cache)

    @ours_only
    def test_portable(self):
        ring = SUBJECT.RotatingKVCache(8)
        ring.update_and_fetch(*rows(5))
        path = SUBJECT.save_prompt_cache(self.folder / "cache", [ring.to_quantized(32, 8)], portable=True)
        (theirs,) = REFERENCE.load_prompt_cache(path)
        self.assertEqual((type(theirs), theirs.offset), (REFERENCE.RotatingKVCache, 5))
        (ours,) = SUBJECT.load_prompt_cache(path)
        self.assertEqual((type(ours), ours.bits), (SUBJECT.QuantizedRotatingKVCache, 8))


class ArgumentsTest(FilesTestCase):
    def test_file_names(self):
        cache = [filled(SUBJECT, "KVCache")]
        SUBJECT.save_prompt_cache(str(self.folder / "text.safetensors"), cache)
        SUBJECT.save_prompt_cache(str(self.folder / "without"), cache)
        self.assertTrue((self.folder / "without.safetensors").exists())
        if not IS_REFERENCE:
            for path in (self.folder / "path.safetensors", self.folder / "ünïcode имя.safetensors",
                         os.fsencode(self.folder / "bytes.safetensors"), self.folder / "no_suffix"):
                written = SUBJECT.save_prompt_cache(path, cache)
                self.assertTrue(os.path.exists(written))
                self.assertEqual(len(SUBJECT.load_prompt_cache(written)), 1)
            self.assertEqual(len(SUBJECT.load_prompt_cache(self.folder / "path.safetensors")), 1)
            self.assertEqual(len(SUBJECT.load_prompt_cache(file_name=pathlib.Path(self.folder, "path.safetensors"))), 1)
        for wrong in (None, 5, 1.5, ["a"], object(), mx.array(1)):
            with self.subTest(wrong=wrong):
                self.assertRaises((TypeError, ValueError), SUBJECT.save_prompt_cache, wrong, cache)
                self.assertRaises((TypeError, ValueError), SUBJECT.load_prompt_cache, wrong)

    @ours_only
    def test_names_of_no_file(self):
        cache = [filled(SUBJECT, "KVCache")]
        for wrong in ("", "a\0b.safetensors", b"a\0b.safetensors"):
            with self.subTest(wrong=wrong):
                self.assertRaises((ValueError, OSError), SUBJECT.save_prompt_cache, wrong, cache)
                self.assertRaises((ValueError, OSError), SUBJECT.load_prompt_cache, wrong)
        self.assertFalse(os.path.exists("a"))
        self.assertFalse(os.path.exists(".safetensors"))

    def test_positional_and_by_name(self):
        cache = [filled(SUBJECT, "KVCache")]
        path = str(self.folder / "cache.safetensors")
        SUBJECT.save_prompt_cache(path, cache, {"a": "b"})
        for loaded in (SUBJECT.load_prompt_cache(path, True), SUBJECT.load_prompt_cache(path, return_metadata=True),
                       SUBJECT.load_prompt_cache(file_name=path, return_metadata=True)):
            self.assertIsInstance(loaded, tuple)
            self.assertEqual(loaded[1], {"a": "b"})
        self.assertIsInstance(SUBJECT.load_prompt_cache(path), list)
        SUBJECT.save_prompt_cache(file_name=path, cache=cache, metadata={"c": "d"})
        self.assertEqual(SUBJECT.load_prompt_cache(path, True)[1], {"c": "d"})
        SUBJECT.save_prompt_cache(path, tuple(cache), None)
        self.assertEqual(dict(SUBJECT.load_prompt_cache(path, True)[1]), {})

    @ours_only
    def test_metadata(self):
        """[P3]"""
        cache = [filled(SUBJECT, "KVCache")]
        for metadata in ({}, METADATA, {"0": "a"}, {"": "x"}, {"a": "\0"}, {".": "."}, {"a.": "b", ".a": "c"}):
            with self.subTest(keys=list(metadata)):
                if "" in metadata:
                    self.assertRaises(ValueError, SUBJECT.save_prompt_cache, self.folder / "x", cache, metadata)
                    continue
                path = SUBJECT.save_prompt_cache(self.folder / "cache", cache, metadata)
                self.assertEqual(SUBJECT.load_prompt_cache(path, True)[1], metadata)
        for wrong in ({"a": 1}, {1: "a"}, {"a": None}, {"a": {"b": "c"}}, "text", 5, [1], {"a": b"x"}, {"\ud800": "x"},
                      {"x": "\ud800"}):
            with self.subTest(wrong=repr(wrong)):
                self.assertRaises((TypeError, ValueError), SUBJECT.save_prompt_cache, self.folder / "no", cache, wrong)
        self.assertFalse((self.folder / "no.safetensors").exists())

    @ours_only
    def test_keywords(self):
        cache = [filled(SUBJECT, "KVCache")]
        for wrong in ({"tokens": "text"}, {"tokens": ["a"]}, {"tokens": [2 ** 40]}, {"tokens": 5}, {"layout": "other"},
                      {"layout": 1}, {"app_json": "{"}, {"app_json": "[]"}, {"model_fingerprint": 1}, {"unknown": 1},
                      {"portable": "x"}):
            with self.subTest(wrong=wrong):
                self.assertRaises((TypeError, ValueError), SUBJECT.save_prompt_cache, self.folder / "no", cache, **wrong)
        self.assertRaises(TypeError, SUBJECT.save_prompt_cache, self.folder / "no", cache, {}, [1, 2])
        self.assertEqual(list(self.folder.iterdir()), [])

    @ours_only
    def test_what_is_no_prompt_cache(self):
        for wrong in (None, 5, "text", [None], [5], [object()], {"a": 1}, [mx.array(1)], filled(SUBJECT, "KVCache")):
            with self.subTest(wrong=repr(wrong)[:50]):
                self.assertRaises((TypeError, ValueError), SUBJECT.save_prompt_cache, self.folder / "no", wrong)
        self.assertEqual(list(self.folder.iterdir()), [])

    @ours_only
    def test_fields_written_before_saving(self):
        cache = SUBJECT.KVCache()
        cache.keys, cache.values = rows(5)
        cache.offset = 3
        path = SUBJECT.save_prompt_cache(self.folder / "cache", [cache])
        self.assertEqual(SUBJECT.load_prompt_cache(path)[0].offset, 3)
        cache.keys = mx.zeros((2, 2))
        self.assertRaises(ValueError, SUBJECT.save_prompt_cache, path, [cache])
        self.assertEqual(SUBJECT.load_prompt_cache(path)[0].offset, 3)

    @ours_only
    def test_subclasses_are_saved_as_their_class(self):
        class Mine(SUBJECT.KVCache):
            pass
        cache = Mine()
        cache.update_and_fetch(*rows(3))
        path = SUBJECT.save_prompt_cache(self.folder / "cache", [cache])
        self.assertIs(type(SUBJECT.load_prompt_cache(path)[0]), SUBJECT.KVCache)

    @ours_only
    def test_a_failed_save_leaves_the_old_file(self):
        """[P6]"""
        cache = [filled(SUBJECT, "KVCache")]
        path = pathlib.Path(SUBJECT.save_prompt_cache(self.folder / "cache", cache))
        before = path.read_bytes()
        for wrong in ([filled(SUBJECT, "KVCache"), filled(SUBJECT, "KVCache", (9,))], [None], [object()]):
            self.assertRaises((ValueError, TypeError), SUBJECT.save_prompt_cache, path, wrong)
        self.assertRaises(OSError, SUBJECT.save_prompt_cache, self.folder / "no" / "such" / "folder", cache)
        self.assertEqual(path.read_bytes(), before)
        self.assertEqual([p.name for p in self.folder.iterdir()], ["cache.safetensors"])


@ours_only
class DamageTest(FilesTestCase):
    """[P6]: a damaged file is refused with ValueError (or as not there); nothing else happens."""

    def refused(self, path, kinds=ValueError):
        with self.assertRaises(kinds) as caught:
            SUBJECT.load_prompt_cache(path)
        self.assertTrue(str(caught.exception))

    def test_cut_short(self):
        for name in CLASSES:
            path = pathlib.Path(SUBJECT.save_prompt_cache(self.folder / name, [filled(SUBJECT, name)]))
            data = path.read_bytes()
            for length in sorted({0, 1, 7, 8, 9, 100, len(data) // 3, len(data) // 2, len(data) - 1}):
                path.write_bytes(data[:length])
                with self.subTest(name, length=length):
                    self.refused(path)

    def test_flipped_bits(self):
        import random
        generator = random.Random(2)
        for name in CLASSES:
            path = pathlib.Path(SUBJECT.save_prompt_cache(self.folder / name, [filled(SUBJECT, name)], {"a": "b"}))
            data = path.read_bytes()
            for _ in range(40):
                damaged = bytearray(data)
                damaged[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
                path.write_bytes(damaged)
                with self.subTest(name):
                    # Spaces behind the header belong to nothing.
                    try:
                        loaded = SUBJECT.load_prompt_cache(path)
                        self.check(loaded[0].state, SUBJECT.load_prompt_cache(self.good(name, data))[0].state)
                    except ValueError:
                        pass

    def good(self, name, data):
        path = self.folder / f"good_{name}.safetensors"
        path.write_bytes(data)
        return path

    def test_other_files(self):
        for name, data in {"empty": b"", "text": b"hello, world, this is no cache", "zeros": bytes(1000),
                           "huge": struct.pack("<Q", 2 ** 63) + b"{}", "object": struct.pack("<Q", 2) + b"{}",
                           "list": struct.pack("<Q", 2) + b"[]", "deep": struct.pack("<Q", 20000) + b"[" * 20000}.items():
            path = self.folder / f"{name}.safetensors"
            path.write_bytes(data)
            with self.subTest(name):
                self.refused(path)
        mx.save_safetensors(str(self.folder / "weights.safetensors"), {"w": mx.zeros((2,))})
        self.refused(self.folder / "weights.safetensors")
        self.refused(self.folder / "absent.safetensors", FileNotFoundError)
        self.refused(self.folder / "no_suffix", (ValueError, FileNotFoundError))
        (self.folder / "folder.safetensors").mkdir()
        self.refused(self.folder / "folder.safetensors", (ValueError, OSError))

    def test_unknown_classes(self):
        cache = [filled(REFERENCE, "KVCache")]
        path = self.folder / "cache.safetensors"
        for name in ("NoSuchCache", "object", "_BaseCache", "LRUPromptCache", "", "os.system"):
            REFERENCE.save_prompt_cache(str(path), cache)
            arrays, metadata = mx.load(str(path), return_metadata=True)
            metadata["1.0"] = name
            mx.save_safetensors(str(path), arrays, metadata)
            with self.subTest(name):
                self.refused(path, (ValueError, NotImplementedError))

    def test_the_error_names_layer_and_item(self):
        path = self.folder / "cache.safetensors"
        REFERENCE.save_prompt_cache(str(path), [filled(REFERENCE, "KVCache"), filled(REFERENCE, "KVCache")])
        arrays, metadata = mx.load(str(path), return_metadata=True)
        arrays["1.2"] = mx.array(100000)
        mx.save_safetensors(str(path), arrays, metadata)
        with self.assertRaises(ValueError) as caught:
            SUBJECT.load_prompt_cache(path)
        self.assertRegex(str(caught.exception), "layer 1|1.2|offset")


class ReferenceFilesTest(FilesTestCase):
    """Files of mlx-lm's and of ours change sides."""

    def finished(self, cache):
        for c in cache:
            for each in [c, *getattr(c, "caches", [])]:
                if type(each).__name__ in BATCHES:
                    each._right_padding = each._lengths = None  # which mlx-lm forgets
        return cache

    @ours_only
    def test_mlx_lm_reads_ours(self):
        for name, cache in self.samples(SUBJECT):
            with self.subTest(name):
                if name.startswith("ConcatenateKVCache()"):
                    continue  # becomes an empty KVCache there [P5]
                path = SUBJECT.save_prompt_cache(self.folder / "cache", cache, {"sample": "x"})
                loaded, metadata = REFERENCE.load_prompt_cache(path, return_metadata=True)
                self.assertEqual(metadata, {"sample": "x"})
                self.check_alike(self.finished(loaded), cache)

    @ours_only
    def test_ours_read_mlx_lms(self):
        for name, cache in self.samples(REFERENCE):
            with self.subTest(name):
                path = str(self.folder / "cache.safetensors")
                REFERENCE.save_prompt_cache(path, cache, {"sample": "x"})
                loaded, metadata = SUBJECT.load_prompt_cache(path, return_metadata=True)
                self.assertEqual(metadata, {"sample": "x"})
                self.check_alike(loaded, cache)

    @ours_only
    def test_a_cache_of_mlx_lms_own_class_is_refused_by_its_full_name(self):
        with self.assertRaisesRegex(TypeError, r"mlx_lm\.models\.cache\.KVCache"):
            SUBJECT.save_prompt_cache(str(self.folder / "theirs.safetensors"), [REFERENCE.KVCache()])

    @ours_only
    def test_a_cache_of_mlx_lm_gives_the_bytes_of_ours(self):
        for (name, theirs), (_, ours) in zip(self.samples(REFERENCE), (pair for pair in self.samples(SUBJECT)
                                                                         if pair[0] != "ConcatenateKVCache()")):
            with self.subTest(name):
                REFERENCE.save_prompt_cache(str(self.folder / "theirs.safetensors"), theirs, {"a": "b"})
                loaded = SUBJECT.load_prompt_cache(self.folder / "theirs.safetensors")
                again = SUBJECT.save_prompt_cache(self.folder / "again", loaded, {"a": "b"})
                want = SUBJECT.save_prompt_cache(self.folder / "ours", ours, {"a": "b"})
                self.assertEqual(pathlib.Path(again).read_bytes(), pathlib.Path(want).read_bytes())


@ours_only
class ProgramFilesTest(FilesTestCase):
    """The C++ side, which is another process: prompt_cache_tool loads and saves files, reprise makes them."""

    def folders(self):
        first, second = self.folder / "first", self.folder / "second"
        first.mkdir(), second.mkdir()
        return first, second

    def check_same_files(self, first, second, at_least):
        names = sorted(path.name for path in first.iterdir())
        self.assertGreaterEqual(len(names), at_least)
        self.assertEqual(names, sorted(path.name for path in second.iterdir()))
        for name in names:
            with self.subTest(header(first / name)["__metadata__"].get("0.sample", name)):
                self.assertEqual((first / name).read_bytes(), (second / name).read_bytes())

    def test_files_of_python(self):
        """Made here, loaded and saved there."""
        tool = program("REPRISE_PROMPT_CACHE_TOOL", "prompt_cache_tool")
        first, second = self.folders()
        count = 0
        for name, cache in [*self.samples(SUBJECT), *self.own_samples()]:
            position = SUBJECT.cache_length(cache) if name.startswith("KVCache") else None
            beside = {"tokens": [7] * position, "model_fingerprint": "m", "app_json": '{"a":1}'} if position else {}
            SUBJECT.save_prompt_cache(first / str(count), cache, dict(METADATA, sample=name), **beside)
            count += 1
        run(tool, "rewrite", first, second)
        self.check_same_files(first, second, count)

    def test_files_of_the_program(self):
        """Every state that the C++ tests know: made there, loaded and saved here."""
        tool = program("REPRISE_PROMPT_CACHE_TOOL", "prompt_cache_tool")
        for layout, at_least in (("current", 150), ("legacy", 80)):
            first, second = self.folder / layout, self.folder / f"{layout}_again"
            first.mkdir(), second.mkdir()
            run(tool, "write-samples", first, *(["layout=legacy"] if layout == "legacy" else []))
            for path in first.iterdir():
                with self.subTest(header(path)["__metadata__"].get("0.sample", path.name), layout=layout):
                    self.save_again(path, second / path.name)
            self.check_same_files(first, second, at_least)

    def test_a_cache_prompt_file(self):
        reprise = program("REPRISE_PROGRAM", "reprise")
        model = os.environ.get("REPRISE_MODEL", SOURCE / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")
        if not os.path.exists(model):
            self.skipTest(f"no model at {model}; name one in REPRISE_MODEL")
        first, second = self.folder / "first.safetensors", self.folder / "second.safetensors"
        run(reprise, "cache-prompt", "--model", model, "--prompt", "Hello, files!", "--prompt-cache-file", first,
            "--max-kv-size", "16")
        loaded = SUBJECT.load_prompt_cache_file(first)
        self.assertGreater(len(loaded.tokens), 3)
        self.assertIn("model", loaded.metadata)
        self.assertEqual({c.position for c in loaded.cache}, {len(loaded.tokens)})
        self.save_again(first, second)
        self.assertEqual(first.read_bytes(), second.read_bytes())
        theirs = REFERENCE.load_prompt_cache(str(first))
        self.assertEqual({(type(c), c.offset) for c in theirs}, {(REFERENCE.RotatingKVCache, len(loaded.tokens))})


if __name__ == "__main__":
    unittest.main()
