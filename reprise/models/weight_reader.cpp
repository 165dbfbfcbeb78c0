#include "reprise/models/weight_reader.h"

#include <cstdint>
#include <numeric>
#include <utility>

#include "mlx/device.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/models/model_parts.h"
#include "reprise/nn/weight.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

[[noreturn]] void corrupt(const std::string& what) { throw Error(ErrorCode::corrupt_data, "[make_model] " + what); }

bool is_float(mx::Dtype dtype) { return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16; }

std::string name_of(const QuantizationSpec& spec) {
  if (spec.format) return reprise::name_of(*spec.format);
  return std::to_string(spec.bits) + "-bit, groups of " + std::to_string(spec.group_size);
}

void check_spec(const std::string& path, const QuantizationSpec& spec, int in) {
  if (spec.format) {
    if (in % spec.group_size == 0) return;
    corrupt("'" + path + "' with " + std::to_string(in) + " inputs cannot be quantised as " + name_of(spec));
  }
  if (!is_affine_format(spec.bits, spec.group_size, in)) {
    corrupt("'" + path + "' with " + std::to_string(in) + " inputs cannot be quantised with bits " +
            std::to_string(spec.bits) + " in groups of " + std::to_string(spec.group_size));
  }
}

}  // namespace

WeightReader::WeightReader(const ModelFiles& files, QuantizationOverrides overrides, const ModelOptions& options)
    : weights_(files.weights),
      adapter_(options.adapter),
      stored_(options.stored),
      overrides_(std::move(overrides)),
      dtype_(compute_dtype(options, files.weights)) {
  if (adapter_ == nullptr) return;
  for (const auto& [name, weight] : adapter_->weights) unused_adapter_weights_.insert(name);
}

void WeightReader::drop(const std::function<bool(const std::string&)>& useless) {
  std::erase_if(weights_, [&](const auto& entry) { return useless(entry.first); });
}

mx::array WeightReader::take_as_stored(const std::string& name, const mx::Shape& shape) {
  const auto found = weights_.find(name);
  if (found == weights_.end()) corrupt("weight '" + name + "' is missing");
  mx::array weight = found->second;
  if (stored_ != nullptr) {
    const auto original = as_stored_.find(name);
    stored_->push_back({name, original == as_stored_.end() ? weight : original->second, /*is_matrix=*/false});
  }
  if (adapter_ != nullptr && adapter_->kind == Adapter::Kind::full && unused_adapter_weights_.erase(name) != 0) {
    weight = adapter_->weights.at(name);
  }
  if (weight.shape() != shape) {
    corrupt("weight '" + name + "' must have shape " + shape_text(shape) + ", but got " + shape_text(weight.shape()));
  }
  weights_.erase(found);
  return weight;
}

mx::array WeightReader::keep(mx::array weight) {
  nbytes_ += weight.nbytes();
  weight = mx::contiguous(weight);  // no copy of what is
  taken_.push_back(weight);
  return weight;
}

mx::array WeightReader::take_float(const std::string& name, const mx::Shape& shape) {
  mx::array weight = take_as_stored(name, shape);
  if (!is_float(weight.dtype())) corrupt("weight '" + name + "' must be of a float type");
  num_parameters_ += weight.size();
  return weight;
}

mx::array WeightReader::take(const std::string& name, const mx::Shape& shape) {
  return keep(mx::astype(take_float(name, shape), dtype_));
}

mx::array WeightReader::take_float32(const std::string& name, const mx::Shape& shape) {
  return keep(mx::astype(take_float(name, shape), mx::float32));
}

// Our kernels on the CPU widen a matrix as they read it, so the narrow one stays; MLX's products want one dtype.
mx::array WeightReader::take_dense(const std::string& name, const mx::Shape& shape) {
  mx::array weight = take_float(name, shape);
  return keep(mx::default_device() == mx::Device::cpu ? std::move(weight) : mx::astype(weight, dtype_));
}

