#include "reprise/cache/batch_ring_cache.h"

#include <algorithm>
#include <utility>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/cache/fused_attention.h"
#include "reprise/cache/row_numbers.h"
#include "reprise/nn/masks.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// A wider window hides nothing, and sums with it stay countable.
constexpr int kWidestWindow = 1 << 30;

[[noreturn]] void fail(ErrorCode code, const std::string& function, const std::string& what, int got) {
  throw Error(code, "[" + function + "] " + what + ", but got " + std::to_string(got));
}

// Row b's column i is the column from[b · count + i] of `columns`.
KVColumns take_columns(const KVColumns& columns, const std::vector<int>& from, int count) {
  const int rows = columns.batch_size();
  const mx::array indices(from.begin(), mx::Shape{rows, 1, count, 1}, mx::int32);
  std::vector<mx::array> tensors;
  for (const mx::array& tensor : columns.tensors()) {
    mx::Shape shape = tensor.shape();
    shape[2] = count;
    tensors.push_back(mx::take_along_axis(tensor, mx::broadcast_to(indices, shape), 2));
  }
  return KVColumns(std::move(tensors), columns.quantization());
}

// Which of `keep` sinks N queries see, the first of them standing at places[b] among the row's stored tokens:
// bool [B, 1, N, keep].
mx::array sink_mask(int N, int keep, int window, const std::vector<int>& places) {
  const mx::array queries =
      mx::add(mx::reshape(int_array(places), {static_cast<mx::ShapeElem>(places.size()), 1, 1, 1}),
              mx::reshape(mx::arange(0, N, mx::int32), {1, 1, N, 1}));
  const mx::array sinks = mx::reshape(mx::arange(0, keep, mx::int32), {1, 1, 1, keep});
  return mx::logical_and(mx::less_equal(sinks, queries),
                         mx::greater(sinks, mx::subtract(queries, mx::array(window, mx::int32))));
}

}  // namespace

BatchRingCache::BatchRingCache(const std::string& function, int max_size, std::vector<int> left_padding, int keep,
                               std::optional<KVQuantization> quantization)
    : quantization_(quantization), max_size_(max_size), keep_(keep) {
  const ErrorCode code = ErrorCode::invalid_argument;
  if (max_size < 1) fail(code, function, "max_size must be at least 1", max_size);
  if (keep < 0 || keep >= max_size) {
    fail(code, function, "keep must lie in [0, " + std::to_string(max_size - 1) + "]", keep);
  }
  for (const int padding : left_padding) {
    if (padding < 0) fail(code, function, "left_padding must not be negative", padding);
    if (padding > kMaxCount) {
      fail(code, function, "left_padding must be at most " + std::to_string(kMaxCount), padding);
    }
    rows_.push_back({.offset = -padding, .padding = padding, .stored = -padding});
  }
}

std::vector<int> BatchRingCache::left_padding() const {
  std::vector<int> result;
  for (const Row& row : rows_) {
    // With sinks, what a reader that knows none must not show: they, and the ring's copies of first tokens.
    const int shown = std::clamp(row.offset - keep_, 0, std::clamp(row.stored, 0, ring_width()));
    result.push_back(keep_ == 0 || !buffer_ ? row.padding : keep_ + ring_width() - shown);
  }
  return result;
}

std::vector<int> BatchRingCache::positions() const {
  std::vector<int> result;
  for (const Row& row : rows_) result.push_back(row.offset);
  return result;
}

int BatchRingCache::size() const { return std::min(columns_written_, max_size_); }

bool BatchRingCache::is_trimmable() const {
  return columns_written_ < max_size_ &&
         std::all_of(rows_.begin(), rows_.end(), [&](const Row& row) { return row.offset - keep_ <= row.stored; });
}

int BatchRingCache::trim(int n) {
  if (n < 0) fail(ErrorCode::invalid_argument, class_name() + "::trim", "n must not be negative", n);
  const int trimmed = is_trimmable() ? std::min(n, columns_written_) : 0;
  if (trimmed == 0) return 0;
  if (std::any_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.moved > 0; })) move_filler_back();
  const int left = std::max(0, ring_width() - trimmed);
  // A ring may be full long before max_size when sinks are kept.
  if (rotated_ || ring_of(*buffer_).width() > ring_size()) {
    buffer_ = with_sinks(buffer_->first(keep_), temporal_ring_of(*buffer_).first(left));
  }
  const auto reduced = [&](int count) { return count < 0 ? count - trimmed : std::max(0, count - trimmed); };
  for (Row& row : rows_) {
    if (row.offset >= 0) row.padding = std::min(row.padding, left);
    row.offset = reduced(row.offset);
    row.stored = reduced(row.stored);
  }
  columns_written_ -= trimmed;
  idx_ = left;
  rotated_ = false;
  return trimmed;
}

