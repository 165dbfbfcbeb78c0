#include "reprise/engine/engine.h"

#include <utility>

#include "reprise/base/error.h"
#include "reprise/engine/engine_thread.h"
#include "reprise/engine/generation.h"
#include "reprise/engine/model_runner.h"
#include "reprise/generate/request_checks.h"

namespace reprise {

using internal::Stream;

namespace {

ModelRunnerOptions runner_options(const EngineOptions& options) {
  ModelRunnerOptions runner;
  runner.prefix.ttl = options.ttl;
  runner.prefix.max_bytes = options.max_bytes;
  if (options.cache_dir) {
    runner.prefix.disk = DiskTierOptions{.folder = *options.cache_dir, .max_bytes = options.max_disk_bytes};
  }
  runner.kv_quantization = options.kv_quantization;
  runner.checkpoint_every = options.scheduler.checkpoint_every;
  runner.verify_reuse = options.verify_reuse;
  return runner;
}

// A folder outlives the process and may be shared: there, models that differ anywhere must not meet.
const std::string& fingerprint_for(const LoadedModel& model, const EngineOptions& options) {
  if (!options.cache_dir) return model.fingerprint;
  if (!model.full_fingerprint.empty()) return model.full_fingerprint;
  throw Error(ErrorCode::failed_precondition,
              "[Engine] with a cache_dir the model must be loaded with LoadOptions::full_fingerprint");
}

}  // namespace

struct Engine::Impl {
  Impl(const LoadedModel& the_model, const EngineOptions& the_options, const MakeRunner& make_runner)
      : model(the_model), options(the_options), thread(options.scheduler, make_runner) {}
  Impl(const LoadedModel& the_model, const EngineOptions& the_options)
      : Impl(the_model, the_options, [&]() -> std::unique_ptr<BatchRunner> {
          auto runner = std::make_unique<ModelRunner>(*the_model.model, fingerprint_for(the_model, the_options),
                                                      runner_options(the_options));
          model_runner = runner.get();
          return runner;
        }) {}

  void check(const Request& request);

  const LoadedModel& model;
  const EngineOptions options;
  ModelRunner* model_runner = nullptr;  // null over another runner; set before the thread is ready
  internal::EngineThread thread;
};

void Engine::Impl::check(const Request& request) {
  const auto refuse = [](ErrorCode code, const std::string& why) { throw Error(code, "[Engine::submit] " + why); };
  const LanguageModel& language_model = *model.model;
  if (const auto why = internal::prompt_objection(language_model, request.prompt)) {
    refuse(ErrorCode::invalid_argument, *why);
  }
  if (request.max_tokens < 0) {
    refuse(ErrorCode::invalid_argument,
           "max_tokens must not be negative, but got " + std::to_string(request.max_tokens));
  }
  if (const auto why = internal::positions_objection(language_model, request.prompt.size(), request.max_tokens)) {
    refuse(ErrorCode::invalid_argument, *why + ": shorten it, or lower max_tokens");
  }
  check_sampling_params(request.sampling);
  if (const auto why = internal::logit_bias_objection(language_model, request.sampling)) {
    refuse(ErrorCode::invalid_argument, *why);
  }
  if (const std::string why = budget_objection(thread.runner(), request.prompt.size(), request.max_tokens);
      !why.empty()) {
    refuse(ErrorCode::resource_exhausted, why);
  }
  const int waiting = thread.inbox()->num_posted + thread.inbox()->num_waiting;
  if (waiting >= options.scheduler.max_waiting) {
    refuse(ErrorCode::resource_exhausted,
           std::to_string(waiting) + " requests wait already, and no more are taken: try again later");
  }
}

Engine::Engine(const LoadedModel& model, const EngineOptions& options)
    : impl_(std::make_unique<Impl>(model, options)) {}
Engine::Engine(const LoadedModel& model, const EngineOptions& options, const MakeRunner& make_runner)
    : impl_(std::make_unique<Impl>(model, options, make_runner)) {}
Engine::~Engine() = default;

Generation Engine::submit(Request request) {
  impl_->check(request);
  AnswerText text(impl_->model.tokenizer, {.stop_tokens = std::move(request.stop_tokens),
                                           .ignore_eos = request.ignore_eos,
                                           .stop = std::move(request.stop)});
  const auto& inbox = impl_->thread.inbox();
  auto shared = std::make_shared<Generation::Shared>(inbox);
  const auto stream = std::make_shared<Stream>(shared, std::move(text));
  // Commands are copied about; what is in it is moved once.
  const auto sequence = std::make_shared<SequenceRequest>(
      SequenceRequest{.prompt = std::move(request.prompt),
                      .max_tokens = request.max_tokens,
                      .sampling = std::move(request.sampling),
                      .priority = request.priority,
                      .salt = std::move(request.salt),
                      .keep = request.keep,
                      .checkpoints = std::move(request.checkpoints),
                      .on_token = [stream](TokenId token, float logprob) { return stream->take_token(token, logprob); },
                      .on_progress = [stream](int done, int total) { stream->take_progress(done, total); },
                      .on_end = [stream](const SequenceEnd& end) { stream->take_end(end); }});
  ++inbox->num_posted;
  const bool is_posted = inbox->post([stream, sequence, inbox = inbox.get()](Scheduler& scheduler) {
    --inbox->num_posted;
    try {
      stream->shared().sequence = scheduler.submit(std::move(*sequence));
    } catch (...) {
      stream->shared().fail(std::current_exception());
    }
  });
  if (!is_posted) {
    --inbox->num_posted;
    throw Error(ErrorCode::failed_precondition, "[Engine::submit] the engine is going away");
  }
  return Generation(std::move(shared));
}

EngineStats Engine::stats() const {
  EngineStats stats;
  impl_->thread.run([&](Scheduler& scheduler, BatchRunner& runner) {
    stats.scheduler = scheduler.stats();
    stats.nbytes = runner.nbytes();
    stats.max_bytes = runner.max_bytes();
    if (ModelRunner* model_runner = impl_->model_runner) {
      stats.prefix = model_runner->prefix().stats();
      stats.reuse_checks = model_runner->reuse_checks();
      stats.reuse_mismatches = model_runner->reuse_mismatches();
    }
  });
  return stats;
}

void Engine::with_prefix_cache(const std::function<void(PrefixCache&)>& work) {
  impl_->thread.run([&](Scheduler&, BatchRunner&) {
    if (!impl_->model_runner) throw Error(ErrorCode::failed_precondition, "[Engine] its runner has no prefix cache");
    work(impl_->model_runner->prefix());
  });
}

const LoadedModel& Engine::model() const { return impl_->model; }
const EngineOptions& Engine::options() const { return impl_->options; }

}  // namespace reprise
