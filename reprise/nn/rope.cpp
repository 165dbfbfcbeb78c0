#include "reprise/nn/rope.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorCode::invalid_argument, "[Rope] " + what); }

float require(const std::optional<float>& value, const char* key, const std::string& type) {
  if (!value) fail("rope type '" + type + "' needs '" + key + "', but got none");
  return *value;
}

// base^(2i/dims): how many positions pair i takes per radian. In float32, as every implementation of record does it.
std::vector<float> inverse_frequencies(float base, int dims) {
  std::vector<float> freqs(static_cast<std::size_t>(dims / 2));
  for (std::size_t i = 0; i < freqs.size(); ++i) {
    freqs[i] = std::pow(base, static_cast<float>(2 * i) / static_cast<float>(dims));
  }
  return freqs;
}

// Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended.
std::vector<float> llama3_frequencies(std::vector<float> freqs, const RopeScaling& scaling) {
  const float factor = require(scaling.factor, "factor", scaling.type);
  const float low = scaling.low_freq_factor.value_or(1.0f);
  const float high = scaling.high_freq_factor.value_or(4.0f);
  const auto original = static_cast<float>(scaling.original_max_position_embeddings.value_or(8192));
  if (high <= low) fail("llama3 needs high_freq_factor > low_freq_factor");
  for (float& freq : freqs) {
    const float wavelength = 2.0f * std::numbers::pi_v<float> * freq;
    if (wavelength > original / low) {
      freq *= factor;
    } else if (wavelength > original / high) {
      const float smooth = (original / wavelength - low) / (high - low);
      freq /= (1.0f - smooth) / factor + smooth;
    }
  }
  return freqs;
}

float yarn_magnitude(float factor, float mscale) {
  return factor <= 1.0f ? 1.0f : 0.1f * mscale * std::log(factor) + 1.0f;
}

// YaRN (Peng et al., https://arxiv.org/abs/2309.00071): interpolate slow pairs, keep fast ones, ramp in between.
std::vector<float> yarn_frequencies(std::vector<float> freqs, const RopeOptions& options, const RopeScaling& scaling) {
  const float factor = require(scaling.factor, "factor", scaling.type);
  const auto original = static_cast<float>(scaling.original_max_position_embeddings.value_or(4096));
  const auto dims = static_cast<float>(options.dims);
  const auto pair_of_rotations = [&](float rotations) {
    return dims * std::log(original / (rotations * 2.0f * std::numbers::pi_v<float>)) / (2.0f * std::log(options.base));
  };
  const float low = std::max(std::floor(pair_of_rotations(scaling.beta_fast.value_or(32.0f))), 0.0f);
  float high = std::min(std::ceil(pair_of_rotations(scaling.beta_slow.value_or(1.0f))), dims - 1.0f);
  if (low == high) high += 0.001f;
  for (std::size_t i = 0; i < freqs.size(); ++i) {
    const float ramp = std::clamp((static_cast<float>(i) - low) / (high - low), 0.0f, 1.0f);
    const float mix = 1.0f - ramp;
    const float stretched = factor * freqs[i];
    freqs[i] = stretched * freqs[i] / (stretched * mix + freqs[i] * (1.0f - mix));
  }
  return freqs;
}

// LongRoPE (Ding et al., https://arxiv.org/abs/2402.13753). Always the long factors: rows in a cache must not change
// their rotation when the length crosses a limit.
std::vector<float> longrope_frequencies(std::vector<float> freqs, const RopeScaling& scaling) {
  const auto& factors = scaling.long_factor;
  if (factors.size() != 1 && factors.size() != freqs.size()) {
    fail("long_factor must have 1 or " + std::to_string(freqs.size()) + " values, but got " +
         std::to_string(factors.size()));
  }
  for (std::size_t i = 0; i < freqs.size(); ++i) freqs[i] *= factors.size() == 1 ? factors[0] : factors[i];
  return freqs;
}

float longrope_magnitude(const RopeOptions& options, const RopeScaling& scaling) {
  if (scaling.long_mscale) return *scaling.long_mscale;
  if (scaling.attention_factor) return *scaling.attention_factor;
  if (!options.max_position_embeddings || !scaling.original_max_position_embeddings) {
    fail("longrope needs max_position_embeddings and original_max_position_embeddings");
  }
  const auto original = static_cast<float>(*scaling.original_max_position_embeddings);
  const float ratio = static_cast<float>(*options.max_position_embeddings) / original;
  return ratio <= 1.0f ? 1.0f : std::sqrt(1.0f + std::log(ratio) / std::log(original));
}

