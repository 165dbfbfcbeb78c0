// Attention of sequences whose keys and values lie in pages: blocks of kPageRows rows that sequences share and only
// ever append to, so that a fork copies no row, a batch has no padding, and each sequence costs what it holds.
// CPU only: pages are plain memory outside MLX's graph, written in place when an operation runs.
// Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
// https://arxiv.org/abs/2309.06180; here pages are long, so that a page is one step of the kernel.
// Threads: results are unevaluated arrays of the calling thread.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "mlx/array.h"
#include "mlx/dtype.h"
#include "reprise/kernels/attention.h"
#include "reprise/kernels/keys_values.h"
#include "reprise/kernels/rope.h"

namespace reprise::kernels {

// Position p lies in row p % kPageRows of page p / kPageRows.
inline constexpr int kPageRows = 64;

// What a page's bytes are: keys [kv_heads, kPageRows, key_size], then values [kv_heads, kPageRows, value_size];
// quantised: of keys, then of values, packed words [kv_heads, kPageRows, size * bits / 32], scales and biases
// [kv_heads, kPageRows, size / group_size]. Each part begins at a multiple of 64 bytes.
struct PageLayout {
  int kv_heads = 0;
  int key_size = 0;
  int value_size = 0;
  mlx::core::Dtype dtype = mlx::core::float32;  // of dense rows, or of scales and biases
  std::optional<KVQuantization> quantization = {};

  // The parts' first bytes, in the order above: 2 of them, or 6.
  std::vector<std::size_t> offsets() const;
  // Shapes [1, kv_heads, kPageRows, features] and dtypes of the parts, as KVColumns' tensors have them.
  std::vector<mlx::core::Shape> shapes() const;
  std::vector<mlx::core::Dtype> dtypes() const;
  std::size_t nbytes() const;
  bool operator==(const PageLayout&) const;
};

// A page's bytes, aligned to 64; whoever holds it keeps it alive.
using PageMemory = std::shared_ptr<std::byte>;

// One sequence before its new rows.
struct PagedSequence {
  std::vector<PageMemory> pages;  // of positions from first_page * kPageRows on; room for the new rows included
  int first_page = 0;
  int length = 0;  // rows it has = position of its first new row
  // The page that `length` lies in is shared with somebody who has appended to it: its first length % kPageRows rows
  // are copied from here before the new ones are stored.
  PageMemory copy_from = {};
};

// What a query at position q sees: keys from max(0, q - window + 1) on (window: 0 for all), none before the beginning
// of its chunk ⌊q / chunk⌋ · chunk (chunk: 0 for none), none after q.
struct PagedVisibility {
  int window = 0;
  int chunk = 0;
  // Position of the first key that a query at `position` or later can see.
  int first_visible(int position) const;
  bool operator==(const PagedVisibility&) const = default;
};

struct PagedResult {
  mlx::core::array output;  // [B, L, heads * Dv] in the queries' dtype
  mlx::core::array stored;  // int32 [1], available when the rows are stored: later operations over these pages take it
};

struct PagedAttentionOptions {
  float scale = 1.0f;
  PagedVisibility visibility = {};
  // Besides: over the columns from position 0 on, [.., L, length + L]; for one sequence only.
  std::optional<mlx::core::array> mask = {};
  std::optional<mlx::core::array> sinks = {};  // [H]
  std::optional<float> softcap = {};
  HeadNorms norms = {};
};

// As store_and_attend, for B sequences of any lengths: row b of queries [B, L, H * D], keys [B, L, Hkv * D] and values
// [B, L, Hkv * Dv] holds L new tokens of sequences[b], at positions length … length + L - 1, which `rope` rotates.
// `after`: `stored` of earlier operations on these pages that may not have run yet.
// Each sequence's result is bit for bit what it is in a batch of its own. Requires: shapes that fit; pages for all rows
// that queries see and for the new ones; nobody else appends to the pages that are written.
PagedResult paged_store_and_attend(const mlx::core::array& queries, const mlx::core::array& keys,
                                   const mlx::core::array& values, int heads, const RopeParams* rope,
                                   const PageLayout& layout, std::vector<PagedSequence> sequences,
                                   const PagedAttentionOptions& options, const std::vector<mlx::core::array>& after);

// Only stores: keys and values [1, Hkv, L, D] and [1, Hkv, L, Dv] as they are (rotated) behind the rows of one
// sequence. Returns: `stored`.
mlx::core::array paged_store(const mlx::core::array& keys, const mlx::core::array& values, const PageLayout& layout,
                             PagedSequence sequence, const std::vector<mlx::core::array>& after);

// Rows begin … end - 1 of a sequence as arrays of their own: [keys, values] [1, Hkv, end - begin, D], or the six of a
// quantised layout.
std::vector<mlx::core::array> paged_rows(const PageLayout& layout, const PagedSequence& sequence, int begin, int end,
                                         const std::vector<mlx::core::array>& after);

}  // namespace reprise::kernels
