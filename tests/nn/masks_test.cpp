#include "reprise/nn/masks.h"

#include <gtest/gtest.h>

#include <limits>

#include "reprise/base/error.h"
#include "tests/nn/arrays.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

bool visible(int query, int key, int last, std::optional<int> window, int left, int right) {
  return key <= query && (!window || key > query - *window) && key < last - right && key >= left;
}

TEST(Masks, M1CausalMaskEqualsBruteForce) {
  for (int N : {1, 2, 5}) {
    for (int offset : {0, 1, 6}) {
      for (std::optional<int> window : {std::optional<int>{}, std::optional<int>{1}, std::optional<int>{3}}) {
        const auto mask = create_causal_mask(N, offset, {.window = window});
        ASSERT_EQ(mask.shape(), (mx::Shape{N, offset + N}));
        const auto got = test::bools(mask);
        for (int i = 0; i < N; ++i) {
          for (int k = 0; k < offset + N; ++k) {
            EXPECT_EQ(got[static_cast<std::size_t>(i * (offset + N) + k)],
                      visible(offset + i, k, offset + N, window, 0, 0))
                << "N=" << N << " offset=" << offset << " i=" << i << " k=" << k;
          }
        }
      }
    }
  }
}

TEST(Masks, M1PaddingsHideEachRowsOwnColumns) {
  const int N = 4;
  const int offset = 2;
  const std::vector<int> left = {0, 3, 1};
  const std::vector<int> right = {2, 0, 1};
  const auto mask = create_causal_mask(N, offset,
                                       {.window = 4,
                                        .right_padding = mx::array(right.data(), {3}, mx::int32),
                                        .left_padding = mx::array(left.data(), {3}, mx::int32)});
  ASSERT_EQ(mask.shape(), (mx::Shape{3, 1, N, offset + N}));
  const auto got = test::bools(mask);
  std::size_t at = 0;
  for (std::size_t b = 0; b < 3; ++b) {
    for (int i = 0; i < N; ++i) {
      for (int k = 0; k < offset + N; ++k, ++at) {
        EXPECT_EQ(got[at], visible(offset + i, k, offset + N, 4, left[b], right[b])) << b << " " << i << " " << k;
      }
    }
  }
}

TEST(Masks, M4FullHistoryMasksEqualBruteForceInEveryCaseOfTheTable) {
  for (const int N : {1, 2, 5}) {
    for (const int stored : {0, 1, 6}) {
      for (const bool return_array : {false, true}) {
        for (const std::optional<int> window : {std::optional<int>(), std::optional<int>(1), std::optional<int>(3)}) {
          SCOPED_TRACE(std::to_string(N) + " " + std::to_string(stored) + " " + std::to_string(window.value_or(0)));
          const Mask mask = create_attention_mask(N, stored, {return_array, window});
          const auto* array = std::get_if<mx::array>(&mask);
          if (!window && N == 1) {
            EXPECT_TRUE(std::holds_alternative<NoMask>(mask));
          } else if (!window && !return_array) {
            EXPECT_TRUE(std::holds_alternative<Causal>(mask));
          } else {
            ASSERT_NE(array, nullptr) << "a decode step must not see more than the window";
            ASSERT_EQ(array->shape(), (mx::Shape{N, stored + N}));
            const auto got = test::bools(*array);
            for (int at = 0; at < N * (stored + N); ++at) {
              EXPECT_EQ(got[static_cast<std::size_t>(at)],
                        visible(stored + at / (stored + N), at % (stored + N), stored + N, window, 0, 0));
            }
          }
        }
      }
    }
  }
}

