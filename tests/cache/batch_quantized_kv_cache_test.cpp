#include "reprise/cache/batch_quantized_kv_cache.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/registry.h"
#include "tests/cache/batch_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr RowShape kShape{.key_size = 64, .value_size = 128};
const TokenRows kPrompts = {range(10, 12), range(20, 25), range(30, 33)};

std::string code_of(const std::string& error) { return error.substr(0, error.find(':')); }

// Rows that quantisation rounds.
Rows noise(int seed, int columns, int batch = 1) {
  const auto draw = [&](int size, int which) {
    return mx::random::normal({batch, 2, columns, size}, mx::float32, 0.0f, 1.0f,
                              mx::random::key(static_cast<std::uint64_t>(seed * 2 + which)));
  };
  return {draw(kShape.key_size, 0), draw(kShape.value_size, 1)};
}

void give(AttentionCache& cache, const Rows& rows) { cache.update_and_fetch(rows.keys, rows.values); }

Rows stacked(const std::vector<Rows>& rows) {
  std::vector<mx::array> keys, values;
  for (const Rows& one : rows) {
    keys.push_back(one.keys);
    values.push_back(one.values);
  }
  return {mx::concatenate(keys, 0), mx::concatenate(values, 0)};
}

std::unique_ptr<BatchQuantizedKVCache> merged(const std::vector<QuantizedKVCache>& caches) {
  std::vector<const LayerCache*> pointers;
  for (const QuantizedKVCache& cache : caches) pointers.push_back(&cache);
  return std::unique_ptr<BatchQuantizedKVCache>(
      &dynamic_cast<BatchQuantizedKVCache&>(*merge_caches(pointers).release()));
}

TEST(BatchQuantizedKVCache, X7MergedDecodedAndExtractedRowsAreBitForBitAsAlone) {
  for (const KVQuantization quantization : {KVQuantization{64, 8}, KVQuantization{32, 4}, KVQuantization{64, 3}}) {
    std::vector<QuantizedKVCache> alone(4, QuantizedKVCache(quantization.group_size, quantization.bits));
    for (const auto& [row, length] : {std::pair(0, 7), std::pair(1, 300), std::pair(3, 1)}) {
      give(alone[static_cast<std::size_t>(row)], noise(row, length));
    }
    const auto batch = merged(alone);
    EXPECT_EQ(batch->positions(), (std::vector<int>{7, 300, 0, 1}));
    for (int step = 0; step < 3; ++step) {
      std::vector<Rows> next;
      for (int row = 0; row < 4; ++row) {
        next.push_back(noise(10 + 4 * step + row, 1));
        give(alone[static_cast<std::size_t>(row)], next.back());
      }
      give(*batch, stacked(next));
    }
    batch->filter({3, 2, 1, 0});
    for (int row = 0; row < 4; ++row) {
      const auto extracted = batch->extract(3 - row);
      EXPECT_EQ(extracted->class_name(), "QuantizedKVCache");
      EXPECT_TRUE(identical(extracted->saved_state(), alone[static_cast<std::size_t>(row)].saved_state())) << row;
    }
  }
}

TEST(BatchQuantizedKVCache, X7ARightPaddedPromptLeavesTheRowsOwnBits) {
  BatchQuantizedKVCache batch({0, 0, 0}, 32, 4);
  const std::vector<int> lengths = {2, 5, 3};
  const Rows prompt = noise(1, 5, 3);
  batch.prepare({.lengths = lengths, .right_padding = {3, 0, 2}});
  give(batch, prompt);
  batch.finalize();
  EXPECT_EQ(batch.positions(), lengths);
  for (int row = 0; row < 3; ++row) {
    const int length = lengths[static_cast<std::size_t>(row)];
    const auto cut = [&](const mx::array& x) { return mx::slice(x, {row, 0, 0, 0}, {row + 1, 2, length, x.shape(3)}); };
    QuantizedKVCache alone(32, 4);
    alone.update_and_fetch(cut(prompt.keys), cut(prompt.values));
    EXPECT_TRUE(identical(batch.extract(row)->saved_state(), alone.saved_state())) << row;
  }
}

