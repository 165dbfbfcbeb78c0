// A row of a batch attends as it would alone: positions, masks and padding, through AttentionCache::attend.
#include <gtest/gtest.h>

#include <algorithm>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr int kHeads = 4, kKvHeads = 2, kSize = 8, kPrompt = 0;
const std::vector<int> kLengths = {3, 9, 1, 6};

struct Inputs {
  mx::array queries, keys, values;

  int length() const { return queries.shape(2); }
};

Inputs random_inputs(int row, int step, int length) {
  const auto draw = [&](int heads, std::uint64_t which) {
    const auto seed = static_cast<std::uint64_t>(row) * 1000 + static_cast<std::uint64_t>(step) * 10 + which;
    return mx::random::normal({1, heads, length, kSize}, mx::float32, 0.0f, 1.0f, mx::random::key(seed));
  };
  return {draw(kHeads, 1), draw(kKvHeads, 2), draw(kKvHeads, 3)};
}

template <typename Change>
Inputs each(const Inputs& inputs, const Change& change) {
  return {change(inputs.queries), change(inputs.keys), change(inputs.values)};
}

mx::array columns(const mx::array& x, int begin, int end) {
  return mx::slice(x, {0, 0, begin, 0}, {x.shape(0), x.shape(1), end, x.shape(3)});
}

mx::array row(const mx::array& x, int index) {
  return mx::slice(x, {index, 0, 0, 0}, {index + 1, x.shape(1), x.shape(2), x.shape(3)});
}

// Filler is large, so that a token that attended to it would show.
Inputs padded(const Inputs& inputs, int before, int after) {
  return each(inputs, [&](const mx::array& x) {
    return mx::pad(x, {{0, 0}, {0, 0}, {before, after}, {0, 0}}, mx::array(30.0f));
  });
}

Inputs stacked(const std::vector<Inputs>& rows) {
  std::vector<mx::array> queries, keys, values;
  for (const Inputs& inputs : rows) {
    queries.push_back(inputs.queries);
    keys.push_back(inputs.keys);
    values.push_back(inputs.values);
  }
  return {mx::concatenate(queries, 0), mx::concatenate(keys, 0), mx::concatenate(values, 0)};
}

Rope make_rope() {
  RopeOptions options;
  options.dims = kSize;
  return Rope(options);
}

mx::array attend(AttentionCache& cache, const Inputs& inputs, const Rope& rope, std::optional<int> window) {
  AttentionOptions options;
  options.rope = &rope;
  options.scale = 0.3f;
  options.mask = cache.make_mask(inputs.length(), {.window = window});
  return cache.attend(inputs.queries, inputs.keys, inputs.values, options);
}

void expect_close(const mx::array& got, const mx::array& want, const std::string& where) {
  ASSERT_EQ(got.shape(), want.shape()) << where;
  EXPECT_TRUE(mx::allclose(got, want, 1e-5, 1e-5).item<bool>()) << where;
}

void expect_finite(const mx::array& x) { EXPECT_TRUE(mx::all(mx::isfinite(x)).item<bool>()); }

enum class Padding { left, right };

