// BatchRingCache's rows: they join, leave and come back out alone.
#include <algorithm>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/cache/batch_ring_cache.h"
#include "reprise/cache/ring_cache.h"
#include "reprise/cache/row_numbers.h"

namespace reprise::internal {

namespace {

[[noreturn]] void fail(ErrorCode code, const std::string& function, const std::string& what, const std::string& got) {
  throw Error(code, "[" + function + "] " + what + ", but got " + got);
}

void check_counts(const std::string& function, const char* name, const std::vector<int>& counts, int rows) {
  check_one_per_row(function, name, counts, rows);
  for (const int count : counts) {
    if (count >= 0) continue;
    fail(ErrorCode::invalid_argument, function, std::string(name) + " must not be negative", std::to_string(count));
  }
}

}  // namespace

bool BatchRingCache::is_in_padded_prompt() const {
  return std::any_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.limit != kNoLimit; });
}

std::vector<int> BatchRingCache::move_filler(std::vector<Row>& rows) {
  std::vector<int> shifts;
  for (Row& row : rows) {
    const int filler = row.filler();
    shifts.push_back(filler);
    row.offset -= filler;
    row.padding += filler;
    row.stored -= filler;
    row.moved += filler;
  }
  return shifts;
}

void BatchRingCache::move_filler_back() {
  const int width = ring_width();
  int evicted = 0;
  std::vector<int> shifts;
  for (const Row& row : rows_) {
    shifts.push_back(-row.moved);
    if (row.moved > 0) evicted = std::max(evicted, row.stored + row.moved - width);
  }
  const KVColumns ring = temporal_ring_of(*buffer_).padded(evicted, 0).rolled(shifts);
  buffer_ = with_sinks(buffer_->first(keep_), ring);
  for (Row& row : rows_) {
    row.offset += row.moved;
    row.padding += evicted - row.moved;
    row.stored += row.moved;
    row.moved = 0;
  }
  idx_ = ring.width();
  rotated_ = false;
}

void BatchRingCache::prepare(const BatchPrompt& prompt) {
  const std::string function = class_name() + "::prepare";
  check_counts(function, "left_padding", prompt.left_padding, batch_size());
  check_counts(function, "lengths", prompt.lengths, batch_size());
  check_counts(function, "right_padding", prompt.right_padding, batch_size());
  if (!prompt.left_padding.empty() && buffer_) {
    fail(ErrorCode::failed_precondition, function, "left padding needs an empty cache", "a filled one");
  }
  const bool padded = any_positive(prompt.right_padding);
  if (padded && prompt.lengths.empty()) {
    fail(ErrorCode::invalid_argument, function, "right padding needs the rows' lengths", "none");
  }
  std::vector<Row> rows = rows_;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    if (!prompt.left_padding.empty()) {
      const int padding = prompt.left_padding[i];
      if (padding > kMaxCount - row.padding) {
        fail(ErrorCode::invalid_argument, function, "left_padding must come to at most " + std::to_string(kMaxCount),
             std::to_string(padding));
      }
      row.padding += padding;
      row.offset -= padding;
      row.stored -= padding;
    }
    if (padded) {
      // The prompt before ends here, if nobody said so.
      const int tokens = std::max(0, row.offset - row.filler());
      check_countable(function, tokens, prompt.lengths[i]);
      row.limit = tokens + prompt.lengths[i];
    }
  }
  if (padded) finalize();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!prompt.left_padding.empty()) {
      rows_[i] = rows[i];
    } else {
      rows_[i].limit = rows[i].limit;
    }
  }
}

void BatchRingCache::finalize() {
  if (!is_in_padded_prompt()) return;
  std::vector<Row> rows = rows_;
  const std::vector<int> shifts = move_filler(rows);
  for (Row& row : rows) {
    row.limit = kNoLimit;
    row.moved = 0;
  }
  if (buffer_ && any_positive(shifts)) {
    const KVColumns ring = temporal_ring_of(*buffer_).rolled(shifts);
    buffer_ = with_sinks(buffer_->first(keep_), ring);
    idx_ = ring.width();
    rotated_ = false;
  }
  rows_ = std::move(rows);
}

void BatchRingCache::check_row(const std::string& function, int row) const {
  if (row >= 0 && row < batch_size()) return;
  fail(ErrorCode::invalid_argument, function, "a row must lie in [0, " + std::to_string(batch_size()) + ")",
       std::to_string(row));
}

void BatchRingCache::filter(const std::vector<int>& rows) {
  for (const int row : rows) check_row(class_name() + "::filter", row);
  std::vector<Row> chosen;
  for (const int row : rows) chosen.push_back(rows_[static_cast<std::size_t>(row)]);
  if (rows.empty()) {
    if (buffer_) buffer_ = buffer_->zeros(keep_, 0);
    columns_written_ = 0;
    idx_ = 0;
    rotated_ = false;
  } else if (buffer_) {
    buffer_ = buffer_->take_rows(rows);
  }
  rows_ = std::move(chosen);
}

KVColumns BatchRingCache::justified(bool temporal, int idx, int width, const KVColumns& like) const {
  if (!buffer_) return like.zeros(keep_ + width, batch_size());
  const bool reordered = temporal && rotated_;
  const KVColumns columns = reordered ? temporal_ring_of(*buffer_) : ring_of(*buffer_);
  const int left = idx - (reordered ? ring_width() : idx_);
  const int right = width - columns.width() - left;
  // Too many columns are slack.
  const KVColumns placed =
      right < 0 ? columns.first(columns.width() + right).padded(left, 0) : columns.padded(left, right);
  return with_sinks(buffer_->first(keep_), placed);
}

