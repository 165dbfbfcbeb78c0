// BatchKVCache as a value: merging, states, forks, refusals.
#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/batch_quantized_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/registry.h"
#include "tests/cache/batch_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

const TokenRows kPrompts = {range(10, 12), range(20, 25), range(30, 33)};

BatchKVCache filled(const TokenRows& tokens) {
  BatchKVCache cache(paddings(tokens));
  append_batch(cache, left_padded(tokens));
  return cache;
}

std::string code_of(const std::string& error) { return error.substr(0, error.find(':')); }

State ints(const std::vector<int>& values) {
  return State(mx::array(values.begin(), mx::Shape{static_cast<mx::ShapeElem>(values.size())}, mx::int32));
}

std::vector<const LayerCache*> pointers(const std::vector<KVCache>& caches) {
  std::vector<const LayerCache*> result;
  for (const KVCache& cache : caches) result.push_back(&cache);
  return result;
}

std::vector<KVCache> singles(const TokenRows& tokens) {
  std::vector<KVCache> caches(tokens.size());
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    if (!tokens[row].empty()) append(caches[row], tokens[row]);
  }
  return caches;
}

TEST(BatchKVCache, B8MergedRowsAreRightJustifiedAndExtractGivesThemBack) {
  const std::vector<TokenRows> all = {
      kPrompts, {range(0, 4), {}, range(4, 6)}, {range(0, 300), range(0, 3)}, {range(0, 7)}};
  for (const TokenRows& tokens : all) {
    const std::vector<KVCache> caches = singles(tokens);
    const auto merged = merge_caches(pointers(caches));
    auto& batch = dynamic_cast<BatchKVCache&>(*merged);
    expect_holds(batch, tokens);
    std::size_t longest = 0;
    for (const auto& row : tokens) longest = std::max(longest, row.size());
    EXPECT_EQ(batch.nbytes(), tokens.size() * longest * 2 * 8 * 4);
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      const auto back = batch.extract(static_cast<int>(row));
      EXPECT_EQ(tokens_of(dynamic_cast<KVCache&>(*back).keys_and_values()), tokens[row]);
      if (tokens[row].empty()) continue;
      EXPECT_TRUE(identical(back->saved_state(), caches[row].saved_state()));
    }
    append_batch(batch, TokenRows(tokens.size(), {77}));
    for (std::size_t row = 0; row < tokens.size(); ++row) EXPECT_EQ(caches[row].length(), tokens[row].size());
  }
}

TEST(BatchKVCache, B8RowsOfNothingMakeAnEmptyBatch) {
  std::vector<KVCache> caches = singles({{}, {1, 2}});
  caches[1].trim(2);
  const auto merged = merge_caches(pointers(caches));
  EXPECT_TRUE(merged->empty());
  EXPECT_EQ(dynamic_cast<BatchKVCache&>(*merged).left_padding(), (std::vector<int>{0, 0}));
}

