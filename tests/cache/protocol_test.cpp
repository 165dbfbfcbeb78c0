// Every class that files can name answers the whole protocol, alone, in a list of all and as a child: generic code
// never meets a class that it must know.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "mlx/ops.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/cache_masks.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

using CachePtr = std::unique_ptr<LayerCache>;

constexpr int kLength = 5;
constexpr int kBatch = 2;
constexpr RowShape kShape{.key_size = 32, .value_size = 64};

CachePtr filled(std::unique_ptr<AttentionCache> cache) {
  append(*cache, range(0, kLength), kShape);
  return cache;
}

CachePtr recurrent() {
  auto cache = std::make_unique<ArraysCache>(2);
  cache->set(0, mx::ones({1, 3}));
  cache->set(1, mx::ones({1, 2, 2}, mx::float16));
  return cache;
}

CachePtr ring() { return filled(std::make_unique<RotatingKVCache>(16, 2)); }

CachePtr list(std::vector<std::function<CachePtr()>> children) {
  CacheList::Children made;
  for (const auto& child : children) made.push_back(child());
  return std::make_unique<CacheList>(std::move(made));
}

CachePtr growing() { return filled(std::make_unique<KVCache>()); }
CachePtr quantized() { return filled(std::make_unique<QuantizedKVCache>(32, 8)); }
CachePtr quantized_ring() { return ring()->to_quantized(32, 8); }
CachePtr nested() {
  return list({recurrent, growing, [] { return list({ring, recurrent}); }});
}

CachePtr batch_of(const std::function<CachePtr()>& make) {
  std::vector<CachePtr> owned;
  std::vector<const LayerCache*> rows;
  for (int row = 0; row < kBatch; ++row) rows.push_back(owned.emplace_back(make()).get());
  return merge_caches(rows);
}

// One filled cache of every class, all at one position. A new class adds its line.
std::vector<CachePtr> singles() {
  std::vector<CachePtr> all;
  all.push_back(recurrent());
  all.push_back(filled(std::make_unique<ChunkedKVCache>(16)));
  all.push_back(filled(std::make_unique<ConcatenateKVCache>()));
  all.push_back(growing());
  all.push_back(quantized());
  all.push_back(quantized_ring());
  all.push_back(ring());
  all.push_back(nested());
  return all;
}

std::vector<CachePtr> batches() {
  std::vector<CachePtr> all;
  for (const auto& make : {recurrent, growing, quantized, quantized_ring, ring, nested}) all.push_back(batch_of(make));
  all.push_back(batch_of([] { return filled(std::make_unique<ChunkedKVCache>(16)); }));
  return all;
}

std::vector<CachePtr> everything() {
  std::vector<CachePtr> all = singles();
  for (CachePtr& batch : batches()) all.push_back(std::move(batch));
  return all;
}

std::vector<State> states(const PromptCache& cache) {
  std::vector<State> all;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) all.push_back(cache[layer].state());
  return all;
}

void expect_same(const PromptCache& cache, const std::vector<State>& before) {
  ASSERT_EQ(cache.size(), before.size());
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    EXPECT_TRUE(identical(cache[layer].state(), before[layer])) << cache[layer].class_name();
  }
}

bool is_trimmable_by(const LayerCache& cache, int n) { return cache.is_trimmable() && cache.max_trim() >= n; }

// Appends one token to every cache below `cache` that stores keys.
void append_to_all(LayerCache& cache, int batch) {
  if (auto* children = dynamic_cast<CacheList*>(&cache)) {
    for (std::size_t i = 0; i < children->num_children(); ++i) append_to_all(children->child(i), batch);
  } else if (auto* attention = dynamic_cast<AttentionCache*>(&cache)) {
    RowShape shape = kShape;
    shape.batch = batch;
    append(*attention, {50}, shape);
  }
}

TEST(Protocol, Z1TheTableHasEveryClass) {
  std::set<std::string> here;
  for (const CachePtr& cache : everything()) here.insert(cache->class_name());
  for (const std::string& name : known_cache_classes()) {
    // An alias of files: loads as an ArraysCache.
    EXPECT_TRUE(here.contains(name) || name == "MambaCache") << name << " is not in this test's table";
  }
  for (const std::string& name : here) EXPECT_TRUE(is_known_cache_class(name)) << name;
}

