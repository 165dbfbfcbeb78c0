"""Fields of the cache objects written one by one, as models and callers of mlx-lm do it."""
import copy
import gc
import unittest

from cache_support import (ATTENTION, BATCHES, IS_REFERENCE, PADDING, REFERENCE, SUBJECT, CacheTestCase, both, fill,
                           filled, frozen, loose, make, mx, orders, ours_only, rows, slot, unpadded)

FIELDS = {
    "KVCache": ["keys", "values", "offset"],
    "ConcatenateKVCache": ["keys", "values", "offset"],
    "QuantizedKVCache": ["keys", "values", "offset", "group_size", "bits"],
    "RotatingKVCache": ["keys", "values", "offset", "keep", "max_size", "_idx"],
    "ChunkedKVCache": ["keys", "values", "offset", "chunk_size", "start_position"],
    "ArraysCache": ["cache", "left_padding", "lengths"],
    "BatchKVCache": ["keys", "values", "offset", "left_padding", "_idx", "_right_padding"],
    "BatchRotatingKVCache": ["keys", "values", "offset", "left_padding", "max_size", "_offset", "_idx", "rotated",
                             "_lengths"],
}
ORDERS = 24  # of each class, at most
HISTORIES = [(3, 1), (12, 1), (4,) + (1,) * 7]


def own(value):
    """The same value in Python objects of its own: mlx-lm writes into the arrays that it holds."""
    if isinstance(value, mx.array):
        return mx.contiguous(value)
    if isinstance(value, (tuple, list)):
        return type(value)(own(item) for item in value)
    return value


def fields_of(cache, name):
    return {field: own(getattr(cache, field)) for field in FIELDS[name]}


def arrays_in(value):
    if isinstance(value, (tuple, list)):
        return [array for item in value for array in arrays_in(item)]
    return [value] if isinstance(value, mx.array) else []


class Steps(CacheTestCase):
    """Going on with ours and mlx-lm's side by side."""

    def go_on(self, ours, theirs, name, seed=40):
        if name == "ArraysCache":
            self.check(ours.make_mask(3), theirs.make_mask(3), "mask")
            for cache in (ours, theirs):
                cache.advance(2)
            self.check(ours.make_mask(3), theirs.make_mask(3), "mask after advance")
            for cache in (ours, theirs):
                cache[1] = slot(seed, 3)
            self.check(ours.state, theirs.state, "state")
            return
        batch = 3 if name in BATCHES else 1
        for step, count in enumerate((2, 1)):
            self.masks(ours, theirs, name, count)
            new = rows(count, seed + step, batch)
            self.check(ours.update_and_fetch(*new), theirs.update_and_fetch(*new), f"{name} update {count}")
            self.check(ours.state, theirs.state, f"{name} state after update")
        if theirs.is_trimmable() and self.can_trim_alike(theirs, name):
            self.assertEqual(ours.trim(1), theirs.trim(1))
            self.check(ours.offset, theirs.offset, "offset after trim")
            new = rows(1, seed + 9, batch)
            self.check(ours.update_and_fetch(*new), theirs.update_and_fetch(*new), f"{name} update after trim")

    def can_trim_alike(self, theirs, name):
        # [C1], [B4]
        return name != "ConcatenateKVCache" and (name not in BATCHES or min(theirs.offset.tolist()) > 0)

    def masks(self, ours, theirs, name, count):
        if not hasattr(theirs, "make_mask"):
            return
        for window in (None, 3):
            if name == "RotatingKVCache" and theirs.keep and theirs.offset >= theirs.max_size and count == 1:
                continue  # [M5]
            if name == "BatchRotatingKVCache" and theirs._offset >= theirs.max_size:
                continue  # [M7]
            self.check(ours.make_mask(count, return_array=False, window_size=window),
                       theirs.make_mask(count, return_array=False, window_size=window), f"{name} mask {window}")


