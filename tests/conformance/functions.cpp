#include "tests/conformance/functions.h"

#include <cmath>
#include <stdexcept>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/nn/attention.h"
#include "reprise/nn/masks.h"
#include "reprise/nn/rope.h"

namespace reprise::conformance {

namespace mx = mlx::core;

namespace {

template <typename T>
std::optional<T> optional(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? std::nullopt : std::optional<T>(found->get<T>());
}

mx::array int_array(const Json& list) {
  const auto values = list.get<std::vector<int>>();
  return mx::array(values.begin(), mx::Shape{static_cast<mx::ShapeElem>(values.size())}, mx::int32);
}

std::optional<mx::array> optional_ints(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? std::nullopt : std::optional(int_array(*found));
}

std::vector<float> floats(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || found->is_null()) return {};
  return found->is_number() ? std::vector<float>{found->get<float>()} : found->get<std::vector<float>>();
}

RopeScaling scaling_of(const Json& config) {
  RopeScaling scaling;
  scaling.type = config.contains("type") ? config["type"] : config.value("rope_type", Json("default"));
  scaling.factor = optional<float>(config, "factor");
  scaling.low_freq_factor = optional<float>(config, "low_freq_factor");
  scaling.high_freq_factor = optional<float>(config, "high_freq_factor");
  scaling.original_max_position_embeddings = optional<int>(config, "original_max_position_embeddings");
  scaling.beta_fast = optional<float>(config, "beta_fast");
  scaling.beta_slow = optional<float>(config, "beta_slow");
  scaling.mscale = optional<float>(config, "mscale");
  scaling.mscale_all_dim = optional<float>(config, "mscale_all_dim");
  scaling.partial_rotary_factor = optional<float>(config, "partial_rotary_factor");
  scaling.long_mscale = optional<float>(config, "long_mscale");
  scaling.long_factor = floats(config, "long_factor");
  scaling.mrope_section = config.value("mrope_section", std::vector<int>());
  return scaling;
}

mx::array apply_rope(const Json& args, const Family& family) {
  RopeOptions options;
  options.dims = args.at("dims");
  options.base = args.at("base");
  options.traditional = args.at("traditional");
  options.max_position_embeddings = optional<int>(args, "max_position_embeddings");
  if (args.contains("scaling_config") && !args["scaling_config"].is_null())
    options.scaling = scaling_of(args["scaling_config"]);
  const Json& offset = args.at("offset");
  const Offset at = offset.is_array() ? Offset(int_array(offset)) : Offset(offset.get<int>());
  return Rope(options)(family.array(args.at("x")), at);
}

QuantizedTensor quantized_tensor(const Json& names, const Family& family) {
  return {family.array(names.at(0)), family.array(names.at(1)), family.array(names.at(2))};
}

void quantized_attention(const Json& args, const Family& family, Observation& out) {
  const QuantizedKV keys_values{quantized_tensor(args.at("q_keys"), family),
                                quantized_tensor(args.at("q_values"), family),
                                {args.at("group_size"), args.at("bits")}};
  AttentionScoreOptions options;
  options.scale = args.at("scale");
  if (const Json mask = args.value("mask", Json()); !mask.is_null()) {
    options.mask = mask == "causal" ? Mask(Causal{}) : Mask(family.array(mask));
  }
  const mx::array queries = mx::copy(family.array(args.at("queries")));
  out.arrays["out"] = {scaled_dot_product_attention(queries, keys_values, options)};
  out.arrays["queries_after"] = {queries};
}

void quantize(const Json& args, const Family& family, Observation& out) {
  const int group_size = args.at("group_size");
  const int bits = args.at("bits");
  const Arrays parts = mx::quantize(family.array(args.at("x")), group_size, bits);
  out.arrays["quantized"] = parts;
  out.arrays["dequantized"] = {mx::dequantize(parts.at(0), parts.at(1), parts.at(2), group_size, bits)};
}

void call(const std::string& function, const Json& args, const Family& family, Observation& out) {
  if (function == "create_causal_mask") {
    CausalMaskOptions options;
    options.window = optional<int>(args, "window_size");
    options.left_padding = optional_ints(args, "left_padding");
    options.right_padding = optional_ints(args, "right_padding");
    out.mask = create_causal_mask(args.at("N"), args.value("offset", 0), options);
  } else if (function == "cache_attention_mask") {
    out.mask = create_attention_mask(args.at("N"), args.at("offset"),
                                     {args.value("return_array", false), optional<int>(args, "window_size")});
  } else if (function == "rope") {
    out.arrays["out"] = {apply_rope(args, family)};
  } else if (function == "quantized_sdpa") {
    quantized_attention(args, family, out);
  } else if (function == "quantize") {
    quantize(args, family, out);
  } else {
    throw std::runtime_error("unknown function " + function);
  }
}

}  // namespace

std::string rope_kind(const Json& args) {
  const Json config = args.value("scaling_config", Json());
  return config.is_object() ? scaling_of(config).type : "default";
}

Observation call_function(const Json& test_case, const Family& family) {
  Observation out;
  try {
    call(test_case.at("fn"), test_case.at("args"), family, out);
    std::vector<mx::array> arrays;
    for (const auto& [name, list] : out.arrays) arrays.insert(arrays.end(), list.begin(), list.end());
    if (out.mask && std::holds_alternative<mx::array>(*out.mask)) arrays.push_back(std::get<mx::array>(*out.mask));
    mx::eval(std::move(arrays));
  } catch (...) {
    out = refusal();
  }
  return out;
}

}  // namespace reprise::conformance
