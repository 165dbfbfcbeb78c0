"""Calls nobody should make, on every class: run by errors_test in a process of its own, so that a crash is seen.

    python hostile_calls.py GROUP      prints "ok N calls" at the end; anything else is a failure
    REPRISE_FUZZ_OPERATIONS=1          all calls instead of a choice of them; REPRISE_FUZZ_SEED=N chooses
"""
import copy
import faulthandler
import gc
import itertools
import os
import pickle
import random
import resource
import sys
import threading
import warnings

faulthandler.enable()
warnings.simplefilter("ignore", RuntimeWarning)  # nanobind's of objects whose __init__ has not run
GIGABYTE = 1 << 30
resource.setrlimit(resource.RLIMIT_AS, (12 * GIGABYTE, 12 * GIGABYTE))

from cache_support import CLASSES, REFERENCE, SUBJECT, difference, filled, frozen, make, mx, rows  # noqa: E402

ALLOWED = (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError, OverflowError, MemoryError,
           NotImplementedError, OSError)
STRANGE = ("std::", "bad_cast", "bad_alloc", "bad_optional", "vector::", "basic_string", "Unable to convert", "dynamic_cast")


def make_any(name):
    """Also of the classes that only we have."""
    if name not in OWN:
        return make(SUBJECT, name)
    return getattr(SUBJECT, name)(*OWN[name])


def filled_any(name, counts=(3, 1)):
    if name not in OWN:
        return filled(SUBJECT, name, counts)
    cache = make_any(name)
    for count in counts:
        cache.update_and_fetch(*rows(count, 1, 3 if "Batch" in name else 1))
    return cache


OWN = {} if SUBJECT is REFERENCE else {
    "QuantizedRotatingKVCache": (8, 2, 32, 4), "BatchQuantizedKVCache": ([1, 0, 3], 32, 4),
    "BatchChunkedKVCache": (4, [1, 0, 3]),
    "BatchQuantizedRotatingKVCache": (8, [1, 0, 3], 2, 32, 4)}
ALL = CLASSES + list(OWN)


class Evil:
    """Numbers and sequences that use the cache while it is in a call."""

    def __init__(self, cache):
        self.cache = cache

    def use(self):
        for call in (lambda: self.cache.trim(1), lambda: self.cache.filter([0]), lambda: setattr(self.cache, "keys", None),
                     lambda: self.cache.state, gc.collect):
            try:
                call()
            except ALLOWED:
                pass

    def __index__(self):
        self.use()
        return 1

    def __len__(self):
        self.use()
        return 2

    def __iter__(self):
        self.use()
        yield 0
        self.use()
        yield 0

    def __getitem__(self, index):
        self.use()
        if index > 1:
            raise IndexError
        return 0


class Refusing:
    def __index__(self):
        raise KeyError("on purpose")

    __len__ = __iter__ = __getitem__ = __bool__ = __index__


def pool(cache):
    keys, values = rows(1, 3)
    return [None, "text", b"bytes", "", True, -1, 0, 1, 3, 2 ** 31 - 1, 2 ** 31, 2 ** 63, 2 ** 70, -2 ** 70, 1.5,
            float("nan"), float("inf"), 1j, [], [None], [0], [0, 0, 0], [5], [-1], [2 ** 40], ["a"], {}, {"a": 1}, object(),
            (), (keys, values), Evil(cache), Refusing(), cache, [cache, cache], [cache, None], REFERENCE.KVCache(),
            filled(REFERENCE, "KVCache"), SUBJECT.KVCache(), filled(SUBJECT, "RotatingKVCache"), type(cache), print,
            mx.array(1), mx.array(float("nan")), mx.zeros((2,)), mx.array([], dtype=mx.int32), keys, values,
            rows(1, 3, 3)[0], rows(2, 3)[1], keys.astype(mx.int32), keys.astype(mx.float16),
            keys.astype(mx.complex64), keys[..., :0, :], keys[:0], keys[..., :7], mx.zeros((1,) * 9),
            mx.array([0, 1, 2]), mx.array([[0]]), mx.array([True, False, True])]


# All of them is for REPRISE_FUZZ_OPERATIONS; otherwise so many, others in each place.
THOROUGH = "REPRISE_FUZZ_OPERATIONS" in os.environ
chooser = random.Random(os.environ.get("REPRISE_FUZZ_SEED", "7"))


def some(items, count):
    items = list(items)
    return items if THOROUGH or len(items) <= count else chooser.sample(items, count)


