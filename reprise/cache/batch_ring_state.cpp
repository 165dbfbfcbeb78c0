// BatchRingCache as a state, as the older layout's pair, and back.
#include <algorithm>
#include <tuple>
#include <utility>

#include "mlx/array.h"
#include "reprise/base/error.h"
#include "reprise/cache/batch_ring_cache.h"
#include "reprise/cache/row_numbers.h"
#include "reprise/cache/state_reader.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// Stored on disk: never rename.
constexpr const char* kKeep = "keep";
constexpr const char* kLengths = "lengths";
constexpr const char* kMoved = "moved";
constexpr const char* kStored = "stored";

[[noreturn]] void fail_extra(const std::string& function, const std::string& what, const std::string& got) {
  throw Error(ErrorCode::corrupt_data, "[" + function + "] " + what + ", but got " + got);
}

std::vector<int> counts(const StateReader& reader, std::size_t item, std::optional<int> rows) {
  std::vector<int> values = reader.integers(item, rows);
  for (const int value : values) {
    if (value >= -kMaxCount && value <= kMaxCount) continue;
    reader.fail(reader.item_name(item) + " must lie within ± " + std::to_string(kMaxCount), std::to_string(value));
  }
  return values;
}

const std::vector<int>& row_numbers(const std::string& function, const std::string& name,
                                    const ExtraState::mapped_type& value, std::size_t rows) {
  const auto* numbers = std::get_if<std::vector<int>>(&value);
  if (numbers && numbers->size() == rows) return *numbers;
  fail_extra(function, name + " must be a list of " + std::to_string(rows) + " numbers",
             numbers ? std::to_string(numbers->size()) : "a number");
}

}  // namespace

// mlx-lm's left padding counts no column too many, but may count filler that came after evictions as tokens.
int BatchRingCache::expected_stored(const Row& row) const {
  const int padding = keep_ == 0 ? std::max(0, row.padding) : 0;
  return std::min(row.offset, ring_width() - padding);
}

State::List BatchRingCache::rows_state(bool saved) const {
  State::List items = {State(), State()};
  if (buffer_) {
    const KVColumns columns = !saved       ? *buffer_
                              : keep_ == 0 ? buffer_->first(ring_width())
                                           : with_sinks(buffer_->first(keep_), temporal_ring_of(*buffer_));
    const KVColumns kept = saved ? columns.contiguous() : columns;
    items = {kept.keys_state(), kept.values_state()};
  }
  items.push_back(State(int_array(positions())));
  items.push_back(State(int_array(left_padding())));
  return items;
}

// Sinks lie before the ring. A reader that knows none takes them for padding, which is right for the saved form, where
// the ring is in temporal order.
State BatchRingCache::numbered_state(bool saved) const {
  const bool temporal = saved && keep_ > 0;
  State::List items = rows_state(saved);
  items.push_back(State(max_size_));
  items.push_back(State(columns_written_));
  items.push_back(State(temporal && buffer_ ? keep_ + ring_width() : idx()));
  items.push_back(State(rotated_ && !temporal));
  if (quantization_) {
    for (const int number : {keep_, quantization_->group_size, quantization_->bits}) items.push_back(State(number));
  }
  return items;
}

State BatchRingCache::state() const { return numbered_state(false); }

State BatchRingCache::saved_state() const { return numbered_state(true); }

State BatchRingCache::legacy_state() const { return rows_state(true); }

Meta BatchRingCache::legacy_meta() const {
  const bool temporal = keep_ > 0;
  const int column = temporal && buffer_ ? keep_ + ring_width() : idx();
  Meta::List items = {Meta(std::to_string(max_size_)), Meta(std::to_string(columns_written_)),
                      Meta(std::to_string(column)), Meta(rotated_ && !temporal ? "True" : "False")};
  if (quantization_) {
    for (const int number : {keep_, quantization_->group_size, quantization_->bits}) {
      items.push_back(Meta(std::to_string(number)));
    }
  }
  return items;
}

