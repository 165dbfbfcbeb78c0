// 5,000 decode steps of every class that files can name, read at each step or by nobody: bytes beside the buffers and
// the graph behind them stay as they were.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batch_chunked_kv_cache.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/batch_quantized_kv_cache.h"
#include "reprise/cache/batch_quantized_rotating_kv_cache.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/live_memory.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

using CachePtr = std::unique_ptr<LayerCache>;

constexpr int kSteps = 5000;
constexpr int kWindow = 48;

struct Case {
  const char* name;
  std::function<CachePtr()> make;
  int batch = 1;
};

CachePtr mixed_list() {
  CacheList::Children children;
  children.push_back(std::make_unique<ArraysCache>(2));
  children.push_back(std::make_unique<KVCache>());
  children.push_back(std::make_unique<RotatingKVCache>(kWindow, 4));
  return std::make_unique<CacheList>(std::move(children));
}

std::vector<Case> cases() {
  return {
      {"ArraysCache", [] { return std::make_unique<ArraysCache>(2); }},
      {"BatchChunkedKVCache",
       [] {
         return std::make_unique<BatchChunkedKVCache>(kWindow, std::vector{0, 3});
       },
       2},
      {"BatchKVCache",
       [] {
         return std::make_unique<BatchKVCache>(std::vector{0, 3});
       },
       2},
      {"BatchQuantizedKVCache",
       [] {
         return std::make_unique<BatchQuantizedKVCache>(std::vector{0, 3}, 32, 4);
       },
       2},
      {"BatchQuantizedRotatingKVCache",
       [] {
         return std::make_unique<BatchQuantizedRotatingKVCache>(kWindow, std::vector{0, 3}, 4, 32, 4);
       },
       2},
      {"BatchRotatingKVCache",
       [] {
         return std::make_unique<BatchRotatingKVCache>(kWindow, std::vector{0, 3}, 4);
       },
       2},
      {"CacheList", mixed_list},
      {"ChunkedKVCache", [] { return std::make_unique<ChunkedKVCache>(kWindow); }},
      {"ConcatenateKVCache", [] { return std::make_unique<ConcatenateKVCache>(); }},
      {"KVCache", [] { return std::make_unique<KVCache>(); }},
      {"QuantizedKVCache", [] { return std::make_unique<QuantizedKVCache>(32, 4); }},
      {"QuantizedRotatingKVCache", [] { return std::make_unique<QuantizedRotatingKVCache>(kWindow, 4, 32, 4); }},
      {"RotatingKVCache", [] { return std::make_unique<RotatingKVCache>(kWindow, 4); }},
  };
}

// One token into `cache`, its mask and position asked for and not looked at. The new arrays go to `seen`.
void step(LayerCache& cache, int batch, std::vector<mx::array>& seen) {
  if (auto* list = dynamic_cast<CacheList*>(&cache)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) step((*list)[i], batch, seen);
  } else if (auto* arrays = dynamic_cast<ArraysCache*>(&cache)) {
    for (int slot = 0; slot < arrays->num_slots(); ++slot) {
      const auto state = arrays->get(slot);
      arrays->set(slot, mx::add(state.value_or(mx::zeros({batch, 16})), mx::array(1.0f)));
      seen.push_back(*arrays->get(slot));
    }
    arrays->advance(1);
    arrays->make_mask(1);
  } else {
    auto& attention = dynamic_cast<AttentionCache&>(cache);
    if (auto* chunked = dynamic_cast<FrontTrimmedCache*>(&cache)) chunked->maybe_trim_front();
    attention.make_mask(1, {.return_array = true});
    attention.offset();
    const RowShape shape{.batch = batch, .heads = 1, .key_size = 32, .value_size = 32};
    const KeysValues stored = append(attention, {7}, shape);
    if (const auto* dense = std::get_if<DenseKV>(&stored)) {
      seen.insert(seen.end(), {dense->keys, dense->values});
    } else {
      const auto& [keys, values, quantization] = std::get<QuantizedKV>(stored);
      seen.insert(seen.end(), {keys.packed, keys.scales, keys.biases, values.packed, values.scales, values.biases});
    }
  }
}

// Arrays that would be computed if `roots` were evaluated.
std::size_t graph_size(const std::vector<mx::array>& roots) {
  std::unordered_set<std::uintptr_t> visited;
  std::vector<mx::array> stack = roots;
  while (!stack.empty()) {
    const mx::array array = stack.back();
    stack.pop_back();
    if (array.status() != mx::array::Status::unscheduled || !visited.insert(array.id()).second) continue;
    for (const mx::array& input : array.inputs()) stack.push_back(input);
  }
  return visited.size();
}

std::size_t bytes_beside(const LayerCache& cache) { return active_bytes() - cache.nbytes(); }

TEST(EveryClass, Z6IsHere) {
  std::set<std::string> here;
  for (const Case& each : cases()) here.insert(each.name);
  for (const std::string& name : known_cache_classes()) {
    EXPECT_TRUE(here.contains(name) || name == "MambaCache") << name << " is not among the cases";
  }
}

TEST(EveryClass, Z6FiveThousandStepsThatAreReadKeepMemoryFlat) {
  for (const Case& each : cases()) {
    SCOPED_TRACE(each.name);
    const CachePtr cache = each.make();
    std::size_t limit = 0;
    for (int i = 0; i < kSteps; ++i) {
      {
        std::vector<mx::array> seen;
        step(*cache, each.batch, seen);
        mx::eval(std::move(seen));
      }
      // Some slack for the allocator, which rounds; a row that stayed at each step would be 600 KB and more.
      if (i == 100) limit = bytes_beside(*cache) + 64 * 1024;
      if (i > 100) {
        ASSERT_LE(bytes_beside(*cache), limit) << "at step " << i;
      }
    }
  }
}

TEST(EveryClass, Z6FiveThousandStepsThatNobodyReadsKeepTheGraphSmall) {
  for (const Case& each : cases()) {
    SCOPED_TRACE(each.name);
    const CachePtr cache = each.make();
    // 64 updates of few operations each, per tensor of a class with several.
    constexpr std::size_t kMost = 12'000;
    for (int i = 0; i < kSteps; ++i) {
      std::vector<mx::array> seen;
      step(*cache, each.batch, seen);
      if (i % 50 != 49) continue;
      std::vector<mx::array> held;
      cache->state().collect_arrays(held);
      ASSERT_LE(graph_size(held), kMost) << "at step " << i;
    }
  }
}

}  // namespace
}  // namespace reprise
