#include "reprise/cache/batch_growing_cache.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "reprise/base/error.h"
#include "reprise/cache/fused_attention.h"
#include "reprise/cache/row_numbers.h"
#include "reprise/cache/state_reader.h"
#include "reprise/nn/masks.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// Sums of paddings and columns stay far from what int32 positions can count.
constexpr int kMaxPadding = 1 << 29;

constexpr const char* kRightPadding = "right_padding";  // stored on disk: never rename

[[noreturn]] void fail(ErrorCode code, const std::string& function, const std::string& what, const std::string& got) {
  throw Error(code, "[" + function + "] " + what + ", but got " + got);
}

bool is_padding(std::int64_t count) { return count >= 0 && count <= kMaxPadding; }

void check_padding(const std::string& function, const char* name, std::int64_t count) {
  if (is_padding(count)) return;
  fail(ErrorCode::invalid_argument, function,
       std::string(name) + " must lie in [0, " + std::to_string(kMaxPadding) + "]", std::to_string(count));
}

void check_counts(const std::string& function, const char* name, const std::vector<int>& counts, int batch_size) {
  check_one_per_row(function, name, counts, batch_size);
  for (const int count : counts) check_padding(function, name, count);
}

std::vector<int> joined(std::vector<int> first, const std::vector<int>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

}  // namespace

BatchGrowingCache::BatchGrowingCache(const std::string& function, std::vector<int> left_padding,
                                     std::optional<KVQuantization> quantization)
    : left_padding_(std::move(left_padding)), quantization_(quantization) {
  for (const int padding : left_padding_) check_padding(function, "left_padding", padding);
}

std::vector<int> BatchGrowingCache::positions() const {
  std::vector<int> result;
  for (const int padding : left_padding_) result.push_back(idx_ - padding);
  return result;
}

Offset BatchGrowingCache::offset() const { return int_array(positions()); }

int BatchGrowingCache::trim(int n) {
  if (n < 0) {
    fail(ErrorCode::invalid_argument, class_name() + "::trim", "n must not be negative", std::to_string(n));
  }
  const int trimmed = std::min(n, idx_);
  if (trimmed == 0) return 0;
  idx_ -= trimmed;
  for (int& padding : left_padding_) padding = std::min(padding, idx_);
  return trimmed;
}

ExtraState BatchGrowingCache::extra_state() const {
  if (right_padding_.empty()) return {};
  return {{kRightPadding, right_padding_}};
}

void BatchGrowingCache::set_extra_state(const ExtraState& extra) {
  const std::string function = class_name() + "::set_extra_state";
  std::vector<int> padding;
  for (const auto& [name, value] : extra) {
    const auto* counts = std::get_if<std::vector<int>>(&value);
    if (name != kRightPadding || counts == nullptr) {
      fail(ErrorCode::corrupt_data, function, "the only extra member must be a list, right_padding", '"' + name + '"');
    }
    if (counts->size() != left_padding_.size() || !std::all_of(counts->begin(), counts->end(), is_padding)) {
      fail(ErrorCode::corrupt_data, function,
           "right_padding must have " + std::to_string(left_padding_.size()) + " numbers that are not negative",
           "others");
    }
    padding = *counts;
  }
  right_padding_ = std::move(padding);
}

KeysValues BatchGrowingCache::update_and_fetch(const mx::array& keys, const mx::array& values) {
  const std::string function = class_name() + "::update_and_fetch";
  const KVColumns rows = KVColumns::encode(function, keys, values, quantization_, true);
  if (rows.batch_size() != batch_size()) {
    fail(ErrorCode::invalid_argument, function, "keys and values must have " + std::to_string(batch_size()) + " rows",
         std::to_string(rows.batch_size()));
  }
  if (buffer_) buffer_->check_like(function, rows);
  check_first_rows(function, buffer_, rows);
  if (rows.width() == 0) return keys_and_values();
  check_countable(function, idx_, rows.width());

  pending_.before_update(buffer_);
  KVColumns next = grown(buffer_, idx_, rows);
  const int next_idx = idx_ + rows.width();
  KeysValues visible = next.first(next_idx).keys_values();
  buffer_ = std::move(next);
  idx_ = next_idx;
  return visible;
}

KeysValues BatchGrowingCache::keys_and_values() const {
  if (empty()) {
    fail(ErrorCode::failed_precondition, class_name() + "::keys_and_values", "a filled cache is needed",
         "an empty one");
  }
  return buffer_->first(idx_).keys_values();
}

Mask BatchGrowingCache::make_mask(int N, const MaskOptions& options) const {
  return create_causal_mask(N, idx_, {.window = options.window, .left_padding = int_array(left_padding_)});
}

mx::array BatchGrowingCache::attend(const mx::array& queries, const mx::array& keys, const mx::array& values,
                                    const AttentionOptions& options) {
  return attend_by_projections(*this, queries, keys, values, options);
}

