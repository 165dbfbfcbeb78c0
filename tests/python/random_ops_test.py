"""Random histories of operations on our caches and mlx-lm's side by side.

REPRISE_FUZZ_SEED=N chooses the history, REPRISE_FUZZ_OPERATIONS=N its length. Where the requirements overrule mlx-lm
(their identifier in brackets), the operation is left out, mlx-lm's object is mended, or ours alone is looked at.
"""
import copy
import os
import random
import unittest

from cache_support import (IS_REFERENCE, REFERENCE, SUBJECT, CacheTestCase, difference, frozen, mx, rows, slot)

SEED = int(os.environ.get("REPRISE_FUZZ_SEED", "7"))
OPERATIONS = int(os.environ.get("REPRISE_FUZZ_OPERATIONS", "120"))
MAX_SIZE = 8
CHUNKS = [1, 1, 1, 1, 2, 3, 5, 9]


class History:
    """`operations` are names of methods, drawn in each step; those that cannot be done now do nothing."""

    operations = ["update", "update", "update", "mask", "trim", "reload", "copy"]
    batch = 1
    chunks = CHUNKS

    def __init__(self, test, seed):
        self.test, self.random, self.counter = test, random.Random(f"{type(self).__name__} {seed}"), 0
        self.log = []
        self.start()

    def make(self, module):
        raise NotImplementedError

    def start(self):
        self.ours, self.theirs = self.make(SUBJECT), self.make(REFERENCE)

    def step(self):
        operation = self.random.choice(self.operations)
        self.log.append(operation)
        getattr(self, operation)()
        self.look()

    def note(self, *words):
        self.log[-1] += " " + " ".join(map(str, words))

    def check(self, got, want, what):
        problem = difference(got, want, what)
        if problem:
            self.test.fail(f"{problem}\nhistory ({len(self.log)} steps): …{self.log[-25:]}")


    def new_rows(self, count):
        self.counter += 1
        return rows(count, self.counter, self.batch)

    def look(self):
        """What both show after each step."""
        for field in self.fields():
            self.check(getattr(self.ours, field), getattr(self.theirs, field), field)
        for method in ("size", "empty", "is_trimmable"):
            self.check(getattr(self.ours, method)(), getattr(self.theirs, method)(), method)
        self.check_nbytes()
        if not self.theirs.empty():
            self.check(self.ours.keys_and_values(), self.theirs.keys_and_values(), "keys_and_values")

    def check_nbytes(self):
        self.check(self.ours.nbytes, self.theirs.nbytes, "nbytes")

    def fields(self):
        return [name for name in vars(self.theirs) if name not in ("keys", "values")]

    def update(self, count=None):
        count = count or self.random.choice(self.chunks)
        self.note(count)
        new = self.new_rows(count)
        self.check(self.ours.update_and_fetch(*new), self.theirs.update_and_fetch(*new), f"update {count}")

    def mask(self):
        count, window = self.random.choice([1, 1, 2, 3, 7, 12]), self.random.choice([None, None, 1, 2, 5, 8, 20])
        array = self.random.random() < 0.5
        self.note(count, window, array)
        if self.mask_is_overruled(count, window):
            return
        self.check(self.ours.make_mask(count, return_array=array, window_size=window),
                   self.theirs.make_mask(count, return_array=array, window_size=window), f"mask {count} {window}")

    def mask_is_overruled(self, count, window):
        return False

    def trim(self):
        if not self.theirs.is_trimmable():
            # [Z8]: mlx-lm goes on and spoils its write index.
            before = frozen(self.ours.state)
            if not IS_REFERENCE:
                self.check(self.ours.trim(3), 0, "trim of what cannot be trimmed")
            self.check(frozen(self.ours.state), before, "state after a trim of nothing")
            return
        most = self.most_to_trim()
        n = self.random.choice([0, 1, 1, 2, 3, self.random.randrange(most + 1), most + self.random.randrange(3)])
        n = self.limited(n)
        self.note(n)
        self.check(self.ours.trim(n), self.theirs.trim(n), "trimmed")
        self.mend_after_trim()

    def most_to_trim(self):
        return self.theirs.offset

    def limited(self, n):
        return n

    def mend_after_trim(self):
        pass

    def reload(self):
        self.check(self.ours.state, self.theirs.state, "state")
        self.ours = type(self.ours).from_state(self.ours.state)
        self.theirs = type(self.theirs).from_state(self.theirs.state)

    def copy(self):
        """Goes on with the copy and then checks that the original did not notice; or the other way round."""
        way = self.random.choice([copy.deepcopy, copy.copy] if not IS_REFERENCE else [copy.deepcopy])
        ours, theirs = way(self.ours), copy.deepcopy(self.theirs)
        if self.random.random() < 0.5:
            self.ours, ours = ours, self.ours
            self.theirs, theirs = theirs, self.theirs
        before = frozen(ours.state)
        self.update_anything()
        self.check(frozen(ours.state), before, "the other side of the copy")

    def update_anything(self):
        self.update(1)


