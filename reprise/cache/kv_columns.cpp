#include "reprise/cache/kv_columns.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/dynamic_roll.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

constexpr int kColumnAxis = 2;

// Far more than a decode loop ever has under way, and few enough that the graph stays small.
constexpr int kMaxUnevaluatedUpdates = 64;

[[noreturn]] void fail(const std::string& function, const std::string& what, const std::string& got) {
  throw Error(ErrorCode::invalid_argument, "[" + function + "] " + what + ", but got " + got);
}

std::string describe(const mx::array& x) {
  std::ostringstream text;
  text << x.dtype() << " " << x.shape();
  return text.str();
}

std::vector<mx::array> quantized_tensors(const mx::array& x, const KVQuantization& quantization) {
  if (x.size() > 0) return mx::quantize(x, quantization.group_size, quantization.bits);
  mx::Shape packed = x.shape();
  mx::Shape scales = x.shape();
  packed.back() = packed.back() * quantization.bits / 32;
  scales.back() = scales.back() / quantization.group_size;
  return {mx::zeros(packed, mx::uint32), mx::zeros(scales, x.dtype()), mx::zeros(scales, x.dtype())};
}

void check_divides(const std::string& function, const char* name, const mx::array& x,
                   const KVQuantization& quantization) {
  if (x.shape(3) % quantization.group_size == 0) return;
  fail(function,
       std::string("the head size of ") + name + " must be a multiple of the group size " +
           std::to_string(quantization.group_size),
       describe(x));
}

// Dv may be 0: what only selects keys (an index of blocks) stores no values.
void check_rows(const std::string& function, const mx::array& keys, const mx::array& values, bool may_lack_rows) {
  if (keys.ndim() != 4) fail(function, "keys must be [B, Hkv, L, D]", describe(keys));
  if (values.ndim() != 4) fail(function, "values must be [B, Hkv, L, Dv]", describe(values));
  const std::string both = describe(keys) + " and " + describe(values);
  for (int axis = 0; axis < 3; ++axis) {
    if (keys.shape(axis) != values.shape(axis)) fail(function, "keys and values must agree in B, Hkv and L", both);
  }
  for (int axis : {0, 1, 3}) {
    if (axis == 0 && may_lack_rows) continue;
    if (keys.shape(axis) < 1) fail(function, "B, Hkv and D must be at least 1", both);
  }
  if (!mx::issubdtype(keys.dtype(), mx::floating) || !mx::issubdtype(values.dtype(), mx::floating)) {
    fail(function, "keys and values must be of a floating dtype", both);
  }
}

// Columns that growth appends for `rows` new rows.
int grown_columns(int rows) { return (rows + kColumnStep - 1) / kColumnStep * kColumnStep; }

KVColumns concatenated(const std::vector<KVColumns>& parts, int axis) {
  if (parts.size() == 1) return parts.front();
  std::vector<mx::array> tensors;
  for (std::size_t i = 0; i < parts.front().tensors().size(); ++i) {
    std::vector<mx::array> arrays;
    for (const KVColumns& part : parts) arrays.push_back(part.tensors()[i]);
    tensors.push_back(mx::concatenate(std::move(arrays), axis));
  }
  return KVColumns(std::move(tensors), parts.front().quantization());
}

}  // namespace

void check_quantization(const std::string& function, const KVQuantization& quantization) {
  const int bits = quantization.bits;
  const int group_size = quantization.group_size;
  if (bits < 2 || bits > 8 || bits == 7) {
    fail(function, "bits must be 2, 3, 4, 5, 6 or 8", std::to_string(bits));
  }
  if (group_size != 32 && group_size != 64 && group_size != 128) {
    fail(function, "group_size must be 32, 64 or 128", std::to_string(group_size));
  }
}

void check_countable(const std::string& function, int stored, int columns) {
  if (columns <= std::numeric_limits<int>::max() - 2 * kColumnStep - stored) return;
  fail(function, "the columns must stay countable by int", std::to_string(stored) + " + " + std::to_string(columns));
}

void check_first_rows(const std::string& function, const std::optional<KVColumns>& buffer, const KVColumns& rows) {
  if (buffer || rows.width() > 0) return;
  fail(function, "an empty cache needs at least one column", describe(rows.tensors().front()));
}

