// Takes a model's weights by name, checks each, and knows what was left over. Private to `models`.
// Threads: one object belongs to one thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/dtype.h"
#include "reprise/models/adapter.h"
#include "reprise/models/config.h"
#include "reprise/models/language_model.h"
#include "reprise/nn/linear.h"
#include "reprise/nn/mla.h"
#include "reprise/nn/moe.h"
#include "reprise/nn/norms.h"
#include "reprise/storage/model_files.h"

namespace reprise::internal {

class WeightReader {
 public:
  // Vectors come out in the options' compute dtype, and so do dense matrices on a GPU; everything else stays as stored.
  // The options' adapter is added to the layers it names. Throws: as compute_dtype.
  WeightReader(const ModelFiles& files, QuantizationOverrides overrides, const ModelOptions& options);
  // `config`: the one that may have a member `quantization`. Throws also: as Config::quantization_overrides.
  WeightReader(const ModelFiles& files, const Config& config, const ModelOptions& options)
      : WeightReader(files, config.quantization_overrides(), options) {}

  bool has(const std::string& name) const { return weights_.count(name) != 0; }
  // Removes the tensors for which `useless` holds: what checkpoints carry and nobody reads.
  void drop(const std::function<bool(const std::string& name)>& useless);

  // Original checkpoints are brought to mlx-lm's names and layouts with these three, before anything is taken.
  void rename(const std::function<std::string(const std::string& name)>& new_name);
  // Removes a tensor and hands it out, unchecked. Throws: corrupt_data when it is missing.
  mlx::core::array release(const std::string& name);
  void put(const std::string& name, mlx::core::array weight);
  // What a model computes from a tensor of mlx-lm's layout before it takes it: in files the tensor stays as it was.
  // Throws: corrupt_data when it is missing.
  void transform(const std::string& name,
                 const std::function<mlx::core::array(const mlx::core::array& stored)>& change);
  std::vector<std::string> names() const;  // of what is left, sorted
  // Throws: corrupt_data when it is missing.
  mlx::core::Shape shape_of(const std::string& name) const;

  // Each throws corrupt_data, naming the tensor, when it is missing or has another shape or dtype.
  mlx::core::array take(const std::string& name, const mlx::core::Shape& shape);
  mlx::core::array take_float32(const std::string& name, const mlx::core::Shape& shape);  // whatever the dtype
  // `path`.weight, with `path`.scales and .biases when it is quantised.
  Weight take_weight(const std::string& path, int out, int in);
  Linear take_linear(const std::string& path, int out, int in, bool bias);
  // One stored matrix of several maps, `outs` rows each ("qkv_proj"), as those maps.
  std::vector<Linear> take_linears(const std::string& path, const std::vector<int>& outs, int in, bool bias);
  // Experts stacked as mlx-lm stores them: `path`.weight [experts, out, in], .bias [experts, out].
  SwitchLinear take_switch_linear(const std::string& path, int experts, int out, int in, bool bias = false);
  // `path`.gate_proj, .up_proj, .down_proj. `size`: F.
  SwitchGlu take_switch_glu(const std::string& path, int experts, int hidden_size, int size, bool bias = false);
  // `path`.weight [heads, out, in].
  MultiLinear take_multi_linear(const std::string& path, int heads, int out, int in);
  // Per-expert matrices `path(expert)`.weight, .scales, .biases, .bias, as far as they are there, become `to`.weight,
  // ….
  void stack_experts(int experts, const std::function<std::string(int expert)>& path, const std::string& to);
  Embedding take_embedding(const std::string& path, int vocab_size, int hidden_size);
  // `path`.weight of a depthwise convolution, stored as [channels, width, 1] or, originally, [channels, 1, width] →
  // [channels, width].
  mlx::core::array take_short_conv(const std::string& path, int channels, int width);
  // `plus`: what the norm adds to its stored weight (Gemma: 1).
  RmsNorm take_rms_norm(const std::string& path, int size, float eps, float plus = 0.0f);
  // With a bias if one is stored.
  LayerNorm take_layer_norm(const std::string& path, int size, float eps);

  // Evaluates everything that was taken, so that any thread may use it.
  // Throws: corrupt_data, naming a tensor that nobody took.
  void finish();

  mlx::core::Dtype dtype() const { return dtype_; }
  std::size_t num_parameters() const { return num_parameters_; }
  std::size_t nbytes() const { return nbytes_; }
  // "none", "4-bit, groups of 32", "mixed: 4-bit, groups of 32 (79 %); 8-bit, groups of 32 (21 %)".
  std::string describe_quantization() const;

 private:
  // `front`: axes before [out, in].
  Weight take_stored_weight(const std::string& path, mlx::core::Shape front, int out, int in);
  QuantizationSpec spec_of(const std::string& path, int in) const;
  mlx::core::array take_as_stored(const std::string& name, const mlx::core::Shape& shape);
  mlx::core::array take_float(const std::string& name, const mlx::core::Shape& shape);
  mlx::core::array take_dense(const std::string& name, const mlx::core::Shape& shape);
  mlx::core::array keep(mlx::core::array weight);
  // A map of these, with what the adapter adds at `path`.
  Linear adapted_linear(const std::string& path, Weight weight, std::optional<mlx::core::array> bias);
  // A tensor of the adapter, which is then used. Throws: corrupt_data for another shape or no float.
  mlx::core::array take_adapter(const std::string& name, const mlx::core::Shape& shape);
  // `path`.lora_a and .lora_b with the axes in this order; none: the adapter has no such layer.
  struct LowRankPair {
    mlx::core::array a;
    mlx::core::array b;
  };
  std::optional<LowRankPair> take_low_rank(const std::string& path, const std::function<mlx::core::Shape(int)>& a,
                                           const std::function<mlx::core::Shape(int)>& b, int rank_axis);
  // What the adapter adds to the whole matrix at `path`, cut as `layers` are, its rows in this order.
  void adapt_slices(const std::string& path, const Weight& weight, const std::vector<int>& outs,
                    std::vector<Linear>& layers);
  [[noreturn]] void refuse_dora(const std::string& path) const;
  void check_adapter_is_used() const;

  WeightMap weights_;
  std::shared_ptr<const Adapter> adapter_;  // null: none
  std::set<std::string> unused_adapter_weights_;
  WeightMap as_stored_ = {};                     // of what was transformed
  std::vector<StoredWeight>* stored_ = nullptr;  // see ModelOptions
  QuantizationOverrides overrides_;
  mlx::core::Dtype dtype_;
  std::vector<mlx::core::array> taken_;
  std::map<std::string, std::size_t> matrices_;  // parameters of the matrices by how they are stored
  std::size_t num_parameters_ = 0;
  std::size_t nbytes_ = 0;
};

}  // namespace reprise::internal
