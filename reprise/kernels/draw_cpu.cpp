// Filters keep an upper part of a row (XTC apart), so only that part is ever gathered, and no order is made of more
// than the place where it ends.
#include "reprise/kernels/draw_cpu.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace reprise::kernels::cpu {

namespace {

// Below it 1 / temperature would overflow; a row is greedy long before.
constexpr float kLeastTemperature = 1e-30f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Entry {
  float logprob;
  float mass;
};

// The logprob of the last of the likeliest entries whose mass together reaches `target`; of the last of all where it
// does not. Changes the order of `entries`, which are not empty.
float end_of_mass(std::span<Entry> entries, double target) {
  constexpr std::size_t kFew = 24;
  double above = 0.0;  // mass of what is likelier than all of `entries`
  float last = 0.0f;
  while (true) {
    if (entries.size() <= kFew) {
      std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.logprob > b.logprob; });
      for (const Entry& entry : entries) {
        above += static_cast<double>(entry.mass);
        last = entry.logprob;
        if (above >= target) break;
      }
      return last;
    }
    std::array<float, 3> tries = {entries.front().logprob, entries[entries.size() / 2].logprob, entries.back().logprob};
    std::sort(tries.begin(), tries.end());
    const float pivot = tries[1];
    const auto likelier_end =
        std::partition(entries.begin(), entries.end(), [&](const Entry& e) { return e.logprob > pivot; });
    const auto equal_end =
        std::partition(likelier_end, entries.end(), [&](const Entry& e) { return e.logprob == pivot; });
    const auto mass_of = [](auto begin, auto end) {
      double mass = 0.0;
      for (; begin != end; ++begin) mass += static_cast<double>(begin->mass);
      return mass;
    };
    const double likelier = mass_of(entries.begin(), likelier_end);
    if (likelier_end != entries.begin() && above + likelier >= target) {
      entries = entries.first(static_cast<std::size_t>(likelier_end - entries.begin()));
      continue;
    }
    above += likelier + mass_of(likelier_end, equal_end);
    last = pivot;
    if (above >= target || equal_end == entries.end()) return last;
    entries = entries.subspan(static_cast<std::size_t>(equal_end - entries.begin()));
  }
}

class RowDraw {
 public:
  RowDraw(const float* x, int n, const RowSummary& row, const DrawSettings& settings)
      : x_(x), n_(n), row_(row), settings_(settings), top_(row.max - row.log_sum) {}

  int operator()(float uniform, bool xtc) {
    const bool by_mass = settings_.top_p > 0.0f && settings_.top_p < 1.0f;
    const bool by_ratio = settings_.min_p > 0.0f && settings_.min_tokens_to_keep < n_;
    const bool by_count = settings_.top_k > 0 && settings_.top_k < n_;
    if (!by_mass && !by_ratio && !by_count && !xtc) return draw_from_all(uniform);
    if (by_mass) {
      keep_mass();
    } else if (by_ratio) {
      gather_for_ratio();
    } else if (by_count && !xtc) {
      gather_count(settings_.top_k);
    } else {
      gather(kLowest);
    }
    if (by_ratio) keep_ratio();
    if (xtc) drop_top_choices();
    if (by_count) keep_count(settings_.top_k);
    return draw_from_kept(uniform);
  }

 private:
  static constexpr float kLowest = -kInfinity;
  // How far below the likeliest a gathering reaches, until it has enough.
  static constexpr std::array<float, 3> kDepths = {8.0f, 16.0f, kInfinity};

  void gather(float least) {
    const auto room = static_cast<std::size_t>(n_ + kGatherSlack);
    if (logprobs_.size() < room) {
      logprobs_.resize(room);
      ids_.resize(room);
    }
    count_ = gather_at_least(x_, n_, least, logprobs_.data(), ids_.data());
    for (float& logprob : kept()) logprob -= row_.log_sum;
  }

  std::span<float> kept() { return std::span(logprobs_).first(static_cast<std::size_t>(count_)); }

