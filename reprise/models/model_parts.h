// What every architecture does in the same way. Private to `models`.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/language_model.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"
#include "reprise/nn/rope.h"

namespace reprise::internal {

// Before a forward changes anything. Throws: invalid_argument for tokens that are not int [B, L] with L ≥ 1, or
// evaluated ids outside [0, V).
void check_tokens(const mlx::core::array& tokens, int vocab_size);

// "[2, 3]", for messages.
std::string shape_text(const mlx::core::Shape& shape);

// "rms_norm_eps" or another key; `otherwise` when it is absent. Throws: corrupt_data unless positive and finite.
float norm_eps(const Config& config, const std::string& key = "rms_norm_eps", float otherwise = 1e-6f);

// Throws: unsupported when `key` is there and names none of `known`.
void require_activation(const Config& config, const std::string& key, const std::vector<std::string>& known);

// Throws: unsupported when `key` is there and is not `value`, or is there at all.
void require_flag(const Config& config, const std::string& key, bool value);
void require_absent(const Config& config, const std::string& key);

// From layer_types, "full_attention" or "sliding_attention" each, with sliding_window; none: all are full.
// Throws: corrupt_data for another number of layers or no window, unsupported for another type.
std::vector<LayerKind> attention_kinds(const Config& config);

// Where layer_types do not say more: sliding_window holds for every layer, or, in Qwen's way, if use_sliding_window,
// for those from max_window_layers on. A window that no position exceeds is none.
std::vector<LayerKind> same_attention_kinds(const Config& config);
std::vector<LayerKind> upper_window_kinds(const Config& config);

// `path`.gate_proj, .up_proj, .down_proj. `size`: F.
GatedMlp take_gated_mlp(WeightReader& weights, const std::string& path, int hidden_size, int size, bool bias = false);
// The same where the first two are one matrix: `path`.gate_up_proj, .down_proj.
GatedMlp take_fused_gated_mlp(WeightReader& weights, const std::string& path, int hidden_size, int size);

// residual + block(norm(residual)), of a block that some layers have dense and others as experts.
template <typename Experts>
mlx::core::array add_feed_forward(const mlx::core::array& residual, const RmsNorm& norm,
                                  const std::variant<GatedMlp, Experts>& block) {
  if (const auto* dense = std::get_if<GatedMlp>(&block)) return dense->add_to(residual, norm, residual);
  return mlx::core::add(residual, std::get<Experts>(block)(norm(residual)));
}

// A norm without a weight of its own.
RmsNorm unweighted_rms_norm(int size, float eps, mlx::core::Dtype dtype);

// How many experts there are, and how many of them each token gets.
struct ExpertCounts {
  int all;
  int per_token;

  // Throws: corrupt_data unless 0 < per_token ≤ all.
  static ExpertCounts from(const Config& config, const std::string& all_key, const std::string& per_token_key);
};

// Original checkpoints' `path`.experts.N.gate_proj, .up_proj, .down_proj become `path`.switch_mlp.gate_proj, ….
void stack_experts_of_glu(WeightReader& weights, const std::string& path, int experts);

// Drops what old checkpoints carry and nobody reads: "….rotary_emb.inv_freq".
void drop_rotary_buffers(WeightReader& weights);

// The dtype of `options`, or what it leaves open. Throws: invalid_argument for one that is not float32, float16 or
// bfloat16.
mlx::core::Dtype compute_dtype(const ModelOptions& options, const WeightMap& weights);

// As compute_dtype, for the stored keys and values.
mlx::core::Dtype kv_dtype(const ModelOptions& options, mlx::core::Dtype compute);

// The rotation that `options` describe, or, where the weights carry GGUF's rope factors, one by them. Throws: as Rope.
std::shared_ptr<const Rope> make_rope(RopeOptions options, WeightReader& weights);

// `layers`: where the config need not have num_hidden_layers.
ModelInfo model_info(const Config& config, const WeightReader& weights, std::optional<int> layers = {});

}  // namespace reprise::internal
