#include "reprise/models/deepseek_checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/models/model_parts.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

[[noreturn]] void corrupt(const std::string& what) { throw Error(ErrorCode::corrupt_data, "[make_model] " + what); }

// The number of the layer that a weight belongs to.
std::optional<int> layer_of(const std::string& name) {
  const std::string prefix = "model.layers.";
  if (!name.starts_with(prefix)) return {};
  int layer = 0;
  const auto parsed = std::from_chars(name.data() + prefix.size(), name.data() + name.size(), layer);
  return parsed.ec == std::errc() ? std::optional(layer) : std::nullopt;
}

// The weights whose names end so, without that ending.
std::vector<std::string> paths_with(const WeightReader& weights, const std::string& ending) {
  std::vector<std::string> paths;
  for (const std::string& name : weights.names()) {
    if (name.ends_with(ending)) paths.push_back(name.substr(0, name.size() - ending.size()));
  }
  return paths;
}

constexpr int kMaxBlock = 4096;  // matrices are filled up to whole blocks

struct BlockSize {
  int rows = 128;
  int columns = 128;
};

BlockSize fp8_block_size(const Config& config) {
  const auto quantization = config.get_object("quantization_config");
  if (!quantization || !quantization->has("weight_block_size")) return {};
  const std::vector<int> size = quantization->get_ints("weight_block_size");
  const auto fits = [](int extent) { return extent >= 1 && extent <= kMaxBlock; };
  if (size.size() != 2 || !fits(size[0]) || !fits(size[1])) {
    corrupt("weight_block_size must be two numbers in [1, " + std::to_string(kMaxBlock) + "]");
  }
  return {size[0], size[1]};
}

// e4m3 bytes [out, in], one scale a block.
mx::array from_fp8(const std::string& name, const mx::array& bytes, const mx::array& scales, const BlockSize& block) {
  if (bytes.ndim() != 2 || bytes.dtype() != mx::uint8) corrupt("weight '" + name + "' must be a matrix of F8_E4M3");
  const int rows = (bytes.shape(0) + block.rows - 1) / block.rows;
  const int columns = (bytes.shape(1) + block.columns - 1) / block.columns;
  if (scales.shape() != mx::Shape{rows, columns} || !mx::issubdtype(scales.dtype(), mx::floating)) {
    corrupt("scales of '" + name + "' must be [" + std::to_string(rows) + ", " + std::to_string(columns) +
            "], but got " + shape_text(scales.shape()));
  }
  const std::pair<int, int> below{0, rows * block.rows - bytes.shape(0)};
  const std::pair<int, int> right{0, columns * block.columns - bytes.shape(1)};
  const mx::array whole = mx::pad(mx::from_fp8(bytes, mx::bfloat16), {below, right});
  const mx::array blocks = mx::reshape(whole, {rows, block.rows, columns, block.columns});
  const mx::array scaled = mx::multiply(blocks, mx::reshape(scales, {rows, 1, columns, 1}));
  return mx::astype(mx::slice(mx::reshape(scaled, whole.shape()), {0, 0}, bytes.shape()), mx::bfloat16);
}

void dequantize_fp8(WeightReader& weights, const Config& config) {
  for (const std::string& path : paths_with(weights, ".weight_scale_inv")) {
    const mx::array scales = weights.release(path + ".weight_scale_inv");
    const std::string name = path + ".weight";
    weights.put(name, from_fp8(name, weights.release(name), scales, fp8_block_size(config)));
  }
}

