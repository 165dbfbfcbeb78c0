#include "reprise/nn/masks.h"

#include <limits>
#include <string>
#include <variant>

#include "mlx/ops.h"
#include "reprise/base/error.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

void check_at_least(const char* function, const char* name, int value, int least) {
  if (value >= least) return;
  throw Error(ErrorCode::invalid_argument, std::string("[") + function + "] " + name + " must be at least " +
                                               std::to_string(least) + ", but got " + std::to_string(value));
}

// int32 [B] → [B, 1, 1, 1], to compare against [1, 1, 1, columns].
mx::array per_row(const mx::array& padding) {
  if (padding.ndim() != 1) {
    throw Error(ErrorCode::invalid_argument,
                "[create_causal_mask] paddings must be [B], but got rank " + std::to_string(padding.ndim()));
  }
  return mx::reshape(padding, {padding.shape(0), 1, 1, 1});
}

}  // namespace

mx::array create_causal_mask(int N, int offset, const CausalMaskOptions& options) {
  check_at_least("create_causal_mask", "N", N, 1);
  check_at_least("create_causal_mask", "offset", offset, 0);
  if (options.window) check_at_least("create_causal_mask", "window", *options.window, 1);

  if (offset > std::numeric_limits<int>::max() - N) {
    throw Error(ErrorCode::invalid_argument, "[create_causal_mask] offset + N must be countable by int, but got " +
                                                 std::to_string(offset) + " + " + std::to_string(N));
  }
  const int columns = offset + N;
  auto keys = mx::reshape(mx::arange(0, columns, mx::int32), {1, columns});
  auto queries = mx::reshape(mx::arange(offset, columns, mx::int32), {N, 1});
  auto mask = mx::less_equal(keys, queries);
  if (options.window) {
    mask = mx::logical_and(mask, mx::greater(keys, mx::subtract(queries, mx::array(*options.window))));
  }
  if (options.right_padding) {
    auto limit = mx::subtract(mx::array(columns), per_row(*options.right_padding));
    mask = mx::logical_and(mask, mx::less(keys, limit));
  }
  if (options.left_padding) mask = mx::logical_and(mask, mx::greater_equal(keys, per_row(*options.left_padding)));
  return mask;
}

mx::array create_same_chunk_mask(int N, int columns, const Offset& first, int chunk_size) {
  check_at_least("create_same_chunk_mask", "N", N, 1);
  check_at_least("create_same_chunk_mask", "columns", columns, N);
  check_at_least("create_same_chunk_mask", "chunk_size", chunk_size, 1);
  const mx::array keys = mx::reshape(mx::arange(0, columns, mx::int32), {1, columns});
  const mx::array queries = mx::reshape(mx::arange(columns - N, columns, mx::int32), {N, 1});
  const auto chunk_of = [&](const mx::array& column) {
    const auto* rows = std::get_if<mx::array>(&first);
    const mx::array start = rows ? per_row(*rows) : mx::array(std::get<int>(first));
    return mx::floor_divide(mx::add(start, column), mx::array(chunk_size));
  };
  return mx::equal(chunk_of(keys), chunk_of(queries));
}

Mask create_attention_mask(int N, int offset, const AttentionMaskOptions& options) {
  check_at_least("create_attention_mask", "N", N, 1);
  check_at_least("create_attention_mask", "offset", offset, 0);
  if (options.window) return create_causal_mask(N, offset, {.window = options.window});
  if (N == 1) return NoMask{};
  if (options.return_array) return create_causal_mask(N, offset);
  return Causal{};
}

Mask create_attention_mask_without_cache(int N, const AttentionMaskOptions& options) {
  check_at_least("create_attention_mask", "N", N, 1);
  if (options.window) check_at_least("create_attention_mask", "window", *options.window, 1);
  if (N == 1) return NoMask{};
  if (options.return_array || (options.window && N > *options.window)) {
    return create_causal_mask(N, 0, {.window = options.window});
  }
  return Causal{};
}

}  // namespace reprise
