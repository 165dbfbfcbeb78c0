#include "reprise/cache/rotating_kv_cache.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/ring_model.h"
#include "tests/cache/ring_samples.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

// Capacity, told by the bytes.
int columns(const RotatingKVCache& cache) { return static_cast<int>(cache.nbytes() / (2 * (4 + 4) * 4)); }

TEST(RotatingKVCache, ANewOneIsEmpty) {
  RotatingKVCache cache(8, 4);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.nbytes(), 0u);
  EXPECT_EQ(cache.length(), 0);
  EXPECT_EQ(cache.position(), 0);
  EXPECT_EQ(cache.max_size(), 8);
  EXPECT_EQ(cache.keep(), 4);
  EXPECT_FALSE(cache.keeps_all_rows());
  EXPECT_TRUE(cache.is_trimmable());
  EXPECT_EQ(cache.trim(3), 0);
  EXPECT_FALSE(cache.temporal_columns());
  EXPECT_EQ(error_of([&] { cache.keys_and_values(); }).substr(0, 19), "failed_precondition");
  EXPECT_EQ(cache.class_name(), "RotatingKVCache");
  EXPECT_EQ(RotatingKVCache(8).keep(), 0);
}

TEST(RotatingKVCache, SizesThatMakeNoRingAreRefused) {
  EXPECT_EQ(error_of([] { RotatingKVCache(0); }),
            "invalid_argument: [RotatingKVCache] max_size must be at least 1, but got 0");
  EXPECT_EQ(error_of([] { RotatingKVCache(8, 8); }),
            "invalid_argument: [RotatingKVCache] keep must lie in [0, 7], but got 8");
  EXPECT_EQ(error_of([] { RotatingKVCache(8, -1); }).substr(0, 16), "invalid_argument");
}

