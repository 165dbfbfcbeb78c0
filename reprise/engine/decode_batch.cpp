#include "reprise/engine/decode_batch.h"

#include <algorithm>
#include <utility>

#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/paged_batch.h"

namespace reprise::internal {

namespace mx = mlx::core;

std::unique_ptr<LayerCache> batch_of(const std::vector<LayerCache*>& rows) {
  if (auto* list = dynamic_cast<CacheList*>(rows.front())) {
    CacheList::Children children;
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      std::vector<LayerCache*> column;
      for (LayerCache* row : rows) column.push_back(&dynamic_cast<CacheList&>(*row).child(i));
      children.push_back(batch_of(column));
    }
    return std::make_unique<CacheList>(std::move(children));
  }
  if (dynamic_cast<PagedKVCache*>(rows.front()) != nullptr) {
    std::vector<PagedKVCache*> paged;
    for (LayerCache* row : rows) paged.push_back(&dynamic_cast<PagedKVCache&>(*row));
    return std::make_unique<PagedBatch>(std::move(paged));
  }
  return merge_caches(std::vector<const LayerCache*>(rows.begin(), rows.end()));
}

bool DecodeBatch::holds(const RunningSequence* row) const {
  return std::find(rows_.begin(), rows_.end(), row) != rows_.end();
}

void DecodeBatch::form(const std::vector<RunningSequence*>& rows) {
  PromptCache cache;
  for (std::size_t layer = 0; layer < rows.front()->cache.size(); ++layer) {
    std::vector<LayerCache*> column;
    for (RunningSequence* row : rows) column.push_back(&row->cache[layer]);
    cache.push_back(batch_of(column));
  }
  cache_ = std::move(cache);
  recurrent_ = recurrent_leaves(cache_);
  rows_ = rows;
  for (RunningSequence* row : rows) {
    for (ArraysCache* state : row->recurrent) *state = ArraysCache(state->num_slots());
  }
}

void DecodeBatch::dissolve() {
  if (rows_.empty()) return;
  std::vector<std::vector<std::unique_ptr<LayerCache>>> states(recurrent_.size());
  std::vector<mx::array> arrays;
  for (std::size_t layer = 0; layer < recurrent_.size(); ++layer) {
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      states[layer].push_back(recurrent_[layer]->extract(static_cast<int>(row)));
      states[layer].back()->state().collect_arrays(arrays);
    }
  }
  if (!arrays.empty()) mx::eval(std::move(arrays));
  for (std::size_t layer = 0; layer < recurrent_.size(); ++layer) {
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      *rows_[row]->recurrent[layer] = std::move(dynamic_cast<ArraysCache&>(*states[layer][row]));
    }
  }
  abandon();
}

std::vector<RunningSequence*> DecodeBatch::abandon() {
  recurrent_.clear();
  cache_ = PromptCache();
  return std::exchange(rows_, {});
}

}  // namespace reprise::internal