// A layer that the config does not name is packed as its shapes say: the config's default may be another one.
QuantizationSpec WeightReader::spec_of(const std::string& path, int in) const {
  const auto named = overrides_.find(path);
  if (named != overrides_.end()) {
    if (!named->second) corrupt("'" + path + "' has scales, but config.json says that it is not quantised");
    return *named->second;
  }
  const auto packed = weights_.find(path + ".weight");
  if (packed == weights_.end()) corrupt("weight '" + path + ".weight' is missing");
  const mx::array& scales = weights_.at(path + ".scales");
  if (packed->second.ndim() < 2 || scales.ndim() != packed->second.ndim() || scales.shape(-1) < 1) {
    corrupt("weight '" + path + "' must be a matrix, but got " + shape_text(packed->second.shape()));
  }
  const std::int64_t packed_bits = std::int64_t{packed->second.shape(-1)} * 32;
  const QuantizationSpec spec{in / scales.shape(-1), static_cast<int>(packed_bits / in)};
  if (scales.dtype() != mx::uint8) return spec;
  // Of these, each has its own sizes.
  for (const MicroscalingFormat format : kMicroscalingFormats) {
    if (spec.group_size == group_size_of(format) && spec.bits == bits_of(format)) {
      return {spec.group_size, spec.bits, format};
    }
  }
  corrupt("'" + path + "' has uint8 scales, but no format has " + std::to_string(spec.bits) + " bits in groups of " +
          std::to_string(spec.group_size));
}

Weight WeightReader::take_stored_weight(const std::string& path, mx::Shape front, int out, int in) {
  std::size_t size = static_cast<std::size_t>(out) * static_cast<std::size_t>(in);
  for (const int extent : front) size *= static_cast<std::size_t>(extent);
  const auto shape = [&](int columns) {
    mx::Shape all = front;
    all.push_back(out);
    all.push_back(columns);
    return all;
  };
  if (!has(path + ".scales")) {
    matrices_["not quantised"] += size;
    mx::array weight = take_dense(path + ".weight", shape(in));
    if (stored_ != nullptr) stored_->back().is_matrix = true;
    return weight;
  }
  const QuantizationSpec spec = spec_of(path, in);
  check_spec(path, spec, in);
  mx::array packed = take_as_stored(path + ".weight", shape(in * spec.bits / 32));
  if (packed.dtype() != mx::uint32) corrupt("weight '" + path + ".weight' must be uint32, being quantised");
  const mx::Shape groups = shape(in / spec.group_size);
  mx::array scales = take_as_stored(path + ".scales", groups);
  num_parameters_ += size;
  matrices_[name_of(spec)] += size;
  if (spec.format) {
    if (scales.dtype() != mx::uint8) corrupt("scales of '" + path + "' must be uint8, being " + name_of(spec));
    return MicroscaledWeight{keep(std::move(packed)), keep(std::move(scales)), *spec.format};
  }
  mx::array biases = take_as_stored(path + ".biases", groups);
  if (!is_float(scales.dtype()) || !is_float(biases.dtype()))
    corrupt("scales of '" + path + "' must be of a float type");
  QuantizedWeight weight{keep(std::move(packed)), keep(std::move(scales)), keep(std::move(biases)), spec.group_size,
                         spec.bits};
  weight.centred = is_centred(weight);
  return weight;
}

Weight WeightReader::take_weight(const std::string& path, int out, int in) {
  return take_stored_weight(path, {}, out, in);
}

SwitchLinear WeightReader::take_switch_linear(const std::string& path, int experts, int out, int in, bool bias) {
  Weight weight = take_stored_weight(path, {experts}, out, in);
  std::optional<mx::array> own_bias;
  if (bias) own_bias = take(path + ".bias", {experts, out});
  const auto low_rank = take_low_rank(
      path,
      [&](int rank) {
        return mx::Shape{experts, rank, in};
      },
      [&](int rank) {
        return mx::Shape{experts, out, rank};
      },
      1);
  if (!low_rank) return SwitchLinear(std::move(weight), std::move(own_bias));
  if (adapter_->kind == Adapter::Kind::dora) refuse_dora(path);
  return SwitchLinear(std::move(weight), std::move(own_bias), {low_rank->a, low_rank->b, adapter_->scale});
}

