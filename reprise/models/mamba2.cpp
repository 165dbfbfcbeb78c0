// Mamba 2: as Mamba, with scans whose channels form heads.
// Dao and Gu, https://arxiv.org/abs/2405.21060.
#include <memory>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "reprise/models/architectures.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/mamba2_mixer.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct Mamba2Layer {
  RmsNorm norm;
  Mamba2Mixer mixer;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    return mixer.add_to(h, h, norm, step.recurrent_cache(), step.real_columns);
  }
};

Mamba2Sizes sizes_of(const Config& config) {
  return {.hidden_size = config.require_positive_int("hidden_size"),
          .heads = config.require_positive_int("num_heads"),
          .head_dim = config.require_positive_int("head_dim"),
          .groups = config.require_positive_int("n_groups"),
          .states = config.require_positive_int(config.has("ssm_state_size") ? "ssm_state_size" : "state_size"),
          .conv_width = config.require_positive_int("conv_kernel")};
}

Mamba2Options options_of(const Config& config) {
  const bool bias = config.get_bool("use_bias").value_or(false);
  Mamba2Options options{.norm_eps = norm_eps(config, "layer_norm_epsilon", 1e-5f),
                        .in_bias = bias,
                        .out_bias = bias,
                        .conv_bias = config.get_bool("use_conv_bias").value_or(true)};
  read_step_limits(config, options);
  return options;
}

}  // namespace

std::unique_ptr<LanguageModel> make_mamba2(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const Mamba2Sizes sizes = sizes_of(config);
  const Mamba2Options mixer_options = options_of(config);
  const float eps = mixer_options.norm_eps;
  constexpr float kLayerEps = 1e-5f;  // as mlx-lm, whatever the config says
  require_activation(config, "hidden_act", {"silu", "swish"});

  WeightReader weights(files, config, options);
  const int num_layers = config.require_positive_int("num_hidden_layers");
  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (int i = 0; i < num_layers; ++i) {
    const std::string path = "backbone.layers." + std::to_string(i);
    layers.push_back(make_layer(Mamba2Layer{weights.take_rms_norm(path + ".norm", sizes.hidden_size, kLayerEps),
                                            take_mamba2_mixer(weights, path + ".mixer", sizes, mixer_options)}));
  }
  auto ends = take_decoder_ends(weights, config,
                                {.norm_eps = eps, .embed_tokens = "backbone.embeddings", .norm = "backbone.norm_f"});
  ends.layers = std::move(layers);
  ends.kinds = std::vector<LayerKind>(static_cast<std::size_t>(num_layers), Recurrent{kMambaSlots});
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
