#include "reprise/cache/cache_list.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/live_memory.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

std::unique_ptr<LayerCache> kv(int length) {
  auto cache = std::make_unique<KVCache>();
  if (length > 0) append(*cache, range(0, length));
  return cache;
}

std::unique_ptr<LayerCache> arrays(std::vector<float> rows) {
  auto cache = std::make_unique<ArraysCache>(2);
  cache->set(0, mx::array(rows.begin(), {static_cast<int>(rows.size()), 1}));
  return cache;
}

std::vector<int> kv_tokens(CacheList& list, std::size_t child) {
  return tokens_of(list.at<AttentionCache>(child).keys_and_values());
}

std::vector<float> numbers(const LayerCache& cache) {
  mx::array array = mx::contiguous(*dynamic_cast<const ArraysCache&>(cache).get(0));
  array.eval();
  return std::vector<float>(array.data<float>(), array.data<float>() + array.size());
}

// Fails when it is to change, after its neighbours in a list have changed.
class FailingCache final : public ArraysCache {
 public:
  FailingCache() : ArraysCache(1, {0, 0}) {}
  void prepare(const BatchPrompt&) override { fail(); }
  void finalize() override { fail(); }
  void advance(int) override { fail(); }
  void filter(const std::vector<int>&) override { fail(); }
  void extend(const LayerCache&) override { fail(); }
  std::unique_ptr<LayerCache> extract(int) const override { fail(); }
  std::unique_ptr<LayerCache> fork() const override { return std::make_unique<FailingCache>(*this); }

 private:
  [[noreturn]] static void fail() { throw Error(ErrorCode::internal, "[FailingCache] planted"); }
};

// Trims less than it says.
class ShortTrim final : public LayerCache {
 public:
  std::string class_name() const override { return "ShortTrim"; }
  std::optional<int> position() const override { return 9; }
  int length() const override { return 9; }
  int size() const override { return 9; }
  bool empty() const override { return false; }
  std::size_t nbytes() const override { return 0; }
  bool is_trimmable() const override { return true; }
  int max_trim() const override { return 9; }
  int trim(int n) override { return calls_++ == 0 && !forked_ ? n - 1 : n; }
  State state() const override { return {}; }
  State saved_state() const override { return {}; }
  State legacy_state() const override { return {}; }
  Meta legacy_meta() const override { return {}; }
  std::unique_ptr<LayerCache> fork() const override {
    auto copy = std::make_unique<ShortTrim>();
    copy->forked_ = true;
    return copy;
  }

 private:
  int calls_ = 0;
  bool forked_ = false;
};

TEST(CacheList, AnswersForAllItsChildren) {
  CacheList list(arrays({1}), kv(3), kv(5));
  EXPECT_EQ(list.num_children(), 3u);
  EXPECT_EQ(list.class_name(), "CacheList");
  EXPECT_EQ(list.size(), 5);
  EXPECT_EQ(list.length(), 5);
  EXPECT_EQ(list.nbytes(), 4u + 2u * 256u * 2u * 8u * 4u);
  EXPECT_EQ(list.position(), 3);
  EXPECT_EQ(list.positions(), std::vector<int>{3});
  EXPECT_FALSE(list.empty());
  EXPECT_FALSE(list.is_trimmable());
  EXPECT_FALSE(list.keeps_all_rows());
  EXPECT_TRUE(CacheList(kv(1), kv(2)).keeps_all_rows());
  EXPECT_FALSE(CacheList(kv(1), std::make_unique<RotatingKVCache>(8)).keeps_all_rows());
  EXPECT_TRUE(CacheList(kv(0), kv(4)).empty());  // the first child's
  EXPECT_EQ(CacheList(arrays({1})).position(), std::nullopt);
  EXPECT_EQ(list[1].length(), 3);
  EXPECT_EQ(&list.at<KVCache>(2), &list.child(2));
}

