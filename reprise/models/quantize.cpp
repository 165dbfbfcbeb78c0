#include "reprise/models/quantize.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/language_model.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

using Json = nlohmann::ordered_json;

struct Spec {
  int group_size;
  int bits;
  std::string mode;
  bool operator==(const Spec&) const = default;

  Json json() const {
    Json object = {{"group_size", group_size}, {"bits", bits}};
    if (mode != "affine") object["mode"] = mode;
    return object;
  }
};

Spec spec_of(const QuantizeOptions& options) {
  if (options.format) return {group_size_of(*options.format), bits_of(*options.format), name_of(*options.format)};
  // Groups of 16 are ours alone.
  if (options.group_size == 16 || !is_affine_format(options.bits, options.group_size, options.group_size)) {
    throw Error(ErrorCode::invalid_argument,
                "[quantize_model] bits must be 2, 3, 4, 5, 6 or 8 and the group size 32, 64 or 128, but got " +
                    std::to_string(options.bits) + " and " + std::to_string(options.group_size));
  }
  return {options.group_size, options.bits, "affine"};
}

bool is_router(const std::string& path) {
  return path.ends_with(".gate") || path.ends_with(".router") || path.ends_with("shared_expert_gate");
}

// "model.layers.0.mlp.up_proj.weight" → without its last word.
std::string path_of(const std::string& name) { return name.substr(0, name.rfind('.')); }

// How the matrix at `path` is quantised; none: it stays dense.
std::optional<Spec> choose(const std::string& path, int in, const Spec& wanted) {
  if (const Spec exact{64, 8, "affine"}; is_router(path) && in % exact.group_size == 0) return exact;
  if (in % wanted.group_size == 0) return wanted;
  return {};
}

Json with_quantization(const std::string& config_json, const Json& quantization) {
  Json config = Json::parse(config_json);
  config.erase("_name_or_path");
  config["quantization"] = quantization;
  config["quantization_config"] = quantization;
  return config;
}

void check_is_dense(const std::string& config_json) {
  const Json config = Json::parse(config_json);
  if (!config.contains("quantization") && !config.contains("quantization_config")) return;
  throw Error(ErrorCode::failed_precondition,
              "[quantize_model] the model is quantised already: start from its dense original");
}

}  // namespace

QuantizedModel quantize_model(const ModelFiles& files, const QuantizeOptions& options) {
  const Spec wanted = spec_of(options);
  check_is_dense(files.config_json);
  std::vector<StoredWeight> stored;
  make_model(files, {.stored = &stored});

  QuantizedModel quantized;
  Json quantization = {{"group_size", wanted.group_size}, {"bits", wanted.bits}, {"mode", wanted.mode}};
  std::size_t bytes = 0;
  bool any = false;
  const auto put = [&](const std::string& name, const mx::array& value) {
    bytes += value.nbytes();
    quantized.weights.insert_or_assign(name, value);
  };
  for (const StoredWeight& weight : stored) {
    mx::array value = weight.value;
    quantized.num_parameters += value.size();
    if (options.dtype && mx::issubdtype(value.dtype(), mx::floating)) value = mx::astype(value, *options.dtype);
    const std::string path = path_of(weight.name);
    const auto spec = weight.is_matrix ? choose(path, value.shape(-1), wanted) : std::nullopt;
    if (!spec) {
      put(weight.name, value);
      continue;
    }
    any = true;
    if (*spec != wanted) quantization[path] = spec->json();
    const auto parts = mx::quantize(value, spec->group_size, spec->bits, spec->mode);
    put(path + ".weight", parts[0]);
    put(path + ".scales", parts[1]);
    if (parts.size() > 2) put(path + ".biases", parts[2]);
  }
  if (!any) {
    throw Error(ErrorCode::invalid_argument, "[quantize_model] a group size of " + std::to_string(wanted.group_size) +
                                                 " divides the inputs of no layer");
  }
  quantized.config_json = with_quantization(files.config_json, quantization).dump(4) + "\n";
  quantized.bits_per_weight = 8.0 * static_cast<double>(bytes) / static_cast<double>(quantized.num_parameters);
  return quantized;
}

}  // namespace reprise
