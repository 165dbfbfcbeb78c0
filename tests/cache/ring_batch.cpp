#include "tests/cache/ring_batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "mlx/ops.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"

namespace reprise::cache_test {

namespace mx = mlx::core;

namespace {

std::vector<int> first_features(const mx::array& x, float sign) {
  const mx::array one = mx::slice(x, {0, 0, 0, 0}, {1, 1, x.shape(2), 1});
  mx::array dense = mx::contiguous(mx::astype(one, mx::float32));
  dense.eval();
  std::vector<int> tokens;
  for (int i = 0; i < x.shape(2); ++i) tokens.push_back(static_cast<int>(std::lround(sign * dense.data<float>()[i])));
  return tokens;
}

// Whether query `query` of N sees column `column` of `columns`.
std::vector<std::vector<bool>> visibility(const Mask& mask, int N, int columns, int row) {
  std::vector<std::vector<bool>> result(static_cast<std::size_t>(N),
                                        std::vector<bool>(static_cast<std::size_t>(columns)));
  std::optional<mx::array> array;
  if (const auto* given = std::get_if<mx::array>(&mask)) {
    mx::array own = *given;
    if (own.ndim() == 4) own = mx::slice(own, {row, 0, 0, 0}, {row + 1, 1, N, own.shape(3)});
    EXPECT_EQ(own.size(), static_cast<std::size_t>(N * columns));
    array = mx::contiguous(own);
    array->eval();
  }
  for (int query = 0; query < N; ++query) {
    for (int column = 0; column < columns; ++column) {
      result[static_cast<std::size_t>(query)][static_cast<std::size_t>(column)] =
          array ? array->data<bool>()[query * columns + column]
                : std::holds_alternative<NoMask>(mask) || column <= columns - N + query;
    }
  }
  return result;
}

}  // namespace

std::vector<int> columns_of(const KeysValues& keys_values, int row) {
  const DenseKV dense = row_of(keys_values, row);
  std::vector<int> tokens = first_features(dense.keys, 1.0f);
  EXPECT_EQ(first_features(dense.values, -1.0f), tokens);
  return tokens;
}

TokenRows seen(const KeysValues& keys_values, const Mask& mask, int N, int row) {
  const std::vector<int> tokens = columns_of(keys_values, row);
  TokenRows result;
  for (const auto& visible : visibility(mask, N, static_cast<int>(tokens.size()), row)) {
    std::vector<int> found;
    for (std::size_t column = 0; column < tokens.size(); ++column) {
      if (visible[column]) found.push_back(tokens[column]);
    }
    std::sort(found.begin(), found.end());
    result.push_back(std::move(found));
  }
  return result;
}

std::vector<int> retained(const internal::RingCache& cache) {
  const auto columns = cache.temporal_columns();
  return columns ? columns_of(columns->keys_values(), 0) : std::vector<int>{};
}

std::unique_ptr<internal::BatchRingCache> as_ring_batch(std::unique_ptr<LayerCache> cache) {
  return std::unique_ptr<internal::BatchRingCache>(&dynamic_cast<internal::BatchRingCache&>(*cache.release()));
}

std::unique_ptr<internal::RingCache> as_ring(std::unique_ptr<LayerCache> cache) {
  return std::unique_ptr<internal::RingCache>(&dynamic_cast<internal::RingCache&>(*cache.release()));
}

RingPair RingPair::fork() const {
  RingPair copy{as_ring_batch(batch->fork()), {}};
  for (const auto& solo : solos) copy.solos.push_back(as_ring(solo->fork()));
  return copy;
}

RingPair merged(std::vector<std::unique_ptr<internal::RingCache>> solos) {
  std::vector<const LayerCache*> caches;
  for (const auto& solo : solos) caches.push_back(solo.get());
  return {as_ring_batch(merge_caches(caches)), std::move(solos)};
}

void update_and_compare(RingPair& pair, const TokenRows& tokens, int columns, std::optional<int> window,
                        const RowShape& shape, const std::vector<int>& left) {
  TokenRows filled = tokens;
  for (std::size_t row = 0; row < filled.size(); ++row) {
    if (!left.empty()) filled[row].insert(filled[row].begin(), static_cast<std::size_t>(left[row]), kFiller);
    filled[row].resize(static_cast<std::size_t>(columns), kFiller);
  }
  const Mask mask = pair.batch->make_mask(columns, {.window = window});
  const Rows added = batch_rows(filled, shape, columns);
  const KeysValues all = pair.batch->update_and_fetch(added.keys, added.values);
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    const auto count = static_cast<int>(tokens[row].size());
    if (count == 0) continue;
    internal::RingCache& solo = *pair.solos[row];
    const Mask solo_mask = solo.make_mask(count, {.window = window});
    const TokenRows expected = seen(append(solo, tokens[row], shape), solo_mask, count, 0);
    TokenRows got = seen(all, mask, columns, static_cast<int>(row));
    const auto begin = got.begin() + (left.empty() ? 0 : left[row]);
    got = TokenRows(begin, begin + count);
    ASSERT_EQ(got, expected) << "row " << row;
  }
}