void BatchRingCache::extend(const LayerCache& other) {
  const std::string function = class_name() + "::extend";
  const auto* added = dynamic_cast<const BatchRingCache*>(&other);
  if (added == nullptr || other.class_name() != class_name()) {
    fail(ErrorCode::invalid_argument, function, "the other cache must be a " + class_name(), other.class_name());
  }
  if (added->max_size_ != max_size_ || added->keep_ != keep_ || added->quantization_ != quantization_) {
    fail(ErrorCode::invalid_argument, function,
         "the other cache must agree in max_size = " + std::to_string(max_size_) + ", keep = " + std::to_string(keep_) +
             (quantization_ ? ", group size and bits" : ""),
         "max_size = " + std::to_string(added->max_size_) + ", keep = " + std::to_string(added->keep_));
  }
  if (buffer_ && added->buffer_) buffer_->check_like(function, *added->buffer_, true);

  const bool aligned = added->rotated_ == rotated_ && added->idx_ == idx_;
  const auto end = [&](const BatchRingCache& side) { return aligned ? side.idx_ : side.ring_width(); };
  const auto width = [&](const BatchRingCache& side) { return side.buffer_ ? side.buffer_->width() - keep_ : 0; };
  const int common_end = std::max(end(*this), end(*added));
  std::vector<Row> rows;
  for (const BatchRingCache* side : {static_cast<const BatchRingCache*>(this), added}) {
    for (Row row : side->rows_) {
      row.padding += common_end - end(*side);
      rows.push_back(row);
    }
  }
  if (buffer_ || added->buffer_) {
    const KVColumns& like = buffer_ ? *buffer_ : *added->buffer_;
    const int common_width = std::max(width(*this), width(*added));
    buffer_ = concatenate_rows({justified(!aligned, common_end, common_width, like),
                                added->justified(!aligned, common_end, common_width, like)});
  }
  columns_written_ = std::max(columns_written_, added->columns_written_);
  rotated_ = rotated_ && aligned;
  idx_ = common_end;
  rows_ = std::move(rows);
}

std::unique_ptr<LayerCache> BatchRingCache::extract(int row) const {
  check_row(class_name() + "::extract", row);
  const Row& chosen = rows_[static_cast<std::size_t>(row)];
  if (!buffer_) return single_cache(std::nullopt, 0);
  const int filler = chosen.filler();
  const int tokens = std::max(0, chosen.offset - filler);
  const int end = std::max(0, ring_width() - filler);
  const int count = std::clamp(chosen.stored - filler, 0, std::min(end, std::max(0, tokens - keep_)));
  const KVColumns own = buffer_->take_rows({row});
  std::vector<KVColumns> parts;
  if (keep_ > 0) parts.push_back(own.first(std::min(keep_, tokens)));
  parts.push_back(temporal_ring_of(own).slice(end - count, end));
  return single_cache(concatenate_columns(parts).contiguous(), tokens);
}

void BatchRingCache::merge_from(const std::string& function, const std::vector<const RingCache*>& sources) {
  const KVColumns* like = nullptr;
  for (const RingCache* source : sources) {
    if (source->max_size() != max_size_ || source->keep() != keep_) {
      fail(ErrorCode::invalid_argument, function,
           "caches must agree in max_size = " + std::to_string(max_size_) + " and keep = " + std::to_string(keep_),
           "max_size = " + std::to_string(source->max_size()) + " and keep = " + std::to_string(source->keep()));
    }
    if (!source->buffer()) continue;
    if (source->buffer()->batch_size() != 1) {
      fail(ErrorCode::invalid_argument, function, "each cache must have one row",
           std::to_string(source->buffer()->batch_size()));
    }
    if (like) like->check_like(function, *source->buffer());
    like = &*source->buffer();
  }

  std::vector<std::optional<KVColumns>> columns;
  std::vector<int> counts;  // of each row's columns behind its sinks, those that the ring takes
  int width = 0, longest = 0;
  for (const RingCache* source : sources) {
    columns.push_back(source->temporal_columns());
    const int stored = columns.back() ? columns.back()->width() : 0;
    const int sinks = std::min(stored, keep_);
    counts.push_back(std::min(stored - sinks, ring_size()));
    width = std::max(width, counts.back());
    longest = std::max(longest, sinks + counts.back());
  }
  // Tokens may have come and gone, so that a position is all that is left.
  const bool any_position = std::any_of(sources.begin(), sources.end(),
                                        [](const RingCache* source) { return source->position().value_or(0) > 0; });
  if (longest == 0 && !(any_position && like)) return;

  std::vector<KVColumns> buffers;
  std::vector<Row> rows;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const int count = counts[i];
    std::vector<KVColumns> parts;
    if (const int stored = columns[i] ? columns[i]->width() : 0; stored > 0) {
      const int sinks = std::min(stored, keep_);
      if (sinks > 0) parts.push_back(columns[i]->first(sinks));
      if (const int padding = keep_ - sinks + width - count; padding > 0) parts.push_back(like->zeros(padding));
      if (count > 0) parts.push_back(columns[i]->slice(stored - count, stored));
    } else {
      parts.push_back(like->zeros(keep_ + width));
    }
    buffers.push_back(concatenate_columns(parts));
    rows.push_back({.offset = sources[i]->position().value_or(0), .padding = width - count, .stored = count});
  }
  buffer_ = concatenate_rows(buffers).contiguous();
  rows_ = std::move(rows);
  columns_written_ = longest;
  idx_ = width;
}

void BatchRingCache::copy_from(const BatchRingCache& other, std::optional<KVColumns> buffer) {
  buffer_ = std::move(buffer);
  rows_ = other.rows_;
  columns_written_ = other.columns_written_;
  idx_ = other.idx_;
  rotated_ = other.rotated_;
}

}  // namespace reprise::internal