TEST(Protocol, Z1EveryClassAnswersWhatEveryLayerCan) {
  for (const CachePtr& cache : everything()) {
    SCOPED_TRACE(cache->class_name());
    EXPECT_FALSE(cache->empty());
    EXPECT_GT(cache->nbytes(), 0u);
    EXPECT_GE(cache->size(), 0);
    const bool is_recurrent = cache->class_name() == "ArraysCache";
    EXPECT_EQ(cache->length(), is_recurrent ? 0 : kLength);
    for (const int position : cache->positions()) EXPECT_EQ(position, kLength);
    EXPECT_EQ(cache->positions().empty(), is_recurrent);
    EXPECT_EQ(cache->max_trim(), cache->is_trimmable() ? kLength : 0);
    EXPECT_EQ(error_of([&] { cache->trim(-1); }).substr(0, 16), "invalid_argument");
    EXPECT_EQ(cache->length(), is_recurrent ? 0 : kLength);
    if (const auto* attention = dynamic_cast<const AttentionCache*>(cache.get())) {
      EXPECT_EQ(error_of([&] { attention->keys_and_values(); }), "nothing");
    }
  }
}

TEST(Protocol, Z1ClassesWithAQuantisedCounterpartSaySo) {
  std::set<std::string> with_counterpart;
  for (const CachePtr& cache : everything()) {
    const bool has_one = cache->has_quantized_counterpart();
    EXPECT_EQ(error_of([&] { cache->to_quantized(32, 8); }).substr(0, 11), has_one ? "nothing" : "unsupported")
        << cache->class_name();
    if (has_one) with_counterpart.insert(cache->class_name());
  }
  EXPECT_EQ(with_counterpart,
            (std::set<std::string>{"BatchKVCache", "BatchRotatingKVCache", "KVCache", "RotatingKVCache"}));
}

TEST(Protocol, Z1Z8TrimTakesTokensAwayFromEveryClassOrNothing) {
  for (const CachePtr& cache : everything()) {
    SCOPED_TRACE(cache->class_name());
    const bool trims = cache->is_trimmable();
    const State before = cache->state();
    EXPECT_EQ(cache->trim(0), 0);
    EXPECT_TRUE(identical(cache->state(), before));
    EXPECT_EQ(cache->trim(2), trims ? 2 : 0);
    EXPECT_EQ(cache->trim(kLength + 9), trims ? kLength - 2 : 0);
    if (trims) {
      EXPECT_EQ(cache->length(), 0);
    } else {
      EXPECT_TRUE(identical(cache->state(), before));
    }
  }
}

TEST(Protocol, Z1EveryClassRestoresFromItsStateAndGoesOn) {
  for (const CachePtr& cache : everything()) {
    SCOPED_TRACE(cache->class_name());
    for (const State& state : {cache->state(), cache->saved_state()}) {
      const auto restored = cache_from_state(cache->class_name(), state);
      restored->set_extra_state(cache->extra_state());
      EXPECT_EQ(restored->class_name(), cache->class_name());
      EXPECT_TRUE(identical(restored->saved_state(), cache->saved_state()));
      const auto fork = cache->fork();
      const int batch = batched(*cache) && cache->positions().size() == kBatch ? kBatch : 1;
      append_to_all(*restored, batch);
      append_to_all(*fork, batch);
      EXPECT_TRUE(identical(restored->saved_state(), fork->saved_state()));
    }
    EXPECT_EQ(error_of([&] { cache->set_extra_state({{"nobody's", std::int64_t{1}}}); }).substr(0, 12), "corrupt_data");
    const auto legacy = cache_from_legacy(cache->class_name(), cache->legacy_state(), cache->legacy_meta());
    EXPECT_TRUE(identical(legacy->legacy_state(), cache->legacy_state()));
  }
}

TEST(Protocol, Z1X1AForkOfEveryClassIsItsOwn) {
  for (const CachePtr& cache : everything()) {
    SCOPED_TRACE(cache->class_name());
    const int batch = cache->positions().size() == kBatch ? kBatch : 1;
    const State before = cache->state();
    const auto fork = cache->fork();
    EXPECT_TRUE(identical(fork->state(), before));
    append_to_all(*fork, batch);
    EXPECT_TRUE(identical(cache->state(), before));
    const State ahead = fork->state();
    cache->trim(3);
    append_to_all(*cache, batch);
    EXPECT_TRUE(identical(fork->state(), ahead));
  }
}

