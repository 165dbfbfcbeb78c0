// Attention of a PagedKVCache: masks, dtypes, steps that have not run, and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/paged_kv_cache.h"
#include "reprise/nn/norms.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/paged_rows.h"
#include "tests/cache/token_columns.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

std::shared_ptr<PagePool> make_pool() { return PagePool::make(); }

struct Inputs {
  mx::array queries, keys, values;
};

Inputs random_inputs(int length) {
  return {random_numbers({1, 4, length, 32}, 1), random_numbers({1, 2, length, 32}, 2),
          random_numbers({1, 2, length, 32}, 3)};
}

// Two steps ahead without evaluating, as decoding does it one step ahead.
TEST(PagedKVCache, AStepMayBeBuiltOnOneThatHasNotRun) {
  const auto pool = make_pool();
  const Inputs inputs = random_inputs(80);
  const auto step = [&](AttentionCache& cache, int begin, int end) {
    const auto cut = [&](const mx::array& x) {
      const mx::array rows =
          mx::transpose(mx::slice(x, {0, 0, begin, 0}, {1, x.shape(1), end, x.shape(3)}), {0, 2, 1, 3});
      return mx::reshape(rows, {1, end - begin, -1});
    };
    return cache.attend_projections({cut(inputs.queries), cut(inputs.keys), cut(inputs.values), 4, 2},
                                    {.mask = cache.make_mask(end - begin)});
  };
  PagedKVCache cache(pool);
  KVCache plain;
  std::vector<mx::array> got, want;
  for (const auto& [begin, end] : {std::pair(0, 62), {62, 63}, {63, 64}, {64, 65}, {65, 66}, {66, 80}}) {
    got.push_back(step(cache, begin, end));
    want.push_back(step(plain, begin, end));
  }
  // Neither side has run when it is forked; the fork copies the page that the other side went on in.
  PagedKVCache fork = cache;
  PromptCache before;
  before.push_back(cache.fork());
  got.push_back(step(cache, 10, 20));
  const mx::array other = step(fork, 20, 30);
  EXPECT_FALSE(got.front().is_available());
  before.eval();
  EXPECT_TRUE(got[0].is_available() && got[5].is_available()) << "what evaluates the rows has evaluated their steps";
  EXPECT_FALSE(got[6].is_available());
  const auto plain_fork = plain.fork();
  want.push_back(step(plain, 10, 20));
  const mx::array plain_other = step(dynamic_cast<AttentionCache&>(*plain_fork), 20, 30);
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(mx::allclose(got[i], want[i], 1e-5, 1e-6).item<bool>()) << i;
  EXPECT_TRUE(mx::allclose(other, plain_other, 1e-5, 1e-6).item<bool>());
}

TEST(PagedKVCache, MasksAsArraysAreOverTheRowsThatAreThere) {
  const auto pool = make_pool();
  PagedKVCache cache = filled_pages(pool, 200, {.window = 50});
  EXPECT_TRUE(std::holds_alternative<NoMask>(cache.make_mask(1)));
  EXPECT_TRUE(std::holds_alternative<NoMask>(cache.make_mask(1, {.window = 50})));
  EXPECT_TRUE(std::holds_alternative<Causal>(cache.make_mask(5, {.window = 60})));
  EXPECT_TRUE(std::holds_alternative<mx::array>(cache.make_mask(1, {.window = 49})));
  EXPECT_THROW(cache.make_mask(0), Error);
  EXPECT_THROW(cache.make_mask(1, {.window = 0}), Error);
  for (const bool dropped : {false, true}) {
    if (dropped) cache.drop_unseen();
    const auto sees = visibility(cache.make_mask(3, {.window = {}, .return_array = true}), 3, cache.length() + 3);
    for (int i = 0; i < 3; ++i) {
      for (int c = 0; c < cache.length() + 3; ++c) {
        const int position = cache.first_row() + c, query = 200 + i;
        EXPECT_EQ(sees(0, i, c), position <= query && position > query - 50);
      }
    }
  }
  PagedKVCache chunks = filled_pages(pool, 130, {.chunk = 100});
  EXPECT_TRUE(std::holds_alternative<Causal>(chunks.make_chunk_mask(5, 100)));
  EXPECT_TRUE(chunks.serves_chunks(100));
  EXPECT_TRUE(chunks.serves_chunks(40)) << "all rows are there";
  chunks.drop_unseen();
  EXPECT_TRUE(chunks.serves_chunks(100));
  EXPECT_FALSE(chunks.serves_chunks(40));
  const auto sees = visibility(chunks.make_mask(1, {.window = {}, .return_array = true}), 1, chunks.length() + 1);
  for (int c = 0; c <= chunks.length(); ++c) EXPECT_EQ(sees(0, 0, c), chunks.first_row() + c >= 100);
}

