#include "reprise/cache/arrays_cache.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <utility>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"
#include "reprise/base/error.h"
#include "reprise/cache/row_numbers.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

using Slot = std::optional<mx::array>;
using Counts = std::optional<std::vector<int>>;

// In `lengths`: the row has none.
constexpr int kNoLimit = std::numeric_limits<int>::max();
constexpr int kMaxUnevaluatedSets = 64;

[[noreturn]] void fail(const std::string& function, const std::string& what, const std::string& got) {
  throw Error(ErrorCode::invalid_argument, "[ArraysCache::" + function + "] " + what + ", but got " + got);
}

std::string describe_array(const mx::array& array) {
  std::ostringstream text;
  text << "a " << array.dtype() << " array of shape " << array.shape();
  return text.str();
}

mx::array column(const std::vector<int>& values) {
  return mx::reshape(internal::int_array(values), {static_cast<mx::ShapeElem>(values.size()), 1});
}

void check_counts(const char* function, const char* name, const std::vector<int>& counts) {
  for (const int count : counts) {
    if (count < 0) fail(function, std::string(name) + " must not be negative", std::to_string(count));
  }
}

mx::array rows_of(const mx::array& slot, int begin, int end) {
  mx::Shape start(slot.ndim(), 0);
  mx::Shape stop = slot.shape();
  start[0] = begin;
  stop[0] = end;
  return mx::contiguous(mx::slice(slot, std::move(start), std::move(stop)));
}

mx::array zero_rows(const mx::array& like, int rows) {
  mx::Shape shape = like.shape();
  shape[0] = rows;
  return mx::zeros(std::move(shape), like.dtype());
}

// One below the other, zeros for parts that are not set. `rows`: of each part.
Slot concatenated(const char* function, int slot, const std::vector<Slot>& parts, const std::vector<int>& rows) {
  const auto first = std::find_if(parts.begin(), parts.end(), [](const Slot& part) { return part.has_value(); });
  if (first == parts.end()) return std::nullopt;
  std::vector<mx::array> arrays;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    arrays.push_back(parts[i] ? *parts[i] : zero_rows(**first, rows[i]));
    const mx::array& array = arrays.back();
    const bool alike = array.dtype() == (*first)->dtype() && array.ndim() == (*first)->ndim() &&
                       std::equal(array.shape().begin() + 1, array.shape().end(), (*first)->shape().begin() + 1);
    if (!alike) {
      fail(function, "slot " + std::to_string(slot) + " must have one dtype and one shape but for the rows",
           describe_array(**first) + " and " + describe_array(array));
    }
  }
  return mx::concatenate(std::move(arrays), 0);
}

Counts joined(const Counts& a, int a_rows, const Counts& b, int b_rows, int unset) {
  if (!a && !b) return std::nullopt;
  std::vector<int> all = a ? *a : std::vector<int>(static_cast<std::size_t>(a_rows), unset);
  if (b) all.insert(all.end(), b->begin(), b->end());
  if (!b) all.insert(all.end(), static_cast<std::size_t>(b_rows), unset);
  return all;
}

Counts selected(const Counts& counts, const std::vector<int>& rows) {
  if (!counts) return std::nullopt;
  return internal::chosen_rows(*counts, rows);
}

int minus(int count, int columns) {
  return static_cast<int>(std::max<std::int64_t>(std::int64_t{count} - columns, std::numeric_limits<int>::min()));
}

// `slots`: none for any number of them.
const ArraysCache& arrays_cache(const char* function, const LayerCache* cache, std::optional<int> slots = {}) {
  const auto* arrays = dynamic_cast<const ArraysCache*>(cache);
  if (!arrays) fail(function, "an ArraysCache is needed", cache ? cache->class_name() : "null");
  if (slots && arrays->num_slots() != *slots) {
    fail(function, "caches must have " + std::to_string(*slots) + " slots", std::to_string(arrays->num_slots()));
  }
  return *arrays;
}

// What an empty list is in a file's slots, where no tensor was: the older layout has no null.
enum class Hole { damage, unset };

// The slots of a file, which agree in their rows: null is unset.
std::vector<Slot> read_slots(const std::string& function, const State& state, Hole hole) {
  const auto fail_state = [&](const std::string& what, const State& got) {
    throw Error(ErrorCode::corrupt_data, "[" + function + "] " + what + ", but got " + internal::describe(got));
  };
  const auto* items = state.as_list();
  if (!items) fail_state("the slots must be a list", state);
  std::vector<Slot> slots;
  std::optional<int> rows;
  for (const State& item : *items) {
    const std::string name = "slot " + std::to_string(slots.size());
    const auto* array = item.as_array();
    if (item.is_null() || (hole == Hole::unset && item.as_list() && item.as_list()->empty())) {
      slots.emplace_back();
      continue;
    }
    if (!array || array->ndim() == 0) fail_state(name + " must be null or an array of one axis or more", item);
    if (rows && array->shape(0) != *rows) fail_state(name + " must have " + std::to_string(*rows) + " rows", item);
    rows = array->shape(0);
    slots.emplace_back(*array);
  }
  return slots;
}

}  // namespace

