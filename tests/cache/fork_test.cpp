// Forks of every class: what they cost, and that no side ever sees what the other one does.
#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/cache/snapshots.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/live_memory.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

// Constant rows come back exactly from every quantisation.
constexpr RowShape kShape{.batch = 1, .heads = 2, .key_size = 32, .value_size = 32};

struct Kind {
  const char* name;
  std::function<std::unique_ptr<AttentionCache>()> make;
};

std::vector<Kind> kinds() {
  return {{"KVCache", [] { return std::make_unique<KVCache>(); }},
          {"QuantizedKVCache", [] { return std::make_unique<QuantizedKVCache>(32, 4); }},
          {"ConcatenateKVCache", [] { return std::make_unique<ConcatenateKVCache>(); }},
          {"ChunkedKVCache", [] { return std::make_unique<ChunkedKVCache>(8); }},
          {"RotatingKVCache", [] { return std::make_unique<RotatingKVCache>(8, 2); }}};
}

std::unique_ptr<AttentionCache> forked(const AttentionCache& cache) {
  return std::unique_ptr<AttentionCache>(&dynamic_cast<AttentionCache&>(*cache.fork().release()));
}

// What attention sees; for a ring in the order in which it lies in memory.
std::vector<int> shown(const AttentionCache& cache) {
  if (const auto* quantized = dynamic_cast<const QuantizedKVCache*>(&cache)) {
    return tokens_of(dynamic_cast<KVCache&>(*quantized->to_dequantized()).keys_and_values());
  }
  return tokens_of(cache.keys_and_values());
}

void write(AttentionCache& cache, const std::vector<int>& tokens, bool evaluate) {
  if (auto* chunked = dynamic_cast<ChunkedKVCache*>(&cache)) chunked->maybe_trim_front();
  append(cache, tokens, kShape);
  if (!evaluate) return;
  std::vector<mx::array> arrays;
  cache.state().collect_arrays(arrays);
  mx::eval(std::move(arrays));
}

// One side's life: chunks, single tokens past a wrap, a trim.
struct Side {
  std::vector<std::vector<int>> updates;
  int trim_before_last = 0;
};

void live(AttentionCache& cache, const Side& side, std::size_t from, std::size_t to, bool evaluate) {
  for (std::size_t i = from; i < to; ++i) {
    if (i + 1 == side.updates.size()) cache.trim(side.trim_before_last);
    write(cache, side.updates[i], evaluate);
  }
}

const Side kParent{{{100}, {101}, {102, 103}, {104}, {105}, {106}, {107}, {108}, {109}, {110}}, 2};
const Side kChild{{{200, 201, 202}, {203}, {204}, {205}, {206}, {207}, {208}, {209}, {210}, {211}}, 1};

TEST(Fork, X1EitherSideMayWriteFirstAndNeitherDisturbsTheOther) {
  for (const Kind& kind : kinds()) {
    for (const int prompt : {1, 5, 8, 13, 255, 256}) {
      for (const bool evaluate : {false, true}) {
        for (const bool parent_first : {false, true}) {
          SCOPED_TRACE(std::string(kind.name) + ", " + std::to_string(prompt) + " tokens");
          // Each life alone, without a fork.
          const auto alone_parent = kind.make(), alone_child = kind.make();
          for (auto* cache : {alone_parent.get(), alone_child.get()}) write(*cache, range(0, prompt), evaluate);
          live(*alone_parent, kParent, 0, 10, evaluate);
          live(*alone_child, kChild, 0, 10, evaluate);

          const auto parent = kind.make();
          write(*parent, range(0, prompt), evaluate);
          const auto child = forked(*parent);
          const std::vector<int> before = shown(*parent);
          AttentionCache& first = parent_first ? *parent : *child;
          AttentionCache& second = parent_first ? *child : *parent;
          live(first, parent_first ? kParent : kChild, 0, 1, evaluate);
          EXPECT_EQ(shown(second), before);
          for (std::size_t i = 0; i < 10; ++i) {
            live(second, parent_first ? kChild : kParent, i, i + 1, evaluate);
            if (i > 0) live(first, parent_first ? kParent : kChild, i, i + 1, evaluate);
          }
          EXPECT_EQ(shown(*parent), shown(*alone_parent));
          EXPECT_EQ(shown(*child), shown(*alone_child));
          EXPECT_EQ(parent->positions(), alone_parent->positions());
          EXPECT_EQ(child->positions(), alone_child->positions());
          EXPECT_TRUE(identical(child->saved_state(), alone_child->saved_state()));
        }
      }
    }
  }
}

TEST(Fork, X1EitherSideMayBeDestroyedFirst) {
  for (const Kind& kind : kinds()) {
    for (const bool parent_goes : {false, true}) {
      SCOPED_TRACE(kind.name);
      const auto alone = kind.make();
      write(*alone, range(0, 12), true);
      live(*alone, kChild, 0, 10, true);

      auto parent = kind.make();
      write(*parent, range(0, 12), true);
      auto child = forked(*parent);
      write(parent_goes ? *parent : *child, {300, 301}, false);
      (parent_goes ? parent : child).reset();
      AttentionCache& left = parent_goes ? *child : *parent;
      live(left, kChild, 0, 10, true);
      EXPECT_EQ(shown(left), shown(*alone));
    }
  }
}

