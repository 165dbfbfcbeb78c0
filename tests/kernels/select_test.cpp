#include "reprise/kernels/select.h"

#include <gtest/gtest.h>

#include <hwy/targets.h>
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "mlx/device.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/base/thread_pool.h"

namespace reprise::kernels {
namespace {

namespace mx = mlx::core;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
using Row = std::vector<float>;

mx::array array_of(const std::vector<Row>& rows) {
  Row flat;
  for (const Row& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  return mx::array(flat.begin(), {static_cast<int>(rows.size()), static_cast<int>(rows.front().size())}, mx::float32);
}

Row random_row(int n, float spread, unsigned int seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  Row row(static_cast<std::size_t>(n));
  for (float& x : row) x = normal(random);
  return row;
}

// Many values occur several times.
Row row_with_ties(int n, unsigned int seed) {
  Row row = random_row(n, 4.0f, seed);
  for (float& x : row) x = std::round(2.0f * x) / 2.0f;
  return row;
}

double log_sum(const Row& row) {
  const double max = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (const float x : row) sum += std::exp(static_cast<double>(x) - max);
  return max + std::log(sum);
}

struct Picked {
  std::vector<int> tokens;
  Row logprobs;
};

Picked values(const Selection& selection) {
  auto tokens = selection.tokens;
  auto logprobs = selection.logprobs;
  mx::eval(tokens, logprobs);
  return {{tokens.data<int>(), tokens.data<int>() + tokens.size()},
          {logprobs.data<float>(), logprobs.data<float>() + logprobs.size()}};
}

// The filters by a full sort, in double precision: what is kept of the row.
std::vector<bool> kept_by_sorting(const Row& row, const DrawParams& params, bool xtc) {
  const auto n = row.size();
  const auto sum = static_cast<float>(log_sum(row));
  Row logprobs(n);
  for (std::size_t i = 0; i < n; ++i) logprobs[i] = row[i] - sum;
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return logprobs[a] > logprobs[b]; });
  const float top = logprobs[order[0]];
  std::vector<bool> kept(n, true);
  if (params.top_p > 0 && params.top_p < 1) {
    double mass = 0;
    float last = 0;
    for (const auto i : order) {
      if (mass >= static_cast<double>(params.top_p)) break;
      mass += std::exp(static_cast<double>(logprobs[i]));
      last = logprobs[i];
    }
    for (std::size_t i = 0; i < n; ++i) kept[i] = logprobs[i] >= last;
  }
  if (params.min_p > 0 && params.min_tokens_to_keep < static_cast<int>(n)) {
    int place = 0;
    for (const auto i : order) {
      if (!kept[i]) continue;
      kept[i] = logprobs[i] >= top + std::log(params.min_p) || place < params.min_tokens_to_keep;
      ++place;
    }
  }
  if (xtc) {
    double total = 0;
    for (std::size_t i = 0; i < n; ++i) total += kept[i] ? std::exp(static_cast<double>(logprobs[i])) : 0;
    float least = kInfinity;
    const auto prob = [&](std::size_t i) { return std::exp(static_cast<double>(logprobs[i])) / total; };
    for (std::size_t i = 0; i < n; ++i) {
      if (kept[i] && prob(i) > static_cast<double>(params.xtc_threshold)) least = std::min(least, logprobs[i]);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const auto& special = params.xtc_special_tokens;
      if (std::find(special.begin(), special.end(), static_cast<int>(i)) != special.end()) continue;
      kept[i] = kept[i] && logprobs[i] <= least;
    }
  }
  if (params.top_k > 0) {
    int place = 0;
    for (const auto i : order) kept[i] = kept[i] && place++ < params.top_k;
  }
  return kept;
}

// The token that a number falls on, and how far from a border it falls.
std::pair<int, double> draw_by_walking(const Row& row, const std::vector<bool>& kept, float temperature,
                                       float uniform) {
  double max = -kInfinity;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (kept[i]) max = std::max(max, static_cast<double>(row[i]));
  }
  std::vector<double> mass(row.size());
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (kept[i]) mass[i] = std::exp((static_cast<double>(row[i]) - max) / static_cast<double>(temperature));
  }
  const double total = std::accumulate(mass.begin(), mass.end(), 0.0);
  const double at = static_cast<double>(uniform) * total;
  double sum = 0;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (sum + mass[i] > at) return {static_cast<int>(i), std::min(at - sum, sum + mass[i] - at) / total};
    sum += mass[i];
  }
  return {-1, 0.0};
}

// Every instruction set that this machine has, and one and three threads.
template <typename Check>
void on_every_target(const Check& check) {
  for (const auto target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    SCOPED_TRACE(hwy::TargetName(target));
    check();
  }
  hwy::SetSupportedTargetsForTest(0);
}

class Select : public testing::Test {
 protected:
  void SetUp() override {
    if (mx::default_device() != mx::Device::cpu) GTEST_SKIP() << "the kernels under test are the CPU's";
  }
};

