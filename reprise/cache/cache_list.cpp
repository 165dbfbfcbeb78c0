#include "reprise/cache/cache_list.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

namespace {

[[noreturn]] void fail(ErrorCode code, const std::string& function, const std::string& what, const std::string& got) {
  throw Error(code, "[CacheList::" + function + "] " + what + ", but got " + got);
}

// Calls `call`; an error it throws says at which child.
template <typename Call>
auto at_child(const char* function, std::size_t index, const std::string& class_name, const Call& call) {
  try {
    return call();
  } catch (const Error& error) {
    throw Error(error.code(), std::string("[CacheList::") + function + "] child " + std::to_string(index) + " (" +
                                  class_name + "): " + error.what());
  }
}

const CacheList& cache_list(const char* function, const LayerCache* cache, std::optional<std::size_t> children = {}) {
  const auto* list = dynamic_cast<const CacheList*>(cache);
  if (!list) fail(ErrorCode::invalid_argument, function, "a CacheList is needed", cache ? cache->class_name() : "null");
  if (children && list->num_children() != *children) {
    fail(ErrorCode::invalid_argument, function, "lists must have " + std::to_string(*children) + " children",
         std::to_string(list->num_children()));
  }
  return *list;
}

std::optional<int> known_rows(const LayerCache& cache) {
  if (const auto* arrays = dynamic_cast<const ArraysCache*>(&cache)) return arrays->rows();
  if (const auto* list = dynamic_cast<const CacheList*>(&cache)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      if (const auto rows = known_rows(list->child(i))) return rows;
    }
    return std::nullopt;
  }
  const BatchedCache* batch = batched(cache);
  return batch ? std::optional(batch->batch_size()) : std::nullopt;
}

}  // namespace

CacheList::CacheList(Children children) : children_(std::move(children)) {
  for (const auto& child : children_) {
    if (!child) fail(ErrorCode::invalid_argument, "CacheList", "caches are needed", "null");
  }
}

std::unique_ptr<CacheList> CacheList::from_state(const State& state) {
  const auto* items = state.as_list();
  if (!items) fail(ErrorCode::corrupt_data, "from_state", "the state must be a list", internal::describe(state));
  Children children;
  for (const State& item : *items) {
    const std::size_t index = children.size();
    const auto* pair = item.as_list();
    const auto* class_name = pair && pair->size() == 2 ? (*pair)[1].as_string() : nullptr;
    if (!class_name) {
      fail(ErrorCode::corrupt_data, "from_state",
           "child " + std::to_string(index) + " must be a state and a class name", internal::describe(item));
    }
    children.push_back(
        at_child("from_state", index, *class_name, [&] { return cache_from_state(*class_name, (*pair)[0]); }));
  }
  return std::make_unique<CacheList>(std::move(children));
}

std::unique_ptr<CacheList> CacheList::from_legacy(const State& state, const Meta& meta) {
  const auto* parts = meta.as_list();
  if (!parts) {
    fail(ErrorCode::unsupported, "from_legacy",
         "the meta must be the children's class names and metas (the oldest files lost the class names)",
         "\"" + *meta.as_string() + "\"");
  }
  // A list without items leaves no trace in a file and reads as "".
  const auto list_at = [&](std::size_t part) {
    const auto* list = part < parts->size() ? (*parts)[part].as_list() : nullptr;
    return list ? *list : Meta::List{};
  };
  const Meta::List names = list_at(0);
  const Meta::List metas = list_at(1);
  const auto* states = state.as_list();
  if (!states || parts->size() > 2 || states->size() > names.size() || metas.size() > names.size()) {
    fail(ErrorCode::corrupt_data, "from_legacy", "states and metas must be those of the children",
         internal::describe(state) + " for " + std::to_string(names.size()) + " class names and " +
             std::to_string(metas.size()) + " metas");
  }
  Children children;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto* name = names[i].as_string();
    if (!name) fail(ErrorCode::corrupt_data, "from_legacy", "class names must be text", "a list");
    const State child_state = i < states->size() ? (*states)[i] : State(State::List{});
    const Meta child_meta = i < metas.size() ? metas[i] : Meta();
    children.push_back(
        at_child("from_legacy", i, *name, [&] { return cache_from_legacy(*name, child_state, child_meta); }));
  }
  return std::make_unique<CacheList>(std::move(children));
}

