// engine_requests DIR [--only NAME…] [--part K/N] [--known] [--verbose]: for each model of the conformance kit, random
// requests through one engine, many at a time: new prompts, conversations that go on, edits of their past, forks,
// repeats, cancelled ones. Every answer is held against a run of its own over cold caches; the caches that the engine
// keeps against those that hold the same tokens alone; the budget after every step. With ample memory and with little,
// dense and quantised, and with a store on disk that a new engine opens.
// $REPRISE_REQUESTS: requests a setting (40), $REPRISE_SEED. Exit status: as model_replay.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <iostream>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/engine/engine.h"
#include "tests/generate/reuse_checks.h"
#include "tests/models/replay_program.h"

namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;

using namespace reprise;
using namespace reprise::test;

constexpr int kCheckpointEvery = 48;
constexpr int kMaxPrompt = 300;
constexpr int kMaxAnswer = 24;

struct Setting {
  std::string name;
  double budget = 0;  // of what four of the longest sequences hold; 0: ample
  std::optional<KVQuantization> quantization = {};
  bool on_disk = false;
};

const std::vector<Setting> kSettings = {
    {"ample"}, {"little memory", 1.0}, {"8 bits", 0, KVQuantization{32, 8}}, {"disk", 0, {}, true}};

int number_from(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

class Failure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(bool condition, const std::string& what) {
  if (!condition) throw Failure(what);
}

// What the model says alone: caches of its own, all tokens at once.
class Oracle {
 public:
  Oracle(const LanguageModel& model, const std::optional<KVQuantization>& quantization)
      : model_(model), quantization_(quantization) {}

  // float32 [tokens, V]: log-probabilities of what follows each token.
  mx::array logprobs(const Tokens& tokens) const {
    PromptCache cache = model_.make_cache();
    if (quantization_) maybe_quantize_kv_cache(cache, 0, quantization_->group_size, quantization_->bits);
    const mx::array ids(tokens.data(), {1, static_cast<int>(tokens.size())}, mx::int32);
    const mx::array logits = mx::astype(model_.forward(ids, cache), mx::float32);
    const mx::array out = mx::squeeze(mx::subtract(logits, mx::logsumexp(logits, -1, true)), 0);
    mx::eval(out);
    return out;
  }

  // How far logprobs may be off. Rows that are quantised after they were rounded otherwise can differ by a step.
  double tolerance() const { return quantization_ ? 0.1 : 2e-3; }

 private:
  const LanguageModel& model_;
  std::optional<KVQuantization> quantization_;
};

struct Running {
  Request request;
  std::optional<Generation> generation;
  Tokens answer;
  std::vector<float> logprobs;
  int cancel_after = -1;  // events
  int events = 0;
};

struct Done {
  Tokens tokens;  // prompt and answer: what the engine holds, its last token apart
  std::string salt;
};

class Requests {
 public:
  Requests(const LoadedModel& model, const Setting& setting, const fs::path& folder, unsigned seed)
      : model_(model), setting_(setting), oracle_(*model.model, setting.quantization), random_(seed) {
    options_.scheduler = {
        .max_batch = 6, .prefill_step_size = 32, .checkpoint_every = kCheckpointEvery, .reserve_tokens = 8};
    options_.kv_quantization = setting.quantization;
    if (setting.on_disk) options_.cache_dir = folder;
    engine_.emplace(model, options_);
    if (setting.budget > 0) {
      // Measured on the engine itself: what one of the longest sequences makes it hold.
      engine_->submit({.prompt = random_tokens(kMaxPrompt), .max_tokens = kMaxAnswer, .ignore_eos = true}).wait();
      options_.max_bytes =
          static_cast<std::size_t>(4.0 * setting.budget * static_cast<double>(engine_->stats().nbytes));
      engine_.reset();
      engine_.emplace(model, options_);
    }
  }

  void run(int count) {
    int submitted = 0;
    while (submitted < count || !running_.empty()) {
      if (submitted < count && running_.size() < 8 && chance(0.5)) {
        submit();
        ++submitted;
        if (setting_.on_disk && submitted % 20 == 0) restart();
      }
      if (!running_.empty()) poll(running_[below(running_.size())]);
      std::erase_if(running_, [](const Running& one) { return !one.generation; });
      if (chance(0.02)) check_stored();
    }
    for (int i = 0; i < 5; ++i) check_stored();
    const EngineStats stats = engine_->stats();
    require(stats.prefix.refused == 0, "entries were refused: " + std::to_string(stats.prefix.refused));
    require(stats.scheduler.over_budget == 0, "steps over the budget: " + std::to_string(stats.scheduler.over_budget) +
                                                  ", at most " + std::to_string(stats.scheduler.max_nbytes_seen) +
                                                  " of " + std::to_string(stats.max_bytes));
    if (setting_.budget > 0) require(stats.prefix.tree.evicted_blocks > 0, "little memory, but nothing was evicted");
    reused_ += stats.scheduler.cached_tokens;
    require(reused_ > 0, "nothing was reused");
  }

 private:
  std::size_t below(std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random_); }
  int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  bool chance(double p) { return std::bernoulli_distribution(p)(random_); }

  Tokens random_tokens(int count) {
    Tokens tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(between(0, model_.model->info().vocab_size - 1));
    return tokens;
  }

  void append_random(Tokens& tokens, int count) {
    const Tokens more = random_tokens(count);
    tokens.insert(tokens.end(), more.begin(), more.end());
  }

  void submit() {
    Request request;
    request.salt = chance(0.1) ? "other" : "";
    const int kind = done_.empty() ? 0 : between(0, 5);
    if (kind == 0) {
      request.prompt = random_tokens(between(1, kMaxPrompt));
    } else {
      const Done& before = done_[below(done_.size())];
      request.prompt = before.tokens;
      if (!chance(0.1)) request.salt = before.salt;
      if (kind == 1) {         // repeated
      } else if (kind == 2) {  // forked or cut
        request.prompt.resize(1 + below(request.prompt.size()));
        append_random(request.prompt, between(0, 20));
      } else if (kind == 3) {  // edited: what follows stays
        request.prompt[below(request.prompt.size())] = between(0, model_.model->info().vocab_size - 1);
      } else {  // goes on
        append_random(request.prompt, between(1, 40));
      }
      if (request.prompt.size() > kMaxPrompt) request.prompt.resize(kMaxPrompt);
    }
    request.max_tokens = between(1, kMaxAnswer);
    request.ignore_eos = true;
    request.priority = between(0, 2);
    request.keep = !chance(0.05);
    if (chance(0.3)) request.sampling = {.temperature = 0.8f, .top_p = 0.9f, .seed = 7u + below(1000)};
    if (chance(0.2)) request.checkpoints = {between(1, static_cast<int>(request.prompt.size()))};
    Running one;
    one.request = request;
    one.cancel_after = chance(0.15) ? between(0, 8) : -1;
    one.generation.emplace(engine_->submit(request));
    running_.push_back(std::move(one));
    // The same prompt twice at once.
    if (chance(0.1)) {
      Running twin;
      twin.request = std::move(request);
      twin.generation.emplace(engine_->submit(twin.request));
      running_.push_back(std::move(twin));
    }
  }

  void poll(Running& one) {
    if (one.events++ == one.cancel_after) one.generation->cancel();
    const auto event = one.generation->next_for(std::chrono::milliseconds(between(0, 3)));
    if (!event) return;
    if (event->kind == GenerationEvent::Kind::token) {
      one.answer.push_back(event->token);
      one.logprobs.push_back(event->logprob);
    } else if (event->kind == GenerationEvent::Kind::end) {
      finish(one, *event);
      one.generation.reset();
    }
  }

  void finish(const Running& one, const GenerationEvent& end) {
    const Request& request = one.request;
    const bool cancelled = end.reason == FinishReason::cancelled;
    require(cancelled || static_cast<int>(one.answer.size()) == request.max_tokens,
            "an answer of " + std::to_string(one.answer.size()) + " tokens in place of " +
                std::to_string(request.max_tokens));
    require(end.stats.cached_tokens < static_cast<int>(request.prompt.size()), "nothing was left to compute");
    Tokens tokens = request.prompt;
    tokens.insert(tokens.end(), one.answer.begin(), one.answer.end());
    check_answer(request, one.answer, one.logprobs, tokens);
    if (request.keep && !one.answer.empty()) done_.push_back({std::move(tokens), request.salt});
    if (done_.size() > 60) done_.pop_front();
  }

  // Each token is what the model alone says after those before it.
  void check_answer(const Request& request, const Tokens& answer, const std::vector<float>& logprobs,
                    const Tokens& tokens) {
    if (answer.empty()) return;
    const mx::array alone = oracle_.logprobs(tokens);
    const auto* rows = alone.data<float>();
    const int vocab = alone.shape(1);
    for (std::size_t i = 0; i < answer.size(); ++i) {
      const float* row = rows + (request.prompt.size() - 1 + i) * static_cast<std::size_t>(vocab);
      const double wanted = row[answer[i]];
      require(std::abs(wanted - logprobs[i]) <= oracle_.tolerance(),
              "token " + std::to_string(i) + " of an answer after " + std::to_string(request.prompt.size()) +
                  " tokens has logprob " + std::to_string(logprobs[i]) + ", alone " + std::to_string(wanted));
      if (request.sampling.temperature > 0.0f) continue;
      const double best = *std::max_element(row, row + vocab);
      require(best - wanted <= oracle_.tolerance(), "token " + std::to_string(i) + " is not the likeliest");
    }
    if (request.sampling.temperature > 0.0f) check_draws(request, answer);
  }

  // The same draws as generate makes with the same seed, but where a number falls beside a border.
  void check_draws(const Request& request, const Tokens& answer) {
    RecordedCache cache{model_.model->make_cache(), {}, {}};
    if (setting_.quantization) return;
    const auto result =
        generate(model_, request.prompt, cache,
                 {.max_tokens = static_cast<int>(answer.size()), .sampling = request.sampling, .ignore_eos = true});
    ++draws_;
    if (result.tokens != answer) ++other_draws_;
    // Products with quantised weights round otherwise for several rows than for one, so that borders lie elsewhere.
    const int one_in = model_.model->info().quantization == "none" ? 50 : 5;
    require(other_draws_ <= 1 + draws_ / one_in,
            std::to_string(other_draws_) + " of " + std::to_string(draws_) + " answers differ from generate's draws");
  }

  // What the engine would hand to the next request is as long as it says, and answers as what was computed alone.
  void check_stored() {
    if (done_.empty()) return;
    const Done& one = done_[below(done_.size())];
    engine_->with_prefix_cache([&](PrefixCache& prefix) {
      FetchedPrefix fetched = prefix.fetch(one.salt, one.tokens);
      check_prompt_cache(fetched.cache, fetched.length);
      if (fetched.length == 0) return;
      const Tokens probe = {one.tokens[static_cast<std::size_t>(fetched.length)]};
      const mx::array logits =
          mx::astype(model_.model->forward(mx::array(probe.data(), {1, 1}, mx::int32), fetched.cache), mx::float32);
      const mx::array warm = mx::subtract(logits, mx::logsumexp(logits, -1, true));
      const Tokens tokens(one.tokens.begin(), one.tokens.begin() + fetched.length + 1);
      const mx::array cold = oracle_.logprobs(tokens);
      const mx::array last = mx::slice(cold, {fetched.length, 0}, cold.shape());
      mx::array error = mx::max(mx::abs(mx::subtract(mx::reshape(warm, last.shape()), last)));
      require(error.item<float>() <= oracle_.tolerance(), "a stored prefix of " + std::to_string(fetched.length) +
                                                              " tokens is off by " +
                                                              std::to_string(error.item<float>()));
    });
  }

  // What the last engine wrote, a new one finds.
  void restart() {
    while (!running_.empty()) {
      poll(running_.front());
      std::erase_if(running_, [](const Running& one) { return !one.generation; });
    }
    reused_ += engine_->stats().scheduler.cached_tokens;
    engine_.reset();
    engine_.emplace(model_, options_);
    const auto kept = std::find_if(done_.rbegin(), done_.rend(), [](const Done& one) { return one.tokens.size() > 2; });
    if (kept == done_.rend()) return;
    const auto result =
        engine_->submit({.prompt = kept->tokens, .max_tokens = 1, .ignore_eos = true, .salt = kept->salt}).wait();
    require(result.stats.cached_tokens + kCheckpointEvery >= static_cast<int>(kept->tokens.size()) - 2,
            "after a restart " + std::to_string(result.stats.cached_tokens) + " of " +
                std::to_string(kept->tokens.size()) + " tokens were there");
  }

  const LoadedModel& model_;
  Setting setting_;
  Oracle oracle_;
  std::mt19937 random_;
  EngineOptions options_;
  std::optional<Engine> engine_;
  std::vector<Running> running_;
  std::deque<Done> done_;
  std::uint64_t reused_ = 0;
  int draws_ = 0;
  int other_draws_ = 0;
};

