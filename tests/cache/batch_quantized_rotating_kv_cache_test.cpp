#include "reprise/cache/batch_quantized_rotating_kv_cache.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/ring_batch.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

// Rows whose every number differs, so that a row in the wrong place or quantised twice is seen.
Rows random_rows(int batch, int length, std::uint64_t seed) {
  return {mx::random::normal({batch, 2, length, 64}, mx::float32, 0.0f, 1.0f, mx::random::key(2 * seed)),
          mx::random::normal({batch, 2, length, 32}, mx::float32, 0.0f, 1.0f, mx::random::key(2 * seed + 1))};
}

Rows row_of(const Rows& all, int row) {
  const auto cut = [&](const mx::array& x) {
    return mx::slice(x, {row, 0, 0, 0}, {row + 1, x.shape(1), x.shape(2), x.shape(3)});
  };
  return {cut(all.keys), cut(all.values)};
}

void append_rows(AttentionCache& cache, const Rows& added) { cache.update_and_fetch(added.keys, added.values); }

// The six tensors, columns in temporal order.
State temporal(const internal::RingCache& cache) {
  const auto columns = cache.temporal_columns();
  if (!columns) return State();
  return State(State::List{columns->keys_state(), columns->values_state()});
}

TEST(BatchQuantizedRotatingKVCache, X7MergedDecodedAndExtractedRowsAreBitIdenticalToThoseAlone) {
  for (const int keep : {0, 3}) {
    for (const int bits : {4, 8}) {
      std::vector<std::unique_ptr<internal::RingCache>> solos;
      std::uint64_t seed = 1;
      for (const int length : {0, 2, 8, 21}) {
        solos.push_back(std::make_unique<QuantizedRotatingKVCache>(8, keep, 32, bits));
        if (length > 0) append_rows(*solos.back(), random_rows(1, length, seed++));
      }
      RingPair pair = merged(std::move(solos));
      EXPECT_EQ(pair.batch->class_name(), "BatchQuantizedRotatingKVCache");
      for (const int length : {1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}) {
        const Rows all = random_rows(4, length, seed++);
        append_rows(*pair.batch, all);
        for (int row = 0; row < 4; ++row) append_rows(*pair.solos[static_cast<std::size_t>(row)], row_of(all, row));
      }
      for (int row = 0; row < 4; ++row) {
        const internal::RingCache& solo = *pair.solos[static_cast<std::size_t>(row)];
        const auto single = as_ring(pair.batch->extract(row));
        EXPECT_EQ(single->class_name(), "QuantizedRotatingKVCache");
        EXPECT_EQ(single->position(), solo.position());
        EXPECT_EQ(dynamic_cast<const QuantizedRotatingKVCache&>(*single).bits(), bits);
        EXPECT_TRUE(identical(temporal(*single), temporal(solo))) << "row " << row << " keep " << keep;
      }
    }
  }
}

TEST(BatchQuantizedRotatingKVCache, X7TheNeedleIsFoundInEveryRowWhateverItsLength) {
  RingPair pair = merged([] {
    std::vector<std::unique_ptr<internal::RingCache>> solos;
    for (const int length : {3, 9, 30}) {
      solos.push_back(std::make_unique<QuantizedRotatingKVCache>(12, 2, 32, 8));
      append(*solos.back(), range(kFirstToken, kFirstToken + length), kQuantizedRingShape);
    }
    return solos;
  }());
  for (int step = 0; step < 30; ++step) {
    TokenRows tokens(3, {kFirstToken + 500 + step});
    ASSERT_NO_FATAL_FAILURE(update_and_compare(pair, tokens, 1, {}, kQuantizedRingShape));
  }
  ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
}

TEST(BatchQuantizedRotatingKVCache, X7PaddingDequantisesToZero) {
  const auto quantized = BatchRotatingKVCache(8, {2, 0}).to_quantized(32, 8);
  auto& cache = dynamic_cast<BatchQuantizedRotatingKVCache&>(*quantized);
  append_rows(cache, random_rows(2, 1, 3));
  const auto dense = cache.to_dequantized();
  const mx::array keys = *(*dense->state().as_list())[0].as_array();
  EXPECT_EQ(mx::max(mx::abs(mx::slice(keys, {0, 0, 1, 0}, keys.shape()))).item<float>(), 0.0f);
  EXPECT_GT(mx::max(mx::abs(keys)).item<float>(), 0.0f);
}

