#include "reprise/generate/request_checks.h"

#include <cstdint>

namespace reprise::internal {
namespace {

bool is_known(const LanguageModel& model, TokenId id) { return id >= 0 && id < model.info().vocab_size; }

std::string outside(const LanguageModel& model, const std::string& what, TokenId id) {
  return what + " must lie in [0, " + std::to_string(model.info().vocab_size) + "), but got " + std::to_string(id);
}

}  // namespace

// MLX looks ids up without a check.
std::optional<std::string> prompt_objection(const LanguageModel& model, std::span<const TokenId> prompt) {
  if (prompt.empty()) return "the prompt is empty: give at least one token";
  for (const TokenId id : prompt) {
    if (!is_known(model, id)) return outside(model, "token ids", id);
  }
  return {};
}

std::optional<std::string> positions_objection(const LanguageModel& model, std::size_t prompt_tokens, int max_tokens) {
  const auto positions = model.info().max_position_embeddings;
  if (!positions || static_cast<std::int64_t>(prompt_tokens) + max_tokens <= *positions) return {};
  return "the prompt of " + std::to_string(prompt_tokens) + " tokens and up to " + std::to_string(max_tokens) +
         " new ones go beyond the model's " + std::to_string(*positions) + " positions";
}

std::optional<std::string> logit_bias_objection(const LanguageModel& model, const SamplingParams& sampling) {
  for (const auto& [id, bias] : sampling.logit_bias) {
    if (!is_known(model, id)) return outside(model, "the ids of logit_bias", id);
  }
  return {};
}

}  // namespace reprise::internal
