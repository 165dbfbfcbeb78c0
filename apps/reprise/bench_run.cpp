#include "apps/reprise/bench_run.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <span>
#include <utility>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/sampling/sampler.h"

namespace reprise::app {

namespace mx = mlx::core;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Without the special ids at the beginning of most vocabularies.
Tokens random_tokens(std::mt19937& random, int count, int vocab_size) {
  const int first = vocab_size > 200 ? 100 : 0;
  std::uniform_int_distribution<TokenId> id(first, vocab_size - 1);
  Tokens tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) token = id(random);
  return tokens;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Clocks are on while it lives.
class ProfileSwitch {
 public:
  ProfileSwitch() {
    Profile::reset();
    Profile::enable(true);
  }
  ~ProfileSwitch() { Profile::enable(false); }
  ProfileSwitch(const ProfileSwitch&) = delete;
  ProfileSwitch& operator=(const ProfileSwitch&) = delete;
};

template <typename Runs, typename Phase>
BenchProfile profile_of(const Runs& runs, Phase phase) {
  const ProfileSwitch on;
  BenchProfile profile;
  for (const auto& run : runs) {
    const BenchPhase one = phase(*run);
    profile.phase.tokens += one.tokens;
    profile.phase.seconds += one.seconds;
  }
  profile.operations = Profile::entries();
  return profile;
}

}  // namespace

// One repetition, over copies of the filled caches.
class Bench::Run {
 public:
  explicit Run(const Bench& bench) : bench_(bench) {}
  virtual ~Run() = default;
  virtual BenchPhase prefill() = 0;
  // Once, after prefill. num_tokens ≥ 1 of each sequence.
  virtual BenchPhase decode(int num_tokens) = 0;

 protected:
  const LoadedModel& model() const { return bench_.model_; }
  const BenchPlan& plan() const { return bench_.plan_; }
  const Bench& bench_;
};

class Bench::SingleRun final : public Run {
 public:
  explicit SingleRun(const Bench& bench) : Run(bench), cache_(bench.filled_[0].fork()) { own_buffers(); }

  BenchPhase prefill() override { return {plan().prompt, run(bench_.prompts_[0], 1)}; }

  BenchPhase decode(int num_tokens) override { return {num_tokens, run({last_}, num_tokens)}; }

 private:
  // The first write to a fork copies its buffers, which a conversation that goes on never pays: done before the clock
  // starts, by a token that is written and taken back. A cache that cannot take it back pays.
  void own_buffers() {
    if (plan().depth == 0 || !can_trim_prompt_cache(cache_.cache, 1)) return;
    const TokenId token = bench_.prompts_[0][0];
    auto options = plan().options;
    options.max_tokens = 0;
    generate(model(), std::span(&token, 1), cache_, options);
    Tokens all = bench_.filled_[0].tokens;
    all.push_back(token);
    keep_common_prefix(*model().model, cache_, all, options.kv_cache);
  }

  double run(const Tokens& prompt, int num_tokens) {
    auto options = plan().options;
    options.max_tokens = num_tokens;
    options.ignore_eos = true;
    const auto result = generate(model(), prompt, cache_, options);
    if (result.finish_reason == FinishReason::cancelled) throw BenchCancelled();
    last_ = result.tokens.back();
    return (result.stats.prefill_time + result.stats.decode_time).count();
  }

  RecordedCache cache_;
  TokenId last_ = 0;
};

class Bench::BatchRun final : public Run {
 public:
  explicit BatchRun(const Bench& bench) : Run(bench), sampler_(make_logits_sampler(plan().options.sampling)) {
    for (const auto& filled : bench.filled_) rows_.push_back(filled.fork());
  }