KVColumns KVColumns::encode(const std::string& function, const mx::array& keys, const mx::array& values,
                            const std::optional<KVQuantization>& quantization, bool may_lack_rows) {
  check_rows(function, keys, values, may_lack_rows);
  if (!quantization) return KVColumns({keys, values}, std::nullopt);
  check_divides(function, "keys", keys, *quantization);
  check_divides(function, "values", values, *quantization);
  return KVColumns({keys, values}, std::nullopt).quantized(function, *quantization);
}

std::size_t KVColumns::nbytes() const {
  std::size_t bytes = 0;
  for (const mx::array& tensor : tensors_) bytes += tensor.nbytes();
  return bytes;
}

void KVColumns::check_like(const std::string& function, const KVColumns& rows, bool any_batch) const {
  if (quantization_ != rows.quantization_) {
    fail(function, "rows must be stored in one form", quantization_ ? "another quantisation" : "quantised ones");
  }
  const char* const dense_names[] = {"keys", "values"};
  const char* const quantized_names[] = {"packed keys",   "scales of keys",   "biases of keys",
                                         "packed values", "scales of values", "biases of values"};
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const mx::array& stored = tensors_[i];
    const mx::array& added = rows.tensors_[i];
    const std::string name = quantization_ ? quantized_names[i] : dense_names[i];
    for (int axis : {0, 1, 3}) {
      if (axis == 0 && any_batch) continue;
      if (added.shape(axis) != stored.shape(axis)) {
        fail(function, name + " must agree with the stored " + describe(stored) + " in all axes but the third",
             describe(added));
      }
    }
    if (added.dtype() != stored.dtype()) {
      fail(function, name + " must have the dtype of the stored " + describe(stored), describe(added));
    }
  }
}

KVColumns KVColumns::slice(int begin, int end) const {
  if (begin == 0 && end == width()) return *this;
  std::vector<mx::array> tensors;
  for (const mx::array& tensor : tensors_) {
    mx::Shape start(tensor.ndim(), 0);
    mx::Shape stop = tensor.shape();
    start[kColumnAxis] = begin;
    stop[kColumnAxis] = end;
    tensors.push_back(mx::slice(tensor, std::move(start), std::move(stop)));
  }
  return KVColumns(std::move(tensors), quantization_);
}

// MLX writes in place when this buffer's only user at evaluation is the update (no view, fork or state of it is alive),
// else it copies. So arrays handed out are values, and decoding moves no memory.
KVColumns KVColumns::written(int at, const KVColumns& rows) const {
  std::vector<mx::array> tensors;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    mx::Shape start(tensors_[i].ndim(), 0);
    mx::Shape stop = tensors_[i].shape();
    start[kColumnAxis] = at;
    stop[kColumnAxis] = at + rows.width();
    tensors.push_back(mx::slice_update(tensors_[i], rows.tensors_[i], std::move(start), std::move(stop)));
  }
  return KVColumns(std::move(tensors), quantization_);
}

KVColumns KVColumns::zeros(int columns, std::optional<int> batch_size) const {
  std::vector<mx::array> tensors;
  for (const mx::array& tensor : tensors_) {
    mx::Shape shape = tensor.shape();
    shape[kColumnAxis] = columns;
    if (batch_size) shape[0] = *batch_size;
    tensors.push_back(mx::zeros(shape, tensor.dtype()));
  }
  return KVColumns(std::move(tensors), quantization_);
}

KVColumns KVColumns::contiguous() const {
  std::vector<mx::array> tensors;
  for (const mx::array& tensor : tensors_) tensors.push_back(mx::contiguous(tensor));
  return KVColumns(std::move(tensors), quantization_);
}

KVColumns KVColumns::take_rows(const std::vector<int>& rows) const {
  if (rows.empty()) return zeros(width(), 0);
  const mx::array indices(rows.begin(), mx::Shape{static_cast<mx::ShapeElem>(rows.size())}, mx::int32);
  std::vector<mx::array> tensors;
  for (const mx::array& tensor : tensors_) tensors.push_back(mx::take(tensor, indices, 0));
  return KVColumns(std::move(tensors), quantization_);
}

KVColumns KVColumns::rolled(const std::vector<int>& shifts) const {
  if (std::all_of(shifts.begin(), shifts.end(), [](int shift) { return shift == 0; })) return *this;
  const mx::array distances(shifts.begin(), mx::Shape{static_cast<mx::ShapeElem>(shifts.size())}, mx::int32);
  std::vector<mx::array> tensors;
  for (const mx::array& tensor : tensors_) tensors.push_back(dynamic_roll(tensor, distances, kColumnAxis));
  return KVColumns(std::move(tensors), quantization_);
}

