// AttentionCache::attend is its parts in one call, however the tokens are cut into calls [M8].
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "reprise/cache/batch_chunked_kv_cache.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/batch_quantized_kv_cache.h"
#include "reprise/cache/batch_quantized_rotating_kv_cache.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/paged_kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/nn/attention.h"
#include "reprise/nn/masks.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr int kHeads = 4, kKvHeads = 2, kSize = 32;

struct Inputs {
  mx::array queries, keys, values;
};

Inputs random_inputs(int length, mx::Dtype dtype = mx::float32) {
  const auto draw = [&](int heads, std::uint64_t seed) {
    return mx::astype(mx::random::normal({1, heads, length, kSize}, mx::float32, 0.0f, 1.0f, mx::random::key(seed)),
                      dtype);
  };
  return {draw(kHeads, 1), draw(kKvHeads, 2), draw(kKvHeads, 3)};
}

mx::array columns(const mx::array& x, int begin, int end) {
  return mx::slice(x, {0, 0, begin, 0}, {x.shape(0), x.shape(1), end, x.shape(3)});
}

bool close(const mx::array& a, const mx::array& b) { return mx::allclose(a, b, 1e-5, 1e-5).item<bool>(); }

Rope make_rope() {
  RopeOptions options;
  options.dims = kSize;
  return Rope(options);
}

using MakeCache = std::function<std::unique_ptr<AttentionCache>()>;

// Attention over `inputs` in calls of these lengths.
mx::array in_chunks(const MakeCache& make, const Inputs& inputs, const std::vector<int>& lengths, const Rope* rope,
                    std::optional<int> window, const std::function<void(AttentionOptions&)>& change = {}) {
  const std::unique_ptr<AttentionCache> cache = make();
  std::vector<mx::array> parts;
  int at = 0;
  for (const int length : lengths) {
    AttentionOptions options;
    options.rope = rope;
    options.scale = 0.3f;
    options.mask = cache->make_mask(length, {.window = window});
    if (change) change(options);
    parts.push_back(cache->attend(columns(inputs.queries, at, at + length), columns(inputs.keys, at, at + length),
                                  columns(inputs.values, at, at + length), options));
    at += length;
  }
  return mx::concatenate(parts, 2);
}

// Token by token, some ways between, and `length` tokens cut at random.
std::vector<std::vector<int>> chunkings(int length) {
  std::vector<std::vector<int>> out = {
      std::vector<int>(static_cast<std::size_t>(length), 1), {7, 1, 1, 9, 6}, {1, 16, 1, 1, 5}};
  std::mt19937 random(3);
  for (int i = 0; i < 4; ++i) {
    out.emplace_back();
    for (int left = length; left > 0; left -= out.back().back()) {
      out.back().push_back(std::min(left, 1 + static_cast<int>(random() % 8)));
    }
  }
  return out;
}

struct Kind {
  std::string name;
  MakeCache make;
  std::optional<int> max_size = {};  // of a ring: the window that it has by itself
  bool quantized = false;
};

template <typename Cache, typename... Arguments>
MakeCache maker(Arguments... arguments) {
  return [=] { return std::make_unique<Cache>(arguments...); };
}

MakeCache paged(kernels::PagedVisibility sees = {}, std::optional<KVQuantization> quantization = {}) {
  return [=] { return std::make_unique<PagedKVCache>(PagePool::make(), sees, quantization); };
}

