#include "python/src/cache_object.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/cache/registry.h"

namespace reprise::python {

namespace {

// Of what a state cannot tell, that which does not follow from the numbers in it: sinks and a prompt that is pending.
bool outlives_numbers(const std::string& name) {
  return name == "keep" || name == "lengths" || name == "right_padding";
}

}  // namespace

LayerCache& CacheObject::cache() {
  if (!written_.empty()) commit();
  return *cache_;
}

State CacheObject::field(std::size_t item) const {
  if (!written_.empty()) return draft_.at(item);
  State::List fields = current_fields();
  return fields.at(item);
}

void CacheObject::set_field(std::size_t item, State value) {
  if (written_.empty()) draft_ = current_fields();
  draft_.at(item) = std::move(value);
  if (!is_written(item)) written_.push_back(item);
}

State::List CacheObject::current_fields() const {
  State::List fields = *cache_->state().as_list();
  // A position that the state leaves to be counted from the buffers.
  if (fields.size() < fields_->size()) fields.emplace_back(cache_->position().value_or(0));
  return fields;
}

bool CacheObject::is_written(std::size_t item) const {
  return std::find(written_.begin(), written_.end(), item) != written_.end();
}

void CacheObject::assign(std::unique_ptr<LayerCache> cache) {
  cache_ = std::move(cache);
  written_.clear();
  draft_.clear();
}

void CacheObject::commit() {
  const State::List fields = std::exchange(draft_, {});
  const std::vector<std::size_t> written = std::exchange(written_, {});
  try {
    cache_ = rebuilt(fields, written);
  } catch (const Error& error) {
    std::string names;
    for (const std::size_t item : written) names += (names.empty() ? "" : ", ") + std::string((*fields_)[item]);
    throw Error(ErrorCode::invalid_argument,
                "[" + cache_->class_name() + "] what was written to " + names +
                    " must fit the other fields (the earlier contents are back), but got: " + error.what());
  }
}

std::unique_ptr<LayerCache> CacheObject::rebuilt(State::List fields, const std::vector<std::size_t>& written) const {
  const std::size_t state_size = cache_->state().as_list()->size();
  const State counted = fields.size() > state_size ? fields.back() : State();
  const bool counted_written = std::find(written.begin(), written.end(), state_size) != written.end();
  fields.resize(state_size);
  std::unique_ptr<LayerCache> next = cache_from_state(cache_->class_name(), fields);

  // A model that only wraps the buffers (mx.depends) changes no number.
  const auto is_number = [this](std::size_t item) {
    const std::string_view name = (*fields_)[item];
    return name != "keys" && name != "values";
  };
  ExtraState extra = cache_->extra_state();
  if (std::any_of(written.begin(), written.end(), is_number)) {
    std::erase_if(extra, [](const auto& member) { return !outlives_numbers(member.first); });
  }
  next->set_extra_state(extra);

  if (counted_written) {
    const std::int64_t* position = counted.as_int();
    const int rows = next->length();
    if (!position || *position < 0 || *position > rows) {
      throw Error(ErrorCode::invalid_argument, "[" + cache_->class_name() + "] offset must be between 0 and the " +
                                                   std::to_string(rows) + " rows, but got " +
                                                   (position ? std::to_string(*position) : "no integer"));
    }
    next->trim(rows - static_cast<int>(*position));
  }
  return next;
}

}  // namespace reprise::python