TEST(BatchQuantizedKVCache, X7PaddingIsZeros) {
  std::vector<QuantizedKVCache> alone(2, QuantizedKVCache(64, 4));
  give(alone[0], noise(1, 2));
  give(alone[1], noise(2, 5));
  const auto batch = merged(alone);
  const DenseKV row = row_of(batch->keys_and_values(), 0);
  const auto padding = [](const mx::array& x) { return mx::slice(x, {0, 0, 0, 0}, {1, 2, 3, x.shape(3)}); };
  EXPECT_FALSE(mx::any(padding(row.keys)).item<bool>());
  EXPECT_FALSE(mx::any(padding(row.values)).item<bool>());
  EXPECT_TRUE(mx::any(row.keys).item<bool>());
}

TEST(BatchQuantizedKVCache, X7MasksTrimFilterAndExtendFollowTheDenseClass) {
  BatchKVCache dense(paddings(kPrompts));
  append_batch(dense, left_padded(kPrompts), kShape);
  const auto made = dense.to_quantized(64, 8);
  auto& batch = dynamic_cast<BatchQuantizedKVCache&>(*made);
  expect_holds(batch, kPrompts);
  expect_mask(batch, 3, 2);
  batch.trim(3);
  expect_holds(batch, {{}, {20, 21}, {}});
  batch.filter({1, 2});
  BatchQuantizedKVCache other({1}, 64, 8);
  append_batch(other, {{kFiller, 1, 2, 3}}, kShape);
  batch.extend(other);
  batch.filter({});
  batch.extend(other);
  append_batch(batch, {{4}}, kShape);
  expect_holds(batch, {{1, 2, 3, 4}});
  expect_holds(dynamic_cast<BatchKVCache&>(*batch.to_dequantized()), {{1, 2, 3, 4}});
}