// By an array what is visible can only become less.
TEST(PagedKVCache, AMaskAsAnArrayHidesMore) {
  for (const kernels::PagedVisibility& sees : {kernels::PagedVisibility{}, {.window = 70}, {.chunk = 64}}) {
    for (const bool additive : {false, true}) {
      const auto pool = make_pool();
      const Inputs inputs = random_inputs(200);
      const auto cut = [&](const mx::array& x, int begin, int end) {
        return mx::slice(x, {0, 0, begin, 0}, {1, x.shape(1), end, x.shape(3)});
      };
      PagedKVCache cache(pool, sees);
      KVCache plain;
      for (AttentionCache* one : {static_cast<AttentionCache*>(&cache), static_cast<AttentionCache*>(&plain)}) {
        one->attend(cut(inputs.queries, 0, 190), cut(inputs.keys, 0, 190), cut(inputs.values, 0, 190),
                    {.mask = one->make_mask(190)});
      }
      cache.drop_unseen();
      // Something is left for every query.
      const mx::array itself = mx::eye(10, 200, 190, mx::bool_);
      const mx::array hidden =
          mx::logical_or(itself, mx::random::bernoulli(0.3f, mx::Shape{10, 200}, mx::random::key(5)));
      const auto as_mask = [&](const mx::array& seen) {
        return additive ? mx::where(seen, mx::array(0.0f), mx::array(-1e9f)) : seen;
      };
      const mx::array seen = std::get<mx::array>(cache.make_mask(10, {.window = {}, .return_array = true}));
      const int first = cache.first_row();
      const mx::array own = mx::logical_and(seen, mx::slice(hidden, {0, first}, {10, 200}));
      const mx::array padded = mx::pad(own, std::vector<int>{1}, {first}, {0}, mx::array(false));
      const auto attend = [&](AttentionCache& one, const mx::array& mask) {
        return one.attend(cut(inputs.queries, 190, 200), cut(inputs.keys, 190, 200), cut(inputs.values, 190, 200),
                          {.scale = 0.3f, .mask = as_mask(mask)});
      };
      EXPECT_TRUE(mx::allclose(attend(cache, own), attend(plain, padded), 1e-5, 1e-5).item<bool>());
    }
  }
}

TEST(PagedKVCache, RowsAreStoredInTheDtypeThatIsAskedForOrTheirOwn) {
  const Inputs inputs = random_inputs(4);
  for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    PagedKVCache cache(make_pool());
    for (const mx::Dtype asked : {dtype, mx::float32}) {
      const AttentionOptions options{.mask = Causal{}, .stored_dtype = asked};
      EXPECT_EQ(cache.attend(inputs.queries, inputs.keys, inputs.values, options).dtype(), mx::float32);
    }
    EXPECT_EQ(cache.layout()->dtype, dtype);
    EXPECT_TRUE(identical(std::get<DenseKV>(cache.keys_and_values()).keys,
                          mx::concatenate({mx::astype(inputs.keys, dtype), mx::astype(inputs.keys, dtype)}, 2)));
    PagedKVCache as_they_come(make_pool());
    const auto cast = [&](const mx::array& x) { return mx::astype(x, dtype); };
    EXPECT_EQ(
        as_they_come.attend(cast(inputs.queries), cast(inputs.keys), cast(inputs.values), {.mask = Causal{}}).dtype(),
        dtype);
    EXPECT_EQ(as_they_come.layout()->dtype, dtype);
  }
}

TEST(PagedKVCache, StoreTakesRowsOfAnyDtype) {
  const Inputs inputs = random_inputs(3);
  PagedKVCache cache(make_pool());
  cache.store(inputs.keys, mx::multiply(inputs.values, mx::array(1e6f)), mx::float16);
  cache.store(mx::astype(inputs.keys, mx::bfloat16), inputs.values);
  EXPECT_EQ(cache.length(), 6);
  const auto stored = std::get<DenseKV>(cache.keys_and_values());
  EXPECT_EQ(stored.values.dtype(), mx::float16);
  EXPECT_TRUE(mx::all(mx::isfinite(stored.values)).item<bool>());
}