TEST(RotatingKVCache, R1R2ColumnsLieAsTheRulesSay) {
  RotatingKVCache cache(8, 2);
  EXPECT_EQ(tokens_of(append(cache, range(0, 12))), range(0, 12));  // the first chunk as it is
  EXPECT_EQ(cache.idx(), 12);
  EXPECT_EQ(columns(cache), 12);
  EXPECT_EQ(cache.size(), 8);
  EXPECT_EQ(tokens_of(append(cache, {12})), (std::vector<int>{0, 1, 12, 7, 8, 9, 10, 11}));
  EXPECT_EQ(cache.idx(), 3);
  EXPECT_EQ(columns(cache), 8);
  EXPECT_EQ(tokens_of(append(cache, {13})), (std::vector<int>{0, 1, 12, 13, 8, 9, 10, 11}));
  EXPECT_EQ(tokens_of(*fork_of(cache)->temporal_columns()->tensors().data()),
            (std::vector<int>{0, 1, 8, 9, 10, 11, 12, 13}));
  EXPECT_EQ(tokens_of(append(cache, {14, 15})), (std::vector<int>{0, 1, 9, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(cache.idx(), 9);
  EXPECT_EQ(columns(cache), 9);
  EXPECT_EQ(tokens_of(cache.keys_and_values()), (std::vector<int>{0, 1, 9, 10, 11, 12, 13, 14, 15}));
}

TEST(RotatingKVCache, R2CapacityGrowsInStepsUpToMaxSize) {
  RotatingKVCache cache(600, 4);
  for (int i = 0; i < 1300; ++i) {
    mx::eval(std::get<DenseKV>(append(cache, {i})).keys);
    ASSERT_EQ(columns(cache), i < 256 ? 256 : i < 512 ? 512 : 600) << i;
  }
  RotatingKVCache chunked(600);
  append(chunked, range(0, 300));
  EXPECT_EQ(columns(chunked), 300);
  append(chunked, {300});
  EXPECT_EQ(columns(chunked), 556);
  EXPECT_EQ(chunked.trim(100), 100);
  append(chunked, range(201, 204));  // the unused columns go
  EXPECT_EQ(columns(chunked), 204);
}

TEST(RotatingKVCache, R3EveryMixOfChunksAndTokensShowsTheKeptAndTheMostRecent) {
  const std::vector<int> lengths = {1, 2, 4, 7};
  for (const int keep : {0, 2, 4}) {
    for (int script = 0; script < 4 * 4 * 4 * 4; ++script) {
      RotatingKVCache cache(5, keep);
      RingModel model{5, keep};
      for (int step = 0, rest = script; step < 4; ++step, rest /= 4) {
        const int length = lengths[static_cast<std::size_t>(rest % 4)];
        const std::vector<int> tokens = range(model.offset(), model.offset() + length);
        const std::vector<int> seen = tokens_of(append(cache, tokens)), wanted = model.append(tokens);
        ASSERT_EQ(length > 1 ? seen : sorted(seen), wanted) << "keep " << keep << " script " << script;
        ASSERT_EQ(cache.position(), model.offset());
        ASSERT_EQ(cache.length(), std::min(model.offset(), 5));
      }
    }
  }
}

TEST(RotatingKVCache, R3AnUpdateOfMoreThanTheWindowEvictsNothingOfItself) {
  for (const auto& fill : kRingFills) {
    for (const int keep : {0, 4}) {
      RotatingKVCache cache = filled_ring(8, keep, fill);
      const int offset = *cache.position();
      const std::vector<int> seen = tokens_of(append(cache, range(offset, offset + 11)));
      ASSERT_EQ(std::vector<int>(seen.end() - 11, seen.end()), range(offset, offset + 11));
      ASSERT_EQ(seen.size(), static_cast<std::size_t>(11 + std::min(offset, 7)));
    }
  }
}

TEST(RotatingKVCache, R4Z8TrimmingBelowTheWindowForgetsTheLastTokens) {
  for (const auto& fill : {std::vector<int>{5}, {1, 1, 1, 1, 1}, {2, 1, 2}}) {
    for (const int n : {0, 1, 4, 5, 14}) {
      RotatingKVCache cache = filled_ring(8, 2, fill);
      EXPECT_EQ(cache.max_trim(), 5);
      const int left = 5 - std::min(n, 5);
      EXPECT_EQ(cache.trim(n), 5 - left);
      EXPECT_FALSE(cache.empty());
      EXPECT_EQ(cache.position(), left);
      EXPECT_EQ(cache.idx(), left);
      EXPECT_EQ(cache.max_trim(), left);
      EXPECT_EQ(tokens_of(cache.keys_and_values()), range(0, left));
      EXPECT_EQ((*cache.saved_state().as_list())[0].as_array()->shape(2), left);
      RotatingKVCache fresh = filled_ring(8, 2, left > 0 ? std::vector<int>{left} : std::vector<int>{});
      EXPECT_EQ(std::get<mx::array>(cache.make_mask(3, {.return_array = true})).shape(), (mx::Shape{3, left + 3}));
      for (const int length : {1, 3, 1, 9, 1}) {
        const std::vector<int> tokens = range(*cache.position(), *cache.position() + length);
        ASSERT_EQ(sorted(tokens_of(append(cache, tokens))), sorted(tokens_of(append(fresh, tokens))));
      }
    }
  }
}

TEST(RotatingKVCache, R4Z8AtAndPastTheWindowNothingIsTrimmed) {
  for (const auto& fill : kRingFills) {
    RotatingKVCache cache = filled_ring(8, 2, fill);
    if (*cache.position() < 8) continue;
    const State before = cache.state();
    EXPECT_FALSE(cache.is_trimmable());
    EXPECT_EQ(cache.max_trim(), 0);
    for (const int n : {0, 1, 7, 8, 100}) EXPECT_EQ(cache.trim(n), 0);
    EXPECT_EQ(error_of([&] { cache.trim(-1); }),
              "invalid_argument: [RotatingKVCache::trim] n must not be negative, but got -1");
    EXPECT_TRUE(identical(cache.state(), before));
  }
}

// Positions are the tokens' numbers, so what a mask shows can be compared with the window's definition.
TEST(RotatingKVCache, R5M5MasksShowTheWindowByPosition) {
  for (const int keep : {0, 4}) {
    for (const auto& fill : kRingFills) {
      const RotatingKVCache cache = filled_ring(8, keep, fill);
      const int offset = *cache.position();
      for (const int N : {1, 2, 3, 7, 12}) {
        const std::vector<int> seen = tokens_of(append(*fork_of(cache), range(offset, offset + N)));
        const std::vector<int> in_order = sorted(seen);
        const auto width = static_cast<int>(seen.size());
        for (const std::optional<int> window : {std::optional<int>(), {1}, {3}, {5}, {7}, {8}, {12}}) {
          for (const bool return_array : {false, true}) {
            SCOPED_TRACE(testing::Message() << "keep " << keep << " offset " << offset << " N " << N << " window "
                                            << window.value_or(0) << " array " << return_array);
            const Mask mask = cache.make_mask(N, {.window = window, .return_array = return_array});
            const int w = window.value_or(8);
            std::optional<mx::array> array;
            if (std::holds_alternative<mx::array>(mask)) {
              array = mx::contiguous(std::get<mx::array>(mask));
              array->eval();
              ASSERT_EQ(array->dtype(), mx::bool_);
              ASSERT_EQ(array->shape(), N == 1 ? (mx::Shape{width}) : (mx::Shape{N, width}));
            } else {
              ASSERT_EQ(std::holds_alternative<NoMask>(mask), N == 1);
              ASSERT_FALSE(return_array && N > 1);
            }
            for (int i = 0; i < N; ++i) {
              for (int c = 0; c < width; ++c) {
                const int token = seen[static_cast<std::size_t>(c)], position = offset + i;
                // Kept columns count by their place before the others.
                const auto rank =
                    static_cast<int>(std::find(in_order.begin(), in_order.end(), token) - in_order.begin());
                const int query_rank = width - N + i;
                const bool by_rank = rank <= query_rank && rank > query_rank - w;
                const bool by_position = token <= position && token > position - w;
                if (token >= keep) {
                  ASSERT_EQ(by_rank, by_position);
                }
                const bool shown = array ? array->data<bool>()[i * width + c] : N == 1 || rank <= query_rank;
                ASSERT_EQ(shown, by_rank) << "query " << i << " column " << c;
              }
            }
          }
        }
      }
    }
  }
}

TEST(RotatingKVCache, M5OneTokenHasNoMaskUnlessItsWindowIsShorterThanTheRingAndFull) {
  const auto is_array = [](const RotatingKVCache& cache, std::optional<int> window) {
    return std::holds_alternative<mx::array>(cache.make_mask(1, {.window = window, .return_array = true}));
  };
  EXPECT_FALSE(is_array(filled_ring(8, 0, {20, 1}), std::nullopt));
  EXPECT_FALSE(is_array(filled_ring(8, 0, {20, 1}), 8));
  EXPECT_FALSE(is_array(filled_ring(8, 0, {4}), 5));
  EXPECT_TRUE(is_array(filled_ring(8, 0, {5}), 5));
  EXPECT_TRUE(is_array(filled_ring(8, 0, {20, 1}), 7));
  EXPECT_EQ(error_of([] { RotatingKVCache(8).make_mask(0); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([] { RotatingKVCache(8).make_mask(1, {.window = 0}); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([] { RotatingKVCache(8).make_mask(4, {.window = -1}); }).substr(0, 16), "invalid_argument");
}

TEST(RotatingKVCache, M8AnyChunkingGivesTheSameAttention) {
  const auto draw = [](std::uint64_t seed) {
    return mx::random::normal({1, 2, 30, 8}, mx::float32, 0.0f, 1.0f, mx::random::key(seed));
  };
  const mx::array queries = draw(1), keys = draw(2), values = draw(3);
  for (const std::optional<int> window : {std::optional<int>(), {5}}) {
    const auto attention = [&](const std::vector<int>& lengths) {
      RotatingKVCache cache(8);
      std::vector<mx::array> parts;
      int at = 0;
      for (const int length : lengths) {
        const auto columns = [&](const mx::array& x) { return mx::slice(x, {0, 0, at, 0}, {1, 2, at + length, 8}); };
        AttentionOptions options;
        options.scale = 0.3f;
        options.mask = cache.make_mask(length, {.window = window});
        parts.push_back(cache.attend(columns(queries), columns(keys), columns(values), options));
        at += length;
      }
      EXPECT_EQ(at, 30);
      return mx::concatenate(parts, 2);
    };
    const mx::array whole = attention({30});
    for (const auto& lengths : {std::vector<int>(30, 1), {7, 1, 1, 9, 1, 11}, {1, 1, 2, 1, 1, 3, 1, 20}}) {
      EXPECT_TRUE(mx::allclose(attention(lengths), whole, 1e-5, 1e-5).item<bool>()) << window.value_or(0);
    }
  }
}

TEST(RotatingKVCache, Z2ArraysHandedOutAreValues) {
  for (const auto& fill : kRingFills) {
    if (fill.empty()) continue;
    for (const bool evaluated : {false, true}) {
      RotatingKVCache cache = filled_ring(8, 2, fill);
      const int at = *cache.position();
      const Rows given = rows({at});
      const KeysValues one = cache.update_and_fetch(given.keys, given.values);
      const State state = cache.state();
      const std::vector<int> tokens = sorted(tokens_of(*fork_of(cache)->temporal_columns()->tensors().data()));
      const Mask mask = cache.make_mask(1, {.window = 3});
      const Offset offset = cache.offset();
      const auto before = fork_of(cache);
      if (evaluated) mx::eval(std::get<DenseKV>(one).keys, std::get<DenseKV>(one).values);
      for (int i = 0; i < 12; ++i) {
        append(cache, i == 6 ? std::vector<int>{500, 501, 502} : std::vector<int>{600 + i});
        if (evaluated) mx::eval(std::get<DenseKV>(cache.keys_and_values()).keys);
      }
      ASSERT_EQ(sorted(tokens_of(one)), tokens);
      ASSERT_EQ(tokens_of(DenseKV{given.keys, given.values}), std::vector<int>{at});
      ASSERT_TRUE(identical(before->state(), state));
      if (std::holds_alternative<mx::array>(mask)) {
        ASSERT_TRUE(identical(std::get<mx::array>(mask), std::get<mx::array>(before->make_mask(1, {.window = 3}))));
      }
      ASSERT_EQ(std::get<int>(offset), at + 1);
    }
  }
}

TEST(RotatingKVCache, Z2TheFirstChunkStaysTheCallersToo) {
  RotatingKVCache cache(8);
  const Rows given = rows(range(0, 8));
  mx::eval(given.keys, given.values);
  const KeysValues seen = cache.update_and_fetch(given.keys, given.values);
  for (int i = 0; i < 9; ++i) mx::eval(std::get<DenseKV>(append(cache, {100 + i})).keys);
  EXPECT_EQ(tokens_of(DenseKV{given.keys, given.values}), range(0, 8));
  EXPECT_EQ(tokens_of(seen), range(0, 8));
}

TEST(RotatingKVCache, Z3Z5MismatchesThrowAndChangeNothing) {
  for (const auto& fill : {std::vector<int>{5}, {20, 1, 1}}) {
    RotatingKVCache cache = filled_ring(8, 2, fill);
    const State before = cache.state();
    const std::vector<RowShape> wrong = {
        {.batch = 2}, {.heads = 1}, {.key_size = 3}, {.value_size = 5}, {.dtype = mx::float16}};
    for (const int count : {1, 2}) {
      for (const RowShape& shape : wrong) {
        EXPECT_EQ(error_of([&] { append(cache, range(5, 5 + count), shape); }).substr(0, 16), "invalid_argument");
      }
    }
    const Rows two = rows(range(5, 7)), three = rows(range(5, 8));
    EXPECT_NE(error_of([&] { cache.update_and_fetch(two.keys, three.values); }), "nothing");
    EXPECT_TRUE(identical(cache.state(), before));
    EXPECT_EQ(tokens_of(append(cache, {})), tokens_of(cache.keys_and_values()));
    EXPECT_TRUE(identical(cache.state(), before));
    append(cache, {*cache.position()});
  }
  RotatingKVCache cache(8);
  EXPECT_EQ(error_of([&] { append(cache, {}); }).substr(0, 16), "invalid_argument");
  EXPECT_TRUE(cache.empty());
}

TEST(RotatingKVCache, X1ForksAreIndependentAlsoWhenBothWrap) {
  for (const auto& fill : kRingFills) {
    if (fill.empty()) continue;
    for (const bool parent_first : {false, true}) {
      auto parent = std::make_unique<RotatingKVCache>(filled_ring(8, 2, fill));
      RingModel parent_model{8, 2, range(0, *parent->position())};
      RingModel child_model = parent_model;
      const auto child = fork_of(*parent);
      const auto write = [](RotatingKVCache& cache, RingModel& model, int token) {
        ASSERT_EQ(sorted(tokens_of(append(cache, {token}))), sorted(model.append({token})));
      };
      for (int i = 0; i < 10; ++i) {
        if (parent_first) write(*parent, parent_model, 100 + i);
        write(*child, child_model, 200 + i);
        if (!parent_first) write(*parent, parent_model, 100 + i);
      }
      parent.reset();
      write(*child, child_model, 300);
    }
  }
}

TEST(RotatingKVCache, K2ValuesMayBeOfAnotherSizeAndRowsMayBeSeveral) {
  for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    const RowShape shape{.batch = 3, .heads = 2, .key_size = 6, .value_size = 2, .dtype = dtype};
    RotatingKVCache cache(8, 2);
    append(cache, range(0, 10), shape);
    const auto seen = std::get<DenseKV>(append(cache, {10}, shape));
    EXPECT_EQ(seen.keys.shape(), (mx::Shape{3, 2, 8, 6}));
    EXPECT_EQ(seen.values.shape(), (mx::Shape{3, 2, 8, 2}));
    EXPECT_EQ(seen.keys.dtype(), dtype);
    EXPECT_EQ(sorted(tokens_of(KeysValues(seen))), (std::vector<int>{0, 1, 5, 6, 7, 8, 9, 10}));
  }
}

TEST(RotatingKVCache, ARingOfOneColumnShowsTheTokenItself) {
  RotatingKVCache cache(1);
  EXPECT_EQ(tokens_of(append(cache, {0})), std::vector<int>{0});
  EXPECT_EQ(tokens_of(append(cache, {1})), std::vector<int>{1});
  EXPECT_EQ(tokens_of(append(cache, {2, 3, 4})), (std::vector<int>{2, 3, 4}));
  EXPECT_EQ(tokens_of(append(cache, {5})), std::vector<int>{5});
}

}  // namespace
}  // namespace reprise