ArraysCache::ArraysCache(int size, std::vector<int> left_padding) {
  if (size < 0) fail("ArraysCache", "the number of slots must not be negative", std::to_string(size));
  check_counts("ArraysCache", "left padding", left_padding);
  slots_.resize(static_cast<std::size_t>(size));
  unevaluated_sets_.resize(slots_.size());
  if (!left_padding.empty()) left_padding_ = std::move(left_padding);
}

std::unique_ptr<ArraysCache> ArraysCache::with_slots(std::vector<Slot> slots) {
  auto cache = std::make_unique<ArraysCache>(static_cast<int>(slots.size()));
  cache->slots_ = std::move(slots);
  return cache;
}

std::unique_ptr<ArraysCache> ArraysCache::from_state(const State& state) {
  const std::string function = "ArraysCache::from_state";
  const internal::StateReader reader(function, state, {"slots", "left_padding", "lengths"});
  auto cache = with_slots(read_slots(function, reader.item(0), Hole::damage));
  if (!reader.is_null(1)) cache->left_padding_ = reader.integers(1, cache->rows());
  if (!reader.is_null(2)) cache->lengths_ = reader.integers(2, cache->rows());
  return cache;
}

std::unique_ptr<ArraysCache> ArraysCache::from_legacy(const State& state, const Meta& meta) {
  const internal::MetaReader no_items("ArraysCache::from_legacy", meta, {});
  return with_slots(read_slots("ArraysCache::from_legacy", state, Hole::unset));
}

std::unique_ptr<LayerCache> ArraysCache::merge_rows(const std::vector<const LayerCache*>& caches) {
  if (caches.empty()) fail("merge", "at least one cache is needed", "none");
  const int slots = arrays_cache("merge", caches.front()).num_slots();
  auto merged = std::make_unique<ArraysCache>(slots);
  for (const LayerCache* cache : caches) {
    if (const int rows = arrays_cache("merge", cache, slots).batch_size(); rows != 1) {
      fail("merge", "each cache must be one row", std::to_string(rows) + " rows");
    }
  }
  bool any_set = false;
  for (int slot = 0; slot < slots; ++slot) {
    std::vector<Slot> parts;
    for (const LayerCache* cache : caches) parts.push_back(arrays_cache("merge", cache, slots).get(slot));
    Slot& whole = merged->slots_[static_cast<std::size_t>(slot)];
    whole = concatenated("merge", slot, parts, std::vector<int>(parts.size(), 1));
    any_set = any_set || whole;
  }
  if (!any_set) merged->left_padding_ = std::vector<int>(caches.size(), 0);
  return merged;
}

void ArraysCache::check_slot(const char* function, int slot) const {
  if (slot >= 0 && slot < num_slots()) return;
  fail(function, "the slot must be one of " + std::to_string(num_slots()), std::to_string(slot));
}

Slot ArraysCache::get(int slot) const {
  check_slot("get", slot);
  return slots_[static_cast<std::size_t>(slot)];
}

void ArraysCache::set(int slot, const Slot& value) {
  check_slot("set", slot);
  const auto index = static_cast<std::size_t>(slot);
  Slot next;
  if (value) {
    if (value->ndim() == 0) fail("set", "an array [B, …] is needed", describe_array(*value));
    Slot earlier = std::exchange(slots_[index], std::nullopt);
    const std::optional<int> others = rows();
    slots_[index] = std::move(earlier);
    if (others && value->shape(0) != *others) {
      fail("set", "the array must have " + std::to_string(*others) + " rows", describe_array(*value));
    }
    next = mx::contiguous(*value);
  }

  const Slot& last = slots_[index];
  int& count = unevaluated_sets_[index];
  count = last && last->status() == mx::array::Status::unscheduled ? count + 1 : 0;
  if (count > kMaxUnevaluatedSets) {
    mx::eval(*last);
    count = 0;
  }
  slots_[index] = std::move(next);
  if (value) rows_.reset();
}

Mask ArraysCache::make_mask(int N) const {
  if (N < 1) fail("make_mask", "N must be at least 1", std::to_string(N));
  if (!left_padding_ && !lengths_) return NoMask{};
  const mx::array position = mx::arange(0, N, mx::int32);
  if (!lengths_) return mx::greater_equal(position, column(*left_padding_));
  const mx::array within = mx::less(position, column(*lengths_));
  if (!left_padding_) return within;
  return mx::logical_and(mx::greater_equal(position, column(*left_padding_)), within);
}

std::optional<int> ArraysCache::rows() const {
  for (const Slot& slot : slots_) {
    if (slot) return slot->shape(0);
  }
  if (left_padding_) return static_cast<int>(left_padding_->size());
  if (lengths_) return static_cast<int>(lengths_->size());
  return rows_;
}

void ArraysCache::keep_rows(int rows) {
  rows_.reset();
  if (!this->rows()) rows_ = rows;
}

std::size_t ArraysCache::nbytes() const {
  std::size_t bytes = 0;
  for (const Slot& slot : slots_) bytes += slot ? slot->nbytes() : 0;
  return bytes;
}

