#include "reprise/sampling/filters.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "mlx/ops.h"
#include "reprise/base/error.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

mx::array drop(const mx::array& condition, const mx::array& logprobs) {
  return mx::where(condition, mx::array(-kInfinity, logprobs.dtype()), logprobs);
}

// The columns from `begin` on.
mx::array columns_from(const mx::array& x, int begin) { return mx::slice(x, {0, begin}, {x.shape(0), x.shape(1)}); }

}  // namespace

mx::array apply_top_p(const mx::array& logprobs, float top_p) {
  if (top_p <= 0.0f || top_p >= 1.0f) return logprobs;
  const auto sorted = mx::sort(logprobs, -1);  // ascending
  const auto probs = mx::exp(sorted);
  // Mass of the likelier tokens; 0 for the likeliest.
  const auto mass_above = mx::cumsum(probs, -1, /*reverse=*/true, /*inclusive=*/false);
  const auto total =
      mx::add(mx::slice(mass_above, {0, 0}, {probs.shape(0), 1}), mx::slice(probs, {0, 0}, {probs.shape(0), 1}));
  const auto dropped = mx::greater_equal(mass_above, mx::multiply(total, mx::array(top_p)));
  // Where the product is 0 (no mass, or underflow) every token would go: the likeliest stays.
  const auto num_dropped =
      mx::minimum(mx::sum(mx::astype(dropped, mx::int32), -1, /*keepdims=*/true), mx::array(probs.shape(1) - 1));
  const auto threshold = mx::take_along_axis(sorted, num_dropped, -1);
  return drop(mx::less(logprobs, threshold), logprobs);
}

mx::array apply_min_p(const mx::array& logprobs, float min_p, int min_tokens_to_keep) {
  const int vocab_size = logprobs.shape(-1);
  if (min_p <= 0.0f || min_tokens_to_keep >= vocab_size) return logprobs;
  const auto least = mx::add(mx::max(logprobs, -1, /*keepdims=*/true), mx::array(std::log(min_p)));
  auto dropped = mx::less(logprobs, least);
  if (min_tokens_to_keep > 1) {
    const auto order = mx::argpartition(logprobs, vocab_size - min_tokens_to_keep, -1);
    const auto kept = columns_from(order, vocab_size - min_tokens_to_keep);
    dropped = mx::put_along_axis(dropped, kept, mx::array(false), -1);
  }
  return drop(dropped, logprobs);
}

void check_special_tokens(const std::vector<TokenId>& ids, int vocab_size) {
  for (const TokenId id : ids) {
    if (id < 0 || id >= vocab_size) {
      throw Error(ErrorCode::invalid_argument, "[apply_xtc] special tokens must be ids below the vocabulary size " +
                                                   std::to_string(vocab_size) + ", but got " + std::to_string(id));
    }
  }
}

mx::array apply_xtc(const mx::array& logprobs, float threshold, const std::vector<TokenId>& special_tokens) {
  const auto probs = mx::softmax(logprobs, -1, /*precise=*/true);
  const auto above = mx::where(mx::greater(probs, mx::array(threshold)), probs, mx::array(kInfinity));
  auto dropped = mx::greater(probs, mx::min(above, -1, /*keepdims=*/true));
  if (!special_tokens.empty()) {
    check_special_tokens(special_tokens, logprobs.shape(-1));
    const auto count = static_cast<int>(special_tokens.size());
    const auto ids =
        mx::broadcast_to(mx::array(special_tokens.data(), {1, count}, mx::int32), {logprobs.shape(0), count});
    dropped = mx::put_along_axis(dropped, ids, mx::array(false), -1);
  }
  return drop(dropped, logprobs);
}

mx::array apply_top_k(const mx::array& logprobs, int top_k) {
  if (top_k <= 0 || top_k >= logprobs.shape(-1)) return logprobs;
  const auto order = mx::argpartition(mx::negative(logprobs), top_k - 1, -1);
  return mx::put_along_axis(logprobs, columns_from(order, top_k), mx::array(-kInfinity, logprobs.dtype()), -1);
}

mx::array apply_filters(const mx::array& logprobs, const SamplingParams& params, const std::vector<bool>& xtc_rows) {
  auto kept = apply_top_p(logprobs, params.top_p);
  kept = apply_min_p(kept, params.min_p, params.min_tokens_to_keep);
  const auto num_xtc_rows = std::count(xtc_rows.begin(), xtc_rows.end(), true);
  if (num_xtc_rows > 0) {
    auto filtered = apply_xtc(kept, params.xtc_threshold, params.xtc_special_tokens);
    if (num_xtc_rows < static_cast<std::ptrdiff_t>(xtc_rows.size())) {
      const auto rows = mx::array(xtc_rows.begin(), {static_cast<int>(xtc_rows.size()), 1}, mx::bool_);
      filtered = mx::where(rows, filtered, kept);
    }
    kept = filtered;
  }
  return apply_top_k(kept, params.top_k);
}

}  // namespace reprise