std::vector<Kind> kinds() {
  constexpr int kRing = 6;
  const std::vector<int> one_row = {0};
  return {
      {"KVCache", maker<KVCache>()},
      {"ConcatenateKVCache", maker<ConcatenateKVCache>()},
      {"QuantizedKVCache", maker<QuantizedKVCache>(32, 8), {}, true},
      {"ChunkedKVCache", maker<ChunkedKVCache>(64)},
      {"RotatingKVCache", maker<RotatingKVCache>(kRing), kRing},
      {"QuantizedRotatingKVCache", maker<QuantizedRotatingKVCache>(kRing, 0, 32, 8), kRing, true},
      {"PagedKVCache", paged()},
      {"PagedKVCache of a window", paged({.window = kRing}), kRing},
      {"PagedKVCache of chunks", paged({.chunk = 64})},
      {"PagedKVCache quantised", paged({}, KVQuantization{32, 8}), {}, true},
      {"BatchChunkedKVCache", maker<BatchChunkedKVCache>(64, one_row)},
      {"BatchKVCache", maker<BatchKVCache>(one_row)},
      {"BatchQuantizedKVCache", maker<BatchQuantizedKVCache>(one_row, 32, 8), {}, true},
      {"BatchRotatingKVCache", maker<BatchRotatingKVCache>(kRing, one_row), kRing},
      {"BatchQuantizedRotatingKVCache", maker<BatchQuantizedRotatingKVCache>(kRing, one_row, 0, 32, 8), kRing, true}};
}

TEST(Attend, M8AnyChunkingGivesTheSameAttentionInEveryClass) {
  const Inputs inputs = random_inputs(24);
  const Rope rope = make_rope();
  for (const Kind& kind : kinds()) {
    for (const std::optional<int> window : {std::optional<int>(), std::optional<int>(4)}) {
      SCOPED_TRACE(kind.name + " " + std::to_string(window.value_or(0)));
      const mx::array whole = in_chunks(kind.make, inputs, {24}, &rope, window);
      for (const auto& lengths : chunkings(24)) {
        EXPECT_TRUE(close(in_chunks(kind.make, inputs, lengths, &rope, window), whole))
            << testing::PrintToString(lengths);
      }
      // What it sees is what a growing cache under the same window sees.
      const std::optional<int> seen = window ? window : kind.max_size;
      const mx::array growing = in_chunks(maker<KVCache>(), inputs, {24}, &rope, seen);
      const double tolerance = kind.quantized ? 0.05 : 1e-5;
      EXPECT_TRUE(mx::allclose(whole, growing, tolerance, tolerance).item<bool>());
      const mx::array one_more = in_chunks(maker<KVCache>(), inputs, {24}, &rope, seen.value_or(22) + 1);
      EXPECT_FALSE(mx::allclose(whole, one_more, tolerance, tolerance).item<bool>()) << "the test sees an off by one";
    }
  }
}

TEST(Attend, SoftCapsAndNormsOfHeadsReachEveryClass) {
  const Inputs inputs = random_inputs(24);
  const Rope rope = make_rope();
  const auto weight = [](std::uint64_t seed) {
    return mx::random::uniform(0.5f, 2.0f, {kSize}, mx::float32, mx::random::key(seed));
  };
  const RmsNorm query_norm(weight(5), 1e-2f), key_norm(weight(6), 1e-6f);
  const float cap = 1.5f;
  // Written out.
  const auto whole = [&](int window, bool with_cap) {
    const mx::array q = rope(query_norm(inputs.queries), 0);
    const mx::array k = mx::repeat(rope(key_norm(inputs.keys), 0), kHeads / kKvHeads, 1);
    mx::array scores = mx::multiply(mx::matmul(q, mx::swapaxes(k, 2, 3)), mx::array(0.3f));
    if (with_cap) scores = mx::multiply(mx::tanh(mx::divide(scores, mx::array(cap))), mx::array(cap));
    scores = mx::where(create_causal_mask(24, 0, {.window = window}), scores, mx::array(-1e30f));
    return mx::matmul(mx::softmax(scores, -1), mx::repeat(inputs.values, kHeads / kKvHeads, 1));
  };
  for (const Kind& kind : kinds()) {
    const int window = kind.max_size.value_or(24);
    const double tolerance = kind.quantized ? 0.05 : 1e-5;
    for (const std::vector<int>& lengths : {std::vector<int>{24}, std::vector<int>{7, 1, 1, 9, 6}}) {
      SCOPED_TRACE(kind.name + " " + std::to_string(lengths.size()));
      const mx::array got = in_chunks(kind.make, inputs, lengths, &rope, {}, [&](AttentionOptions& options) {
        options.softcap = cap;
        options.query_norm = &query_norm;
        options.key_norm = &key_norm;
      });
      EXPECT_TRUE(mx::allclose(got, whole(window, true), tolerance, tolerance).item<bool>());
      EXPECT_FALSE(mx::allclose(got, whole(window, false), 0.1, 0.1).item<bool>());
    }
  }
}

