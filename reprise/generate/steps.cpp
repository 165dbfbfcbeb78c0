#include "reprise/generate/steps.h"

#include "mlx/device.h"

namespace reprise::internal {

namespace mx = mlx::core;

mx::array as_row(std::span<const TokenId> ids) {
  return mx::array(ids.data(), {1, static_cast<int>(ids.size())}, mx::int32);
}

int prefill_step_size(const GenerateOptions& options) {
  if (options.prefill_step_size) return *options.prefill_step_size;
  return mx::default_device() == mx::Device::cpu ? 256 : 2048;
}

void CacheQuantizer::operator()(PromptCache& cache) {
  if (done_) return;
  const int start = options_.quantized_kv_start;
  bool all = true;
  bool some = false;
  for (std::size_t i = 0; i < cache.size(); ++i) {
    const bool reached = cache[i].position().value_or(start) >= start;
    all = all && reached;
    some = some || reached;
  }
  if (some) maybe_quantize_kv_cache(cache, start, options_.kv_group_size, *options_.kv_bits);
  done_ = all;
}

}  // namespace reprise::internal