class KVHistory(History):
    operations = History.operations + ["to_quantized", "merge_and_extract"]
    chunks = CHUNKS + [100, 255, 256, 257]

    def make(self, module):
        return module.KVCache()

    def to_quantized(self):
        bits = self.random.choice([2, 3, 4, 5, 6, 8])
        ours, theirs = self.ours.to_quantized(32, bits), self.theirs.to_quantized(group_size=32, bits=bits)
        self.check(ours.state, theirs.state, "to_quantized")
        new = self.new_rows(1)
        self.check(ours.update_and_fetch(*new), theirs.update_and_fetch(*new), "update of the quantised one")

    def merge_and_extract(self):
        if self.theirs.empty() or self.theirs.offset == 0:
            return
        others = [(module.KVCache(), module) for module in (SUBJECT, REFERENCE)]
        new = self.new_rows(self.random.choice([1, 4, 30]))
        for other, _ in others:
            other.update_and_fetch(*new)
        ours = type(self.ours).merge([self.ours, others[0][0]])
        theirs = type(self.theirs).merge([self.theirs, others[1][0]])
        self.check(ours, theirs, "merge")
        self.ours, self.theirs = ours.extract(0), theirs.extract(0)
        self.check(self.ours, self.theirs, "extract")


class ConcatenateHistory(History):
    def make(self, module):
        return module.ConcatenateKVCache()

    def mend_after_trim(self):
        """[C1]: mlx-lm shows the dropped columns again."""
        if not self.theirs.empty() and not IS_REFERENCE:
            self.theirs.keys = self.theirs.keys[..., :self.theirs.offset, :]
            self.theirs.values = self.theirs.values[..., :self.theirs.offset, :]

    def check_nbytes(self):
        if not (self.log[-1].startswith("trim") or self.lazily_cut):
            super().check_nbytes()

    lazily_cut = False

    def trim(self):
        self.lazily_cut = True
        super().trim()

    def update(self, count=None):
        self.lazily_cut = False
        super().update(count)

    def reload(self):
        if not self.theirs.empty():
            self.lazily_cut = False
            super().reload()


class QuantizedHistory(History):
    chunks = CHUNKS + [255, 257]

    def start(self):
        self.bits = self.random.choice([2, 3, 4, 5, 6, 8])
        super().start()

    def make(self, module):
        return module.QuantizedKVCache(32, self.bits)

    def check_nbytes(self):
        if not self.theirs.empty():  # 3.3: 0, not an error
            super().check_nbytes()


class RotatingHistory(History):
    keep = 0

    def make(self, module):
        return module.RotatingKVCache(MAX_SIZE, self.keep)

    def mask_is_overruled(self, count, window):
        return self.keep > 0 and count == 1 and self.theirs.offset >= MAX_SIZE  # [M5]


class KeepingHistory(RotatingHistory):
    keep = 2


