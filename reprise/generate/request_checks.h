// What is asked of a request before anything happens, by generate and by the engine alike.
// Threads: any; the model is only read.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "reprise/base/tokens.h"
#include "reprise/models/language_model.h"
#include "reprise/sampling/sampling_params.h"

namespace reprise::internal {

// Each returns what is wrong, in words that a message can go on with; none: nothing.

// An empty prompt, or one with ids outside the vocabulary.
std::optional<std::string> prompt_objection(const LanguageModel& model, std::span<const TokenId> prompt);
// A prompt and answer beyond the model's last position: it knows none behind it, its answers there are noise.
std::optional<std::string> positions_objection(const LanguageModel& model, std::size_t prompt_tokens, int max_tokens);
// A logit bias for ids outside the vocabulary; the rest see check_sampling_params.
std::optional<std::string> logit_bias_objection(const LanguageModel& model, const SamplingParams& sampling);

}  // namespace reprise::internal