TEST(PagedKVCache, ACallThatThrowsHasStoredNothing) {
  const auto pool = make_pool();
  const Inputs inputs = random_inputs(4);
  PagedKVCache cache(pool);
  AttentionOptions causal, bad_mask, bad_sinks, bad_cap, bad_norm, bad_dtype;
  causal.mask = bad_mask.mask = bad_sinks.mask = bad_cap.mask = bad_norm.mask = bad_dtype.mask = Causal{};
  bad_mask.mask = mx::zeros({5, 7}, mx::bool_);
  bad_sinks.sinks = mx::zeros({5});
  bad_cap.softcap = 0.0f;
  const RmsNorm narrow(mx::ones({16}), 1e-6f);
  bad_norm.key_norm = &narrow;
  bad_dtype.stored_dtype = mx::int32;
  const auto attend = [&](const mx::array& queries, const mx::array& keys, const mx::array& values,
                          const AttentionOptions& options) { cache.attend(queries, keys, values, options); };
  const auto refuse_all = [&] {
    const int length = cache.length();
    for (const AttentionOptions& bad : {bad_mask, bad_sinks, bad_cap, bad_norm, AttentionOptions{}}) {
      EXPECT_THROW(attend(inputs.queries, inputs.keys, inputs.values, bad), Error);
    }
    EXPECT_THROW(attend(mx::zeros({1, 3, 4, 32}), inputs.keys, inputs.values, causal), Error);
    EXPECT_THROW(attend(mx::astype(inputs.queries, mx::int32), inputs.keys, inputs.values, causal), Error);
    EXPECT_THROW(attend(inputs.queries, mx::zeros({1, 2, 3, 32}), inputs.values, causal), Error);
    EXPECT_THROW(attend(inputs.queries, mx::zeros({1, 2, 4, 16}), inputs.values, causal), Error);
    EXPECT_THROW(attend(mx::zeros({2, 4, 4, 32}), mx::zeros({2, 2, 4, 32}), mx::zeros({2, 2, 4, 32}), causal), Error);
    EXPECT_THROW(cache.update_and_fetch(mx::zeros({2, 2, 4, 32}), mx::zeros({2, 2, 4, 32})), Error);
    EXPECT_THROW(cache.update_and_fetch(inputs.keys, mx::astype(inputs.values, mx::float16)), Error);
    EXPECT_THROW(cache.update_and_fetch(mx::astype(inputs.keys, mx::int32), mx::astype(inputs.values, mx::int32)),
                 Error);
    EXPECT_EQ(cache.length(), length);
  };
  refuse_all();
  EXPECT_THROW(attend(inputs.queries, inputs.keys, inputs.values, bad_dtype), Error);
  EXPECT_THROW(cache.update_and_fetch(mx::zeros({1, 2, 0, 32}), mx::zeros({1, 2, 0, 32})), Error);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(pool->nbytes(), 0u);

  attend(inputs.queries, inputs.keys, inputs.values, causal);
  refuse_all();
  EXPECT_THROW(cache.update_and_fetch(mx::zeros({1, 2, 1, 16}), mx::zeros({1, 2, 1, 32})), Error);
  EXPECT_THROW(cache.update_and_fetch(mx::zeros({1, 2, 1, 32}, mx::float16), mx::zeros({1, 2, 1, 32}, mx::float16)),
               Error);
  EXPECT_THROW(attend(mx::zeros({1, 4, 1, 64}), mx::zeros({1, 2, 1, 64}), mx::zeros({1, 2, 1, 64}), causal), Error);
  EXPECT_TRUE(identical(std::get<DenseKV>(cache.keys_and_values()).keys, inputs.keys));
  const KeysValues same = cache.update_and_fetch(mx::zeros({1, 2, 0, 32}), mx::zeros({1, 2, 0, 32}));
  EXPECT_TRUE(identical(std::get<DenseKV>(same).values, inputs.values));
}

TEST(PagedKVCache, IsMadeOnlyOfWhatFits) {
  EXPECT_THROW(PagedKVCache(nullptr), Error);
  EXPECT_THROW(PagedKVCache(make_pool(), {.window = -1}), Error);
  EXPECT_THROW(PagedKVCache(make_pool(), {.chunk = -1}), Error);
  EXPECT_THROW(PagedKVCache(make_pool(), {}, KVQuantization{64, 7}), Error);
  PagedKVCache quantised(make_pool(), {}, KVQuantization{64, 8});
  const Inputs inputs = random_inputs(2);  // heads of 32
  EXPECT_THROW(quantised.attend(inputs.queries, inputs.keys, inputs.values, {.mask = Causal{}}), Error);
  EXPECT_THROW(quantised.update_and_fetch(inputs.keys, inputs.values), Error);
  EXPECT_TRUE(quantised.empty());
}

}  // namespace
}  // namespace reprise
