"""Names, signatures, types and Python behaviour of the cache classes beside mlx-lm's."""
import ast
import copy
import gc
import importlib
import inspect
import itertools
import pathlib
import pickle
import sys
import threading
import unittest
import weakref

from cache_support import (ARGUMENTS, ATTENTION, BATCHES, CLASSES, IS_REFERENCE, PADDING, REFERENCE, SINGLE, SUBJECT,
                           CacheTestCase, both, filled, frozen, loose, make, mx, ours_only, outcome, rows, slot,
                           unpadded)

PUBLIC_NAMES = [name for name in vars(REFERENCE)
                if not name.startswith("_") and getattr(vars(REFERENCE)[name], "__module__", "") == REFERENCE.__name__]

# What ours have in addition, on every class and on some.
ADDED = {"fork", "length", "position", "positions", "max_trim"}
ADDED_TO = {
    "QuantizedKVCache": {"merge"},                             # 3.3: batches of quantised caches
    "BatchKVCache": {"to_quantized", "advance", "batch_size"},  # 8.2
    "BatchRotatingKVCache": {"keep", "advance", "batch_size"},  # [W9]
    "ArraysCache": {"trim"},                                   # [Z8]: answers 0
    "CacheList": {"advance", "make_mask", "batch_size"},       # [L3]
}


def source_files():
    return sorted(pathlib.Path(REFERENCE.__file__).parent.parent.rglob("*.py"))


def names_in_source():
    """(every attribute that a file of mlx-lm names, those it asks for with hasattr or getattr, private ones that it
    takes from another object)"""
    attributes, asked, private = set(), set(), set()
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                attributes.add(node.attr)
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if node.attr.startswith("_") and not own and path != pathlib.Path(REFERENCE.__file__):
                    private.add(node.attr)
            elif (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1 and
                  node.func.id in ("hasattr", "getattr", "setattr") and isinstance(node.args[1], ast.Constant)):
                asked.add(node.args[1].value)
    return attributes | asked, asked, private


class NamesTest(CacheTestCase):
    attributes, asked, private = names_in_source()

    def states(self, name):
        yield "empty", *both(name)
        yield "filled", *both(name, (3, 1))
        ours, theirs = both(name, (3, 1))
        yield "from_state", type(ours).from_state(ours.state), type(theirs).from_state(theirs.state)

    def test_module_has_every_public_name(self):
        self.assertIn("KVCache", PUBLIC_NAMES)
        self.assertEqual([name for name in PUBLIC_NAMES if not hasattr(SUBJECT, name)], [])

    def test_what_mlx_lm_has_is_there(self):
        for name in CLASSES:
            for state, ours, theirs in self.states(name):
                public = {n for n in dir(theirs) if not n.startswith("_")}
                needed = public | set(vars(theirs)) | {n for n in self.private if hasattr(theirs, n) and n[1] != "_"}
                with self.subTest(name, state=state):
                    self.assertEqual(sorted(n for n in needed if not _has(ours, n)), [])

    def test_what_mlx_lm_lacks_is_absent(self):
        """Of all the names that any file of mlx-lm knows."""
        for name in CLASSES:
            for state, ours, theirs in self.states(name):
                allowed = ADDED | ADDED_TO.get(name, set())
                # from_state leaves them out (fault of mlx-lm's: a reloaded batch fails in finalize).
                if state == "from_state":
                    allowed = allowed | set(vars(both(name)[1]))
                extra = [n for n in self.attributes if not n.startswith("__") and _has(ours, n) and not _has(theirs, n)]
                with self.subTest(name, state=state):
                    self.assertEqual(sorted(set(extra) - allowed), [])

    def test_what_mlx_lm_asks_for_is_exact(self):
        self.assertTrue({"bits", "merge", "make_mask", "to_quantized", "keys", "advance"} <= self.asked)
        for name in CLASSES:
            for state, ours, theirs in self.states(name):
                allowed = ADDED | ADDED_TO.get(name, set())
                with self.subTest(name, state=state):
                    for asked in sorted(self.asked - allowed):
                        if not asked.startswith("__"):
                            self.assertEqual(_has(ours, asked), _has(theirs, asked), asked)

    def test_special_methods_are_the_same(self):
        for name in CLASSES:
            for special in ("__len__", "__iter__", "__contains__", "__getitem__", "__setitem__", "__call__",
                            "__enter__", "__add__", "__next__", "__index__", "__int__", "__array__"):
                with self.subTest(name, special=special):
                    self.assertEqual(hasattr(getattr(SUBJECT, name), special), hasattr(getattr(REFERENCE, name), special))

    def test_step_is_a_class_attribute(self):
        for name in CLASSES:
            theirs = getattr(REFERENCE, name)
            with self.subTest(name):
                self.assertEqual(getattr(getattr(SUBJECT, name), "step", None), getattr(theirs, "step", None))

    def test_base_class(self):
        for name in CLASSES:
            with self.subTest(name):
                self.assertTrue(issubclass(getattr(SUBJECT, name), SUBJECT._BaseCache))
                self.assertIsInstance(make(SUBJECT, name), SUBJECT._BaseCache)
                for other in CLASSES:
                    self.assertEqual(isinstance(make(SUBJECT, name), getattr(SUBJECT, other)), name == other)
        self.assertNotIsInstance(object(), SUBJECT._BaseCache)

    def test_a_base_class_of_ones_own(self):
        """deepcopy, from_state and the rest of _BaseCache for caches written in Python (deepseek_v41 has such)."""
        for module in (SUBJECT, REFERENCE):
            class Own(module._BaseCache):
                pass
            own = Own()
            self.assertEqual((own.state, own.is_trimmable(), own.size()), ([], False, 0))
            self.assertRaises(NotImplementedError, lambda: own.nbytes)
            self.assertRaises(NotImplementedError, own.empty)
            own.state = []
            own.state = None
            with self.assertRaises(ValueError):
                own.state = [1]
            self.assertIsInstance(Own.from_state([]), Own)
            self.assertTrue(own)


