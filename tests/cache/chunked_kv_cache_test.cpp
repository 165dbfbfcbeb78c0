#include "reprise/cache/chunked_kv_cache.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/registry.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr int kMaxInt = std::numeric_limits<int>::max();

// The cache shows tokens first … last - 1, each at its own position.
void expect_holds(const ChunkedKVCache& cache, int first, int last) {
  EXPECT_EQ(cache.start_position(), first);
  EXPECT_EQ(cache.position(), last);
  EXPECT_EQ(std::get<int>(cache.offset()), last);
  EXPECT_EQ(cache.length(), last - first);
  EXPECT_EQ(tokens_of(cache.keys_and_values()), range(first, last));
}

// As a model does: the front is dropped before each forward.
KeysValues forward(ChunkedKVCache& cache, const std::vector<int>& tokens) {
  cache.maybe_trim_front();
  return append(cache, tokens);
}

std::size_t bytes_of(int columns) { return static_cast<std::size_t>(columns) * 2 * 2 * 4 * sizeof(float); }

// The tokens that the query at each of positions from … to - 1 must see within its chunk, and those that `seen` offers
// from its chunk's start on.
void expect_chunks_visible(const std::vector<int>& seen, int from, int to, int chunk) {
  for (int position = from; position < to; ++position) {
    std::vector<int> offered;
    for (int token : seen) {
      if (token >= position / chunk * chunk && token <= position) offered.push_back(token);
    }
    EXPECT_EQ(offered, range(position / chunk * chunk, position + 1)) << "at position " << position;
  }
}

TEST(ChunkedKVCache, H1EveryQuerySeesItsWholeChunkHoweverTheTokensCome) {
  std::mt19937 random(3);
  for (const int chunk : {1, 3, 4, 8}) {
    for (int largest : {1, 2, chunk}) {
      ChunkedKVCache cache(chunk);
      int next = 0;
      while (next < 40) {
        const int count = std::uniform_int_distribution<int>(1, largest)(random);
        const std::vector<int> seen = tokens_of(forward(cache, range(next, next + count)));
        expect_chunks_visible(seen, next, next + count, chunk);
        next += count;
        EXPECT_LE(cache.length(), chunk + count);
      }
      expect_holds(cache, cache.start_position(), next);
    }
  }
}

TEST(ChunkedKVCache, H1FrontIsTrimmedByValidRowsNotByAllocatedColumns) {
  ChunkedKVCache cache(8);
  append(cache, range(0, 3));  // 256 columns are allocated
  cache.maybe_trim_front();
  expect_holds(cache, 0, 3);
  append(cache, range(3, 12));
  cache.maybe_trim_front();
  expect_holds(cache, 4, 12);
  EXPECT_EQ(cache.nbytes(), bytes_of(8));
  cache.maybe_trim_front();
  expect_holds(cache, 4, 12);
}

TEST(ChunkedKVCache, H1AnEmptyOneHasNoFront) {
  ChunkedKVCache cache(4);
  cache.maybe_trim_front();
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.nbytes(), 0u);
  EXPECT_EQ(cache.size(), 0);
}

TEST(ChunkedKVCache, H2GrowsByTheRowsItHolds) {
  ChunkedKVCache cache(300);
  append(cache, range(0, 1));
  EXPECT_EQ(cache.nbytes(), bytes_of(256));
  append(cache, range(1, 257));  // cut to 1 column, 256 more
  EXPECT_EQ(cache.nbytes(), bytes_of(257));
  append(cache, range(257, 310));
  EXPECT_EQ(cache.nbytes(), bytes_of(257 + 256));
  forward(cache, range(310, 311));
  EXPECT_EQ(cache.nbytes(), bytes_of(300 + 256));
  expect_holds(cache, 10, 311);
}

