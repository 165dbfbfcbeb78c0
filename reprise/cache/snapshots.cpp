#include "reprise/cache/snapshots.h"

#include <algorithm>
#include <utility>

#include "mlx/transforms.h"
#include "reprise/cache/cache_list.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

[[noreturn]] void fail(ErrorCode code, const std::string& function, const std::string& what, const std::string& got) {
  throw Error(code, "[Snapshots::" + function + "] " + what + ", but got " + got);
}

// Where the layers that know it stand; none when none does.
std::optional<int> position_of(const char* function, const PromptCache& cache) {
  std::optional<int> position;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    const std::vector<int> known = cache[layer].positions();
    if (known.empty()) continue;
    if (known.size() > 1) {
      fail(ErrorCode::invalid_argument, function, "one sequence is needed", std::to_string(known.size()) + " rows");
    }
    if (position && *position != known.front()) {
      fail(ErrorCode::failed_precondition, function, "layers must be at one position",
           std::to_string(*position) + " and " + std::to_string(known.front()) + " at layer " + std::to_string(layer));
    }
    position = known.front();
  }
  return position;
}

}  // namespace

Snapshots::Kept Snapshots::kept(const LayerCache& layer, std::vector<const LayerCache*>& forks) {
  Kept out{layer.class_name(), nullptr, {}};
  if (layer.keeps_all_rows()) return out;
  if (const auto* list = dynamic_cast<const CacheList*>(&layer)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) out.children.push_back(kept(list->child(i), forks));
    return out;
  }
  out.fork = layer.fork();
  forks.push_back(out.fork.get());
  return out;
}

Snapshots::Kept Snapshots::Kept::copy() const {
  Kept out{class_name, fork != nullptr ? fork->fork() : nullptr, {}};
  for (const Kept& child : children) out.children.push_back(child.copy());
  return out;
}

bool Snapshots::take(const PromptCache& cache) {
  const std::optional<int> position = position_of("take", cache);
  if (!position) {
    fail(ErrorCode::failed_precondition, "take", "a cache of which a layer knows its position is needed", "none");
  }
  return take(cache, *position);
}

bool Snapshots::take(const PromptCache& cache, int position) {
  if (position < 0 || position_of("take", cache).value_or(position) != position) {
    fail(ErrorCode::invalid_argument, "take", "the position of the cache is needed", std::to_string(position));
  }
  Snapshot snapshot{position, {}, 0};
  std::vector<const LayerCache*> forks;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) snapshot.layers.push_back(kept(cache[layer], forks));
  // Evaluated, a fork holds its own arrays only and not what they were computed from.
  std::vector<mx::array> arrays;
  for (const LayerCache* fork : forks) {
    snapshot.nbytes += fork->nbytes();
    fork->state().collect_arrays(arrays);
  }
  mx::eval(std::move(arrays));

  forget_after(position);
  if (forks.empty() || limits_.max_count == 0 || snapshot.nbytes > limits_.max_bytes) return false;
  if (!snapshots_.empty() && snapshots_.back().position == position) snapshots_.pop_back();
  snapshots_.push_back(std::move(snapshot));
  evict();
  return true;
}

void Snapshots::evict() {
  while (snapshots_.size() > limits_.max_count || nbytes() > limits_.max_bytes) {
    std::size_t victim = 0;
    int smallest_gap = std::numeric_limits<int>::max();
    for (std::size_t i = 1; i + 1 < snapshots_.size(); ++i) {
      const int gap = snapshots_[i + 1].position - snapshots_[i - 1].position;
      if (gap < smallest_gap) {
        smallest_gap = gap;
        victim = i;
      }
    }
    snapshots_.erase(snapshots_.begin() + static_cast<std::ptrdiff_t>(victim));
  }
}