def _has(cache, name):
    return name in dir(type(cache)) or hasattr(cache, name)  # a property that fails is there


class ValuesTest(CacheTestCase):
    """The attributes of mlx-lm's objects have equal values and types in ours."""

    def test_attributes(self):
        for name in CLASSES:
            for counts in ((), (1,), (3, 1), (12, 1, 1), (5, 6)):
                ours, theirs = both(name, counts)
                with self.subTest(name, counts=counts):
                    self.compare(ours, theirs, name)

    def compare(self, ours, theirs, name):
        for attribute in vars(theirs):
            if attribute not in ("caches", "cache"):
                self.check(getattr(ours, attribute), getattr(theirs, attribute), f"{name}.{attribute}")
        if not theirs_has_unset_nbytes(theirs):
            self.check(ours.nbytes, theirs.nbytes, f"{name}.nbytes")
        for method in ("size", "empty", "is_trimmable"):
            self.check(getattr(ours, method)(), getattr(theirs, method)(), f"{name}.{method}", strict=True)

    def test_state_and_rows_nest_alike(self):
        for name in CLASSES:
            for counts in ((), (3, 1), (12, 1)):
                ours, theirs = both(name, counts)
                with self.subTest(name, counts=counts):
                    self.check(ours.state, theirs.state, f"{name}.state", strict=True)
                    if counts and name in ATTENTION:
                        self.check(ours.keys_and_values(), theirs.keys_and_values(), f"{name} rows", strict=True)

    def test_offsets_are_int_or_arrays(self):
        for name in SINGLE:
            self.assertIs(type(filled(SUBJECT, name).offset), int, name)
        for name in BATCHES:
            for counts in ((), (3, 1)):
                cache = filled(SUBJECT, name, counts)
                for field in (cache.offset, cache.left_padding):
                    self.assertEqual((type(field), field.dtype, field.shape), (mx.array, mx.int32, (len(PADDING),)))
                self.assertIs(type(cache._idx), int)

    def test_what_is_unset_is_none(self):
        for name in ATTENTION:
            cache = make(SUBJECT, name)
            self.assertIs(cache.keys, None)
            self.assertIs(cache.values, None)
        cache = SUBJECT.ArraysCache(2)
        self.assertEqual((cache[0], cache[1], cache.left_padding, cache.lengths), (None,) * 4)
        self.assertIs(SUBJECT.BatchKVCache([0])._right_padding, None)
        self.assertIs(SUBJECT.BatchRotatingKVCache(4, [0])._lengths, None)

    def test_truth_value(self):
        for name in CLASSES:
            for counts in ((), (3,)):
                self.assertIs(bool(filled(SUBJECT, name, counts)), True, name)
        self.assertIs(bool(SUBJECT.CacheList()), True)
        self.assertIs(bool(SUBJECT.ArraysCache(0)), True)

    def test_equality_is_identity(self):
        for name in CLASSES:
            a, b = filled(SUBJECT, name), filled(SUBJECT, name)
            self.assertTrue(a == a and a != b and len({a, b}) == 2, name)

    def test_repr_names_the_class(self):
        for name in CLASSES:
            for counts in ((), (3,)):
                self.assertIn(name, repr(filled(SUBJECT, name, counts)))
                self.assertIn(name, str(filled(SUBJECT, name, counts)))
            self.assertEqual(type(make(SUBJECT, name)).__name__, name)


def theirs_has_unset_nbytes(theirs):
    return outcome(lambda: theirs.nbytes)[0] == "raised"


VALUES = {
    "left_padding": PADDING, "max_size": 8, "keep": 2, "group_size": 32, "bits": 4, "size": 2, "chunk_size": 8,
    "n": 1, "idx": 1, "batch_indices": [2, 0], "N": 3, "window_size": 3, "return_array": True,
    "lengths": [2, 1, 3], "right_padding": [1, 2, 0],
}