class Caller:
    def __init__(self):
        self.calls = 0

    def call(self, what, function, cache=None):
        """Only ordinary exceptions, and after one the cache is what it was."""
        self.calls += 1
        before = None if cache is None else state_of(cache)
        try:
            return function()
        except ALLOWED as error:
            text = str(error)
            if any(word in text for word in STRANGE) and not isinstance(error, MemoryError):
                raise SystemExit(f"{what}: {error!r} tells of the implementation")
            if cache is not None and SUBJECT is not REFERENCE and "Evil" not in what:
                problem = difference(state_of(cache), before)
                if problem:
                    raise SystemExit(f"{what}: raised {error!r} and changed the cache: {problem}")
        except Exception as error:
            raise SystemExit(f"{what}: {type(error).__name__}: {error}")
        return None


def state_of(cache):
    try:
        return frozen(cache.state)
    except ALLOWED as error:
        return "raised", type(error).__name__


def methods_of(cache):
    return sorted(name for name in dir(type(cache)) if callable(getattr(type(cache), name, None))
                  and not name.startswith("__") or name in ("__getitem__", "__setitem__", "__deepcopy__", "__setstate__"))


def fields_of(cache):
    return sorted(name for name in dir(type(cache)) if isinstance(getattr(type(cache), name), property)
                  or type(getattr(type(cache), name)).__name__ in ("nb_static_property", "getset_descriptor"))


def states_of(name):
    yield lambda: make_any(name)
    yield lambda: filled_any(name)
    yield lambda: filled_any(name, (12, 1))


def brief(value):
    return f"{type(value).__name__} {repr(value)[:60]}"


def drive(caller, fresh, what, names, arguments_of):
    cache = fresh()
    for name in names:
        for arguments in arguments_of(cache):
            words = f"{what}.{name}({', '.join(map(brief, arguments))})"
            caller.call(words, lambda: getattr(cache, name)(*arguments), cache)
            if caller.calls % 16 == 0:
                cache = fresh()
        cache = fresh()


def methods(caller):
    generator = random.Random(3)

    def sampled(cache):
        items = pool(cache)
        yield ()
        yield from ((item,) for item in some(items, 30))
        for _ in range(60 if THOROUGH else 15):
            yield generator.choice(items), generator.choice(items)

    for name in ALL:
        for fresh in states_of(name):
            drive(caller, fresh, name, methods_of(fresh()), sampled)


def keywords(caller):
    generator = random.Random(4)
    names = ["N", "n", "window_size", "return_array", "left_padding", "lengths", "right_padding", "keys", "values",
             "batch_indices", "idx", "other", "caches", "state", "group_size", "bits"]
    for name in ALL:
        for fresh in states_of(name):
            cache = fresh()
            for method in methods_of(cache):
                for _ in range(25 if THOROUGH else 8):
                    given = {n: generator.choice(pool(cache)) for n in generator.sample(names, generator.choice([1, 2, 3]))}
                    words = f"{name}.{method}({ {k: brief(v) for k, v in given.items()} })"
                    caller.call(words, lambda: getattr(cache, method)(**given), cache)
                cache = fresh()


def constructors(caller):
    for name in ALL:
        items = pool(make_any(name))
        for count in range(3):
            for arguments in some(itertools.product(items, repeat=count), 400):
                words = f"{name}({', '.join(map(brief, arguments))})"
                made = caller.call(words, lambda: getattr(SUBJECT, name)(*arguments))
                if made is not None and not isinstance(made, SUBJECT.CacheList) and caller.calls % 7 == 0:
                    caller.call(f"{words} update", lambda: made.update_and_fetch(*rows(2)), None)
                    caller.call(f"{words} repr", lambda: repr(made), None)


def fields(caller):
    for name in ALL:
        for fresh in states_of(name):
            cache = fresh()
            writable = fields_of(cache) + list(getattr(cache, "__dict__", ()))
            for field in writable:
                for value in some(pool(cache), 12):
                    words = f"{name}.{field} = {brief(value)}"
                    caller.call(words, lambda: setattr(cache, field, value), None)
                    for read in ("nbytes", "offset", field):
                        caller.call(f"{words}; {read}", lambda: getattr(cache, read), None)
                    caller.call(f"{words}; update", lambda: cache.update_and_fetch(*rows(1)), None)
                    caller.call(f"{words}; copy", lambda: copy.deepcopy(cache), None)
                    caller.call(f"{words}; del", lambda: delattr(cache, field), None)
                    cache = fresh()


