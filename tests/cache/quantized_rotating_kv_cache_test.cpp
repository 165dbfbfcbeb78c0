// QuantizedRotatingKVCache is RotatingKVCache over dequantised rows, bit for bit, and each row is quantised once.
#include "reprise/cache/quantized_rotating_kv_cache.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/live_memory.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr int kGroupSize = 32;
constexpr int kBits = 4;
constexpr int kKeySize = 64;
constexpr int kValueSize = 32;

mx::array random_sequence(int size, std::uint64_t seed) {
  mx::array all = mx::random::normal({1, 2, 80, size}, mx::float32, 0.0f, 1.0f, mx::random::key(seed));
  all.eval();
  return all;
}

// Rows begin … end - 1 of one random sequence of 80.
Rows random_rows(int begin, int end, mx::Dtype dtype = mx::float32) {
  static const mx::array all_keys = random_sequence(kKeySize, 5), all_values = random_sequence(kValueSize, 6);
  const auto part = [&](const mx::array& all) {
    return mx::astype(mx::contiguous(mx::slice(all, {0, 0, begin, 0}, {1, 2, end, all.shape(3)})), dtype);
  };
  return {part(all_keys), part(all_values)};
}

std::vector<mx::array> triple_of(const mx::array& x) { return mx::quantize(x, kGroupSize, kBits); }

mx::array dequantize(const std::vector<mx::array>& triple) {
  return mx::dequantize(triple[0], triple[1], triple[2], kGroupSize, kBits);
}

DenseKV dense(const KeysValues& seen) {
  const auto& quantized = std::get<QuantizedKV>(seen);
  return {dequantize({quantized.keys.packed, quantized.keys.scales, quantized.keys.biases}),
          dequantize({quantized.values.packed, quantized.values.scales, quantized.values.biases})};
}

void expect_equal(const KeysValues& quantized, const KeysValues& reference) {
  const DenseKV got = dense(quantized), want = std::get<DenseKV>(reference);
  ASSERT_TRUE(identical(got.keys, want.keys));
  ASSERT_TRUE(identical(got.values, want.values));
}

void expect_equal(const Mask& got, const Mask& want) {
  ASSERT_EQ(got.index(), want.index());
  if (std::holds_alternative<mx::array>(got)) {
    ASSERT_TRUE(identical(std::get<mx::array>(got), std::get<mx::array>(want)));
  }
}

// The next `count` rows of the sequence into both caches; `reference` gets them dequantised.
void append_both(QuantizedRotatingKVCache& cache, RotatingKVCache& reference, int count) {
  const int at = *cache.position();
  const Rows added = random_rows(at, at + count);
  const KeysValues got = cache.update_and_fetch(added.keys, added.values);
  const KeysValues want =
      reference.update_and_fetch(dequantize(triple_of(added.keys)), dequantize(triple_of(added.values)));
  ASSERT_NO_FATAL_FAILURE(expect_equal(got, want));
}

void expect_same_numbers(const QuantizedRotatingKVCache& cache, const RotatingKVCache& reference) {
  ASSERT_EQ(cache.position(), reference.position());
  ASSERT_EQ(cache.idx(), reference.idx());
  ASSERT_EQ(cache.size(), reference.size());
  ASSERT_EQ(cache.length(), reference.length());
  ASSERT_EQ(cache.is_trimmable(), reference.is_trimmable());
  ASSERT_EQ(cache.max_trim(), reference.max_trim());
  for (const int N : {1, 3, 9}) {
    for (const std::optional<int> window : {std::optional<int>(), {3}, {5}}) {
      ASSERT_NO_FATAL_FAILURE(
          expect_equal(cache.make_mask(N, {.window = window}), reference.make_mask(N, {.window = window})));
    }
  }
}

