#include "reprise/models/model_parts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "mlx/device.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// Ids that a running step still computes are the sampler's, hence in range; looking at them would wait for that step.
bool in_vocabulary(const mx::array& tokens, int vocab_size) {
  if (!tokens.is_available() || tokens.dtype() != mx::int32 || !tokens.flags().row_contiguous) return true;
  const auto* ids = tokens.data<std::int32_t>();
  return std::all_of(ids, ids + tokens.size(), [&](std::int32_t id) { return id >= 0 && id < vocab_size; });
}

}  // namespace

void check_tokens(const mx::array& tokens, int vocab_size) {
  if (tokens.ndim() != 2 || tokens.shape(0) < 1 || tokens.shape(1) < 1 ||
      !mx::issubdtype(tokens.dtype(), mx::integer)) {
    throw Error(ErrorCode::invalid_argument,
                "[LanguageModel::forward] tokens must be integers [B, L] with L of at least "
                "1, but got rank " +
                    std::to_string(tokens.ndim()) + " and " + std::to_string(tokens.size()) + " elements");
  }
  if (!in_vocabulary(tokens, vocab_size)) {
    throw Error(ErrorCode::invalid_argument,
                "[LanguageModel::forward] token ids must lie in [0, " + std::to_string(vocab_size) + ")");
  }
}

