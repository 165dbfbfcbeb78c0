// One token for each of some rows: built as a graph, evaluated later, and undone where that fails. Private to `engine`.
// Threads: see ModelRunner.
#pragma once

#include <optional>
#include <vector>

#include "mlx/array.h"
#include "reprise/engine/decode_batch.h"
#include "reprise/engine/running_sequence.h"
#include "reprise/models/language_model.h"

namespace reprise::internal {

// Some rows' state before a step.
class StepUndo {
 public:
  // `batch`: the rows' if they are in one, else null.
  StepUndo(const std::vector<RunningSequence*>& rows, DecodeBatch* batch);

  // The rows are as they were. The batch must hold the same rows as before.
  void restore() const;

 private:
  std::vector<ArraysCache*> layers() const;

  std::vector<RunningSequence*> rows_;
  DecodeBatch* batch_;
  RecurrentStates states_;  // shares arrays with the live ones
  std::vector<RowSampler> samplers_;
  std::vector<PagedKVCache::Mark> marks_;  // of the rows' pages, layer after layer
};

struct DecodeStep {
  std::vector<RunningSequence*> rows;
  mlx::core::array tokens;                // int32 [B], sampled
  mlx::core::array logprobs;              // float32 [B]
  std::vector<mlx::core::array> pending;  // what must be evaluated besides: recurrent state
  StepUndo undo;

  void start() const;  // in the background
  void wait() const;
};

// Steps of one model.
class Decoder {
 public:
  // `together`: the model can step through several rows in one forward.
  Decoder(const LanguageModel& model, bool together) : model_(model), together_(together) {}

  // The step after `running`, which is of the same rows and has not ended, or after the rows' records (null). Throws:
  // what building throws; the rows are as they were.
  DecodeStep build(const std::vector<RunningSequence*>& rows, const DecodeStep* running);

  // Ends the batch that holds the row, if one does: its state is its own then.
  void take_out(const RunningSequence* row);
  DecodeBatch& batch() { return batch_; }

 private:
  mlx::core::array forward(const std::vector<RunningSequence*>& rows, const mlx::core::array& tokens);

  const LanguageModel& model_;
  bool together_;
  DecodeBatch batch_;
};

// Whether `form`'s model steps through a batch of such caches. Builds a graph, computes nothing.
bool steps_together(const LanguageModel& model, const PromptCache& form);

// What MLX reports by plain exceptions becomes an Error; errors pass.
std::exception_ptr as_error(std::exception_ptr error);

}  // namespace reprise::internal
