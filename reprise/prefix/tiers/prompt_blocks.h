// A prompt cache cut into what the prefix tree keeps, and put together again: blocks of pages of every attention layer,
// and checkpoints of recurrent state. Also as tensors, for files.
// Threads: values; everything is evaluated before it is cut.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reprise/cache/paged_kv_cache.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/prefix/prefix_tree.h"
#include "reprise/prefix/tiers/tensor_file.h"

namespace reprise {

// Whether rebuilding needs a checkpoint: some layer, or child of a CacheList, is not a PagedKVCache.
bool needs_checkpoint(const PromptCache& cache);

// Pages of every attention layer, in order (children of CacheLists too), for tokens [begin, end).
struct PromptBlock final : Stored {
  int begin = 0;
  int end = 0;
  std::vector<PageSpan> layers;
  std::size_t nbytes() const override;
};

// Forks of every other layer after `position` tokens.
struct PromptCheckpoint final : Stored {
  int position = 0;
  std::vector<std::shared_ptr<const LayerCache>> layers;
  std::size_t nbytes() const override;
};

// Requires: evaluated. Throws: invalid_argument when a layer lacks the rows.
std::shared_ptr<const PromptBlock> cut_block(const PromptCache& cache, int begin, int end);
// Its rows up to `end`, which lies within it: shares the pages.
std::shared_ptr<const PromptBlock> cut_block(const PromptBlock& block, int end);
// Null when nothing needs one.
std::shared_ptr<const PromptCheckpoint> take_checkpoint(const PromptCache& cache, int position);

// `form` is an empty prompt cache of the model (make_paged_prompt_cache). `blocks` cover [0, length).
// Throws: corrupt_data, naming the layer, for contents that do not fit the form, each other or `length` [X5].
PromptCache rebuild_prompt_cache(const PromptCache& form, const std::vector<PrefixTree::Block>& blocks, int length,
                                 const StoredRef& checkpoint);

// Evaluated arrays; may be called on any thread.
TensorFile to_tensors(const Stored& block_or_checkpoint);
// Throws: corrupt_data for tensors or metadata that do not fit; all pages come from `pool`.
std::shared_ptr<const PromptBlock> block_from_tensors(const TensorFile& file, const std::shared_ptr<PagePool>& pool);
// Bytes of the pages that block_from_tensors would take. Throws: as that.
std::size_t pages_nbytes(const TensorFile& block);
std::shared_ptr<const PromptCheckpoint> checkpoint_from_tensors(const TensorFile& file);

}  // namespace reprise