  // keep(index) says what stays.
  template <typename Keep>
  void compact(const Keep& keep) {
    std::size_t to = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(count_); ++i) {
      if (!keep(i)) continue;
      logprobs_[to] = logprobs_[i];
      ids_[to++] = ids_[i];
    }
    count_ = static_cast<int>(to);
  }

  void keep_at_least(float least) {
    compact([&](std::size_t i) { return logprobs_[i] >= least; });
  }

  // Top-p over the whole row.
  void keep_mass() {
    for (const float depth : kDepths) {
      gather(row_.max - depth);
      masses_.resize(static_cast<std::size_t>(count_));
      powers(logprobs_.data(), count_, 0.0f, 1.0f, masses_.data());
      std::vector<Entry> entries(masses_.size());
      double mass = 0.0;
      for (std::size_t i = 0; i < entries.size(); ++i) {
        entries[i] = {logprobs_[i], masses_[i]};
        mass += static_cast<double>(masses_[i]);
      }
      const auto target = static_cast<double>(settings_.top_p);
      if (depth < kInfinity && mass < target) continue;
      const float least = end_of_mass(entries, target);
      // Beside the gathering's end there may be equals that it has not.
      if (depth < kInfinity && least <= top_ - depth + rounding()) continue;
      keep_at_least(least);
      return;
    }
  }

  // At least the k likeliest, and all that equal the last of them.
  void gather_count(int k) {
    for (const float depth : kDepths) {
      gather(row_.max - depth);
      if (count_ >= k && (depth == kInfinity || kth_likeliest(k) > top_ - depth + rounding())) return;
    }
  }

  // Min-p over the whole row needs those above its limit, and so many in any case.
  void gather_for_ratio() {
    gather(row_.max + std::log(settings_.min_p) - rounding());
    if (count_ < settings_.min_tokens_to_keep) gather_count(settings_.min_tokens_to_keep);
  }

  void keep_ratio() {
    const float least = top_ + std::log(settings_.min_p);
    const auto likely = std::count_if(kept().begin(), kept().end(), [&](float logprob) { return logprob >= least; });
    if (likely >= settings_.min_tokens_to_keep) {
      keep_at_least(least);
    } else {
      keep_count(settings_.min_tokens_to_keep);
    }
  }

  float kth_likeliest(int k) {
    order_.assign(kept().begin(), kept().end());
    std::nth_element(order_.begin(), order_.begin() + (k - 1), order_.end(), std::greater<>());
    return order_[static_cast<std::size_t>(k - 1)];
  }

  void keep_count(int k) {
    if (k >= count_) return;
    const float least = kth_likeliest(k);
    auto equals = k - std::count_if(kept().begin(), kept().end(), [&](float logprob) { return logprob > least; });
    compact([&](std::size_t i) { return logprobs_[i] > least || (logprobs_[i] == least && equals-- > 0); });
  }

  // XTC.
  void drop_top_choices() {
    masses_.resize(static_cast<std::size_t>(count_));
    powers(logprobs_.data(), count_, top_, 1.0f, masses_.data());
    double total = 0.0;
    for (const float mass : masses_) total += static_cast<double>(mass);
    float least = kInfinity;
    for (float& mass : masses_) {
      mass = static_cast<float>(static_cast<double>(mass) / total);
      if (mass > settings_.xtc_threshold) least = std::min(least, mass);
    }
    const std::span special(settings_.special_tokens, static_cast<std::size_t>(settings_.num_special_tokens));
    compact([&](std::size_t i) {
      return masses_[i] <= least || std::binary_search(special.begin(), special.end(), ids_[i]);
    });
  }

  // Differences of logprobs below it may be rounding.
  float rounding() const { return 1e-5f * (1.0f + std::abs(row_.max) + std::abs(row_.log_sum)); }

  float inverse_temperature() const { return 1.0f / std::max(settings_.temperature, kLeastTemperature); }

  int draw_from_kept(float uniform) {
    masses_.resize(static_cast<std::size_t>(count_));
    const float likeliest = *std::max_element(kept().begin(), kept().end());
    powers(logprobs_.data(), count_, likeliest, inverse_temperature(), masses_.data());
    double total = 0.0;
    for (const float mass : masses_) total += static_cast<double>(mass);
    return ids_[walk(masses_, total * static_cast<double>(uniform))];
  }

  // In pieces, of which only one is walked through.
  int draw_from_all(float uniform) {
    constexpr int kLength = 1024;
    const auto num_pieces = static_cast<std::size_t>((n_ + kLength - 1) / kLength);
    const float inverse = inverse_temperature();
    std::vector<double> sums(num_pieces);
    double total = 0.0;
    const auto length_of = [&](std::size_t piece) { return std::min(kLength, n_ - static_cast<int>(piece) * kLength); };
    for (std::size_t i = 0; i < num_pieces; ++i) {
      sums[i] = sum_of_powers(x_ + i * kLength, length_of(i), row_.max, inverse);
      total += sums[i];
    }
    double at = total * static_cast<double>(uniform);
    std::size_t piece = 0;
    std::size_t last = 0;  // of those that hold anything
    for (; piece < num_pieces; ++piece) {
      if (sums[piece] > 0.0) last = piece;
      if (sums[piece] > at) break;
      at -= sums[piece];
    }
    if (piece == num_pieces) piece = last;
    masses_.resize(static_cast<std::size_t>(length_of(piece)));
    powers(x_ + piece * kLength, length_of(piece), row_.max, inverse, masses_.data());
    return static_cast<int>(piece) * kLength + static_cast<int>(walk(masses_, at));
  }

  // The first whose mass, with all before it, exceeds `at`; by rounding none may: then the last that has any.
  static std::size_t walk(std::span<const float> masses, double at) {
    double sum = 0.0;
    std::size_t last = 0;
    for (std::size_t i = 0; i < masses.size(); ++i) {
      if (masses[i] <= 0.0f) continue;
      sum += static_cast<double>(masses[i]);
      last = i;
      if (sum > at) break;
    }
    return last;
  }

  const float* x_;
  int n_;
  const RowSummary& row_;
  const DrawSettings& settings_;
  float top_;  // the likeliest's logprob
  // What is kept, in the order of ids.
  std::vector<float> logprobs_;
  std::vector<std::int32_t> ids_;
  int count_ = 0;
  std::vector<float> masses_;
  std::vector<float> order_;
};

}  // namespace

int draw_token(const float* x, int n, const RowSummary& row, const DrawSettings& settings, float uniform, bool xtc) {
  if (std::isnan(row.log_sum)) return row.argmax;
  return RowDraw(x, n, row, settings)(uniform, xtc);
}

}  // namespace reprise::kernels::cpu