// MLX multiplies by it, which wants one dtype.
MultiLinear WeightReader::take_multi_linear(const std::string& path, int heads, int out, int in) {
  if (has(path + ".scales")) return MultiLinear(take_stored_weight(path, {heads}, out, in));
  const mx::array matrices = take(path + ".weight", {heads, out, in});
  if (stored_ != nullptr) stored_->back().is_matrix = true;
  matrices_["not quantised"] += matrices.size();
  return MultiLinear(matrices);
}

SwitchGlu WeightReader::take_switch_glu(const std::string& path, int experts, int hidden_size, int size, bool bias) {
  return {.gate_proj = take_switch_linear(path + ".gate_proj", experts, size, hidden_size, bias),
          .up_proj = take_switch_linear(path + ".up_proj", experts, size, hidden_size, bias),
          .down_proj = take_switch_linear(path + ".down_proj", experts, hidden_size, size, bias)};
}

void WeightReader::stack_experts(int experts, const std::function<std::string(int)>& path, const std::string& to) {
  for (const char* part : {".weight", ".scales", ".biases", ".bias"}) {
    if (!has(path(0) + part)) continue;
    std::vector<mx::array> stacked;
    for (int expert = 0; expert < experts; ++expert) {
      stacked.push_back(release(path(expert) + part));
      if (stacked.back().shape() == stacked[0].shape() && stacked.back().dtype() == stacked[0].dtype()) continue;
      corrupt("weight '" + path(expert) + part + "' must be as that of expert 0, " + shape_text(stacked[0].shape()) +
              ", but got " + shape_text(stacked.back().shape()));
    }
    put(to + part, mx::stack(stacked));
  }
}

Linear WeightReader::take_linear(const std::string& path, int out, int in, bool bias) {
  Weight weight = take_weight(path, out, in);
  std::optional<mx::array> own_bias;
  if (bias) own_bias = take(path + ".bias", {out});
  return adapted_linear(path, std::move(weight), std::move(own_bias));
}

Embedding WeightReader::take_embedding(const std::string& path, int vocab_size, int hidden_size) {
  Weight weight = take_weight(path, vocab_size, hidden_size);
  const auto low_rank = take_low_rank(
      path,
      [&](int rank) {
        return mx::Shape{vocab_size, rank};
      },
      [&](int rank) {
        return mx::Shape{rank, hidden_size};
      },
      1);
  if (!low_rank) return Embedding(std::move(weight), dtype_);
  if (adapter_->kind == Adapter::Kind::dora) refuse_dora(path);
  return Embedding(std::move(weight), dtype_,
                   {mx::transpose(low_rank->b), mx::transpose(low_rank->a), adapter_->scale});
}

namespace {

mx::array rows_of(const mx::array& matrix, int first, int count) {
  mx::Shape start(matrix.ndim(), 0);
  mx::Shape stop = matrix.shape();
  start[0] = first;
  stop[0] = first + count;
  return mx::slice(matrix, start, stop);
}

}  // namespace

std::vector<Linear> WeightReader::take_linears(const std::string& path, const std::vector<int>& outs, int in,
                                               bool bias) {
  const int out = std::accumulate(outs.begin(), outs.end(), 0);
  const Weight weight = take_weight(path, out, in);
  std::optional<mx::array> biases;
  if (bias) biases = take(path + ".bias", {out});
  std::vector<Linear> layers;
  int first = 0;
  for (const int rows : outs) {
    std::optional<mx::array> own;
    if (biases) own = taken_.emplace_back(rows_of(*biases, first, rows));
    // Views, which finish evaluates with the whole.
    const Weight part = with_each_array(
        weight, [&](const mx::array& array) { return taken_.emplace_back(rows_of(array, first, rows)); });
    layers.emplace_back(part, std::move(own));
    first += rows;
  }
  if (adapter_ != nullptr) adapt_slices(path, weight, outs, layers);
  return layers;
}

