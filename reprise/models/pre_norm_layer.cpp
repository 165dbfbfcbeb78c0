#include "reprise/models/pre_norm_layer.h"

#include <utility>

#include "reprise/models/model_parts.h"

namespace reprise::internal {

PreNormLayer take_pre_norm_layer(WeightReader& weights, const std::string& path, AttentionBlock self_attn,
                                 const FeedForwardSizes& sizes, float eps) {
  const int E = sizes.hidden_size;
  return {weights.take_rms_norm(path + ".input_layernorm", E, eps), std::move(self_attn),
          weights.take_rms_norm(path + ".post_attention_layernorm", E, eps),
          take_gated_mlp(weights, path + ".mlp", E, sizes.intermediate_size, sizes.bias)};
}

}  // namespace reprise::internal
