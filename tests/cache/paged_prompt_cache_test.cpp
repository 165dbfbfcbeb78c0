// From mlx-lm's classes to pages and back: the same rows, and the same attention from then on.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/paged_kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/nn/rope.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/paged_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;
using kernels::PagedVisibility;

constexpr int kHeads = 4, kKvHeads = 2, kSize = 64;

struct Kind {
  std::string name;
  std::function<std::unique_ptr<AttentionCache>()> make;
  PagedVisibility visibility = {};
  std::optional<KVQuantization> quantization = {};
};

std::vector<Kind> kinds() {
  const KVQuantization bits{32, 8};
  return {{"KVCache", [] { return std::make_unique<KVCache>(); }},
          {"QuantizedKVCache", [] { return std::make_unique<QuantizedKVCache>(32, 8); }, {}, bits},
          {"RotatingKVCache", [] { return std::make_unique<RotatingKVCache>(70); }, {.window = 70}},
          {"QuantizedRotatingKVCache",
           [] { return std::make_unique<QuantizedRotatingKVCache>(70, 0, 32, 8); },
           {.window = 70},
           bits},
          {"ChunkedKVCache", [] { return std::make_unique<ChunkedKVCache>(70); }, {.chunk = 70}}};
}

struct Both {
  std::unique_ptr<AttentionCache> plain;
  PagedKVCache paged;
  std::uint64_t seed = 0;

  // The same tokens to both. Returns: whether attention agrees.
  bool step(int width) {
    static const Rope rope(RopeOptions{.dims = kSize});
    const auto draw = [&](int features) { return random_numbers({1, width, features}, seed++); };
    const Projections rows{draw(kHeads * kSize), draw(kKvHeads * kSize), draw(kKvHeads * kSize), kHeads, kKvHeads};
    const auto attend = [&](AttentionCache& cache) {
      // Attention in chunks, as models ask for it.
      if (auto* chunked = dynamic_cast<FrontTrimmedCache*>(&cache)) chunked->maybe_trim_front();
      const int chunk = paged.visibility().chunk;
      const Mask mask = chunk > 0 ? cache.make_chunk_mask(width, chunk) : cache.make_mask(width);
      return cache.attend_projections(rows, {.rope = &rope, .scale = 0.2f, .mask = mask});
    };
    return mx::allclose(attend(paged), attend(*plain), 1e-5, 1e-5).item<bool>();
  }
};

Both make_both(const Kind& kind) {
  return {kind.make(), PagedKVCache(PagePool::make(), kind.visibility, kind.quantization)};
}

TEST(PagedPromptCache, AttentionIsThatOfThePlainClass) {
  for (const Kind& kind : kinds()) {
    for (const auto& widths :
         {std::vector<int>{200, 1, 1}, {1, 1, 1, 60, 1, 1, 30, 1}, {69, 1, 1, 1, 70, 1}, {5, 5, 64, 64, 3, 1, 1}}) {
      Both both = make_both(kind);
      for (const int width : widths) {
        EXPECT_TRUE(both.step(width)) << kind.name << " at " << *both.paged.position();
        if (width > 60) both.paged.drop_unseen();
      }
    }
  }
}

// What files hold of a history is what they would hold had it never been paged.
TEST(PagedPromptCache, ThePlainClassGoesOnAsThePages) {
  for (const Kind& kind : kinds()) {
    for (const bool drop : {false, true}) {
      for (const int length : {1, 69, 70, 71, 139, 140, 200}) {
        SCOPED_TRACE(kind.name + " " + std::to_string(length));
        Both both = make_both(kind);
        both.step(length);
        if (drop) both.paged.drop_unseen();
        const auto plain = both.paged.plain();
        EXPECT_EQ(plain->class_name(), kind.name);
        EXPECT_EQ(plain->position(), length);
        // It is one that files can hold.
        auto restored = cache_from_state(plain->class_name(), plain->saved_state());
        both.plain.reset(dynamic_cast<AttentionCache*>(restored.release()));
        for (const int width : {1, 1, 5, 1, 80, 1}) EXPECT_TRUE(both.step(width)) << *both.paged.position();
      }
    }
  }
}

TEST(PagedPromptCache, ThePlainRowsAreThoseOfThePlainClass) {
  for (const Kind& kind : kinds()) {
    Both both = make_both(kind);
    both.step(50);
    const auto plain = both.paged.plain();
    const auto& rows = dynamic_cast<AttentionCache&>(*plain);
    const auto tensors = [](const AttentionCache& cache) {
      std::vector<mx::array> all;
      const KeysValues stored = cache.keys_and_values();
      if (const auto* dense = std::get_if<DenseKV>(&stored)) return std::vector{dense->keys, dense->values};
      const auto& quantized = std::get<QuantizedKV>(stored);
      for (const QuantizedTensor& part : {quantized.keys, quantized.values}) {
        for (const mx::array& x : {part.packed, part.scales, part.biases}) all.push_back(x);
      }
      return all;
    };
    const auto got = tensors(rows), want = tensors(*both.plain), paged = tensors(both.paged);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(identical(got[i], want[i])) << kind.name << " " << i;
      EXPECT_TRUE(identical(paged[i], want[i])) << kind.name << " " << i;
    }
  }
}

TEST(PagedPromptCache, AnEmptyCacheHasAnEmptyPlainClass) {
  for (const Kind& kind : kinds()) {
    const auto plain = make_both(kind).paged.plain();
    EXPECT_EQ(plain->class_name(), kind.name);
    EXPECT_TRUE(plain->empty());
    EXPECT_EQ(plain->position(), 0);
  }
  EXPECT_THROW(PagedKVCache(PagePool::make(), {.chunk = 8}, KVQuantization{32, 8}).plain(), Error);
  EXPECT_THROW(PagedKVCache(PagePool::make(), {.window = 4, .chunk = 8}).plain(), Error);
}