TEST(Attend, SoftCapsAndNormsThatDoNotFitAreRefusedAndNothingIsStored) {
  const Inputs inputs = random_inputs(3);
  const RmsNorm narrow(mx::ones({kSize / 2}), 1e-6f);
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const std::unique_ptr<AttentionCache> cache = kind.make();
    AttentionOptions capped, normed;
    capped.softcap = 0.0f;
    normed.key_norm = &narrow;
    for (const AttentionOptions& options : {capped, normed}) {
      EXPECT_THROW(cache->attend(inputs.queries, inputs.keys, inputs.values, options), Error);
      EXPECT_TRUE(cache->empty());
    }
  }
}

TEST(Attend, EqualsItsParts) {
  const Inputs inputs = random_inputs(6);
  const Rope rope = make_rope();
  KVCache cache, parts;
  AttentionOptions options;
  options.rope = &rope;
  options.scale = 0.5f;
  for (const auto& [begin, end] : {std::pair(0, 4), std::pair(4, 5), std::pair(5, 6)}) {
    options.mask = cache.make_mask(end - begin);
    const mx::array q = columns(inputs.queries, begin, end), k = columns(inputs.keys, begin, end),
                    v = columns(inputs.values, begin, end);
    const mx::array attended = cache.attend(q, k, v, options);
    const Offset offset = parts.offset();
    const KeysValues all = parts.update_and_fetch(rope(k, offset), v);
    const mx::array expected = scaled_dot_product_attention(rope(q, offset), all, {0.5f, options.mask, {}});
    EXPECT_TRUE(close(attended, expected));
  }
  EXPECT_TRUE(identical(cache.saved_state(), parts.saved_state()));
}

// What is rotated and stored in one operation is what the parts store, for every kind of rope.
TEST(Attend, EveryKindOfRopeStoresWhatThePartsStore) {
  std::vector<RopeScaling> kinds = {{.type = "default"},
                                    {.type = "linear", .factor = 4.0f},
                                    {.type = "llama3", .factor = 8.0f, .original_max_position_embeddings = 16},
                                    {.type = "yarn", .factor = 8.0f, .original_max_position_embeddings = 16},
                                    {.type = "longrope", .original_max_position_embeddings = 8, .long_factor = {3}},
                                    {.type = "proportional", .factor = 2.0f, .partial_rotary_factor = 0.5f},
                                    {.type = "dynamic", .factor = 2.0f},
                                    {.type = "mrope", .mrope_section = {2, 3, 3}}};
  const Inputs inputs = random_inputs(9);
  for (const RopeScaling& scaling : kinds) {
    for (const bool traditional : {false, true}) {
      for (const int dims : {kSize, kSize / 2}) {
        SCOPED_TRACE(scaling.type + " " + std::to_string(traditional) + " " + std::to_string(dims));
        const Rope rope({.dims = dims, .traditional = traditional, .scaling = scaling, .max_position_embeddings = 16});
        KVCache fused;
        ConcatenateKVCache parts;
        for (const auto& [begin, end] : {std::pair(0, 7), std::pair(7, 8), std::pair(8, 9)}) {
          AttentionOptions options;
          options.rope = &rope;
          options.mask = fused.make_mask(end - begin);
          const mx::array q = columns(inputs.queries, begin, end), k = columns(inputs.keys, begin, end),
                          v = columns(inputs.values, begin, end);
          EXPECT_TRUE(close(fused.attend(q, k, v, options), parts.attend(q, k, v, options)));
        }
        const auto stored = std::get<DenseKV>(fused.keys_and_values());
        const auto expected = std::get<DenseKV>(parts.keys_and_values());
        EXPECT_TRUE(identical(stored.values, expected.values));
#if defined(__x86_64__)
        EXPECT_TRUE(identical(stored.keys, expected.keys));
#else
        EXPECT_TRUE(close(stored.keys, expected.keys));
#endif
      }
    }
  }
}