class LargeRingHistory(RotatingHistory):
    """Two steps of growth before it wraps."""
    chunks = CHUNKS + [100, 200, 255, 600]
    operations = RotatingHistory.operations + ["merge_and_extract"]

    def make(self, module):
        return module.RotatingKVCache(300)

    def mask_is_overruled(self, count, window):
        return False

    def merge_and_extract(self):
        if self.theirs.empty() or self.theirs.offset == 0:
            return
        others = [module.RotatingKVCache(300) for module in (SUBJECT, REFERENCE)]
        new = self.new_rows(self.random.choice([1, 4, 400]))
        for other in others:
            other.update_and_fetch(*new)
        ours = type(self.ours).merge([others[0], self.ours])
        theirs = type(self.theirs).merge([others[1], self.theirs])
        self.check(ours, theirs, "merge")
        self.ours, self.theirs = ours.extract(1), theirs.extract(1)
        self.check(self.ours, self.theirs, "extract")


class ChunkedHistory(History):
    operations = ["update", "update", "trim_front", "trim_front", "trim", "reload", "copy"]

    def make(self, module):
        return module.ChunkedKVCache(MAX_SIZE)

    def trim_front(self):
        self.check(self.ours.maybe_trim_front(), self.theirs.maybe_trim_front(), "maybe_trim_front")


class ArraysHistory(History):
    operations = ["set_slot", "set_slot", "prepare", "advance", "mask", "filter", "extend", "extract", "finalize",
                  "reload", "copy", "merge"]

    def make(self, module):
        self.batch = 3
        return module.ArraysCache(2, [2, 0, 1])

    def look(self):
        self.check(self.ours.state, self.theirs.state, "state")
        self.check(self.ours.nbytes, self.theirs.nbytes, "nbytes")
        self.check(self.ours.empty(), self.theirs.empty(), "empty")
        if not self.theirs.empty():
            self.check(self.ours.batch_size, self.theirs.batch_size, "batch_size")

    def set_slot(self):
        index = self.random.randrange(2)
        self.counter += 1
        value = slot(self.counter, self.batch)
        if self.random.random() < 0.1 and not (self.theirs.left_padding is None and self.theirs.lengths is None):
            value = None
        self.ours[index] = value
        self.theirs[index] = value
        self.check(self.ours[index], self.theirs[index], "slot")

    update_anything = set_slot

    def has_unset(self):
        return any(array is None for array in self.theirs.cache)

    def lengths(self):
        return [self.random.randrange(9) for _ in range(self.batch)]

    def prepare(self):
        lengths = self.lengths()
        self.ours.prepare(lengths=lengths)
        self.theirs.prepare(lengths=lengths)

    def advance(self):
        n = self.random.randrange(4)
        self.ours.advance(n)
        self.theirs.advance(n)

    def finalize(self):
        if self.has_unset():
            return  # nothing would tell the batch size any more
        self.ours.finalize()
        self.theirs.finalize()

    def mask(self):
        n = self.random.randrange(1, 6)
        self.check(self.ours.make_mask(n), self.theirs.make_mask(n), f"mask {n}")

    def filter(self):
        indices = [self.random.randrange(self.batch) for _ in range(self.random.randrange(1, self.batch + 1))]
        if self.random.random() < 0.3:
            indices = mx.array(indices)
        self.ours.filter(indices)
        self.theirs.filter(indices)
        self.batch = len(indices)

    def extend(self):
        if self.batch > 4:
            return self.filter()
        with_lengths = self.theirs.lengths is not None  # [A5]: one-sided lengths
        others = []
        lengths = [self.random.randrange(9) for _ in range(2)]
        for module in (SUBJECT, REFERENCE):
            other = module.ArraysCache(2, [1, 3])
            other[0] = slot(self.counter + 1, 2)
            if with_lengths:
                other.prepare(lengths=lengths)
            others.append(other)
        self.ours.extend(others[0])
        self.theirs.extend(others[1])
        self.batch += 2

    def extract(self):
        if self.has_unset():
            return  # [A6]
        index = self.random.randrange(self.batch)
        self.check(self.ours.extract(index), self.theirs.extract(index), "extract")

    def merge(self):
        if self.has_unset() or self.batch == 1:
            return  # [A7]
        parts = [[cache.extract(i) for i in range(self.batch)] for cache in (self.ours, self.theirs)]
        ours, theirs = type(self.ours).merge(parts[0]), type(self.theirs).merge(parts[1])
        self.check(ours, theirs, "merge")

    def reload(self):
        self.ours = type(self.ours).from_state(self.ours.state)
        # mlx-lm would go on in the list that its state handed out.
        slots, padding, lengths = self.theirs.state
        self.theirs = type(self.theirs).from_state((list(slots), padding, lengths))