ExtraState BatchRingCache::extra_state() const {
  ExtraState extra;
  if (keep_ > 0 && !quantization_) extra[kKeep] = std::int64_t{keep_};
  std::vector<int> limits, stored, moved;
  bool told = true, any_moved = false;
  for (const Row& row : rows_) {
    limits.push_back(row.limit);
    stored.push_back(row.stored);
    moved.push_back(row.moved);
    any_moved = any_moved || row.moved > 0;
    told = told && row.stored == expected_stored(row);
  }
  if (is_in_padded_prompt()) extra[kLengths] = std::move(limits);
  // Only trim asks for it.
  if (any_moved && columns_written_ < max_size_) extra[kMoved] = std::move(moved);
  if (!told) extra[kStored] = std::move(stored);
  return extra;
}

void BatchRingCache::set_extra_state(const ExtraState& extra) {
  const std::string function = class_name() + "::set_extra_state";
  const auto saved = std::tuple(rows_, keep_, idx_);
  try {
    if (const auto keep = extra.find(kKeep); keep != extra.end()) {
      const auto* number = std::get_if<std::int64_t>(&keep->second);
      if (quantization_) fail_extra(function, "keep must be in the state", "a member of its own");
      if (!number) fail_extra(function, "keep must be a number", "a list");
      set_keep(function, *number);
    }
    for (const auto& [name, value] : extra) {
      if (name == kKeep) continue;
      if (name != kLengths && name != kMoved && name != kStored) {
        fail_extra(function, "members must be keep, lengths, moved or stored", '"' + name + '"');
      }
      const std::vector<int>& numbers = row_numbers(function, name, value, rows_.size());
      for (std::size_t row = 0; row < numbers.size(); ++row) {
        const int number = numbers[row];
        const bool fits = name == kStored  ? number >= -kMaxCount && number <= ring_width()
                          : name == kMoved ? number >= 0 && number <= keep_ + ring_width()
                                           : number == kNoLimit || (number >= 0 && number <= 2 * kMaxCount);
        if (!fits) fail_extra(function, name + " must fit the rows", std::to_string(number));
        Row& of = rows_[row];
        (name == kStored ? of.stored : name == kMoved ? of.moved : of.limit) = number;
      }
    }
  } catch (...) {
    std::tie(rows_, keep_, idx_) = saved;
    throw;
  }
}

void BatchRingCache::set_keep(const std::string& function, std::int64_t keep) {
  // The columns of an earlier keep go back to the ring first: setting it twice is setting it once.
  const int idx = buffer_ ? idx_ + keep_ : 0;
  const int most = std::min(max_size_ - 1, buffer_ ? std::min(idx, buffer_->width()) : max_size_ - 1);
  if (keep < 0 || keep > most) {
    fail_extra(function, "keep must lie in [0, " + std::to_string(most) + "]", std::to_string(keep));
  }
  if (buffer_) idx_ = idx - static_cast<int>(keep);
  keep_ = static_cast<int>(keep);
  for (Row& row : rows_) row.stored = expected_stored(row);
}

void BatchRingCache::load(const StateReader& reader, const Numbers& numbers) {
  std::optional<KVColumns> buffer = reader.columns(0, 1, quantization_, true);
  const std::optional<int> batch = buffer ? std::optional(buffer->batch_size()) : std::nullopt;
  const std::vector<int> offsets = counts(reader, 2, batch);
  const std::vector<int> paddings = counts(reader, 3, static_cast<int>(offsets.size()));
  const int width = buffer ? buffer->width() : 0;
  const auto fail = [&](const std::string& what, int got) { reader.fail(what, std::to_string(got)); };
  if (numbers.idx > width) fail("idx must be at most the " + std::to_string(width) + " columns", numbers.idx);
  if (numbers.columns_written > kMaxCount || (!buffer && numbers.columns_written > 0)) {
    fail(buffer ? "the columns written must be at most " + std::to_string(kMaxCount)
                : "an empty cache must have no columns written",
         numbers.columns_written);
  }
  if (numbers.rotated && width != numbers.max_size) {
    fail("a rotated ring must have max_size = " + std::to_string(numbers.max_size) + " columns", width);
  }
  // More columns than a ring has are never slack.
  if (!numbers.rotated && width > numbers.max_size && numbers.idx < width) {
    buffer = buffer->first(numbers.idx).contiguous();
  }
  buffer_ = std::move(buffer);
  max_size_ = numbers.max_size;
  columns_written_ = numbers.columns_written;
  idx_ = numbers.idx;
  rotated_ = numbers.rotated;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    Row row{.offset = offsets[i], .padding = paddings[i]};
    row.stored = expected_stored(row);
    rows_.push_back(row);
  }
}

}  // namespace reprise::internal