class OrdersTest(Steps):
    def targets(self, name):
        yield "new", both(name)
        yield "filled", both(name, (2, 1), seed=17)

    def check_orders(self, name, history):
        donor = filled(REFERENCE, name, history)
        if name == "ArraysCache":
            donor = fill(REFERENCE.ArraysCache(2, PADDING), (), batch=3)
            donor.lengths = mx.array([5, 4, 9])
        values = fields_of(donor, name)
        want = frozen(donor.state)
        for order in orders(FIELDS[name], ORDERS):
            for kind, (ours, theirs) in self.targets(name):
                with self.subTest(name, history=history, order=order, target=kind):
                    for field in order:
                        setattr(ours, field, own(values[field]) if IS_REFERENCE else values[field])
                        setattr(theirs, field, own(values[field]))
                        self.check(getattr(ours, field), values[field], f"{field} read back")
                    self.check(ours.state, want, "state")
                    self.check(ours.nbytes, theirs.nbytes, "nbytes")
                    self.check(ours.size(), theirs.size(), "size")
                    self.go_on(ours, theirs, name)
        for field, value in values.items():
            self.check(value, getattr(donor, field), f"{field} as it was given [Z2]")

    def test_full_histories(self):
        for name in ("KVCache", "ConcatenateKVCache", "QuantizedKVCache"):
            for history in HISTORIES[:2]:
                self.check_orders(name, history)

    def test_rings(self):
        for history in HISTORIES:
            self.check_orders("RotatingKVCache", history)

    def test_chunks(self):
        for history in HISTORIES[:2]:
            self.check_orders("ChunkedKVCache", history)

    def test_slots(self):
        self.check_orders("ArraysCache", ())

    def test_batches(self):
        for history in HISTORIES[:2]:
            self.check_orders("BatchKVCache", history)

    def test_ring_batches(self):
        for history in HISTORIES:
            self.check_orders("BatchRotatingKVCache", history)

    def test_emptied(self):
        """keys, values and the counters back to the start."""
        for name in ATTENTION:
            values = fields_of(make(REFERENCE, name), name)
            for order in orders(FIELDS[name], 6):
                ours, theirs = both(name, (3, 1))
                with self.subTest(name, order=order):
                    for field in order:
                        setattr(ours, field, values[field])
                        setattr(theirs, field, own(values[field]))
                    self.assertEqual((ours.empty(), ours.keys, ours.values), (True, None, None))
                    self.go_on_from_empty(ours, theirs, name)

    def go_on_from_empty(self, ours, theirs, name):
        new = rows(3, 50, 3 if name in BATCHES else 1)
        self.check(ours.update_and_fetch(*new), theirs.update_and_fetch(*new), name)
        self.check(ours.state, theirs.state, name)