mx::array BatchGrowingCache::attend_projections(const Projections& projections, const AttentionOptions& options) {
  if (!FusedStep::takes(projections, buffer_)) return attend_projections_in_parts(projections, options);
  const std::string function = class_name() + "::attend_projections";
  const FusedStep step(function, projections, options, buffer_, quantization_);
  if (step.batch_size() != batch_size()) {
    fail(ErrorCode::invalid_argument, function, "projections must have " + std::to_string(batch_size()) + " rows",
         std::to_string(step.batch_size()));
  }
  check_countable(function, idx_, step.width());

  pending_.before_update(buffer_);
  StepResult result = step.run(buffer_, {idx_, idx_ + step.width(), grown_capacity(buffer_, idx_, step.width())},
                               offset(), left_padding_);
  buffer_ = std::move(result.buffer);
  idx_ += step.width();
  return result.output;
}

void BatchGrowingCache::prepare(const BatchPrompt& prompt) {
  const std::string function = class_name() + "::prepare";
  check_counts(function, "left_padding", prompt.left_padding, batch_size());
  check_counts(function, "lengths", prompt.lengths, batch_size());
  check_counts(function, "right_padding", prompt.right_padding, batch_size());
  std::vector<int> left_padding = left_padding_;
  if (!prompt.left_padding.empty()) {
    if (!empty()) {
      fail(ErrorCode::failed_precondition, function, "left padding needs an empty cache",
           std::to_string(idx_) + " columns");
    }
    for (std::size_t row = 0; row < left_padding.size(); ++row) {
      check_padding(function, "left_padding", std::int64_t{left_padding[row]} + prompt.left_padding[row]);
      left_padding[row] += prompt.left_padding[row];
    }
  }
  if (any_positive(prompt.right_padding)) right_padding_ = prompt.right_padding;
  left_padding_ = std::move(left_padding);
}

void BatchGrowingCache::finalize() {
  if (right_padding_.empty()) return;
  std::vector<int> shifts = right_padding_;
  for (std::size_t row = 0; row < shifts.size(); ++row) {
    shifts[row] = std::min(shifts[row], std::max(0, idx_ - left_padding_[row]));
  }
  // The whole buffer turns: filler goes behind idx, slack comes to the front, where padding is.
  if (buffer_) buffer_ = buffer_->rolled(shifts);
  for (std::size_t row = 0; row < shifts.size(); ++row) left_padding_[row] += shifts[row];
  right_padding_.clear();
}

void BatchGrowingCache::check_rows(const std::string& function, const std::vector<int>& rows) const {
  for (const int row : rows) {
    if (row >= 0 && row < batch_size()) continue;
    fail(ErrorCode::invalid_argument, function, "the row must be one of " + std::to_string(batch_size()),
         std::to_string(row));
  }
}

void BatchGrowingCache::filter(const std::vector<int>& rows) {
  check_rows(class_name() + "::filter", rows);
  std::vector<int> left_padding = chosen_rows(left_padding_, rows);
  std::vector<int> right_padding = chosen_rows(right_padding_, rows);
  std::vector<int> all(left_padding_.size());
  std::iota(all.begin(), all.end(), 0);
  // Padding that is still to come cannot be removed.
  int common = idx_;
  for (const int padding : left_padding) common = std::min(common, padding);
  if (buffer_ && (common > 0 || rows != all)) {
    buffer_ = buffer_->slice(common, rows.empty() ? common : buffer_->width()).take_rows(rows);
  }
  for (int& padding : left_padding) padding -= common;
  left_padding_ = std::move(left_padding);
  right_padding_ = any_positive(right_padding) ? std::move(right_padding) : std::vector<int>{};
  idx_ -= common;
}

KVColumns BatchGrowingCache::justified(int idx, int width, const KVColumns& like) const {
  if (!buffer_) return like.zeros(width, batch_size());
  const int before = idx - idx_;
  const KVColumns used = buffer_->first(std::min(buffer_->width(), width - before));
  return used.padded(before, width - before - used.width());
}