def uninitialised(caller):
    """Objects whose __init__ has not run, or refused."""
    for name in ALL:
        cls = getattr(SUBJECT, name)

        class Forgetful(cls):
            def __init__(self):
                pass

        for fresh in (lambda: cls.__new__(cls), Forgetful):
            for method in methods_of(fresh()):
                for arguments in ((), (1,), (None,), rows(1)):
                    cache = fresh()
                    caller.call(f"new {name}.{method}", lambda: getattr(cache, method)(*arguments), None)
            for field in fields_of(fresh()):
                cache = fresh()
                caller.call(f"new {name}.{field}", lambda: getattr(cache, field), None)
                caller.call(f"new {name}.{field} =", lambda: setattr(cache, field, 1), None)
            for use in (repr, copy.copy, copy.deepcopy, pickle.dumps, bool, hash, str, iter, len):
                cache = fresh()
                caller.call(f"{use.__name__} of new {name}", lambda: use(cache), None)
            caller.call(f"merge of new {name}", lambda: SUBJECT.BatchKVCache.merge([fresh()]), None)
            caller.call(f"list of new {name}", lambda: SUBJECT.CacheList(fresh()).state, None)
            caller.call(f"trim of new {name}", lambda: SUBJECT.trim_prompt_cache([fresh()], 1), None)
            caller.call(f"state of new {name}", lambda: SUBJECT.KVCache().extend(fresh()), None)


def functions(caller):
    public = [name for name in dir(SUBJECT) if not name.startswith("_") and callable(getattr(SUBJECT, name))
              and not isinstance(getattr(SUBJECT, name), type) and "save" not in name]
    generator = random.Random(6)
    for name in public:
        if name in ("tree_map", "tree_flatten", "tree_reduce", "tree_unflatten", "dataclass"):
            continue
        for count in (0, 1, 2, 3):
            for _ in range(60 if THOROUGH else 20):
                cache = filled_any(generator.choice(ALL))
                arguments = [generator.choice(pool(cache)) for _ in range(count)]
                caller.call(f"{name}({', '.join(map(brief, arguments))})",
                            lambda: getattr(SUBJECT, name)(*arguments), cache)


def helpers(caller):
    """Tries, stores, token buffers, points to go back to, and attention."""
    generator = random.Random(9)
    objects = {"TokenBuffer": lambda: SUBJECT.TokenBuffer([1, 2, 3]), "PromptTrie": SUBJECT.PromptTrie,
               "LRUPromptCache": SUBJECT.LRUPromptCache}
    if hasattr(SUBJECT, "Snapshots"):
        objects["Snapshots"] = SUBJECT.Snapshots
    for name, fresh in objects.items():
        words = "__init__", *methods_of(fresh())
        for method in words:
            for _ in range(200 if THOROUGH else 60):
                target = fresh()
                cache = filled_any(generator.choice(ALL))
                arguments = [generator.choice([*pool(cache), [1, 2], (1, 2), "model", [cache]])
                             for _ in range(generator.choice([0, 1, 1, 2, 2, 3]))]
                function = type(target) if method == "__init__" else getattr(target, method)
                caller.call(f"{name}.{method}({', '.join(map(brief, arguments))})", lambda: function(*arguments), cache)
    attention = getattr(sys.modules.get("reprise._core"), "scaled_dot_product_attention", None)
    for _ in range(2000 if THOROUGH else 300) if attention else ():
        cache = filled_any(generator.choice(ALL))
        shown = cache.keys_and_values() if hasattr(cache, "keys_and_values") else rows(3)
        queries = mx.zeros((generator.choice([0, 1, 1, 3]), generator.choice([1, 2, 4, 5]), generator.choice([0, 1, 2]),
                            generator.choice([16, 32, 32, 64])))
        given = {"scale": generator.choice([1.0, 1.0, 0, float("nan"), None, "x"]),
                 "mask": generator.choice([None, None, "causal", "x", *pool(cache)])}
        if generator.random() < 0.3:
            given["sinks"] = generator.choice(pool(cache))
        parts = [queries, *shown, cache]
        if generator.random() < 0.4:
            parts[generator.randrange(4)] = generator.choice(pool(cache))

        def attend():
            mx.eval(attention(*parts, **given))

        caller.call(f"attention({', '.join(map(brief, parts))}, {given})", attend, cache)


def pickles(caller):
    """Pickles with other contents, cut short, or with a byte changed."""
    generator = random.Random(8)
    for name in ALL:
        data = pickle.dumps(filled_any(name, (2,)))
        for _ in range(150):
            damaged = bytearray(data)
            if generator.random() < 0.3:
                damaged = damaged[:generator.randrange(len(damaged))]
            else:
                # The head only: a row may hold any numbers. Never a whole other opcode, which could call anything.
                position = generator.randrange(len(damaged))
                damaged[position] ^= 1 << generator.randrange(8)
            try:
                pickle.loads(bytes(damaged))
            except Exception:
                pass
            caller.calls += 1