// A prompt of unequal lengths, four decode steps, another such prompt, two decode steps.
void expect_rows_as_alone(Padding padding, std::optional<int> window) {
  const Rope rope = make_rope();
  const auto count = static_cast<int>(kLengths.size());
  const int longest = *std::max_element(kLengths.begin(), kLengths.end());
  std::vector<int> fill;
  for (const int length : kLengths) fill.push_back(longest - length);

  BatchKVCache batch(padding == Padding::left ? fill : std::vector<int>(kLengths.size(), 0));
  std::vector<KVCache> alone(kLengths.size());
  const auto prompt = [&](int step, bool from_left) {
    std::vector<Inputs> rows, whole;
    for (int b = 0; b < count; ++b) {
      const auto at = static_cast<std::size_t>(b);
      rows.push_back(random_inputs(b, step, kLengths[at]));
      whole.push_back(padded(rows.back(), from_left ? fill[at] : 0, from_left ? 0 : fill[at]));
    }
    if (!from_left) batch.prepare({.lengths = kLengths, .right_padding = fill});
    // In two chunks: a row may be filler only in one of them.
    const Inputs all = stacked(whole);
    std::vector<mx::array> parts;
    for (const auto& [begin, end] : {std::pair(0, 4), std::pair(4, longest)}) {
      const auto cut = [&, first = begin, last = end](const mx::array& x) { return columns(x, first, last); };
      parts.push_back(attend(batch, each(all, cut), rope, window));
    }
    batch.finalize();
    const mx::array got = mx::concatenate(parts, 2);
    expect_finite(got);
    for (int b = 0; b < count; ++b) {
      const auto at = static_cast<std::size_t>(b);
      const mx::array want = attend(alone[at], rows[at], rope, window);
      const int begin = from_left ? fill[at] : 0;
      expect_close(columns(row(got, b), begin, begin + kLengths[at]), want, "prompt of row " + std::to_string(b));
    }
  };
  const auto decode = [&](int step) {
    std::vector<Inputs> rows;
    for (int b = 0; b < count; ++b) rows.push_back(random_inputs(b, step, 1));
    const mx::array got = attend(batch, stacked(rows), rope, window);
    for (int b = 0; b < count; ++b) {
      const auto at = static_cast<std::size_t>(b);
      expect_close(row(got, b), attend(alone[at], rows[at], rope, window), "decode of row " + std::to_string(b));
    }
  };
  prompt(kPrompt, padding == Padding::left);
  for (int step = 1; step <= 4; ++step) decode(step);
  prompt(5, false);
  for (int step = 6; step <= 7; ++step) decode(step);

  // A row that comes out goes on as if it had always been alone.
  const auto extracted = batch.extract(2);
  const Inputs next = random_inputs(2, 8, 1);
  expect_close(attend(dynamic_cast<AttentionCache&>(*extracted), next, rope, window),
               attend(alone[2], next, rope, window), "extracted row");
}

TEST(BatchAttend, B7B8B9LeftPaddedRowsAttendAsAlone) { expect_rows_as_alone(Padding::left, std::nullopt); }

TEST(BatchAttend, B3B9RightPaddedRowsAttendAsAlone) { expect_rows_as_alone(Padding::right, std::nullopt); }

TEST(BatchAttend, M6WindowsCountARowsOwnTokens) {
  expect_rows_as_alone(Padding::left, 4);
  expect_rows_as_alone(Padding::right, 4);
}

TEST(BatchAttend, B9RowsThatAreAllFillerAreFinite) {
  const Rope rope = make_rope();
  BatchKVCache batch({5, 0});
  const mx::array got =
      attend(batch, stacked({padded(random_inputs(0, 0, 1), 3, 0), random_inputs(1, 0, 4)}), rope, std::nullopt);
  expect_finite(got);
  expect_finite(attend(batch, stacked({random_inputs(0, 1, 1), random_inputs(1, 1, 1)}), rope, std::nullopt));
}

TEST(BatchAttend, Z3ACallThatThrowsHasStoredNothing) {
  BatchKVCache batch({1, 0});
  batch.prepare({.right_padding = {1, 0}});
  const Inputs inputs = stacked({random_inputs(0, 0, 4), random_inputs(1, 0, 4)});
  AttentionOptions bad;
  bad.mask = mx::zeros({5, 7}, mx::bool_);
  EXPECT_ANY_THROW(batch.attend(inputs.queries, inputs.keys, inputs.values, bad));
  EXPECT_TRUE(batch.empty());
  EXPECT_EQ(batch.left_padding(), (std::vector<int>{1, 0}));
  EXPECT_EQ(batch.right_padding(), (std::vector<int>{1, 0}));
}

}  // namespace
}  // namespace reprise