class SingleWritesTest(Steps):
    """One field alone, where that makes sense by itself."""

    def both_ways(self, name, history, write):
        ours, theirs = both(name, history)
        write(ours)
        write(theirs)
        self.check(ours.offset, theirs.offset, "offset")
        self.go_on(ours, theirs, name)

    def test_other_rows(self):
        for name in ATTENTION:
            if name == "QuantizedKVCache":
                continue
            for history in HISTORIES[:2]:
                for field in ("keys", "values"):
                    with self.subTest(name, history=history, field=field):
                        self.both_ways(name, history,
                                       lambda cache: setattr(cache, field, getattr(cache, field) * 2))

    def test_rewinding_by_hand(self):
        def growing(cache):
            cache.offset -= 2

        def ring(cache):
            cache.offset -= 2
            cache._idx -= 2

        def ring_the_other_way(cache):
            cache._idx -= 2
            cache.offset -= 2

        for name in ("KVCache", "QuantizedKVCache", "ChunkedKVCache"):
            self.both_ways(name, (3, 1), growing)
        for write in (ring, ring_the_other_way):
            self.both_ways("RotatingKVCache", (3, 1), write)

    def test_rewinding_a_batch_by_hand(self):
        def rewind(cache):
            cache._idx -= 2
            cache.offset -= 2

        def the_other_way(cache):
            cache.offset = cache.offset - 2
            cache._idx = cache._idx - 2

        for write in (rewind, the_other_way):
            self.both_ways("BatchKVCache", (3, 1, 1), write)

    def test_padding_of_a_batch(self):
        def pad(cache):
            cache.left_padding += mx.array([1, 2, 0])
            cache.offset = cache.offset - mx.array([1, 2, 0])

        def the_other_way(cache):
            cache.offset -= mx.array([1, 2, 0])
            cache.left_padding = cache.left_padding + mx.array([1, 2, 0])

        for name in BATCHES:
            for history in ((), (3, 1)):
                for write in (pad, the_other_way):
                    self.both_ways(name, history, write)

    def test_fields_take_what_python_has(self):
        """bool and numpy integers where int is meant; int64 where int32 is."""
        cache = filled(SUBJECT, "KVCache")
        cache.offset = mx.array(3).item()
        self.assertEqual(cache.offset, 3)
        batch, other = both("BatchKVCache", (3, 1))
        for target in (batch, other):
            target.offset = target.offset.astype(mx.int64)
        self.go_on_values(batch, other)

    def go_on_values(self, ours, theirs):
        new = rows(1, 3, 3)
        self.check(ours.update_and_fetch(*new), theirs.update_and_fetch(*new))
        self.assertEqual(ours.offset.tolist(), theirs.offset.tolist())

    def test_lengths_and_padding_of_slots(self):
        for order in (("left_padding", "lengths"), ("lengths", "left_padding")):
            ours, theirs = both("ArraysCache")
            for cache in (ours, theirs):
                for field in order:
                    setattr(cache, field, mx.array([3, 1, 2]))
                self.assertEqual(cache.batch_size, 3)
            self.go_on(ours, theirs, "ArraysCache")
            for cache in (ours, theirs):
                cache.lengths = None
            self.check(ours.make_mask(4), theirs.make_mask(4))

    def test_lengths_change_in_the_middle(self):
        """kimi, qwen and others subtract from lengths themselves."""
        ours, theirs = both("ArraysCache")
        for cache in (ours, theirs):
            cache.prepare(lengths=[6, 2, 4])
            cache.lengths = cache.lengths - 2
            cache.lengths -= 1
        self.check(ours.lengths, theirs.lengths)
        self.check(ours.make_mask(3), theirs.make_mask(3))

    def test_the_list_of_slots_is_that_of_the_cache(self):
        changes = {
            "append": lambda c: c.cache.append(slot(3)),
            "extend": lambda c: c.cache.extend([slot(3), None]),
            "insert": lambda c: c.cache.insert(0, slot(3)),
            "pop": lambda c: c.cache.pop(),
            "del": lambda c: c.cache.__delitem__(0),
            "remove": lambda c: c.cache.remove(None),
            "slice": lambda c: c.cache.__setitem__(slice(0, 1), [slot(3), slot(4)]),
            "reverse": lambda c: c.cache.reverse(),
            "clear": lambda c: c.cache.clear(),
        }
        for name, change in changes.items():
            pair = both("ArraysCache")
            for cache in pair:
                cache.cache = [None, slot(1), slot(2)]
            results = [change(cache) for cache in pair]
            self.check(*results, name)
            self.check(*(cache.state for cache in pair), name)
        for cache in (pair := both("ArraysCache")):
            cache.cache += [slot(3)]
            cache.cache *= 2
            held = cache.cache
            held.append(slot(4))
            held[0] = slot(5)
            self.assertEqual(len(held), len(cache.cache))
        self.check(pair[0].state, pair[1].state)