// Only the first part of the head rotates; an infinite denominator leaves a pair as it is.
std::vector<float> proportional_frequencies(std::vector<float> freqs, const RopeOptions& options,
                                            const RopeScaling& scaling) {
  const int rotated = static_cast<int>(static_cast<float>(options.dims) * scaling.partial_rotary_factor.value_or(1.0f));
  if (rotated > options.dims || rotated < 0) fail("partial_rotary_factor must lie in [0, 1]");
  const float factor = scaling.factor.value_or(1.0f);
  for (std::size_t i = 0; i < freqs.size(); ++i) {
    freqs[i] = i < static_cast<std::size_t>(rotated / 2) ? factor * freqs[i] : std::numeric_limits<float>::infinity();
  }
  return freqs;
}

mx::array evaluated(const std::vector<float>& values) {
  mx::array result(values.begin(), {static_cast<int>(values.size())}, mx::float32);
  mx::eval(result);
  return result;
}

// Turns per position of each pair, by MLX's own operations: rows that kernels rotate are then those that MLX rotates.
std::vector<float> frequencies(int dims, const std::optional<float>& base, const std::optional<mx::array>& freqs) {
  const auto half = static_cast<float>(dims / 2);
  mx::array turns = freqs ? mx::reciprocal(*freqs)
                          : mx::exp(mx::multiply(mx::arange(0.0, -static_cast<double>(half), -1.0, mx::float32),
                                                 mx::array(std::log(*base) / half, mx::float32)));
  turns.eval();
  return std::vector<float>(turns.data<float>(), turns.data<float>() + dims / 2);
}

}  // namespace

Rope::Rope(const RopeOptions& options) : dims_(options.dims), traditional_(options.traditional) {
  if (options.dims < 2 || options.dims % 2 != 0)
    fail("dims must be even and positive, but got " + std::to_string(dims_));
  if (!(options.base > 0.0f) || !std::isfinite(options.base)) fail("base must be positive");
  const RopeScaling scaling = options.scaling.value_or(RopeScaling{});
  const std::string& type = scaling.type;
  const auto use_freqs = [&](const std::vector<float>& freqs) { freqs_ = evaluated(freqs); };
  auto plain = inverse_frequencies(options.base, dims_);
  if (scaling.factor && !(*scaling.factor > 0.0f && std::isfinite(*scaling.factor))) {
    fail("factor must be positive, but got " + std::to_string(*scaling.factor));
  }
  if (scaling.attention_factor && !(*scaling.attention_factor > 0.0f && std::isfinite(*scaling.attention_factor))) {
    fail("attention_factor must be positive, but got " + std::to_string(*scaling.attention_factor));
  }
  if (scaling.original_max_position_embeddings.value_or(1) < 1)
    fail("original_max_position_embeddings must be positive");

  if (type == "default") {
    base_ = options.base;
  } else if (type == "mrope") {
    if (scaling.mrope_section.size() != 3) fail("mrope needs 3 values in mrope_section");
    base_ = options.base;
  } else if (type == "linear") {
    base_ = options.base;
    scale_ = 1.0f / require(scaling.factor, "factor", type);
  } else if (type == "llama3") {
    use_freqs(llama3_frequencies(std::move(plain), scaling));
  } else if (type == "yarn" || type == "deepseek_yarn" || type == "telechat3-yarn") {
    use_freqs(yarn_frequencies(std::move(plain), options, scaling));
    input_scale_ =
        scaling.attention_factor.value_or(yarn_magnitude(*scaling.factor, scaling.mscale.value_or(1.0f)) /
                                          yarn_magnitude(*scaling.factor, scaling.mscale_all_dim.value_or(0.0f)));
  } else if (type == "longrope" || type == "su") {
    use_freqs(longrope_frequencies(std::move(plain), scaling));
    input_scale_ = longrope_magnitude(options, scaling);
  } else if (type == "proportional") {
    use_freqs(proportional_frequencies(std::move(plain), options, scaling));
  } else if (type == "dynamic") {
    if (!options.max_position_embeddings) fail("dynamic needs max_position_embeddings");
    dynamic_ = Dynamic{options.base, require(scaling.factor, "factor", type), *options.max_position_embeddings};
  } else if (type == "freq_factors") {
    if (scaling.freq_factors.size() != plain.size()) {
      fail("freq_factors must have " + std::to_string(plain.size()) + " values, but got " +
           std::to_string(scaling.freq_factors.size()));
    }
    for (std::size_t i = 0; i < plain.size(); ++i) plain[i] *= scaling.freq_factors[i];
    use_freqs(plain);
  } else {
    throw Error(ErrorCode::unsupported,
                "[Rope] rope type must be one of default, linear, llama3, yarn, longrope, su, "
                "proportional, dynamic, mrope, but got '" +
                    type + "'");
  }
  if (dynamic_) return;
  kernel_params_ = kernels::RopeParams{dims_, traditional_, scale_, input_scale_,
                                       std::make_shared<const std::vector<float>>(frequencies(dims_, base_, freqs_))};
}

