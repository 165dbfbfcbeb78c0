// How the next token is chosen: plain data, mlx-lm's names and defaults.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "reprise/base/tokens.h"

namespace reprise {

struct SamplingParams {
  float temperature = 0.0f;      // ≥ 0; 0: greedy, and the filters below do nothing
  float top_p = 1.0f;            // [0, 1]: keeps the likeliest tokens that together reach this mass; 0 and 1 keep all
  int top_k = 0;                 // ≥ 0: keeps the k likeliest; 0 keeps all
  float min_p = 0.0f;            // [0, 1]: keeps tokens at least min_p times as likely as the likeliest; 0 keeps all
  int min_tokens_to_keep = 1;    // ≥ 1: min_p leaves at least so many
  float xtc_probability = 0.0f;  // [0, 1]: chance per step that XTC acts
  float xtc_threshold = 0.1f;    // [0, 0.5]
  std::vector<TokenId> xtc_special_tokens = {};  // never removed by XTC (end of turn, newline)

  float repetition_penalty = 0.0f;   // ≥ 0; 0 or 1: off; > 1 makes tokens of the context less likely
  int repetition_context_size = 20;  // ≥ 0: tokens looked back at; 0: off
  float presence_penalty = 0.0f;     // 0: off; subtracted once from each token in the context; may be negative
  int presence_context_size = 20;
  float frequency_penalty = 0.0f;  // 0: off; subtracted once per occurrence; may be negative
  int frequency_context_size = 20;
  std::map<TokenId, float> logit_bias = {};  // added to the logits of these ids; -infinity bans one

  std::optional<std::uint64_t> seed = {};  // none: a random one
};

// Throws: invalid_argument, naming the field, its range and the value got.
void check_sampling_params(const SamplingParams& params);

}  // namespace reprise