TEST(ChunkedKVCache, H2SlidesFarGrowsPastTheStepAndReloads) {
  auto cache = std::make_unique<ChunkedKVCache>(300);
  for (int at = 0; at < 2000; at += 97) {
    EXPECT_EQ(tokens_of(forward(*cache, range(at, at + 97))).back(), at + 96);
    const int start = cache->start_position(), end = *cache->position();
    for (const State& state : {cache->state(), cache->saved_state()}) {
      cache = ChunkedKVCache::from_state(state);
      expect_holds(*cache, start, end);
      EXPECT_EQ(cache->chunk_size(), 300);
    }
  }
  EXPECT_EQ(cache->saved_state().as_list()->at(0).as_array()->shape(2), cache->length());
}

TEST(ChunkedKVCache, H3MasksFollowTheStoredRows) {
  ChunkedKVCache cache(4);
  EXPECT_TRUE(std::holds_alternative<Causal>(cache.make_mask(5)));
  append(cache, range(0, 9));
  cache.maybe_trim_front();
  EXPECT_TRUE(std::holds_alternative<NoMask>(cache.make_mask(1)));
  EXPECT_TRUE(std::holds_alternative<Causal>(cache.make_mask(2)));
  EXPECT_EQ(std::get<mx::array>(cache.make_mask(2, {.return_array = true})).shape(), (mx::Shape{2, 6}));
  mx::array window = mx::astype(std::get<mx::array>(cache.make_mask(1, {.window = 3})), mx::int32);
  EXPECT_TRUE(identical(window, mx::array({0, 0, 1, 1, 1}, {1, 5}, mx::int32)));
  EXPECT_EQ(error_of([&] { cache.make_mask(0); }).substr(0, 16), "invalid_argument");
}

