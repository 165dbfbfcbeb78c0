#include "reprise/kernels/store_cpu.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "reprise/kernels/elementwise.h"
#include "reprise/kernels/rows_cpu.h"

namespace reprise::kernels::cpu {

namespace {

// Rows of one task: one token costs under a microsecond, as much as handing out a task.
constexpr int kRowsPerTask = 16;

const void* row_of(const ProjectedRows& rows, int b, int t) {
  const std::ptrdiff_t at = b * rows.batch_stride + t * rows.row_stride;
  return static_cast<const std::byte*>(rows.data) + at * static_cast<std::ptrdiff_t>(size_of(rows.element));
}

// `target` as the buffer of token t of batch row b: with its page's pointers where there are pages.
TargetRows buffer_of(const StoreArgs& args, TargetRows target, int b, int t) {
  if (args.pages.empty()) return target;
  const TargetPages& to = args.pages[static_cast<std::size_t>(b)];
  std::byte* page = to.pages[static_cast<std::size_t>((to.at + t) / kPageColumns)];
  target.data = page + target.data_at;
  target.scales = page + target.scales_at;
  target.biases = page + target.biases_at;
  return target;
}

// The token's row of the buffer's first head.
std::size_t first_row(const StoreArgs& args, int b, int t) {
  if (!args.pages.empty())
    return static_cast<std::size_t>((args.pages[static_cast<std::size_t>(b)].at + t) % kPageColumns);
  return static_cast<std::size_t>(b) * static_cast<std::size_t>(args.kv_heads) *
             static_cast<std::size_t>(args.capacity) +
         static_cast<std::size_t>(args.at + t);
}

// Heads [Hkv, size] of one token into their column; x is changed.
void store_heads(const StoreArgs& args, const TargetRows& of_args, int b, int t, float* x) {
  const TargetRows target = buffer_of(args, of_args, b, t);
  std::size_t row = first_row(args, b, t);
  const auto columns = static_cast<std::size_t>(args.pages.empty() ? args.capacity : kPageColumns);
  for (int h = 0; h < args.kv_heads; ++h, x += target.size, row += columns) {
    const auto place = [row](void* data, std::size_t bytes) { return static_cast<std::uint8_t*>(data) + row * bytes; };
    const auto size = static_cast<std::size_t>(target.size);
    if (target.bits == 0) {
      store_row(x, target.element, target.size, place(target.data, size * size_of(target.element)));
      continue;
    }
    const std::size_t group_bytes = size / static_cast<std::size_t>(target.group_size) * size_of(target.element);
    round_row(target.element, target.size, x);
    quantize_row({target.group_size, target.bits, target.element}, x, target.size,
                 place(target.data, size * static_cast<std::size_t>(target.bits) / 8),
                 place(target.scales, group_bytes), place(target.biases, group_bytes));
  }
}

struct Scratch {
  std::vector<float> cosines, sines, row;
};

void store_token(const StoreArgs& args, int b, int t, Scratch& scratch) {
  const int size = args.stored_keys.size;
  if (args.rope) {
    const auto half = static_cast<std::size_t>(args.rope->dims / 2);
    scratch.cosines.resize(half);
    scratch.sines.resize(half);
    const int offset = args.offsets ? args.offsets[b] : args.offset;
    const float position = static_cast<float>(t) + static_cast<float>(offset);
    rope_angles(*args.rope, position, scratch.cosines.data(), scratch.sines.data());
  }
  const auto rotate = [&](const Norm& norm, int heads, float* x) {
    const auto stride = static_cast<std::size_t>(size);
    if (norm.weight) rms_norm(x, stride, heads, size, norm.weight, norm.eps, x, stride);
    if (args.rope) rotate_heads(*args.rope, scratch.cosines.data(), scratch.sines.data(), heads, size, x);
  };
  if (args.rotated_queries) {
    const int features = args.heads * size;
    const std::ptrdiff_t token = std::ptrdiff_t{b} * args.num_rows + t;
    float* x = args.rotated_queries + token * features;
    load_row(row_of(args.queries, b, t), args.queries.element, args.queries.feature_stride, features, x);
    rotate(args.query_norm, args.heads, x);
  }
  const int features = args.kv_heads * std::max(size, args.stored_values.size);
  scratch.row.resize(static_cast<std::size_t>(features));
  float* x = scratch.row.data();
  load_row(row_of(args.keys, b, t), args.keys.element, args.keys.feature_stride, args.kv_heads * size, x);
  rotate(args.key_norm, args.kv_heads, x);
  store_heads(args, args.stored_keys, b, t, x);
  load_row(row_of(args.values, b, t), args.values.element, args.values.feature_stride,
           args.kv_heads * args.stored_values.size, x);
  store_heads(args, args.stored_values, b, t, x);
}

}  // namespace

void store_rows(const StoreArgs& args, ThreadPool& pool) {
  const int tokens = args.batch * args.num_rows;
  pool.run((tokens + kRowsPerTask - 1) / kRowsPerTask, [&](int task) {
    static thread_local Scratch scratch;
    const int end = std::min(tokens, (task + 1) * kRowsPerTask);
    for (int i = task * kRowsPerTask; i < end; ++i) store_token(args, i / args.num_rows, i % args.num_rows, scratch);
  });
}

void copy_columns(const ColumnsCopy& copy, ThreadPool& pool) {
  const std::size_t row_bytes = static_cast<std::size_t>(copy.features) * copy.item_size;
  const auto item = static_cast<std::ptrdiff_t>(copy.item_size);
  const bool whole_rows = copy.features == 1 || copy.feature_stride == item;
  const bool whole_heads = whole_rows && copy.column_stride == static_cast<std::ptrdiff_t>(row_bytes);
  const auto kept = static_cast<std::size_t>(copy.kept);
  pool.run(copy.batch * copy.kv_heads, [&](int task) {
    const std::byte* from =
        copy.from + task / copy.kv_heads * copy.batch_stride + task % copy.kv_heads * copy.head_stride;
    std::byte* to = copy.to + static_cast<std::size_t>(task) * static_cast<std::size_t>(copy.to_columns) * row_bytes;
    if (whole_heads && kept > 0) {
      std::memcpy(to, from, kept * row_bytes);
    } else {
      for (std::size_t column = 0; column < kept; ++column) {
        const std::byte* row = from + static_cast<std::ptrdiff_t>(column) * copy.column_stride;
        std::byte* out = to + column * row_bytes;
        if (whole_rows) {
          std::memcpy(out, row, row_bytes);
        } else {
          for (int i = 0; i < copy.features; ++i) {
            std::memcpy(out + i * item, row + i * copy.feature_stride, copy.item_size);
          }
        }
      }
    }
    const auto rest = static_cast<std::size_t>(copy.to_columns - copy.kept) * row_bytes;
    std::memset(to + kept * row_bytes, 0, rest);
  });
}

}  // namespace reprise::kernels::cpu
