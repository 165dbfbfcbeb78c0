// Keys and values as columns of a buffer, dense or quantised: what every attention cache is made of. All tensors of one
// KVColumns share B, Hkv and the columns (axis 2), so moving columns or rows is the same work for two arrays or six.
// Threads: values; arrays follow MLX's rule.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/state.h"
#include "reprise/nn/keys_values.h"

namespace reprise::internal {

class KVColumns {
 public:
  // New rows as a cache stores them: keys [B, Hkv, L, D], values [B, Hkv, L, Dv], quantised row by row when asked.
  // Throws: invalid_argument for shapes or dtypes that do not fit, B < 1 unless `may_lack_rows`, or a head size that
  // the group size does not divide. `function` opens the message.
  static KVColumns encode(const std::string& function, const mlx::core::array& keys, const mlx::core::array& values,
                          const std::optional<KVQuantization>& quantization, bool may_lack_rows = false);

  // `tensors`: keys then values, one array or three each. Requires: they fit each other.
  KVColumns(std::vector<mlx::core::array> tensors, std::optional<KVQuantization> quantization)
      : tensors_(std::move(tensors)), quantization_(quantization) {}

  int batch_size() const { return tensors_.front().shape(0); }
  int width() const { return tensors_.front().shape(2); }  // columns
  std::size_t nbytes() const;
  const std::optional<KVQuantization>& quantization() const { return quantization_; }
  const std::vector<mlx::core::array>& tensors() const { return tensors_; }

  // Throws: invalid_argument unless `rows` agree with these columns in all but the number of columns (and of batch rows
  // when `any_batch`).
  void check_like(const std::string& function, const KVColumns& rows, bool any_batch = false) const;

  // Columns begin … end - 1, as views. All of them: the same arrays.
  KVColumns slice(int begin, int end) const;
  KVColumns first(int columns) const { return slice(0, columns); }
  // The columns from `at` on replaced by `rows`: in place when nobody else can see the buffer at evaluation.
  KVColumns written(int at, const KVColumns& rows) const;
  // Zero columns (quantised: they dequantise to 0) in this one's form. `batch_size`: none for this one's.
  KVColumns zeros(int columns, std::optional<int> batch_size = {}) const;
  // Copies of exactly these columns, sharing nothing with a larger buffer.
  KVColumns contiguous() const;
  // Batch rows, copied, in this order. An empty list gives B = 0.
  KVColumns take_rows(const std::vector<int>& rows) const;
  // Each batch row rolled right by its own shift. See dynamic_roll.
  KVColumns rolled(const std::vector<int>& shifts) const;
  // Zero columns before and after.
  KVColumns padded(int before, int after) const;

  KVColumns quantized(const std::string& function, const KVQuantization& quantization) const;
  KVColumns dequantized() const;

  KeysValues keys_values() const;
  State keys_state() const;
  State values_state() const;

  bool is_unevaluated() const;
  void eval() const;

 private:
  std::vector<mlx::core::array> tensors_;  // 2, or 6 when quantised
  std::optional<KVQuantization> quantization_;
};

// Side by side: columns of one after the columns of the other. Requires: at least one part.
KVColumns concatenate_columns(const std::vector<KVColumns>& parts);
// One below the other: batch rows.
KVColumns concatenate_rows(const std::vector<KVColumns>& parts);

// mlx-lm's growing buffer: `rows` written behind the first `stored` columns of `buffer` (null: none yet). When they do
// not fit, the buffer is cut to `stored` unless that is a multiple of the step, and ⌈L / step⌉ · step columns are
// added.
inline constexpr int kColumnStep = 256;
// The columns that it has then.
int grown_capacity(const std::optional<KVColumns>& buffer, int stored, int rows);
KVColumns grown(const std::optional<KVColumns>& buffer, int stored, const KVColumns& rows);

// Throws: invalid_argument when `columns` more cannot be counted by int.
void check_countable(const std::string& function, int stored, int columns);

// Throws: invalid_argument for rows of no columns where there is no buffer yet.
void check_first_rows(const std::string& function, const std::optional<KVColumns>& buffer, const KVColumns& rows);

// Throws: invalid_argument for bits or a group size that MLX's affine quantisation does not have.
void check_quantization(const std::string& function, const KVQuantization& quantization);

// Bounds the graph behind a buffer when a model reads only some of it, or none: after 64 updates that nobody evaluated
// it evaluates.
class PendingUpdates {
 public:
  // Before each update of `buffer`.
  void before_update(const std::optional<KVColumns>& buffer);

 private:
  int count_ = 0;
};

}  // namespace reprise::internal
