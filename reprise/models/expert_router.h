// A router whose choice of experts may be limited to the best groups and moved by a bias, as DeepSeek's
// (https://arxiv.org/abs/2405.04434, https://arxiv.org/abs/2412.19437) and Nemotron-H's. Private to `models`.
// Threads: immutable after construction.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "reprise/models/config.h"
#include "reprise/models/model_parts.h"
#include "reprise/nn/linear.h"
#include "reprise/nn/moe.h"

namespace reprise::internal {

struct ExpertRouter {
  enum class Scores { softmax, sigmoid };

  Linear gate;
  Scores scores;
  int experts_per_token;
  std::optional<GroupLimit> limit = {};
  std::optional<mlx::core::array> correction_bias = {};  // float32 [experts]: counts for the choice alone
  NormaliseScores normalise = NormaliseScores::no;
  float scaling_factor = 1.0f;

  Routing operator()(const mlx::core::array& x) const;
};

// From n_group and topk_group: groups are worth the sum of their `members` best scores; none: there are no groups.
// Throws: corrupt_data for groups that do not fit.
std::optional<GroupLimit> group_limit(const Config& config, const ExpertCounts& experts, int members);

}  // namespace reprise::internal