TEST(ChunkedKVCache, Z8TrimForgetsStoredRowsOnly) {
  for (const auto& [n, trimmed] : std::vector<std::pair<int, int>>{{0, 0}, {1, 1}, {3, 3}, {4, 4}, {13, 4}}) {
    ChunkedKVCache cache(4);
    append(cache, range(0, 11));
    cache.maybe_trim_front();
    EXPECT_TRUE(cache.is_trimmable());
    EXPECT_EQ(cache.trim(n), trimmed);
    expect_holds(cache, 7, 11 - trimmed);
    EXPECT_FALSE(cache.empty());
    append(cache, range(11 - trimmed, 15));
    expect_holds(cache, 7, 15);
  }
  ChunkedKVCache cache(4);
  append(cache, range(0, 6));
  EXPECT_EQ(error_of([&] { cache.trim(-1); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(cache.trim(100), 6);
  expect_holds(cache, 0, 0);
}

// What is left must hold the chunk of the next token from its start.
TEST(ChunkedKVCache, Z8MaxTrimIsTheLargestThatLeavesTheNextTokensChunkWhole) {
  for (const int chunk : {1, 3, 4}) {
    for (int total = 1; total < 20; ++total) {
      for (const bool slid : {false, true}) {
        ChunkedKVCache cache(chunk);
        append(cache, range(0, total));
        if (slid) cache.maybe_trim_front();
        int largest = cache.start_position() == 0 ? total : 0;
        for (int n = 0; n <= cache.length(); ++n) {
          if (cache.start_position() <= (total - n) / chunk * chunk) largest = n;
        }
        EXPECT_EQ(cache.max_trim(), largest) << "chunk " << chunk << ", " << total << " tokens";
      }
    }
  }
  EXPECT_FALSE(ChunkedKVCache(4).keeps_all_rows());
}

TEST(ChunkedKVCache, Z3CallsThatThrowChangeNothing) {
  for (const int chunk : {0, -1}) {
    EXPECT_EQ(error_of([&] { ChunkedKVCache cache(chunk); }),
              "invalid_argument: [ChunkedKVCache] chunk_size must be at least 1, but got " + std::to_string(chunk));
  }
  ChunkedKVCache cache(4);
  append(cache, range(0, 9));
  cache.maybe_trim_front();
  const State before = cache.state();
  for (const RowShape& shape : {RowShape{.batch = 2}, {.heads = 1}, {.value_size = 5}, {.dtype = mx::float16}}) {
    EXPECT_EQ(error_of([&] { append(cache, {5}, shape); }).substr(0, 16), "invalid_argument");
  }
  EXPECT_EQ(error_of([&] { cache.to_quantized(); }).substr(0, 11), "unsupported");
  EXPECT_TRUE(identical(cache.state(), before));
  EXPECT_EQ(tokens_of(append(cache, {})), range(5, 9));
  append(cache, {9});
  expect_holds(cache, 5, 10);
}

TEST(ChunkedKVCache, Z2ArraysHandedOutAreValues) {
  ChunkedKVCache cache(4);
  const KeysValues seen = append(cache, range(0, 6));
  const State state = cache.state();
  for (int i = 6; i < 14; ++i) forward(cache, {i});
  cache.trim(2);
  append(cache, {300, 301});
  EXPECT_EQ(tokens_of(seen), range(0, 6));
  EXPECT_EQ(tokens_of(ChunkedKVCache::from_state(state)->keys_and_values()), range(0, 6));
}

TEST(ChunkedKVCache, Z7AfterAFrontTrimNoLargerBufferIsHeld) {
  ChunkedKVCache cache(4);
  append(cache, range(0, 20'000));
  cache.maybe_trim_front();
  DenseKV left = std::get<DenseKV>(cache.keys_and_values());
  mx::eval(left.keys, left.values);
  EXPECT_LE(left.keys.buffer_size(), 32'768u);
  EXPECT_EQ(tokens_of(left), range(19'996, 20'000));
}

TEST(ChunkedKVCache, P7TheLegacyPairRestoresThePosition) {
  ChunkedKVCache cache(4);
  append(cache, range(0, 11));
  cache.maybe_trim_front();
  cache.trim(1);
  const auto restored = cache_from_legacy("ChunkedKVCache", cache.legacy_state(), cache.legacy_meta());
  auto& chunked = dynamic_cast<ChunkedKVCache&>(*restored);
  expect_holds(chunked, 7, 10);
  EXPECT_EQ(chunked.chunk_size(), 4);
  forward(chunked, {10, 11});
  forward(chunked, {12});
  expect_holds(chunked, 8, 13);
}

TEST(ChunkedKVCache, StatesThatCannotBeAreRefused) {
  const Rows five = rows(range(0, 5)), four = rows(range(0, 4));
  const State keys(five.keys), values(five.values);
  const State::List bad[] = {
      {},
      {keys, values, State(5), State(4)},
      {keys, values, State(6), State(4), State(0)},
      {keys, values, State(1), State(4), State(2)},
      {keys, values, State(8), State(4), State(2)},
      {keys, values, State(-1), State(4), State(-1)},
      {keys, values, State(5), State(0), State(0)},
      {keys, values, State(kMaxInt), State(4), State(kMaxInt)},
      {keys, State(four.values), State(4), State(4), State(0)},
      {State(), State(), State(4), State(4), State(0)},
      {State(), State(), State(4), State(4), State(4)},
  };
  for (const State::List& state : bad) {
    EXPECT_EQ(error_of([&] { ChunkedKVCache::from_state(state); }).substr(0, 12), "corrupt_data");
  }
  EXPECT_TRUE(ChunkedKVCache::from_state(ChunkedKVCache(4).state())->empty());
  const State pair(State::List{keys, values});
  for (const Meta::List& meta : {Meta::List{"4"}, {"4", "x"}, {"0", "1"}, {"4", "-1"}, {"4", "2147483647"}}) {
    EXPECT_EQ(error_of([&] { ChunkedKVCache::from_legacy(pair, meta); }).substr(0, 12), "corrupt_data");
  }
}

}  // namespace
}  // namespace reprise