TEST(Fork, X1AForkOfAForkAndOfAnEmptyCacheIsIndependentToo) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const auto empty = kind.make();
    const auto first = forked(*empty);
    write(*first, range(0, 3), true);
    EXPECT_TRUE(empty->empty());
    const auto second = forked(*first), third = forked(*second);
    write(*second, {50}, true);
    write(*third, {60}, true);
    write(*first, {40}, true);
    EXPECT_EQ(shown(*first), (std::vector<int>{0, 1, 2, 40}));
    EXPECT_EQ(shown(*second), (std::vector<int>{0, 1, 2, 50}));
    EXPECT_EQ(shown(*third), (std::vector<int>{0, 1, 2, 60}));
  }
}

TEST(Fork, X3SnapshotsOfAForkLeadBackAndAreIndependent) {
  const auto make = [] {
    PromptCache cache;
    cache.push_back(std::make_unique<KVCache>());
    cache.push_back(std::make_unique<RotatingKVCache>(4));
    cache.push_back(std::make_unique<CacheList>(std::make_unique<KVCache>(), std::make_unique<RotatingKVCache>(6)));
    return cache;
  };
  const auto feed = [](PromptCache& cache, const std::vector<int>& tokens) {
    for (const int token : tokens) {
      for (LayerCache* layer : {&cache[0], &cache[1], &cache.at<CacheList>(2)[0], &cache.at<CacheList>(2)[1]}) {
        append(dynamic_cast<AttentionCache&>(*layer), {token}, kShape);
      }
    }
  };
  PromptCache live = make(), at_nine = make();
  Snapshots snapshots;
  feed(live, range(0, 9));
  feed(at_nine, range(0, 9));
  snapshots.take(live);
  feed(live, range(9, 20));
  snapshots.take(live);
  PromptCache branch = live.fork();
  const std::size_t active = active_bytes();
  Snapshots forked = snapshots.fork();
  EXPECT_EQ(active_bytes(), active);
  EXPECT_EQ(forked.positions(), snapshots.positions());
  EXPECT_EQ(forked.nbytes(), snapshots.nbytes());
  const auto expect_at_nine = [&](PromptCache& cache) {
    for (std::size_t layer = 0; layer < 3; ++layer) {
      EXPECT_TRUE(identical(cache[layer].saved_state(), at_nine[layer].saved_state())) << layer;
    }
  };
  ASSERT_EQ(forked.rewind(branch, 12), 9);
  expect_at_nine(branch);
  feed(branch, range(30, 40));
  forked.clear();
  EXPECT_EQ(snapshots.positions(), (std::vector<int>{9, 20}));
  ASSERT_EQ(snapshots.rewind(live, 12), 9);
  expect_at_nine(live);
}

TEST(Fork, X2NoBytesHoweverLongThePrompt) {
  for (const Kind& kind : kinds()) {
    for (const int tokens : {256, 32'768}) {
      PromptCache cache;
      for (int layer = 0; layer < 3; ++layer) {
        cache.push_back(kind.make());
        const mx::array rows = mx::zeros({1, 1, tokens, 32}, mx::float32);
        cache.at<AttentionCache>(cache.size() - 1).update_and_fetch(rows, rows);
      }
      cache.eval();
      const std::size_t before = active_bytes();
      std::vector<PromptCache> forks;
      for (int i = 0; i < 10; ++i) forks.push_back(cache.fork());
      for (const PromptCache& fork : forks) fork.eval();
      EXPECT_EQ(active_bytes(), before) << kind.name << " of " << tokens << " tokens";
    }
  }
}

// A fork costs its buffers once, at the first write of either side while both live, and nothing once the other is gone.
TEST(Fork, X2TheFirstWriteCopiesWhileBothLiveAndNoneDoesAfterwards) {
  KVCache parent;
  write(parent, range(0, 100), true);
  const auto buffer = [](const KVCache& cache) {
    mx::array keys = std::get<DenseKV>(cache.keys_and_values()).keys;
    keys.eval();
    return static_cast<const void*>(keys.data<char>());
  };
  const void* const own = buffer(parent);
  { const auto child = parent.fork(); }
  write(parent, {100}, true);
  EXPECT_EQ(buffer(parent), own);
  const auto child = parent.fork();
  write(parent, {101}, true);
  EXPECT_NE(buffer(parent), own);
  EXPECT_EQ(buffer(dynamic_cast<const KVCache&>(*child)), own);
  const void* const copied = buffer(parent);
  for (int i = 0; i < 20; ++i) {
    write(parent, {102 + i}, true);
    ASSERT_EQ(buffer(parent), copied);
  }
}

}  // namespace
}  // namespace reprise