class BatchHistory(History):
    operations = ["update", "update", "update", "mask", "mask", "trim", "reload", "copy", "filter", "extend", "extract",
                  "extend_by_empty", "padded_prompt"]
    paddings = [1, 0, 3]

    def start(self):
        self.batch = len(self.paddings)
        super().start()

    def most_to_trim(self):
        return max(0, min(self.theirs.offset.tolist()))

    def limited(self, n):
        """[B4], [W5]: in mlx-lm a row with fewer tokens ends below zero."""
        return min(n, self.most_to_trim())

    def reload(self):
        super().reload()
        for cache in (self.ours, self.theirs):
            if type(cache).__module__ == REFERENCE.__name__:
                setattr(cache, self.pending, None)  # which mlx-lm forgets

    def filter(self):
        if self.theirs.empty():
            return  # [B5]
        indices = [self.random.randrange(self.batch) for _ in range(self.random.randrange(1, self.batch + 1))]
        self.note(indices)
        paddings = self.theirs.left_padding.tolist()
        if min(paddings[index] for index in indices) > self.theirs._idx:
            return  # [B5]: rows that are all still in their padding; mlx-lm's write index becomes negative
        indices = self.random.choice([list, mx.array])(indices)
        self.ours.filter(indices)
        self.theirs.filter(indices)
        self.batch = len(indices)

    def other(self, module, paddings):
        raise NotImplementedError

    def extend(self, counts=None):
        if self.batch > 4:
            return self.filter()
        counts = [self.random.choice(CHUNKS) for _ in range(self.random.randrange(4))] if counts is None else counts
        self.note(counts)
        paddings = [self.random.randrange(3) for _ in range(self.random.choice([1, 2]))]
        others = [self.other(module, paddings) for module in (SUBJECT, REFERENCE)]
        for count in counts:
            self.counter += 1
            new = rows(count, self.counter, len(paddings))
            for other in others:
                other.update_and_fetch(*new)
        if self.extension_is_overruled(others[1]):
            return
        before = frozen(others[0].state)
        # [W7]: mlx-lm may turn `other`.
        self.ours.extend(others[0])
        self.theirs.extend(others[1])
        if not IS_REFERENCE:
            self.check(frozen(others[0].state), before, "other")
        self.batch += len(paddings)

    def extension_is_overruled(self, other):
        return False

    def extend_by_empty(self):
        self.extend(counts=[])

    def extract(self):
        if self.theirs.empty():
            return  # [B7], [W8]
        index = self.random.randrange(self.batch)
        self.note(index)
        if self.theirs.offset.tolist()[index] < 0:
            return  # a row that is still in its padding
        ours, theirs = self.ours.extract(index), self.theirs.extract(index)
        self.check(ours, theirs, "extract")
        self.counter += 1
        new = rows(1, self.counter)
        self.check(ours.update_and_fetch(*new), theirs.update_and_fetch(*new), "update of the extracted row")

    def padded_prompt(self):
        lengths = [self.random.randrange(1, 7) for _ in range(self.batch)]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        left = longest
        if min(self.theirs.offset.tolist()) < 0:
            return  # a row that is padded on both sides
        if min(self.theirs.left_padding.tolist()) < 0 and max(padding) > 0:
            return  # [W3], [W7]: rolled rows without padding left; mlx-lm takes the filler for tokens
        self.note(lengths)
        for cache in (self.ours, self.theirs):
            cache.prepare(lengths=lengths, right_padding=padding)
        while left > 0:
            count = left if left < 4 else self.random.randrange(2, left - 1)
            if count == 1 and max(padding) > 0 and self.pending == "_lengths":
                for cache in (self.ours, self.theirs):  # a ring does not decode before finalize
                    self.test.assertRaises(RuntimeError, cache.update_and_fetch, *rows(1, 1, self.batch))
                break
            self.update(count)
            left -= count
        for cache in (self.ours, self.theirs):
            if not cache.empty():
                cache.finalize()


