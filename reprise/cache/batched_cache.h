// What caches that hold several sequences of different lengths add: rows join, leave and come back out alone.
// Threads, Owns: see layer_cache.h. A call that throws leaves the object exactly as it was.
#pragma once

#include <memory>
#include <vector>

#include "reprise/cache/layer_cache.h"

namespace reprise {

// How the prompts of a batch lie in the columns of the coming updates; each vector is empty (none) or has one number
// per row.
struct BatchPrompt {
  std::vector<int> left_padding = {};   // columns before a row's first real token
  std::vector<int> lengths = {};        // real tokens of the row
  std::vector<int> right_padding = {};  // filler columns after the row's last real token
};

class BatchedCache {
 public:
  virtual ~BatchedCache() = default;

  // Rows, B.
  virtual int batch_size() const = 0;

  // Announces a padded prompt, before its updates. Throws: invalid_argument for counts that do not fit the rows or are
  // negative; failed_precondition for left padding of a filled cache, where the class lays its rows out by it.
  virtual void prepare(const BatchPrompt& prompt) = 0;
  // The prompt is over: rows end together again. Nothing when nothing is pending.
  virtual void finalize() = 0;
  // Between prepare and finalize of a right-padded prompt. Until then positions may count filler.
  virtual bool is_in_padded_prompt() const = 0;
  // N more columns of the prompt were processed; for classes that count them here.
  virtual void advance(int /*N*/) {}

  // Keeps these rows, in this order; duplicates are copies, none makes an empty batch. Throws: invalid_argument for a
  // row that is not there.
  virtual void filter(const std::vector<int>& rows) = 0;
  // Appends the rows of `other`, which stays as it is. Throws: invalid_argument for another class or shapes that
  // differ.
  virtual void extend(const LayerCache& other) = 0;
  // One row as a single cache, its buffers copied out. Throws: invalid_argument for a row that is not there.
  virtual std::unique_ptr<LayerCache> extract(int row) const = 0;
};

// Null when `cache` has no batch operations.
inline BatchedCache* batched(LayerCache& cache) { return dynamic_cast<BatchedCache*>(&cache); }
inline const BatchedCache* batched(const LayerCache& cache) { return dynamic_cast<const BatchedCache*>(&cache); }

// A batch of these caches, one row each, of the batch class that they have; they stay as they are.
// Throws: invalid_argument for no caches, null, different classes or what differs between them; unsupported for a class
// without a batch class.
std::unique_ptr<LayerCache> merge_caches(const std::vector<const LayerCache*>& caches);

}  // namespace reprise
