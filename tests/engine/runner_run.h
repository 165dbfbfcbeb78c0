// Models of the conformance kit under a ModelRunner, and what they answer alone.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "reprise/engine/model_runner.h"
#include "reprise/models/language_model.h"
#include "reprise/sampling/sampling_params.h"

namespace reprise::test {

constexpr double kClose = 2e-4;  // of logprobs, float32
constexpr int kCheckpointEvery = 64;

inline ModelRunnerOptions small_blocks(std::size_t max_bytes = std::size_t{256} << 20) {
  ModelRunnerOptions options;
  options.prefix.block_size = 64;
  options.prefix.max_bytes = max_bytes;
  options.checkpoint_every = kCheckpointEvery;
  return options;
}

struct Answer {
  Tokens tokens;
  std::vector<float> logprobs;
  int reused = 0;    // tokens that start did not leave to compute
  int computed = 0;  // tokens of prefill pieces
};

// float32 throughout: what is compared is order of sums.
std::unique_ptr<LanguageModel> kit_model(const std::string& name);

Tokens random_tokens(std::mt19937& random, int count, int vocab_size);

// By a cache of the model's own kinds, one token at a time after the prompt.
Answer answer_alone(const LanguageModel& model, const Tokens& prompt, int max_tokens,
                    const SamplingParams& sampling = {});

// What a scheduler does for one sequence.
struct Conversation {
  int max_tokens = 8;
  SamplingParams sampling = {};
  std::string salt = {};
  bool keep = true;
  int piece = 48;             // tokens of a prefill
  int checkpoint_every = 64;  // of a prefill; the end of the prompt has one too
  bool look_ahead = true;
};
Answer converse(ModelRunner& runner, SequenceId id, const Tokens& prompt, const Conversation& how = {});

// Start and prefill only. Returns: tokens reused.
int prefill_all(ModelRunner& runner, SequenceId id, const Tokens& prompt, const Conversation& how);

// The largest difference of logprobs; infinity where tokens differ.
double distance(const Answer& got, const Answer& want);

}  // namespace reprise::test