class PendingPromptTest(Steps):
    """Writing a field of a batch between the chunks of a right-padded prompt."""

    def prepared(self, name, chunks=(3,)):
        pair = unpadded(SUBJECT, name), unpadded(REFERENCE, name)
        for cache in pair:
            cache.prepare(lengths=[3, 5, 2], right_padding=[2, 0, 3])
            for index, count in enumerate(chunks):
                cache.update_and_fetch(*rows(count, index, 3))
        return pair

    def test_field_writes_keep_it(self):
        writes = {
            "keys": lambda cache: setattr(cache, "keys", mx.depends(cache.keys, cache.values)),
            "values": lambda cache: setattr(cache, "values", cache.values * 2),
            "offset": lambda cache: setattr(cache, "offset", cache.offset + 0),
            "left_padding": lambda cache: setattr(cache, "left_padding", cache.left_padding + 0),
            "all": lambda cache: [setattr(cache, field, getattr(cache, field))
                                  for field in ("values", "offset", "_idx", "keys", "left_padding")],
        }
        for name in BATCHES:
            for what, write in writes.items():
                with self.subTest(name, write=what):
                    ours, theirs = self.prepared(name)
                    write(ours), write(theirs)
                    for cache in (ours, theirs):
                        cache.update_and_fetch(*rows(2, 7, 3))
                        cache.finalize()
                    self.check(ours.state, theirs.state)
                    self.assertIs(getattr(ours, "_right_padding", None), None)
                    new = rows(1, 8, 3)
                    self.check(ours.update_and_fetch(*new), theirs.update_and_fetch(*new))

    def test_it_may_be_written_itself(self):
        for chunks in ((), (3,)):
            ours, theirs = unpadded(SUBJECT, "BatchKVCache"), unpadded(REFERENCE, "BatchKVCache")
            for cache in (ours, theirs):
                for index, count in enumerate(chunks):
                    cache.update_and_fetch(*rows(count, index, 3))
                cache._right_padding = mx.array([2, 0, 1])
                cache.update_and_fetch(*rows(3, 4, 3))
                cache.finalize()
            self.check(ours.state, theirs.state)
        ours, theirs = self.prepared("BatchKVCache")
        for cache in (ours, theirs):
            cache._right_padding = None
            cache.finalize()
        self.check(ours.state, theirs.state)

    def test_lengths_of_a_ring_may_be_written(self):
        ours, theirs = self.prepared("BatchRotatingKVCache")
        self.check(ours._lengths, theirs._lengths)
        for cache in (ours, theirs):
            cache._lengths = cache._lengths - mx.array([1, 0, 0])
            cache.finalize()
        self.check(ours.state, theirs.state)
        ours, theirs = self.prepared("BatchRotatingKVCache")
        for cache in (ours, theirs):
            cache._lengths = None
            cache.update_and_fetch(*rows(1, 9, 3))
        self.check(ours.state, theirs.state)


