#include "reprise/sampling/sampling_params.h"

#include <cmath>
#include <sstream>

#include "reprise/base/error.h"

namespace reprise {
namespace {

template <typename Value>
[[noreturn]] void fail(const char* field, const char* range, Value value) {
  std::ostringstream text;
  text << "[check_sampling_params] " << field << " must be " << range << ", but got " << value;
  throw Error(ErrorCode::invalid_argument, text.str());
}

// The comparisons are written so that NaN fails them.
void check_between(const char* field, float value, float low, float high, const char* range) {
  if (!(value >= low && value <= high)) fail(field, range, value);
}

void check_finite(const char* field, float value) {
  if (!std::isfinite(value)) fail(field, "a finite number", value);
}

void check_at_least(const char* field, int value, int low, const char* range) {
  if (value < low) fail(field, range, value);
}

}  // namespace

void check_sampling_params(const SamplingParams& params) {
  if (!(params.temperature >= 0.0f) || !std::isfinite(params.temperature)) {
    fail("temperature", "a finite number of at least 0", params.temperature);
  }
  check_between("top_p", params.top_p, 0.0f, 1.0f, "in [0, 1]");
  check_at_least("top_k", params.top_k, 0, "at least 0");
  check_between("min_p", params.min_p, 0.0f, 1.0f, "in [0, 1]");
  check_at_least("min_tokens_to_keep", params.min_tokens_to_keep, 1, "at least 1");
  check_between("xtc_probability", params.xtc_probability, 0.0f, 1.0f, "in [0, 1]");
  check_between("xtc_threshold", params.xtc_threshold, 0.0f, 0.5f, "in [0, 0.5]");
  for (const TokenId id : params.xtc_special_tokens) check_at_least("xtc_special_tokens", id, 0, "token ids");

  if (!(params.repetition_penalty >= 0.0f) || !std::isfinite(params.repetition_penalty)) {
    fail("repetition_penalty", "a finite number of at least 0", params.repetition_penalty);
  }
  check_finite("presence_penalty", params.presence_penalty);
  check_finite("frequency_penalty", params.frequency_penalty);
  check_at_least("repetition_context_size", params.repetition_context_size, 0, "at least 0");
  check_at_least("presence_context_size", params.presence_context_size, 0, "at least 0");
  check_at_least("frequency_context_size", params.frequency_context_size, 0, "at least 0");
  for (const auto& [id, bias] : params.logit_bias) {
    check_at_least("logit_bias", id, 0, "given for token ids");
    if (!(bias < INFINITY)) fail("logit_bias", "finite or -infinity", bias);
  }
}

}  // namespace reprise
