#include "reprise/generate/reuse_check.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/generate/steps.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// Bits of the layers that are quantised; none where no layer is.
std::optional<KVQuantization> quantization_of(const PromptCache& cache) {
  for (std::size_t i = 0; i < cache.size(); ++i) {
    const auto* layer = dynamic_cast<const AttentionCache*>(&cache[i]);
    if (layer == nullptr || layer->empty()) continue;
    const KeysValues stored = layer->keys_and_values();
    if (const auto* quantized = std::get_if<QuantizedKV>(&stored)) return quantized->quantization;
  }
  return {};
}

bool depends_on_pieces(const PromptCache& cache, const GenerateOptions& options) {
  return options.kv_cache.kv_bits || !keeps_all_rows(cache) || quantization_of(cache).has_value();
}

// Pieces as a prompt's prefill makes them: full steps, the last token alone.
void add_prefill_pieces(std::vector<int>& pieces, int tokens, int step) {
  for (int left = tokens - 1; left > 0; left -= step) pieces.push_back(std::min(left, step));
  if (tokens > 0) pieces.push_back(1);
}

std::vector<int> pieces_of(const RecordedCache& warm, const GenerateOptions& options) {
  const int step = prefill_step_size(options);
  const auto total = static_cast<int>(warm.tokens.size());
  std::vector<int> pieces;
  if (!depends_on_pieces(warm.cache, options)) {
    add_prefill_pieces(pieces, total, step);
    return pieces;
  }
  const int known = std::accumulate(warm.pieces.begin(), warm.pieces.end(), 0);
  add_prefill_pieces(pieces, total - known, step);
  pieces.insert(pieces.end(), warm.pieces.begin(), warm.pieces.end());
  return pieces;
}

// Rounding of another order of sums, in the dtype at hand; of numbers that fall the other way where rows are stored.
double tolerance_for(mx::Dtype dtype, const PromptCache& cache, const std::optional<KVQuantization>& quantization) {
  double computed = dtype == mx::float32 ? 1e-3 : 5e-2;
  std::vector<mx::array> arrays;
  for (std::size_t i = 0; i < cache.size(); ++i) cache[i].state().collect_arrays(arrays);
  for (const mx::array& array : arrays) {
    if (array.dtype() == mx::float16) computed = std::max(computed, 1e-2);
    if (array.dtype() == mx::bfloat16) computed = std::max(computed, 5e-2);
  }
  if (!quantization) return computed;
  const double stored = quantization->bits >= 8   ? 2e-2
                        : quantization->bits >= 5 ? 5e-2
                        : quantization->bits == 4 ? 0.15
                                                  : 0.3;
  return std::max(computed, stored);
}

mx::array next_logits(const LanguageModel& model, const PromptCache& cache, TokenId last) {
  PromptCache probe = cache.fork();
  auto logits = model.forward(as_row(std::span(&last, 1)), probe);
  mx::eval(logits);
  return logits;
}

}  // namespace

bool is_chosen_for_check(const RecordedCache& warm, double rate) {
  if (rate >= 1.0) return true;
  if (!(rate > 0.0)) return false;
  std::uint64_t hash = 1469598103934665603U;  // FNV-1a over the ids
  for (const TokenId id : warm.tokens) hash = (hash ^ static_cast<std::uint64_t>(id)) * 1099511628211U;
  return static_cast<double>(hash >> 11U) * 0x1.0p-53 < rate;
}

std::optional<ReuseCheck> check_reuse(const LanguageModel& model, const RecordedCache& warm, TokenId last,
                                      const GenerateOptions& options) {
  PromptCache cold = make_prompt_cache(model, options.kv_cache.max_kv_size);
  CacheQuantizer quantize(options.kv_cache);
  std::span<const TokenId> rest(warm.tokens);
  for (const int piece : pieces_of(warm, options)) {
    if (options.cancel.stop_requested()) return {};
    model.forward(as_row(rest.first(static_cast<std::size_t>(piece))), cold);
    quantize(cold);
    cold.eval();
    rest = rest.subspan(static_cast<std::size_t>(piece));
  }
  // A history that was longer once may have been quantised where this one is not yet.
  const auto quantization = quantization_of(warm.cache);
  // Layer by layer: a snapshot brings windows back as they were, while layers that are trimmed stay quantised.
  if (quantization) {
    PromptCache quantized = cold.fork();
    maybe_quantize_kv_cache(quantized, 0, quantization->group_size, quantization->bits);
    for (std::size_t i = 0; i < cold.size(); ++i) {
      if (describe_cache(quantized[i]) == describe_cache(warm.cache[i])) cold.replace(i, quantized[i].fork());
    }
  }

  const auto got = next_logits(model, warm.cache, last);
  const auto want = next_logits(model, cold, last);
  const auto difference = mx::max(mx::abs(mx::astype(mx::subtract(got, want), mx::float32)));
  const auto scale = mx::max(mx::abs(mx::astype(want, mx::float32)));
  mx::eval(difference, scale);
  return ReuseCheck{.error = static_cast<double>(difference.item<float>()) /
                             std::max(static_cast<double>(scale.item<float>()), 1e-30),
                    .tolerance = tolerance_for(got.dtype(), warm.cache, quantization),
                    .cold = std::move(cold)};
}

}  // namespace reprise::internal