TEST_F(Select, LikeliestIsTheFirstOfTheLikeliestWithItsLogprob) {
  on_every_target([] {
    for (const int n : {1, 2, 3, 15, 16, 17, 31, 33, 1000, 8191, 8192, 8193, 20000, 49152}) {
      SCOPED_TRACE(n);
      std::vector<Row> rows = {random_row(n, 3.0f, 1), row_with_ties(n, 2), Row(static_cast<std::size_t>(n), -7.5f)};
      const Picked picked = values(likeliest(array_of(rows)));
      for (std::size_t b = 0; b < rows.size(); ++b) {
        const auto best = std::max_element(rows[b].begin(), rows[b].end());
        EXPECT_EQ(picked.tokens[b], best - rows[b].begin());
        EXPECT_NEAR(picked.logprobs[b], static_cast<double>(*best) - log_sum(rows[b]), 5e-6);
      }
    }
  });
}

TEST_F(Select, ARowThatIsNoDistributionHasNoLogprobAndATokenInRange) {
  on_every_target([] {
    for (const int n : {1, 5, 16, 40, 9000}) {
      const auto last = static_cast<std::size_t>(n - 1);
      for (const float damage : {kNaN, kInfinity, -kNaN}) {
        for (const std::size_t at : {std::size_t{0}, last / 2, last}) {
          Row row = random_row(n, 1.0f, 3);
          row[at] = damage;
          const Picked greedy = values(likeliest(array_of({row})));
          EXPECT_TRUE(std::isnan(greedy.logprobs[0])) << n << ", " << damage << " at " << at;
          const Picked drawn = values(draw(array_of({row}), {.top_p = 0.9f}, {0.5f}));
          EXPECT_TRUE(std::isnan(drawn.logprobs[0]));
          EXPECT_TRUE(drawn.tokens[0] >= 0 && drawn.tokens[0] < n);
        }
      }
      const Picked nothing = values(likeliest(array_of({Row(static_cast<std::size_t>(n), -kInfinity)})));
      EXPECT_TRUE(std::isnan(nothing.logprobs[0]));
    }
  });
}

TEST_F(Select, MinusInfinityIsATokenThatNeverComes) {
  Row row(10000, -kInfinity);
  row[9000] = 1.0f;
  row[9500] = 2.0f;
  on_every_target([&] {
    EXPECT_EQ(values(likeliest(array_of({row}))).tokens[0], 9500);
    for (const float uniform : {0.0f, 0.2f, 0.26f, 0.28f, 0x1.fffffep-1f}) {
      const Picked picked = values(draw(array_of({row}), {}, {uniform}));
      EXPECT_EQ(picked.tokens[0], uniform < 0.2689f ? 9000 : 9500);
    }
  });
}

TEST_F(Select, LogSoftmaxIsTheExactOne) {
  const std::vector<Row> rows = {random_row(9001, 5.0f, 4), random_row(9001, 0.1f, 5)};
  on_every_target([&] {
    const auto logprobs = log_softmax(array_of(rows));
    for (std::size_t b = 0; b < rows.size(); ++b) {
      const auto exact = mx::subtract(array_of({rows[b]}), mx::array(static_cast<float>(log_sum(rows[b]))));
      const auto row = mx::slice(logprobs, {static_cast<int>(b), 0}, {static_cast<int>(b) + 1, 9001});
      EXPECT_LT(mx::max(mx::abs(mx::subtract(row, exact))).item<float>(), 5e-6f);
    }
  });
}

TEST_F(Select, TakesAnyFloatingDtypeAndAnyStrides) {
  const auto wide = array_of({random_row(600, 2.0f, 6), random_row(600, 2.0f, 7), random_row(600, 2.0f, 8)});
  const auto every_second = mx::slice(wide, {0, 1}, {3, 600}, {2, 2});
  const auto turned = mx::transpose(wide);
  for (const auto& logits :
       {every_second, turned, mx::reshape(turned, {6, 100, 3}), mx::astype(wide, mx::float16),
        mx::astype(wide, mx::bfloat16), mx::broadcast_to(mx::slice(wide, {0, 0}, {1, 600}), {4, 600})}) {
    const auto x = mx::reshape(mx::astype(logits, mx::float32), {-1, logits.shape(-1)});
    auto tokens = mx::astype(mx::argmax(x, -1), mx::int32);
    mx::eval(tokens);
    EXPECT_EQ(values(likeliest(logits)).tokens,
              std::vector<int>(tokens.data<int>(), tokens.data<int>() + tokens.size()));
    EXPECT_EQ(log_softmax(logits).shape(), logits.shape());
  }
}

TEST_F(Select, RefusesWhatHasNoTokens) {
  EXPECT_THROW(likeliest(mx::zeros({2, 0})), Error);
  EXPECT_THROW(likeliest(mx::array(1.0f)), Error);
  EXPECT_THROW(log_softmax(mx::zeros({0})), Error);
}

