#include "reprise/engine/decode_step.h"

#include <new>
#include <string>
#include <utility>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"

namespace reprise::internal {

namespace mx = mlx::core;

StepUndo::StepUndo(const std::vector<RunningSequence*>& rows, DecodeBatch* batch) : rows_(rows), batch_(batch) {
  for (const ArraysCache* layer : layers()) states_.push_back(*layer);
  for (const RunningSequence* row : rows_) {
    samplers_.push_back(row->sampler);
    for (const PagedKVCache* layer : row->paged) marks_.push_back(layer->mark());
  }
}

std::vector<ArraysCache*> StepUndo::layers() const {
  if (batch_ != nullptr) return batch_->recurrent();
  std::vector<ArraysCache*> layers;
  for (RunningSequence* row : rows_) layers.insert(layers.end(), row->recurrent.begin(), row->recurrent.end());
  return layers;
}

void StepUndo::restore() const {
  const std::vector<ArraysCache*> live = layers();
  for (std::size_t i = 0; i < live.size(); ++i) *live[i] = states_[i];
  auto mark = marks_.begin();
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    rows_[i]->sampler = samplers_[i];
    for (PagedKVCache* layer : rows_[i]->paged) layer->go_back(*mark++);
  }
}

void DecodeStep::start() const {
  std::vector<mx::array> arrays = pending;
  arrays.push_back(tokens);
  arrays.push_back(logprobs);
  mx::async_eval(std::move(arrays));
}

void DecodeStep::wait() const {
  std::vector<mx::array> arrays = pending;
  arrays.push_back(tokens);
  arrays.push_back(logprobs);
  mx::eval(std::move(arrays));
}

void Decoder::take_out(const RunningSequence* row) {
  if (batch_.holds(row)) batch_.dissolve();
}

mx::array Decoder::forward(const std::vector<RunningSequence*>& rows, const mx::array& tokens) {
  const int B = static_cast<int>(rows.size());
  if (batch_.is_of(rows)) return model_.forward(mx::reshape(tokens, {B, 1}), batch_.cache());
  std::vector<mx::array> logits;
  for (int row = 0; row < B; ++row) {
    const auto token = B == 1 ? tokens : mx::slice(tokens, {row}, {row + 1});
    logits.push_back(model_.forward(mx::reshape(token, {1, 1}), rows[static_cast<std::size_t>(row)]->cache));
  }
  return B == 1 ? logits.front() : mx::concatenate(std::move(logits), 0);
}

DecodeStep Decoder::build(const std::vector<RunningSequence*>& rows, const DecodeStep* running) {
  const bool in_batch = together_ && rows.size() > 1;
  if (!in_batch || !batch_.is_of(rows)) {
    // A row alone steps through its own cache.
    for (const RunningSequence* row : rows) take_out(row);
    if (in_batch) {
      batch_.dissolve();
      batch_.form(rows);
    }
  }
  const StepUndo undo(rows, in_batch ? &batch_ : nullptr);
  try {
    std::vector<TokenId> known;
    for (const RunningSequence* row : rows) known.push_back(row->next);
    const mx::array fed =
        running != nullptr ? running->tokens : mx::array(known.data(), {static_cast<int>(known.size())}, mx::int32);
    const mx::array logits = forward(rows, fed);
    std::vector<RowToSample> to_sample;
    for (RunningSequence* row : rows) {
      to_sample.push_back(
          {&row->sampler, &row->record, running != nullptr ? std::optional<TokenId>(row->next) : std::nullopt});
    }
    const SampledTokens sampled = sample_rows(logits, fed, to_sample);
    DecodeStep step{.rows = rows, .tokens = sampled.tokens, .logprobs = sampled.logprobs, .pending = {}, .undo = undo};
    const auto collect = [&](const std::vector<ArraysCache*>& layers) {
      for (const ArraysCache* layer : layers) layer->state().collect_arrays(step.pending);
    };
    if (in_batch) {
      collect(batch_.recurrent());
    } else {
      for (const RunningSequence* row : rows) collect(row->recurrent);
    }
    return step;
  } catch (...) {
    undo.restore();
    throw;
  }
}

bool steps_together(const LanguageModel& model, const PromptCache& form) {
  PromptCache first = form.fork();
  model.forward(mx::zeros({1, 1}, mx::int32), first);
  PromptCache second = first.fork();
  PromptCache batch;
  for (std::size_t layer = 0; layer < first.size(); ++layer) batch.push_back(batch_of({&first[layer], &second[layer]}));
  try {
    model.forward(mx::zeros({2, 1}, mx::int32), batch);
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    return false;
  }
}

std::exception_ptr as_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return error;
  } catch (const std::bad_alloc&) {
    return std::make_exception_ptr(Error(ErrorCode::resource_exhausted, "[ModelRunner] out of memory"));
  } catch (const std::exception& other) {
    return std::make_exception_ptr(Error(ErrorCode::internal, std::string("[ModelRunner] MLX: ") + other.what()));
  }
}

}  // namespace reprise::internal
