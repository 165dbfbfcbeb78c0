// The prompt cache through which several sequences take a step together: a PagedBatch over their pages in each
// attention layer, one ArraysCache of all rows in each recurrent layer, whose state it holds until the rows change.
// Private to `engine`. Threads: see ModelRunner.
#pragma once

#include <vector>

#include "mlx/array.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/engine/running_sequence.h"

namespace reprise::internal {

// A recurrent layer's state for each row or each batch; copies share arrays.
using RecurrentStates = std::vector<ArraysCache>;

class DecodeBatch {
 public:
  bool holds(const RunningSequence* row) const;
  bool is_of(const std::vector<RunningSequence*>& rows) const { return !rows.empty() && rows == rows_; }

  // Takes the state of `rows` over. Requires: it holds nothing. Throws: what merging throws; the rows are as before.
  void form(const std::vector<RunningSequence*>& rows);
  // Gives the rows their state back, evaluated, and holds nothing. Throws: what MLX throws; it is then as before.
  void dissolve();
  // Holds nothing any more, without giving anything back. Returns: the rows that have lost their state.
  std::vector<RunningSequence*> abandon();

  PromptCache& cache() { return cache_; }
  std::vector<ArraysCache*>& recurrent() { return recurrent_; }

 private:
  std::vector<RunningSequence*> rows_;
  PromptCache cache_;
  std::vector<ArraysCache*> recurrent_;
};

// One layer, or child of a CacheList, of all rows as one.
std::unique_ptr<LayerCache> batch_of(const std::vector<LayerCache*>& rows);

}  // namespace reprise::internal
