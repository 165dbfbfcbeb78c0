// Invariant of this file: between two calls every sequence holds the tokens of its record, or, while a step runs ahead,
// one more. A step is recorded when it has ended.
#include "reprise/engine/model_runner.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <utility>

#include "mlx/array.h"
#include "mlx/device.h"
#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/base/log.h"
#include "reprise/engine/cache_sizes.h"
#include "reprise/engine/cold_check.h"
#include "reprise/engine/decode_step.h"
#include "reprise/generate/reuse_tolerance.h"

namespace reprise {

namespace mx = mlx::core;

using internal::CacheSizes;
using internal::ColdCheck;
using internal::Decoder;
using internal::DecodeStep;
using internal::RunningSequence;
using Rows = std::vector<RunningSequence*>;

namespace {

void check_options(const ModelRunnerOptions& options) {
  if (!(mx::default_device() == mx::Device::cpu)) {
    throw Error(ErrorCode::unsupported, "[ModelRunner] pages are plain memory: the device must be the CPU");
  }
  if (options.checkpoint_every < 1) {
    throw Error(ErrorCode::invalid_argument, "[ModelRunner] checkpoint_every must be at least 1, but got " +
                                                 std::to_string(options.checkpoint_every));
  }
  if (!(options.verify_reuse >= 0.0 && options.verify_reuse <= 1.0)) {
    throw Error(ErrorCode::invalid_argument,
                "[ModelRunner] verify_reuse must lie in [0, 1], but got " + std::to_string(options.verify_reuse));
  }
}

}  // namespace

struct ModelRunner::Impl {
  Impl(const LanguageModel& of, const std::string& fingerprint, const ModelRunnerOptions& given, const Clock& clock)
      : model(of), options((check_options(given), given)), pool(PagePool::make()) {
    PromptCache form = make_paged_prompt_cache(model.make_cache(), pool, options.kv_quantization);
    for (const LayerCache* leaf : leaves_of(std::as_const(form))) {
      if (dynamic_cast<const PagedKVCache*>(leaf) || dynamic_cast<const ArraysCache*>(leaf)) continue;
      throw Error(ErrorCode::unsupported,
                  "[ModelRunner] layers must be attention or recurrent, but got " + leaf->class_name());
    }
    sizes = internal::sizes_of(model, form);
    decoder.emplace(model, internal::steps_together(model, form));
    needs_checkpoints = needs_checkpoint(form);
    const std::string space =
        internal::space_of(fingerprint, sizes, options.kv_quantization, options.prefix.block_size);
    prefix.emplace(std::move(form), space, pool, options.prefix, clock);
  }

  RunningSequence& sequence(SequenceId id) {
    const auto found = sequences.find(id);
    if (found != sequences.end()) return *found->second;
    throw Error(ErrorCode::invalid_argument, "[ModelRunner] there is no sequence " + std::to_string(id));
  }

  // Tells the prefix cache what recurrent state sequences hold.
  void count_live_state() noexcept;
  void store(RunningSequence& row, bool checkpoint, bool finished);
  // Those of `rows` that are due. Where there is no memory for it, they go on all the same.
  void store_due(const Rows& rows) noexcept;
  void verify(RunningSequence& row);

  // The step has ended: its tokens become the rows' results.
  void record(const DecodeStep& step);
  // Ends the step that runs ahead, if one does; where it failed, its rows are as before it.
  void settle();
  // One step of `rows`, together or else each by itself; errors become results.
  void run(const Rows& rows);
  void fail(RunningSequence& row, std::exception_ptr error);
  // The rows' next step while this one runs. Returns: false, and nothing has changed, when it has to be done another
  // way.
  bool overlap(const Rows& asked);
  // Begins a step for `overlap` to build on, unless one runs, or a result is there or wanted at once: dispatching the
  // step after it takes MLX until much of it has run, for which a first token does not wait.
  void start_ahead(const Rows& rows);
  // Nothing refers to the row any more. Others of its batch fail where there is no memory to take it apart.
  void let_go_of(RunningSequence& row) noexcept;
  bool is_due(const RunningSequence& row, int more) const {
    const int last = needs_checkpoints ? row.checkpoint_length : row.stored_length;
    return row.keep && !row.damaged && row.length() + more - last >= options.checkpoint_every;
  }

