#include "reprise/sampling/sampler.h"

#include <algorithm>
#include <random>

#include "mlx/ops.h"
#include "reprise/base/error.h"
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

class CategoricalSampler {
 public:
  CategoricalSampler(const SamplingParams& params, std::uint64_t num_draws)
      : params_(params), seed_(params.seed ? *params.seed : random_seed()), num_draws_(num_draws) {}

  mx::array operator()(const mx::array& given) {
    check_shape(given);
    const auto logprobs = mx::astype(given, mx::float32);
    const auto rows = static_cast<std::size_t>(logprobs.shape(0));
    std::vector<bool> xtc_rows;
    std::vector<float> uniforms;
    for (std::size_t row = 0; row < rows; ++row) {
      uniforms.push_back(uniform(seed_, num_draws_, row, Purpose::token));
      if (params_.xtc_probability > 0.0f) {
        xtc_rows.push_back(uniform(seed_, num_draws_, row, Purpose::xtc) < params_.xtc_probability);
      }
    }
    auto tokens = draw_tokens(apply_filters(logprobs, params_, xtc_rows), params_.temperature, uniforms);
    ++num_draws_;
    return tokens;
  }

 private:
  static std::uint64_t random_seed() {
    std::random_device device;
    return (static_cast<std::uint64_t>(device()) << 32) | device();
  }

  SamplingParams params_;
  std::uint64_t seed_;
  std::uint64_t num_draws_;
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

}  // namespace reprise