TEST_F(Select, DrawsAreThoseOfAFullSort) {
  std::vector<DrawParams> grid;
  for (const float top_p : {1.0f, 0.0f, 0.3f, 0.9f, 0.99f, 0.9999f}) grid.push_back({.top_p = top_p});
  for (const float temperature : {0.01f, 0.7f, 5.0f, 100.0f}) {
    grid.push_back({.temperature = temperature});
    grid.push_back({.temperature = temperature, .top_p = 0.8f});
  }
  for (const int top_k : {1, 2, 7, 40, 1000, 100000}) grid.push_back({.top_k = top_k});
  for (const float min_p : {1.0f, 0.5f, 0.05f, 1e-4f, 1e-12f}) {
    grid.push_back({.min_p = min_p});
    grid.push_back({.min_p = min_p, .min_tokens_to_keep = 5});
    grid.push_back({.min_p = min_p, .min_tokens_to_keep = 3000});
  }
  grid.push_back({.temperature = 0.8f, .top_p = 0.95f, .min_p = 0.02f, .min_tokens_to_keep = 3, .top_k = 30});
  grid.push_back({.top_p = 0.7f, .top_k = 4, .xtc_threshold = 0.05f});
  grid.push_back({.xtc_threshold = 0.01f});
  grid.push_back({.min_p = 0.01f, .xtc_threshold = 0.0f, .xtc_special_tokens = {2, 0}});

  std::mt19937 random(9);
  std::uniform_int_distribution<int> bits(0, (1 << 24) - 1);
  int near_border = 0;
  int draws = 0;
  const auto check = [&](const Row& row, const DrawParams& params, bool xtc) {
    const auto kept = kept_by_sorting(row, params, xtc);
    constexpr int kDraws = 4;
    std::vector<Row> rows(kDraws, row);
    std::vector<float> uniforms;
    for (int i = 0; i < kDraws; ++i) uniforms.push_back(static_cast<float>(bits(random)) * 0x1p-24f);
    const Picked picked = values(draw(array_of(rows), params, uniforms, std::vector<bool>(kDraws, xtc)));
    for (std::size_t i = 0; i < kDraws; ++i) {
      const auto [token, distance] = draw_by_walking(row, kept, params.temperature, uniforms[i]);
      ++draws;
      if (distance < 1e-5) {
        ++near_border;  // rounding decides
        continue;
      }
      EXPECT_EQ(picked.tokens[i], token) << "top_p " << params.top_p << ", min_p " << params.min_p << ", keep "
                                         << params.min_tokens_to_keep << ", top_k " << params.top_k << ", temperature "
                                         << params.temperature << ", xtc " << xtc << ", uniform " << uniforms[i];
    }
  };
  on_every_target([&] {
    for (const int n : {1, 2, 9, 100, 5000}) {
      SCOPED_TRACE(n);
      const std::vector<Row> rows = {random_row(n, 1.0f, 10), random_row(n, 6.0f, 11), row_with_ties(n, 12),
                                     Row(static_cast<std::size_t>(n), 0.25f)};
      for (const Row& row : rows) {
        for (const DrawParams& params : grid) {
          for (const bool xtc : {false, true}) {
            if (params.xtc_special_tokens.empty() || n > 2) check(row, params, xtc);
          }
        }
      }
    }
  });
  EXPECT_LT(near_border, draws / 50);
}

TEST_F(Select, DrawsFromALargeVocabularyAreThoseOfAFullSort) {
  for (const float spread : {0.3f, 2.5f, 8.0f}) {
    const Row row = random_row(49152, spread, 13);
    for (const DrawParams& params : {DrawParams{}, DrawParams{.temperature = 0.6f, .top_p = 0.9f},
                                     DrawParams{.top_k = 50}, DrawParams{.min_p = 0.05f}}) {
      const auto kept = kept_by_sorting(row, params, false);
      for (const float uniform : {0.0f, 0.1234f, 0.5f, 0.875f, 0.999f, 0x1.fffffep-1f}) {
        const auto [token, distance] = draw_by_walking(row, kept, params.temperature, uniform);
        if (distance < 1e-6) continue;
        EXPECT_EQ(values(draw(array_of({row}), params, {uniform})).tokens[0], token)
            << spread << ", " << params.top_p << ", " << params.top_k << ", " << uniform;
      }
    }
  }
}

TEST_F(Select, ResultsDoNotDependOnTheNumberOfThreads) {
  const auto logits = array_of({random_row(49152, 3.0f, 14), random_row(49152, 0.5f, 15)});
  const int before = ThreadPool::process().threads();
  std::vector<Picked> greedy;
  std::vector<Picked> drawn;
  for (const int threads : {1, 2, 3}) {
    ThreadPool::set_process_threads(threads);
    greedy.push_back(values(likeliest(logits)));
    drawn.push_back(values(draw(logits, {.top_p = 0.99f}, {0.3f, 0.6f})));
  }
  ThreadPool::set_process_threads(before);
  for (std::size_t i = 1; i < greedy.size(); ++i) {
    EXPECT_EQ(greedy[i].tokens, greedy[0].tokens);
    EXPECT_EQ(greedy[i].logprobs, greedy[0].logprobs);
    EXPECT_EQ(drawn[i].tokens, drawn[0].tokens);
    EXPECT_EQ(drawn[i].logprobs, drawn[0].logprobs);
  }
}

}  // namespace
}  // namespace reprise::kernels
