// The layer that Gemma 2 and 3 share: norms before and after each block, whose weights are stored less 1. Private to
// `models`. Threads: immutable after construction.
#pragma once

#include <string>
#include <utility>

#include "mlx/array.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"
#include "reprise/nn/norms.h"

namespace reprise::internal {

inline constexpr float kGemmaNormPlus = 1.0f;

// "gelu" stands in some configs of models that were trained with its approximation by tanh.
inline void require_gemma_activation(const Config& config) {
  for (const char* key : {"hidden_activation", "hidden_act"}) {
    require_activation(config, key, {"gelu_pytorch_tanh", "gelu"});
  }
}

struct GemmaLayer {
  RmsNorm input_layernorm;
  AttentionBlock self_attn;
  RmsNorm post_attention_layernorm;
  RmsNorm pre_feedforward_layernorm;
  GatedMlp mlp;
  RmsNorm post_feedforward_layernorm;

  mlx::core::array forward(const mlx::core::array& h, const LayerStep& step) const {
    const mlx::core::array r =
        self_attn.add_normed_to(h, h, input_layernorm, step.attention_cache(), step.mask, post_attention_layernorm);
    return mlp.add_normed_to(r, pre_feedforward_layernorm, r, post_feedforward_layernorm);
  }
};

// `path`.self_attn is `attention`. Throws: as WeightReader and Config.
inline GemmaLayer take_gemma_layer(WeightReader& weights, const std::string& path, const Config& config,
                                   AttentionBlock attention) {
  const int E = attention.sizes.hidden_size;
  const auto norm = [&](const std::string& name) {
    return weights.take_rms_norm(path + "." + name, E, norm_eps(config), kGemmaNormPlus);
  };
  GemmaLayer layer{norm("input_layernorm"),
                   std::move(attention),
                   norm("post_attention_layernorm"),
                   norm("pre_feedforward_layernorm"),
                   take_gated_mlp(weights, path + ".mlp", E, config.require_positive_int("intermediate_size")),
                   norm("post_feedforward_layernorm")};
  layer.mlp.activation = GateActivation::gelu_tanh;
  return layer;
}

}  // namespace reprise::internal