  const LanguageModel& model;
  ModelRunnerOptions options;
  std::shared_ptr<PagePool> pool;
  CacheSizes sizes;
  bool needs_checkpoints = false;
  std::optional<PrefixCache> prefix;
  std::optional<Decoder> decoder;
  std::unordered_map<SequenceId, std::unique_ptr<RunningSequence>> sequences;
  std::optional<DecodeStep> ahead;
  std::uint64_t reuse_checks = 0, reuse_mismatches = 0;
};

void ModelRunner::Impl::count_live_state() noexcept {
  if (!needs_checkpoints) return;
  const auto live =
      std::count_if(sequences.begin(), sequences.end(), [](const auto& entry) { return entry.second->length() > 0; });
  prefix->set_live_state_nbytes(static_cast<std::size_t>(live) * sizes.live_state_nbytes());
}

void ModelRunner::Impl::store(RunningSequence& row, bool checkpoint, bool finished) {
  if (!row.keep || row.damaged || row.record.empty()) return;
  decoder->take_out(&row);
  count_live_state();
  prefix->store(row.salt, row.record, row.cache, &row.lease, {.checkpoint = checkpoint, .finished = finished});
  row.stored_length = row.length();
  if (checkpoint) row.checkpoint_length = row.length();
}

void ModelRunner::Impl::store_due(const Rows& rows) noexcept try {
  for (RunningSequence* row : rows) {
    if (is_due(*row, 0)) store(*row, needs_checkpoints, false);
  }
} catch (const std::exception& error) {
  log(LogLevel::error, std::string("[ModelRunner::decode] what sequences computed is not kept: ") + error.what());
}

void ModelRunner::Impl::verify(RunningSequence& row) {
  if (row.record.empty() || !is_chosen_for_check(row.record, options.verify_reuse)) return;
  ColdCheck check =
      internal::check_against_cold(model, prefix->form(), row.cache, row.record, row.tokens[row.record.size()]);
  ++reuse_checks;
  if (check.agrees()) return;
  ++reuse_mismatches;
  log(LogLevel::warning, "[ModelRunner] the stored prefix of " + std::to_string(row.length()) +
                             " tokens differs from a cold run: logits by " + std::to_string(check.error) +
                             ", allowed " + std::to_string(check.tolerance) + "; the answer comes from the cold run");
  row.take_cache(std::move(check.cold));
  // Where one entry is wrong, no other of its salt is trusted. What another sequence goes on from stays until it ends.
  row.lease.reset();
  prefix->clear(row.salt);
  row.stored_length = row.checkpoint_length = 0;
  store(row, needs_checkpoints, false);
}

void ModelRunner::Impl::fail(RunningSequence& row, std::exception_ptr error) {
  row.ready = DecodedToken{.id = row.id, .error = internal::as_error(std::move(error))};
}

void ModelRunner::Impl::record(const DecodeStep& step) {
  const auto* tokens = step.tokens.data<std::int32_t>();
  const auto* logprobs = step.logprobs.data<float>();
  for (std::size_t i = 0; i < step.rows.size(); ++i) {
    RunningSequence& row = *step.rows[i];
    row.record.push_back(row.next);
    row.next = tokens[i];
    row.ready = DecodedToken{.id = row.id, .token = tokens[i], .logprob = logprobs[i], .error = {}};
    if (!std::isnan(logprobs[i])) continue;
    row.damaged = true;
    fail(row,
         std::make_exception_ptr(Error(ErrorCode::corrupt_data,
                                       "[ModelRunner] the model's logits are not numbers: its weights are damaged")));
  }
}

void ModelRunner::Impl::settle() {
  if (!ahead) return;
  const DecodeStep step = *std::exchange(ahead, std::nullopt);
  try {
    step.wait();
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("[ModelRunner] a step is done again: ") + error.what());
    step.undo.restore();
    return;
  }
  record(step);
}