TEST(Attend, AnEmptyCacheStoresTheDtypeThatIsAskedForAndAFilledOneKeepsItsOwn) {
  const Inputs inputs = random_inputs(4);
  for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    KVCache fused;
    ConcatenateKVCache parts;
    for (const mx::Dtype asked : {dtype, mx::float32}) {
      const AttentionOptions options{.mask = Causal{}, .stored_dtype = asked};
      EXPECT_EQ(fused.attend(inputs.queries, inputs.keys, inputs.values, options).dtype(), mx::float32);
      parts.attend(inputs.queries, inputs.keys, inputs.values, options);
    }
    const auto stored = std::get<DenseKV>(fused.keys_and_values());
    EXPECT_EQ(stored.keys.dtype(), dtype);
    EXPECT_TRUE(identical(stored.keys, std::get<DenseKV>(parts.keys_and_values()).keys));
    // As a file gives it back.
    const auto loaded = KVCache::from_state(fused.saved_state());
    loaded->attend(inputs.queries, inputs.keys, inputs.values, {.mask = Causal{}, .stored_dtype = mx::float32});
    EXPECT_EQ(std::get<DenseKV>(loaded->keys_and_values()).keys.dtype(), dtype);
  }
}

TEST(Attend, KeysBeyondFloat16StayFinite) {
  Inputs inputs = random_inputs(3);
  inputs.keys = mx::multiply(inputs.keys, mx::array(1e6f));
  for (const auto& make : {maker<KVCache>(), maker<ConcatenateKVCache>(), maker<RotatingKVCache>(8)}) {
    const auto cache = make();
    const mx::array out =
        cache->attend(inputs.queries, inputs.keys, inputs.values, {.mask = Causal{}, .stored_dtype = mx::float16});
    EXPECT_TRUE(mx::all(mx::isfinite(out)).item<bool>());
    EXPECT_TRUE(mx::all(mx::isfinite(std::get<DenseKV>(cache->keys_and_values()).keys)).item<bool>());
  }
}

TEST(Attend, S4QuantisedRowsGiveTheAttentionOfTheirDequantisedOnesInPrefillAndDecode) {
  const Rope rope = make_rope();
  for (const mx::Dtype dtype : {mx::float32, mx::bfloat16}) {
    const Inputs inputs = random_inputs(12, dtype);
    QuantizedKVCache quantized(32, 4);
    AttentionOptions options;
    options.rope = &rope;
    options.scale = 0.3f;
    for (const auto& [begin, end] : {std::pair(0, 9), std::pair(9, 10), std::pair(10, 11), std::pair(11, 12)}) {
      options.mask = quantized.make_mask(end - begin);
      const mx::array q = columns(inputs.queries, begin, end);
      const mx::array out =
          quantized.attend(q, columns(inputs.keys, begin, end), columns(inputs.values, begin, end), options);
      EXPECT_EQ(out.dtype(), dtype);
      EXPECT_EQ(quantized.length(), end);
      const auto dense = quantized.to_dequantized();
      const mx::array expected = scaled_dot_product_attention(
          rope(q, begin), dynamic_cast<KVCache&>(*dense).keys_and_values(), {options.scale, options.mask, {}});
      const double tolerance = dtype == mx::float32 ? 1e-5 : 0.02;
      EXPECT_TRUE(mx::allclose(out, expected, tolerance, tolerance).item<bool>()) << begin;
    }
  }
}

