#include "reprise/kernels/attention_cpu.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "reprise/kernels/attention_blocks.h"

namespace reprise::kernels::cpu {

namespace internal {

namespace {

float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1fu;
  const std::uint32_t fraction = h & 0x3ffu;
  if (exponent == 0) {
    const float value = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -value : value;
  }
  return std::bit_cast<float>(sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13));
}

float load(const void* data, Element element, std::ptrdiff_t i) {
  if (element == Element::f32) return static_cast<const float*>(data)[i];
  const std::uint16_t x = static_cast<const std::uint16_t*>(data)[i];
  return element == Element::f16 ? half_to_float(x) : std::bit_cast<float>(std::uint32_t{x} << 16);
}

std::ptrdiff_t mask_at(const MaskView& mask, int batch, int head, int query, int column) {
  return batch * mask.batch_stride + head * mask.head_stride + query * mask.row_stride + column * mask.column_stride;
}

}  // namespace

Range visible_columns(const AttentionArgs& args, int batch, int query) {
  Range out{args.row_starts ? std::max(0, args.row_starts[batch]) : 0, args.columns};
  if (args.causal) {
    out.end = std::max(0, args.columns - args.num_queries + query + 1);
    if (args.window > 0) out.begin = std::max(out.begin, out.end - args.window);
    if (args.chunk > 0 && out.end > 0) {
      const int query_position = args.position + out.end - 1;
      out.begin = std::max(out.begin, query_position / args.chunk * args.chunk - args.position);
    }
  }
  return out;
}

void add_mask(const AttentionArgs& args, int batch, int head, int query, Range columns, float* scores) {
  const MaskView& mask = args.mask;
  std::ptrdiff_t at = mask_at(mask, batch, head, query, columns.begin);
  const int count = columns.end - columns.begin;
  for (int j = 0; j < count; ++j, at += mask.column_stride) {
    if (mask.kind == MaskKind::boolean) {
      if (!static_cast<const std::uint8_t*>(mask.data)[at]) scores[j] = kMaskedScore;
    } else {
      scores[j] += std::max(load(mask.data, mask.element, at) * kLog2E, kMaskedScore);
    }
  }
}

bool mask_is_open(const AttentionArgs& args, int batch, int head, int query, Range columns) {
  const MaskView& mask = args.mask;
  if (mask.kind != MaskKind::boolean || mask.column_stride != 1) return false;
  const auto* at = static_cast<const std::uint8_t*>(mask.data) + mask_at(mask, batch, head, query, columns.begin);
  return std::memchr(at, 0, static_cast<std::size_t>(columns.end - columns.begin)) == nullptr;
}

}  // namespace internal

namespace {

using internal::Block;
using internal::PartialSums;
using internal::Range;

// Up to this many rows, reading each stored row from memory costs more than multiplying with it.
constexpr int kFewRows = 8;
constexpr int kChunk = 256;          // least columns of a task with few rows
constexpr int kMaxChunks = 32;       // of few rows: longer chunks rather than more
constexpr int kManyRowsChunk = 384;  // least columns of a task with many rows
constexpr int kBlocksEnough = 24;    // tasks of one batch row that keep threads evenly busy

int div_up(int a, int b) { return (a + b - 1) / b; }

// A block with its tasks: one for each chunk of its columns.
struct Group {
  const AttentionArgs* args = nullptr;
  bool few = true;
  Block block;
  int first_task = 0;
  int chunks = 0;
  int chunk = 0;              // columns of each but the last
  std::size_t memory_at = 0;  // of the chunks' sums, if there are several

  std::size_t floats() const {
    const auto rows = static_cast<std::size_t>(block.rows.end - block.rows.begin);
    return internal::padded(2 * internal::padded(rows) +
                            rows * internal::padded(static_cast<std::size_t>(args->values.size)));
  }

  PartialSums sums(float* memory) const {
    const auto rows = internal::padded(static_cast<std::size_t>(block.rows.end - block.rows.begin));
    return {memory, memory + rows, memory + 2 * rows};
  }
};

class Plan {
 public:
  explicit Plan(std::span<const AttentionArgs> several) {
    for (const AttentionArgs& args : several) add(args);
  }