TEST(CacheList, OneWithoutChildrenHasNothing) {
  CacheList list;
  EXPECT_TRUE(list.empty());
  EXPECT_EQ(list.size(), 0);
  EXPECT_EQ(list.nbytes(), 0u);
  EXPECT_EQ(list.trim(3), 0);
  EXPECT_EQ(list.max_trim(), 0);
  EXPECT_EQ(list.batch_size(), 1);
  EXPECT_EQ(cache_from_state("CacheList", list.state())->class_name(), "CacheList");
}

TEST(CacheList, Z3ChildrenThatAreNotThereOrOfAnotherClassAreRefused) {
  CacheList list(kv(3), arrays({1}));
  const std::vector<std::function<void()>> calls = {
      [&] { list.child(2); },
      [&] { list.at<KVCache>(1); },
      [&] { list.at<KVCache>(2); },
      [&] { list.replace(2, kv(1)); },
      [&] { list.replace(0, nullptr); },
      [&] { list.trim(-1); },
      [] { CacheList(std::unique_ptr<LayerCache>()); },
  };
  for (std::size_t i = 0; i < calls.size(); ++i)
    EXPECT_EQ(error_of(calls[i]).substr(0, 16), "invalid_argument") << "call " << i;
  EXPECT_EQ(error_of([&] { list.at<KVCache>(1); }),
            "invalid_argument: [CacheList::at] child 1 must be of the class that the model needs, but got ArraysCache");
  list.replace(1, kv(7));
  EXPECT_EQ(list.at<KVCache>(1).length(), 7);
}

TEST(CacheList, L1StateNamesTheClassesAndNests) {
  CacheList list(std::make_unique<CacheList>(kv(3), arrays({1, 2})), kv(4), std::make_unique<CacheList>());
  const State state = list.state();
  EXPECT_EQ(*(*(*state.as_list())[0].as_list())[1].as_string(), "CacheList");
  EXPECT_EQ(*(*(*state.as_list())[1].as_list())[1].as_string(), "KVCache");
  const auto restored = cache_from_state("CacheList", state);
  EXPECT_TRUE(identical(restored->state(), state));
  auto& again = dynamic_cast<CacheList&>(*restored);
  auto& inner = again.at<CacheList>(0);
  append(inner.at<KVCache>(0), {9});
  EXPECT_EQ(kv_tokens(inner, 0), (std::vector<int>{0, 1, 2, 9}));
  EXPECT_EQ(numbers(inner.child(1)), (std::vector<float>{1, 2}));
  // Files hold the rows only.
  const State saved = list.saved_state();
  const State& child = (*(*saved.as_list())[1].as_list())[0];
  EXPECT_EQ((*child.as_list())[0].as_array()->shape(2), 4);
}

TEST(CacheList, L1P6AWrongStateNamesTheChild) {
  const State good = State::List{kv(3)->state(), State("KVCache")};
  const State bad_offset = State::List{KVCache().state(), State("KVCache")};
  const State unknown = State::List{KVCache().state(), State("Nobody")};
  const State half = State::List{KVCache().state()};
  State::List items = *kv(3)->state().as_list();
  items[2] = State(999);
  const State damaged = State::List{State(items), State("KVCache")};
  const State nested = State::List{State(State::List{good, damaged}), State("CacheList")};
  const auto error = [](const State& state) { return error_of([&] { cache_from_state("CacheList", state); }); };
  EXPECT_EQ(error(State::List{good, bad_offset}), "nothing");
  EXPECT_EQ(error(State::List{good, unknown}).substr(0, 58),
            "unsupported: [CacheList::from_state] child 1 (Nobody): [ca");
  EXPECT_EQ(error(State::List{good, half}).substr(0, 12), "corrupt_data");
  EXPECT_EQ(error(State(3)).substr(0, 12), "corrupt_data");
  const std::string deep = error(State::List{good, nested});
  EXPECT_EQ(deep.substr(0, 12), "corrupt_data");
  EXPECT_NE(deep.find("child 1 (CacheList): [CacheList::from_state] child 1 (KVCache): "), std::string::npos) << deep;
}

