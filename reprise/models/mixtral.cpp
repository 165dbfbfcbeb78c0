// Mixtral: every feed-forward block is a mixture of experts, of which each token's router takes the best few.
// Jiang et al., https://arxiv.org/abs/2401.04088.
#include <memory>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/moe.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct MixtralMoe {
  Linear gate;
  SwitchGlu switch_mlp;
  int experts_per_token;

  mx::array operator()(const mx::array& x) const { return switch_mlp(x, softmax_of_top_k(gate(x), experts_per_token)); }
};

struct MixtralLayer {
  Norm input_layernorm;
  AttentionBlock self_attn;
  RmsNorm post_attention_layernorm;
  MixtralMoe block_sparse_moe;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const mx::array r = self_attn.add_to(h, h, input_layernorm, step.attention_cache(), step.mask);
    return mx::add(r, block_sparse_moe(post_attention_layernorm(r)));
  }
};

// Original checkpoints have a matrix per expert, by the names of the paper's formula.
void stack_original_experts(WeightReader& weights, const std::string& path, int experts) {
  for (const auto& [original, ours] : {std::pair{"w1", "gate_proj"}, {"w2", "down_proj"}, {"w3", "up_proj"}}) {
    const auto name = [&](int expert) { return path + ".experts." + std::to_string(expert) + "." + original; };
    weights.stack_experts(experts, name, path + ".switch_mlp." + ours);
  }
}

std::vector<LayerKind> layer_kinds(const Config& config) {
  const auto layers = static_cast<std::size_t>(config.require_positive_int("num_hidden_layers"));
  if (!config.get_int("sliding_window")) return std::vector<LayerKind>(layers, FullAttention{});
  return std::vector<LayerKind>(layers, SlidingAttention{config.require_positive_int("sliding_window")});
}

}  // namespace

std::unique_ptr<LanguageModel> make_mixtral(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const int E = sizes.hidden_size;
  const int F = config.require_positive_int("intermediate_size");
  const float eps = norm_eps(config, "rms_norm_eps", 1e-5f);
  const auto experts = ExpertCounts::from(config, "num_local_experts", "num_experts_per_tok");
  require_activation(config, "hidden_act", {"silu", "swish"});
  auto kinds = layer_kinds(config);

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  const auto rope = std::make_shared<const Rope>(config.rope(sizes.head_dim, {.base_otherwise = 1e6f}));

  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes);
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    const std::string moe = path + ".block_sparse_moe";
    stack_original_experts(weights, moe, experts.all);
    layers.push_back(
        make_layer(MixtralLayer{weights.take_rms_norm(path + ".input_layernorm", E, eps),
                                std::move(attention),
                                weights.take_rms_norm(path + ".post_attention_layernorm", E, eps),
                                {weights.take_linear(moe + ".gate", experts.all, E, false),
                                 weights.take_switch_glu(moe + ".switch_mlp", experts.all, E, F), experts.per_token}}));
  }
  auto ends = take_decoder_ends(weights, config, {.norm_eps = eps});
  ends.layers = std::move(layers);
  ends.kinds = std::move(kinds);
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
