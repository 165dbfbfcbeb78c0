#include "reprise/generate/reuse_check.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "mlx/transforms.h"
#include "reprise/generate/reuse_tolerance.h"
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

double tolerance_for(mx::Dtype dtype, const PromptCache& cache, const std::optional<KVQuantization>& quantization) {
  std::vector<mx::array> arrays;
  for (std::size_t i = 0; i < cache.size(); ++i) cache[i].state().collect_arrays(arrays);
  std::vector<mx::Dtype> stored;
  for (const mx::array& array : arrays) stored.push_back(array.dtype());
  return reuse_tolerance(dtype, stored, quantization);
}

mx::array next_logits(const LanguageModel& model, const PromptCache& cache, TokenId last) {
  PromptCache probe = cache.fork();
  auto logits = model.forward(as_row(std::span(&last, 1)), probe);
  mx::eval(logits);
  return logits;
}

}  // namespace

bool is_chosen_for_check(const RecordedCache& warm, double rate) {
  return reprise::is_chosen_for_check(warm.tokens, rate);
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
  return ReuseCheck{.error = reuse_error(got, want),
                    .tolerance = tolerance_for(got.dtype(), warm.cache, quantization),
                    .cold = std::move(cold)};
}

}  // namespace reprise::internal