std::string shape_text(const mx::Shape& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

float norm_eps(const Config& config, const std::string& key, float otherwise) {
  const float eps = config.get_float(key).value_or(otherwise);
  if (!(eps > 0.0f && std::isfinite(eps))) {
    throw Error(ErrorCode::corrupt_data, "[make_model] " + key + " must be positive");
  }
  return eps;
}

void require_activation(const Config& config, const std::string& key, const std::vector<std::string>& known) {
  const auto name = config.get_string(key);
  if (!name || std::find(known.begin(), known.end(), *name) != known.end()) return;
  std::string names;
  for (const std::string& one : known) names += (names.empty() ? "" : " or ") + one;
  throw Error(ErrorCode::unsupported, "[make_model] " + key + " must be " + names + ", but got '" + *name + "'");
}

void require_flag(const Config& config, const std::string& key, bool value) {
  if (config.get_bool(key).value_or(value) == value) return;
  throw Error(ErrorCode::unsupported, "[make_model] " + key + " is supported only as " + (value ? "true" : "false"));
}

void require_absent(const Config& config, const std::string& key) {
  if (config.has(key)) throw Error(ErrorCode::unsupported, "[make_model] " + key + " is not supported");
}

std::vector<LayerKind> attention_kinds(const Config& config) {
  const auto layers = static_cast<std::size_t>(config.require_positive_int("num_hidden_layers"));
  const std::vector<std::string> types = config.get_strings("layer_types");
  if (types.empty()) return std::vector<LayerKind>(layers, FullAttention{});
  if (types.size() != layers) {
    throw Error(ErrorCode::corrupt_data, "[make_model] layer_types must name " + std::to_string(layers) +
                                             " layers, but got " + std::to_string(types.size()));
  }
  std::vector<LayerKind> kinds;
  for (const std::string& type : types) {
    if (type == "full_attention") {
      kinds.emplace_back(FullAttention{});
    } else if (type == "sliding_attention") {
      kinds.emplace_back(SlidingAttention{config.require_positive_int("sliding_window")});
    } else {
      throw Error(ErrorCode::unsupported, "[make_model] layers of type '" + type + "' are not supported");
    }
  }
  return kinds;
}

namespace {

// Of the layers from `first` on.
std::vector<LayerKind> sliding_from(std::size_t first, const Config& config) {
  std::vector<LayerKind> kinds = attention_kinds(config);
  if (!config.get_strings("layer_types").empty() || !config.has("sliding_window")) return kinds;
  const int window = config.require_positive_int("sliding_window");
  if (const auto positions = config.get_int("max_position_embeddings"); positions && *positions <= window) return kinds;
  for (std::size_t i = first; i < kinds.size(); ++i) kinds[i] = SlidingAttention{window};
  return kinds;
}

}  // namespace

std::vector<LayerKind> same_attention_kinds(const Config& config) { return sliding_from(0, config); }

std::vector<LayerKind> upper_window_kinds(const Config& config) {
  if (!config.get_bool("use_sliding_window").value_or(false)) return attention_kinds(config);
  return sliding_from(static_cast<std::size_t>(std::max(0, config.get_int("max_window_layers").value_or(28))), config);
}

GatedMlp take_gated_mlp(WeightReader& weights, const std::string& path, int hidden_size, int size, bool bias) {
  return {.gate_proj = weights.take_linear(path + ".gate_proj", size, hidden_size, bias),
          .up_proj = weights.take_linear(path + ".up_proj", size, hidden_size, bias),
          .down_proj = weights.take_linear(path + ".down_proj", hidden_size, size, bias)};
}

GatedMlp take_fused_gated_mlp(WeightReader& weights, const std::string& path, int hidden_size, int size) {
  const auto gate_up = weights.take_linears(path + ".gate_up_proj", {size, size}, hidden_size, false);
  return {.gate_proj = gate_up[0],
          .up_proj = gate_up[1],
          .down_proj = weights.take_linear(path + ".down_proj", hidden_size, size, false)};
}

RmsNorm unweighted_rms_norm(int size, float eps, mx::Dtype dtype) {
  mx::array ones = mx::ones({size}, dtype);
  ones.eval();
  return RmsNorm(std::move(ones), eps);
}

ExpertCounts ExpertCounts::from(const Config& config, const std::string& all_key, const std::string& per_token_key) {
  const ExpertCounts counts{config.require_positive_int(all_key), config.require_positive_int(per_token_key)};
  if (counts.per_token <= counts.all) return counts;
  throw Error(ErrorCode::corrupt_data, "[make_model] " + per_token_key + " must be at most " +
                                           std::to_string(counts.all) + ", but got " +
                                           std::to_string(counts.per_token));
}

void stack_experts_of_glu(WeightReader& weights, const std::string& path, int experts) {
  for (const std::string map : {"gate_proj", "up_proj", "down_proj"}) {
    const auto name = [&](int expert) { return path + ".experts." + std::to_string(expert) + "." + map; };
    weights.stack_experts(experts, name, path + ".switch_mlp." + map);
  }
}

void drop_rotary_buffers(WeightReader& weights) {
  weights.drop([](const std::string& name) { return name.ends_with("rotary_emb.inv_freq"); });
}

namespace {

mx::Dtype checked(mx::Dtype dtype, const char* option) {
  if (dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16) return dtype;
  throw Error(ErrorCode::invalid_argument,
              std::string("[make_model] ") + option + " must be float32, float16 or bfloat16");
}

}  // namespace

mx::Dtype compute_dtype(const ModelOptions& options, const WeightMap& weights) {
  if (options.compute_dtype) return checked(*options.compute_dtype, "compute_dtype");
  // MLX's CPU kernels have no narrow arithmetic: float32 costs nothing there and rounds least.
  if (mx::default_device() == mx::Device::cpu) return mx::float32;
  for (const auto& [name, weight] : weights) {
    if (mx::issubdtype(weight.dtype(), mx::floating)) return weight.dtype();
  }
  return mx::float32;
}

mx::Dtype kv_dtype(const ModelOptions& options, mx::Dtype compute) {
  if (options.kv_dtype) return checked(*options.kv_dtype, "kv_dtype");
  // Half the memory, and half the time that attention takes to read them, at a loss far below the weights' own.
  return mx::default_device() == mx::Device::cpu ? mx::float16 : compute;
}

namespace {

// The scaling of `rope`, or, where the weights carry GGUF's rope factors, a scaling by them.
std::optional<RopeScaling> with_freq_factors(const RopeOptions& rope, WeightReader& weights) {
  const std::string name = "model.rope_freqs.weight";
  if (!weights.has(name)) return rope.scaling;
  auto factors = mx::astype(weights.take(name, {rope.dims / 2}), mx::float32);
  mx::eval(factors);
  return RopeScaling{.type = "freq_factors",
                     .freq_factors = {factors.data<float>(), factors.data<float>() + factors.size()}};
}

}  // namespace

std::shared_ptr<const Rope> make_rope(RopeOptions options, WeightReader& weights) {
  options.scaling = with_freq_factors(options, weights);
  return std::make_shared<const Rope>(options);
}

ModelInfo model_info(const Config& config, const WeightReader& weights, std::optional<int> layers) {
  if (config.get_int("max_position_embeddings").value_or(1) < 1) {
    throw Error(ErrorCode::corrupt_data, "[make_model] max_position_embeddings must be positive");
  }
  return {.model_type = config.require_string("model_type"),
          .num_hidden_layers = layers ? *layers : config.require_positive_int("num_hidden_layers"),
          .vocab_size = config.require_positive_int("vocab_size"),
          .hidden_size = config.require_positive_int("hidden_size"),
          .max_position_embeddings = config.get_int("max_position_embeddings"),
          .quantization = weights.describe_quantization(),
          .num_parameters = weights.num_parameters(),
          .weights_nbytes = weights.nbytes()};
}

}  // namespace reprise::internal