  void run(ThreadPool& pool) {
    thread_local internal::Scratch shared;
    float* memory = shared.floats(memory_);
    std::vector<std::atomic<int>> left(groups_.size());
    for (std::size_t g = 0; g < groups_.size(); ++g) left[g].store(groups_[g].chunks, std::memory_order_relaxed);
    pool.run(tasks_, [&](int task) { run_task(task, memory, left); });
  }

 private:
  void add(const AttentionArgs& args) {
    if (args.num_queries == 0 || args.values.size == 0) return;
    const int rows = args.num_queries * (args.heads / args.kv_heads);
    const bool few = rows <= kFewRows;
    const int rows_of_block = few ? rows : std::min(rows, internal::kMaxRowsOfBlock);
    const int blocks = div_up(rows, rows_of_block);
    // The last rows see the most columns: long tasks first.
    for (int block = blocks - 1; block >= 0; --block) {
      for (int batch = 0; batch < args.batch; ++batch) {
        for (int head = 0; head < args.kv_heads; ++head) {
          const int begin = block * rows_of_block;
          add({&args, few, {batch, head, {begin, std::min(rows, begin + rows_of_block)}, {}}}, blocks);
        }
      }
    }
  }

  void add(Group group, int blocks) {
    const AttentionArgs& args = *group.args;
    Block& block = group.block;
    const int heads_per_group = args.heads / args.kv_heads;
    block.columns = {internal::visible_columns(args, block.batch, block.rows.begin / heads_per_group).begin,
                     internal::visible_columns(args, block.batch, (block.rows.end - 1) / heads_per_group).end};
    block.columns.end = std::max(block.columns.begin, block.columns.end);
    const int columns = block.columns.end - block.columns.begin;
    if (group.few) {
      group.chunk = kChunk * std::max(1, div_up(columns, kChunk * kMaxChunks));
    } else {
      const int wanted = div_up(kBlocksEnough, blocks * args.kv_heads);
      group.chunk = std::max(kManyRowsChunk, div_up(columns, wanted));
    }
    group.chunks = std::max(1, div_up(columns, group.chunk));
    group.first_task = tasks_;
    group.memory_at = memory_;
    if (group.chunks > 1) memory_ += static_cast<std::size_t>(group.chunks) * group.floats();
    tasks_ += group.chunks;
    groups_.push_back(group);
  }

  void run_task(int task, float* memory, std::vector<std::atomic<int>>& left) const {
    const auto after = std::upper_bound(groups_.begin(), groups_.end(), task,
                                        [](int t, const Group& group) { return t < group.first_task; });
    const auto index = static_cast<std::size_t>(after - groups_.begin() - 1);
    const Group& group = groups_[index];
    const int part = task - group.first_task;
    Block block = group.block;
    block.columns.begin += part * group.chunk;
    block.columns.end = std::min(block.columns.end, block.columns.begin + group.chunk);

    const std::size_t size = group.floats();
    float* own = nullptr;
    if (group.chunks == 1) {
      thread_local internal::Scratch local;
      own = local.floats(size);
    } else {
      own = memory + group.memory_at + static_cast<std::size_t>(part) * size;
    }
    const PartialSums out = group.sums(own);
    if (group.few) {
      attend_few_rows(*group.args, block, out);
    } else {
      attend_many_rows(*group.args, block, out);
    }
    // Who comes last merges, always in the chunks' order.
    if (group.chunks == 1) {
      merge(*group.args, group.block, out, 1, 0);
    } else if (left[index].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      merge(*group.args, group.block, group.sums(memory + group.memory_at), group.chunks,
            static_cast<std::ptrdiff_t>(size));
    }
  }

  int tasks_ = 0;
  std::size_t memory_ = 0;
  std::vector<Group> groups_;
};

}  // namespace

void attend(std::span<const AttentionArgs> several, ThreadPool& pool) { Plan(several).run(pool); }

void attend(const AttentionArgs& args, ThreadPool& pool) { attend(std::span(&args, 1), pool); }

}  // namespace reprise::kernels::cpu