TEST(Protocol, Z1QuantisingGivesTheQuantisedClassOrIsRefused) {
  for (const CachePtr& cache : everything()) {
    SCOPED_TRACE(cache->class_name());
    const State before = cache->state();
    const std::string error = error_of([&] {
      const auto other = cache->to_quantized(32, 8);
      EXPECT_NE(other->class_name().find("Quantized"), std::string::npos);
      EXPECT_EQ(other->positions(), cache->positions());
      EXPECT_EQ(other->to_dequantized()->class_name(), cache->class_name());
    });
    EXPECT_TRUE(error == "nothing" || error.starts_with("unsupported")) << error;
    EXPECT_TRUE(identical(cache->state(), before));
  }
}

TEST(Protocol, Z1M2M3EveryClassHasAMaskOfItsKindOrIsRefused) {
  for (const CachePtr& cache : everything()) {
    SCOPED_TRACE(cache->class_name());
    const bool is_list = cache->class_name() == "CacheList";
    const bool is_recurrent = cache->class_name() == "ArraysCache";
    const std::string attention = error_of([&] { create_attention_mask(3, cache.get(), {.return_array = true}); });
    const std::string ssm = error_of([&] { create_ssm_mask(3, cache.get()); });
    EXPECT_EQ(attention.substr(0, 16), is_recurrent ? "invalid_argument" : "nothing");
    EXPECT_EQ(ssm.substr(0, 16), is_recurrent || is_list ? "nothing" : "invalid_argument");
  }
}

TEST(Protocol, Z1BatchOperationsReachEveryBatchClass) {
  for (const CachePtr& cache : batches()) {
    SCOPED_TRACE(cache->class_name());
    BatchedCache* batch = batched(*cache);
    ASSERT_NE(batch, nullptr);
    EXPECT_EQ(batch->batch_size(), kBatch);
    const auto before = cache->fork();
    batch->prepare({.lengths = {1, 3}, .right_padding = {2, 0}});
    batch->advance(3);
    batch->finalize();
    batch->extend(*before);
    EXPECT_EQ(batch->batch_size(), 2 * kBatch);
    batch->filter({3, 2, 0});
    EXPECT_EQ(batch->batch_size(), 3);
    EXPECT_EQ(error_of([&] { batch->filter({3}); }).substr(0, 16), "invalid_argument");
    EXPECT_EQ(error_of([&] { batch->extract(3); }).substr(0, 16), "invalid_argument");
    EXPECT_EQ(error_of([&] { batch->extend(ConcatenateKVCache()); }).substr(0, 16), "invalid_argument");
    EXPECT_EQ(batch->batch_size(), 3);
    const auto single = batch->extract(0);
    for (const int position : single->positions()) EXPECT_EQ(position, kLength);
    batch->filter({});
    EXPECT_EQ(batch->batch_size(), 0);
    batch->extend(*before);
    EXPECT_EQ(batch->batch_size(), kBatch);
  }
}

TEST(Protocol, Z1MergingGivesABatchOrIsRefused) {
  for (const CachePtr& cache : singles()) {
    SCOPED_TRACE(cache->class_name());
    const std::string error = error_of([&] {
      const auto merged = merge_caches({cache.get(), cache.get()});
      EXPECT_EQ(batched(*merged)->batch_size(), 2);
      const auto single = batched(*merged)->extract(1);
      EXPECT_EQ(single->class_name(), cache->class_name());
      EXPECT_EQ(single->positions(), cache->positions());
    });
    EXPECT_TRUE(error == "nothing" || error.starts_with("unsupported")) << error;
  }
}

TEST(Protocol, Z1PromptCacheFunctionsTakeAListWithOneOfEachClass) {
  for (const bool of_batches : {false, true}) {
    PromptCache cache(of_batches ? batches() : singles());
    cache.eval();
    const std::vector<State> before = states(cache);
    check_prompt_cache(cache);
    check_prompt_cache(cache, kLength);
    EXPECT_EQ(error_of([&] { check_prompt_cache(cache, kLength + 1); }).substr(0, 19), "failed_precondition");
    EXPECT_EQ(cache_length(cache), kLength);
    std::size_t bytes = 0;
    for (std::size_t layer = 0; layer < cache.size(); ++layer) bytes += cache[layer].nbytes();
    EXPECT_EQ(prompt_cache_nbytes(cache), bytes);

    EXPECT_FALSE(can_trim_prompt_cache(cache));  // the recurrent layer
    EXPECT_FALSE(can_trim_prompt_cache(cache, 1));
    EXPECT_EQ(trim_prompt_cache(cache, 1), 0);
    expect_same(cache, before);

    PromptCache fork = fork_prompt_cache(cache);
    for (std::size_t layer = 0; layer < fork.size(); ++layer) append_to_all(fork[layer], of_batches ? kBatch : 1);
    check_prompt_cache(fork, kLength + 1);
    expect_same(cache, before);
  }
}

