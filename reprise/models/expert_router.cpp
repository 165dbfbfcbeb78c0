#include "reprise/models/expert_router.h"

#include <string>

#include "mlx/ops.h"
#include "reprise/base/error.h"

namespace reprise::internal {

namespace mx = mlx::core;

Routing ExpertRouter::operator()(const mx::array& x) const {
  const mx::array logits = mx::astype(gate(x), mx::float32);
  const mx::array all = scores == Scores::softmax ? mx::softmax(logits, -1) : mx::sigmoid(logits);
  mx::array order = correction_bias ? mx::add(all, *correction_bias) : all;
  if (limit) order = limit_to_groups(order, *limit);
  Routing routing = top_k(all, order, experts_per_token, normalise);
  if (scaling_factor != 1.0f) routing.weights = mx::multiply(routing.weights, mx::array(scaling_factor));
  return routing;
}

std::optional<GroupLimit> group_limit(const Config& config, const ExpertCounts& experts, int members) {
  const GroupLimit limit{.groups = config.has("n_group") ? config.require_positive_int("n_group") : 1,
                         .kept = config.has("topk_group") ? config.require_positive_int("topk_group") : 1,
                         .members = members};
  if (limit.groups == 1) return {};
  const int size = experts.all / limit.groups;
  if (experts.all % limit.groups != 0 || size < members || limit.kept > limit.groups ||
      limit.kept * size < experts.per_token) {
    throw Error(ErrorCode::corrupt_data, "[make_model] n_group and topk_group do not fit " +
                                             std::to_string(experts.all) + " experts, of which a token gets " +
                                             std::to_string(experts.per_token) + ", but got " +
                                             std::to_string(limit.groups) + " and " + std::to_string(limit.kept));
  }
  return limit;
}

}  // namespace reprise::internal