KVColumns KVColumns::padded(int before, int after) const {
  std::vector<KVColumns> parts;
  if (before > 0) parts.push_back(zeros(before));
  parts.push_back(*this);
  if (after > 0) parts.push_back(zeros(after));
  return concatenate_columns(parts);
}

KVColumns KVColumns::quantized(const std::string& function, const KVQuantization& quantization) const {
  check_quantization(function, quantization);
  if (quantization_) fail(function, "rows must be dense", "quantised ones");
  check_divides(function, "keys", tensors_[0], quantization);
  check_divides(function, "values", tensors_[1], quantization);
  // MLX says so only at evaluation.
  for (const mx::array& tensor : tensors_) {
    if (tensor.dtype() == mx::float64) fail(function, "rows of float64 cannot be quantised", describe(tensor));
  }
  std::vector<mx::array> tensors = quantized_tensors(tensors_[0], quantization);
  for (mx::array& tensor : quantized_tensors(tensors_[1], quantization)) tensors.push_back(std::move(tensor));
  return KVColumns(std::move(tensors), quantization);
}

KVColumns KVColumns::dequantized() const {
  if (!quantization_) return *this;
  std::vector<mx::array> tensors;
  for (std::size_t i : {0u, 3u}) {
    const auto& [group_size, bits] = *quantization_;
    if (tensors_[i].size() > 0) {
      tensors.push_back(mx::dequantize(tensors_[i], tensors_[i + 1], tensors_[i + 2], group_size, bits));
    } else {
      mx::Shape shape = tensors_[i + 1].shape();
      shape.back() *= group_size;
      tensors.push_back(mx::zeros(shape, tensors_[i + 1].dtype()));
    }
  }
  return KVColumns(std::move(tensors), std::nullopt);
}

KeysValues KVColumns::keys_values() const {
  if (!quantization_) return DenseKV{tensors_[0], tensors_[1]};
  return QuantizedKV{{tensors_[0], tensors_[1], tensors_[2]}, {tensors_[3], tensors_[4], tensors_[5]}, *quantization_};
}

State KVColumns::keys_state() const {
  if (!quantization_) return State(tensors_[0]);
  return State(State::List{State(tensors_[0]), State(tensors_[1]), State(tensors_[2])});
}

State KVColumns::values_state() const {
  if (!quantization_) return State(tensors_[1]);
  return State(State::List{State(tensors_[3]), State(tensors_[4]), State(tensors_[5])});
}

bool KVColumns::is_unevaluated() const {
  return std::any_of(tensors_.begin(), tensors_.end(),
                     [](const mx::array& tensor) { return tensor.status() == mx::array::Status::unscheduled; });
}

void KVColumns::eval() const { mx::eval(tensors_); }

KVColumns concatenate_columns(const std::vector<KVColumns>& parts) { return concatenated(parts, kColumnAxis); }

KVColumns concatenate_rows(const std::vector<KVColumns>& parts) { return concatenated(parts, 0); }

int grown_capacity(const std::optional<KVColumns>& buffer, int stored, int rows) {
  if (buffer && stored + rows <= buffer->width()) return buffer->width();
  const int kept = !buffer ? 0 : stored % kColumnStep == 0 ? buffer->width() : stored;
  return kept + grown_columns(rows);
}

KVColumns grown(const std::optional<KVColumns>& buffer, int stored, const KVColumns& rows) {
  if (buffer && stored + rows.width() <= buffer->width()) return buffer->written(stored, rows);
  const int slack = grown_capacity(buffer, stored, rows.width()) - stored - rows.width();
  std::vector<KVColumns> parts;
  if (stored > 0) parts.push_back(buffer->first(stored));
  parts.push_back(rows);
  if (slack > 0) parts.push_back(rows.zeros(slack));
  return parts.size() == 1 ? rows.contiguous() : concatenate_columns(parts);
}

void PendingUpdates::before_update(const std::optional<KVColumns>& buffer) {
  count_ = buffer && buffer->is_unevaluated() ? count_ + 1 : 0;
  if (count_ <= kMaxUnevaluatedUpdates) return;
  buffer->eval();
  count_ = 0;
}

}  // namespace reprise::internal