TEST(CacheList, L1P4P7TheNestedLegacyPairRestoresAndTheFlatOneIsRefused) {
  CacheList list(std::make_unique<CacheList>(kv(3), std::make_unique<RotatingKVCache>(8, 2)), kv(4));
  append(list.at<CacheList>(0).at<RotatingKVCache>(1), range(0, 10));
  const auto restored = cache_from_legacy("CacheList", list.legacy_state(), list.legacy_meta());
  EXPECT_TRUE(identical(restored->saved_state(), list.saved_state()));
  // As a file gives it: texts that are empty are gone.
  const Meta sparse = Meta::List{Meta(Meta::List{Meta("KVCache"), Meta("KVCache")})};
  const State states = State::List{kv(2)->legacy_state(), kv(3)->legacy_state()};
  EXPECT_EQ(cache_from_legacy("CacheList", states, sparse)->length(), 3);

  const std::string flat = error_of([&] { cache_from_legacy("CacheList", states, Meta("")); });
  EXPECT_EQ(flat.substr(0, 11), "unsupported");
  EXPECT_NE(flat.find("lost the class names"), std::string::npos) << flat;
  const Meta one_name = Meta::List{Meta(Meta::List{Meta("KVCache")}), Meta(Meta::List{})};
  EXPECT_EQ(error_of([&] { cache_from_legacy("CacheList", states, one_name); }).substr(0, 12), "corrupt_data");
  const Meta wrong_meta = Meta::List{Meta(Meta::List{Meta("KVCache"), Meta("QuantizedKVCache")})};
  EXPECT_NE(error_of([&] { cache_from_legacy("CacheList", states, wrong_meta); }).find("child 1 (QuantizedKVCache)"),
            std::string::npos);
}

TEST(CacheList, L2AllChildrenAreTrimmedByWhatTheShortestHas) {
  CacheList list(kv(9), kv(2), std::make_unique<CacheList>(kv(7)));
  EXPECT_EQ(list.max_trim(), 2);
  EXPECT_EQ(list.trim(0), 0);
  EXPECT_EQ(list.trim(1), 1);
  EXPECT_EQ(list.trim(5), 1);
  EXPECT_EQ(list.trim(5), 0);
  EXPECT_EQ(kv_tokens(list, 0), range(0, 7));
  EXPECT_EQ(list[1].length(), 0);
  EXPECT_EQ(kv_tokens(list.at<CacheList>(2), 0), range(0, 5));
}

TEST(CacheList, L2Z8OneThatCannotTrimKeepsAllAsTheyAre) {
  auto ring = std::make_unique<RotatingKVCache>(4);
  append(*ring, range(0, 6));
  CacheList wrapped(kv(6), std::move(ring));
  CacheList recurrent(kv(6), arrays({1}));
  for (CacheList* list : {&wrapped, &recurrent}) {
    const State before = list->state();
    EXPECT_FALSE(list->is_trimmable());
    EXPECT_EQ(list->max_trim(), 0);
    for (const int n : {0, 1, 5, 15}) EXPECT_EQ(list->trim(n), 0);
    EXPECT_TRUE(identical(list->state(), before));
  }
}

TEST(CacheList, L2X4AChildThatFailsToTrimUndoesTheOthers) {
  CacheList list(kv(9), std::make_unique<ShortTrim>());
  EXPECT_EQ(error_of([&] { list.trim(2); }).substr(0, 8), "internal");
  EXPECT_EQ(kv_tokens(list, 0), range(0, 9));
}

