#include "reprise/cache/quantized_kv_cache.h"

#include <gtest/gtest.h>

#include <optional>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/registry.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/live_memory.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr int kBits[] = {2, 3, 4, 5, 6, 8};
constexpr int kGroupSizes[] = {32, 64, 128};
constexpr RowShape kShape{.batch = 1, .heads = 2, .key_size = 64, .value_size = 32};

Rows noise(int tokens, int key_size, int value_size, mx::Dtype dtype = mx::float32, int seed = 5) {
  const auto draw = [&](int size, int stream) {
    const mx::array key = mx::random::key(static_cast<std::uint64_t>(100 * seed + stream));
    return mx::astype(mx::random::normal({2, 2, tokens, size}, mx::float32, 0.0f, 1.0f, key), dtype);
  };
  return {draw(key_size, 0), draw(value_size, 1)};
}

mx::array column(const mx::array& x, int at) {
  mx::Shape start(4, 0), stop = x.shape();
  start[2] = at;
  stop[2] = at + 1;
  return mx::slice(x, start, stop);
}

const QuantizedKV& quantized(const KeysValues& keys_values) { return std::get<QuantizedKV>(keys_values); }

std::vector<mx::array> arrays(const QuantizedTensor& tensor) { return {tensor.packed, tensor.scales, tensor.biases}; }

// `seen` holds, row by row, exactly what quantising that row alone gives.
void expect_rows_quantized_alone(const QuantizedTensor& seen, const mx::array& dense, int group_size, int bits) {
  ASSERT_EQ(seen.packed.shape(2), dense.shape(2));
  EXPECT_EQ(seen.packed.shape(3), dense.shape(3) * bits / 32);
  EXPECT_EQ(seen.scales.shape(3), dense.shape(3) / group_size);
  for (int at = 0; at < dense.shape(2); ++at) {
    const std::vector<mx::array> alone = mx::quantize(column(dense, at), group_size, bits);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(identical(column(arrays(seen)[i], at), alone[i])) << "array " << i << " of row " << at;
    }
  }
}

// Constant rows, as those of tokens, come back exactly in every number of bits.
KVCache dense_form(const QuantizedKVCache& cache) { return dynamic_cast<KVCache&>(*cache.to_dequantized()); }

void eval(const KeysValues& keys_values) {
  std::vector<mx::array> all = arrays(quantized(keys_values).keys);
  for (const mx::array& array : arrays(quantized(keys_values).values)) all.push_back(array);
  mx::eval(std::move(all));
}

TEST(QuantizedKVCache, Q2EveryRowIsQuantisedAloneForAllBitsGroupsAndHeadSizes) {
  for (const int bits : kBits) {
    for (const int group_size : kGroupSizes) {
      for (const int key_size : {32, 64, 80, 96, 128, 160, 256}) {
        const int value_size = key_size == 128 ? 256 : 128;
        QuantizedKVCache cache(group_size, bits);
        const Rows all = noise(4, key_size, value_size);
        if (key_size % group_size != 0) {
          EXPECT_EQ(error_of([&] { cache.update_and_fetch(all.keys, all.values); }).substr(0, 16), "invalid_argument");
          EXPECT_TRUE(cache.empty());
          continue;
        }
        SCOPED_TRACE(std::to_string(bits) + " bits, groups of " + std::to_string(group_size) + ", D " +
                     std::to_string(key_size));
        // Three at once, then one, so that old rows have lived through an update.
        const auto head = [](const mx::array& x) { return mx::slice(x, {0, 0, 0, 0}, {2, 2, 3, x.shape(3)}); };
        cache.update_and_fetch(head(all.keys), head(all.values));
        const KeysValues seen = cache.update_and_fetch(column(all.keys, 3), column(all.values, 3));
        EXPECT_EQ(quantized(seen).quantization, (KVQuantization{group_size, bits}));
        expect_rows_quantized_alone(quantized(seen).keys, all.keys, group_size, bits);
        expect_rows_quantized_alone(quantized(seen).values, all.values, group_size, bits);
        const std::size_t row =
            static_cast<std::size_t>((key_size + value_size) * bits / 8 + 2 * 4 * (key_size + value_size) / group_size);
        EXPECT_EQ(cache.nbytes(), 2 * 2 * 256 * row);
      }
    }
  }
}

