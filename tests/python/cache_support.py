"""What the tests that compare our cache classes with mlx-lm's have in common.

REFERENCE is mlx_lm.models.cache; SUBJECT is the module under test, reprise.cache unless REPRISE_CACHE_MODULE names
another. With REPRISE_CACHE_MODULE=mlx_lm.models.cache the tests compare mlx-lm with itself: everything passes then
except what `required_here` marks, which must fail.
"""
import functools
import importlib
import itertools
import os
import unittest

try:
    import mlx.core as mx
    import mlx_lm.models.cache as REFERENCE
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(f"needs mlx and mlx-lm: {error}")

SUBJECT_NAME = os.environ.get("REPRISE_CACHE_MODULE", "reprise.cache")
SUBJECT = importlib.import_module(SUBJECT_NAME)
IS_REFERENCE = SUBJECT is REFERENCE

HEADS, KEY_SIZE, VALUE_SIZE = 2, 32, 64
PADDING = [1, 0, 3]

# Constructor arguments of the samples: small rings and chunks, so that they wrap soon.
ARGUMENTS = {
    "KVCache": ((), {}),
    "ConcatenateKVCache": ((), {}),
    "QuantizedKVCache": ((32, 8), {}),
    "RotatingKVCache": ((8,), {"keep": 2}),
    "ChunkedKVCache": ((8,), {}),
    "ArraysCache": ((2,), {}),
    "BatchKVCache": ((PADDING,), {}),
    "BatchRotatingKVCache": ((8, PADDING), {}),
}
SINGLE = ["KVCache", "ConcatenateKVCache", "QuantizedKVCache", "RotatingKVCache", "ChunkedKVCache"]
BATCHES = ["BatchKVCache", "BatchRotatingKVCache"]
ATTENTION = SINGLE + BATCHES
CLASSES = list(ARGUMENTS) + ["CacheList"]


def required_here(identifier, why):
    """Marks a test of what the requirement `identifier` asks against mlx-lm: it must fail for mlx-lm itself."""

    def decorate(test):
        @functools.wraps(test)
        def run(self):
            if not IS_REFERENCE:
                return test(self)
            try:
                test(self)
            except Exception:
                self.skipTest(f"[{identifier}] mlx-lm: {why}")
            self.fail(f"mlx-lm itself does what [{identifier}] asks: no exception is needed")

        return run

    return decorate


def ours_only(test):
    """Marks a test of what mlx-lm's module does not have."""
    return unittest.skipIf(IS_REFERENCE, "not in mlx-lm")(test)


def make(module, name):
    if name == "CacheList":
        return module.CacheList(make(module, "KVCache"), make(module, "RotatingKVCache"))
    args, kwargs = ARGUMENTS[name]
    return getattr(module, name)(*args, **kwargs)


def batch_of(name):
    return len(PADDING) if name in BATCHES else 1


def rows(count, seed=0, batch=1, dtype=mx.float32, key_size=KEY_SIZE, value_size=VALUE_SIZE):
    """Keys and values of `count` tokens."""
    key, value = mx.random.split(mx.random.key(seed))
    return tuple(mx.random.normal((batch, HEADS, count, size), key=k).astype(dtype)
                 for k, size in ((key, key_size), (value, value_size)))


def slot(seed=0, batch=1):
    return mx.random.normal((batch, 3, 5), key=mx.random.key(seed))


def fill(cache, counts, seed=0, batch=None):
    """Updates of so many tokens each; an ArraysCache gets its slots, a CacheList fills its children. Returns cache."""
    name = type(cache).__mro__[0].__name__
    if hasattr(cache, "caches"):
        for child in cache.caches:
            fill(child, counts, seed)
    elif hasattr(cache, "cache"):
        for index in range(len(cache.cache)):
            cache[index] = slot(seed + index, batch or 1)
    else:
        for index, count in enumerate(counts):
            cache.update_and_fetch(*rows(count, seed + index, batch or batch_of(name)))
    return cache


def unpadded(module, name):
    """A batch of as many rows without left padding."""
    padding = [0] * len(PADDING)
    return module.BatchKVCache(padding) if name == "BatchKVCache" else module.BatchRotatingKVCache(8, padding)


def filled(module, name, counts=(3, 1), seed=0):
    return fill(make(module, name), counts, seed)


def both(name, counts=None, seed=0):
    """The same cache of ours and of mlx-lm's."""
    if counts is None:
        return make(SUBJECT, name), make(REFERENCE, name)
    return filled(SUBJECT, name, counts, seed), filled(REFERENCE, name, counts, seed)


