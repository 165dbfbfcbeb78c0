// Rows are written with slice_update: MLX writes in place when this object is the buffer's only user at evaluation (no
// view, fork or state of it is alive), else it copies. So arrays handed out are values, and decoding moves no memory.
#include "reprise/cache/kv_cache.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/state_reader.h"
#include "reprise/nn/masks.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

constexpr int kColumnAxis = 2;

// Far more than a decode loop ever has under way, and few enough that the graph stays small.
constexpr int kMaxUnevaluatedUpdates = 64;

bool is_unevaluated(const mx::array& buffer) { return buffer.status() == mx::array::Status::unscheduled; }

std::string describe(const mx::array& x) {
  std::ostringstream text;
  text << x.dtype() << " " << x.shape();
  return text.str();
}

[[noreturn]] void fail(const std::string& what, const std::string& got) {
  throw Error(ErrorCode::invalid_argument, "[KVCache::update_and_fetch] " + what + ", but got " + got);
}

// The first `columns` columns; the array itself when that is all of them.
mx::array first_columns(const mx::array& buffer, int columns) {
  mx::Shape stop = buffer.shape();
  stop[kColumnAxis] = columns;
  return mx::slice(buffer, mx::Shape(buffer.ndim(), 0), std::move(stop));
}

mx::array zero_columns(const mx::array& like, int columns) {
  mx::Shape shape = like.shape();
  shape[kColumnAxis] = columns;
  return mx::zeros(shape, like.dtype());
}

// Columns that growth appends for `rows` new rows.
int grown_columns(int rows) { return (rows + KVCache::kStep - 1) / KVCache::kStep * KVCache::kStep; }

// `stored` columns of `buffer` (null: none), then `rows`, then zeros up to the capacity of mlx-lm's growth rule: slack
// stays when `stored` is a multiple of the step.
mx::array grown(const std::optional<mx::array>& buffer, int stored, const mx::array& rows) {
  const int kept_capacity = !buffer ? 0 : stored % KVCache::kStep == 0 ? buffer->shape(kColumnAxis) : stored;
  const int num_rows = rows.shape(kColumnAxis);
  const int slack = kept_capacity + grown_columns(num_rows) - stored - num_rows;
  std::vector<mx::array> parts;
  if (stored > 0) parts.push_back(first_columns(*buffer, stored));
  parts.push_back(rows);
  if (slack > 0) parts.push_back(zero_columns(rows, slack));
  return parts.size() == 1 ? mx::contiguous(rows) : mx::concatenate(std::move(parts), kColumnAxis);
}

mx::array written(const mx::array& buffer, int at, const mx::array& rows) {
  mx::Shape start(buffer.ndim(), 0);
  mx::Shape stop = buffer.shape();
  start[kColumnAxis] = at;
  stop[kColumnAxis] = at + rows.shape(kColumnAxis);
  return mx::slice_update(buffer, rows, std::move(start), std::move(stop));
}

// Saved and legacy state: dense, and no larger than the rows it holds.
mx::array cut(const mx::array& buffer, int columns) { return mx::contiguous(first_columns(buffer, columns)); }

void check_new_rows(const mx::array& keys, const mx::array& values) {
  if (keys.ndim() != 4) fail("keys must be [B, Hkv, L, D]", describe(keys));
  if (values.ndim() != 4) fail("values must be [B, Hkv, L, Dv]", describe(values));
  for (int axis = 0; axis < 3; ++axis) {
    if (keys.shape(axis) != values.shape(axis)) {
      fail("keys and values must agree in B, Hkv and L", describe(keys) + " and " + describe(values));
    }
  }
  for (int axis : {0, 1, 3}) {
    if (keys.shape(axis) < 1 || values.shape(axis) < 1) {
      fail("B, Hkv, D and Dv must be at least 1", describe(keys) + " and " + describe(values));
    }
  }
  if (!mx::issubdtype(keys.dtype(), mx::floating) || !mx::issubdtype(values.dtype(), mx::floating)) {
    fail("keys and values must be of a floating dtype", describe(keys) + " and " + describe(values));
  }
}

void check_like_stored(const char* name, const mx::array& rows, const mx::array& buffer) {
  for (int axis : {0, 1, 3}) {
    if (rows.shape(axis) != buffer.shape(axis)) {
      fail(std::string(name) + " must agree with the stored " + describe(buffer) + " in all axes but the third",
           describe(rows));
    }
  }
  if (rows.dtype() != buffer.dtype()) {
    fail(std::string(name) + " must have the dtype of the stored " + describe(buffer), describe(rows));
  }
}

}  // namespace