TEST(BatchQuantizedKVCache, X7AnotherQuantisationIsRefused) {
  std::vector<QuantizedKVCache> caches(2, QuantizedKVCache(64, 8));
  caches[1] = QuantizedKVCache(64, 4);
  EXPECT_EQ(code_of(error_of([&] { merged(caches); })), "invalid_argument");
  BatchQuantizedKVCache batch({0}, 64, 8);
  EXPECT_EQ(code_of(error_of([&] { batch.extend(BatchQuantizedKVCache({0}, 32, 8)); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([&] { batch.extend(BatchKVCache({0})); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([] { BatchQuantizedKVCache({0}, 48, 8); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([] { BatchQuantizedKVCache({0}, 64, 7); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([&] { append_batch(batch, {{1}}, {.key_size = 32}); })), "invalid_argument");
  EXPECT_TRUE(batch.empty());
  EXPECT_EQ(batch.nbytes(), 0u);
}

mx::array random_queries(int seed, int columns) {
  return mx::random::normal({1, 4, columns, kShape.key_size}, mx::float32, 0.0f, 1.0f,
                            mx::random::key(static_cast<std::uint64_t>(seed)));
}

TEST(BatchQuantizedKVCache, X7UnequalRowsAttendAsAlone) {
  std::vector<QuantizedKVCache> alone(3, QuantizedKVCache(64, 4));
  for (const auto& [row, length] : {std::pair(0, 7), std::pair(1, 40), std::pair(2, 1)}) {
    give(alone[static_cast<std::size_t>(row)], noise(row, length));
  }
  const auto batch = merged(alone);
  RopeOptions rope_options;
  rope_options.dims = kShape.key_size;
  const Rope rope(rope_options);
  const auto attend = [&](AttentionCache& cache, const mx::array& queries, const Rows& rows) {
    AttentionOptions options{.rope = &rope, .scale = 0.125f, .mask = cache.make_mask(queries.shape(2))};
    return cache.attend(queries, rows.keys, rows.values, options);
  };
  for (const int columns : {1, 3}) {
    std::vector<Rows> next;
    std::vector<mx::array> queries, wanted;
    for (int row = 0; row < 3; ++row) {
      next.push_back(noise(10 * columns + row, columns));
      queries.push_back(random_queries(10 * columns + row, columns));
      wanted.push_back(attend(alone[static_cast<std::size_t>(row)], queries.back(), next.back()));
    }
    const mx::array got = attend(*batch, mx::concatenate(queries, 0), stacked(next));
    EXPECT_TRUE(mx::allclose(got, mx::concatenate(wanted, 0), 1e-5, 1e-5).item<bool>()) << columns;
  }
}

// Each row's prompt holds one column whose value is the row's own number; its key, asked for, must bring that number
// back, after the batch was right-padded, decoded, filtered and extended.
TEST(BatchQuantizedKVCache, X7ANeedleFromThePromptIsFound) {
  const std::vector<int> lengths = {5, 40, 17}, places = {4, 0, 9};
  const std::vector<float> numbers = {100.0f, 110.0f, 120.0f};
  Rows prompt = noise(1, 40, 3);
  std::vector<mx::array> needles;
  for (int row = 0; row < 3; ++row) {
    const int place = places[static_cast<std::size_t>(row)];
    const mx::Shape start{row, 0, place, 0};
    needles.push_back(mx::slice(prompt.keys, start, {row + 1, 2, place + 1, kShape.key_size}));
    prompt.values =
        mx::slice_update(prompt.values, mx::full({1, 2, 1, kShape.value_size}, numbers[static_cast<std::size_t>(row)]),
                         start, {row + 1, 2, place + 1, kShape.value_size});
  }
  BatchQuantizedKVCache batch({0, 0, 0}, 64, 8);
  batch.prepare({.lengths = lengths, .right_padding = {35, 0, 23}});
  give(batch, prompt);
  batch.finalize();
  for (int step = 0; step < 20; ++step) give(batch, noise(100 + step, 1, 3));
  batch.filter({2, 0, 1});
  BatchQuantizedKVCache other({0}, 64, 8);
  give(other, noise(7, 70));
  batch.extend(other);

  std::vector<mx::array> queries;
  const std::vector<int> order = {2, 0, 1, 1};
  for (const int row : order) queries.push_back(needles[static_cast<std::size_t>(row)]);
  const Rows last = noise(300, 1, 4);
  AttentionOptions options{.scale = 4.0f, .mask = batch.make_mask(1)};
  const mx::array found = batch.attend(mx::concatenate(queries, 0), last.keys, last.values, options);
  for (int row = 0; row < 3; ++row) {
    const mx::array own = mx::slice(found, {row, 0, 0, 0}, {row + 1, 2, 1, kShape.value_size});
    EXPECT_TRUE(
        mx::allclose(own, mx::array(numbers[static_cast<std::size_t>(order[static_cast<std::size_t>(row)])]), 0.0, 0.5)
            .item<bool>())
        << row;
  }
  const mx::array stranger = mx::slice(found, {3, 0, 0, 0}, {4, 2, 1, kShape.value_size});
  EXPECT_TRUE(mx::all(mx::less(stranger, mx::array(50.0f))).item<bool>());
}

TEST(BatchQuantizedKVCache, P7StatesAndTheLegacyPairRestoreAndGoOn) {
  BatchQuantizedKVCache cache(paddings(kPrompts), 64, 4);
  append_batch(cache, left_padded(kPrompts), kShape);
  EXPECT_EQ(cache.state().as_list()->size(), 7u);
  for (const auto& restored :
       {cache_from_state(cache.class_name(), cache.state()), cache_from_state(cache.class_name(), cache.saved_state()),
        cache_from_legacy(cache.class_name(), cache.legacy_state(), cache.legacy_meta())}) {
    auto& batch = dynamic_cast<BatchQuantizedKVCache&>(*restored);
    EXPECT_EQ(batch.group_size(), 64);
    EXPECT_EQ(batch.bits(), 4);
    append_batch(batch, {{12}, {25}, {33}}, kShape);
    expect_holds(batch, {range(10, 13), range(20, 26), range(30, 34)});
  }
  const BatchQuantizedKVCache empty({2, 0}, 32, 5);
  const auto restored = cache_from_state(empty.class_name(), empty.state());
  EXPECT_TRUE(restored->empty());
  EXPECT_EQ(restored->positions(), (std::vector<int>{-2, 0}));

  State::List state = *cache.state().as_list();
  state[6] = State(8);  // triples of 4 bits
  EXPECT_EQ(code_of(error_of([&] { BatchQuantizedKVCache::from_state(state); })), "corrupt_data");
  state[6] = State(7);
  EXPECT_EQ(code_of(error_of([&] { BatchQuantizedKVCache::from_state(state); })), "corrupt_data");
}

}  // namespace
}  // namespace reprise