mx::array WeightReader::take_short_conv(const std::string& path, int channels, int width) {
  const std::string name = path + ".weight";
  const mx::array stored = release(name);
  const bool fits = stored.shape() == mx::Shape{channels, width, 1} || stored.shape() == mx::Shape{channels, 1, width};
  if (fits) as_stored_.insert_or_assign(name, mx::reshape(stored, {channels, width, 1}));
  put(name, fits ? mx::reshape(stored, {channels, width}) : stored);
  return take(name, {channels, width});
}

RmsNorm WeightReader::take_rms_norm(const std::string& path, int size, float eps, float plus) {
  if (plus == 0.0f) return RmsNorm(take(path + ".weight", {size}), eps);
  mx::array weight = mx::add(mx::astype(take_float(path + ".weight", {size}), mx::float32), mx::array(plus));
  return RmsNorm(keep(mx::astype(weight, dtype_)), eps);
}

LayerNorm WeightReader::take_layer_norm(const std::string& path, int size, float eps) {
  mx::array weight = take(path + ".weight", {size});
  std::optional<mx::array> bias;
  if (has(path + ".bias")) bias = take(path + ".bias", {size});
  return LayerNorm(std::move(weight), std::move(bias), eps);
}

void WeightReader::rename(const std::function<std::string(const std::string&)>& new_name) {
  WeightMap renamed;
  for (auto& [name, weight] : weights_) {
    const std::string to = new_name(name);
    if (!renamed.emplace(to, std::move(weight)).second) corrupt("two weights are named '" + to + "'");
  }
  weights_ = std::move(renamed);
}

mx::array WeightReader::release(const std::string& name) {
  const auto found = weights_.find(name);
  if (found == weights_.end()) corrupt("weight '" + name + "' is missing");
  mx::array weight = std::move(found->second);
  weights_.erase(found);
  return weight;
}

void WeightReader::put(const std::string& name, mx::array weight) {
  weights_.insert_or_assign(name, std::move(weight));
}

void WeightReader::transform(const std::string& name, const std::function<mx::array(const mx::array&)>& change) {
  // Its rows would be added in the file's order.
  const std::string path = name.substr(0, name.rfind('.'));
  if (adapter_ != nullptr && adapter_->weights.count(path + ".lora_a") != 0) {
    throw Error(ErrorCode::unsupported, "[make_model] an adapter of '" + path + "' is not supported");
  }
  const mx::array stored = release(name);
  as_stored_.insert_or_assign(name, stored);
  put(name, change(stored));
}

mx::Shape WeightReader::shape_of(const std::string& name) const {
  const auto found = weights_.find(name);
  if (found == weights_.end()) corrupt("weight '" + name + "' is missing");
  return found->second.shape();
}

std::vector<std::string> WeightReader::names() const {
  std::vector<std::string> names;
  for (const auto& [name, weight] : weights_) names.push_back(name);
  return names;
}

std::string WeightReader::describe_quantization() const {
  if (matrices_.empty() || (matrices_.size() == 1 && matrices_.begin()->first == "not quantised")) return "none";
  if (matrices_.size() == 1) return matrices_.begin()->first;
  std::size_t total = 0;
  for (const auto& [kind, size] : matrices_) total += size;
  std::string out;
  for (const auto& [kind, size] : matrices_) {
    out += (out.empty() ? "mixed: " : "; ") + kind + " (" + std::to_string((size * 100 + total / 2) / total) + " %)";
  }
  return out;
}

void WeightReader::finish() {
  if (!weights_.empty()) {
    corrupt("weight '" + weights_.begin()->first + "' belongs to no layer of this architecture (" +
            std::to_string(weights_.size()) + " such)");
  }
  check_adapter_is_used();
  mx::eval(taken_);
  taken_.clear();
}

}  // namespace reprise::internal