bool Snapshots::fits(const Kept& kept, const LayerCache& live, int position) {
  if (!kept.children.empty()) {
    const auto* list = dynamic_cast<const CacheList*>(&live);
    if (list == nullptr || list->num_children() != kept.children.size()) return false;
    for (std::size_t i = 0; i < kept.children.size(); ++i) {
      if (!fits(kept.children[i], list->child(i), position)) return false;
    }
    return true;
  }
  if (kept.fork != nullptr) {
    // Rows quantised meanwhile are given up for those of then, which the next step quantises anew where that is due.
    return kept.class_name == live.class_name() ||
           (kept.fork->has_quantized_counterpart() && "Quantized" + kept.class_name == live.class_name());
  }
  // Whatever the class is now (rows may have been quantised meanwhile), a trim must lead there.
  const std::optional<int> at = live.position();
  return live.keeps_all_rows() && at && *at >= position && live.max_trim() >= *at - position;
}

bool Snapshots::fits(const Snapshot& snapshot, const PromptCache& cache) {
  if (snapshot.layers.size() != cache.size()) return false;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    if (!fits(snapshot.layers[layer], cache[layer], snapshot.position)) return false;
  }
  return true;
}

std::unique_ptr<LayerCache> Snapshots::replacement(const Kept& kept, const LayerCache& live, int position) {
  if (kept.fork != nullptr) return kept.fork->fork();
  if (kept.children.empty()) {
    std::unique_ptr<LayerCache> trimmed = live.fork();
    trimmed->trim(*live.position() - position);
    return trimmed;
  }
  const auto& list = dynamic_cast<const CacheList&>(live);
  CacheList::Children children;
  for (std::size_t i = 0; i < kept.children.size(); ++i) {
    children.push_back(replacement(kept.children[i], list.child(i), position));
  }
  return std::make_unique<CacheList>(std::move(children));
}

void Snapshots::restore(const Snapshot& snapshot, PromptCache& cache) {
  std::vector<std::unique_ptr<LayerCache>> layers;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    const Kept& kept = snapshot.layers[layer];
    const bool trims_live = kept.fork == nullptr && kept.children.empty();
    layers.push_back(trims_live ? nullptr : replacement(kept, cache[layer], snapshot.position));
  }
  // Nothing below throws.
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    if (layers[layer] != nullptr) {
      cache.replace(layer, std::move(layers[layer]));
    } else {
      cache[layer].trim(*cache[layer].position() - snapshot.position);
    }
  }
}

std::optional<int> Snapshots::rewind(PromptCache& cache, int to) {
  if (to < 0) fail(ErrorCode::invalid_argument, "rewind", "a position of at least 0 is needed", std::to_string(to));
  const std::optional<int> at = position_of("rewind", cache);
  if (at && *at <= to) return at;
  if (at && can_trim_prompt_cache(cache, *at - to)) {
    trim_prompt_cache(cache, *at - to);
    forget_after(to);
    return to;
  }
  for (auto snapshot = snapshots_.rbegin(); snapshot != snapshots_.rend(); ++snapshot) {
    if (snapshot->position > to || !fits(*snapshot, cache)) continue;
    restore(*snapshot, cache);
    const int reached = snapshot->position;
    forget_after(reached);
    return reached;
  }
  return std::nullopt;
}

void Snapshots::forget_after(int position) {
  while (!snapshots_.empty() && snapshots_.back().position > position) snapshots_.pop_back();
}

Snapshots Snapshots::fork() const {
  Snapshots out(limits_);
  for (const Snapshot& snapshot : snapshots_) {
    Snapshot& copy = out.snapshots_.emplace_back(Snapshot{snapshot.position, {}, snapshot.nbytes});
    for (const Kept& kept : snapshot.layers) copy.layers.push_back(kept.copy());
  }
  return out;
}

std::vector<int> Snapshots::positions() const {
  std::vector<int> out;
  for (const Snapshot& snapshot : snapshots_) out.push_back(snapshot.position);
  return out;
}

std::size_t Snapshots::nbytes() const {
  std::size_t total = 0;
  for (const Snapshot& snapshot : snapshots_) total += snapshot.nbytes;
  return total;
}

}  // namespace reprise