// compressed-tensors' 4-bit integers: what is packed counts from 8, which MLX's biases say.
void repack_int4(WeightReader& weights) {
  for (const std::string& path : paths_with(weights, ".weight_shape")) {
    mx::array shape = mx::astype(weights.release(path + ".weight_shape"), mx::int32);
    const mx::array packed = weights.release(path + ".weight_packed");
    const mx::array scales = weights.release(path + ".weight_scale");
    mx::eval(shape);
    const bool is_packed = shape.shape() == mx::Shape{2} && packed.ndim() == 2 && packed.dtype() == mx::int32 &&
                           scales.ndim() == 2 && mx::issubdtype(scales.dtype(), mx::floating);
    if (!is_packed) corrupt("weight '" + path + ".weight_packed' must be a packed matrix with scales");
    if (std::int64_t{packed.shape(1)} * 8 != shape.data<std::int32_t>()[1]) {
      throw Error(ErrorCode::unsupported, "[make_model] weight '" + path + ".weight_packed' must have 4 bits");
    }
    weights.put(path + ".weight", mx::view(packed, mx::uint32));
    weights.put(path + ".scales", scales);
    weights.put(path + ".biases", mx::multiply(scales, mx::array(-8.0f, scales.dtype())));
  }
}

}  // namespace

QuantizationOverrides deepseek_quantization(const Config& config) {
  const auto original = config.get_object("quantization_config");
  if (original && !config.has("quantization")) {
    const std::string method = original->get_string("quant_method").value_or("");
    if (method == "fp8" || method == "compressed-tensors") return {};
  }
  return config.quantization_overrides();
}

void to_mlx_layout(WeightReader& weights, const Config& config) {
  const int layers = config.require_positive_int("num_hidden_layers");
  drop_rotary_buffers(weights);
  weights.drop([&](const std::string& name) { return layer_of(name).value_or(0) >= layers; });
  repack_int4(weights);
  dequantize_fp8(weights, config);
  if (!config.has("n_routed_experts")) return;
  const int experts = config.require_positive_int("n_routed_experts");
  for (int i = 0; i < layers; ++i) {
    stack_experts_of_glu(weights, "model.layers." + std::to_string(i) + ".mlp", experts);
  }
}

void split_kv_b_proj(WeightReader& weights, const std::string& path, const LatentSizes& sizes) {
  const std::string name = path + ".kv_b_proj";
  if (!weights.has(name + ".weight")) return;
  const int rank = sizes.kv_lora_rank;
  const int features = sizes.nope + sizes.value;
  // [heads, features, columns] → those of keys, those of values.
  const auto split_heads = [&](const std::string& part, const mx::array& rows) {
    if (rows.ndim() != 2 || rows.shape(0) != sizes.heads * features) {
      corrupt("weight '" + name + part + "' must have " + std::to_string(sizes.heads * features) + " rows, but got " +
              shape_text(rows.shape()));
    }
    return mx::split(mx::reshape(rows, {sizes.heads, features, rows.shape(1)}), mx::Shape{sizes.nope}, 1);
  };
  const auto weight = split_heads(".weight", weights.release(name + ".weight"));
  weights.put(path + ".unembed_out.weight", weight[1]);
  if (!weights.has(name + ".scales")) {
    weights.put(path + ".embed_q.weight", mx::swapaxes(weight[0], 1, 2));
    return;
  }
  const auto scales = split_heads(".scales", weights.release(name + ".scales"));
  const auto biases = split_heads(".biases", weights.release(name + ".biases"));
  weights.put(path + ".unembed_out.scales", scales[1]);
  weights.put(path + ".unembed_out.biases", biases[1]);
  const int groups = scales[0].shape(2);
  if (weight[0].dtype() != mx::uint32 || biases[0].shape() != scales[0].shape() || groups < 1 || rank % groups != 0 ||
      std::int64_t{weight[0].shape(2)} * 32 % rank != 0) {
    corrupt("weight '" + name + "' is not quantised as " + std::to_string(rank) + " inputs can be");
  }
  // The other axis becomes the inputs, hence the groups.
  const int bits = static_cast<int>(std::int64_t{weight[0].shape(2)} * 32 / rank);
  const mx::array dense = mx::dequantize(weight[0], scales[0], biases[0], rank / groups, bits);
  const auto packed = mx::quantize(mx::swapaxes(dense, 1, 2), rank / groups, bits);
  weights.put(path + ".embed_q.weight", packed[0]);
  weights.put(path + ".embed_q.scales", packed[1]);
  weights.put(path + ".embed_q.biases", packed[2]);
}

}  // namespace reprise::internal
