#include "reprise/generate/reuse_tolerance.h"

#include <algorithm>
#include <cstdint>

#include "mlx/ops.h"
#include "mlx/transforms.h"

namespace reprise {

namespace mx = mlx::core;

bool is_chosen_for_check(std::span<const TokenId> tokens, double rate) {
  if (rate >= 1.0) return true;
  if (!(rate > 0.0)) return false;
  std::uint64_t hash = 1469598103934665603U;  // FNV-1a over the ids
  for (const TokenId id : tokens) hash = (hash ^ static_cast<std::uint64_t>(id)) * 1099511628211U;
  return static_cast<double>(hash >> 11U) * 0x1.0p-53 < rate;
}

double reuse_error(const mx::array& warm, const mx::array& cold) {
  const auto difference = mx::max(mx::abs(mx::astype(mx::subtract(warm, cold), mx::float32)));
  const auto scale = mx::max(mx::abs(mx::astype(cold, mx::float32)));
  mx::eval(difference, scale);
  return static_cast<double>(difference.item<float>()) / std::max(static_cast<double>(scale.item<float>()), 1e-30);
}

// Rounding of another order of sums, in the dtype at hand; of numbers that fall the other way where rows are stored.
double reuse_tolerance(mx::Dtype computed, std::span<const mx::Dtype> stored,
                       const std::optional<KVQuantization>& quantization) {
  double tolerance = computed == mx::float32 ? 1e-3 : 5e-2;
  for (const mx::Dtype dtype : stored) {
    if (dtype == mx::float16) tolerance = std::max(tolerance, 1e-2);
    if (dtype == mx::bfloat16) tolerance = std::max(tolerance, 5e-2);
  }
  if (!quantization) return tolerance;
  const double rounded = quantization->bits >= 8   ? 2e-2
                         : quantization->bits >= 5 ? 5e-2
                         : quantization->bits == 4 ? 0.15
                                                   : 0.3;
  return std::max(tolerance, rounded);
}

}  // namespace reprise
