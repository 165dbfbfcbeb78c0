// The parts that attend() cuts its work into: a block of queries of one key/value head against a range of columns.
// Private to `kernels`.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "reprise/kernels/attention_cpu.h"

namespace reprise::kernels::cpu::internal {

// Memory that grows and is kept, aligned to cache lines.
class Scratch {
 public:
  // At least `count` floats, with anything in them; what an earlier call gave is gone.
  float* floats(std::size_t count) {
    if (count > size_) {
      memory_.reset(static_cast<float*>(::operator new(count * sizeof(float), kAlignment)));
      size_ = count;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::unique_ptr<float, Free> memory_;
  std::size_t size_ = 0;
};

inline constexpr std::size_t kAlignFloats = 16;  // floats in 64 bytes, and in the longest vector

constexpr std::size_t padded(std::size_t count) { return (count + kAlignFloats - 1) / kAlignFloats * kAlignFloats; }

// Scores are logarithms of base 2. A masked one is finite, so that a row of nothing else is; columns out of a query's
// range have -infinity.
inline constexpr float kMaskedScore = -1.7e38f;
inline constexpr float kLog2E = 1.44269504f;

struct Range {
  int begin = 0;
  int end = 0;
  bool empty() const { return begin >= end; }
  bool operator==(const Range&) const = default;
};

// Rows of a block are the queries of all heads of one key/value head: row = query * heads_per_group + head.
struct Block {
  int batch = 0;
  int kv_head = 0;
  Range rows;
  Range columns;  // within it some may still be hidden from some rows
};

// What a block has summed up so far: per row the highest score, Σ 2^(score - top), and Σ 2^(score - top) · value
// [rows, padded(Dv)].
struct PartialSums {
  float* top = nullptr;
  float* total = nullptr;
  float* values = nullptr;
};

// Columns that query `query` of batch row `batch` may see but for the mask.
Range visible_columns(const AttentionArgs& args, int batch, int query);

// scores[j] of column columns.begin + j += the mask of a query of a head; hidden: kMaskedScore. Requires: a mask.
void add_mask(const AttentionArgs& args, int batch, int head, int query, Range columns, float* scores);

// Whether the mask surely changes nothing there.
bool mask_is_open(const AttentionArgs& args, int batch, int head, int query, Range columns);

// For few rows (any number works): each stored row is read once.
void attend_few_rows(const AttentionArgs& args, const Block& block, const PartialSums& out);

// For up to kMaxRowsOfBlock rows.
inline constexpr int kMaxRowsOfBlock = 192;
void attend_many_rows(const AttentionArgs& args, const Block& block, const PartialSums& out);

// The output of the block's rows from its partial sums over `count` ranges of columns. Those lie `stride` floats apart.
void merge(const AttentionArgs& args, const Block& block, const PartialSums& first, int count, std::ptrdiff_t stride);

}  // namespace reprise::kernels::cpu::internal