TEST(PagedPromptCache, EveryAttentionLayerBecomesPagesThatSeeTheSame) {
  PromptCache own;
  own.push_back(std::make_unique<KVCache>());
  own.push_back(std::make_unique<RotatingKVCache>(12));
  own.push_back(std::make_unique<ChunkedKVCache>(9));
  own.push_back(std::make_unique<ArraysCache>(2));
  own.push_back(std::make_unique<CacheList>(std::make_unique<ArraysCache>(1), std::make_unique<ConcatenateKVCache>()));
  own.push_back(std::make_unique<QuantizedKVCache>(64, 4));
  own.push_back(std::make_unique<QuantizedRotatingKVCache>(6, 0, 32, 8));
  const auto pool = PagePool::make();
  for (const std::optional<KVQuantization>& bits : {std::optional<KVQuantization>(), {KVQuantization{32, 6}}}) {
    PromptCache paged = make_paged_prompt_cache(own, pool, bits);
    ASSERT_EQ(paged.size(), own.size());
    const auto expect = [](const LayerCache& layer, const PagedVisibility& sees,
                           const std::optional<KVQuantization>& quantization) {
      const auto* cache = dynamic_cast<const PagedKVCache*>(&layer);
      ASSERT_NE(cache, nullptr);
      EXPECT_EQ(cache->visibility(), sees);
      EXPECT_EQ(cache->quantization(), quantization);
    };
    expect(paged[0], {}, bits);
    expect(paged[1], {.window = 12}, bits);
    expect(paged[2], {.chunk = 9}, std::nullopt);  // its class has no quantised one
    EXPECT_EQ(paged.at<ArraysCache>(3).num_slots(), 2);
    EXPECT_EQ(paged.at<CacheList>(4).at<ArraysCache>(0).num_slots(), 1);
    expect(paged.at<CacheList>(4).child(1), {}, bits);
    expect(paged[5], {}, KVQuantization{64, 4});
    expect(paged[6], {.window = 6}, KVQuantization{32, 8});
    check_prompt_cache(paged, 0);
    const PromptCache plain = make_plain_prompt_cache(paged);
    EXPECT_EQ(plain[0].class_name(), bits ? "QuantizedKVCache" : "KVCache");
    EXPECT_EQ(plain[2].class_name(), "ChunkedKVCache");
    EXPECT_EQ(dynamic_cast<const CacheList&>(plain[4]).child(1).class_name(), bits ? "QuantizedKVCache" : "KVCache");
  }
  EXPECT_EQ(pool->nbytes(), 0u);
}

TEST(PagedPromptCache, WhatPagesCannotStandForIsRefusedByName) {
  const auto pool = PagePool::make();
  const auto error = [&](std::unique_ptr<LayerCache> layer) {
    PromptCache cache;
    cache.push_back(std::move(layer));
    return error_of([&] { make_paged_prompt_cache(cache, pool); });
  };
  EXPECT_EQ(
      error(std::make_unique<RotatingKVCache>(12, 4)),
      "unsupported: [make_paged_prompt_cache] layer 0 (RotatingKVCache) must not keep its first tokens, but got 4");
  EXPECT_EQ(
      error(std::make_unique<CacheList>(std::make_unique<BatchKVCache>(std::vector<int>{0, 0}))),
      "unsupported: [make_paged_prompt_cache] layers must be of a class that pages can stand for, but got layer 0, "
      "child 0 (BatchKVCache)");
  auto filled = std::make_unique<KVCache>();
  append(*filled, range(0, 3));
  EXPECT_EQ(error(std::move(filled)),
            "invalid_argument: [make_paged_prompt_cache] layer 0 (KVCache) must be empty, but got 3");
  auto state = std::make_unique<ArraysCache>(1);
  state->set(0, mx::ones({1, 3}));
  EXPECT_EQ(error(std::move(state)).substr(0, 17), "invalid_argument:");
}

TEST(PagedPromptCache, AListOfPagesIsEvaluatedCheckedForkedAndTrimmedAsAny) {
  PromptCache own;
  own.push_back(std::make_unique<CacheList>(std::make_unique<KVCache>(), std::make_unique<KVCache>()));
  own.push_back(std::make_unique<KVCache>());
  PromptCache cache = make_paged_prompt_cache(own, PagePool::make());
  auto& list = cache.at<CacheList>(0);
  for (AttentionCache* layer :
       {&list.at<AttentionCache>(0), &list.at<AttentionCache>(1), &cache.at<AttentionCache>(1)}) {
    append(*layer, range(0, 70));
  }
  std::vector<mx::array> pending;
  list.collect_arrays(pending);
  ASSERT_EQ(pending.size(), 2u);
  EXPECT_FALSE(pending[0].is_available());
  cache.eval();
  EXPECT_TRUE(pending[0].is_available() && pending[1].is_available());
  check_prompt_cache(cache, 70);
  const PromptCache fork = cache.fork();
  EXPECT_EQ(trim_prompt_cache(cache, 20), 20);
  check_prompt_cache(cache, 50);
  check_prompt_cache(fork, 70);
  EXPECT_TRUE(keeps_all_rows(cache));
  list.at<AttentionCache>(1).trim(1);
  EXPECT_THROW(check_prompt_cache(cache), Error);
}

}  // namespace
}  // namespace reprise
