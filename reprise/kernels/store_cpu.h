// New keys and values on their way into a cache's buffers, by pointers and sizes, no MLX: rotated, rounded or
// quantised, written. Private to `kernels`. Results do not depend on the number of threads. Threads: free functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "reprise/base/thread_pool.h"
#include "reprise/kernels/cpu.h"
#include "reprise/kernels/linear_cpu.h"
#include "reprise/kernels/rope_cpu.h"

namespace reprise::kernels::cpu {

// An array [B, L, features]; strides in elements.
struct ProjectedRows {
  const void* data = nullptr;
  Element element = Element::f32;
  std::ptrdiff_t batch_stride = 0;
  std::ptrdiff_t row_stride = 0;
  std::ptrdiff_t feature_stride = 0;
};

// A row-contiguous buffer [B, Hkv, capacity, size]. In pages: data, scales and biases are null, and each page has its
// own [Hkv, kPageColumns, size], so many bytes after its beginning.
struct TargetRows {
  int size = 0;
  int bits = 0;  // 0: dense
  int group_size = 0;
  Element element = Element::f32;  // of dense rows, or of scales and biases
  void* data = nullptr;
  void* scales = nullptr;
  void* biases = nullptr;
  std::size_t data_at = 0;
  std::size_t scales_at = 0;
  std::size_t biases_at = 0;
};

// Where the new rows of a sequence go: token t to column `at` + t of its pages.
struct TargetPages {
  std::span<std::byte* const> pages;
  int at = 0;
};

struct StoreArgs {
  int batch = 0;
  int num_rows = 0;  // L
  int heads = 0;
  int kv_heads = 0;
  int capacity = 0;
  int at = 0;
  std::span<const TargetPages> pages = {};  // [B], instead of capacity and at
  ProjectedRows queries;
  ProjectedRows keys;
  ProjectedRows values;
  TargetRows stored_keys;
  TargetRows stored_values;
  Norm query_norm = {};  // of each head, before it is rotated
  Norm key_norm = {};
  float* rotated_queries = nullptr;  // [B, L, H, D]; null: the queries are not wanted
  const RopeView* rope = nullptr;    // null: keys and queries come rotated
  int offset = 0;
  const std::int32_t* offsets = nullptr;  // [B], instead of offset
};

// Keys and values go to columns at … at + L - 1. Throws: bad_alloc.
void store_rows(const StoreArgs& args, ThreadPool& pool);

// Columns of a buffer [B, Hkv, columns, …] into another that has more, or as many.
struct ColumnsCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;  // row-contiguous
  int batch = 0;
  int kv_heads = 0;
  int kept = 0;        // columns copied; those after them become 0
  int to_columns = 0;  // ≥ kept
  int features = 0;
  std::size_t item_size = 4;  // 2 or 4
  // Of `from`, in bytes.
  std::ptrdiff_t batch_stride = 0;
  std::ptrdiff_t head_stride = 0;
  std::ptrdiff_t column_stride = 0;
  std::ptrdiff_t feature_stride = 0;
};
void copy_columns(const ColumnsCopy& copy, ThreadPool& pool);

}  // namespace reprise::kernels::cpu
