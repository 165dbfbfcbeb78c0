#include "reprise/sampling/sampler.h"

#include <algorithm>
#include <random>
#include <string>
#include <utility>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/kernels/select.h"
#include "reprise/sampling/filters.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

// Below it 1 / temperature would overflow; a row is greedy long before.
constexpr float kLeastTemperature = 1e-30f;

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

enum class Purpose : std::uint64_t { token, xtc };

// Uniform in [0, 1), in steps of 2^-24: exact in float32, so that u * total < total.
float uniform(std::uint64_t seed, std::uint64_t draw, std::uint64_t row, Purpose purpose) {
  const std::uint64_t bits = mix(mix(mix(mix(seed) ^ draw) ^ row) ^ static_cast<std::uint64_t>(purpose));
  return static_cast<float>(bits >> 40) * 0x1p-24f;
}

void check_shape(const mx::array& logprobs) {
  if (logprobs.ndim() == 2 && logprobs.shape(1) > 0) return;
  std::string shape;
  for (const auto n : logprobs.shape()) shape += (shape.empty() ? "" : ", ") + std::to_string(n);
  throw Error(ErrorCode::invalid_argument, "[Sampler] logprobs must be [B, V] with V > 0, but got [" + shape + "]");
}

// Inverse of the cumulative distribution at one uniform number a row: the first token whose cumulated mass exceeds it,
// which is never one of mass 0. One number instead of V keeps the cost of a draw at a softmax and a sum.
mx::array draw_tokens(const mx::array& logprobs, float temperature, const std::vector<float>& uniforms) {
  const float inverse = 1.0f / std::max(temperature, kLeastTemperature);
  const int rows = logprobs.shape(0);
  const int vocab_size = logprobs.shape(1);
  const auto probs = mx::softmax(mx::multiply(logprobs, mx::array(inverse)), -1, /*precise=*/true);
  const auto mass = mx::cumsum(probs, -1);
  const auto total = mx::slice(mass, {0, vocab_size - 1}, {rows, vocab_size});
  const auto at = mx::multiply(total, mx::array(uniforms.data(), {rows, 1}, mx::float32));
  return mx::sum(mx::astype(mx::less_equal(mass, at), mx::int32), -1);
}

// Everything that is random in one call.
struct Chances {
  std::vector<float> uniforms;  // [B]
  std::vector<bool> xtc_rows;   // [B], or empty
};

class ChanceSource {
 public:
  ChanceSource(const SamplingParams& params, std::uint64_t num_draws)
      : xtc_probability_(params.xtc_probability),
        seed_(params.seed ? *params.seed : random_seed()),
        num_draws_(num_draws) {}

  // Of the call to come; next() ends it.
  Chances of(std::size_t rows) const {
    Chances chances;
    for (std::size_t row = 0; row < rows; ++row) {
      chances.uniforms.push_back(uniform(seed_, num_draws_, row, Purpose::token));
      if (xtc_probability_ > 0.0f) {
        chances.xtc_rows.push_back(uniform(seed_, num_draws_, row, Purpose::xtc) < xtc_probability_);
      }
    }
    return chances;
  }
  void next() { ++num_draws_; }

 private:
  static std::uint64_t random_seed() {
    std::random_device device;
    return (static_cast<std::uint64_t>(device()) << 32) | device();
  }

  float xtc_probability_;
  std::uint64_t seed_;
  std::uint64_t num_draws_;
};

class CategoricalSampler {
 public:
  CategoricalSampler(const SamplingParams& params, std::uint64_t num_draws)
      : params_(params), source_(params, num_draws) {}

  mx::array operator()(const mx::array& given) {
    check_shape(given);
    const auto logprobs = mx::astype(given, mx::float32);
    const Chances chances = source_.of(static_cast<std::size_t>(logprobs.shape(0)));
    auto tokens =
        draw_tokens(apply_filters(logprobs, params_, chances.xtc_rows), params_.temperature, chances.uniforms);
    source_.next();
    return tokens;
  }

 private:
  SamplingParams params_;
  ChanceSource source_;
};

SampledTokens as_sampled(kernels::Selection selection) {
  return {std::move(selection.tokens), std::move(selection.logprobs)};
}

class CategoricalLogitsSampler {
 public:
  CategoricalLogitsSampler(const SamplingParams& params, std::uint64_t num_draws)
      : source_(params, num_draws),
        params_{.temperature = params.temperature,
                .top_p = params.top_p,
                .min_p = params.min_p,
                .min_tokens_to_keep = params.min_tokens_to_keep,
                .top_k = params.top_k,
                .xtc_threshold = params.xtc_threshold,
                .xtc_special_tokens = params.xtc_special_tokens},
        xtc_(params.xtc_probability > 0.0f) {}

  SampledTokens operator()(const mx::array& logits) {
    if (logits.ndim() > 0 && xtc_) check_special_tokens(params_.xtc_special_tokens, logits.shape(-1));
    Chances chances = source_.of(
        logits.ndim() > 0 && logits.shape(-1) > 0 ? logits.size() / static_cast<std::size_t>(logits.shape(-1)) : 0);
    auto selection = kernels::draw(logits, params_, std::move(chances.uniforms), std::move(chances.xtc_rows));
    source_.next();
    return as_sampled(std::move(selection));
  }

 private:
  ChanceSource source_;
  kernels::DrawParams params_;
  bool xtc_;
};

}  // namespace

Sampler make_sampler(const SamplingParams& params, std::uint64_t num_draws) {
  check_sampling_params(params);
  if (params.temperature == 0.0f) {
    return [](const mx::array& logprobs) {
      check_shape(logprobs);
      return mx::astype(mx::argmax(logprobs, -1), mx::int32);
    };
  }
  return CategoricalSampler(params, num_draws);
}

LogitsSampler make_logits_sampler(const SamplingParams& params, std::uint64_t num_draws) {
  check_sampling_params(params);
  if (params.temperature == 0.0f) return [](const mx::array& logits) { return as_sampled(kernels::likeliest(logits)); };
  if (kernels::can_draw()) return CategoricalLogitsSampler(params, num_draws);
  return [sampler = CategoricalSampler(params, num_draws)](const mx::array& logits) mutable {
    const auto logprobs = kernels::log_softmax(mx::reshape(logits, {-1, logits.shape(-1)}));
    const auto tokens = sampler(logprobs);
    return SampledTokens{tokens, mx::reshape(mx::take_along_axis(logprobs, mx::reshape(tokens, {-1, 1}), -1), {-1})};
  };
}

}  // namespace reprise