@ours_only
class RefusedWritesTest(CacheTestCase):
    """What does not fit together is refused at the next use; the old contents are there again."""

    USES = {
        "update": lambda cache, batch: cache.update_and_fetch(*rows(1, 3, batch)),
        "rows": lambda cache, batch: cache.keys_and_values(),
        "trim": lambda cache, batch: cache.trim(1),
        "size": lambda cache, batch: cache.size(),
        "nbytes": lambda cache, batch: cache.nbytes,
        "state": lambda cache, batch: cache.state,
        "copy": lambda cache, batch: copy.deepcopy(cache),
    }

    def check_refused(self, cache, field, value, named, batch=1):
        before = frozen(cache.state)
        for use, call in self.USES.items():
            with self.subTest(type(cache).__name__, field=field, use=use):
                setattr(cache, field, value)
                with self.assertRaises(ValueError) as caught:
                    call(cache, batch)
                self.assertTrue(any(word in str(caught.exception) for word in named), str(caught.exception))
                self.check(cache.state, before, "the old contents")
                if use == "update":
                    copy.deepcopy(cache).update_and_fetch(*rows(1, 3, batch))

    def test_keys_alone(self):
        for name in ATTENTION:
            batch = 3 if name in BATCHES else 1
            cache = filled(SUBJECT, name)
            other = rows(9, 5, batch)[0]
            if name == "QuantizedKVCache":
                other = tuple(mx.quantize(other, group_size=32, bits=8))
            self.check_refused(cache, "keys", other[..., :2, :] if name != "QuantizedKVCache" else other,
                               ("keys", "values"), batch)

    def test_wrong_rank_and_dtype(self):
        for name in ATTENTION:
            cache = filled(SUBJECT, name)
            batch = 3 if name in BATCHES else 1
            for wrong in (mx.zeros((4,)), mx.zeros(cache.keys[0].shape if name == "QuantizedKVCache" else
                                                   cache.keys.shape, mx.int32), mx.zeros((0, 0, 0, 0))):
                self.check_refused(cache, "keys", wrong, ("keys", "values", "state"), batch)

    def test_offset_beyond_the_rows(self):
        for name in ("KVCache", "QuantizedKVCache", "ChunkedKVCache"):
            cache = filled(SUBJECT, name)
            for wrong in (10 ** 6, -1):
                self.check_refused(cache, "offset", wrong, ("offset",))

    def test_wrong_counters_of_batches(self):
        for name in BATCHES:
            cache = filled(SUBJECT, name)
            self.check_refused(cache, "offset", mx.array([1, 2]), ("offset", "left_padding", "rows"), 3)
            self.check_refused(cache, "left_padding", mx.array([1, 2]), ("offset", "left_padding", "rows"), 3)
            self.check_refused(cache, "_idx", 10 ** 6, ("idx",), 3)

    def test_only_keys_of_an_empty_one(self):
        for name in ATTENTION:
            cache = make(SUBJECT, name)
            new = rows(3, 1, 3 if name in BATCHES else 1)[0]
            if name == "QuantizedKVCache":
                new = tuple(mx.quantize(new, group_size=32, bits=8))
            self.check_refused(cache, "keys", new, ("keys", "values"), 3 if name in BATCHES else 1)
            self.assertTrue(cache.empty())

    def test_values_of_no_use_at_all(self):
        """Refused when written or at the next use, whichever comes first."""
        for name in FIELDS:
            for field in FIELDS[name]:
                if field == "cache":
                    continue
                for wrong in ("text", object(), [object()], {}, 1.5, float("nan"), 2 ** 70, -2 ** 70, b"x"):
                    cache = filled(SUBJECT, name)
                    before = frozen(cache.state)
                    with self.subTest(name, field=field, wrong=repr(wrong)):
                        with self.assertRaises((ValueError, TypeError, OverflowError)):
                            setattr(cache, field, wrong)
                            cache.nbytes
                        self.check(cache.state, before, "the old contents")

    def test_a_refused_write_does_not_spoil_the_next(self):
        cache, other = both("KVCache", (3, 1))
        cache.keys = mx.zeros((2, 2))
        self.assertRaises(ValueError, cache.size)
        for target in (cache, other):
            target.keys = target.keys + 1
        new = rows(1, 4)
        self.check(cache.update_and_fetch(*new), other.update_and_fetch(*new))

    def test_reading_between_writes_is_no_use(self):
        """Fields can be read while others are still to be written."""
        cache = make(SUBJECT, "KVCache")
        keys, values = rows(5)
        cache.keys = keys
        self.check(cache.keys, keys)
        self.assertIs(cache.values, None)
        self.assertEqual(cache.offset, 0)
        cache.values = values
        cache.offset = 4
        self.check(cache.keys_and_values(), (keys[..., :4, :], values[..., :4, :]))


class LoopTest(CacheTestCase):
    """What models write at every step keeps memory and graph bounded."""

    STEPS = 2000

    def run_loop(self, cache, write, batch=1, look=None):
        """Decodes, writing a field at every step, and evaluates only what is not the cache."""
        keys, values = (mx.zeros((batch, 1, 1, size)) for size in (8, 8))
        h = mx.zeros((batch, 1, 8))
        memory = []
        for step in range(self.STEPS):
            shown, _ = cache.update_and_fetch(keys + step, values)
            h = h + shown[:, 0, -1:, :8]
            write(cache, h)
            mx.eval(h if look is None else look(cache, h))
            if step % 500 == 499:
                gc.collect()
                memory.append(mx.get_active_memory() - cache.nbytes)
        return memory

    def check_flat(self, memory, where):
        growth = memory[-1] - memory[0]
        self.assertLess(growth, 64 * 1024, f"{where}: {memory}")

    def test_keys_that_depend(self):
        def write(cache, h):
            cache.keys = mx.depends(cache.keys, h)

        for name in ("KVCache", "RotatingKVCache", "ChunkedKVCache"):
            with self.subTest(name):
                cache = make(SUBJECT, name)
                self.check_flat(self.run_loop(cache, write, look=lambda cache, h: cache.keys), name)
                self.assertEqual(cache.offset, self.STEPS)

    def test_keys_that_depend_in_batches(self):
        def write(cache, h):
            cache.keys = mx.depends(cache.keys, h)

        for name in BATCHES:
            with self.subTest(name):
                cache = make(SUBJECT, name)
                self.check_flat(self.run_loop(cache, write, batch=3, look=lambda cache, h: cache.keys), name)
                self.assertEqual(cache.offset.tolist(), [self.STEPS - p for p in PADDING])

    def test_values_that_nobody_reads(self):
        """deepseek_v32's indexer stores its keys twice and then forgets one."""
        def write(cache, h):
            cache.values = mx.zeros_like(cache.keys)

        for name in ("KVCache", "RotatingKVCache"):
            with self.subTest(name):
                cache = make(SUBJECT, name)
                self.check_flat(self.run_loop(cache, write), name)
                self.assertEqual(frozen(cache.values), frozen(mx.zeros_like(cache.keys)))

    @ours_only
    def test_slots_that_nobody_reads(self):
        cache = SUBJECT.ArraysCache(2)
        state = mx.zeros((1, 64))
        memory = []
        for step in range(self.STEPS):
            state = state + 1
            cache[0] = state
            cache[1] = (cache[1] if cache[1] is not None else 0) + mx.ones((1, 64))
            mx.eval(state)
            if step % 500 == 499:
                gc.collect()
                memory.append(mx.get_active_memory())
        self.check_flat(memory, "slots")
        self.assertEqual(cache[1].tolist()[0][0], self.STEPS)

    @ours_only
    def test_offsets_that_nobody_evaluates(self):
        """[Z6]"""
        for name in BATCHES:
            cache = make(SUBJECT, name)
            memory = self.run_loop(cache, lambda cache, h: None, batch=3)
            self.check_flat(memory, name)
            self.assertEqual(cache.offset.tolist(), [self.STEPS - p for p in PADDING])