def threads(caller):
    """Many threads, caches of their own and one shared; what one thread built another goes on with."""
    shared = filled(SUBJECT, "KVCache")
    problems = []

    def work(number):
        # An unevaluated array belongs to the thread that made it: ordinary exceptions are all that may come of it.
        own = make_any(ALL[number % len(ALL)])
        for step in range(30):
            for use in (lambda: own.update_and_fetch(*rows(1, step)), lambda: shared.update_and_fetch(*rows(1, step)),
                        lambda: mx.eval(shared.state), lambda: shared.trim(1), lambda: copy.deepcopy(shared),
                        lambda: setattr(shared, "offset", 1), lambda: shared.nbytes, lambda: repr(own),
                        lambda: SUBJECT.BatchKVCache.merge([shared, shared])):
                try:
                    use()
                except ALLOWED:
                    pass
                except BaseException as error:
                    problems.append(repr(error))
                caller.calls += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(9)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if problems:
        raise SystemExit(f"threads: {problems[:3]}")
    caches = []

    def build():
        caches.extend(filled_any(name) for name in ALL)
        mx.eval([cache.state for cache in caches])

    builder = threading.Thread(target=build)
    builder.start()
    builder.join()
    for cache in caches:
        if hasattr(cache, "update_and_fetch"):
            cache.update_and_fetch(*rows(1, 5, 3 if "Batch" in type(cache).__name__ else 1))
        mx.eval(cache.state)
        caller.calls += 1


def whole_cache_uses(cache):
    """The functions over all layers, native ones among them."""
    file_name = f"/nowhere/{id(cache)}"
    uses = {"save": lambda: SUBJECT.save_prompt_cache(file_name, [cache])}
    for name in ("check_prompt_cache", "merge_caches", "fork_prompt_cache", "cache_length", "prompt_cache_nbytes",
                 "can_trim_prompt_cache", "to_quantized", "to_dequantized"):
        function = getattr(SUBJECT, name, None)
        if function is not None:
            uses[name] = lambda function=function, listed=not name.startswith("to_"): function([cache] if listed else cache)
    return uses


def loops(caller):
    """Objects that hold, extend, merge or restore themselves."""
    for name in ALL:
        for fresh in states_of(name):
            for what, use in {
                "extend": lambda c: c.extend(c),
                "merge": lambda c: type(c).merge([c, c]),
                "state": lambda c: setattr(c, "state", c.state),
                "list": lambda c: SUBJECT.CacheList(c, c).trim(1),
                "from_state": lambda c: type(c).from_state(c),
                "merge of an iterator": lambda c: type(c).merge(fresh() for _ in range(3)),
                "merge of what is dropped": lambda c: type(c).merge(iter([copy.copy(c), copy.copy(c)])),
                "attribute": lambda c: (setattr(c, "me", c), copy.deepcopy(c), pickle.dumps(c)),
                "attribute, copied": lambda c: (setattr(c, "me", [c]), copy.copy(c), c.fork()),
            }.items():
                cache = fresh()
                caller.call(f"{name} {what}", lambda: use(cache), None)
    cache = SUBJECT.CacheList(SUBJECT.KVCache())
    cache.caches = [cache]
    for what, use in {"size": lambda: cache.size(), "state": lambda: cache.state, "trim": lambda: cache.trim(1),
                      "nbytes": lambda: cache.nbytes, "repr": lambda: repr(cache), "empty": lambda: cache.empty(),
                      "deepcopy": lambda: copy.deepcopy(cache), "merge": lambda: SUBJECT.CacheList.merge([cache]),
                      "filter": lambda: cache.filter([0]), "pickle": lambda: pickle.dumps(cache),
                      **whole_cache_uses(cache)}.items():
        try:
            use()
        except (RecursionError, *ALLOWED):
            pass
        caller.calls += 1
    deep = SUBJECT.CacheList(SUBJECT.KVCache())
    for _ in range(100000):
        deep = SUBJECT.CacheList(deep)
    for use in (lambda: deep.state, lambda: deep.size(), lambda: repr(deep), lambda: copy.deepcopy(deep),
                *whole_cache_uses(deep).values()):
        try:
            use()
        except (RecursionError, *ALLOWED):
            pass
        caller.calls += 1
    nested = []
    for _ in range(100000):
        nested = [nested]
    for name in ALL:
        try:
            make_any(name).state = nested
        except (RecursionError, *ALLOWED):
            pass
        caller.calls += 1


def leftovers(caller):
    """Objects alive when the interpreter ends: nothing may be printed by then."""
    import builtins
    builtins.left = [filled_any(name) for name in ALL]
    builtins.left[0].itself = builtins.left
    caller.calls += 1


GROUPS = {function.__name__: function for function in (methods, keywords, constructors, fields, uninitialised, functions,
                                                       helpers, pickles, threads, loops, leftovers)}

if __name__ == "__main__":
    caller = Caller()
    GROUPS[sys.argv[1]](caller)
    print(f"ok {caller.calls} calls")
