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

TEST(Masks, BadArgumentsAreRefused) {
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
