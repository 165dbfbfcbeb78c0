#include "tests/cache/paged_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/token_columns.h"

namespace reprise::cache_test {

namespace mx = mlx::core;

namespace {

mx::array joined(const mx::array& x) {
  return mx::reshape(mx::transpose(x, {0, 2, 1, 3}), {x.shape(0), x.shape(2), x.shape(1) * x.shape(3)});
}

}  // namespace

mx::array step_of_tokens(AttentionCache& cache, const std::vector<std::vector<int>>& tokens) {
  const auto rows = static_cast<int>(tokens.size());
  const auto width = static_cast<int>(tokens.front().size());
  const Projections projections{mx::zeros({rows, width, kPagedHeads * kPagedSize}),
                                joined(token_columns(tokens, width, kPagedSize, 1)),
                                joined(token_columns(tokens, width, 2 * kPagedSize, -1)), kPagedHeads, 1};
  mx::array output = cache.attend_projections(projections, {.mask = cache.make_mask(width)});
  EXPECT_EQ(output.shape(), (mx::Shape{rows, width, kPagedHeads * 2 * kPagedSize}));
  return output;
}

std::vector<std::vector<float>> means_of(const mx::array& output) {
  mx::array last = mx::contiguous(mx::slice(output, {0, 0, output.shape(2) - 1}, output.shape()));
  last.eval();
  std::vector<std::vector<float>> means;
  for (int b = 0; b < last.shape(0); ++b) {
    means.emplace_back();
    for (int t = 0; t < last.shape(1); ++t) means.back().push_back(-last.data<float>()[b * last.shape(1) + t]);
  }
  return means;
}

std::vector<std::vector<float>> means_of_step(AttentionCache& cache, const std::vector<std::vector<int>>& tokens) {
  return means_of(step_of_tokens(cache, tokens));
}

void feed_pages(PagedKVCache& cache, const std::vector<int>& tokens) {
  constexpr std::size_t kWidth = 50;
  for (std::size_t at = 0; at < tokens.size(); at += kWidth) {
    const auto end = std::min(tokens.size(), at + kWidth);
    means_of_step(
        cache, {{tokens.begin() + static_cast<std::ptrdiff_t>(at), tokens.begin() + static_cast<std::ptrdiff_t>(end)}});
  }
}

PagedKVCache filled_pages(const std::shared_ptr<PagePool>& pool, int length, kernels::PagedVisibility visibility) {
  PagedKVCache cache(pool, visibility);
  feed_pages(cache, range(0, length));
  return cache;
}

float mean_seen(const std::vector<int>& tokens, int position, const kernels::PagedVisibility& visibility) {
  int first = 0;
  if (visibility.window > 0) first = std::max(first, position - visibility.window + 1);
  while (visibility.chunk > 0 && first / visibility.chunk < position / visibility.chunk) ++first;
  const double sum = std::accumulate(tokens.begin() + first, tokens.begin() + position + 1, 0.0);
  return static_cast<float>(sum / (position + 1 - first));
}

std::vector<int> tokens_of_rows(const AttentionCache& cache) {
  const KeysValues all = cache.keys_and_values();
  const auto keys = shown_keys(all).front();
  const auto values = shown_values(all).front();
  std::vector<int> tokens;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(keys[i], -values[i]);
    tokens.push_back(static_cast<int>(std::lround(keys[i])));
  }
  return tokens;
}

mx::array random_numbers(const mx::Shape& shape, std::uint64_t seed) {
  constexpr int kDrawn = 1 << 18;
  static const mx::array drawn = [] {
    mx::array numbers = mx::random::normal({kDrawn}, mx::float32, 0.0f, 1.0f, mx::random::key(1));
    numbers.eval();
    return numbers;
  }();
  const int count = std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<int>());
  const int begin = static_cast<int>(seed * 7919 % static_cast<std::uint64_t>(kDrawn - count + 1));
  return mx::reshape(mx::slice(drawn, {begin}, {begin + count}), shape);
}

std::vector<const std::byte*> page_addresses(const PagedKVCache& cache) {
  std::vector<const std::byte*> addresses;
  if (cache.length() == 0) return addresses;
  for (const PageRef& page : cache.span(cache.first_row(), *cache.position()).pages) addresses.push_back(page->data());
  return addresses;
}

}  // namespace reprise::cache_test