  BenchPhase prefill() override {
    const auto start = Clock::now();
    Tokens last;
    std::vector<const PromptCache*> caches;
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const Tokens& prompt = bench_.prompts_[row];
      reprise::prefill(*model().model, prompt, rows_[row], plan().options);
      check_cancelled();
      const auto& kv = plan().options.kv_cache;
      if (kv.kv_bits) {
        maybe_quantize_kv_cache(rows_[row].cache, kv.quantized_kv_start, kv.kv_group_size, *kv.kv_bits);
      }
      last.push_back(prompt.back());
      caches.push_back(&rows_[row].cache);
    }
    cache_ = merge_prompt_caches(caches);
    rows_.clear();
    tokens_ = step(mx::array(last.data(), {static_cast<int>(last.size())}, mx::int32));
    mx::eval(tokens_);
    return {plan().prompt * plan().batch, seconds_since(start)};
  }

  // As generate does it: the next step is built while one runs, and dispatched before the result is looked at.
  BenchPhase decode(int num_tokens) override {
    const auto start = Clock::now();
    tokens_ = step(tokens_);
    mx::async_eval(tokens_);
    for (int n = 1; n <= num_tokens; ++n) {
      check_cancelled();
      const mx::array next = n < num_tokens ? step(tokens_) : tokens_;
      mx::eval(tokens_);
      if (n < num_tokens) mx::async_eval(next);
      tokens_ = next;
    }
    return {num_tokens * plan().batch, seconds_since(start)};
  }

 private:
  // tokens int32 [B] → the next ones.
  mx::array step(const mx::array& tokens) {
    return sampler_(model().model->forward(mx::reshape(tokens, {-1, 1}), cache_)).tokens;
  }

  void check_cancelled() const {
    if (plan().options.cancel.stop_requested()) throw BenchCancelled();
  }

  LogitsSampler sampler_;
  std::vector<RecordedCache> rows_;
  PromptCache cache_;
  mx::array tokens_ = mx::array(0);
};

Bench::Bench(const LoadedModel& model, BenchPlan plan) : model_(model), plan_(std::move(plan)) {
  std::mt19937 random(0);
  const int vocab_size = model.model->info().vocab_size;
  const auto& kv = plan_.options.kv_cache;
  for (int row = 0; row < plan_.batch; ++row) {
    prompts_.push_back(random_tokens(random, plan_.prompt, vocab_size));
    filled_.push_back({make_prompt_cache(*model.model, kv.max_kv_size), {}});
    plan_kv_cache(*model.model, filled_.back().cache, kv);
    if (plan_.depth == 0) continue;
    auto options = plan_.options;
    options.max_tokens = 0;
    const auto tokens = random_tokens(random, plan_.depth, vocab_size);
    const auto result = generate(model, tokens, filled_.back(), options);
    if (result.finish_reason == FinishReason::cancelled) throw BenchCancelled();
  }
  run_once(std::min(plan_.decode, 2));
}

std::unique_ptr<Bench::Run> Bench::start() const {
  if (plan_.batch == 1) return std::make_unique<SingleRun>(*this);
  return std::make_unique<BatchRun>(*this);
}

BenchRepetition Bench::run_once(int decode) const {
  const auto run = start();
  BenchRepetition repetition;
  repetition.prefill = run->prefill();
  if (decode > 0) repetition.decode = run->decode(decode);
  return repetition;
}

std::vector<BenchRepetition> Bench::measure() {
  std::vector<BenchRepetition> repetitions;
  for (int i = 0; i < plan_.repeat; ++i) repetitions.push_back(run_once(plan_.decode));
  return repetitions;
}

BenchProfiles Bench::profile() {
  std::vector<std::unique_ptr<Run>> runs;
  for (int i = 0; i < plan_.repeat; ++i) runs.push_back(start());
  BenchProfiles profiles;
  profiles.prefill = profile_of(runs, [](Run& run) { return run.prefill(); });
  if (plan_.decode > 0) {
    profiles.decode = profile_of(runs, [this](Run& run) { return run.decode(plan_.decode); });
  }
  return profiles;
}

double median_seconds(const std::vector<BenchRepetition>& repetitions, BenchPhase BenchRepetition::*part) {
  std::vector<double> values;
  for (const auto& repetition : repetitions) values.push_back((repetition.*part).seconds);
  return median(std::move(values));
}

double median_tps(const std::vector<BenchRepetition>& repetitions, BenchPhase BenchRepetition::*part) {
  std::vector<double> values;
  for (const auto& repetition : repetitions) values.push_back((repetition.*part).tokens_per_second());
  return median(std::move(values));
}

}  // namespace reprise::app