TEST(QuantizedKVCache, Q2ScalesAndBiasesHaveTheInputsDtype) {
  for (const mx::Dtype dtype : {mx::float16, mx::bfloat16, mx::float32}) {
    QuantizedKVCache cache(32, 4);
    const Rows all = noise(3, 64, 32, dtype);
    const KeysValues seen = cache.update_and_fetch(all.keys, all.values);
    EXPECT_EQ(quantized(seen).keys.scales.dtype(), dtype);
    EXPECT_EQ(quantized(seen).values.biases.dtype(), dtype);
    EXPECT_EQ(quantized(seen).keys.packed.dtype(), mx::uint32);
    expect_rows_quantized_alone(quantized(seen).keys, all.keys, 32, 4);
  }
}

TEST(QuantizedKVCache, Q3DefaultsAndNumbersOfAnEmptyOne) {
  const QuantizedKVCache cache;
  EXPECT_EQ(cache.group_size(), 64);
  EXPECT_EQ(cache.bits(), 8);
  EXPECT_EQ(cache.nbytes(), 0u);
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.length(), 0);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(error_of([&] { cache.keys_and_values(); }).substr(0, 19), "failed_precondition");
}

TEST(QuantizedKVCache, Q3WhatCannotBeQuantisedIsRefusedAtTheFirstUpdate) {
  for (const auto& [group_size, bits] :
       std::vector<std::pair<int, int>>{{64, 1}, {64, 7}, {64, 9}, {64, 0}, {16, 4}, {0, 4}, {-32, 4}, {96, 4}}) {
    EXPECT_EQ(error_of([&] { QuantizedKVCache cache(group_size, bits); }).substr(0, 16), "invalid_argument");
  }
  QuantizedKVCache cache(64, 4);
  for (const RowShape& shape : {RowShape{.key_size = 80, .value_size = 64}, {.key_size = 64, .value_size = 96}}) {
    EXPECT_EQ(error_of([&] { append(cache, {1}, shape); }).substr(0, 67),
              "invalid_argument: [QuantizedKVCache::update_and_fetch] the head siz");
    EXPECT_TRUE(cache.empty());
  }
  // MLX would refuse this dtype only at evaluation.
  const RowShape doubles{.key_size = 64, .value_size = 64, .dtype = mx::float64};
  KVCache dense;
  {
    const mx::StreamContext cpu{mx::Device(mx::Device::cpu)};
    EXPECT_EQ(error_of([&] { append(cache, {1}, doubles); }).substr(0, 16), "invalid_argument");
    append(dense, {1}, doubles);
  }
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(error_of([&] { dense.to_quantized(64, 4); }).substr(0, 16), "invalid_argument");
  append(cache, {1}, {.key_size = 64, .value_size = 128});
  EXPECT_EQ(cache.length(), 1);
}

TEST(QuantizedKVCache, Q1GrowsInStepsOf256FromTheRowsItHas) {
  QuantizedKVCache cache(32, 4);
  const std::size_t row = 2 * (96 / 2 + 2 * 4 * 3);  // two heads; 96 values of 4 bits, three groups
  append(cache, range(0, 10), kShape);
  EXPECT_EQ(cache.nbytes(), 256 * row);
  append(cache, range(10, 300), kShape);  // cut to 10, 512 more
  EXPECT_EQ(cache.nbytes(), 522 * row);
  append(cache, range(300, 512), kShape);
  EXPECT_EQ(cache.nbytes(), 522 * row);
  cache.trim(256);
  EXPECT_EQ(cache.nbytes(), 522 * row);
  EXPECT_EQ(tokens_of(dense_form(cache).keys_and_values()), range(0, 256));
  EXPECT_EQ(dense_form(cache).buffer()->width(), 522);
}

TEST(QuantizedKVCache, Q1ToQuantizedKeepsOffsetCapacityAndGoesOnInMidStream) {
  for (const int bits : kBits) {
    KVCache dense;
    const Rows all = noise(7, 64, 128);
    dense.update_and_fetch(all.keys, all.values);
    dense.trim(2);
    const auto made = dense.to_quantized(32, bits);
    auto& cache = dynamic_cast<QuantizedKVCache&>(*made);
    EXPECT_EQ(cache.position(), 5);
    EXPECT_EQ(cache.buffer()->width(), 256);
    EXPECT_EQ(cache.bits(), bits);
    EXPECT_EQ(cache.group_size(), 32);
    const Rows more = noise(2, 64, 128, mx::float32, 6);
    const KeysValues seen = cache.update_and_fetch(more.keys, more.values);
    const auto first_five = mx::slice(all.keys, {0, 0, 0, 0}, {2, 2, 5, 64});
    expect_rows_quantized_alone(quantized(seen).keys, mx::concatenate({first_five, more.keys}, 2), 32, bits);
    EXPECT_EQ(dense.position(), 5);
    EXPECT_TRUE(identical(std::get<DenseKV>(dense.keys_and_values()).keys, first_five));
  }
}