QuantizedRotatingKVCache filled(const std::vector<int>& lengths) {
  QuantizedRotatingKVCache cache(8, 2, kGroupSize, kBits);
  for (const int length : lengths) {
    const Rows added = random_rows(*cache.position(), *cache.position() + length);
    cache.update_and_fetch(added.keys, added.values);
  }
  return cache;
}

const std::vector<std::vector<int>> kFills = {{},  {1},     {5},     {7, 1},    {8},          {8, 1},
                                              {9}, {20, 1}, {20, 5}, {3, 1, 1}, {20, 1, 1, 2}};

TEST(QuantizedRotatingKVCache, ANewOneIsEmptyAndBadNumbersAreRefused) {
  QuantizedRotatingKVCache cache(8);
  EXPECT_EQ(cache.class_name(), "QuantizedRotatingKVCache");
  EXPECT_EQ(cache.keep(), 0);
  EXPECT_EQ(cache.group_size(), 64);
  EXPECT_EQ(cache.bits(), 8);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.nbytes(), 0u);
  EXPECT_EQ(error_of([&] { cache.keys_and_values(); }).substr(0, 19), "failed_precondition");
  EXPECT_EQ(error_of([] { QuantizedRotatingKVCache(0); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([] { QuantizedRotatingKVCache(4, 4); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([] { QuantizedRotatingKVCache(4, 0, 48); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([] { QuantizedRotatingKVCache(4, 0, 64, 7); }).substr(0, 16), "invalid_argument");
}

TEST(QuantizedRotatingKVCache, X6EqualsTheRingOverDequantisedRowsThroughTwoWraps) {
  for (const int keep : {0, 3}) {
    for (const auto& lengths : {std::vector<int>(30, 1),
                                {5, 1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
                                {20, 1, 1, 1, 7, 1, 12, 1}}) {
      QuantizedRotatingKVCache cache(8, keep, kGroupSize, kBits);
      RotatingKVCache reference(8, keep);
      for (const int length : lengths) {
        ASSERT_NO_FATAL_FAILURE(append_both(cache, reference, length));
        ASSERT_NO_FATAL_FAILURE(expect_same_numbers(cache, reference));
      }
      ASSERT_GE(*cache.position(), 24);
      ASSERT_NO_FATAL_FAILURE(expect_equal(cache.keys_and_values(), reference.keys_and_values()));
    }
  }
}

TEST(QuantizedRotatingKVCache, X6EachRowIsQuantisedOnce) {
  QuantizedRotatingKVCache cache = filled({9, 1, 1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 1});
  const internal::KVColumns columns = *cache.temporal_columns();
  // Kept rows 0 and 1, then the last six of 24.
  std::vector<mx::array> expected;
  const Rows kept = random_rows(0, 2), recent = random_rows(18, 24);
  for (const bool values : {false, true}) {
    const auto first = triple_of(values ? kept.values : kept.keys),
               rest = triple_of(values ? recent.values : recent.keys);
    for (std::size_t i = 0; i < 3; ++i) expected.push_back(mx::concatenate({first[i], rest[i]}, 2));
  }
  ASSERT_EQ(columns.tensors().size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(identical(columns.tensors()[i], expected[i])) << i;
}

TEST(QuantizedRotatingKVCache, Q2EveryWidthAndGroupAndDtype) {
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
      QuantizedRotatingKVCache cache(4, 1, 32, bits);
      for (int i = 0; i < 7; ++i) {
        const Rows one = random_rows(i, i + 1, dtype);
        cache.update_and_fetch(one.keys, one.values);
      }
      const auto seen = std::get<QuantizedKV>(cache.keys_and_values());
      const std::vector<mx::array> want = mx::quantize(random_rows(6, 7, dtype).keys, 32, bits);
      const int at = cache.idx() - 1;
      const auto column = [&](const mx::array& x) { return mx::slice(x, {0, 0, at, 0}, {1, 2, at + 1, x.shape(3)}); };
      EXPECT_TRUE(identical(column(seen.keys.packed), want[0])) << bits;
      EXPECT_TRUE(identical(column(seen.keys.scales), want[1])) << bits;
      EXPECT_TRUE(identical(column(seen.keys.biases), want[2])) << bits;
    }
  }
}

TEST(QuantizedRotatingKVCache, Z8TrimThenAppendEqualsAppend) {
  QuantizedRotatingKVCache cache = filled({3, 1, 1});
  RotatingKVCache reference(8, 2);
  const Rows three = random_rows(0, 3);
  reference.update_and_fetch(dequantize(triple_of(three.keys)), dequantize(triple_of(three.values)));
  EXPECT_EQ(cache.trim(2), 2);
  EXPECT_EQ(cache.position(), 3);
  for (const int length : {1, 2, 1, 9, 1}) {
    ASSERT_NO_FATAL_FAILURE(append_both(cache, reference, length));
    ASSERT_EQ(cache.position(), reference.position());
  }
  const State before = cache.state();
  EXPECT_EQ(cache.trim(1), 0);
  EXPECT_EQ(error_of([&] { cache.trim(-1); }).substr(0, 16), "invalid_argument");
  EXPECT_TRUE(identical(cache.state(), before));
}

TEST(QuantizedRotatingKVCache, R8SavedAndLoadedItGoesOnExactly) {
  const TemporaryFolder folder;
  for (const auto& fill : kFills) {
    QuantizedRotatingKVCache cache = filled(fill);
    std::vector<std::unique_ptr<LayerCache>> restored;
    restored.push_back(cache_from_state("QuantizedRotatingKVCache", cache.state()));
    restored.push_back(cache_from_state("QuantizedRotatingKVCache", cache.saved_state()));
    restored.push_back(cache_from_legacy("QuantizedRotatingKVCache", cache.legacy_state(), cache.legacy_meta()));
    PromptCache list;
    list.push_back(cache.fork());
    restored.push_back(load_prompt_cache(save_prompt_cache(folder.file("ring"), list))[0].fork());
    for (const auto& each : restored) {
      auto& got = dynamic_cast<QuantizedRotatingKVCache&>(*each);
      EXPECT_TRUE(identical(got.saved_state(), cache.saved_state()));
      const auto fork = cache.fork();
      auto& want = dynamic_cast<QuantizedRotatingKVCache&>(*fork);
      for (const int length : {1, 1, 3, 1, 1, 1, 1, 1, 1, 1}) {
        const Rows added = random_rows(*want.position(), *want.position() + length);
        const DenseKV a = dense(got.update_and_fetch(added.keys, added.values));
        const DenseKV b = dense(want.update_and_fetch(added.keys, added.values));
        ASSERT_TRUE(identical(a.keys, b.keys));
        ASSERT_TRUE(identical(a.values, b.values));
        ASSERT_EQ(got.idx(), want.idx());
      }
    }
  }
}

TEST(QuantizedRotatingKVCache, ForksAreIndependent) {
  for (const auto& fill : kFills) {
    if (fill.empty()) continue;
    QuantizedRotatingKVCache parent = filled(fill);
    const State before = parent.saved_state();
    const auto fork = parent.fork();
    auto& child = dynamic_cast<QuantizedRotatingKVCache&>(*fork);
    for (int i = 0; i < 10; ++i) {
      const Rows one = random_rows(60 + i, 61 + i);
      mx::eval(std::get<QuantizedKV>(child.update_and_fetch(one.keys, one.values)).keys.packed);
    }
    ASSERT_TRUE(identical(parent.saved_state(), before));
    const State child_state = child.saved_state();
    const Rows one = random_rows(75, 76);
    parent.update_and_fetch(one.keys, one.values);
    ASSERT_TRUE(identical(child.saved_state(), child_state));
  }
}

TEST(QuantizedRotatingKVCache, RowsInABatchEqualSingleRows) {
  std::vector<std::unique_ptr<LayerCache>> singles;
  std::vector<const LayerCache*> pointers;
  for (const auto& fill : kFills) {
    if (fill.empty()) continue;
    singles.push_back(filled(fill).fork());
    pointers.push_back(singles.back().get());
  }
  const auto batch = merge_caches(pointers);
  EXPECT_EQ(batch->class_name(), "BatchQuantizedRotatingKVCache");
  for (std::size_t row = 0; row < singles.size(); ++row) {
    const auto extracted = batched(*batch)->extract(static_cast<int>(row));
    auto& got = dynamic_cast<QuantizedRotatingKVCache&>(*extracted);
    auto& want = dynamic_cast<QuantizedRotatingKVCache&>(*singles[row]);
    EXPECT_EQ(got.position(), want.position());
    EXPECT_EQ(got.keep(), 2);
    for (int i = 0; i < 8; ++i) {
      const Rows one = random_rows(60 + i, 61 + i);
      got.update_and_fetch(one.keys, one.values);
      want.update_and_fetch(one.keys, one.values);
      const auto a = *got.temporal_columns(), b = *want.temporal_columns();
      for (std::size_t t = 0; t < 6; ++t) ASSERT_TRUE(identical(a.tensors()[t], b.tensors()[t])) << "row " << row;
    }
  }
}

TEST(QuantizedRotatingKVCache, Z3ACallThatThrowsHasChangedNothing) {
  for (const auto& fill : {std::vector<int>{5}, {20, 1}}) {
    QuantizedRotatingKVCache cache = filled(fill);
    const State before = cache.state();
    const Rows good = random_rows(30, 31);
    EXPECT_EQ(error_of([&] { append(cache, {1}, {.key_size = 32, .value_size = 32}); }).substr(0, 16),
              "invalid_argument");
    EXPECT_EQ(error_of([&] { append(cache, {1}, {.key_size = 48, .value_size = 32}); }).substr(0, 16),
              "invalid_argument");
    EXPECT_NE(error_of([&] { cache.update_and_fetch(good.keys, random_rows(30, 32).values); }), "nothing");
    EXPECT_NE(error_of([&] { cache.update_and_fetch(mx::astype(good.keys, mx::float16), good.values); }), "nothing");
    EXPECT_TRUE(identical(cache.state(), before));
  }
  QuantizedRotatingKVCache cache(8);
  EXPECT_EQ(error_of([&] { append(cache, {1}, {.key_size = 32, .value_size = 64}); }).substr(0, 16),
            "invalid_argument");
  EXPECT_TRUE(cache.empty());
}

TEST(QuantizedRotatingKVCache, StatesThatCannotBeAreRefused) {
  const State state = filled({5}).saved_state();
  const auto with = [&](std::size_t item, State value) {
    State::List items = *state.as_list();
    items[item] = std::move(value);
    return State(items);
  };
  EXPECT_EQ(error_of([&] { QuantizedRotatingKVCache::from_state(with(4, 9)); }), "nothing");
  for (const State& bad :
       {with(0, State()), with(2, 6), with(3, 8), with(4, 0), with(5, 4), with(6, 64), with(7, 8), with(7, 7),
        with(6, State()), with(0, *(*state.as_list())[0].as_list()->front().as_array()), State(State::List{})}) {
    EXPECT_EQ(error_of([&] { QuantizedRotatingKVCache::from_state(bad); }).substr(0, 12), "corrupt_data");
  }
  const State pair = filled({5}).legacy_state();
  for (const Meta::List& bad : {Meta::List{"2", "8", "5", "5"},
                                {"2", "8", "5", "5", "32", "8"},
                                {"2", "8", "6", "6", "32", "4"},
                                {"2", "8", "5", "5", "32", "x"}}) {
    EXPECT_EQ(error_of([&] { QuantizedRotatingKVCache::from_legacy(pair, Meta(bad)); }).substr(0, 12), "corrupt_data");
  }
}

TEST(QuantizedRotatingKVCache, R6DequantisedItIsARotatingKVCacheInTheSameState) {
  for (const auto& fill : kFills) {
    const QuantizedRotatingKVCache cache = filled(fill);
    const auto plain = cache.to_dequantized();
    auto& ring = dynamic_cast<RotatingKVCache&>(*plain);
    EXPECT_EQ(ring.empty(), cache.empty());
    EXPECT_EQ(ring.keep(), 2);
    EXPECT_EQ(ring.max_size(), 8);
    ASSERT_NO_FATAL_FAILURE(expect_same_numbers(cache, ring));
    if (!cache.empty()) expect_equal(cache.keys_and_values(), ring.keys_and_values());
  }
}

TEST(QuantizedRotatingKVCache, R6X6ARingQuantisedInAnyFillStateGoesOnAsOverDequantisedRows) {
  for (const auto& fill : kFills) {
    RotatingKVCache plain(8, 2), reference(8, 2);
    for (const int length : fill) {
      const Rows added = random_rows(*plain.position(), *plain.position() + length);
      plain.update_and_fetch(added.keys, added.values);
      reference.update_and_fetch(dequantize(triple_of(added.keys)), dequantize(triple_of(added.values)));
    }
    const State before = plain.state();
    const auto quantized = plain.to_quantized(kGroupSize, kBits);
    EXPECT_TRUE(identical(plain.state(), before));
    auto& cache = dynamic_cast<QuantizedRotatingKVCache&>(*quantized);
    EXPECT_EQ(cache.empty(), plain.empty());
    EXPECT_EQ(cache.keep(), 2);
    EXPECT_EQ(cache.max_size(), 8);
    EXPECT_EQ(cache.group_size(), kGroupSize);
    EXPECT_EQ(cache.bits(), kBits);
    for (const int length : {1, 1, 4, 1, 1, 1, 1, 1, 1, 1, 1, 12, 1}) {
      ASSERT_NO_FATAL_FAILURE(expect_same_numbers(cache, reference));
      ASSERT_NO_FATAL_FAILURE(append_both(cache, reference, length));
    }
  }
  EXPECT_EQ(error_of([] { RotatingKVCache(8).to_quantized(48, 4); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([] { RotatingKVCache(8).to_quantized(32, 7); }).substr(0, 16), "invalid_argument");
  RotatingKVCache narrow(8);
  append(narrow, {1}, {.key_size = 48});
  EXPECT_EQ(error_of([&] { narrow.to_quantized(32, 4); }).substr(0, 16), "invalid_argument");
}

TEST(QuantizedRotatingKVCache, Z6FiveThousandDecodeStepsKeepAddressesAndMemory) {
  QuantizedRotatingKVCache cache(300, 4, kGroupSize, kBits);
  const Rows one = random_rows(0, 1);
  mx::eval(one.keys, one.values);
  const auto packed_keys = [&] {
    auto packed = std::get<QuantizedKV>(cache.keys_and_values()).keys.packed;
    packed.eval();
    return static_cast<const void*>(packed.data<char>());
  };
  const void* buffer = nullptr;
  std::size_t held = 0;
  for (int i = 0; i < 5000; ++i) {
    {
      const auto seen = std::get<QuantizedKV>(cache.update_and_fetch(one.keys, one.values));
      mx::eval(seen.keys.packed, seen.keys.scales, seen.keys.biases, seen.values.packed, seen.values.scales,
               seen.values.biases);
    }
    if (i < 300) continue;
    if (i == 300) buffer = packed_keys(), held = active_bytes();
    ASSERT_EQ(packed_keys(), buffer) << "at step " << i;
    ASSERT_LE(active_bytes(), held + 4096) << "at step " << i;
  }
  EXPECT_EQ(cache.position(), 5000);
  EXPECT_EQ(cache.nbytes(), 300u * 2u * (kKeySize + kValueSize) * kBits / 8 + 300u * 2u * 3u * 2u * 4u);
}

}  // namespace
}  // namespace reprise
