#include "reprise/engine/cold_check.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/transforms.h"
#include "reprise/generate/reuse_tolerance.h"
#include "reprise/prefix/tiers/cache_leaves.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

constexpr std::size_t kPiece = 256;

mx::array as_row(std::span<const TokenId> ids) {
  return mx::array(ids.data(), {1, static_cast<int>(ids.size())}, mx::int32);
}

mx::array next_logits(const LanguageModel& model, const PromptCache& cache, TokenId next) {
  PromptCache probe = cache.fork();
  auto logits = model.forward(as_row(std::span(&next, 1)), probe);
  mx::eval(logits);
  return logits;
}

}  // namespace

ColdCheck check_against_cold(const LanguageModel& model, const PromptCache& form, const PromptCache& warm,
                             std::span<const TokenId> prefix, TokenId next) {
  PromptCache cold = form.fork();
  for (auto rest = prefix; !rest.empty();) {
    const auto piece = rest.first(std::min(kPiece, rest.size()));
    model.forward(as_row(piece), cold);
    cold.eval();
    rest = rest.subspan(piece.size());
  }
  const mx::array got = next_logits(model, warm, next);
  const mx::array want = next_logits(model, cold, next);

  std::optional<KVQuantization> quantization;
  std::vector<mx::Dtype> stored;
  for (const PagedKVCache* layer : paged_leaves(cold)) {
    quantization = layer->quantization();
    if (layer->layout()) stored.push_back(layer->layout()->dtype);
  }
  std::vector<mx::array> states;
  for (const ArraysCache* layer : recurrent_leaves(cold)) layer->state().collect_arrays(states);
  for (const mx::array& state : states) stored.push_back(state.dtype());
  return {.error = reuse_error(got, want),
          .tolerance = reuse_tolerance(got.dtype(), stored, quantization),
          .cold = std::move(cold)};
}

}  // namespace reprise::internal