std::unique_ptr<KVCache> KVCache::from_state(const State& state) {
  const internal::StateReader reader("KVCache::from_state", state, {"keys", "values", "offset"});
  auto cache = std::make_unique<KVCache>();
  if (auto buffers = reader.keys_values(0, 1)) {
    const int columns = buffers->keys.shape(kColumnAxis);
    cache->offset_ = reader.integer(2, 0, columns);
    cache->keys_ = std::move(buffers->keys);
    cache->values_ = std::move(buffers->values);
  } else {
    cache->offset_ = reader.integer(2, 0, 0);
  }
  return cache;
}

std::unique_ptr<KVCache> KVCache::from_legacy(const State& state, const Meta& meta) {
  const internal::StateReader reader("KVCache::from_legacy", state, {"keys", "values"});
  const internal::MetaReader no_items("KVCache::from_legacy", meta, {});
  auto cache = std::make_unique<KVCache>();
  if (auto buffers = reader.keys_values(0, 1)) {
    cache->offset_ = buffers->keys.shape(kColumnAxis);
    cache->keys_ = std::move(buffers->keys);
    cache->values_ = std::move(buffers->values);
  }
  return cache;
}

std::size_t KVCache::nbytes() const { return empty() ? 0 : keys_->nbytes() + values_->nbytes(); }

int KVCache::trim(int n) {
  if (n < 0) {
    throw Error(ErrorCode::invalid_argument, "[KVCache::trim] n must not be negative, but got " + std::to_string(n));
  }
  const int trimmed = std::min(n, offset_);
  offset_ -= trimmed;
  return trimmed;
}

State KVCache::state() const {
  if (empty()) return State::List{State(), State(), State(offset_)};
  return State::List{State(*keys_), State(*values_), State(offset_)};
}

State KVCache::saved_state() const {
  if (empty()) return state();
  return State::List{State(cut(*keys_, offset_)), State(cut(*values_, offset_)), State(offset_)};
}

State KVCache::legacy_state() const {
  if (empty()) return State::List{State(), State()};
  return State::List{State(cut(*keys_, offset_)), State(cut(*values_, offset_))};
}

Meta KVCache::legacy_meta() const { return {}; }

std::unique_ptr<LayerCache> KVCache::fork() const { return std::make_unique<KVCache>(*this); }

KeysValues KVCache::update_and_fetch(const mx::array& keys, const mx::array& values) {
  check_new_rows(keys, values);
  if (!empty()) {
    check_like_stored("keys", keys, *keys_);
    check_like_stored("values", values, *values_);
  }
  const int num_rows = keys.shape(kColumnAxis);
  if (num_rows == 0) {
    if (empty()) fail("an empty cache needs at least one row", describe(keys));
    return keys_and_values();
  }
  if (num_rows > std::numeric_limits<int>::max() - 2 * kStep - capacity()) {
    fail("the columns must stay countable by int", describe(keys));
  }

  const bool pending = !empty() && (is_unevaluated(*keys_) || is_unevaluated(*values_));
  int num_unevaluated_updates = pending ? num_unevaluated_updates_ + 1 : 0;
  if (num_unevaluated_updates > kMaxUnevaluatedUpdates) {
    mx::eval(*keys_, *values_);
    num_unevaluated_updates = 0;
  }

  const bool fits = !empty() && offset_ + num_rows <= capacity();
  mx::array next_keys = fits ? written(*keys_, offset_, keys) : grown(keys_, offset_, keys);
  mx::array next_values = fits ? written(*values_, offset_, values) : grown(values_, offset_, values);
  const int next_offset = offset_ + num_rows;
  DenseKV visible{first_columns(next_keys, next_offset), first_columns(next_values, next_offset)};

  keys_ = std::move(next_keys);
  values_ = std::move(next_values);
  offset_ = next_offset;
  num_unevaluated_updates_ = num_unevaluated_updates;
  return visible;
}

KeysValues KVCache::keys_and_values() const {
  if (empty()) {
    throw Error(ErrorCode::failed_precondition,
                "[KVCache::keys_and_values] a filled cache is needed, but got an empty one");
  }
  return DenseKV{first_columns(*keys_, offset_), first_columns(*values_, offset_)};
}

Mask KVCache::make_mask(int N, const MaskOptions& options) const {
  return create_attention_mask(N, offset_, {options.return_array, options.window});
}

void KVCache::restore(LayerCache&& earlier) { *this = std::move(dynamic_cast<KVCache&>(earlier)); }

int KVCache::capacity() const { return empty() ? 0 : keys_->shape(kColumnAxis); }

}  // namespace reprise
