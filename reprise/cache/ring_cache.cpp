#include "reprise/cache/ring_cache.h"

#include <algorithm>
#include <cstdint>

#include "reprise/base/error.h"
#include "reprise/cache/fused_attention.h"
#include "reprise/nn/masks.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

[[noreturn]] void fail(ErrorCode code, const std::string& function, const std::string& what, int got) {
  throw Error(code, "[" + function + "] " + what + ", but got " + std::to_string(got));
}

void check_sizes(ErrorCode code, const std::string& function, int max_size, int keep) {
  if (max_size < 1) fail(code, function, "max_size must be at least 1", max_size);
  if (keep < 0 || keep >= max_size) {
    fail(code, function, "keep must lie in [0, " + std::to_string(max_size - 1) + "]", keep);
  }
}

}  // namespace

void check_ring(const std::string& function, std::optional<int> width, const RingNumbers& numbers) {
  const auto& [offset, keep, max_size, idx] = numbers;
  const ErrorCode code = ErrorCode::corrupt_data;
  check_sizes(code, function, max_size, keep);
  if (offset < 0) fail(code, function, "offset must not be negative", offset);
  const int columns = width.value_or(0);
  // Rows are missing only where some were evicted.
  if (offset > columns && (!width || offset < max_size)) {
    fail(code, function, "offset must be at most the " + std::to_string(columns) + " stored columns", offset);
  }
  if (offset < columns && columns > max_size) {
    fail(code, function, "offset must be at least the " + std::to_string(columns) + " columns, more than max_size",
         offset);
  }
  const bool may_be_wrapped = offset > columns && columns == max_size;
  const int low = may_be_wrapped ? keep : std::min(offset, columns);
  const int high = std::min(offset, columns);
  if (idx < low || idx > high) {
    fail(code, function, "idx must lie in [" + std::to_string(low) + ", " + std::to_string(high) + "]", idx);
  }
}

RingCache::RingCache(const std::string& function, int max_size, int keep, std::optional<KVQuantization> quantization)
    : max_size_(max_size), keep_(keep), quantization_(quantization) {
  check_sizes(ErrorCode::invalid_argument, function, max_size, keep);
}

void RingCache::adopt(std::optional<KVColumns> buffer, int offset, int idx) {
  buffer_ = std::move(buffer);
  offset_ = offset;
  idx_ = idx;
}

int RingCache::size() const { return std::min(offset_, max_size_); }

int RingCache::stored() const { return std::min(offset_, width()); }

int RingCache::trim(int n) {
  if (n < 0) fail(ErrorCode::invalid_argument, class_name() + "::trim", "n must not be negative", n);
  if (!is_trimmable()) return 0;
  const int trimmed = std::min(n, offset_);
  offset_ -= trimmed;
  idx_ -= trimmed;
  return trimmed;
}

KeysValues RingCache::update_and_fetch(const mx::array& keys, const mx::array& values) {
  const std::string function = class_name() + "::update_and_fetch";
  const KVColumns rows = KVColumns::encode(function, keys, values, quantization_);
  if (buffer_) buffer_->check_like(function, rows);
  check_first_rows(function, buffer_, rows);
  if (rows.width() == 0) return keys_and_values();
  check_countable(function, offset_, rows.width());

  pending_.before_update(buffer_);
  const bool chunk = rows.width() > 1;
  KVColumns next = chunk ? with_chunk(rows) : with_token(rows);
  const int next_idx = chunk ? next.width() : write_column() + 1;
  const int next_offset = offset_ + rows.width();
  KeysValues visible = next.first(std::min(next_offset, next.width())).keys_values();
  adopt(std::move(next), next_offset, next_idx);
  return visible;
}

KeysValues RingCache::keys_and_values() const {
  if (empty()) {
    throw Error(ErrorCode::failed_precondition,
                "[" + class_name() + "::keys_and_values] a filled cache is needed, but got an empty one");
  }
  return buffer_->first(stored()).keys_values();
}

// So few old columns stay that every new token sees at least max_size of context, itself included, whatever the
// chunk's length.
KVColumns RingCache::with_chunk(const KVColumns& rows) const {
  std::vector<KVColumns> parts = columns_of(temporal_spans(std::max(0, stored() - max_size_ + 1)));
  if (parts.empty()) return rows.contiguous();
  parts.push_back(rows);
  return concatenate_columns(parts);
}

KVColumns RingCache::with_token(const KVColumns& row) const {
  if (offset_ >= width() && width() < max_size_) {
    // What a buffer that lost rows elsewhere has to spare is not known to be unused, so it grows by what it gets.
    const int added = offset_ > width() ? 1 : std::min(kColumnStep, max_size_ - width());
    std::vector<KVColumns> parts;
    if (width() > 0) parts.push_back(*buffer_);
    parts.push_back(row);
    if (added > 1) parts.push_back(row.zeros(added - 1));
    return parts.size() == 1 ? row.contiguous() : concatenate_columns(parts);
  }
  if (width() > max_size_) {
    // The surplus goes, and the new row takes the place of the oldest that is left.
    std::vector<KVColumns> parts;
    if (keep_ > 0) parts.push_back(buffer_->first(keep_));
    parts.push_back(row);
    const int begin = width() - max_size_ + keep_ + 1;
    if (begin < width()) parts.push_back(buffer_->slice(begin, width()));
    return parts.size() == 1 ? row.contiguous() : concatenate_columns(parts);
  }
  return buffer_->written(write_column(), row);
}

