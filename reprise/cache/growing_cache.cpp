#include "reprise/cache/growing_cache.h"

#include <algorithm>

#include "reprise/base/error.h"
#include "reprise/cache/fused_attention.h"
#include "reprise/nn/masks.h"

namespace reprise::internal {

namespace mx = mlx::core;

int GrowingCache::trim(int n) {
  if (n < 0) {
    throw Error(ErrorCode::invalid_argument,
                "[" + class_name() + "::trim] n must not be negative, but got " + std::to_string(n));
  }
  const int trimmed = std::min(n, length());
  offset_ -= trimmed;
  return trimmed;
}

KeysValues GrowingCache::update_and_fetch(const mx::array& keys, const mx::array& values) {
  const std::string function = class_name() + "::update_and_fetch";
  const KVColumns rows = KVColumns::encode(function, keys, values, quantization_);
  if (buffer_) buffer_->check_like(function, rows);
  check_first_rows(function, buffer_, rows);
  if (rows.width() == 0) return keys_and_values();
  check_countable(function, offset_, rows.width());

  pending_.before_update(buffer_);
  KVColumns next = appended(rows);
  KeysValues visible = next.first(length() + rows.width()).keys_values();
  buffer_ = std::move(next);
  offset_ += rows.width();
  return visible;
}

KeysValues GrowingCache::keys_and_values() const {
  if (empty()) {
    throw Error(ErrorCode::failed_precondition,
                "[" + class_name() + "::keys_and_values] a filled cache is needed, but got an empty one");
  }
  return buffer_->first(length()).keys_values();
}

Mask GrowingCache::make_mask(int N, const MaskOptions& options) const {
  return create_attention_mask(N, length(), {options.return_array, options.window});
}

mx::array GrowingCache::attend(const mx::array& queries, const mx::array& keys, const mx::array& values,
                               const AttentionOptions& options) {
  return attend_by_projections(*this, queries, keys, values, options);
}

mx::array GrowingCache::attend_projections(const Projections& projections, const AttentionOptions& options) {
  if (!FusedStep::takes(projections, buffer_)) return attend_projections_in_parts(projections, options);
  const std::string function = class_name() + "::attend_projections";
  const FusedStep step(function, projections, options, buffer_, quantization_);
  check_countable(function, offset_, step.width());

  pending_.before_update(buffer_);
  const int stored = length();
  StepResult result =
      step.run(buffer_, {stored, stored + step.width(), grown_capacity(buffer_, stored, step.width())}, offset_);
  buffer_ = std::move(result.buffer);
  offset_ += step.width();
  return result.output;
}

State::List GrowingCache::keys_values_state(bool saved) const {
  if (empty()) return {State(), State()};
  const KVColumns columns = saved ? buffer_->first(length()).contiguous() : *buffer_;
  return {columns.keys_state(), columns.values_state()};
}

}  // namespace reprise::internal
