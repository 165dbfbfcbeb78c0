// Functions over prompt caches whose layers are batches, lists of caches, or both.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "mlx/ops.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

std::unique_ptr<LayerCache> kv(std::vector<int> tokens) {
  auto cache = std::make_unique<KVCache>();
  if (!tokens.empty()) append(*cache, tokens);
  return cache;
}

std::unique_ptr<LayerCache> arrays(float number) {
  auto cache = std::make_unique<ArraysCache>(1);
  cache->set(0, mx::full({1, 1}, number));
  return cache;
}

// One row: a growing layer, a recurrent one, a list of both.
PromptCache row(const std::vector<int>& tokens) {
  const auto number = static_cast<float>(tokens.empty() ? 0 : tokens.back());
  PromptCache cache;
  cache.push_back(kv(tokens));
  cache.push_back(arrays(number));
  cache.push_back(std::make_unique<CacheList>(arrays(number), kv(tokens)));
  return cache;
}

std::vector<State> states(const PromptCache& cache) {
  std::vector<State> all;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) all.push_back(cache[layer].state());
  return all;
}

bool same(const PromptCache& cache, const std::vector<State>& before) {
  if (cache.size() != before.size()) return false;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    if (!identical(cache[layer].state(), before[layer])) return false;
  }
  return true;
}

void expect_row(const PromptCache& batch, int index, const std::vector<int>& tokens) {
  PromptCache single = extract_prompt_cache(batch, index);
  ASSERT_EQ(single.size(), 3u);
  auto& list = single.at<CacheList>(2);
  EXPECT_EQ(tokens_of(single.at<KVCache>(0).keys_and_values()), tokens);
  EXPECT_EQ(tokens_of(list.at<KVCache>(1).keys_and_values()), tokens);
  for (const LayerCache* state : {&single[1], &list[0]})
    EXPECT_EQ(dynamic_cast<const ArraysCache*>(state)->get(0)->item<float>(), static_cast<float>(tokens.back()));
}

TEST(PromptCacheLists, F7MergeExtendFilterAndExtractGoLayerByLayer) {
  const PromptCache a = row({0, 1, 2}), b = row({10, 11, 12, 13, 14}), c = row({20});
  const std::vector<State> before = states(a);
  PromptCache batch = merge_prompt_caches({&a, &b});
  EXPECT_EQ(batch[0].class_name(), "BatchKVCache");
  expect_row(batch, 0, {0, 1, 2});
  expect_row(batch, 1, {10, 11, 12, 13, 14});
  extend_prompt_cache(batch, merge_prompt_caches({&c}));
  expect_row(batch, 2, {20});
  filter_prompt_cache(batch, {2, 0});
  expect_row(batch, 0, {20});
  expect_row(batch, 1, {0, 1, 2});
  extend_prompt_cache(batch, batch);
  expect_row(batch, 3, {0, 1, 2});
  EXPECT_TRUE(same(a, before));
}

TEST(PromptCacheLists, F7AnEmptyListOnEitherSideGivesTheOther) {
  const PromptCache a = row({0, 1, 2}), b = row({10});
  PromptCache batch = merge_prompt_caches({&a, &b});
  const std::vector<State> before = states(batch);
  extend_prompt_cache(batch, PromptCache());
  EXPECT_TRUE(same(batch, before));
  PromptCache none;
  extend_prompt_cache(none, batch);
  EXPECT_TRUE(same(none, before));
  filter_prompt_cache(none, {0});
  EXPECT_TRUE(same(batch, before));
  PromptCache nothing;
  extend_prompt_cache(nothing, PromptCache());
  EXPECT_EQ(nothing.size(), 0u);
  EXPECT_EQ(merge_prompt_caches({&nothing, &nothing}).size(), 0u);
  EXPECT_EQ(extract_prompt_cache(nothing, 0).size(), 0u);
}

