// The block of Llama and of most that came after it: attention, then a gated feed-forward block, each behind a norm and
// added to what went in (Xiong et al., https://arxiv.org/abs/2002.04745). Private to `models`.
// Threads: immutable after construction.
#pragma once

#include <string>

#include "mlx/array.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/decoder.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"
#include "reprise/nn/norms.h"

namespace reprise::internal {

struct PreNormLayer {
  RmsNorm input_layernorm;
  AttentionBlock self_attn;
  RmsNorm post_attention_layernorm;
  GatedMlp mlp;

  mlx::core::array forward(const mlx::core::array& h, const LayerStep& step) const {
    const mlx::core::array r = self_attn.add_to(h, h, input_layernorm, step.attention_cache(), step.mask);
    return mlp.add_to(r, post_attention_layernorm, r);
  }
};

struct FeedForwardSizes {
  int hidden_size;
  int intermediate_size;
  bool bias = false;
};

// `path`.input_layernorm, .post_attention_layernorm and .mlp around `self_attn`.
PreNormLayer take_pre_norm_layer(WeightReader& weights, const std::string& path, AttentionBlock self_attn,
                                 const FeedForwardSizes& sizes, float eps);

}  // namespace reprise::internal
