#include "reprise/cache/prompt_cache.h"

#include <algorithm>
#include <utility>

#include "mlx/transforms.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/kv_cache.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

void check_not_negative(const char* function, int n, const char* name = "n") {
  if (n < 0) {
    throw Error(ErrorCode::invalid_argument,
                std::string("[") + function + "] " + name + " must not be negative, but got " + std::to_string(n));
  }
}

std::string layer_name(const PromptCache& cache, std::size_t layer) {
  return "layer " + std::to_string(layer) + " (" + cache[layer].class_name() + ")";
}

void check_same_layers(const char* function, const PromptCache& a, const PromptCache& b) {
  if (a.size() != b.size()) {
    throw Error(ErrorCode::invalid_argument, std::string("[") + function + "] caches must have " +
                                                 std::to_string(a.size()) + " layers, but got " +
                                                 std::to_string(b.size()));
  }
  for (std::size_t layer = 0; layer < a.size(); ++layer) {
    if (a[layer].class_name() == b[layer].class_name()) continue;
    throw Error(ErrorCode::invalid_argument, std::string("[") + function + "] " + layer_name(a, layer) +
                                                 " must be of one class, but got " + b[layer].class_name());
  }
}

const BatchedCache& batched_layer(const char* function, const PromptCache& cache, std::size_t layer) {
  if (const BatchedCache* batch = batched(cache[layer])) return *batch;
  throw Error(ErrorCode::unsupported, std::string("[") + function + "] layer " + std::to_string(layer) +
                                          " must have batch operations, but got " + cache[layer].class_name());
}

// Calls `call`; an error it throws says at which layer.
template <typename Call>
auto at_layer(const char* function, const PromptCache& cache, std::size_t layer, const Call& call) {
  const std::string name = layer_name(cache, layer);
  try {
    return call();
  } catch (const Error& error) {
    throw Error(error.code(), std::string("[") + function + "] " + name + ": " + error.what());
  }
}

// Calls `change` with each layer and its index: all of them are changed or none is.
template <typename Change>
void change_all(const char* function, PromptCache& cache, const Change& change) {
  PromptCache before = cache.fork();
  try {
    for (std::size_t layer = 0; layer < cache.size(); ++layer) {
      at_layer(function, cache, layer, [&] { change(cache[layer], layer); });
    }
  } catch (...) {
    cache = std::move(before);
    throw;
  }
}

// As change_all, for batch operations.
template <typename Change>
void change_batches(const char* function, PromptCache& cache, const Change& change) {
  for (std::size_t layer = 0; layer < cache.size(); ++layer) batched_layer(function, cache, layer);
  change_all(function, cache, [&](LayerCache& of, std::size_t layer) { change(*batched(of), layer); });
}

std::string positions_text(const std::vector<int>& positions) {
  std::string text;
  for (const int position : positions) text += (text.empty() ? "" : ", ") + std::to_string(position);
  return positions.size() == 1 ? text : "(" + text + ")";
}

// The caches of a prompt cache one after another, children of CacheLists in place of the lists.
class PositionCheck {
 public:
  explicit PositionCheck(std::optional<int> expected) : expected_(expected) {}

  void visit(const LayerCache& cache, const std::string& name) {
    if (const auto* list = dynamic_cast<const CacheList*>(&cache)) {
      for (std::size_t i = 0; i < list->num_children(); ++i) {
        visit(list->child(i), name + ", child " + std::to_string(i) + " (" + list->child(i).class_name() + ")");
      }
      return;
    }
    try {
      cache.check();
    } catch (const Error& error) {
      throw Error(ErrorCode::failed_precondition, "[check_prompt_cache] " + name + ": " + error.what());
    }
    // Some classes move the filler of a padded prompt as it goes, others at its end.
    if (const BatchedCache* batch = batched(cache); batch && batch->is_in_padded_prompt()) return;
    const std::vector<int> positions = cache.positions();
    if (positions.empty()) return;
    const auto differs = [&](int position) { return position != *expected_; };
    if (expected_ && std::any_of(positions.begin(), positions.end(), differs)) {
      fail(name, std::to_string(*expected_), positions);
    }
    if (first_name_.empty()) {
      first_name_ = name;
      first_ = positions;
    } else if (positions != first_) {
      fail(name, positions_text(first_) + " as " + first_name_, positions);
    }
  }

 private:
  [[noreturn]] static void fail(const std::string& name, const std::string& wanted, const std::vector<int>& got) {
    throw Error(ErrorCode::failed_precondition,
                "[check_prompt_cache] " + name + " must be at position " + wanted + ", but got " + positions_text(got));
  }

  std::optional<int> expected_;
  std::string first_name_;
  std::vector<int> first_;  // the positions that the others must have
};

}  // namespace

void PromptCache::push_back(std::unique_ptr<LayerCache> layer) {
  if (layer == nullptr)
    throw Error(ErrorCode::invalid_argument, "[PromptCache::push_back] a cache is needed, but got null");
  layers_.push_back(std::move(layer));
}

void PromptCache::replace(std::size_t layer, std::unique_ptr<LayerCache> cache) {
  if (cache == nullptr || layer >= layers_.size()) {
    throw Error(ErrorCode::invalid_argument, "[PromptCache::replace] a cache and one of " +
                                                 std::to_string(layers_.size()) + " layers are needed, but got layer " +
                                                 std::to_string(layer) + (cache == nullptr ? " and null" : ""));
  }
  layers_[layer] = std::move(cache);
}

PromptCache PromptCache::fork() const {
  std::vector<std::unique_ptr<LayerCache>> layers;
  layers.reserve(layers_.size());
  for (const auto& layer : layers_) layers.push_back(layer->fork());
  return PromptCache(std::move(layers));
}