int ArraysCache::trim(int n) {
  if (n < 0) fail("trim", "n must not be negative", std::to_string(n));
  return 0;
}

State ArraysCache::state() const {
  const auto counts = [](const Counts& values) { return values ? State(internal::int_array(*values)) : State(); };
  return State::List{legacy_state(), counts(left_padding_), counts(lengths_)};
}

State ArraysCache::legacy_state() const {
  State::List slots;
  for (const Slot& slot : slots_) slots.push_back(slot ? State(*slot) : State());
  return slots;
}

ExtraState ArraysCache::extra_state() const {
  if (!rows_) return {};
  return {{"rows", std::int64_t{*rows_}}};
}

void ArraysCache::set_extra_state(const ExtraState& extra) {
  std::optional<int> rows;
  for (const auto& [name, value] : extra) {
    const auto* number = std::get_if<std::int64_t>(&value);
    if (name != "rows" || !number || *number < 0 || *number > std::numeric_limits<int>::max() || this->rows()) {
      throw Error(ErrorCode::corrupt_data,
                  "[ArraysCache::set_extra_state] the only member is \"rows\", a number of rows where nothing else "
                  "tells it, but got \"" +
                      name + "\"");
    }
    rows = static_cast<int>(*number);
  }
  if (rows) rows_ = rows;
}

void ArraysCache::prepare(const BatchPrompt& prompt) {
  if (prompt.lengths.empty()) return;
  check_counts("prepare", "lengths", prompt.lengths);
  if (const auto known = rows()) {
    internal::check_one_per_row("ArraysCache::prepare", "lengths", prompt.lengths, *known);
  }
  lengths_ = prompt.lengths;
  rows_.reset();
}

void ArraysCache::finalize() {
  const std::optional<int> known = rows();
  left_padding_.reset();
  lengths_.reset();
  if (known) keep_rows(*known);
}

void ArraysCache::advance(int N) {
  if (N < 0) fail("advance", "N must not be negative", std::to_string(N));
  if (left_padding_) {
    for (int& count : *left_padding_) count = minus(count, N);
  }
  if (lengths_) {
    for (int& count : *lengths_) count = count == kNoLimit ? count : minus(count, N);
  }
}

void ArraysCache::filter(const std::vector<int>& chosen) {
  const int limit = rows().value_or(std::numeric_limits<int>::max());
  for (const int row : chosen) {
    if (row < 0 || row >= limit)
      fail("filter", "rows must be of the cache's " + std::to_string(limit), std::to_string(row));
  }
  const auto count = static_cast<int>(chosen.size());
  std::vector<Slot> slots;
  for (const Slot& slot : slots_) {
    if (slot) {
      slots.emplace_back(count == 0 ? zero_rows(*slot, 0) : mx::take(*slot, internal::int_array(chosen), 0));
    } else {
      slots.emplace_back();
    }
  }
  Counts left_padding = selected(left_padding_, chosen);
  Counts lengths = selected(lengths_, chosen);

  slots_ = std::move(slots);
  left_padding_ = std::move(left_padding);
  lengths_ = std::move(lengths);
  keep_rows(count);
}

void ArraysCache::extend(const LayerCache& other) {
  const ArraysCache& more = arrays_cache("extend", &other, num_slots());
  const int before = batch_size();
  const int added = more.batch_size();
  std::vector<Slot> slots;
  for (int slot = 0; slot < num_slots(); ++slot) {
    slots.push_back(concatenated("extend", slot, {get(slot), more.get(slot)}, {before, added}));
  }
  Counts left_padding = joined(left_padding_, before, more.left_padding_, added, 0);
  Counts lengths = joined(lengths_, before, more.lengths_, added, kNoLimit);

  slots_ = std::move(slots);
  left_padding_ = std::move(left_padding);
  lengths_ = std::move(lengths);
  keep_rows(before + added);
}

std::unique_ptr<LayerCache> ArraysCache::extract(int row) const {
  if (row < 0 || row >= batch_size()) {
    fail("extract", "the row must be one of " + std::to_string(batch_size()), std::to_string(row));
  }
  auto cache = std::make_unique<ArraysCache>(num_slots());
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot]) cache->slots_[slot] = rows_of(*slots_[slot], row, row + 1);
  }
  return cache;
}

std::unique_ptr<ArraysCache> ArraysCache::resized(std::unique_ptr<ArraysCache> cache, int size) {
  if (cache->num_slots() > size) {
    throw Error(ErrorCode::corrupt_data, "[MambaCache::from_state] at most " + std::to_string(size) +
                                             " slots are needed, but got " + std::to_string(cache->num_slots()));
  }
  cache->slots_.resize(static_cast<std::size_t>(size));
  cache->unevaluated_sets_.resize(cache->slots_.size());
  return cache;
}

std::unique_ptr<ArraysCache> MambaCache::from_state(const State& state) {
  return resized(ArraysCache::from_state(state), kSlots);
}

std::unique_ptr<ArraysCache> MambaCache::from_legacy(const State& state, const Meta& meta) {
  return resized(ArraysCache::from_legacy(state, meta), kSlots);
}

}  // namespace reprise
