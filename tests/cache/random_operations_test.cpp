// Every attention class and CacheList through long random histories, against plain lists of tokens: update, trim, mask,
// fork, reload, save and load, quantise, merge, extend, filter, extract, padded prompts. More of them:
// random_settings.h.
#include <gtest/gtest.h>

#include <ostream>

#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/random_operations.h"
#include "tests/cache/random_settings.h"

namespace reprise {

namespace cache_test {
void PrintTo(const Family& family, std::ostream* out) { *out << family.name; }
}  // namespace cache_test

namespace {

using namespace cache_test;

std::unique_ptr<LayerCache> mixed_list() {
  std::vector<std::unique_ptr<LayerCache>> children;
  children.push_back(std::make_unique<KVCache>());
  children.push_back(std::make_unique<RotatingKVCache>(12, 2));
  return std::make_unique<CacheList>(std::move(children));
}

const CacheRules kFull{};
constexpr CacheRules ring(int max_size, int keep) { return {CacheKind::ring, max_size, keep, 0}; }
constexpr CacheRules chunked(int chunk_size) { return {CacheKind::chunked, 0, 0, chunk_size}; }

const Family kFamilies[] = {
    {"KVCache", []() -> std::unique_ptr<LayerCache> { return std::make_unique<KVCache>(); }, {kFull}},
    {"QuantizedKVCache",
     []() -> std::unique_ptr<LayerCache> { return std::make_unique<QuantizedKVCache>(32, 4); },
     {kFull}},
    {"ConcatenateKVCache",
     []() -> std::unique_ptr<LayerCache> { return std::make_unique<ConcatenateKVCache>(); },
     {kFull},
     false},
    {"ChunkedKVCache",
     []() -> std::unique_ptr<LayerCache> { return std::make_unique<ChunkedKVCache>(8); },
     {chunked(8)},
     false},
    {"RotatingKVCache",
     []() -> std::unique_ptr<LayerCache> { return std::make_unique<RotatingKVCache>(16); },
     {ring(16, 0)}},
    {"RotatingKVCacheWithSinks",
     []() -> std::unique_ptr<LayerCache> { return std::make_unique<RotatingKVCache>(11, 4); },
     {ring(11, 4)}},
    {"RotatingKVCacheOfOneColumn",
     []() -> std::unique_ptr<LayerCache> { return std::make_unique<RotatingKVCache>(1); },
     {ring(1, 0)}},
    {"RotatingKVCacheOfOneColumnBesidesItsSinks",
     []() -> std::unique_ptr<LayerCache> { return std::make_unique<RotatingKVCache>(5, 4); },
     {ring(5, 4)}},
    {"QuantizedRotatingKVCache",
     []() -> std::unique_ptr<LayerCache> { return std::make_unique<QuantizedRotatingKVCache>(10, 3, 32, 8); },
     {ring(10, 3)}},
    {"CacheList", mixed_list, {kFull, ring(12, 2)}},
};

class RandomOperationsTest : public testing::TestWithParam<Family> {};

TEST_P(RandomOperationsTest, EveryQueryOfEveryHistorySeesWhatTheListsSay) {
  RandomOperations history(GetParam(), random_seed());
  run_random_history(history);
}

INSTANTIATE_TEST_SUITE_P(Classes, RandomOperationsTest, testing::ValuesIn(kFamilies),
                         [](const auto& family) { return std::string(family.param.name); });

}  // namespace
}  // namespace reprise
