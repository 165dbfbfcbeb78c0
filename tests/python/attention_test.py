"""Our attention beside mlx_lm.models.base: the calls it takes, their results and their errors.

Dense: bit for bit. Quantised: mlx-lm's own in float32 is the reference (in bfloat16 its products are off by percents);
ours computes in float32 whatever the queries are, so that it differs by the order of sums and one rounding to the
result's dtype (TOLERANCE).
"""
import itertools
import json
import os
import pathlib
import unittest

try:
    import mlx.core as mx
    import numpy
    from mlx_lm.models import base, cache
except ImportError as error:
    raise unittest.SkipTest(f"needs mlx, numpy and mlx-lm: {error}")

from reprise import _core

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}  # of the values, which are about 1
HEADS = ((4, 4), (8, 2))
LENGTHS = (1, 3, 9)
D, S = 64, 21
SCALE = 0.17


def conformance_folder():
    source = pathlib.Path(os.environ.get("REPRISE_SOURCE_DIR", pathlib.Path(__file__).parents[2]))
    full = pathlib.Path(os.environ.get("REPRISE_TEST_DATA", source / "../shared")) / "conformance"
    return full if (full / "index.json").exists() else source / "tests/data/conformance"


class Quantized:
    """All that attention asks of a quantised cache."""

    def __init__(self, bits, group_size):
        self.bits = bits
        self.group_size = group_size