void BatchGrowingCache::extend(const LayerCache& other) {
  const std::string function = class_name() + "::extend";
  const auto* added = dynamic_cast<const BatchGrowingCache*>(&other);
  if (added == nullptr || added->class_name() != class_name() || added->quantization_ != quantization_) {
    fail(ErrorCode::invalid_argument, function, "the other cache must be of the same class and quantisation",
         "a " + other.class_name());
  }
  if (buffer_ && added->buffer_) buffer_->check_like(function, *added->buffer_, true);

  const int idx = std::max(idx_, added->idx_);
  std::vector<int> left_padding;
  for (const BatchGrowingCache* part : {static_cast<const BatchGrowingCache*>(this), added}) {
    for (const int padding : part->left_padding_) {
      check_padding(function, "left_padding", std::int64_t{padding} + idx - part->idx_);
      left_padding.push_back(padding + idx - part->idx_);
    }
  }
  std::vector<int> right_padding;
  if (!right_padding_.empty() || !added->right_padding_.empty()) {
    const auto counts = [](const BatchGrowingCache& part) {
      return part.right_padding_.empty() ? std::vector<int>(part.left_padding_.size(), 0) : part.right_padding_;
    };
    right_padding = joined(counts(*this), counts(*added));
  }

  std::optional<KVColumns> buffer;
  if (buffer_ || added->buffer_) {
    const KVColumns& like = buffer_ ? *buffer_ : *added->buffer_;
    const int width = std::max(buffer_ ? buffer_->width() : 0, added->buffer_ ? added->buffer_->width() : 0);
    std::vector<KVColumns> parts;
    for (const BatchGrowingCache* part : {static_cast<const BatchGrowingCache*>(this), added}) {
      if (part->batch_size() > 0) parts.push_back(part->justified(idx, width, like));
    }
    buffer = parts.empty() ? like : concatenate_rows(parts);
  }
  buffer_ = std::move(buffer);
  left_padding_ = std::move(left_padding);
  right_padding_ = std::move(right_padding);
  idx_ = idx;
}

std::unique_ptr<LayerCache> BatchGrowingCache::extract(int row) const {
  check_rows(class_name() + "::extract", {row});
  if (!buffer_) return single_cache(std::nullopt);
  const int begin = std::min(left_padding_[static_cast<std::size_t>(row)], idx_);
  return single_cache(buffer_->slice(begin, idx_).take_rows({row}));
}

BatchGrowingCache::Parts BatchGrowingCache::read_parts(const StateReader& reader,
                                                       const std::optional<KVQuantization>& quantization, bool has_idx,
                                                       std::vector<int>* starts) {
  Parts parts;
  parts.buffer = reader.columns(0, 1, quantization, true);
  const int width = parts.buffer ? parts.buffer->width() : 0;
  parts.left_padding = reader.integers(3, parts.buffer ? std::optional(parts.buffer->batch_size()) : std::nullopt);
  parts.idx = has_idx ? reader.integer(4, 0, width) : width;
  const std::vector<int> offset = reader.integers(2, static_cast<int>(parts.left_padding.size()));
  for (std::size_t row = 0; row < offset.size(); ++row) {
    const int padding = parts.left_padding[row];
    const std::string name = " of row " + std::to_string(row);
    if (!is_padding(padding)) {
      reader.fail(reader.item_name(3) + name + " must lie in [0, " + std::to_string(kMaxPadding) + "]",
                  std::to_string(padding));
    }
    const std::int64_t start = std::int64_t{offset[row]} - parts.idx + padding;
    if (starts != nullptr && is_padding(start)) {
      starts->push_back(static_cast<int>(start));
      continue;
    }
    if (start != 0) {
      reader.fail(
          reader.item_name(2) + name + " must be the columns after its padding, " + std::to_string(parts.idx - padding),
          std::to_string(offset[row]));
    }
  }
  return parts;
}

BatchGrowingCache::Parts BatchGrowingCache::merged_parts(const std::string& function,
                                                         const std::vector<Source>& sources) {
  Parts parts;
  const KVColumns* like = nullptr;
  for (const Source& source : sources) {
    parts.idx = std::max(parts.idx, source.length);
    if (!source.buffer) continue;
    if (source.buffer->batch_size() != 1) {
      fail(ErrorCode::invalid_argument, function, "each cache must hold one row",
           std::to_string(source.buffer->batch_size()));
    }
    if (like != nullptr) like->check_like(function, *source.buffer);
    if (like == nullptr) like = &*source.buffer;
  }
  for (const Source& source : sources) parts.left_padding.push_back(parts.idx - source.length);
  if (parts.idx == 0 || like == nullptr) return parts;

  std::vector<KVColumns> rows;
  for (const Source& source : sources) {
    if (source.length == 0) {
      rows.push_back(like->zeros(parts.idx, 1));
    } else {
      rows.push_back(source.buffer->first(source.length).padded(parts.idx - source.length, 0));
    }
  }
  parts.buffer = rows.size() == 1 ? rows.front().contiguous() : concatenate_rows(rows);
  return parts;
}

void BatchGrowingCache::assign(Parts parts) {
  buffer_ = std::move(parts.buffer);
  left_padding_ = std::move(parts.left_padding);
  idx_ = parts.idx;
}

State::List BatchGrowingCache::rows_state(bool saved) const {
  State::List items(2);
  if (buffer_) {
    const KVColumns columns = saved ? buffer_->first(idx_).contiguous() : *buffer_;
    items = {columns.keys_state(), columns.values_state()};
  }
  items.push_back(State(int_array(positions())));
  items.push_back(State(int_array(left_padding_)));
  return items;
}

}  // namespace reprise::internal
