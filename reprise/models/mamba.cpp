// Mamba: layers that are selective scans and nothing else, as many as a Transformer would have twice of.
// Gu and Dao, https://arxiv.org/abs/2312.00752. Falcon Mamba norms the scan's inputs: Zuo et al.,
// https://arxiv.org/abs/2410.05355.
#include <memory>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "reprise/models/architectures.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/mamba_mixer.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct MambaLayer {
  RmsNorm norm;
  MambaMixer mixer;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    return mixer.add_to(h, norm, step.recurrent_cache(), step.real_columns);
  }
};

MambaSizes sizes_of(const Config& config) {
  const int E = config.require_positive_int("hidden_size");
  return {.hidden_size = E,
          .channels = checked_size(config.require_positive_int("intermediate_size")),
          .states = checked_size(config.require_positive_int("state_size")),
          .step_rank = step_rank(config, "time_step_rank", E),
          .conv_width = config.require_positive_int("conv_kernel")};
}

}  // namespace

std::unique_ptr<LanguageModel> make_mamba(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const MambaSizes sizes = sizes_of(config);
  const float eps = norm_eps(config, "layer_norm_epsilon", 1e-5f);
  const bool norms_maps =
      config.require_string("model_type") == "falcon_mamba" || config.get_bool("use_bcdt_rms").value_or(false);
  const float map_eps = norm_eps(config, "mixer_rms_eps");
  const MambaBiases biases{.projections = config.get_bool("use_bias").value_or(false),
                           .conv = config.get_bool("use_conv_bias").value_or(true)};
  require_activation(config, "hidden_act", {"silu", "swish"});

  WeightReader weights(files, config, options);
  const int num_layers = config.require_positive_int("num_hidden_layers");
  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (int i = 0; i < num_layers; ++i) {
    const std::string path = "backbone.layers." + std::to_string(i);
    MambaLayer layer{weights.take_rms_norm(path + ".norm", sizes.hidden_size, eps),
                     take_mamba_mixer(weights, path + ".mixer", sizes, biases)};
    if (norms_maps) {
      layer.mixer.step_norm = unweighted_rms_norm(sizes.step_rank, map_eps, weights.dtype());
      layer.mixer.b_norm = layer.mixer.c_norm = unweighted_rms_norm(sizes.states, map_eps, weights.dtype());
    }
    layers.push_back(make_layer(std::move(layer)));
  }
  auto ends = take_decoder_ends(weights, config,
                                {.norm_eps = eps, .embed_tokens = "backbone.embeddings", .norm = "backbone.norm_f"});
  ends.layers = std::move(layers);
  ends.kinds = std::vector<LayerKind>(static_cast<std::size_t>(num_layers), Recurrent{kMambaSlots});
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