std::unique_ptr<LayerCache> CacheList::merge_rows(const std::vector<const LayerCache*>& caches) {
  if (caches.empty()) fail(ErrorCode::invalid_argument, "merge", "at least one list is needed", "none");
  const CacheList& first = cache_list("merge", caches.front());
  for (const LayerCache* cache : caches) cache_list("merge", cache, first.num_children());
  Children merged;
  for (std::size_t i = 0; i < first.num_children(); ++i) {
    std::vector<const LayerCache*> column;
    for (const LayerCache* cache : caches) column.push_back(&cache_list("merge", cache).child(i));
    merged.push_back(at_child("merge", i, first.child(i).class_name(), [&] { return merge_caches(column); }));
  }
  return std::make_unique<CacheList>(std::move(merged));
}

LayerCache& CacheList::child(std::size_t index) {
  return const_cast<LayerCache&>(static_cast<const CacheList*>(this)->child(index));
}

const LayerCache& CacheList::child(std::size_t index) const {
  if (index < children_.size()) return *children_[index];
  fail(ErrorCode::invalid_argument, "child", "the child must be one of " + std::to_string(children_.size()),
       std::to_string(index));
}

void CacheList::replace(std::size_t index, std::unique_ptr<LayerCache> cache) {
  if (!cache || index >= children_.size()) {
    fail(ErrorCode::invalid_argument, "replace",
         "a cache and one of " + std::to_string(children_.size()) + " children are needed",
         "child " + std::to_string(index) + (cache ? "" : " and null"));
  }
  children_[index] = std::move(cache);
}

void CacheList::fail_class(std::size_t index) const {
  fail(ErrorCode::invalid_argument, "at",
       "child " + std::to_string(index) + " must be of the class that the model needs", child(index).class_name());
}

std::optional<int> CacheList::position() const {
  for (const auto& child : children_) {
    if (const auto position = child->position()) return position;
  }
  return std::nullopt;
}

std::vector<int> CacheList::positions() const {
  for (const auto& child : children_) {
    if (auto positions = child->positions(); !positions.empty()) return positions;
  }
  return {};
}

int CacheList::length() const {
  int longest = 0;
  for (const auto& child : children_) longest = std::max(longest, child->length());
  return longest;
}

int CacheList::size() const {
  int largest = 0;
  for (const auto& child : children_) largest = std::max(largest, child->size());
  return largest;
}

std::size_t CacheList::nbytes() const {
  std::size_t bytes = 0;
  for (const auto& child : children_) bytes += child->nbytes();
  return bytes;
}

bool CacheList::is_trimmable() const {
  return std::all_of(children_.begin(), children_.end(), [](const auto& child) { return child->is_trimmable(); });
}

int CacheList::max_trim() const {
  if (children_.empty() || !is_trimmable()) return 0;
  int common = children_.front()->max_trim();
  for (const auto& child : children_) common = std::min(common, child->max_trim());
  return common;
}

int CacheList::trim(int n) {
  if (n < 0) fail(ErrorCode::invalid_argument, "trim", "n must not be negative", std::to_string(n));
  if (children_.empty() || !is_trimmable()) return 0;
  // What a child can give up is told by a fork of it.
  int common = n;
  for (const auto& fork : forks()) common = std::min(common, fork->trim(n));
  if (common == 0) return 0;
  change_all("trim", [&](LayerCache& child, std::size_t) {
    if (const int trimmed = child.trim(common); trimmed != common) {
      fail(ErrorCode::internal, "trim", "each child must trim " + std::to_string(common) + " tokens",
           std::to_string(trimmed));
    }
  });
  return common;
}

bool CacheList::keeps_all_rows() const {
  return std::all_of(children_.begin(), children_.end(), [](const auto& child) { return child->keeps_all_rows(); });
}

State CacheList::state() const {
  State::List items;
  for (const auto& child : children_) items.push_back(State::List{child->state(), State(child->class_name())});
  return items;
}

State CacheList::saved_state() const {
  State::List items;
  for (const auto& child : children_) items.push_back(State::List{child->saved_state(), State(child->class_name())});
  return items;
}

State CacheList::legacy_state() const {
  State::List items;
  for (const auto& child : children_) items.push_back(child->legacy_state());
  return items;
}