TEST(Protocol, X4AllTrimmableClassesTrimTogether) {
  for (const bool of_batches : {false, true}) {
    PromptCache cache;
    for (CachePtr& layer : of_batches ? batches() : singles()) {
      if (is_trimmable_by(*layer, 2)) cache.push_back(std::move(layer));
    }
    cache.push_back(of_batches ? batch_of([] { return list({growing, ring}); }) : list({growing, ring}));
    ASSERT_GE(cache.size(), 5u);
    EXPECT_TRUE(can_trim_prompt_cache(cache, kLength));
    EXPECT_FALSE(can_trim_prompt_cache(cache, kLength + 1));
    EXPECT_EQ(trim_prompt_cache(cache, 2), 2);
    check_prompt_cache(cache, kLength - 2);
    EXPECT_EQ(trim_prompt_cache(cache, 99), kLength - 2);
    check_prompt_cache(cache, 0);
  }
}

TEST(Protocol, F7BatchFunctionsTakeAListWithOneOfEachBatchClass) {
  PromptCache cache(batches());
  const PromptCache other = cache.fork();
  extend_prompt_cache(cache, other);
  filter_prompt_cache(cache, {3, 1, 0});
  check_prompt_cache(cache, kLength);
  PromptCache single = extract_prompt_cache(cache, 2);
  check_prompt_cache(single, kLength);
  const PromptCache again = merge_prompt_caches({&single, &single});
  for (std::size_t layer = 0; layer < again.size(); ++layer)
    EXPECT_EQ(again[layer].class_name(), cache[layer].class_name());

  PromptCache alone(singles());
  const std::vector<State> before = states(alone);
  EXPECT_EQ(error_of([&] { filter_prompt_cache(alone, {0}); }).substr(0, 11), "unsupported");
  EXPECT_EQ(error_of([&] { extend_prompt_cache(alone, alone); }).substr(0, 11), "unsupported");
  expect_same(alone, before);
}

TEST(Protocol, Z1FilesHoldAListWithOneOfEachClass) {
  const TemporaryFolder folder;
  for (const bool of_batches : {false, true}) {
    const PromptCache cache(of_batches ? batches() : singles());
    const std::string file = save_prompt_cache(folder.file(of_batches ? "batches" : "singles"), cache);
    const LoadedPromptCache loaded = load_prompt_cache_file(file);
    ASSERT_EQ(loaded.cache.size(), cache.size());
    for (std::size_t layer = 0; layer < cache.size(); ++layer) {
      EXPECT_EQ(loaded.cache[layer].class_name(), cache[layer].class_name());
      EXPECT_TRUE(identical(loaded.cache[layer].saved_state(), cache[layer].saved_state()))
          << cache[layer].class_name();
    }
  }
}

TEST(Protocol, Z4ErrorsCarryTheirKindAndNameTheFunctionAndWhatItGot) {
  KVCache cache;
  append(cache, range(0, 2));
  EXPECT_EQ(error_of([&] { cache.trim(-3); }), "invalid_argument: [KVCache::trim] n must not be negative, but got -3");
  EXPECT_EQ(error_of([] { KVCache().keys_and_values(); }).substr(0, 19), "failed_precondition");
  EXPECT_EQ(error_of([] { ChunkedKVCache(4).to_quantized(); }).substr(0, 11), "unsupported");
  EXPECT_EQ(error_of([] { cache_from_state("NoSuchCache", State()); }).substr(0, 11), "unsupported");
  EXPECT_EQ(error_of([] { cache_from_state("KVCache", State(7)); }).substr(0, 12), "corrupt_data");
  EXPECT_EQ(error_of([] { load_prompt_cache("no_such_file.safetensors"); }).substr(0, 9), "not_found");
}

}  // namespace
}  // namespace reprise