Offset BatchRingCache::offset() const { return int_array(positions()); }

KeysValues BatchRingCache::update_and_fetch(const mx::array& keys, const mx::array& values) {
  const std::string function = class_name() + "::update_and_fetch";
  const KVColumns added = KVColumns::encode(function, keys, values, quantization_, true);
  if (added.batch_size() != batch_size()) {
    fail(ErrorCode::invalid_argument, function, "keys and values must have " + std::to_string(batch_size()) + " rows",
         added.batch_size());
  }
  if (buffer_) buffer_->check_like(function, added);
  check_first_rows(function, buffer_, added);
  if (added.width() == 0) return keys_and_values();
  if (added.width() == 1 && is_in_padded_prompt()) {
    fail(ErrorCode::failed_precondition, function, "finalize must come between a right-padded prompt and one token", 1);
  }
  int counted = columns_written_;
  for (const Row& row : rows_) counted = std::max(counted, row.offset);
  check_countable(function, counted, added.width());

  pending_.before_update(buffer_);
  if (added.width() == 1) {
    append_one(added);
  } else {
    append_chunk(added);
  }
  return keys_and_values();
}

// So few old columns stay that every new token sees ring_size() of context, itself included, whatever the chunk's
// length. Filler of the chunk before is moved out of the way first, so that it pushes out no token.
void BatchRingCache::append_chunk(const KVColumns& added) {
  std::vector<Row> rows = rows_;
  std::vector<KVColumns> parts;
  if (buffer_) {
    const KVColumns old = temporal_ring_of(*buffer_).rolled(move_filler(rows));
    const int dropped = std::max(0, old.width() - ring_size() + 1);
    for (Row& row : rows) {
      row.padding -= dropped;
      row.stored = std::min(row.stored, old.width() - dropped);
    }
    if (dropped < old.width()) parts.push_back(old.slice(dropped, old.width()));
  }
  parts.push_back(added);
  const std::optional<KVColumns> sinks = next_sinks(added, rows);
  const KVColumns ring = parts.size() == 1 ? added.contiguous() : concatenate_columns(parts);
  KVColumns next = with_sinks(sinks ? *sinks : buffer_ ? buffer_->first(keep_) : added.zeros(keep_), ring);
  for (Row& row : rows) {
    row.offset += added.width();
    row.stored += added.width();
  }
  buffer_ = std::move(next);
  rows_ = std::move(rows);
  columns_written_ += added.width();
  idx_ = ring.width();
  rotated_ = false;
}

BatchRingCache::NextColumn BatchRingCache::next_column() const {
  NextColumn next{buffer_, buffer_ ? buffer_->width() : 0, idx_, rotated_, rows_};
  const int width = buffer_ ? buffer_->width() - keep_ : 0;
  if (const int surplus = width - ring_size(); surplus > 0) {
    next.columns = with_sinks(buffer_->first(keep_), ring_of(*buffer_).slice(surplus, width));
    next.capacity = max_size_;
    for (Row& row : next.rows) row.padding -= surplus;
    next.idx = ring_size();
  } else if (idx_ == width && width < ring_size()) {
    next.capacity = keep_ + width + std::min(kColumnStep, ring_size() - width);
  }
  if (next.idx == ring_size()) {
    next.rotated = true;
    next.idx = 0;
  }
  return next;
}

void BatchRingCache::commit(NextColumn next, KVColumns buffer) {
  for (Row& row : next.rows) {
    if (next.rotated) row.padding -= 1;
    row.offset += 1;
    row.stored = std::min(row.stored + 1, ring_size());
  }
  buffer_ = std::move(buffer);
  rows_ = std::move(next.rows);
  columns_written_ += 1;
  idx_ = next.idx + 1;
  rotated_ = next.rotated;
}

void BatchRingCache::append_one(const KVColumns& added) {
  NextColumn next = next_column();
  const int have = next.columns ? next.columns->width() : 0;
  KVColumns buffer = next.columns ? *next.columns : added.zeros(next.capacity);
  if (next.columns && have < next.capacity) {
    buffer = concatenate_columns({buffer, added.zeros(next.capacity - have)});
  }
  if (const auto sinks = next_sinks(added, next.rows)) buffer = buffer.written(0, *sinks);
  buffer = buffer.written(keep_ + next.idx, added);
  commit(std::move(next), std::move(buffer));
}