TEST(BatchKVCache, B8WhatCannotBeMergedIsRefused) {
  const auto append_with = [](const RowShape& shape) {
    std::vector<KVCache> caches = singles({{1}, {}});
    append(caches[1], {1, 2}, shape);
    return caches;
  };
  for (const RowShape& shape : {RowShape{.batch = 2}, RowShape{.heads = 1}, RowShape{.key_size = 6},
                                RowShape{.value_size = 6}, RowShape{.dtype = mx::bfloat16}}) {
    const std::vector<KVCache> caches = append_with(shape);
    EXPECT_EQ(code_of(error_of([&] { merge_caches(pointers(caches)); })), "invalid_argument");
    EXPECT_EQ(caches[1].length(), 2);
  }
  const KVCache one;
  const BatchKVCache batch({0});
  EXPECT_EQ(code_of(error_of([&] { merge_caches({&one, &batch}); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([&] { BatchKVCache::merge_rows({&batch}); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([&] { BatchKVCache::merge_rows({nullptr}); })), "invalid_argument");
}

TEST(BatchKVCache, Z2ArraysHandedOutAreValues) {
  for (const int start : {5, 255, 256}) {
    for (const bool evaluated : {false, true}) {
      BatchKVCache cache({1, 0});
      const Rows given = batch_rows({range(0, start), range(500, 500 + start)});
      const KeysValues first = cache.update_and_fetch(given.keys, given.values);
      const State state = cache.state();
      const mx::array offset = std::get<mx::array>(cache.offset());
      if (evaluated) mx::eval(std::get<DenseKV>(first).keys, std::get<DenseKV>(first).values);
      cache.trim(2);
      for (int i = 0; i < 5; ++i) append_batch(cache, {{900 + i}, {950 + i}});
      cache.filter({1});
      EXPECT_EQ(tokens_of(KeysValues(row_of(first, 0))), range(0, start));
      EXPECT_EQ(tokens_of(KeysValues(row_of(DenseKV{given.keys, given.values}, 1))), range(500, 500 + start));
      EXPECT_TRUE(identical(State(offset), ints({start - 1, start})));
      expect_holds(*BatchKVCache::from_state(state), {range(1, start), range(500, 500 + start)});
    }
  }
}

TEST(BatchKVCache, Z2CachesRestoredFromOneStateAreIndependent) {
  BatchKVCache cache = filled(kPrompts);
  const State state = cache.state();
  const auto a = BatchKVCache::from_state(state), b = BatchKVCache::from_state(state);
  append_batch(*a, {{1}, {2}, {3}});
  append_batch(*b, {{4}, {5}, {6}});
  a->extend(*b);
  expect_holds(cache, kPrompts);
  expect_holds(*b, {{10, 11, 4}, {20, 21, 22, 23, 24, 5}, {30, 31, 32, 6}});
}

TEST(BatchKVCache, Z3Z5MismatchesThrowAndChangeNothing) {
  BatchKVCache cache({0, 0, 0});
  EXPECT_EQ(code_of(error_of([&] { append_batch(cache, {{1}, {2}}); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([&] { append_batch(cache, {{}, {}, {}}); })), "invalid_argument");
  EXPECT_TRUE(cache.empty());
  cache = filled(kPrompts);
  const State before = cache.state();
  for (const RowShape& shape :
       {RowShape{.heads = 1}, RowShape{.key_size = 6}, RowShape{.value_size = 6}, RowShape{.dtype = mx::float16}}) {
    EXPECT_EQ(code_of(error_of([&] { append_batch(cache, {{1}, {2}, {3}}, shape); })), "invalid_argument");
  }
  EXPECT_EQ(code_of(error_of([&] { append_batch(cache, {{1}, {2}}); })), "invalid_argument");
  EXPECT_TRUE(identical(cache.state(), before));
  append_batch(cache, {{}, {}, {}});
  expect_holds(cache, kPrompts);
}

TEST(BatchKVCache, X1ForksAreIndependentInRowsAndPendingPadding) {
  BatchKVCache parent({0, 0});
  parent.prepare({.right_padding = {1, 0}});
  append_batch(parent, {{1, kFiller}, {2, 3}});
  const auto fork = parent.fork();
  auto& child = dynamic_cast<BatchKVCache&>(*fork);
  parent.finalize();
  child.filter({1, 0});
  child.finalize();
  append_batch(child, {{8}, {9}});
  append_batch(parent, {{4}, {5}});
  expect_holds(parent, {{1, 4}, {2, 3, 5}});
  expect_holds(child, {{2, 3, 8}, {1, 9}});
}

TEST(BatchKVCache, P7StatesAndTheLegacyPairRestoreAndGoOn) {
  BatchKVCache cache = filled(kPrompts);
  append_batch(cache, {{1}, {2}, {3}});
  cache.trim(1);
  EXPECT_EQ((*cache.saved_state().as_list())[0].as_array()->shape(2), 5);
  for (const auto& restored :
       {cache_from_state("BatchKVCache", cache.state()), cache_from_state("BatchKVCache", cache.saved_state()),
        cache_from_legacy("BatchKVCache", cache.legacy_state(), cache.legacy_meta())}) {
    auto& batch = dynamic_cast<BatchKVCache&>(*restored);
    batch.finalize();
    expect_holds(batch, kPrompts);
    append_batch(batch, {{12}, {25}, {33}});
    expect_holds(batch, {range(10, 13), range(20, 26), range(30, 34)});
  }
  const BatchKVCache empty({2, 0});
  for (const auto& restored : {cache_from_state("BatchKVCache", empty.state()),
                               cache_from_legacy("BatchKVCache", empty.legacy_state(), empty.legacy_meta())}) {
    EXPECT_TRUE(restored->empty());
    EXPECT_EQ(restored->positions(), (std::vector<int>{-2, 0}));
  }
}

TEST(BatchKVCache, P5PendingPaddingGoesThroughAFile) {
  const TemporaryFolder folder;
  PromptCache cache;
  auto batch = std::make_unique<BatchKVCache>(std::vector<int>{0, 0, 0});
  batch->prepare({.right_padding = paddings(kPrompts)});
  append_batch(*batch, right_padded(kPrompts));
  EXPECT_EQ(batch->extra_state().size(), 1u);
  cache.push_back(std::move(batch));
  const auto fork = cache[0].fork();
  fork->set_extra_state({});
  fork->set_extra_state(cache[0].extra_state());
  dynamic_cast<BatchKVCache&>(*fork).finalize();
  expect_holds(dynamic_cast<BatchKVCache&>(*fork), kPrompts);

  LoadedPromptCache loaded = load_prompt_cache_file(save_prompt_cache((folder.path() / "batch").string(), cache, {}));
  auto& restored = loaded.cache.at<BatchKVCache>(0);
  restored.finalize();
  expect_holds(restored, kPrompts);
}

TEST(BatchKVCache, P2ABatchOfNoRowsGoesThroughAFile) {
  const TemporaryFolder folder;
  PromptCache cache;
  auto batch = std::make_unique<BatchKVCache>(filled(kPrompts));
  batch->filter({});
  cache.push_back(std::move(batch));
  LoadedPromptCache loaded = load_prompt_cache_file(save_prompt_cache((folder.path() / "batch").string(), cache, {}));
  auto& restored = loaded.cache.at<BatchKVCache>(0);
  EXPECT_TRUE(identical(restored.saved_state(), cache[0].saved_state()));
  restored.extend(filled({{1}, {2}}));
  expect_holds(restored, {{1}, {2}});
}

TEST(BatchKVCache, P5ExtraMembersThatDoNotFitAreRefused) {
  BatchKVCache cache = filled(kPrompts);
  const std::vector<ExtraState> wrong = {{{"right_padding", std::vector<int>{1, 2}}},
                                         {{"right_padding", std::vector<int>{1, 2, -1}}},
                                         {{"right_padding", std::int64_t{1}}},
                                         {{"left", std::vector<int>{1, 2, 3}}}};
  for (const ExtraState& extra : wrong) {
    EXPECT_EQ(code_of(error_of([&] { cache.set_extra_state(extra); })), "corrupt_data");
    EXPECT_TRUE(cache.right_padding().empty());
  }
}

TEST(BatchKVCache, StatesThatCannotBeAreRefused) {
  const Rows given = batch_rows({range(0, 5), range(5, 10)});
  const State keys(given.keys), values(given.values);
  const State::List bad[] = {
      {keys, values, ints({4, 3}), ints({0, 1})},
      {keys, values, ints({4, 4}), ints({0, 1}), State(4)},
      {keys, values, ints({4}), ints({0, 1}), State(4)},
      {keys, values, ints({4, 3, 2}), ints({0, 1, 2}), State(4)},
      {keys, values, ints({5, 4}), ints({-1, 0}), State(4)},
      {keys, values, ints({6, 5}), ints({0, 1}), State(6)},
      {keys, values, ints({-1, -2}), ints({0, 1}), State(-1)},
      {keys, State(), ints({4, 3}), ints({0, 1}), State(4)},
      {keys, values, State(4), State(0), State(4)},
      {State(), State(), ints({1, 1}), ints({0, 0}), State(1)},
      {State(), State(), ints({1, 0}), ints({0, 0}), State(0)},
  };
  for (const State::List& state : bad) {
    EXPECT_EQ(code_of(error_of([&] { BatchKVCache::from_state(state); })), "corrupt_data");
  }
  EXPECT_EQ(error_of([&] {
              BatchKVCache::from_state(State::List{keys, values, ints({4, 4}), ints({0, 1}), State(4)});
            }),
            "corrupt_data: [BatchKVCache::from_state] item 2 (offset) of row 1 must be the columns after its padding, "
            "3, but got 4");
  expect_holds(*BatchKVCache::from_state(State::List{keys, values, ints({4, 3}), ints({0, 1}), State(4)}),
               {range(0, 4), range(6, 9)});
}

TEST(BatchKVCache, X7ToQuantizedAndBackKeepsRowsCapacityAndPendingPadding) {
  const RowShape shape{.key_size = 64, .value_size = 32};
  BatchKVCache cache({0, 0, 0});
  cache.prepare({.right_padding = paddings(kPrompts)});
  append_batch(cache, right_padded(kPrompts), shape);
  const auto quantized = cache.to_quantized(32, 8);
  EXPECT_EQ(quantized->class_name(), "BatchQuantizedKVCache");
  const auto dense = quantized->to_dequantized();
  EXPECT_EQ(dense->nbytes(), cache.nbytes());
  for (LayerCache* each : {quantized.get(), dense.get()}) {
    auto& batch = dynamic_cast<internal::BatchGrowingCache&>(*each);
    batch.finalize();
    expect_holds(batch, kPrompts);
  }
  EXPECT_TRUE(BatchKVCache({1}).to_quantized(32, 4)->empty());
  EXPECT_EQ(code_of(error_of([&] { cache.to_quantized(64, 8); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([&] { cache.to_quantized(32, 7); })), "invalid_argument");
}

}  // namespace
}  // namespace reprise