def is_cache(value):
    return hasattr(type(value), "from_state") and hasattr(value, "state")


def frozen(value):
    """A picture of a value that later calls cannot change: arrays become their bits."""
    if isinstance(value, mx.array):
        bits = value.view(mx.uint16) if value.dtype == mx.bfloat16 else value
        return "array", str(value.dtype), tuple(value.shape), np.array(bits).tobytes()
    if isinstance(value, (tuple, list)):
        return "list" if isinstance(value, list) else "tuple", tuple(frozen(item) for item in value)
    if is_cache(value):
        return type(value).__name__, frozen(value.state)
    return type(value).__name__, value


def loose(picture):
    """The picture, or pictures in tuples and lists, without the difference between tuples and lists."""
    if isinstance(picture, (tuple, list)):
        if len(picture) == 2 and picture[0] in ("tuple", "list"):
            return "sequence", tuple(loose(item) for item in picture[1])
        return tuple(loose(item) for item in picture)
    return picture


def brief(value):
    text = repr(value)
    return text if len(text) < 90 else text[:87] + "…"


def difference(got, want, where="", strict=False):
    """Where two values (or pictures) first differ, in words; None when they are equal."""
    got, want = (item if _is_picture(item) else frozen(item) for item in (got, want))
    return _difference(got, want, where or "value", strict)


def _is_picture(value):
    return isinstance(value, tuple) and len(value) in (2, 4) and isinstance(value[0], str)


def _difference(got, want, where, strict):
    sequences = ("tuple", "list")
    if got[0] in sequences and want[0] in sequences:
        if strict and got[0] != want[0]:
            return f"{where}: got a {got[0]}, want a {want[0]}"
        if len(got[1]) != len(want[1]):
            return f"{where}: got {len(got[1])} items, want {len(want[1])}"
        parts = (_difference(a, b, f"{where}[{i}]", strict) for i, (a, b) in enumerate(zip(got[1], want[1])))
        return next((part for part in parts if part), None)
    if got[0] != want[0]:
        return f"{where}: got {brief(got)}, want {brief(want)}"
    if got[0] == "array":
        if got[1:3] != want[1:3]:
            return f"{where}: got {got[1:3]}, want {want[1:3]}"
        return None if got[3] == want[3] else f"{where}: the numbers differ{_ints(got)}{_ints(want)}"
    if len(got) == 2 and _is_picture(got[1]) and _is_picture(want[1]):
        return _difference(got[1], want[1], f"{where}({got[0]})", strict)
    return None if got == want else f"{where}: got {brief(got[1])}, want {brief(want[1])}"


def _ints(picture):
    """The numbers of a small int32 array."""
    if picture[1] != str(mx.int32) or len(picture[3]) > 64:
        return ""
    return " " + str(np.frombuffer(picture[3], dtype=np.int32).tolist())


def outcome(call):
    """("returned", picture) or ("raised", exception)."""
    try:
        return "returned", frozen(call())
    except Exception as error:
        return "raised", error


class CacheTestCase(unittest.TestCase):
    maxDiff = 2000

    def check(self, got, want, where="", strict=False):
        problem = difference(got, want, where, strict)
        if problem:
            self.fail(problem)

    def check_outcome(self, ours, theirs, where, strict=False, may_return=()):
        """Both return the same or raise the same kind of exception. `may_return`: exceptions of mlx-lm's in whose
        place ours may return something."""
        got, want = outcome(ours), outcome(theirs)
        if want[0] == "raised":
            if got[0] == "returned":
                if not isinstance(want[1], may_return):
                    self.fail(f"{where}: returned {brief(got[1])}, want {want[1]!r}")
            elif not isinstance(got[1], type(want[1])):
                self.fail(f"{where}: raised {got[1]!r}, want {want[1]!r}")
            return False
        if got[0] == "raised":
            self.fail(f"{where}: raised {got[1]!r}, want {brief(want[1])}")
        self.check(got[1], want[1], where, strict)
        return True


def orders(items, limit):
    """Every order of the items, or `limit` of them spread evenly over all."""
    total = 1
    for n in range(2, len(items) + 1):
        total *= n
    stride = max(1, total // limit)
    return list(itertools.islice(itertools.permutations(items), 0, None, stride)) if total <= 5040 else _shuffles(
        items, limit)


def _shuffles(items, limit):
    import random
    generator = random.Random(5)
    return [tuple(generator.sample(items, len(items))) for _ in range(limit)]