RingCache::Place RingCache::place_for(int count) const {
  if (count > 1) {
    const std::vector<KVColumns> parts = columns_of(temporal_spans(std::max(0, stored() - max_size_ + 1)));
    // A buffer without rows still tells the dtype.
    if (parts.empty()) return {buffer_ ? std::optional(buffer_->first(0)) : std::nullopt, 0, count};
    KVColumns old = concatenate_columns(parts);
    const int kept = old.width();
    return {std::move(old), kept, kept + count};
  }
  if (offset_ >= width() && width() < max_size_) {
    const int added = offset_ > width() ? 1 : std::min(kColumnStep, max_size_ - width());
    return {buffer_, width(), width() + added};
  }
  if (width() > max_size_) {
    std::vector<KVColumns> parts;
    if (keep_ > 0) parts.push_back(buffer_->first(keep_));
    parts.push_back(buffer_->zeros(1));
    const int begin = width() - max_size_ + keep_ + 1;
    if (begin < width()) parts.push_back(buffer_->slice(begin, width()));
    return {concatenate_columns(parts), keep_, max_size_};
  }
  return {buffer_, write_column(), width()};
}

mx::array RingCache::attend(const mx::array& queries, const mx::array& keys, const mx::array& values,
                            const AttentionOptions& options) {
  return attend_by_projections(*this, queries, keys, values, options);
}

mx::array RingCache::attend_projections(const Projections& projections, const AttentionOptions& options) {
  if (!FusedStep::takes(projections, buffer_)) return attend_projections_in_parts(projections, options);
  const std::string function = class_name() + "::attend_projections";
  const FusedStep step(function, projections, options, buffer_, quantization_);
  const int count = step.width();
  check_countable(function, offset_, count);

  pending_.before_update(buffer_);
  const Place place = place_for(count);
  const int next_offset = offset_ + count;
  const int visible = std::min(next_offset, place.capacity);
  StepResult result = step.run(place.columns, {place.at, visible, place.capacity}, offset_);
  adopt(std::move(result.buffer), next_offset, place.at + count);
  return result.output;
}

int RingCache::write_column() const { return idx_ >= max_size_ ? keep_ : idx_; }

Mask RingCache::make_mask(int N, const MaskOptions& options) const {
  const std::string function = class_name() + "::make_mask";
  if (N < 1) fail(ErrorCode::invalid_argument, function, "N must be at least 1", N);
  if (options.window && *options.window < 1) {
    fail(ErrorCode::invalid_argument, function, "window must be at least 1", *options.window);
  }
  if (N > 1) {
    const int window = options.window.value_or(max_size_);
    const int before = std::min(max_size_ - 1, stored());
    if (before + N <= window && !options.return_array) return Causal{};
    return create_causal_mask(N, before, {.window = window});
  }
  if (!options.window || offset_ < *options.window || *options.window >= max_size_) return NoMask{};

  // The columns as they will lie after the write.
  const int columns = std::min(stored() + 1, max_size_);
  const int hidden = columns - *options.window;
  const int after = write_column() + 1;
  const int kept = std::min(keep_, columns);
  std::vector<std::uint8_t> visible(static_cast<std::size_t>(columns));
  for (int column = 0; column < columns; ++column) {
    const int age_rank = column < kept ? column : column >= after ? kept + column - after : column + columns - after;
    visible[static_cast<std::size_t>(column)] = age_rank >= hidden;
  }
  return mx::array(visible.begin(), mx::Shape{columns}, mx::bool_);
}

std::vector<RingCache::Span> RingCache::temporal_spans(int dropped) const {
  const int rows = stored();
  const int kept = std::min(keep_, rows);
  const int oldest = offset_ > width() ? idx_ : rows;
  std::vector<Span> spans = {{0, kept}, {oldest, rows}, {kept, oldest}};
  for (std::size_t i : {1u, 2u}) {
    const int length = std::min(dropped, spans[i].end - spans[i].begin);
    spans[i].begin += length;
    dropped -= length;
  }
  return spans;
}

std::vector<KVColumns> RingCache::columns_of(const std::vector<Span>& spans) const {
  std::vector<KVColumns> parts;
  for (const Span& span : spans) {
    if (span.begin < span.end) parts.push_back(buffer_->slice(span.begin, span.end));
  }
  return parts;
}

std::optional<KVColumns> RingCache::temporal_columns() const {
  if (empty()) return std::nullopt;
  if (idx_ == stored()) return buffer_->first(stored());
  return concatenate_columns(columns_of(temporal_spans(0)));
}

State::List RingCache::keys_values_state(bool saved) const {
  if (empty()) return {State(), State()};
  const KVColumns columns = saved ? buffer_->first(stored()).contiguous() : *buffer_;
  return {columns.keys_state(), columns.values_state()};
}

}  // namespace reprise::internal