// Rows that cannot be quantised so are refused before anything is computed.
bool is_refused(const LanguageModel& model, const Setting& setting) {
  if (!setting.quantization) return false;
  const auto& [group_size, bits] = *setting.quantization;
  try {
    plan_kv_cache(model, model.make_cache(), {.kv_bits = bits, .kv_group_size = group_size, .quantized_kv_start = 0});
    return false;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported && error.code() != ErrorCode::invalid_argument) throw;
    return true;
  }
}

void check_folder(const fs::path& folder, const ReportOutcome& report) {
  const auto model =
      with_kit_tokenizer(make_model(read_model_files(folder), {.compute_dtype = mx::float32, .kv_dtype = mx::float32}));
  const int count = number_from("REPRISE_REQUESTS", 40);
  const auto seed = static_cast<unsigned>(number_from("REPRISE_SEED", 1));
  for (const Setting& setting : kSettings) {
    if (is_refused(*model.model, setting)) continue;
    const fs::path store =
        fs::temp_directory_path() / ("engine_requests_" + std::to_string(getpid()) + folder.filename().string());
    std::string failure;
    try {
      Requests(model, setting, store, seed).run(count);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    fs::remove_all(store);
    report({setting.name, failure});
  }
}

}  // namespace

int main(int argc, char** argv) {
  return replay_folders("engine_requests", std::vector<std::string>(argv + 1, argv + argc), check_folder);
}