TEST(BatchQuantizedRotatingKVCache, X7QuantisedInEveryFillStateItGoesOnAsTheDenseOneDoes) {
  for (const int keep : {0, 3}) {
    BatchRotatingKVCache dense(8, {3, 0}, keep);
    for (int step = 0; step < 14; ++step) {
      append_batch(dense, {{kFirstToken + step}, {kFirstToken + 100 + step}}, kQuantizedRingShape);
      const auto quantized = as_ring_batch(dense.to_quantized(32, 4));
      EXPECT_EQ(quantized->class_name(), "BatchQuantizedRotatingKVCache");
      EXPECT_EQ(quantized->keep(), keep);
      const auto back = as_ring_batch(quantized->to_dequantized());
      const auto same = as_ring_batch(dense.fork());
      for (const int length : {1, 2, 1}) {
        const Mask mask = same->make_mask(length);
        EXPECT_TRUE(identical(std::get<mx::array>(quantized->make_mask(length)), std::get<mx::array>(mask)));
        const TokenRows tokens(2, range(kFirstToken + 200, kFirstToken + 200 + length));
        const KeysValues expected = append_batch(*same, tokens, kQuantizedRingShape);
        const KeysValues got = append_batch(*quantized, tokens, kQuantizedRingShape);
        append_batch(*back, tokens, kQuantizedRingShape);
        for (const int row : {0, 1}) {
          EXPECT_EQ(columns_of(got, row), columns_of(expected, row));
          EXPECT_EQ(columns_of(back->keys_and_values(), row), columns_of(expected, row));
        }
      }
    }
  }
  const BatchRotatingKVCache empty(8, {1, 0}, 2);
  EXPECT_TRUE(empty.to_quantized(32, 4)->empty());
  EXPECT_EQ(empty.to_quantized(32, 4)->positions(), (std::vector<int>{-1, 0}));
  EXPECT_ANY_THROW(empty.to_quantized(33, 4));
}

TEST(BatchQuantizedRotatingKVCache, X7StateAndLegacyPairHoldEverything) {
  for (const int keep : {0, 3}) {
    for (const int steps : {0, 2, 11}) {
      BatchQuantizedRotatingKVCache cache(8, {1, 0}, keep, 32, 4);
      for (int step = 0; step < steps; ++step) append_rows(cache, random_rows(2, 1, static_cast<std::uint64_t>(step)));
      const auto from_state = cache_from_state(cache.class_name(), cache.state());
      const auto from_saved = cache_from_state(cache.class_name(), cache.saved_state());
      const auto from_pair = cache_from_legacy(cache.class_name(), cache.legacy_state(), cache.legacy_meta());
      EXPECT_TRUE(identical(from_state->state(), cache.state()));
      EXPECT_TRUE(cache.extra_state().empty());
      append_rows(cache, random_rows(2, 3, 77));
      append_rows(cache, random_rows(2, 1, 78));
      for (const auto* restored : {&from_state, &from_saved, &from_pair}) {
        auto& again = dynamic_cast<BatchQuantizedRotatingKVCache&>(**restored);
        EXPECT_EQ(again.keep(), keep);
        EXPECT_EQ(again.bits(), 4);
        append_rows(again, random_rows(2, 3, 77));
        append_rows(again, random_rows(2, 1, 78));
        EXPECT_TRUE(identical(again.saved_state(), cache.saved_state()));
      }
    }
  }
}

TEST(BatchQuantizedRotatingKVCache, X7OtherQuantisationsDoNotMergeExtendOrAppend) {
  QuantizedRotatingKVCache four(8, 0, 32, 4), eight(8, 0, 32, 8);
  const std::string error = error_of([&] { merge_caches({&four, &eight}); });
  EXPECT_EQ(error.substr(0, 16), "invalid_argument");
  BatchQuantizedRotatingKVCache cache(8, {0}, 0, 64, 8);
  EXPECT_EQ(error_of([&] { cache.extend(BatchQuantizedRotatingKVCache(8, {0}, 0, 64, 4)); }).substr(0, 16),
            "invalid_argument");
  EXPECT_EQ(error_of([&] { append_rows(cache, random_rows(1, 1, 1)); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([] { BatchQuantizedRotatingKVCache(8, {0}, 0, 64, 7); }).substr(0, 16), "invalid_argument");
  EXPECT_TRUE(cache.empty());
}

}  // namespace
}  // namespace reprise