TEST(CacheList, L3BatchOperationsReachEveryChild) {
  CacheList a(arrays({1}), kv(3), std::make_unique<CacheList>(kv(3), arrays({10})));
  CacheList b(arrays({2}), kv(5), std::make_unique<CacheList>(kv(5), arrays({20})));
  const auto merged = merge_caches({&a, &b});
  auto& batch = dynamic_cast<CacheList&>(*merged);
  EXPECT_EQ(batch.batch_size(), 2);
  EXPECT_EQ(batch[1].class_name(), "BatchKVCache");
  EXPECT_EQ(batch.positions(), (std::vector<int>{3, 5}));

  batch.prepare({.lengths = {1, 2}, .right_padding = {1, 0}});
  auto& inner = batch.at<CacheList>(2);
  EXPECT_EQ(batch.at<ArraysCache>(0).lengths(), (std::vector<int>{1, 2}));
  EXPECT_EQ(inner.at<ArraysCache>(1).lengths(), (std::vector<int>{1, 2}));
  for (BatchKVCache* keys : {&batch.at<BatchKVCache>(1), &inner.at<BatchKVCache>(0)})
    append(*keys, {100, 101}, {.batch = 2});
  batch.advance(2);
  EXPECT_EQ(batch.at<ArraysCache>(0).lengths(), (std::vector<int>{-1, 0}));
  batch.finalize();
  EXPECT_FALSE(inner.at<ArraysCache>(1).lengths());

  const auto more = merge_caches({&b});
  batch.extend(*more);
  EXPECT_EQ(batch.batch_size(), 3);
  batch.filter({2, 0});
  EXPECT_EQ(numbers(batch[0]), (std::vector<float>{2, 1}));
  const auto first = batch.extract(1);
  auto& single = dynamic_cast<CacheList&>(*first);
  EXPECT_EQ(single[1].class_name(), "KVCache");
  EXPECT_EQ(kv_tokens(single, 1), (std::vector<int>{0, 1, 2, 100}));
  EXPECT_EQ(kv_tokens(single.at<CacheList>(2), 0), (std::vector<int>{0, 1, 2, 100}));
  EXPECT_EQ(numbers(single.at<CacheList>(2)[1]), std::vector<float>{10});
}

TEST(CacheList, L3X4AChildThatFailsUndoesTheOthers) {
  const CacheList a(arrays({1}), kv(3)), b(arrays({2}), kv(5));
  CacheList list(merge_caches({&a, &b}), std::make_unique<FailingCache>());
  const auto other = list.fork();
  const State before = list.state();
  const std::vector<std::function<void()>> calls = {
      [&] {
        list.prepare({.lengths = {1, 2}});
      },
      [&] { list.finalize(); },
      [&] { list.advance(1); },
      [&] { list.filter({1}); },
      [&] { list.extend(*other); },
      [&] { list.extract(0); },
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const std::string error = error_of(calls[i]);
    EXPECT_EQ(error.substr(0, 8), "internal") << "call " << i;
    EXPECT_NE(error.find("child 1 (ArraysCache)"), std::string::npos) << error;
    EXPECT_TRUE(identical(list.state(), before)) << "call " << i;
  }
}

TEST(CacheList, L3WhatHasNoBatchOperationsIsRefusedBeforeAnythingChanges) {
  CacheList list(arrays({1, 2}), kv(3));
  const State before = list.state();
  EXPECT_EQ(error_of([&] { list.prepare({.lengths = {1, 2}}); }).substr(0, 11), "unsupported");
  EXPECT_EQ(error_of([&] { list.finalize(); }).substr(0, 11), "unsupported");
  EXPECT_EQ(error_of([&] { list.filter({0}); }).substr(0, 11), "unsupported");
  EXPECT_EQ(error_of([&] { list.extract(0); }).substr(0, 11), "unsupported");
  EXPECT_EQ(error_of([&] { list.extend(list); }).substr(0, 11), "unsupported");
  EXPECT_TRUE(identical(list.state(), before));
  list.advance(3);  // only those that count
  EXPECT_EQ(list.batch_size(), 2);
}

