#include "tests/engine/runner_run.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "mlx/mlx.h"
#include "reprise/sampling/sampler.h"
#include "tests/models/model_kit.h"

namespace reprise::test {

namespace mx = mlx::core;

std::unique_ptr<LanguageModel> kit_model(const std::string& name) {
  return make_model(read_model_files(kit_folder() / name), {.compute_dtype = mx::float32, .kv_dtype = mx::float32});
}

Tokens random_tokens(std::mt19937& random, int count, int vocab_size) {
  std::uniform_int_distribution<int> any(0, vocab_size - 1);
  Tokens tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(any(random));
  return tokens;
}

Answer answer_alone(const LanguageModel& model, const Tokens& prompt, int max_tokens, const SamplingParams& sampling) {
  PromptCache cache = make_prompt_cache(model);
  LogitsSampler sampler = make_logits_sampler(sampling);
  Answer answer;
  std::span<const TokenId> feed(prompt);
  TokenId last = 0;
  if (feed.size() > 1) {
    const auto most = feed.first(feed.size() - 1);
    model.forward(mx::array(most.data(), {1, static_cast<int>(most.size())}, mx::int32), cache);
    cache.eval();
  }
  last = feed.back();
  while (static_cast<int>(answer.tokens.size()) < max_tokens) {
    auto sampled = sampler(model.forward(mx::array({last}, {1, 1}, mx::int32), cache));
    last = sampled.tokens.item<std::int32_t>();
    answer.tokens.push_back(last);
    answer.logprobs.push_back(sampled.logprobs.item<float>());
  }
  return answer;
}

int prefill_all(ModelRunner& runner, SequenceId id, const Tokens& prompt, const Conversation& how) {
  const int reused = runner.start(
      {.id = id, .tokens = prompt, .sampling = &how.sampling, .num_draws = 0, .salt = how.salt, .keep = how.keep});
  const int all = static_cast<int>(prompt.size()) - 1;
  for (int at = reused; at < all;) {
    // Pieces end where a checkpoint is due.
    const int next = std::min({all, at + how.piece, (at / how.checkpoint_every + 1) * how.checkpoint_every});
    runner.prefill(id, next - at, next == all || next % how.checkpoint_every == 0);
    at = next;
  }
  return reused;
}

Answer converse(ModelRunner& runner, SequenceId id, const Tokens& prompt, const Conversation& how) {
  Answer answer;
  answer.reused = prefill_all(runner, id, prompt, how);
  answer.computed = static_cast<int>(prompt.size()) - 1 - answer.reused;
  while (static_cast<int>(answer.tokens.size()) < how.max_tokens) {
    const auto got = runner.decode(std::span(&id, 1), how.look_ahead);
    if (got.at(0).error) std::rethrow_exception(got[0].error);
    answer.tokens.push_back(got[0].token);
    answer.logprobs.push_back(got[0].logprob);
  }
  runner.finish(id);
  return answer;
}

double distance(const Answer& got, const Answer& want) {
  if (got.tokens != want.tokens) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (std::size_t i = 0; i < got.logprobs.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(got.logprobs[i]) - want.logprobs[i]));
  }
  return largest;
}

}  // namespace reprise::test