Meta CacheList::legacy_meta() const {
  Meta::List names;
  Meta::List metas;
  for (const auto& child : children_) {
    names.push_back(Meta(child->class_name()));
    metas.push_back(child->legacy_meta());
  }
  return Meta::List{Meta(std::move(names)), Meta(std::move(metas))};
}

ExtraState CacheList::extra_state() const {
  ExtraState all;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    for (auto& [name, value] : children_[i]->extra_state()) all.emplace(std::to_string(i) + "." + name, value);
  }
  return all;
}

void CacheList::set_extra_state(const ExtraState& extra) {
  std::vector<ExtraState> parts(children_.size());
  for (const auto& [name, value] : extra) {
    std::size_t index = 0;
    const char* end = name.data() + name.size();
    const auto [dot, error] = std::from_chars(name.data(), end, index);
    if (error != std::errc() || dot == end || *dot != '.' || index >= parts.size()) {
      fail(ErrorCode::corrupt_data, "set_extra_state",
           "members must be named by one of " + std::to_string(parts.size()) + " children and a dot",
           "\"" + name + "\"");
    }
    parts[index].emplace(std::string(dot + 1, end), value);
  }
  change_all("set_extra_state", [&](LayerCache& child, std::size_t i) { child.set_extra_state(parts[i]); });
}

void CacheList::collect_arrays(std::vector<mlx::core::array>& out) const {
  for (const auto& child : children_) child->collect_arrays(out);
}

void CacheList::check() const {
  for (std::size_t i = 0; i < children_.size(); ++i) {
    at_child("check", i, children_[i]->class_name(), [&] { children_[i]->check(); });
  }
}

CacheList::Children CacheList::forks() const {
  Children copies;
  copies.reserve(children_.size());
  for (const auto& child : children_) copies.push_back(child->fork());
  return copies;
}

void CacheList::change_all(const char* function, const std::function<void(LayerCache&, std::size_t)>& change) {
  Children before = forks();
  try {
    for (std::size_t i = 0; i < children_.size(); ++i) {
      at_child(function, i, children_[i]->class_name(), [&] { change(*children_[i], i); });
    }
  } catch (...) {
    children_ = std::move(before);
    throw;
  }
}

void CacheList::change_batches(const char* function, const std::function<void(BatchedCache&, std::size_t)>& change) {
  for (std::size_t i = 0; i < children_.size(); ++i) {
    if (batched(*children_[i])) continue;
    fail(ErrorCode::unsupported, function, "child " + std::to_string(i) + " must have batch operations",
         children_[i]->class_name());
  }
  change_all(function, [&](LayerCache& child, std::size_t i) { change(*batched(child), i); });
}

int CacheList::batch_size() const { return known_rows(*this).value_or(1); }

bool CacheList::is_in_padded_prompt() const {
  return std::any_of(children_.begin(), children_.end(), [](const auto& child) {
    const BatchedCache* batch = batched(std::as_const(*child));
    return batch && batch->is_in_padded_prompt();
  });
}

void CacheList::prepare(const BatchPrompt& prompt) {
  change_batches("prepare", [&](BatchedCache& child, std::size_t) { child.prepare(prompt); });
}

void CacheList::finalize() {
  change_batches("finalize", [](BatchedCache& child, std::size_t) { child.finalize(); });
}

void CacheList::advance(int N) {
  change_all("advance", [&](LayerCache& child, std::size_t) {
    if (BatchedCache* batch = batched(child)) batch->advance(N);
  });
}

void CacheList::filter(const std::vector<int>& rows) {
  change_batches("filter", [&](BatchedCache& child, std::size_t) { child.filter(rows); });
}

void CacheList::extend(const LayerCache& other) {
  const CacheList& more = cache_list("extend", &other, num_children());
  change_batches("extend", [&](BatchedCache& child, std::size_t i) { child.extend(more.child(i)); });
}

std::unique_ptr<LayerCache> CacheList::extract(int row) const {
  Children rows;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const BatchedCache* batch = batched(static_cast<const LayerCache&>(*children_[i]));
    if (!batch) {
      fail(ErrorCode::unsupported, "extract", "child " + std::to_string(i) + " must have batch operations",
           children_[i]->class_name());
    }
    rows.push_back(at_child("extract", i, children_[i]->class_name(), [&] { return batch->extract(row); }));
  }
  return std::make_unique<CacheList>(std::move(rows));
}

}  // namespace reprise