TEST(Masks, M6BatchMasksHideEachRowsPaddingInPrefillAndDecode) {
  const std::vector<int> left = {0, 2, 9};  // the last row has no real column yet
  for (const int N : {1, 3}) {
    for (const int stored : {0, 4}) {
      for (const std::optional<int> window : {std::optional<int>(), std::optional<int>(2)}) {
        SCOPED_TRACE(std::to_string(N) + " " + std::to_string(stored) + " " + std::to_string(window.value_or(0)));
        const auto mask =
            create_causal_mask(N, stored, {.window = window, .left_padding = mx::array(left.data(), {3}, mx::int32)});
        ASSERT_EQ(mask.shape(), (mx::Shape{3, 1, N, stored + N}));
        const auto got = test::bools(mask);
        const int columns = stored + N;
        for (int at = 0; at < 3 * N * columns; ++at) {
          const int b = at / (N * columns);
          EXPECT_EQ(got[static_cast<std::size_t>(at)], visible(stored + at / columns % N, at % columns, columns, window,
                                                               left[static_cast<std::size_t>(b)], 0))
              << at;
        }
      }
    }
  }
}

TEST(Masks, M6PaddingsThatAreNoListAreRefused) {
  EXPECT_THROW(create_causal_mask(2, 0, {.left_padding = mx::zeros({2, 1}, mx::int32)}), Error);
  EXPECT_THROW(create_causal_mask(2, 0, {.right_padding = mx::zeros({}, mx::int32)}), Error);
}

TEST(Masks, H3ChunksBeginAtTheMultiplesOfTheirSizeInEachRow) {
  constexpr int kChunk = 4;
  const std::vector<int> first = {0, 3, 9, 16};
  for (int N : {1, 2, 7}) {
    for (int stored : {0, 1, 6}) {
      const int columns = stored + N;
      const auto expected = [&](int row, int query, int key) {
        const int start = first[static_cast<std::size_t>(row)];
        return (start + stored + query) / kChunk == (start + key) / kChunk;
      };
      const auto rows = create_same_chunk_mask(N, columns, mx::array(first.data(), {4}, mx::int32), kChunk);
      ASSERT_EQ(rows.shape(), (mx::Shape{4, 1, N, columns}));
      const auto all = test::bools(rows);
      for (int row = 0; row < 4; ++row) {
        const auto mask = create_same_chunk_mask(N, columns, first[static_cast<std::size_t>(row)], kChunk);
        ASSERT_EQ(mask.shape(), (mx::Shape{N, columns}));
        const auto one = test::bools(mask);
        for (int at = 0; at < N * columns; ++at) {
          const bool same = expected(row, at / columns, at % columns);
          EXPECT_EQ(one[static_cast<std::size_t>(at)], same);
          EXPECT_EQ(all[static_cast<std::size_t>(row * N * columns + at)], same);
        }
      }
    }
  }
}

TEST(Masks, BadArgumentsAreRefused) {
  EXPECT_THROW(create_same_chunk_mask(0, 1, 0, 4), Error);
  EXPECT_THROW(create_same_chunk_mask(2, 1, 0, 4), Error);
  EXPECT_THROW(create_same_chunk_mask(1, 1, 0, 0), Error);
  EXPECT_THROW(create_causal_mask(0), Error);
  EXPECT_THROW(create_causal_mask(1, -1), Error);
  EXPECT_THROW(create_causal_mask(1, 0, {.window = 0}), Error);
  EXPECT_THROW(create_causal_mask(1, std::numeric_limits<int>::max()), Error);
  EXPECT_THROW(create_attention_mask(2, 0, {.window = -1}), Error);
  EXPECT_THROW(create_attention_mask_without_cache(0), Error);
}

TEST(Masks, M2ChoiceOfKindFollowsTheTables) {
  EXPECT_TRUE(std::holds_alternative<NoMask>(create_attention_mask(1, 9)));
  EXPECT_TRUE(std::holds_alternative<Causal>(create_attention_mask(2, 9)));
  EXPECT_TRUE(std::holds_alternative<mx::array>(create_attention_mask(2, 9, {.return_array = true})));
  EXPECT_TRUE(std::holds_alternative<mx::array>(create_attention_mask(1, 9, {.window = 4})));
  EXPECT_TRUE(
      std::holds_alternative<NoMask>(create_attention_mask_without_cache(1, {.return_array = true, .window = 1})));
  EXPECT_TRUE(std::holds_alternative<Causal>(create_attention_mask_without_cache(4, {.window = 4})));
  EXPECT_TRUE(std::holds_alternative<mx::array>(create_attention_mask_without_cache(5, {.window = 4})));
}

}  // namespace
}  // namespace reprise
