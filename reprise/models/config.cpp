#include "reprise/models/config.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "reprise/base/error.h"

namespace reprise::internal {

using Json = nlohmann::json;

struct Config::Document {
  Json json;
};

namespace {

// More than any model has: lists of so many layers are made before a weight is asked for.
constexpr int kMostLayers = 10'000;

[[noreturn]] void corrupt(const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[Config] config.json: " + what);
}

const Json* find(const Json& object, const std::string& key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

[[noreturn]] void wrong_type(const std::string& key, const char* wanted, const Json& got) {
  corrupt("'" + key + "' must be " + wanted + ", but got " + got.dump().substr(0, 80));
}

std::optional<int> int_of(const Json& object, const std::string& key) {
  const Json* value = find(object, key);
  if (value == nullptr) return {};
  // Some configs write whole numbers as 1.0.
  if (!value->is_number()) wrong_type(key, "a whole number", *value);
  const double number = value->get<double>();
  if (number != std::floor(number) || std::abs(number) > std::numeric_limits<int>::max()) {
    wrong_type(key, "a whole number", *value);
  }
  return static_cast<int>(number);
}

std::optional<float> float_of(const Json& object, const std::string& key) {
  const Json* value = find(object, key);
  if (value == nullptr) return {};
  if (!value->is_number()) wrong_type(key, "a number", *value);
  return value->get<float>();
}

std::optional<std::string> string_of(const Json& object, const std::string& key) {
  const Json* value = find(object, key);
  if (value == nullptr) return {};
  if (!value->is_string()) wrong_type(key, "a string", *value);
  return value->get<std::string>();
}

template <typename Number>
std::vector<Number> numbers_of(const Json& object, const std::string& key) {
  const Json* value = find(object, key);
  if (value == nullptr) return {};
  if (value->is_number()) return {value->get<Number>()};
  if (!value->is_array()) wrong_type(key, "a list of numbers", *value);
  std::vector<Number> numbers;
  for (const Json& item : *value) {
    if (!item.is_number()) wrong_type(key, "a list of numbers", *value);
    numbers.push_back(item.get<Number>());
  }
  return numbers;
}

RopeScaling rope_scaling_of(const Json& object) {
  RopeScaling scaling;
  auto type = string_of(object, "type");
  if (!type) type = string_of(object, "rope_type");
  if (type) scaling.type = *type;
  scaling.factor = float_of(object, "factor");
  scaling.low_freq_factor = float_of(object, "low_freq_factor");
  scaling.high_freq_factor = float_of(object, "high_freq_factor");
  scaling.original_max_position_embeddings = int_of(object, "original_max_position_embeddings");
  scaling.beta_fast = float_of(object, "beta_fast");
  scaling.beta_slow = float_of(object, "beta_slow");
  scaling.mscale = float_of(object, "mscale");
  scaling.mscale_all_dim = float_of(object, "mscale_all_dim");
  scaling.attention_factor = float_of(object, "attention_factor");
  scaling.partial_rotary_factor = float_of(object, "partial_rotary_factor");
  scaling.long_mscale = float_of(object, "long_mscale");
  scaling.long_factor = numbers_of<float>(object, "long_factor");
  scaling.mrope_section = numbers_of<int>(object, "mrope_section");
  return scaling;
}

// Newer configs may have one object for each type of layer in it.
const Json* rope_parameters_of(const Json& config, const std::string& layer_type) {
  const Json* parameters = find(config, "rope_parameters");
  if (parameters == nullptr) return nullptr;
  if (!parameters->is_object()) wrong_type("rope_parameters", "an object", *parameters);
  if (const Json* own = find(*parameters, layer_type); own != nullptr && own->is_object()) return own;
  for (const auto& [key, value] : parameters->items()) {
    if (!value.is_object()) continue;
    throw Error(ErrorCode::unsupported,
                "[Config] rope_parameters of layer type '" + key + "' are not known to this architecture");
  }
  return parameters;
}

// None for affine quantisation.
std::optional<MicroscalingFormat> format_of(const std::string& mode) {
  if (mode == "affine") return {};
  if (const auto format = find_microscaling_format(mode)) return format;
  throw Error(ErrorCode::unsupported,
              "[Config] quantisation mode must be affine, mxfp4, mxfp8 or nvfp4, but got '" + mode + "'");
}

// `otherwise`: what an affine one leaves open. A format has one group size and one number of bits.
QuantizationSpec spec_of(const Json& object, const QuantizationSpec& otherwise) {
  const auto format = format_of(string_of(object, "mode").value_or("affine"));
  const QuantizationSpec open = format ? QuantizationSpec{group_size_of(*format), bits_of(*format), format}
                                       : (otherwise.format ? QuantizationSpec{} : otherwise);
  const QuantizationSpec spec{int_of(object, "group_size").value_or(open.group_size),
                              int_of(object, "bits").value_or(open.bits), format};
  if (format && (spec.group_size != open.group_size || spec.bits != open.bits)) {
    corrupt(std::string("quantisation mode ") + name_of(*format) + " has " + std::to_string(open.bits) +
            " bits in groups of " + std::to_string(open.group_size) + ", but got " + std::to_string(spec.bits) +
            " in groups of " + std::to_string(spec.group_size));
  }
  return spec;
}

}  // namespace

Config::Config(const std::string& json_text) {
  Json json = Json::parse(json_text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) corrupt("must be a JSON object");
  document_ = std::make_shared<const Document>(Document{std::move(json)});
}

int Config::require_positive_int(const std::string& key) const {
  const auto value = get_int(key);
  if (!value) corrupt("'" + key + "' is missing");
  if (*value <= 0) corrupt("'" + key + "' must be positive, but got " + std::to_string(*value));
  if (key == "num_hidden_layers" && *value > kMostLayers) {
    corrupt("'" + key + "' must be at most " + std::to_string(kMostLayers) + ", but got " + std::to_string(*value));
  }
  return *value;
}

float Config::require_positive_float(const std::string& key) const {
  const auto value = get_float(key);
  if (!value) corrupt("'" + key + "' is missing");
  if (!(*value > 0.0f && std::isfinite(*value))) {
    corrupt("'" + key + "' must be positive, but got " + std::to_string(*value));
  }
  return *value;
}

std::string Config::require_string(const std::string& key) const {
  const auto value = get_string(key);
  if (!value) corrupt("'" + key + "' is missing");
  return *value;
}

std::optional<int> Config::get_int(const std::string& key) const { return int_of(document_->json, key); }
std::optional<int> Config::get_int_or_auto(const std::string& key) const {
  const Json* value = find(document_->json, key);
  return value != nullptr && *value == "auto" ? std::nullopt : get_int(key);
}
std::optional<float> Config::get_float(const std::string& key) const { return float_of(document_->json, key); }
std::optional<std::string> Config::get_string(const std::string& key) const { return string_of(document_->json, key); }

std::optional<bool> Config::get_bool(const std::string& key) const {
  const Json* value = find(document_->json, key);
  if (value == nullptr) return {};
  if (!value->is_boolean()) wrong_type(key, "true or false", *value);
  return value->get<bool>();
}

std::optional<bool> Config::get_flag(const std::string& key) const {
  const Json* value = find(document_->json, key);
  if (value == nullptr || value->is_boolean()) return get_bool(key);
  const auto number = get_int(key);
  return number ? std::optional(*number != 0) : std::nullopt;
}

std::vector<std::string> Config::get_strings(const std::string& key) const {
  const Json* value = find(document_->json, key);
  if (value == nullptr) return {};
  if (!value->is_array()) wrong_type(key, "a list of strings", *value);
  std::vector<std::string> strings;
  for (const Json& item : *value) {
    if (!item.is_string()) wrong_type(key, "a list of strings", *value);
    strings.push_back(item.get<std::string>());
  }
  return strings;
}

std::vector<int> Config::get_ints(const std::string& key) const { return numbers_of<int>(document_->json, key); }
std::vector<float> Config::get_floats(const std::string& key) const { return numbers_of<float>(document_->json, key); }

std::vector<bool> Config::get_bools(const std::string& key) const {
  const Json* value = find(document_->json, key);
  if (value == nullptr) return {};
  if (!value->is_array()) wrong_type(key, "a list of true and false", *value);
  std::vector<bool> flags;
  for (const Json& item : *value) {
    // Some configs write 0 and 1.
    if (!item.is_boolean() && !item.is_number_integer()) wrong_type(key, "a list of true and false", *value);
    flags.push_back(item.is_boolean() ? item.get<bool>() : item.get<int>() != 0);
  }
  return flags;
}

Config Config::require_object(const std::string& key) const {
  auto object = get_object(key);
  if (!object) corrupt("'" + key + "' is missing");
  return *object;
}

std::optional<Config> Config::get_object(const std::string& key) const {
  const Json* value = find(document_->json, key);
  if (value == nullptr) return {};
  if (!value->is_object()) wrong_type(key, "an object", *value);
  return Config(std::make_shared<const Document>(Document{*value}));
}

bool Config::has(const std::string& key) const { return find(document_->json, key) != nullptr; }

RopeOptions Config::rope(int dims, const RopeKeys& keys) const {
  // A table of frequencies is made before any weight has told the size.
  constexpr int kMostDims = 1 << 16;
  if (dims > kMostDims) corrupt("heads must have at most " + std::to_string(kMostDims) + " features that rotate");
  const Json& json = document_->json;
  RopeOptions options{.dims = dims, .traditional = get_bool("rope_traditional").value_or(false)};
  options.max_position_embeddings = get_int("max_position_embeddings");
  const Json* parameters = rope_parameters_of(json, keys.layer_type);
  const Json* scaling = parameters != nullptr ? parameters : find(json, "rope_scaling");
  if (scaling != nullptr && !scaling->is_object()) wrong_type("rope_scaling", "an object", *scaling);
  std::optional<float> base = get_float("rope_theta");
  const bool is_own_part = parameters != find(json, "rope_parameters");
  if (parameters != nullptr && (is_own_part || !base)) {
    if (const auto theirs = float_of(*parameters, "rope_theta")) base = theirs;
  }
  options.base = base.value_or(keys.base_otherwise);
  if (scaling != nullptr) options.scaling = rope_scaling_of(*scaling);
  return options;
}

int Config::rotary_dims(int head_dim, float factor_otherwise) const {
  auto factor = get_float("partial_rotary_factor");
  if (const Json* parameters = find(document_->json, "rope_parameters"); !factor && parameters != nullptr) {
    if (parameters->is_object()) factor = float_of(*parameters, "partial_rotary_factor");
  }
  const float share = factor.value_or(factor_otherwise);
  if (!(share > 0.0f && share <= 1.0f)) corrupt("'partial_rotary_factor' must lie in (0, 1]");
  return static_cast<int>(static_cast<float>(head_dim) * share);
}

Config Config::with_defaults(const std::string& json_text) const {
  Json json = Json::parse(json_text);
  for (const auto& [key, value] : document_->json.items()) {
    if (!value.is_null()) json[key] = value;
  }
  return Config(std::make_shared<const Document>(Document{std::move(json)}));
}

Config Config::with_member(const std::string& key, int value) const {
  Json json = document_->json;
  json[key] = value;
  return Config(std::make_shared<const Document>(Document{std::move(json)}));
}

QuantizationOverrides Config::quantization_overrides() const {
  const Json& json = document_->json;
  const Json* object = find(json, "quantization");
  if (object == nullptr) object = find(json, "quantization_config");
  if (object == nullptr) return {};
  if (!object->is_object()) wrong_type("quantization", "an object", *object);
  if (const auto method = string_of(*object, "quant_method"); method && find(*object, "bits") == nullptr) {
    // Original checkpoints of this method store the experts so, and nothing else.
    if (*method == "mxfp4") return {};
    throw Error(ErrorCode::unsupported, "[Config] quantisation method '" + *method + "' is not supported");
  }
  const QuantizationSpec otherwise = spec_of(*object, QuantizationSpec{});
  QuantizationOverrides overrides;
  for (const auto& [key, value] : object->items()) {
    if (value.is_object()) overrides[key] = spec_of(value, otherwise);
    // `true` means what absence means.
    if (value.is_boolean() && !value.get<bool>()) overrides[key] = std::nullopt;
  }
  return overrides;
}

}  // namespace reprise::internal
