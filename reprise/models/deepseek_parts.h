// What DeepSeek's architectures share: the projections of multi-head latent attention, and shared experts beside routed
// ones (https://arxiv.org/abs/2401.06066). Private to `models`. Threads: immutable after construction.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "mlx/array.h"
#include "reprise/models/config.h"
#include "reprise/models/expert_router.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/linear.h"
#include "reprise/nn/mlp.h"
#include "reprise/nn/moe.h"
#include "reprise/nn/norms.h"
#include "reprise/nn/rope.h"

namespace reprise::internal {

struct LatentSizes {
  int hidden_size;
  int heads;
  std::optional<int> q_lora_rank;  // none: queries have no latent
  int kv_lora_rank;
  int nope;  // content features of a head's queries and keys
  int rope;  // their rotated features
  int value;

  // Throws: corrupt_data for one that is missing or not positive.
  static LatentSizes from(const Config& config);
};

// What a layer's input becomes before attention.
struct LatentProjections {
  struct LowRank {
    Linear a_proj;
    RmsNorm a_layernorm;
  };
  struct Rows {
    mlx::core::array content;        // of queries [B, heads, L, nope]
    mlx::core::array positions;      // of queries, rotated [B, heads, L, rope]
    mlx::core::array latent;         // [B, 1, L, kv_lora_rank]
    mlx::core::array key_positions;  // rotated [B, 1, L, rope]
  };

  LatentSizes sizes;
  std::optional<LowRank> q_low;
  Linear q_proj;  // from the queries' latent, or from the input
  Linear kv_a_proj;
  RmsNorm kv_a_layernorm;
  std::shared_ptr<const Rope> rope;

  // h [B, L, E]; the first token is at `offset`.
  Rows operator()(const mlx::core::array& h, const Norm& norm, const Offset& offset) const;
};

// `path`.q_a_proj, .q_a_layernorm, .q_b_proj or `path`.q_proj, .kv_a_proj_with_mqa, .kv_a_layernorm.
LatentProjections take_latent_projections(WeightReader& weights, const Config& config, const std::string& path,
                                          const LatentSizes& sizes, std::shared_ptr<const Rope> rope);

// The rotation of DeepSeek's configs, and the scale of the scores with what YaRN adds to it.
std::shared_ptr<const Rope> latent_rope(const Config& config, const LatentSizes& sizes);
float latent_scale(const Config& config, const LatentSizes& sizes);

// [B, heads, L, D] → [B, L, heads * D].
mlx::core::array heads_joined(const mlx::core::array& x);

struct RoutedAndShared {
  ExpertRouter router;
  SwitchGlu switch_mlp;
  std::optional<GatedMlp> shared_experts;

  mlx::core::array operator()(const mlx::core::array& x) const;
};

using DeepseekMlp = std::variant<GatedMlp, RoutedAndShared>;

// `path` of layer `layer`: dense, or a mixture of experts with what `router` says beyond its gate and sizes. Throws:
// corrupt_data for numbers of experts that do not fit.
struct RouterKind {
  ExpertRouter::Scores scores;
  std::optional<int> group_members = {};  // groups are limited by the sum of so many best members; none: no groups
  bool has_correction_bias = false;
  NormaliseScores normalise = NormaliseScores::no;
};
DeepseekMlp take_deepseek_mlp(WeightReader& weights, const Config& config, const std::string& path, int layer,
                              const RouterKind& kind);

}  // namespace reprise::internal