def draw(*shape, dtype=mx.float32, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def problem(B, H, Hkv, L, dtype=mx.float32, size=S, Dv=D):
    return (draw(B, H, L, D, dtype=dtype, seed=1), draw(B, Hkv, size, D, dtype=dtype, seed=2),
            draw(B, Hkv, size, Dv, dtype=dtype, seed=3))


def masks(B, L, dtype):
    """None, causal, and arrays in which every query sees some key."""
    sees = mx.arange(S)[None] * (mx.arange(L)[:, None] + 1) % 3 != 1
    rows = mx.arange(S)[None, None, None] >= mx.arange(B)[:, None, None, None]
    added = mx.where(sees, draw(L, S, seed=4), -float("inf"))
    return {"none": None, "causal": "causal", "bool [L, S]": sees, "bool [B, 1, L, S]": sees & rows,
            "bool [B, 1, 1, S]": rows, "added [L, S]": added.astype(dtype),
            "added [B, 1, L, S]": mx.where(rows, added, -1e4).astype(dtype)}


def in_float32(triple):
    packed, scales, biases = triple
    return packed, scales.astype(mx.float32), biases.astype(mx.float32)


def dequantized(triple, like):
    return mx.dequantize(*in_float32(triple), like.group_size, like.bits)


def reference(queries, keys, values, like, mask):
    """mlx-lm's quantised attention in float32; it scales the array it is given."""
    wide = mask.astype(mx.float32) if isinstance(mask, mx.array) and mask.dtype != mx.bool_ else mask
    return base.quantized_scaled_dot_product_attention(queries.astype(mx.float32) + 0, in_float32(keys),
                                                       in_float32(values), SCALE, wide, like.group_size, like.bits)


class AttentionTestCase(unittest.TestCase):
    def assert_same(self, got, want):
        self.assertEqual((got.shape, got.dtype), (want.shape, want.dtype))
        self.assertTrue(mx.array_equal(got, want, equal_nan=True).item())

    def assert_near(self, got, want, tolerance):
        self.assertEqual(got.shape, want.shape)
        error = mx.abs(got.astype(mx.float32) - want.astype(mx.float32)) / (1 + mx.abs(want.astype(mx.float32)))
        self.assertLessEqual(mx.max(error).item(), tolerance)


class DenseTest(AttentionTestCase):
    def same(self, *args, **kwargs):
        self.assert_same(_core.scaled_dot_product_attention(*args, **kwargs),
                         base.scaled_dot_product_attention(*args, **kwargs))

    def test_every_dtype_grouping_length_and_mask(self):
        for dtype, (H, Hkv), L, B in itertools.product(DTYPES, HEADS, LENGTHS, (1, 3)):
            for name, mask in masks(B, L, dtype).items():
                with self.subTest(dtype=dtype, heads=(H, Hkv), L=L, B=B, mask=name):
                    self.same(*problem(B, H, Hkv, L, dtype), None, scale=SCALE, mask=mask)
                    self.same(*problem(B, H, Hkv, L, dtype, Dv=32), cache.KVCache(), SCALE, mask,
                              sinks=draw(H, dtype=dtype))

    def test_a_mask_for_each_head(self):
        for shape in ((8, 3, S), (2, 8, 3, S), (1, 8, 1, S)):
            with self.subTest(shape=shape):
                self.same(*problem(2, 8, 2, 3), None, SCALE, draw(*shape))
                self.same(*problem(2, 8, 1, 3), None, SCALE, draw(*shape) > 0)

    def test_rows_in_which_everything_is_masked(self):
        for mask in (mx.zeros((3, S), mx.bool_), mx.full((3, S), mx.finfo(mx.float32).min),
                     mx.full((3, S), -float("inf"))):
            self.same(*problem(1, 8, 2, 3), None, SCALE, mask)

    def test_dtypes_that_differ(self):
        for of_queries, of_rows in itertools.permutations(DTYPES, 2):
            queries, keys, values = problem(2, 8, 2, 3, of_rows)
            self.same(queries.astype(of_queries), keys, values, None, SCALE, None)
            self.same(queries.astype(of_queries), keys, values.astype(mx.float32), None, SCALE, "causal")
        queries, keys, values = problem(1, 8, 2, 3)
        self.same((queries * 9).astype(mx.int32), keys, values, None, SCALE, mx.ones((3, S), mx.int32))

    def test_nothing_to_attend_to_or_with(self):
        queries, keys, values = problem(2, 8, 2, 3)
        self.same(queries, keys[:, :, :0], values[:, :, :0], None, SCALE, None)
        self.same(queries[:, :, :0], keys, values, None, SCALE, None)

    def test_views(self):
        queries, keys, values = problem(1, 8, 2, 9)
        self.same(queries.swapaxes(1, 2).reshape(1, 9, 8, D).swapaxes(1, 2), keys[:, :, 3:11], values[:, :, 3:11], None,
                  SCALE, "causal")
        self.same(queries[:, :, :1], keys[:, :, ::2], values[:, :, ::2], None, SCALE, None)

    def test_whatever_is_a_number_is_a_scale(self):
        for scale in (1, numpy.float32(0.5), mx.array(0.5), True):
            self.same(*problem(1, 4, 4, 3), None, scale, None)

    def test_what_mlx_refuses_is_refused_the_same_way(self):
        queries, keys, values = problem(2, 8, 2, 3)
        for name, args in {
                "3-d queries": (queries[0], keys, values, None, SCALE, None),
                "heads": (queries[:, :3], keys, values, None, SCALE, None),
                "batch": (queries[:1], keys, values, None, SCALE, None),
                "mask's shape": (queries, keys, values, None, SCALE, mx.zeros((3, S + 1))),
                "mask's dtype": (queries.astype(mx.float16), keys.astype(mx.float16), values.astype(mx.float16), None,
                                 SCALE, mx.zeros((3, S))),
                "mask's name": (queries, keys, values, None, SCALE, "array"),
                "sinks": (queries, keys, values, None, SCALE, None, mx.zeros((3,))),
                "triples": (queries, mx.quantize(keys), mx.quantize(values), None, SCALE, None),
                "numpy": (queries, numpy.array(keys), values, None, SCALE, None),
                "list as mask": (queries, keys, values, None, SCALE, [[True]]),
                "scale": (queries, keys, values, None, "1", None),
        }.items():
            with self.subTest(name):
                raised = []
                for attend in (base.scaled_dot_product_attention, _core.scaled_dot_product_attention):
                    with self.assertRaises((ValueError, TypeError)) as context:
                        mx.eval(attend(*args))
                    raised.append(ValueError if isinstance(context.exception, ValueError) else TypeError)
                self.assertEqual(*raised)


class QuantizedTest(AttentionTestCase):
    def quantized(self, x, like):
        return mx.quantize(x, like.group_size, like.bits)

    def test_every_dtype_grouping_length_mask_and_quantisation(self):
        batches = itertools.cycle((1, 2, 3))
        for bits, group_size, dtype, (H, Hkv), L in itertools.product((4, 8), (32, 64), DTYPES, HEADS, LENGTHS):
            B = next(batches)
            like = Quantized(bits, group_size)
            queries, keys, values = problem(B, H, Hkv, L, dtype)
            keys, values = self.quantized(keys, like), self.quantized(values, like)
            for name, mask in masks(B, L, dtype).items():
                with self.subTest(bits=bits, group_size=group_size, dtype=dtype, heads=(H, Hkv), L=L, B=B, mask=name):
                    got = _core.scaled_dot_product_attention(queries, keys, values, like, SCALE, mask)
                    self.assertEqual(got.dtype, dtype)
                    self.assert_near(got, reference(queries, keys, values, like, mask), TOLERANCE[dtype])
                    self.assert_same(_core.quantized_scaled_dot_product_attention(queries, list(keys), list(values),
                                                                                  SCALE, mask, group_size, bits), got)

    def test_the_recorded_cases_of_the_conformance_data(self):
        folder = conformance_folder()
        arrays = mx.load(str(folder / "quantized_sdpa.safetensors"))
        cases = [case for case in json.loads((folder / "quantized_sdpa.json").read_text())
                 if case["fn"] == "quantized_sdpa"]
        self.assertGreater(len(cases), 20)
        for case in cases:
            with self.subTest(case["name"]):
                args, expect = case["args"], case["expect"]
                queries = arrays[args["queries"]] + 0
                got = _core.quantized_scaled_dot_product_attention(
                    queries, *([arrays[name] for name in args[triple]] for triple in ("q_keys", "q_values")),
                    args["scale"], arrays.get(args["mask"], args["mask"]), args["group_size"], args["bits"])
                self.assert_near(got, arrays[expect["out"]], expect["tol"])
                self.assert_same(queries, arrays[expect.get("queries_after", args["queries"])])

    def test_more_bits_and_group_sizes(self):
        for bits, group_size in itertools.product((2, 3, 5, 6), (32, 64)):
            like = Quantized(bits, group_size)
            queries, keys, values = problem(2, 8, 2, 3)
            keys, values = self.quantized(keys, like), self.quantized(values, like)
            self.assert_near(_core.scaled_dot_product_attention(queries, keys, values, like, SCALE, "causal"),
                             reference(queries, keys, values, like, "causal"), 1e-5)

    def test_sinks_and_values_of_another_size_equal_dense_attention(self):
        like = Quantized(8, 32)
        for (H, Hkv), L, dtype in itertools.product(HEADS, LENGTHS, DTYPES):
            queries, keys, values = problem(2, H, Hkv, L, dtype, Dv=32)
            keys, values = self.quantized(keys, like), self.quantized(values, like)
            for sinks in (None, draw(H, dtype=dtype), 10 * draw(H)):
                for name, mask in masks(2, L, mx.float32).items():
                    with self.subTest(heads=(H, Hkv), L=L, dtype=dtype, sinks=sinks is not None, mask=name):
                        want = mx.fast.scaled_dot_product_attention(
                            queries.astype(mx.float32), dequantized(keys, like), dequantized(values, like), scale=SCALE,
                            mask=mask, sinks=None if sinks is None else sinks.astype(mx.float32))
                        got = _core.scaled_dot_product_attention(queries, keys, values, cache=like, scale=SCALE,
                                                                 mask=mask, sinks=sinks)
                        self.assert_near(got, want, TOLERANCE[dtype])

    def test_masks_of_every_shape_that_mlx_lm_takes(self):
        like = Quantized(8, 64)
        for Hkv, L in itertools.product((1, 2, 8), (1, 3)):
            queries, keys, values = problem(2, 8, Hkv, L)
            keys, values = self.quantized(keys, like), self.quantized(values, like)
            for shape in ((), (S,), (1, S), (L, S), (1, L, S), (8 // Hkv, L, S), (2, 1, L, S), (1, Hkv, L, S),
                          (2, Hkv, 1, S)):
                with self.subTest(Hkv=Hkv, L=L, shape=shape):
                    mask = draw(*shape, seed=7)
                    for given in (mask, mask > -0.5, (4 * mask).astype(mx.int32), mask.astype(mx.float16)):
                        self.assert_near(_core.scaled_dot_product_attention(queries, keys, values, like, SCALE, given),
                                         reference(queries, keys, values, like, given), 1e-5)

    def test_a_mask_for_each_head_which_mlx_lm_refuses(self):
        like = Quantized(8, 64)
        queries, keys, values = problem(2, 8, 2, 3)
        keys, values = self.quantized(keys, like), self.quantized(values, like)
        for mask in (draw(8, 3, S), draw(2, 8, 3, S), draw(1, 8, 1, S) > 0):
            want = mx.fast.scaled_dot_product_attention(queries, dequantized(keys, like), dequantized(values, like),
                                                        scale=SCALE, mask=mask)
            self.assert_near(_core.scaled_dot_product_attention(queries, keys, values, like, SCALE, mask), want, 1e-5)

    def test_rows_in_which_everything_is_masked_are_finite(self):
        like = Quantized(8, 64)
        queries, keys, values = problem(1, 8, 2, 3)
        keys, values = self.quantized(keys, like), self.quantized(values, like)
        mean = mx.mean(dequantized(values, like), axis=2, keepdims=True)
        want = mx.broadcast_to(mx.repeat(mean, 4, axis=1), (1, 8, 3, D))
        for mask in (mx.zeros((3, S), mx.bool_), mx.full((3, S), -float("inf"))):
            self.assert_near(_core.scaled_dot_product_attention(queries, keys, values, like, SCALE, mask), want, 1e-5)

    def test_the_result_has_the_dtype_that_mlx_lm_gives(self):
        like = Quantized(8, 64)
        queries, keys, values = problem(1, 8, 2, 3)
        of_masks = (None, mx.bool_, mx.int32, *DTYPES)
        for of_queries, of_keys, of_values, of_mask in itertools.product((mx.int32, *DTYPES), DTYPES, DTYPES, of_masks):
            with self.subTest(queries=of_queries, keys=of_keys, values=of_values, mask=of_mask):
                given = ((queries * 3).astype(of_queries), self.quantized(keys.astype(of_keys), like),
                         self.quantized(values.astype(of_values), like))
                mask = None if of_mask is None else mx.ones((3, S), of_mask)
                got = _core.scaled_dot_product_attention(*given, like, SCALE, mask)
                theirs = base.quantized_scaled_dot_product_attention(given[0] + 0, *given[1:], SCALE, mask, 64, 8)
                self.assertEqual(got.dtype, theirs.dtype)
                self.assert_near(got, reference(*given, like, mask), TOLERANCE[got.dtype])

    def test_rows_that_all_of_the_batch_share(self):
        like = Quantized(8, 64)
        for Hkv in (2, 8):
            queries, keys, values = problem(3, 8, Hkv, 3)
            keys, values = self.quantized(keys[:1], like), self.quantized(values[:1], like)
            got = _core.scaled_dot_product_attention(queries, keys, values, like, SCALE, "causal")
            self.assert_near(got, reference(queries, keys, values, like, "causal"), 1e-5)
            without_batch = [[part[0] for part in triple] for triple in (keys, values)]
            self.assert_same(_core.scaled_dot_product_attention(queries, *without_batch, like, SCALE, "causal"), got)

    def test_the_arguments_stay_as_they_are(self):
        like = Quantized(8, 64)
        queries, keys, values = problem(1, 8, 2, 3)
        keys, values = self.quantized(keys, like), self.quantized(values, like)
        mask = draw(3, S)
        everything = [queries, mask, *keys, *values]
        before = [numpy.array(x) for x in everything]
        first = _core.scaled_dot_product_attention(queries, keys, values, like, SCALE, mask)
        self.assert_same(_core.scaled_dot_product_attention(queries, keys, values, like, SCALE, mask), first)
        for x, old in zip(everything, before):
            numpy.testing.assert_array_equal(numpy.array(x), old)

    def test_defaults_and_keywords(self):
        queries, keys, values = problem(1, 8, 2, 3)
        keys, values = mx.quantize(keys, 64, 8), mx.quantize(values, 64, 8)
        want = _core.quantized_scaled_dot_product_attention(queries, keys, values, SCALE, None, 64, 8)
        self.assert_same(_core.quantized_scaled_dot_product_attention(queries, keys, values, SCALE, None), want)
        self.assert_same(_core.quantized_scaled_dot_product_attention(
            queries=queries, q_keys=keys, q_values=values, scale=SCALE, mask=None, group_size=64, bits=8), want)
        self.assert_same(_core.scaled_dot_product_attention(
            queries=queries, keys=keys, values=values, cache=Quantized(8, 64), scale=SCALE, mask=None, sinks=None),
                         want)

    def test_mlx_lms_cache_is_read_with_its_own_group_size_and_bits(self):
        for bits, group_size in ((4, 32), (8, 64)):
            quantized = cache.QuantizedKVCache(group_size, bits)
            queries, keys, values = problem(1, 8, 2, 3)
            rows = quantized.update_and_fetch(keys, values)
            got = _core.scaled_dot_product_attention(queries, *rows, cache=quantized, scale=SCALE, mask=None)
            self.assert_near(got, reference(queries, *rows, quantized, None), 1e-5)

    def test_it_can_be_compiled(self):
        like = Quantized(8, 64)
        queries, keys, values = problem(1, 8, 2, 3)
        keys, values = self.quantized(keys, like), self.quantized(values, like)

        def attend(q, k, v):
            return _core.scaled_dot_product_attention(q, k, v, like, SCALE, "causal")

        self.assert_near(mx.compile(attend)(queries, keys, values), attend(queries, keys, values), 1e-6)

    def test_what_does_not_fit_is_a_value_error(self):
        queries, keys, values = problem(2, 8, 2, 3)
        keys, values = mx.quantize(keys, 64, 8), mx.quantize(values, 64, 8)
        attend = _core.quantized_scaled_dot_product_attention
        for name, args in {
                "3-d queries": (queries[0], keys, values, SCALE, None),
                "heads": (queries[:, :3], keys, values, SCALE, None),
                "batch": (mx.tile(queries, (2, 1, 1, 1)), keys, values, SCALE, None),
                "bits": (queries, keys, values, SCALE, None, 64, 4),
                "unknown bits": (queries, keys, values, SCALE, None, 64, 7),
                "group size": (queries, keys, values, SCALE, None, 32, 8),
                "unknown group size": (queries, keys, values, SCALE, None, 0, 8),
                "pairs": (queries, keys[:2], values[:2], SCALE, None),
                "mask": (queries, keys, values, SCALE, mx.zeros((3, S + 1))),
                "mask's heads": (queries, keys, values, SCALE, mx.zeros((5, 3, S))),
                "mask's name": (queries, keys, values, SCALE, "window"),
        }.items():
            with self.subTest(name), self.assertRaises(ValueError):
                attend(*args)
        with self.assertRaises(ValueError):
            _core.scaled_dot_product_attention(queries, keys, values, Quantized(8, 64), SCALE, None, mx.zeros((3,)))
        for args in ((queries, keys[0], values[0], SCALE, None), (queries, keys, None, SCALE, None),
                     (queries, keys, values, SCALE, [[True]]), (numpy.array(queries), keys, values, SCALE, None)):
            with self.assertRaises((TypeError, ValueError)):
                attend(*args)

    def test_nothing_to_attend_to_gives_zeros(self):
        queries, keys, values = problem(2, 8, 2, 3)
        keys, values = ([part[:, :, :0] for part in mx.quantize(x, 64, 8)] for x in (keys, values))
        got = _core.quantized_scaled_dot_product_attention(queries, keys, values, SCALE, None)
        self.assert_same(got, mx.zeros((2, 8, 3, D)))


if __name__ == "__main__":
    unittest.main()