std::vector<int> of_row(int row, int begin, int end) {
  return range(kFirstToken + 1000 * row + begin, kFirstToken + 1000 * row + end);
}

std::vector<std::unique_ptr<internal::RingCache>> ring_singles(int max_size, int keep,
                                                               const std::vector<std::vector<int>>& lengths) {
  std::vector<std::unique_ptr<internal::RingCache>> result;
  for (std::size_t row = 0; row < lengths.size(); ++row) {
    result.push_back(std::make_unique<RotatingKVCache>(max_size, keep));
    int at = 0;
    for (const int length : lengths[row]) {
      append(*result.back(), of_row(static_cast<int>(row), at, at + length), kRingShape);
      at += length;
    }
  }
  return result;
}

RingPair left_padded_pair(int max_size, const std::vector<int>& padding, int columns, int keep) {
  RingPair pair{std::make_unique<BatchRotatingKVCache>(max_size, padding, keep),
                ring_singles(max_size, keep, std::vector<std::vector<int>>(padding.size()))};
  TokenRows tokens;
  for (std::size_t row = 0; row < padding.size(); ++row) {
    tokens.push_back(of_row(static_cast<int>(row), 0, columns - padding[row]));
  }
  update_and_compare(pair, tokens, columns, {}, kRingShape, padding);
  return pair;
}

void go_on(RingPair& pair, const std::vector<int>& counts, int columns) {
  TokenRows tokens;
  for (std::size_t row = 0; row < counts.size(); ++row) {
    const int at = *pair.solos[row]->position();
    tokens.push_back(of_row(static_cast<int>(row), at, at + counts[row]));
  }
  ASSERT_NO_FATAL_FAILURE(update_and_compare(pair, tokens, columns));
}

void decode(RingPair& pair, int steps) {
  for (int i = 0; i < steps; ++i) ASSERT_NO_FATAL_FAILURE(go_on(pair, std::vector<int>(pair.solos.size(), 1), 1));
}

std::string code_of(const std::string& error) { return error.substr(0, error.find(':')); }

void expect_extracts(const RingPair& pair) {
  for (std::size_t row = 0; row < pair.solos.size(); ++row) {
    const internal::RingCache& solo = *pair.solos[row];
    const auto single = as_ring(pair.batch->extract(static_cast<int>(row)));
    ASSERT_EQ(single->class_name(), solo.class_name());
    ASSERT_EQ(single->position(), solo.position());
    ASSERT_EQ(single->max_size(), solo.max_size());
    ASSERT_EQ(single->keep(), solo.keep());
    const std::vector<int> got = retained(*single), expected = retained(solo);
    // A chunk leaves more columns than later tokens can see; a row that stood still has given up its oldest.
    const auto keep = static_cast<std::size_t>(solo.keep());
    const std::size_t needed = static_cast<std::size_t>(solo.max_size()) - 1 - keep;
    const auto sinks = [&](const std::vector<int>& tokens) {
      return std::vector<int>(tokens.begin(),
                              tokens.begin() + static_cast<std::ptrdiff_t>(std::min(keep, tokens.size())));
    };
    const auto latest = [&](const std::vector<int>& tokens) {
      const std::size_t others = tokens.size() - std::min(keep, tokens.size());
      return std::vector<int>(tokens.end() - static_cast<std::ptrdiff_t>(std::min(needed, others)), tokens.end());
    };
    ASSERT_EQ(sinks(got), sinks(expected)) << "row " << row;
    ASSERT_EQ(latest(got), latest(expected)) << "row " << row;
    for (const int token : got) ASSERT_GE(token, kFirstToken) << "row " << row;
  }
}

}  // namespace reprise::cache_test