TEST(QuantizedKVCache, K3ToQuantizedOfAnEmptyOneIsEmptyAndItsDefaultIsFourBits) {
  const auto empty = KVCache().to_quantized();
  const auto& cache = dynamic_cast<const QuantizedKVCache&>(*empty);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.group_size(), 64);
  EXPECT_EQ(cache.bits(), 4);
  KVCache dense;
  append(dense, range(0, 3), {.key_size = 80, .value_size = 64});
  EXPECT_EQ(error_of([&] { dense.to_quantized(64, 4); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { dense.to_quantized(32, 7); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { KVCache().to_quantized(64, 7); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(dense.length(), 3);
}

TEST(QuantizedKVCache, Q4ReloadedWithSlackItGoesOnAndTrims) {
  QuantizedKVCache cache(32, 8);
  append(cache, range(0, 9), kShape);
  cache.trim(2);
  const State whole = cache.state(), cut = cache.saved_state();
  EXPECT_EQ(whole.as_list()->at(0).as_list()->at(0).as_array()->shape(2), 256);
  EXPECT_EQ(cut.as_list()->at(0).as_list()->at(0).as_array()->shape(2), 7);
  for (const State& state : {whole, cut}) {
    const auto restored = cache_from_state("QuantizedKVCache", state);
    auto& again = dynamic_cast<QuantizedKVCache&>(*restored);
    EXPECT_EQ(again.length(), 7);
    const KeysValues seen = append(again, {100, 101}, kShape);
    const Rows expected = rows({0, 1, 2, 3, 4, 5, 6, 100, 101}, kShape);
    expect_rows_quantized_alone(quantized(seen).keys, expected.keys, 32, 8);
    expect_rows_quantized_alone(quantized(seen).values, expected.values, 32, 8);
    EXPECT_EQ(again.trim(4), 4);
    append(again, {7}, kShape);
    expect_rows_quantized_alone(quantized(again.keys_and_values()).keys, rows({0, 1, 2, 3, 4, 7}, kShape).keys, 32, 8);
  }
  EXPECT_EQ(cache.length(), 7);
}

TEST(QuantizedKVCache, P7TheLegacyPairRestores) {
  QuantizedKVCache cache(32, 6);
  append(cache, range(0, 5), kShape);
  const auto restored = QuantizedKVCache::from_legacy(cache.legacy_state(), cache.legacy_meta());
  EXPECT_EQ(restored->length(), 5);
  EXPECT_EQ(restored->bits(), 6);
  EXPECT_TRUE(identical(restored->saved_state(), cache.saved_state()));
}

TEST(QuantizedKVCache, Z8TrimForgetsWhatThereIs) {
  for (const auto& [n, trimmed] : std::vector<std::pair<int, int>>{{0, 0}, {1, 1}, {5, 5}, {6, 6}, {15, 6}}) {
    QuantizedKVCache cache(32, 8);
    append(cache, range(0, 6), kShape);
    EXPECT_TRUE(cache.is_trimmable());
    EXPECT_EQ(cache.max_trim(), 6);
    EXPECT_EQ(cache.trim(n), trimmed);
    EXPECT_EQ(cache.length(), 6 - trimmed);
    EXPECT_FALSE(cache.empty());
    std::vector<int> left = range(0, 6 - trimmed);
    left.push_back(70);
    const KeysValues seen = append(cache, {70}, kShape);
    expect_rows_quantized_alone(quantized(seen).keys, rows(left, kShape).keys, 32, 8);
  }
  QuantizedKVCache cache(32, 8);
  append(cache, range(0, 6), kShape);
  const State before = cache.state();
  EXPECT_EQ(error_of([&] { cache.trim(-1); }).substr(0, 16), "invalid_argument");
  EXPECT_TRUE(identical(cache.state(), before));
}

TEST(QuantizedKVCache, Z3CallsThatThrowChangeNothing) {
  QuantizedKVCache cache(32, 4);
  append(cache, range(0, 5), kShape);
  const State before = cache.state();
  for (RowShape shape : {RowShape{.batch = 2},
                         {.heads = 1},
                         {.key_size = 32},
                         {.value_size = 64},
                         {.key_size = 40},
                         {.dtype = mx::float16}}) {
    if (shape.key_size == 4) shape.key_size = kShape.key_size;
    if (shape.value_size == 4) shape.value_size = kShape.value_size;
    EXPECT_EQ(error_of([&] { append(cache, {5}, shape); }).substr(0, 16), "invalid_argument");
    EXPECT_TRUE(identical(cache.state(), before));
  }
  EXPECT_EQ(error_of([&] { cache.to_quantized(); }).substr(0, 11), "unsupported");
  EXPECT_EQ(error_of([&] { cache.make_mask(1, {.window = 0}); }).substr(0, 16), "invalid_argument");
  EXPECT_TRUE(identical(cache.state(), before));
  append(cache, {}, kShape);
  EXPECT_TRUE(identical(cache.state(), before));
  append(cache, {5}, kShape);
  EXPECT_EQ(cache.length(), 6);
}

TEST(QuantizedKVCache, Z2ArraysHandedOutAreValues) {
  for (const bool evaluated : {false, true}) {
    QuantizedKVCache cache(32, 8);
    const Rows given = noise(5, 64, 64);
    const mx::array keys_before = mx::copy(given.keys);
    const KeysValues first = cache.update_and_fetch(given.keys, given.values);
    const State state = cache.state();
    if (evaluated) eval(first);
    cache.trim(2);
    for (int i = 0; i < 5; ++i) {
      const Rows more = noise(1, 64, 64, mx::float32, 50 + i);
      const KeysValues seen = cache.update_and_fetch(more.keys, more.values);
      if (evaluated) eval(seen);
    }
    expect_rows_quantized_alone(quantized(first).keys, given.keys, 32, 8);
    expect_rows_quantized_alone(quantized(first).values, given.values, 32, 8);
    const auto restored = QuantizedKVCache::from_state(state);
    expect_rows_quantized_alone(quantized(restored->keys_and_values()).keys, given.keys, 32, 8);
    EXPECT_TRUE(identical(given.keys, keys_before));
  }
}

TEST(QuantizedKVCache, M4MasksFollowTheStoredRows) {
  QuantizedKVCache cache(32, 8);
  append(cache, range(0, 5), kShape);
  EXPECT_TRUE(std::holds_alternative<NoMask>(cache.make_mask(1)));
  EXPECT_TRUE(std::holds_alternative<Causal>(cache.make_mask(2)));
  EXPECT_EQ(std::get<mx::array>(cache.make_mask(1, {.window = 3})).shape(), (mx::Shape{1, 6}));
}

// Addresses of the six buffers; the views are dropped before the next write.
std::vector<const void*> buffers(const QuantizedKVCache& cache) {
  const KeysValues seen = cache.keys_and_values();
  eval(seen);
  std::vector<const void*> addresses;
  for (const QuantizedTensor* tensor : {&quantized(seen).keys, &quantized(seen).values}) {
    for (const mx::array& array : arrays(*tensor)) addresses.push_back(array.data<char>());
  }
  return addresses;
}

// What the allocator may add to six buffers; the rows of the 5,000 steps are seven times as much.
constexpr std::size_t kRounding = 6 * 16'384;

TEST(QuantizedKVCacheMemory, Z6FiveThousandDecodeStepsKeepAddressesBetweenGrowthsAndMemoryFlat) {
  QuantizedKVCache cache(32, 4);
  append(cache, range(0, 10), kShape);
  const Rows one = rows({7}, kShape);
  mx::eval(one.keys, one.values);
  std::optional<std::size_t> capacity;
  std::vector<const void*> addresses;
  std::size_t overhead_at_first = 0;
  for (int i = 0; i < 5000; ++i) {
    eval(cache.update_and_fetch(one.keys, one.values));
    const std::size_t overhead = active_bytes() - cache.nbytes();
    if (i == 0) overhead_at_first = overhead;
    ASSERT_LE(overhead, overhead_at_first + kRounding) << "at step " << i;
    if (capacity != cache.nbytes()) {
      capacity = cache.nbytes();
      addresses = buffers(cache);
    }
    ASSERT_EQ(buffers(cache), addresses) << "at step " << i;
  }
  EXPECT_EQ(cache.length(), 5010);
}

TEST(QuantizedKVCacheMemory, Z6AModelThatReadsNothingKeepsMemoryFlat) {
  QuantizedKVCache cache(32, 4);
  append(cache, range(0, 10), kShape);
  buffers(cache);
  const std::size_t limit = active_bytes() + 2 * cache.nbytes() + 200'000;
  for (int i = 0; i < 5000; ++i) {
    const Rows one = rows({i % 200}, kShape);
    cache.trim(1);
    cache.update_and_fetch(one.keys, one.values);
    ASSERT_LE(active_bytes(), limit) << "at step " << i;
  }
  EXPECT_EQ(cache.length(), 10);
}

}  // namespace
}  // namespace reprise
