// Qwen 3 with mixtures of experts: attention with normed queries and keys, and feed-forward blocks that are mixtures
// except where the config keeps them dense. Yang et al., https://arxiv.org/abs/2505.09388.
#include <algorithm>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"
#include "reprise/nn/moe.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct Qwen3Moe {
  Linear gate;
  SwitchGlu switch_mlp;
  int experts_per_token;
  NormaliseScores normalise;

  mx::array operator()(const mx::array& x) const {
    return switch_mlp(x, top_k_of_softmax(gate(x), experts_per_token, normalise));
  }
};

struct Qwen3MoeLayer {
  Norm input_layernorm;
  AttentionBlock self_attn;
  RmsNorm post_attention_layernorm;
  std::variant<GatedMlp, Qwen3Moe> mlp;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const mx::array r = self_attn.add_to(h, h, input_layernorm, step.attention_cache(), step.mask);
    return add_feed_forward(r, post_attention_layernorm, mlp);
  }
};

// Which layers are mixtures.
std::vector<bool> sparse_layers(const Config& config) {
  const int layers = config.require_positive_int("num_hidden_layers");
  const int step = config.has("decoder_sparse_step") ? config.require_positive_int("decoder_sparse_step") : 1;
  const std::vector<int> dense = config.get_ints("mlp_only_layers");
  std::vector<bool> sparse;
  for (int i = 0; i < layers; ++i) {
    sparse.push_back((i + 1) % step == 0 && std::find(dense.begin(), dense.end(), i) == dense.end());
  }
  return sparse;
}

}  // namespace

std::unique_ptr<LanguageModel> make_qwen3_moe(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const int E = sizes.hidden_size;
  const float eps = norm_eps(config);
  const auto experts = ExpertCounts::from(config, "num_experts", "num_experts_per_tok");
  const auto normalise = config.get_bool("norm_topk_prob").value_or(false) ? NormaliseScores::yes : NormaliseScores::no;
  const bool bias = config.get_bool("attention_bias").value_or(false);
  const std::vector<bool> sparse = sparse_layers(config);
  require_activation(config, "hidden_act", {"silu", "swish"});
  if (config.get_bool("use_sliding_window").value_or(false)) {
    throw Error(ErrorCode::unsupported, "[make_model] qwen3_moe with use_sliding_window is not supported");
  }

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  const auto rope = std::make_shared<const Rope>(config.rope(sizes.head_dim));

  const auto take_moe = [&](const std::string& path) -> Qwen3Moe {
    const int F = config.require_positive_int("moe_intermediate_size");
    stack_experts_of_glu(weights, path, experts.all);
    return {weights.take_linear(path + ".gate", experts.all, E, false),
            weights.take_switch_glu(path + ".switch_mlp", experts.all, E, F), experts.per_token, normalise};
  };
  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (std::size_t i = 0; i < sparse.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {bias, bias});
    attention.q_norm = weights.take_rms_norm(path + ".self_attn.q_norm", sizes.head_dim, eps);
    attention.k_norm = weights.take_rms_norm(path + ".self_attn.k_norm", sizes.head_dim, eps);
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    Qwen3MoeLayer layer{
        weights.take_rms_norm(path + ".input_layernorm", E, eps), std::move(attention),
        weights.take_rms_norm(path + ".post_attention_layernorm", E, eps),
        sparse[i] ? decltype(Qwen3MoeLayer::mlp)(take_moe(path + ".mlp"))
                  : take_gated_mlp(weights, path + ".mlp", E, config.require_positive_int("intermediate_size"))};
    layers.push_back(make_layer(std::move(layer)));
  }
  auto ends = take_decoder_ends(weights, config, {.norm_eps = eps});
  ends.layers = std::move(layers);
  ends.kinds = std::vector<LayerKind>(sparse.size(), FullAttention{});
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