TEST(CacheList, L3MergeAndExtendRefuseOtherChildren) {
  const CacheList one(kv(3)), two(kv(3), kv(3)), other(std::make_unique<RotatingKVCache>(8));
  for (const CacheList* list : {&two, &other})
    EXPECT_EQ(error_of([&] { merge_caches({&one, list}); }).substr(0, 16), "invalid_argument");
  const auto batch = merge_caches({&one, &one});
  const auto other_batch = merge_caches({&two, &two});
  EXPECT_EQ(error_of([&] { batched(*batch)->extend(*other_batch); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { batched(*batch)->extend(KVCache()); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { merge_caches({&one, &one})->fork()->to_quantized(); }).substr(0, 11), "unsupported");
}

TEST(CacheList, ExtraStateIsTheChildrensByTheirPlace) {
  auto inner = std::make_unique<ArraysCache>(1);
  inner->filter({0, 0, 0});
  CacheList list(kv(1), std::make_unique<CacheList>(arrays({1}), std::move(inner)));
  const ExtraState extra = list.extra_state();
  ASSERT_EQ(extra.size(), 1u);
  EXPECT_EQ(extra.begin()->first, "1.1.rows");
  const auto restored = CacheList::from_state(list.state());
  restored->set_extra_state(extra);
  EXPECT_EQ(restored->at<CacheList>(1).at<ArraysCache>(1).batch_size(), 3);
  for (const char* name : {"rows", "1", "7.rows", "x.rows", "1.1.columns", "0.rows", ".rows"}) {
    const auto fresh = CacheList::from_state(list.state());
    EXPECT_EQ(error_of([&] {
                fresh->set_extra_state({{"1.1.rows", std::int64_t{3}}, {name, std::int64_t{3}}});
              }).substr(0, 12),
              "corrupt_data")
        << name;
    EXPECT_TRUE(fresh->extra_state().empty()) << name;
  }
}

TEST(CacheList, X1ForksAreIndependent) {
  CacheList parent(kv(3), std::make_unique<CacheList>(kv(3)));
  const auto fork = parent.fork();
  auto& child = dynamic_cast<CacheList&>(*fork);
  append(child.at<CacheList>(1).at<KVCache>(0), {100});
  append(parent.at<CacheList>(1).at<KVCache>(0), {200, 201});
  parent.replace(0, kv(1));
  EXPECT_EQ(kv_tokens(child, 0), range(0, 3));
  EXPECT_EQ(kv_tokens(child.at<CacheList>(1), 0), (std::vector<int>{0, 1, 2, 100}));
  EXPECT_EQ(kv_tokens(parent.at<CacheList>(1), 0), (std::vector<int>{0, 1, 2, 200, 201}));
}

TEST(CacheList, Z2Z7RowsTakenOutStayAndHoldTheirOwnBytes) {
  const CacheList a(arrays({1}), kv(3)), b(arrays({2}), kv(5));
  auto merged = merge_caches({&a, &b});
  auto& batch = dynamic_cast<CacheList&>(*merged);
  const auto row = batch.extract(0);
  const State before = row->state();
  batch.filter({1});
  append(batch.at<BatchKVCache>(1), {7});
  merged.reset();
  EXPECT_TRUE(identical(row->state(), before));
  EXPECT_EQ(row->nbytes(), 4u + 3u * 2u * 8u * 4u);
}

TEST(CacheList, Z6FiveThousandStepsKeepMemoryFlat) {
  CacheList list(std::make_unique<ArraysCache>(1), std::make_unique<RotatingKVCache>(16), kv(0));
  const Rows one = rows({7});
  mx::eval(one.keys, one.values);
  list.at<ArraysCache>(0).set(0, mx::zeros({1, 256}));
  list.at<KVCache>(2).update_and_fetch(one.keys, one.values);
  const std::size_t limit = active_bytes() + 2'000'000;
  for (int i = 0; i < 5000; ++i) {
    auto& state = list.at<ArraysCache>(0);
    state.set(0, *state.get(0) + 1.0f);
    list.at<KVCache>(2).trim(1);
    for (const std::size_t child : {1u, 2u}) list.at<AttentionCache>(child).update_and_fetch(one.keys, one.values);
    list.advance(1);
    ASSERT_LE(active_bytes(), limit) << "at step " << i;
  }
  EXPECT_EQ(mx::max(*list.at<ArraysCache>(0).get(0)).item<float>(), 5000.0f);
  EXPECT_EQ(list[2].length(), 1);
}

}  // namespace
}  // namespace reprise