def variants(parameters):
    """Ways of giving the arguments: all by position, all by name, the first so many by position, optional ones left
    out. A parameter is (name, kind, required); kind is one of inspect's."""
    named = [p for p in parameters if p[1] == inspect.Parameter.KEYWORD_ONLY]
    positional = [p for p in parameters if p[1] == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    optional = [p[0] for p in parameters if not p[2]]
    for count in range(len(optional) + 1):
        for left_out in itertools.combinations(optional, count):
            given = [p[0] for p in positional if p[0] not in left_out]
            rest = [p[0] for p in named if p[0] not in left_out]
            whole = [p[0] for p in positional]
            for prefix in range(len(given) + 1):
                if given[:prefix] == whole[:prefix]:
                    yield given[:prefix], given[prefix:] + rest


class SignaturesTest(CacheTestCase):
    """Every way to call what mlx-lm defines does the same with ours, unknown and surplus arguments included."""

    def parameters(self, function):
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        signature = inspect.signature(function)
        return [(p.name, p.kind, p.default is p.empty) for p in signature.parameters.values()
                if p.kind in kinds and p.name not in ("self", "cls", "_")]

    def arguments(self, module, name):
        values = dict(VALUES, other=filled(module, name), caches=[filled(module, name), filled(module, name, (2,))])
        values["keys"], values["values"] = rows(1, 9, 3 if name in BATCHES else 1)
        if name not in BATCHES:
            values["batch_indices"], values["idx"] = [0], 0
        values["state"] = filled(module, name).state
        values["v"] = values["state"]
        return values

    def call(self, module, name, method, by_position, by_name, prepared):
        values = self.arguments(module, name)
        positional = [values[n] for n in by_position]
        named = {n: values[n] for n in by_name}
        if method == "__init__":
            return getattr(module, name)(*positional, **named)
        cache = prepared(module)
        result = getattr(cache, method)(*positional, **named)
        return result, cache

    def compare(self, name, method, parameters, prepared, may_return=()):
        calls = list(variants(parameters))
        self.assertTrue(calls)
        for by_position, by_name in calls:
            with self.subTest(name, method=method, by_position=by_position, by_name=by_name):
                self.check_outcome(lambda: self.call(SUBJECT, name, method, by_position, by_name, prepared),
                                   lambda: self.call(REFERENCE, name, method, by_position, by_name, prepared),
                                   f"{name}.{method}", may_return=may_return)

    def check_refusals(self, name, method, parameters, prepared):
        """Too many by position, an unknown name, a missing one."""
        required = [p[0] for p in parameters if p[2]]
        positional = [p[0] for p in parameters if p[1] == inspect.Parameter.POSITIONAL_OR_KEYWORD]

        def wrong(module, arguments, named):
            target = getattr(module, name) if method == "__init__" else getattr(prepared(module), method)
            return target(*arguments, **named)

        values = self.arguments(SUBJECT, name)
        good = [values[n] for n in positional]
        with self.subTest(name, method=method):
            self.assertRaises(TypeError, wrong, SUBJECT, good + [None], {})
            if method != "prepare" or name != "ArraysCache":
                self.assertRaises(TypeError, wrong, SUBJECT, [values[n] for n in required], {"no_such_name": 1})
            if required:
                self.assertRaises(TypeError, wrong, SUBJECT, [], {})

    def test_constructors(self):
        for name in ARGUMENTS:
            parameters = self.parameters(getattr(REFERENCE, name).__init__)
            self.compare(name, "__init__", parameters, None)
            self.check_refusals_of_constructor(name, parameters)

    def check_refusals_of_constructor(self, name, parameters):
        values = self.arguments(SUBJECT, name)
        good = [values[n] for n, _, _ in parameters]
        surplus = 4 if "Rotating" in name else 1  # ours may take a further `keep` [W9]
        self.assertRaises(TypeError, lambda: getattr(SUBJECT, name)(*good, *[object()] * surplus))
        self.assertRaises(TypeError, lambda: getattr(SUBJECT, name)(*good, no_such_name=1))
        if any(p[2] for p in parameters):
            self.assertRaises(TypeError, lambda: getattr(SUBJECT, name)())

    def test_methods(self):
        for name in CLASSES:
            cls = getattr(REFERENCE, name)
            prepared = lambda module, name=name: filled(module, name)
            for method in ("update_and_fetch", "trim", "make_mask", "filter", "extend", "extract", "finalize",
                           "advance", "merge", "to_quantized", "from_state", "is_trimmable", "size", "empty",
                           "keys_and_values", "maybe_trim_front"):
                function = getattr(cls, method, None)
                if function is None or (name, method) in self.apart:
                    continue
                parameters = self.parameters(function)
                self.compare(name, method, parameters, prepared)
                if not any(p.kind == p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
                    self.check_refusals(name, method, parameters, prepared)

    # Tested below or elsewhere: their parameters are *args and **kwargs, or the requirements ask for something else:
    # [C1] a trimmed ConcatenateKVCache, [R6] quantised rings, [W9] batches of rings that keep.
    apart = {(name, "make_mask") for name in ("KVCache", "ConcatenateKVCache", "QuantizedKVCache")} | {
        ("CacheList", method) for method in ("filter", "extend", "extract", "merge", "finalize", "trim")} | {
        ("ConcatenateKVCache", "trim"), ("RotatingKVCache", "to_quantized"), ("RotatingKVCache", "merge"),
        ("BatchRotatingKVCache", "to_quantized"), ("BatchRotatingKVCache", "merge"), ("BatchKVCache", "merge")}

    def test_trim_of_concatenated_rows(self):
        for call in (lambda cache: cache.trim(2), lambda cache: cache.trim(n=2)):
            ours, theirs = both("ConcatenateKVCache", (3, 1))
            self.assertEqual((call(ours), ours.offset), (call(theirs), theirs.offset))

    def test_trim_of_more_than_there_is(self):
        for name in ATTENTION:
            ours, theirs = both(name, (3, 1))
            self.assertEqual((ours.trim(100), ours.trim(1)), (theirs.trim(100), theirs.trim(1)), name)
            if name not in BATCHES:  # [B4], [W5]
                self.check(ours.offset, theirs.offset, name)

    @ours_only
    def test_quantised_rings(self):
        """[R6], [X7]: where mlx-lm raises NotImplementedError."""
        for name in ("RotatingKVCache", "BatchRotatingKVCache"):
            for arguments in ({"group_size": 32, "bits": 4}, {"group_size": 32}):
                self.assertEqual(filled(SUBJECT, name).to_quantized(**arguments).bits, 4)
            self.assertEqual(filled(SUBJECT, name).to_quantized(32, 8).bits, 8)

    def test_masks_of_full_histories(self):
        """make_mask(*args, **kwargs): one by position, the rest by name."""
        for name in ("KVCache", "ConcatenateKVCache", "QuantizedKVCache"):
            for by_position, by_name in variants([(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, n == "N")
                                                  for n in ("N", "return_array", "window_size")]):
                if len(by_position) > 1:
                    continue
                # mlx-lm needs all three; ours may have defaults.
                self.check_outcome(lambda: filled(SUBJECT, name).make_mask(*[3] * len(by_position),
                                                                           **{n: VALUES[n] for n in by_name}),
                                   lambda: filled(REFERENCE, name).make_mask(*[3] * len(by_position),
                                                                             **{n: VALUES[n] for n in by_name}),
                                   f"{name}.make_mask {by_position} {by_name}", may_return=TypeError)
            self.assertRaises(TypeError, lambda: filled(SUBJECT, name).make_mask(3, return_array=True, no_such_name=1))
            self.assertRaises(TypeError, lambda: filled(SUBJECT, name).make_mask())

    def test_prepare(self):
        cases = [{}, {"left_padding": [1, 0, 2]}, {"lengths": [2, 1, 3]}, {"right_padding": [0, 0, 0]},
                 {"lengths": [2, 1, 3], "right_padding": [1, 2, 0]},
                 {"left_padding": None, "lengths": None, "right_padding": None},
                 {"lengths": mx.array([2, 1, 3]), "right_padding": (1, 2, 0)}]
        for name in BATCHES + ["ArraysCache"]:
            for case in cases:
                if name == "ArraysCache" and case.get("lengths") is None:
                    continue  # [A1]
                with self.subTest(name, case=case):
                    ours, theirs = both(name)
                    if name in BATCHES:  # a row that is padded on both sides is of no use
                        ours, theirs = unpadded(SUBJECT, name), unpadded(REFERENCE, name)
                    if self.check_outcome(lambda: ours.prepare(**case), lambda: theirs.prepare(**case), "prepare"):
                        for field in ("left_padding", "offset", "lengths", "_lengths", "_right_padding"):
                            if field in vars(theirs):
                                self.check(getattr(ours, field), getattr(theirs, field), field)
        for name in BATCHES:
            self.assertRaises(TypeError, make(SUBJECT, name).prepare, [1, 2, 3])
            self.assertRaises(TypeError, lambda: make(SUBJECT, name).prepare(no_such_name=1))
        SUBJECT.ArraysCache(2).prepare(lengths=[1], whatever=3)  # **kwargs

    def test_merge_is_callable_on_the_class_and_on_an_object(self):
        for name in ("KVCache", "RotatingKVCache", "ArraysCache"):
            ours, theirs = self.pairs(name)
            self.check(type(ours[0]).merge(ours), type(theirs[0]).merge(theirs), name)
            self.check(ours[0].merge(ours), theirs[0].merge(theirs), name)
            self.check(ours[0].merge(tuple(ours)), theirs[0].merge(theirs), name)
        for name, batch in (("KVCache", "BatchKVCache"), ("RotatingKVCache", "BatchRotatingKVCache")):
            ours, theirs = self.pairs(name)
            self.check(getattr(SUBJECT, batch).merge(ours), getattr(REFERENCE, batch).merge(theirs), batch)

    def pairs(self, name):
        for module in (SUBJECT, REFERENCE):
            if name == "RotatingKVCache":  # [W9]: mlx-lm forgets what a ring keeps
                yield [fill_as(module.RotatingKVCache(8), name, counts) for counts in ((3, 1), (2,))]
            else:
                yield [filled(module, name), filled(module, name, (2,))]

    def test_functions(self):
        for name, function in vars(REFERENCE).items():
            if inspect.isfunction(function) and function.__module__ == REFERENCE.__name__:
                with self.subTest(name):
                    self.assertTrue(callable(getattr(SUBJECT, name)))
                    if not inspect.isfunction(getattr(SUBJECT, name)):
                        continue  # native ones cannot be inspected; they are called by name below
                    want = list(inspect.signature(function).parameters.values())
                    got = list(inspect.signature(getattr(SUBJECT, name)).parameters.values())
                    self.assertEqual([(p.name, p.default) for p in got[:len(want)]],
                                     [(p.name, p.default) for p in want])
                    self.assertTrue(all(p.default is not p.empty or p.kind == p.VAR_KEYWORD for p in got[len(want):]))


class IndexingTest(CacheTestCase):
    def test_arrays_cache(self):
        for module in (SUBJECT, REFERENCE):
            cache = module.ArraysCache(3)
            a, b, c = slot(1), slot(2), slot(3)
            cache[0], cache[-1] = a, c
            self.check(cache[0], a)
            self.check(cache[2], c)
            self.check(cache[-3], a)
            self.assertIs(cache[1], None)
            cache[1] = b
            self.check(list(cache), [a, b, c])
            first, second, third = cache
            self.check([first, second, third], [a, b, c])
            cache[0] = None
            self.assertIs(cache[0], None)
            self.check(cache[1:], [b, c])
            for index in (3, -4, 100):
                self.assertRaises(IndexError, lambda: cache[index])
                with self.assertRaises(IndexError):
                    cache[index] = a
            for index in ("0", 1.0, None):
                self.assertRaises(TypeError, lambda: cache[index])
            self.check(list(cache), [None, b, c])

    def test_writes_through_the_list(self):
        for module in (SUBJECT, REFERENCE):
            cache = module.ArraysCache(2)
            a, b = slot(1), slot(2)
            cache.cache[0] = a
            self.check(cache[0], a)
            self.check(cache.state[0], [a, None])
            cache.cache = [a, b]
            self.check([cache[0], cache[1]], [a, b])
            self.assertEqual(len(cache.cache), 2)
            self.assertEqual(cache.nbytes, a.nbytes + b.nbytes)
            cache.cache[-1] = None
            self.check(list(cache.cache), [a, None])
            self.assertFalse(cache.empty())
            cache.cache = [None] * 4
            self.assertEqual(len(cache.cache), 4)
            self.assertTrue(cache.empty())
            self.assertRaises(IndexError, lambda: cache.cache[4])

    def test_list_of_a_kept_reference(self):
        """A reference to the list that was taken earlier writes through as well."""
        for module in (SUBJECT, REFERENCE):
            cache = module.ArraysCache(2)
            slots = cache.cache
            b = slot(2)
            slots[1] = b
            self.check(cache[1], b)
            self.check(slots[1], b)

    def test_cache_list(self):
        for module in (SUBJECT, REFERENCE):
            children = module.KVCache(), module.ArraysCache(2), module.RotatingKVCache(8)
            cache = module.CacheList(*children)
            for i, child in enumerate(children):
                self.assertIs(cache[i], child)
                self.assertIs(cache.caches[i], child)
            self.assertIs(cache[-1], children[-1])
            self.assertIs(list(cache)[1], children[1])
            self.assertEqual(cache[:2], children[:2])
            self.assertRaises(IndexError, lambda: cache[3])
            one, two, three = cache
            self.assertIs(two, children[1])
            cache.caches = (children[1],)
            self.assertIs(cache[0], children[1])

    def test_others_have_no_items(self):
        for name in ATTENTION:
            self.assertRaises(TypeError, lambda: make(SUBJECT, name)[0])
            self.assertRaises(TypeError, lambda: list(make(SUBJECT, name)))
            self.assertRaises(TypeError, lambda: len(make(SUBJECT, name)))

    def test_batch_size_of_arrays(self):
        for module in (SUBJECT, REFERENCE):
            self.assertEqual(module.ArraysCache(2).batch_size, 1)
            self.assertEqual(module.ArraysCache(2, [1, 2, 3]).batch_size, 3)
            self.assertEqual(module.ArraysCache(2, left_padding=[]).left_padding, None)
            cache = module.ArraysCache(2)
            cache.lengths = mx.array([1, 2])
            self.assertEqual(cache.batch_size, 2)
            cache[1] = slot(1, 2)
            self.assertEqual(cache.batch_size, 2)


class SubclassTest(CacheTestCase):
    def test_overriding_update_and_fetch(self):
        for name in ATTENTION:
            for module in (SUBJECT, REFERENCE):
                class Counting(getattr(module, name)):
                    def __init__(self, *args, **kwargs):
                        super().__init__(*args, **kwargs)
                        self.calls = 0

                    def update_and_fetch(self, keys, values):
                        self.calls += 1
                        return super().update_and_fetch(keys, values)

                args, kwargs = ARGUMENTS[name]
                cache = Counting(*args, **kwargs)
                plain = filled(REFERENCE, name, ())
                for step, count in enumerate((3, 1, 9, 1)):
                    new = rows(count, step, 3 if name in BATCHES else 1)
                    self.check(cache.update_and_fetch(*new), plain.update_and_fetch(*new), name)
                self.assertEqual(cache.calls, 4)
                self.assertIsInstance(cache, SUBJECT._BaseCache if module is SUBJECT else REFERENCE._BaseCache)
                copied = copy.deepcopy(cache)
                self.assertEqual((type(copied), copied.calls), (Counting, 4))
                self.assertIs(type(Counting.from_state(cache.state)), Counting)

    def test_constructor_of_ones_own(self):
        """A subclass with other arguments, as models/ and users write them."""
        for module in (SUBJECT, REFERENCE):
            class Named(module.RotatingKVCache):
                def __init__(self, name, window):
                    super().__init__(max_size=window, keep=1)
                    self.name = name

            cache = fill_as(Named("a", 6), "RotatingKVCache", (4, 1, 1, 1))
            self.assertEqual((cache.name, cache.max_size, cache.keep, cache.offset), ("a", 6, 1, 7))
            self.assertEqual(copy.copy(cache).name, "a")

    def test_constructor_that_writes_the_fields(self):
        """Without super().__init__, as a subclass of QuantizedKVCache outside mlx-lm does it."""
        for module in (SUBJECT, REFERENCE):
            class Bare(module.QuantizedKVCache):
                step = 64

                def __init__(self, bits):
                    super().__init__(group_size=32, bits=bits)
                    self.mode = "affine"

            cache = Bare(4)
            new = rows(3)
            plain = REFERENCE.QuantizedKVCache(32, 4)
            self.check(cache.update_and_fetch(*new), plain.update_and_fetch(*new))
            self.assertEqual((cache.mode, cache.bits, cache.step), ("affine", 4, 64))

    def test_properties_and_masks_may_be_overridden(self):
        for module in (SUBJECT, REFERENCE):
            class Masked(module.KVCache):
                def make_mask(self, N, **kwargs):
                    return f"{N} {sorted(kwargs)}"

                @property
                def nbytes(self):
                    return 5

                def trim(self, n):
                    return super().trim(n) + 100

            cache = fill_as(Masked(), "KVCache", (3,))
            from mlx_lm.models.base import create_attention_mask
            self.assertEqual(create_attention_mask(mx.zeros((1, 2, 3)), cache), "2 ['return_array', 'window_size']")
            self.assertEqual((cache.nbytes, cache.trim(1), cache.offset), (5, 101, 2))

    def test_a_state_of_ones_own(self):
        for name in ATTENTION:
            for module in (SUBJECT, REFERENCE):
                base = getattr(module, name)

                class Noting(base):
                    @property
                    def state(self):
                        return (*base.state.fget(self), self.note)

                    @state.setter
                    def state(self, value):
                        *rest, self.note = value
                        base.state.fset(self, tuple(rest))

                cache = fill_as(Noting(*ARGUMENTS[name][0], **ARGUMENTS[name][1]), name, (3, 1))
                cache.note = "x"
                restored = Noting.from_state(cache.state)
                self.assertEqual((type(restored), restored.note), (Noting, "x"))
                self.check(restored.state, cache.state, name)

    def test_state_of_an_object_that_was_not_initialised(self):
        """What from_state does in mlx-lm."""
        for name in CLASSES:
            for module in (SUBJECT, REFERENCE):
                cache = getattr(module, name).__new__(getattr(module, name))
                state = filled(module, name).state
                cache.state = state
                self.check(cache.state, state, name)
                if hasattr(cache, "offset"):
                    self.check(cache.offset, filled(REFERENCE, name).offset, name)

    def test_attributes_of_ones_own(self):
        for name in CLASSES:
            cache = filled(SUBJECT, name)
            cache.extra, cache.other = {"a": [1]}, slot(4)
            copied = copy.deepcopy(cache)
            self.assertEqual(copied.extra, {"a": [1]}, name)
            self.check(copied.other, cache.other)
            copied.extra["a"].append(2)
            self.assertEqual(cache.extra, {"a": [1]}, name)
            del cache.extra
            self.assertFalse(hasattr(cache, "extra"), name)

    def copies(self, cache):
        yield "copy", copy.copy(cache)
        yield "deepcopy", copy.deepcopy(cache)
        yield "pickle", pickle.loads(pickle.dumps(cache))
        if not IS_REFERENCE:
            yield "fork", cache.fork()

    def test_slots_of_a_derived_class_go_along(self):
        cache = WithSlots()
        cache.update_and_fetch(*rows(3))
        cache.note, cache.other = "x", 7
        for way, copied in self.copies(cache):
            self.assertEqual((type(copied), copied.note, copied.other, copied.offset), (WithSlots, "x", 7, 3), way)
            self.assertFalse(hasattr(copied, "empty_slot"), way)

    def test_what_leads_back_to_the_cache_leads_to_its_copy(self):
        cache = make(SUBJECT, "KVCache")
        cache.update_and_fetch(*rows(3))
        cache.me, cache.within = cache, [{"cache": cache}]
        for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            self.assertIs(copied.me, copied)
            self.assertIs(copied.within[0]["cache"], copied)
            self.assertEqual(copied.offset, 3)

    def test_a_derived_class_says_what_is_copied(self):
        cache = WithLock()
        cache.other = 7
        for way, copied in self.copies(cache):
            self.assertIsNot(copied.lock, cache.lock, way)
            self.assertEqual(copied.other, 7, way)


class WithSlots(SUBJECT.KVCache):
    __slots__ = ("note", "empty_slot")


class WithLock(SUBJECT.KVCache):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()  # which nobody can copy

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state):
        self.__dict__.update(state, lock=threading.Lock())


class LoadedAgainTest(unittest.TestCase):
    @ours_only
    def test_a_module_that_is_loaded_again_has_the_same_classes(self):
        core = importlib.import_module("reprise._core")
        try:
            del sys.modules["reprise._core"]
            again = importlib.import_module("reprise._core")
            self.assertIsNot(again, core)
            self.assertIs(again.KVCache, core.KVCache)
            self.assertEqual(again.KVCache().fork().offset, 0)
        finally:
            sys.modules["reprise._core"] = core


def fill_as(cache, name, counts):
    for index, count in enumerate(counts):
        cache.update_and_fetch(*rows(count, index, 3 if name in BATCHES else 1))
    return cache


class CopyTest(CacheTestCase):
    def steps(self, cache, name, seed):
        """Goes on with a cache and tells what it shows."""
        if name == "CacheList":
            return [self.steps(child, type(child).__name__, seed) for child in cache.caches]
        if name == "ArraysCache":
            cache[0] = slot(seed)
            return frozen(cache.state)
        shown = [frozen(cache.update_and_fetch(*rows(count, seed + count, 3 if name in BATCHES else 1)))
                 for count in (1, 2, 1)]
        return shown, frozen(cache.state)

    def copies(self, cache):
        yield "copy", copy.copy(cache)
        yield "deepcopy", copy.deepcopy(cache)
        if not IS_REFERENCE:
            yield "fork", cache.fork()
            yield "pickle", pickle.loads(pickle.dumps(cache))

    def test_copies_are_equal_and_independent(self):
        for name in CLASSES:
            for counts in ((), (3, 1), (12, 1)):
                for way in ("copy", "deepcopy", "fork", "pickle"):
                    cache = filled(SUBJECT, name, counts)
                    copied = dict(self.copies(cache)).get(way)
                    if copied is None or (way == "copy" and IS_REFERENCE):
                        continue  # mlx-lm's shallow copy shares what updates write
                    with self.subTest(name, counts=counts, way=way):
                        self.assertIs(type(copied), type(cache))
                        before = frozen(cache.state)
                        self.check(frozen(copied.state), before, "state")
                        self.steps(copied, name, 50)
                        self.check(frozen(cache.state), before, "the original after the copy went on")
                        later = frozen(copied.state)
                        want = self.steps(filled(REFERENCE, name, counts), name, 70)
                        self.assertEqual(loose(self.steps(cache, name, 70)), loose(want))
                        self.check(frozen(copied.state), later, "the copy after the original went on")

    @ours_only
    def test_fields_of_subclasses_survive(self):
        cache = filled(SUBJECT, "KVCache")
        cache.note = "x"
        for way, copied in self.copies(cache):
            self.assertEqual(copied.note, "x", way)
        for name in ("QuantizedKVCache", "RotatingKVCache", "ChunkedKVCache"):
            cache = filled(SUBJECT, name)
            for way, copied in self.copies(cache):
                for field in vars(filled(REFERENCE, name)):
                    self.check(getattr(copied, field), getattr(cache, field), f"{way} of {name}.{field}")

    @ours_only
    def test_pending_prompt_survives(self):
        for name in BATCHES:
            cache = unpadded(SUBJECT, name)
            cache.prepare(lengths=[3, 1, 2], right_padding=[0, 2, 1])
            fill_as(cache, name, (3,))
            for way, copied in self.copies(cache):
                copied.finalize()
                reference = unpadded(REFERENCE, name)
                reference.prepare(lengths=[3, 1, 2], right_padding=[0, 2, 1])
                fill_as(reference, name, (3,)).finalize()
                self.check(copied.state, reference.state, f"{way} of {name}")

    def test_one_deepcopy_of_a_whole_prompt_cache(self):
        """Of a list in which one layer stands twice: it still does."""
        for module in (SUBJECT, REFERENCE):
            layer = filled(module, "KVCache")
            copied = copy.deepcopy([layer, filled(module, "CacheList"), layer])
            self.assertIs(copied[0], copied[2])
            self.assertIsNot(copied[0], layer)
            copied[1][0].trim(1)
            self.assertEqual([copied[1][0].offset, copied[1][1].offset], [3, 4])

    def test_deepcopy_of_nested_lists(self):
        for module in (SUBJECT, REFERENCE):
            cache = module.CacheList(module.CacheList(filled(module, "KVCache")), filled(module, "ArraysCache"))
            copied = copy.deepcopy(cache)
            copied[0][0].trim(2)
            copied[1][0] = None
            self.assertEqual((cache[0][0].offset, cache[1].empty(), copied[0][0].offset), (4, False, 2))

    @ours_only
    def test_deepcopy_costs_no_bytes(self):
        cache = SUBJECT.KVCache()
        cache.update_and_fetch(*rows(4096))
        mx.eval(cache.state[0], cache.state[1])
        before = mx.get_active_memory()
        copies = [copy.deepcopy(cache) for _ in range(5)]
        mx.eval([c.state[0] for c in copies])
        self.assertLess(mx.get_active_memory() - before, cache.nbytes // 10)

    @ours_only
    def test_pickle_of_a_prompt_cache(self):
        caches = [filled(SUBJECT, name) for name in CLASSES]
        for cache, loaded in zip(caches, pickle.loads(pickle.dumps(caches))):
            self.check(loaded.state, cache.state, type(cache).__name__)


class LifetimeTest(CacheTestCase):
    def test_weak_references(self):
        for name in CLASSES:
            cache = filled(SUBJECT, name)
            reference = weakref.ref(cache)
            self.assertIs(reference(), cache)
            del cache
            gc.collect()
            self.assertIs(reference(), None, name)

    def test_cycles_are_collected(self):
        for name in CLASSES:
            cache = filled(SUBJECT, name)
            cache.itself = [cache]
            reference = weakref.ref(cache)
            del cache
            gc.collect()
            self.assertIs(reference(), None, name)

    def test_cycles_through_children_are_collected(self):
        child = filled(SUBJECT, "KVCache")
        cache = SUBJECT.CacheList(child)
        child.parent = cache
        references = weakref.ref(cache), weakref.ref(child)
        del cache, child
        gc.collect()
        self.assertEqual([reference() for reference in references], [None, None])

    def test_slots_view_keeps_its_cache(self):
        slots = filled(SUBJECT, "ArraysCache").cache
        gc.collect()
        self.check(slots[1], slot(1))

    def test_memory_goes_with_the_object(self):
        for name in CLASSES:
            gc.collect()
            before = mx.get_active_memory()
            cache = filled(SUBJECT, name, (300,)) if name in ATTENTION else filled(SUBJECT, name)
            mx.eval([a for a in flat(cache.state) if isinstance(a, mx.array)])
            self.assertGreater(mx.get_active_memory(), before, name)
            del cache
            gc.collect()
            self.assertLessEqual(mx.get_active_memory() - before, 4096, name)


def flat(state):
    if isinstance(state, (tuple, list)):
        return [leaf for item in state for leaf in flat(item)]
    return [state]


class StateTest(CacheTestCase):
    def go_on(self, cache, name):
        if name == "CacheList":
            return [self.go_on(child, type(child).__name__) for child in cache.caches]
        if name == "ArraysCache":
            return [frozen(cache[i]) for i in range(2)]
        return [loose(frozen(cache.update_and_fetch(*rows(count, 30 + count, 3 if name in BATCHES else 1))))
                for count in (2, 1)]

    def states(self):
        for name in CLASSES:
            for counts in ((), (3, 1), (12, 1, 1)):
                if not (name == "ConcatenateKVCache" and not counts):  # mlx-lm cannot restore its own
                    yield name, counts, filled(SUBJECT, name, counts).state, filled(REFERENCE, name, counts).state

    def test_from_state(self):
        for name, counts, ours, theirs in self.states():
            with self.subTest(name, counts=counts):
                restored = self.restore(SUBJECT, name, ours)
                self.check(restored.state, ours, "state")
                other = self.restore(REFERENCE, name, theirs)
                if counts:
                    self.assertEqual(self.go_on(restored, name), self.go_on(other, name))

    def restore(self, module, name, state):
        cache = getattr(module, name).from_state(state)
        if module is REFERENCE and name in BATCHES:  # which it forgets
            setattr(cache, "_right_padding" if name == "BatchKVCache" else "_lengths", None)
        return cache

    def test_states_cross_the_border(self):
        """A state of mlx-lm's is one of ours and the other way round."""
        for name, counts, ours, theirs in self.states():
            with self.subTest(name, counts=counts):
                self.check(getattr(SUBJECT, name).from_state(theirs).state, theirs)
                self.check(getattr(REFERENCE, name).from_state(ours).state, ours)

    def test_setter(self):
        for name, counts, ours, theirs in self.states():
            with self.subTest(name, counts=counts):
                cache, other = filled(SUBJECT, name, (5,), seed=8), filled(REFERENCE, name, (5,), seed=8)
                cache.state, other.state = ours, theirs
                self.check(cache.state, theirs)
                self.assertEqual(type(cache).__name__, name)
                if counts:
                    self.assertEqual(self.go_on(cache, name), self.go_on(other, name))

    def test_setter_takes_lists(self):
        for name, counts, ours, _ in self.states():
            cache = make(SUBJECT, name)
            cache.state = list(ours)
            self.check(cache.state, ours, name)

    def test_a_wrong_state_is_refused(self):
        for name in CLASSES:
            for wrong in ([1], (1, 2, 3), 5, None, "state", [None] * 9, ({},)):
                cache = filled(SUBJECT, name)
                before = frozen(cache.state)
                with self.subTest(name, wrong=wrong):
                    with self.assertRaises((ValueError, TypeError)):
                        cache.state = wrong
                        cache.state  # mlx-lm finds out later
                        self.fail_if_reference()
                    if not IS_REFERENCE:
                        self.check(cache.state, before)
                        self.assertRaises((ValueError, TypeError), type(cache).from_state, wrong)

    def fail_if_reference(self):
        if IS_REFERENCE:
            raise ValueError

    def test_arrays_survive_eval_between_chunks(self):
        """generate evaluates [c.state for c in cache]."""
        caches = [filled(SUBJECT, name, ()) for name in CLASSES] + [filled(SUBJECT, name) for name in CLASSES]
        mx.eval([cache.state for cache in caches])
        mx.async_eval([cache.state for cache in caches])


class SharedModulesTest(CacheTestCase):
    """mlx-lm's functions over lists of ours, and the helpers of the module."""

    def test_trim_and_length_functions(self):
        for module in (SUBJECT, REFERENCE):
            caches = [filled(module, "KVCache"), filled(module, "CacheList"), filled(module, "QuantizedKVCache")]
            self.assertIs(module.can_trim_prompt_cache(caches), True)
            self.assertEqual(module.trim_prompt_cache(caches, 2), 2)
            self.assertEqual([c.offset for c in (caches[0], caches[1][0], caches[2])], [2, 2, 2])
            self.assertIs(module.can_trim_prompt_cache(caches + [filled(module, "ArraysCache")]), False)
            self.assertEqual(module.trim_prompt_cache(caches + [filled(module, "ArraysCache")], 1), 0)
            self.assertEqual(module.trim_prompt_cache([], 1), 0)

    def test_make_prompt_cache(self):
        class Model:
            layers = [None] * 3
        for module in (SUBJECT, REFERENCE):
            self.assertEqual([type(c) for c in module.make_prompt_cache(Model())], [module.KVCache] * 3)
            bounded = module.make_prompt_cache(Model(), max_kv_size=16)
            self.assertEqual([(type(c), c.max_size, c.keep) for c in bounded], [(module.RotatingKVCache, 16, 4)] * 3)

        class Own(Model):
            def make_cache(self):
                return ["mine"]
        self.assertEqual(SUBJECT.make_prompt_cache(Own()), ["mine"])

    def test_create_attention_mask_of_the_module(self):
        for n, offset, window, array in itertools.product((1, 2, 5), (0, 3), (None, 2, 9), (False, True)):
            named = {"N": n, "offset": offset, "return_array": array, "window_size": window}
            self.check_outcome(lambda: SUBJECT.create_attention_mask(n, offset, array, window),
                               lambda: REFERENCE.create_attention_mask(n, offset, array, window), str(named))
            self.check_outcome(lambda: SUBJECT.create_attention_mask(**named),
                               lambda: REFERENCE.create_attention_mask(**named), str(named))

    def test_dynamic_roll(self):
        x = mx.arange(2 * 3 * 5).reshape(2, 3, 5)
        for axis, shifts in ((1, [[1], [-2]]), (2, [[0], [7]])):
            amount = mx.array(shifts)
            # mlx-lm's rolls only along axes that the shifts have too.
            self.check_outcome(lambda: SUBJECT.dynamic_roll(x, amount, axis),
                               lambda: REFERENCE.dynamic_roll(x, amount, axis), f"axis {axis}", may_return=ValueError)
            self.check_outcome(lambda: SUBJECT.dynamic_roll(x=x, shifts=amount, axis=axis),
                               lambda: REFERENCE.dynamic_roll(x=x, shifts=amount, axis=axis), f"axis {axis}",
                               may_return=ValueError)

    def test_token_buffer(self):
        ours, theirs = SUBJECT.TokenBuffer([1, 2]), REFERENCE.TokenBuffer([1, 2])
        self.check(ours.tokens, theirs.tokens)
        for count in (1, 252, 1, 1, 300):
            tokens = mx.arange(count)
            self.check(ours.update_and_fetch(tokens), theirs.update_and_fetch(tokens))
            self.check(ours.tokens, theirs.tokens)
        self.check(SUBJECT.TokenBuffer().tokens, REFERENCE.TokenBuffer().tokens)
        self.assertEqual(SUBJECT.TokenBuffer.step, 256)


if __name__ == "__main__":
    unittest.main()