TEST(Attend, S5SinksReachBothKindsOfRows) {
  const Inputs inputs = random_inputs(5);
  KVCache dense;
  QuantizedKVCache quantized(32, 8);
  AttentionOptions options;
  options.mask = Causal{};
  const auto attend = [&](const AttentionCache& cache) {
    const auto fresh = cache.fork();
    return dynamic_cast<AttentionCache&>(*fresh).attend(inputs.queries, inputs.keys, inputs.values, options);
  };
  const mx::array without = attend(quantized);
  options.sinks = mx::full({kHeads}, 2.0f);
  EXPECT_TRUE(mx::allclose(attend(quantized), attend(dense), 0.05, 0.05).item<bool>());
  EXPECT_FALSE(mx::allclose(attend(quantized), without, 0.05, 0.05).item<bool>());
}

TEST(Attend, Z3AQuantisedCallThatThrowsHasStoredNothing) {
  const Inputs inputs = random_inputs(4);
  QuantizedKVCache cache(32, 8);
  cache.attend(inputs.queries, inputs.keys, inputs.values, {.mask = Causal{}});
  const State before = cache.state();
  AttentionOptions bad_mask, bad_sinks;
  bad_mask.mask = mx::zeros({5, 7}, mx::bool_);
  bad_sinks.sinks = mx::zeros({kHeads + 1});
  for (const AttentionOptions& bad : {bad_mask, bad_sinks}) {
    EXPECT_THROW(cache.attend(inputs.queries, inputs.keys, inputs.values, bad), Error);
  }
  EXPECT_TRUE(identical(cache.state(), before));
}

TEST(Attend, WithoutRopeRowsAreStoredAsTheyAre) {
  const Inputs inputs = random_inputs(3);
  KVCache cache;
  cache.attend(inputs.queries, inputs.keys, inputs.values, {.mask = Causal{}});
  const auto stored = std::get<DenseKV>(cache.keys_and_values());
  EXPECT_TRUE(identical(stored.keys, inputs.keys));
  EXPECT_TRUE(identical(stored.values, inputs.values));
}

TEST(Attend, NewRowsTakeTheStoredDtypeAndTheAnswerTheQueries) {
  const Inputs half = random_inputs(4, mx::float16), full = random_inputs(4);
  KVCache cache;
  EXPECT_EQ(cache.attend(half.queries, half.keys, half.values, {.mask = Causal{}}).dtype(), mx::float16);
  EXPECT_EQ(cache.attend(full.queries, full.keys, full.values, {.mask = Causal{}}).dtype(), mx::float32);
  const auto stored = std::get<DenseKV>(cache.keys_and_values());
  EXPECT_EQ(stored.keys.dtype(), mx::float16);
  EXPECT_EQ(stored.keys.shape(2), 8);
}

TEST(Attend, Z3ACallThatThrowsHasStoredNothing) {
  const Inputs inputs = random_inputs(4);
  KVCache cache;
  const auto attend = [&](const mx::array& queries, const mx::array& keys, const AttentionOptions& options) {
    cache.attend(queries, keys, inputs.values, options);
  };
  const mx::array bad_queries = mx::zeros({1, 3, 4, kSize});  // 3 is no multiple of the key/value heads
  AttentionOptions bad_mask;
  bad_mask.mask = mx::zeros({5, 7}, mx::bool_);
  EXPECT_ANY_THROW(attend(bad_queries, inputs.keys, {}));
  EXPECT_TRUE(cache.empty());
  attend(inputs.queries, inputs.keys, {.mask = Causal{}});
  const State before = cache.state();
  EXPECT_ANY_THROW(attend(bad_queries, inputs.keys, {}));
  EXPECT_ANY_THROW(attend(inputs.queries, inputs.keys, bad_mask));
  EXPECT_ANY_THROW(attend(mx::astype(inputs.queries, mx::int32), inputs.keys, {}));
  EXPECT_ANY_THROW(attend(inputs.queries, mx::zeros({1, kKvHeads, 3, kSize}), {}));
  EXPECT_TRUE(identical(cache.state(), before));
  EXPECT_EQ(cache.length(), 4);
}

}  // namespace
}  // namespace reprise