void ModelRunner::Impl::run(const Rows& rows) {
  try {
    const DecodeStep step = decoder->build(rows, nullptr);
    try {
      step.wait();
    } catch (...) {
      step.undo.restore();
      throw;
    }
    record(step);
  } catch (const std::exception&) {
    if (rows.size() == 1) {
      fail(*rows.front(), std::current_exception());
      return;
    }
    for (RunningSequence* row : rows) run({row});
  }
}

bool ModelRunner::Impl::overlap(const Rows& asked) {
  if (!ahead || ahead->rows.size() != asked.size()) return false;
  if (!std::is_permutation(asked.begin(), asked.end(), ahead->rows.begin())) return false;
  const Rows rows = ahead->rows;
  if (std::any_of(rows.begin(), rows.end(), [&](const RunningSequence* row) { return is_due(*row, 1); })) return false;
  std::optional<DecodeStep> next;
  try {
    next = decoder->build(rows, &*ahead);
  } catch (const std::exception&) {
    return false;  // it is found again where it can be told
  }
  const DecodeStep step = *std::exchange(ahead, std::nullopt);
  try {
    next->start();
    step.wait();
  } catch (const std::exception&) {
    next.reset();
    step.undo.restore();
    return false;
  }
  record(step);
  ahead = std::move(next);
  return true;
}

void ModelRunner::Impl::start_ahead(const Rows& rows) {
  const auto waits = [](const RunningSequence* row) { return row->ready || row->length() < row->prompt_length(); };
  if (ahead || rows.empty() || std::any_of(rows.begin(), rows.end(), waits)) return;
  try {
    DecodeStep step = decoder->build(rows, nullptr);
    try {
      step.start();
    } catch (...) {
      step.undo.restore();
      throw;
    }
    ahead = std::move(step);
  } catch (const std::exception&) {
    // It is tried again one step at a time, and told.
  }
}

void ModelRunner::Impl::let_go_of(RunningSequence& row) noexcept {
  if (!decoder->batch().holds(&row)) return;
  const bool has_state = !row.recurrent.empty();
  for (RunningSequence* other : decoder->batch().abandon()) {
    if (other == &row || !has_state) continue;
    other->damaged = true;
    fail(*other, std::make_exception_ptr(Error(ErrorCode::resource_exhausted, "[ModelRunner] out of memory")));
  }
}

ModelRunner::ModelRunner(const LanguageModel& model, const std::string& fingerprint, const ModelRunnerOptions& options,
                         const Clock& clock)
    : impl_(std::make_unique<Impl>(model, fingerprint, options, clock)) {}

ModelRunner::~ModelRunner() = default;

int ModelRunner::reusable(const std::string& salt, std::span<const TokenId> tokens) const {
  return impl_->prefix->cached_length(salt, tokens);
}

int ModelRunner::start(const SequenceStart& start) {
  if (start.tokens.empty() || start.sampling == nullptr || impl_->sequences.contains(start.id)) {
    throw Error(ErrorCode::invalid_argument,
                "[ModelRunner::start] a new id, tokens and sampling parameters are needed");
  }
  auto owned = std::make_unique<RunningSequence>(start, impl_->prefix->form().fork());
  RunningSequence& row = *owned;
  row.go_on_from(impl_->prefix->fetch(row.salt, row.tokens));
  row.next = row.tokens.back();
  impl_->sequences.emplace(start.id, std::move(owned));
  impl_->verify(row);
  impl_->count_live_state();
  return row.length();
}