mx::array BatchRingCache::attend(const mx::array& queries, const mx::array& keys, const mx::array& values,
                                 const AttentionOptions& options) {
  return attend_by_projections(*this, queries, keys, values, options);
}

// One column without first tokens is the kernel's; prompts go in parts.
mx::array BatchRingCache::attend_projections(const Projections& projections, const AttentionOptions& options) {
  const bool fused = FusedStep::takes(projections, buffer_) && projections.queries.shape(1) == 1 &&
                     !is_in_padded_prompt() && !brings_sinks(1, rows_);
  if (!fused) return attend_projections_in_parts(projections, options);
  const std::string function = class_name() + "::attend_projections";
  const FusedStep step(function, projections, options, buffer_, quantization_);
  if (step.batch_size() != batch_size()) {
    fail(ErrorCode::invalid_argument, function, "projections must have " + std::to_string(batch_size()) + " rows",
         step.batch_size());
  }
  int counted = columns_written_;
  for (const Row& row : rows_) counted = std::max(counted, row.offset);
  check_countable(function, counted, 1);

  pending_.before_update(buffer_);
  NextColumn next = next_column();
  const int visible = keep_ + (next.rotated ? ring_size() : next.idx + 1);
  StepResult result = step.run(next.columns, {keep_ + next.idx, visible, next.capacity}, offset());
  commit(std::move(next), std::move(result.buffer));
  return result.output;
}

bool BatchRingCache::brings_sinks(int width, const std::vector<Row>& rows) const {
  return std::any_of(rows.begin(), rows.end(),
                     [&](const Row& row) { return row.offset < keep_ && row.offset + width > 0; });
}

std::optional<KVColumns> BatchRingCache::next_sinks(const KVColumns& added, const std::vector<Row>& rows) const {
  if (!brings_sinks(added.width(), rows)) return std::nullopt;
  const KVColumns old = buffer_ ? buffer_->first(keep_) : added.zeros(keep_);
  std::vector<int> from;
  for (const Row& row : rows) {
    for (int sink = 0; sink < keep_; ++sink) {
      const int place = sink - row.offset;
      from.push_back(place >= 0 && place < added.width() ? keep_ + place : sink);
    }
  }
  return take_columns(concatenate_columns({old, added}), from, keep_);
}

KeysValues BatchRingCache::keys_and_values() const {
  if (empty()) {
    throw Error(ErrorCode::failed_precondition,
                "[" + class_name() + "::keys_and_values] a filled cache is needed, but got an empty one");
  }
  return buffer_->first(keep_ + ring_width()).keys_values();
}

// Columns are counted as the row alone would store them: its sinks, then its latest tokens, max_size - 1 in all before
// the new ones. Then the window, and what is older than the row or a sink, are the same distance from the new tokens in
// every row's ring.
Mask BatchRingCache::make_mask(int N, const MaskOptions& options) const {
  const std::string function = class_name() + "::make_mask";
  if (N < 1) fail(ErrorCode::invalid_argument, function, "N must be at least 1", N);
  const int window = std::min(options.window.value_or(max_size_), kWidestWindow);
  if (window < 1) fail(ErrorCode::invalid_argument, function, "window must be at least 1", window);

  const int before = std::min(ring_width(), ring_size() - 1);
  std::vector<int> places, hidden;
  for (const Row& row : rows_) {
    const int place = std::min(max_size_ - 1, row.offset - row.filler());
    places.push_back(place);
    hidden.push_back(before - std::min(place - keep_, row.stored - row.filler()));
  }
  mx::array mask =
      create_causal_mask(N, before, {.window = window, .right_padding = {}, .left_padding = int_array(hidden)});
  if (N == 1 && ring_width() >= ring_size()) {
    const int column = idx_ >= ring_size() ? 0 : idx_;
    mask = mx::roll(mask, column + 1, -1);
  }
  if (keep_ > 0) mask = mx::concatenate({sink_mask(N, keep_, window, places), mask}, -1);
  return mask;
}

KVColumns BatchRingCache::temporal_ring_of(const KVColumns& buffer) const {
  const KVColumns columns = ring_of(buffer);
  if (!rotated_ || idx_ == ring_size()) return columns.first(ring_width());
  return concatenate_columns({columns.slice(idx_, ring_size()), columns.first(idx_)});
}

KVColumns BatchRingCache::with_sinks(const KVColumns& sinks, const KVColumns& ring) const {
  return keep_ == 0 ? ring : concatenate_columns({sinks, ring});
}

}  // namespace reprise::internal
