#include "python/src/cache_object.h"

#include <algorithm>

#include "reprise/base/error.h"
#include "reprise/cache/registry.h"

namespace reprise::python {

namespace {

// Items 0 and 1 of every state are the buffers; a model that only wraps them (mx.depends) changes no number.
constexpr std::size_t kFirstNumber = 2;

}  // namespace

LayerCache& CacheObject::cache() {
  if (!written_.empty()) commit();
  return *cache_;
}

State CacheObject::field(std::size_t item) const {
  if (!written_.empty()) return draft_.at(item);
  return cache_->state().as_list()->at(item);
}

void CacheObject::set_field(std::size_t item, State value) {
  if (written_.empty()) draft_ = *cache_->state().as_list();
  draft_.at(item) = std::move(value);
  if (std::find(written_.begin(), written_.end(), item) == written_.end()) written_.push_back(item);
}

void CacheObject::assign(std::unique_ptr<LayerCache> cache) {
  cache_ = std::move(cache);
  written_.clear();
  draft_.clear();
}

std::unique_ptr<LayerCache> CacheObject::release() {
  cache();
  return std::move(cache_);
}

void CacheObject::commit() {
  const State::List state = std::exchange(draft_, {});
  const std::vector<std::size_t> written = std::exchange(written_, {});
  std::unique_ptr<LayerCache> next;
  try {
    next = cache_from_state(cache_->class_name(), state);
    const bool numbers_too =
        std::any_of(written.begin(), written.end(), [](auto item) { return item >= kFirstNumber; });
    // What a state cannot tell (a pending prompt, sinks) still holds as long as only the buffers are others.
    if (!numbers_too) next->set_extra_state(cache_->extra_state());
  } catch (const Error& error) {
    std::string names;
    for (const std::size_t item : written) names += (names.empty() ? "" : ", ") + std::string((*fields_)[item]);
    throw Error(ErrorCode::invalid_argument,
                "[" + cache_->class_name() + "] what was written to " + names +
                    " must fit the other fields (the earlier contents are back), but got: " + error.what());
  }
  cache_ = std::move(next);
}

}  // namespace reprise::python