void PromptCache::eval() const {
  std::vector<mx::array> arrays;
  for (const auto& layer : layers_) layer->collect_arrays(arrays);
  mx::eval(std::move(arrays));
}

void PromptCache::fail_at(std::size_t layer) const {
  if (layer >= layers_.size()) {
    throw Error(ErrorCode::invalid_argument, "[PromptCache::at] the cache must have a layer " + std::to_string(layer) +
                                                 ", but got " + std::to_string(layers_.size()) + " layers");
  }
  throw Error(ErrorCode::invalid_argument, "[PromptCache::at] layer " + std::to_string(layer) +
                                               " must be of the class that the model needs, but got " +
                                               layers_[layer]->class_name());
}

PromptCache make_kv_prompt_cache(int num_layers) {
  if (num_layers < 0) {
    throw Error(ErrorCode::invalid_argument,
                "[make_kv_prompt_cache] num_layers must not be negative, but got " + std::to_string(num_layers));
  }
  PromptCache cache;
  for (int layer = 0; layer < num_layers; ++layer) cache.push_back(std::make_unique<KVCache>());
  return cache;
}

PromptCache fork_prompt_cache(const PromptCache& cache) { return cache.fork(); }

bool can_trim_prompt_cache(const PromptCache& cache) {
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    if (!cache[layer].is_trimmable()) return false;
  }
  return true;
}

bool keeps_all_rows(const PromptCache& cache) {
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    if (!cache[layer].keeps_all_rows()) return false;
  }
  return true;
}

bool can_trim_prompt_cache(const PromptCache& cache, int n) {
  check_not_negative("can_trim_prompt_cache", n);
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    if (!cache[layer].is_trimmable() || cache[layer].max_trim() < n) return false;
  }
  return true;
}

int trim_prompt_cache(PromptCache& cache, int n) {
  check_not_negative("trim_prompt_cache", n);
  if (cache.size() == 0 || !can_trim_prompt_cache(cache)) return 0;
  int common = n;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) common = std::min(common, cache[layer].max_trim());
  if (common == 0) return 0;

  change_all("trim_prompt_cache", cache, [&](LayerCache& layer, std::size_t) {
    if (const int trimmed = layer.trim(common); trimmed != common) {
      throw Error(ErrorCode::internal,
                  "it must trim " + std::to_string(common) + " tokens, but got " + std::to_string(trimmed));
    }
  });
  return common;
}

int cache_length(const PromptCache& cache) {
  int length = 0;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) length = std::max(length, cache[layer].length());
  return length;
}

std::size_t prompt_cache_nbytes(const PromptCache& cache) {
  std::size_t bytes = 0;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) bytes += cache[layer].nbytes();
  return bytes;
}

PromptCache merge_prompt_caches(const std::vector<const PromptCache*>& caches) {
  if (caches.empty())
    throw Error(ErrorCode::invalid_argument, "[merge_prompt_caches] at least one cache is needed, but got none");
  for (const PromptCache* cache : caches) {
    if (!cache) throw Error(ErrorCode::invalid_argument, "[merge_prompt_caches] caches are needed, but got null");
    check_same_layers("merge_prompt_caches", *caches.front(), *cache);
  }
  PromptCache merged;
  for (std::size_t layer = 0; layer < caches.front()->size(); ++layer) {
    std::vector<const LayerCache*> column;
    for (const PromptCache* cache : caches) column.push_back(&(*cache)[layer]);
    merged.push_back(at_layer("merge_prompt_caches", *caches.front(), layer, [&] { return merge_caches(column); }));
  }
  return merged;
}

PromptCache extract_prompt_cache(const PromptCache& cache, int row) {
  PromptCache single;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    const BatchedCache& batch = batched_layer("extract_prompt_cache", cache, layer);
    single.push_back(at_layer("extract_prompt_cache", cache, layer, [&] { return batch.extract(row); }));
  }
  return single;
}

void extend_prompt_cache(PromptCache& cache, const PromptCache& other) {
  if (other.size() == 0) return;
  if (cache.size() == 0) {
    cache = other.fork();
    return;
  }
  check_same_layers("extend_prompt_cache", cache, other);
  const PromptCache more = other.fork();  // `other` may be `cache`
  change_batches("extend_prompt_cache", cache,
                 [&](BatchedCache& batch, std::size_t layer) { batch.extend(more[layer]); });
}

void filter_prompt_cache(PromptCache& cache, const std::vector<int>& rows) {
  change_batches("filter_prompt_cache", cache, [&](BatchedCache& batch, std::size_t) { batch.filter(rows); });
}

void prepare_prompt_cache(PromptCache& cache, const BatchPrompt& prompt) {
  change_batches("prepare_prompt_cache", cache, [&](BatchedCache& batch, std::size_t) { batch.prepare(prompt); });
}

void finalize_prompt_cache(PromptCache& cache) {
  change_batches("finalize_prompt_cache", cache, [](BatchedCache& batch, std::size_t) { batch.finalize(); });
}

void advance_prompt_cache(PromptCache& cache, int N) {
  check_not_negative("advance_prompt_cache", N, "N");
  change_all("advance_prompt_cache", cache, [&](LayerCache& layer, std::size_t) {
    if (BatchedCache* batch = batched(layer)) batch->advance(N);
  });
}

void check_prompt_cache(const PromptCache& cache, std::optional<int> expected) {
  PositionCheck check(expected);
  for (std::size_t layer = 0; layer < cache.size(); ++layer) check.visit(cache[layer], layer_name(cache, layer));
}

}  // namespace reprise