mx::array Rope::operator()(const mx::array& x, const Offset& offset, const RotateOptions& options) const {
  if (x.ndim() != 4 || x.shape(3) < dims_) {
    fail("x must be [B, heads, L, D] with D of at least " + std::to_string(dims_) + ", but got rank " +
         std::to_string(x.ndim()) + (x.ndim() == 4 ? " and D " + std::to_string(x.shape(3)) : ""));
  }
  if (const auto* rows = std::get_if<mx::array>(&offset); rows && rows->shape() != mx::Shape{x.shape(0)}) {
    fail("offsets must be one per row of " + std::to_string(x.shape(0)));
  }
  const float scale = scale_ * options.scale * (options.inverse ? -1.0f : 1.0f);
  const float input_scale = options.inverse ? 1.0f / input_scale_ : input_scale_;
  const auto rotate = [&](const mx::array& rows, const std::optional<float>& base, const Offset& at) {
    if (const int* position = std::get_if<int>(&at)) {
      return mx::fast::rope(rows, dims_, traditional_, base, scale, *position, freqs_);
    }
    return mx::fast::rope(rows, dims_, traditional_, base, scale, std::get<mx::array>(at), freqs_);
  };

  if (dynamic_) {
    const auto base_for = [&](int last) {
      const int length = std::max(last, dynamic_->max_position_embeddings);
      const float stretch =
          dynamic_->factor * static_cast<float>(length) / static_cast<float>(dynamic_->max_position_embeddings) -
          (dynamic_->factor - 1.0f);
      return dynamic_->base * std::pow(stretch, static_cast<float>(dims_) / static_cast<float>(dims_ - 2));
    };
    const int L = x.shape(2);
    if (const int* position = std::get_if<int>(&offset)) return rotate(x, base_for(L + *position), offset);
    // Each row has its own length, hence its own base; one call when all lie within the trained length.
    mx::array positions = mx::contiguous(mx::astype(std::get<mx::array>(offset), mx::int32));
    mx::eval(positions);
    const int* row_positions = positions.data<int>();
    const int B = x.shape(0);
    const int furthest = *std::max_element(row_positions, row_positions + B) + L;
    if (furthest <= dynamic_->max_position_embeddings) return rotate(x, dynamic_->base, offset);
    std::vector<mx::array> rows;
    for (int b = 0; b < B; ++b) {
      auto row = mx::slice(x, {b, 0, 0, 0}, {b + 1, x.shape(1), L, x.shape(3)});
      rows.push_back(rotate(row, base_for(L + row_positions[b]), row_positions[b]));
    }
    return mx::concatenate(rows, 0);
  }

  if (input_scale == 1.0f) return rotate(x, base_, offset);
  if (dims_ == x.shape(-1)) return rotate(mx::multiply(x, mx::array(input_scale, x.dtype())), base_, offset);
  std::vector<mx::array> parts = mx::split(x, mx::Shape{dims_}, -1);
  parts[0] = mx::multiply(parts[0], mx::array(input_scale, x.dtype()));
  return rotate(mx::concatenate(parts, -1), base_, offset);
}

float apply_yarn_mscale(float scale, const RopeScaling& scaling) {
  const float mscale = scaling.mscale_all_dim.value_or(0.0f);
  if (scaling.type == "default" || mscale == 0.0f || !scaling.factor) return scale;
  const float magnitude = yarn_magnitude(*scaling.factor, mscale);
  return scale * magnitude * magnitude;
}

}  // namespace reprise