class BatchKVHistory(BatchHistory):
    pending = "_right_padding"
    chunks = CHUNKS + [255, 257]

    def make(self, module):
        return module.BatchKVCache(self.paddings)

    def other(self, module, paddings):
        return module.BatchKVCache(paddings)


class BatchRotatingHistory(BatchHistory):
    pending = "_lengths"

    def make(self, module):
        return module.BatchRotatingKVCache(MAX_SIZE, self.paddings)

    def other(self, module, paddings):
        return module.BatchRotatingKVCache(MAX_SIZE, paddings)

    def extension_is_overruled(self, other):
        """[W7]: a row without padding left counts it as negative; moved to the right, mlx-lm takes filler for tokens."""
        sides = self.theirs, other
        return min(min(side.left_padding.tolist()) for side in sides) < 0 and len(
            {side.keys.shape[2] if side.rotated else side._idx for side in sides}) > 1

    def mask_is_overruled(self, count, window):
        return count > 1 and self.theirs.rotated  # [M7]: mlx-lm hides a column that is valid


class ListHistory(History):
    operations = ["update", "update", "update", "trim", "reload", "copy", "merge_and_extract"]

    def make(self, module):
        return module.CacheList(module.KVCache(), module.CacheList(module.RotatingKVCache(MAX_SIZE)),
                                module.QuantizedKVCache(32, 4))

    def attention(self, cache):
        return [cache[0], cache[1][0], cache[2]]

    def look(self):
        for method in ("size", "empty", "is_trimmable"):
            self.check(getattr(self.ours, method)(), getattr(self.theirs, method)(), method)
        if not self.theirs.empty():
            self.check(self.ours.nbytes, self.theirs.nbytes, "nbytes")
        self.check(self.ours.state, self.theirs.state, "state")

    def update(self, count=None):
        count = count or self.random.choice(self.chunks)
        for ours, theirs in zip(self.attention(self.ours), self.attention(self.theirs)):
            new = self.new_rows(count)
            self.check(ours.update_and_fetch(*new), theirs.update_and_fetch(*new), f"update {count}")

    def most_to_trim(self):
        return self.theirs[0].offset

    def merge_and_extract(self):
        if self.theirs.empty() or self.theirs[0].offset == 0:
            return
        parts = [module.CacheList(cache[0], cache[1]) for module, cache in ((SUBJECT, self.ours),
                                                                            (REFERENCE, self.theirs))]
        ours, theirs = (type(part).merge([part, part]) for part in parts)
        self.check(ours, theirs, "merge")
        for batch in (ours, theirs):
            batch.prepare(lengths=[2, 1], right_padding=[0, 1])
        new = rows(2, 3, 2)
        for index in (0, 1):
            get = (lambda cache: cache[0]) if index == 0 else (lambda cache: cache[1][0])
            self.check(get(ours).update_and_fetch(*new), get(theirs).update_and_fetch(*new), "update of the batch")
        for batch in (ours, theirs):
            batch.finalize()
            batch.filter([1, 0])
        self.check(ours, theirs, "filter")
        self.check(ours.extract(1), theirs.extract(1), "extract")
        more = [type(part).merge([part]) for part in parts]
        ours.extend(more[0])
        theirs.extend(more[1])
        self.check(ours, theirs, "extend")


class RandomHistoriesTest(CacheTestCase):
    def run_history(self, cls):
        for seed in (SEED, SEED + 1):
            with self.subTest(cls.__name__, seed=seed):
                history = cls(self, seed)
                for _ in range(max(1, OPERATIONS // 2)):
                    try:
                        history.step()
                    except self.failureException:
                        raise
                    except Exception as error:
                        raise self.failureException(f"{error!r}\nhistory: …{history.log[-25:]}") from error


def _add(cls):
    setattr(RandomHistoriesTest, f"test_{cls.__name__}", lambda self: self.run_history(cls))


for _cls in (KVHistory, ConcatenateHistory, QuantizedHistory, RotatingHistory, KeepingHistory, LargeRingHistory,
             ChunkedHistory, ArraysHistory, BatchKVHistory, BatchRotatingHistory, ListHistory):
    _add(_cls)


if __name__ == "__main__":
    unittest.main()
