// AttentionCache::attend is its parts in one call, however the tokens are cut into calls [M8].
#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/nn/attention.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr int kHeads = 4, kKvHeads = 2, kSize = 8;

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

// Attention over `inputs` in calls of these lengths.
mx::array in_chunks(const Inputs& inputs, const std::vector<int>& lengths, const Rope* rope,
                    std::optional<int> window) {
  KVCache cache;
  std::vector<mx::array> parts;
  int at = 0;
  for (const int length : lengths) {
    AttentionOptions options;
    options.rope = rope;
    options.scale = 0.3f;
    options.mask = cache.make_mask(length, {.window = window});
    parts.push_back(cache.attend(columns(inputs.queries, at, at + length), columns(inputs.keys, at, at + length),
                                 columns(inputs.values, at, at + length), options));
    at += length;
  }
  return mx::concatenate(parts, 2);
}

TEST(Attend, M8AnyChunkingGivesTheSameAttention) {
  const Inputs inputs = random_inputs(24);
  const Rope rope = make_rope();
  for (const std::optional<int> window : {std::optional<int>(), std::optional<int>(5)}) {
    const mx::array whole = in_chunks(inputs, {24}, &rope, window);
    EXPECT_TRUE(close(in_chunks(inputs, std::vector<int>(24, 1), &rope, window), whole));
    EXPECT_TRUE(close(in_chunks(inputs, {7, 1, 1, 9, 6}, &rope, window), whole));
    EXPECT_TRUE(close(in_chunks(inputs, {1, 16, 1, 1, 5}, &rope, window), whole));
  }
  EXPECT_FALSE(close(in_chunks(inputs, {24}, &rope, 5), in_chunks(inputs, {24}, &rope, std::nullopt)));
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
    EXPECT_TRUE(identical(attended, expected));
  }
  EXPECT_TRUE(identical(cache.saved_state(), parts.saved_state()));
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
  EXPECT_ANY_THROW(attend(inputs.queries, mx::zeros({1, kKvHeads, 3, kSize}), {}));
  EXPECT_TRUE(identical(cache.state(), before));
  EXPECT_EQ(cache.length(), 4);
}

}  // namespace
}  // namespace reprise
