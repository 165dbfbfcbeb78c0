#include "reprise/cache/token_buffer.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/live_memory.h"

namespace reprise {
namespace {

using cache_test::active_bytes;

namespace mx = mlx::core;
using cache_test::error_of;
using cache_test::range;

Tokens host(mx::array tokens) {
  EXPECT_EQ(tokens.dtype(), mx::int32);
  EXPECT_EQ(tokens.ndim(), 1u);
  if (tokens.size() == 0) return {};
  tokens = mx::contiguous(tokens);
  tokens.eval();
  return {tokens.data<TokenId>(), tokens.data<TokenId>() + tokens.size()};
}

TEST(TokenBuffer, T1CapacityIsRoundedUpTo256) {
  for (const auto& [count, capacity] : std::vector<std::pair<int, int>>{{1, 256}, {255, 256}, {256, 256}, {257, 512}}) {
    TokenBuffer buffer;
    EXPECT_EQ(host(buffer.update_and_fetch(range(0, count))), range(0, count));
    EXPECT_EQ(buffer.state().shape(0), capacity);
    EXPECT_EQ(buffer.size(), count);
    EXPECT_EQ(host(buffer.tokens()), range(0, count));
    EXPECT_EQ(TokenBuffer(range(0, count)).state().shape(0), capacity);
  }
}

TEST(TokenBuffer, T1AppendReturnsAllTokensSoFar) {
  for (const int first : {0, 1, 254, 255, 256, 257}) {
    for (const int added : {0, 1, 2, 255, 256, 257}) {
      TokenBuffer buffer(range(0, first));
      EXPECT_EQ(host(buffer.tokens()), range(0, first));
      EXPECT_EQ(host(buffer.update_and_fetch(range(first, first + added))), range(0, first + added));
      EXPECT_EQ(host(buffer.update_and_fetch(range(first + added, first + added + 1))), range(0, first + added + 1));
      EXPECT_EQ(buffer.state().shape(0), (first + added + 1 + 255) / 256 * 256);
    }
  }
}

TEST(TokenBuffer, T1TakesIdsThatAreOnTheDevice) {
  TokenBuffer buffer(range(0, 3));
  EXPECT_EQ(host(buffer.update_and_fetch(mx::arange(3, 6, mx::uint32))), range(0, 6));
  EXPECT_EQ(host(buffer.update_and_fetch(mx::array({6, 7}, mx::int64))), range(0, 8));
}

TEST(TokenBuffer, Z3CallsThatThrowChangeNothing) {
  TokenBuffer buffer(range(0, 3));
  EXPECT_EQ(error_of([&] { buffer.update_and_fetch(mx::zeros({2, 2}, mx::int32)); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { buffer.update_and_fetch(mx::zeros({2}, mx::float32)); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(host(buffer.tokens()), range(0, 3));
}

TEST(TokenBuffer, Z2ArraysHandedOutAreValues) {
  TokenBuffer buffer;
  const mx::array first = buffer.update_and_fetch(range(0, 10));
  const mx::array state = buffer.state();
  mx::eval(first, state);
  for (int i = 10; i < 300; ++i) buffer.update_and_fetch(Tokens{i}).eval();
  EXPECT_EQ(host(first), range(0, 10));
  EXPECT_EQ(host(mx::slice(state, {0}, {10})), range(0, 10));
  EXPECT_EQ(host(mx::slice(state, {10}, {256})), Tokens(246, 0));
}

TEST(TokenBuffer, Z6ThousandsOfStepsThatNobodyReadsKeepMemoryFlat) {
  TokenBuffer buffer(range(0, 100));
  buffer.tokens().eval();
  const std::size_t limit = active_bytes() + 200'000;
  for (int i = 0; i < 5000; ++i) {
    buffer.update_and_fetch(Tokens{i});
    ASSERT_LE(active_bytes(), limit) << "at step " << i;
  }
  const Tokens all = host(buffer.tokens());
  EXPECT_EQ(all.size(), 5100u);
  EXPECT_EQ(all.back(), 4999);
}

}  // namespace
}  // namespace reprise