class HandedOutTest(CacheTestCase):
    """[Z2]: what was given or handed out never changes."""

    def test_fields_and_rows(self):
        for name in ATTENTION:
            batch = 3 if name in BATCHES else 1
            cache = make(SUBJECT, name)
            taken, pictures = [], []

            def take(value):
                taken.append(value)
                pictures.append(frozen(value))

            for step, count in enumerate((3, 1, 1, 9, 1, 1, 2, 1)):
                new = rows(count, step, batch)
                take(new)
                shown = cache.update_and_fetch(*new)
                if not IS_REFERENCE:
                    take(shown)
                    for field in FIELDS[name]:
                        take(getattr(cache, field))
                    take(cache.state)
                    take(cache.keys_and_values())
                if step == 4 and cache.is_trimmable():
                    cache.trim(2)
            for value, picture in zip(taken, pictures):
                self.check(value, picture, name)

    @ours_only
    def test_written_fields_stay_the_callers(self):
        for name in ATTENTION:
            if name == "QuantizedKVCache":
                continue
            donor, cache = filled(SUBJECT, name), make(SUBJECT, name)
            values = fields_of(donor, name)
            for field, value in values.items():
                setattr(cache, field, value)
            pictures = {field: frozen(value) for field, value in values.items()}
            for step in range(12):
                cache.update_and_fetch(*rows(1, step, 3 if name in BATCHES else 1))
            for field, value in values.items():
                self.check(value, pictures[field], f"{name}.{field}")

    @ours_only
    def test_writing_into_what_was_handed_out(self):
        """An array is a value: writing into it does not reach the cache."""
        for name in ATTENTION:
            if name == "QuantizedKVCache":
                continue
            cache = filled(SUBJECT, name)
            before = frozen(cache.state)
            keys, values = cache.keys_and_values()
            keys[...] = 0
            held = cache.keys
            held[...] = 1
            offset = cache.offset
            if name in BATCHES:
                offset += 5
                padding = cache.left_padding
                padding += 5
            self.check(cache.state, before, name)

    @ours_only
    def test_arrays_given_may_be_written_later(self):
        cache = SUBJECT.KVCache()
        keys, values = rows(3)
        cache.update_and_fetch(keys, values)
        before = frozen(cache.state)
        keys[...] = 0
        values *= 2
        self.check(cache.state, before)
        slots = SUBJECT.ArraysCache(1)
        array = slot(1)
        slots[0] = array
        before = frozen(slots.state)
        array[...] = 0
        self.check(slots.state, before)


if __name__ == "__main__":
    unittest.main()