TEST(PromptCacheLists, F7OtherLayersThrowAndNothingChanges) {
  const PromptCache a = row({0, 1, 2}), b = row({10});
  PromptCache shorter = make_kv_prompt_cache(2), other = row({5});
  other.replace(1, std::make_unique<KVCache>());
  EXPECT_EQ(error_of([&] {
              merge_prompt_caches({&a, &shorter});
            }),
            "invalid_argument: [merge_prompt_caches] caches must have 3 layers, but got 2");
  EXPECT_EQ(error_of([&] {
              merge_prompt_caches({&a, &other});
            }),
            "invalid_argument: [merge_prompt_caches] layer 1 (ArraysCache) must be of one class, but got KVCache");
  EXPECT_EQ(error_of([&] { merge_prompt_caches({&a, nullptr}); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([] { merge_prompt_caches({}); }).substr(0, 16), "invalid_argument");

  PromptCache batch = merge_prompt_caches({&a, &b});
  const PromptCache two_layers = [&] {
    PromptCache cache;
    cache.push_back(batch[0].fork());
    cache.push_back(batch[1].fork());
    return cache;
  }();
  PromptCache other_child = batch.fork();
  {
    const CacheList arrays_twice(arrays(1), arrays(2));
    other_child.replace(2, merge_caches({&arrays_twice}));
  }
  const std::vector<State> before = states(batch);
  for (const PromptCache* wrong : {&two_layers, static_cast<const PromptCache*>(&other_child)}) {
    EXPECT_EQ(error_of([&] { extend_prompt_cache(batch, *wrong); }).substr(0, 16), "invalid_argument");
    EXPECT_TRUE(same(batch, before));
  }
  for (const int missing : {2, -1}) {
    EXPECT_EQ(error_of([&] { filter_prompt_cache(batch, {0, missing}); }).substr(0, 16), "invalid_argument");
    EXPECT_EQ(error_of([&] { extract_prompt_cache(batch, missing); }).substr(0, 16), "invalid_argument");
    EXPECT_TRUE(same(batch, before));
  }
}

TEST(PromptCacheLists, F7ALayerThatCannotIsRefusedBeforeTheOthersChange) {
  const PromptCache a = row({0, 1, 2}), b = row({10});
  PromptCache batch = merge_prompt_caches({&a, &b});
  batch.replace(2, kv({1, 2}));
  const std::vector<State> before = states(batch);
  for (const auto& call : std::vector<std::function<void()>>{[&] { filter_prompt_cache(batch, {0}); },
                                                             [&] { extend_prompt_cache(batch, batch); },
                                                             [&] { extract_prompt_cache(batch, 0); }}) {
    const std::string error = error_of(call);
    EXPECT_EQ(error.substr(0, 11), "unsupported");
    EXPECT_NE(error.find("layer 2"), std::string::npos) << error;
    EXPECT_TRUE(same(batch, before));
  }
}

TEST(PromptCacheLists, F7ALayerThatFailsHalfwayUndoesTheOthers) {
  const PromptCache a = row({0, 1, 2}), b = row({10});
  PromptCache batch = merge_prompt_caches({&a, &b});
  const PromptCache other_sizes = [&] {
    PromptCache cache = merge_prompt_caches({&a});
    auto list = std::make_unique<CacheList>(arrays(1), std::make_unique<KVCache>());
    append(list->at<KVCache>(1), {1}, {.heads = 1});
    cache.replace(2, merge_caches({list.get()}));
    return cache;
  }();
  const std::vector<State> before = states(batch);
  const std::string error = error_of([&] { extend_prompt_cache(batch, other_sizes); });
  EXPECT_EQ(error.substr(0, 16), "invalid_argument");
  EXPECT_NE(error.find("layer 2 (CacheList): [CacheList::extend] child 1 (BatchKVCache): "), std::string::npos)
      << error;
  EXPECT_TRUE(same(batch, before));
}

using TokenRows = std::vector<std::vector<int>>;  // of each row

// [B, heads, L, 8], a function of token and `part`.
mx::array features(const TokenRows& tokens, int part, int heads) {
  std::vector<float> numbers;
  for (const auto& row : tokens) {
    for (const int token : row) numbers.push_back(static_cast<float>(token + 100 * part));
  }
  const int B = static_cast<int>(tokens.size()), L = static_cast<int>(tokens.front().size());
  const mx::array steps = mx::reshape(mx::arange(1, 1 + 8 * heads, mx::float32), {1, heads, 1, 8});
  return mx::sin(mx::multiply(mx::array(numbers.begin(), {B, 1, L, 1}), steps));
}

// What a layer answers to each token [B, 1, L, 8]: attention, or a leaky sum over the columns that its mask shows.
mx::array answers(LayerCache& layer, const TokenRows& tokens) {
  if (auto* list = dynamic_cast<CacheList*>(&layer)) {
    mx::array sum(0.0f);
    for (std::size_t i = 0; i < list->num_children(); ++i) sum = mx::add(sum, answers(list->child(i), tokens));
    return sum;
  }
  const int L = static_cast<int>(tokens.front().size());
  if (auto* recurrent = dynamic_cast<ArraysCache*>(&layer)) {
    const Mask mask = recurrent->make_mask(L);
    const mx::array x = features(tokens, 0, 1);
    const auto column = [&](const mx::array& of, int t) { return mx::take(of, mx::array({t}, {1}), -2); };
    mx::array state = recurrent->get(0).value_or(mx::zeros_like(column(x, 0)));
    std::vector<mx::array> steps;
    for (int t = 0; t < L; ++t) {
      mx::array next = mx::add(mx::multiply(state, mx::array(0.75f)), column(x, t));
      if (const auto* seen = std::get_if<mx::array>(&mask)) {
        next = mx::where(column(mx::reshape(*seen, {seen->shape(0), 1, L, 1}), t), next, state);
      }
      steps.push_back(state = next);
    }
    recurrent->set(0, state);
    return mx::concatenate(std::move(steps), 2);
  }
  auto& cache = dynamic_cast<AttentionCache&>(layer);
  const AttentionOptions options{.mask = cache.make_mask(L)};
  const mx::array queries = features(tokens, 1, 4), keys = features(tokens, 2, 2), values = features(tokens, 3, 2);
  return mx::sum(cache.attend(queries, keys, values, options), 1, true);
}

// [layers, B, L, 8].
mx::array answers(PromptCache& cache, const TokenRows& tokens) {
  std::vector<mx::array> all;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) all.push_back(answers(cache[layer], tokens));
  return mx::swapaxes(mx::stack(std::move(all), 0), 1, 2);
}

PromptCache mixed() {
  PromptCache cache;
  cache.push_back(std::make_unique<KVCache>());
  cache.push_back(std::make_unique<RotatingKVCache>(8, 2));
  cache.push_back(std::make_unique<ArraysCache>(1));
  cache.push_back(std::make_unique<CacheList>(std::make_unique<ArraysCache>(1), std::make_unique<KVCache>()));
  return cache;
}

TEST(PromptCacheLists, F7RowsOfAPaddedPromptInPiecesAnswerAsAlone) {
  const std::vector<int> histories[] = {range(0, 5), range(10, 22), {30, 31}};
  const std::vector<int> prompts[] = {{40, 41}, range(50, 59), range(60, 65)};
  std::vector<PromptCache> alone;
  for (const auto& history : histories) answers(alone.emplace_back(mixed()), {history});
  PromptCache batch = merge_prompt_caches({&alone[0], &alone[1], &alone[2]});
  EXPECT_EQ(batch[1].class_name(), "BatchRotatingKVCache");
  const auto expect_as_alone = [&](const mx::array& got, int row, const std::vector<int>& tokens) {
    if (tokens.empty()) return;
    const int L = static_cast<int>(tokens.size());
    const auto wanted = answers(alone[static_cast<std::size_t>(row)], {tokens});
    const auto real = mx::take(mx::take(got, mx::array({row}, {1}), 2), mx::arange(0, L, mx::int32), 3);
    EXPECT_TRUE(mx::allclose(real, wanted, 1e-4, 1e-4).item<bool>()) << "row " << row << ", from " << tokens.front();
  };
  prepare_prompt_cache(batch, {.lengths = {2, 9, 5}, .right_padding = {7, 0, 4}});
  for (int begin = 0; begin < 9; begin += 3) {
    TokenRows real, padded;
    for (const auto& prompt : prompts) {
      const int size = static_cast<int>(prompt.size());
      real.emplace_back(prompt.begin() + std::min(begin, size), prompt.begin() + std::min(begin + 3, size));
      padded.push_back(real.back());
      padded.back().resize(3, 99);
    }
    const mx::array got = answers(batch, padded);
    advance_prompt_cache(batch, 3);
    for (int row = 0; row < 3; ++row) expect_as_alone(got, row, real[static_cast<std::size_t>(row)]);
  }
  finalize_prompt_cache(batch);
  check_prompt_cache(batch);
  EXPECT_EQ(batch[0].positions(), (std::vector<int>{7, 21, 7}));
  for (int token = 70; token < 76; ++token) {
    const mx::array got = answers(batch, {{token}, {token + 10}, {token + 20}});
    for (int row = 0; row < 3; ++row) expect_as_alone(got, row, {token + 10 * row});
  }
}

TEST(PromptCacheLists, F7APromptIsPreparedFinalizedAndAdvancedInAllLayersOrInNone) {
  const PromptCache a = row({0, 1, 2}), b = row({10});
  PromptCache batch = merge_prompt_caches({&a, &b});
  const BatchPrompt prompt{.lengths = {2, 4}, .right_padding = {2, 0}};
  PromptCache other_rows = batch.fork();
  other_rows.replace(2, merge_prompt_caches({&a, &b, &b})[2].fork());
  const std::vector<State> before = states(other_rows);
  const std::string error = error_of([&] { prepare_prompt_cache(other_rows, prompt); });
  EXPECT_EQ(error.substr(0, 60), "invalid_argument: [prepare_prompt_cache] layer 2 (CacheList)") << error;
  EXPECT_TRUE(same(other_rows, before));
  for (std::size_t layer = 0; layer < 3; ++layer) EXPECT_FALSE(batched(other_rows[layer])->is_in_padded_prompt());

  prepare_prompt_cache(batch, prompt);
  batch.push_back(kv({1, 2}));
  const std::vector<State> prepared = states(batch);
  for (const auto& call : std::vector<std::function<void()>>{[&] { prepare_prompt_cache(batch, prompt); },
                                                             [&] { finalize_prompt_cache(batch); },
                                                             [&] { advance_prompt_cache(batch, -1); }}) {
    EXPECT_NE(error_of(call), "nothing");
    EXPECT_TRUE(same(batch, prepared));
  }
  advance_prompt_cache(batch, 2);  // passes over a layer without batch operations
  EXPECT_EQ(dynamic_cast<const ArraysCache&>(batch[1]).lengths(), (std::vector<int>{0, 2}));
  EXPECT_EQ(dynamic_cast<const ArraysCache&>(batch.at<CacheList>(2)[0]).lengths(), (std::vector<int>{0, 2}));
  EXPECT_TRUE(identical(batch[3].state(), prepared[3]));
}

TEST(PromptCacheLists, F4F5X4ListsAreTrimmedWithTheOtherLayersOrNothingIs) {
  PromptCache cache;
  cache.push_back(kv(range(0, 9)));
  cache.push_back(std::make_unique<CacheList>(kv(range(0, 9)), kv(range(0, 5))));
  EXPECT_TRUE(can_trim_prompt_cache(cache));
  EXPECT_TRUE(can_trim_prompt_cache(cache, 5));
  EXPECT_FALSE(can_trim_prompt_cache(cache, 6));
  EXPECT_EQ(trim_prompt_cache(cache, 2), 2);
  EXPECT_EQ(trim_prompt_cache(cache, 9), 3);
  EXPECT_EQ(tokens_of(cache.at<KVCache>(0).keys_and_values()), range(0, 4));
  EXPECT_EQ(tokens_of(cache.at<CacheList>(1).at<KVCache>(0).keys_and_values()), range(0, 4));
  EXPECT_EQ(cache.at<CacheList>(1)[1].length(), 0);

  PromptCache mixed = row({0, 1, 2});
  const std::vector<State> before = states(mixed);
  EXPECT_FALSE(can_trim_prompt_cache(mixed));
  EXPECT_FALSE(can_trim_prompt_cache(mixed, 0));
  EXPECT_EQ(trim_prompt_cache(mixed, 1), 0);
  EXPECT_TRUE(same(mixed, before));
}

TEST(PromptCacheLists, F6LengthAndBytesLookIntoLists) {
  PromptCache cache;
  cache.push_back(std::make_unique<CacheList>(arrays(1), kv(range(0, 7))));
  cache.push_back(kv({1}));
  EXPECT_EQ(cache_length(cache), 7);
  EXPECT_EQ(prompt_cache_nbytes(cache), 4u + 2u * 256u * 2u * 8u * 4u);
  auto quantized = std::make_unique<QuantizedKVCache>(32, 8);
  append(*quantized, range(0, 9), {.key_size = 32, .value_size = 32});
  cache.push_back(std::make_unique<CacheList>(std::move(quantized)));
  EXPECT_EQ(cache[2].size(), 0);  // mlx-lm's number
  EXPECT_EQ(cache_length(cache), 9);
}

TEST(PromptCacheLists, X5ListsWithRecurrentLayersPass) {
  check_prompt_cache(row({0, 1, 2}));
  check_prompt_cache(row({0, 1, 2}), 3);
  check_prompt_cache(row({}), 0);
  PromptCache recurrent;
  recurrent.push_back(arrays(1));
  check_prompt_cache(recurrent, 99);
}

TEST(PromptCacheLists, X5AChildOutOfStepIsNamed) {
  PromptCache cache = row({0, 1, 2});
  append(cache.at<CacheList>(2).at<KVCache>(1), {9});
  EXPECT_EQ(error_of([&] { check_prompt_cache(cache); }),
            "failed_precondition: [check_prompt_cache] layer 2 (CacheList), child 1 (KVCache) must be at position 3 as "
            "layer 0 (KVCache), but got 4");
  EXPECT_EQ(error_of([&] {
              check_prompt_cache(row({0, 1}), 3);
            }),
            "failed_precondition: [check_prompt_cache] layer 0 (KVCache) must be at position 3, but got 2");
  PromptCache nested;
  nested.push_back(std::make_unique<CacheList>(kv({1, 2}), std::make_unique<CacheList>(arrays(1), kv({1}))));
  const std::string error = error_of([&] { check_prompt_cache(nested, 2); });
  EXPECT_NE(error.find("layer 0 (CacheList), child 1 (CacheList), child 1 (KVCache) must be at position 2, but got 1"),
            std::string::npos)
      << error;
}

TEST(PromptCacheLists, X5RowsOfBatchesMustAgreeOneByOne) {
  const PromptCache a = row({0, 1, 2}), b = row({10}), c = row({20, 21});
  PromptCache batch = merge_prompt_caches({&a, &b});
  check_prompt_cache(batch);
  const PromptCache other = merge_prompt_caches({&a, &c});
  batch.replace(2, other[2].fork());
  EXPECT_EQ(error_of([&] { check_prompt_cache(batch); }),
            "failed_precondition: [check_prompt_cache] layer 2 (CacheList), child 1 (BatchKVCache) must be at position "
            "(3, 1) as layer 0 (BatchKVCache), but got (3, 2)");
  EXPECT_EQ(error_of([&] {
              check_prompt_cache(merge_prompt_caches({&a, &b}), 3);
            }).substr(0, 19),
            "failed_precondition");
  check_prompt_cache(merge_prompt_caches({&a, &a}), 3);
}

// A cache whose fields contradict each other, as a defect would leave it.
class BrokenCache final : public ArraysCache {
 public:
  BrokenCache() : ArraysCache(1) {}
  std::string class_name() const override { return "KVCache"; }
  State state() const override {
    const auto cache = kv({1, 2});
    State::List items = *cache->state().as_list();
    items[2] = State(300);
    return items;
  }
};

TEST(PromptCacheLists, X5WhatAClassForbidsIsFoundInAChild) {
  PromptCache cache;
  cache.push_back(std::make_unique<CacheList>(kv({1, 2}), std::make_unique<BrokenCache>()));
  const std::string error = error_of([&] { check_prompt_cache(cache); });
  EXPECT_EQ(error.substr(0, 82), "failed_precondition: [check_prompt_cache] layer 0 (CacheList), child 1 (KVCache): ");
  EXPECT_NE(error.find("offset"), std::string::npos) << error;
}

}  // namespace
}  // namespace reprise