void ModelRunner::prefill(SequenceId id, int count, bool checkpoint) {
  RunningSequence& row = impl_->sequence(id);
  const std::size_t begin = row.record.size();
  if (count < 1 || begin + static_cast<std::size_t>(count) >= row.tokens.size()) {
    throw Error(ErrorCode::invalid_argument, "[ModelRunner::prefill] there must be tokens before the last of " +
                                                 std::to_string(row.tokens.size()) + ", but got " +
                                                 std::to_string(count) + " from " + std::to_string(begin));
  }
  const auto piece = row.tokens.subspan(begin, static_cast<std::size_t>(count));
  const internal::StepUndo undo({&row}, nullptr);
  try {
    // The logits are never read, hence never computed: only the caches are evaluated.
    impl_->model.forward(mx::array(piece.data(), {1, count}, mx::int32), row.cache);
    row.cache.eval();
  } catch (const std::exception&) {
    undo.restore();
    std::rethrow_exception(internal::as_error(std::current_exception()));
  }
  row.record.insert(row.record.end(), piece.begin(), piece.end());
  if (row.keep) {
    impl_->store(row, checkpoint && impl_->needs_checkpoints, false);
  } else {
    for (PagedKVCache* layer : row.paged) layer->drop_unseen();
  }
  impl_->count_live_state();
}

std::vector<DecodedToken> ModelRunner::decode(std::span<const SequenceId> ids, bool look_ahead) {
  Rows rows;
  for (const SequenceId id : ids) {
    RunningSequence& row = impl_->sequence(id);
    if (row.record.size() + 1 < row.tokens.size()) {
      throw Error(ErrorCode::invalid_argument,
                  "[ModelRunner::decode] a sequence must be prefilled up to its last token");
    }
    rows.push_back(&row);
  }
  if (look_ahead) impl_->start_ahead(rows);
  if (!look_ahead || !impl_->overlap(rows)) {
    impl_->settle();
    Rows fresh;
    for (RunningSequence* row : rows) {
      if (!row->ready) fresh.push_back(row);
    }
    if (!fresh.empty()) impl_->run(fresh);
  }
  std::vector<DecodedToken> results;
  for (RunningSequence* row : rows) results.push_back(*std::exchange(row->ready, std::nullopt));
  if (!impl_->ahead) impl_->store_due(rows);
  impl_->count_live_state();
  return results;
}

int ModelRunner::finish(SequenceId id) noexcept {
  const auto found = impl_->sequences.find(id);
  if (found == impl_->sequences.end()) return 0;
  RunningSequence& row = *found->second;
  try {
    const Rows& running = impl_->ahead ? impl_->ahead->rows : Rows();
    if (std::find(running.begin(), running.end(), &row) != running.end()) impl_->settle();
    impl_->decoder->take_out(&row);
    impl_->store(row, impl_->needs_checkpoints && row.checkpoint_length != row.length(), true);
  } catch (const std::exception& error) {
    log(LogLevel::error, std::string("[ModelRunner::finish] what a sequence computed is not kept: ") + error.what());
    impl_->let_go_of(row);
  }
  const int length = row.length();
  impl_->sequences.erase(found);
  impl_->count_live_state();
  return length;
}

bool ModelRunner::needs_checkpoints() const { return impl_->needs_checkpoints; }

std::size_t ModelRunner::bytes_of(int tokens) const { return impl_->sizes.bytes_of(tokens); }
std::size_t ModelRunner::nbytes() const { return impl_->prefix->nbytes(); }
bool ModelRunner::make_room(std::size_t bytes) { return impl_->prefix->make_room(bytes); }
std::size_t ModelRunner::max_bytes() const { return impl_->options.prefix.max_bytes; }
void ModelRunner::tick() { impl_->prefix->expire(); }

PrefixCache& ModelRunner::prefix() { return *impl_->prefix; }
std::uint64_t ModelRunner::reuse_checks() const { return impl_->reuse_checks; }
std::uint64_t ModelRunner::reuse_mismatches() const { return impl_->reuse_mismatches; }

}  // namespace reprise
