// Attention of few rows (decode), bound by the memory rate of the stored rows: features lie in a vector's lanes, each
// stored row is widened or unpacked in registers once for up to four queries.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/attention_few_rows.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <algorithm>
#include <limits>

#include "reprise/kernels/attention_blocks.h"
#include "reprise/kernels/attention_rows-inl.h"
#include "reprise/kernels/attention_sources-inl.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::internal::HWY_NAMESPACE {
namespace {

constexpr std::size_t kRowsAtOnce = 4;
constexpr std::size_t kVectorsAtOnce = HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM ? 4 : 2;  // what 32 or 16 registers hold

struct Four {
  VF a, b, c, e;
};

#if HWY_TARGET == HWY_SCALAR

HWY_INLINE void store_sums(const Four& x, float* out) {
  out[0] = x.a.raw;
  out[1] = x.b.raw;
  out[2] = x.c.raw;
  out[3] = x.e.raw;
}

#else

template <class D, class V>
HWY_INLINE void store_folded(D d, V v, float* out) {
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    store_folded(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), out);
  } else {
    hn::StoreU(v, d, out);
  }
}

// out[0 … 3] = the sums of the four vectors' lanes.
HWY_INLINE void store_sums(const Four& x, float* out) {
  const F32 d;
  const VF ac = hn::Add(hn::InterleaveLower(d, x.a, x.c), hn::InterleaveUpper(d, x.a, x.c));
  const VF be = hn::Add(hn::InterleaveLower(d, x.b, x.e), hn::InterleaveUpper(d, x.b, x.e));
  store_folded(d, hn::Add(hn::InterleaveLower(d, ac, be), hn::InterleaveUpper(d, ac, be)), out);
}

#endif

HWY_INLINE void add_products(Four& sums, VF q, VF k0, VF k1, VF k2, VF k3) {
  sums.a = hn::MulAdd(q, k0, sums.a);
  sums.b = hn::MulAdd(q, k1, sums.b);
  sums.c = hn::MulAdd(q, k2, sums.c);
  sums.e = hn::MulAdd(q, k3, sums.e);
}

// scores[r * stride + j] = q_r · k_j for kRows rows and columns j < count.
template <std::size_t kRows, class Source>
HWY_INLINE void score(const Source& source, const float* q, std::size_t vectors, std::size_t count, float* scores,
                      std::size_t stride) {
  const F32 d;
  const VF zero = hn::Zero(d);
  const std::size_t features = vectors * kLanes;
  std::size_t j = 0;
  for (; j + 4 <= count; j += 4) {
    for (std::size_t next = j; next < j + 4; ++next) source.ask(next, vectors);
    Four s0{zero, zero, zero, zero}, s1 = s0, s2 = s0, s3 = s0;
    for (std::size_t i = 0; i < vectors; ++i) {
      const VF k0 = source(j, i), k1 = source(j + 1, i), k2 = source(j + 2, i), k3 = source(j + 3, i);
      const float* at = q + i * kLanes;
      add_products(s0, hn::LoadU(d, at), k0, k1, k2, k3);
      if constexpr (kRows > 1) add_products(s1, hn::LoadU(d, at + features), k0, k1, k2, k3);
      if constexpr (kRows > 2) add_products(s2, hn::LoadU(d, at + 2 * features), k0, k1, k2, k3);
      if constexpr (kRows > 3) add_products(s3, hn::LoadU(d, at + 3 * features), k0, k1, k2, k3);
    }
    store_sums(s0, scores + j);
    if constexpr (kRows > 1) store_sums(s1, scores + stride + j);
    if constexpr (kRows > 2) store_sums(s2, scores + 2 * stride + j);
    if constexpr (kRows > 3) store_sums(s3, scores + 3 * stride + j);
  }
  for (; j < count; ++j) {
    Four s{zero, zero, zero, zero};
    for (std::size_t i = 0; i < vectors; ++i) {
      const VF k = source(j, i);
      const float* at = q + i * kLanes;
      s.a = hn::MulAdd(hn::LoadU(d, at), k, s.a);
      if constexpr (kRows > 1) s.b = hn::MulAdd(hn::LoadU(d, at + features), k, s.b);
      if constexpr (kRows > 2) s.c = hn::MulAdd(hn::LoadU(d, at + 2 * features), k, s.c);
      if constexpr (kRows > 3) s.e = hn::MulAdd(hn::LoadU(d, at + 3 * features), k, s.e);
    }
    HWY_ALIGN float sums[4];
    store_sums(s, sums);
    for (std::size_t r = 0; r < kRows; ++r) scores[r * stride + j] = sums[r];
  }
}

HWY_INLINE Four load_four(const float* from, std::size_t vectors) {
  const F32 d;
  const VF zero = hn::Zero(d);
  return {hn::LoadU(d, from), vectors > 1 ? hn::LoadU(d, from + kLanes) : zero,
          vectors > 2 ? hn::LoadU(d, from + 2 * kLanes) : zero, vectors > 3 ? hn::LoadU(d, from + 3 * kLanes) : zero};
}

template <std::size_t kVectors>
HWY_INLINE void store_four(const Four& x, float* to) {
  const F32 d;
  hn::StoreU(x.a, d, to);
  if constexpr (kVectors > 1) hn::StoreU(x.b, d, to + kLanes);
  if constexpr (kVectors > 2) hn::StoreU(x.c, d, to + 2 * kLanes);
  if constexpr (kVectors > 3) hn::StoreU(x.e, d, to + 3 * kLanes);
}

template <std::size_t kVectors>
HWY_INLINE void add_weighted(Four& sums, float weight, const Four& v) {
  const VF w = hn::Set(F32(), weight);
  sums.a = hn::MulAdd(w, v.a, sums.a);
  if constexpr (kVectors > 1) sums.b = hn::MulAdd(w, v.b, sums.b);
  if constexpr (kVectors > 2) sums.c = hn::MulAdd(w, v.c, sums.c);
  if constexpr (kVectors > 3) sums.e = hn::MulAdd(w, v.e, sums.e);
}

// sums[r * features + …] += Σ_j weights[r * stride + j] · v_j for kRows rows, vectors [first, first + kVectors).
template <std::size_t kRows, std::size_t kVectors, class Source>
HWY_INLINE void accumulate(const Source& source, std::size_t first, const float* weights, std::size_t stride,
                           std::size_t count, float* sums, std::size_t features, std::size_t vectors_of_row) {
  const VF zero = hn::Zero(F32());
  float* to = sums + first * kLanes;
  Four s0 = load_four(to, kVectors), s1 = s0, s2 = s0, s3 = s0;
  if constexpr (kRows > 1) s1 = load_four(to + features, kVectors);
  if constexpr (kRows > 2) s2 = load_four(to + 2 * features, kVectors);
  if constexpr (kRows > 3) s3 = load_four(to + 3 * features, kVectors);
  for (std::size_t j = 0; j < count; ++j) {
    if (first == 0) source.ask(j, vectors_of_row);
    Four v{source(j, first), zero, zero, zero};
    if constexpr (kVectors > 1) v.b = source(j, first + 1);
    if constexpr (kVectors > 2) v.c = source(j, first + 2);
    if constexpr (kVectors > 3) v.e = source(j, first + 3);
    add_weighted<kVectors>(s0, weights[j], v);
    if constexpr (kRows > 1) add_weighted<kVectors>(s1, weights[stride + j], v);
    if constexpr (kRows > 2) add_weighted<kVectors>(s2, weights[2 * stride + j], v);
    if constexpr (kRows > 3) add_weighted<kVectors>(s3, weights[3 * stride + j], v);
  }
  store_four<kVectors>(s0, to);
  if constexpr (kRows > 1) store_four<kVectors>(s1, to + features);
  if constexpr (kRows > 2) store_four<kVectors>(s2, to + 2 * features);
  if constexpr (kRows > 3) store_four<kVectors>(s3, to + 3 * features);
}

// One step's products, for any number of rows.
struct ScoreStep {
  const float* q;  // [rows, vectors * kLanes]
  std::size_t rows, vectors, count;
  float* scores;
  std::size_t stride;

  template <class Source>
  HWY_INLINE void operator()(const Source& source) const {
    for (std::size_t r = 0; r < rows; r += kRowsAtOnce) {
      const float* at = q + r * vectors * kLanes;
      float* to = scores + r * stride;
      switch (rows - r) {
        case 1:
          score<1>(source, at, vectors, count, to, stride);
          break;
        case 2:
          score<2>(source, at, vectors, count, to, stride);
          break;
        case 3:
          score<3>(source, at, vectors, count, to, stride);
          break;
        default:
          score<4>(source, at, vectors, count, to, stride);
          break;
      }
    }
  }
};

struct AccumulateStep {
  const float* weights;
  std::size_t stride, rows, vectors, count;
  float* sums;  // [rows, features]
  std::size_t features;

  template <class Source>
  HWY_INLINE void operator()(const Source& source) const {
    for (std::size_t r = 0; r < rows; r += kRowsAtOnce) {
      switch (rows - r) {
        case 1:
          row_group<1>(source, r);
          break;
        case 2:
          row_group<2>(source, r);
          break;
        case 3:
          row_group<3>(source, r);
          break;
        default:
          row_group<4>(source, r);
          break;
      }
    }
  }

  template <std::size_t kRows, class Source>
  HWY_INLINE void row_group(const Source& source, std::size_t r) const {
    const float* w = weights + r * stride;
    float* to = sums + r * features;
    std::size_t i = 0;
    for (; i + kVectorsAtOnce <= vectors; i += kVectorsAtOnce) {
      accumulate<kRows, kVectorsAtOnce>(source, i, w, stride, count, to, features, vectors);
    }
    for (; i < vectors; ++i) accumulate<kRows, 1>(source, i, w, stride, count, to, features, vectors);
  }
};

// `count` is a multiple of kAlignFloats, also 0.
HWY_INLINE void cap_scores(float cap, std::size_t count, float* scores) {
  const F32 d;
  for (std::size_t j = 0; j < count; j += kLanes) hn::Store(capped(hn::Load(d, scores + j), cap), d, scores + j);
}

// Scores of one row → weights in place. `count` is a multiple of kAlignFloats, also 0.
HWY_INLINE void softmax(float* scores, std::size_t count, float* top_out, float* total_out) {
  const F32 d;
  // Finite also where no column is in the row's range, so that weights are 0.
  VF highest = hn::Set(d, std::numeric_limits<float>::lowest());
  for (std::size_t j = 0; j < count; j += kLanes) highest = hn::Max(highest, hn::Load(d, scores + j));
  const VF top = hn::MaxOfLanes(d, highest);
  VF total = hn::Zero(d);
  for (std::size_t j = 0; j < count; j += kLanes) {
    const VF weight = exp2_of_nonpositive(hn::Sub(hn::Load(d, scores + j), top));
    total = hn::Add(total, weight);
    hn::Store(weight, d, scores + j);
  }
  *top_out = hn::GetLane(top);
  *total_out = hn::GetLane(hn::SumOfLanes(d, total));
}

void hide(const AttentionArgs& args, const Block& block, int row, float* scores) {
  const int group = args.heads / args.kv_heads;
  const int query = row / group;
  const int head = block.kv_head * group + row % group;
  const auto [begin, end] = block.columns;
  if (args.mask.kind != MaskKind::none) add_mask(args, block.batch, head, query, block.columns, scores);
  const Range visible = visible_columns(args, block.batch, query);
  const float never = -std::numeric_limits<float>::infinity();
  const int first = std::clamp(visible.begin, begin, end);
  const int last = std::clamp(visible.end, first, end);
  std::fill(scores, scores + (first - begin), never);
  std::fill(scores + (last - begin), scores + padded(static_cast<std::size_t>(end - begin)), never);
}

}  // namespace

void few_rows(const AttentionArgs& args, const Block& block, const PartialSums& out) {
  const F32 d;
  const int group = args.heads / args.kv_heads;
  const auto rows = static_cast<std::size_t>(block.rows.end - block.rows.begin);
  const auto columns = static_cast<std::size_t>(block.columns.end - block.columns.begin);
  const std::size_t stride = padded(columns);
  const auto size = static_cast<std::size_t>(args.keys.size);
  const std::size_t q_features = (size + kLanes - 1) / kLanes * kLanes;
  const std::size_t features = padded(static_cast<std::size_t>(args.values.size));

  thread_local Scratch memory;
  float* q = memory.floats(rows * (padded(size) + stride) + StepReader::scratch_floats(args.keys) +
                           StepReader::scratch_floats(args.values));
  float* scores = q + rows * padded(size);
  float* scratch = scores + rows * stride;

  for (std::size_t r = 0; r < rows; ++r) {
    const int row = block.rows.begin + static_cast<int>(r);
    const float* from = args.queries.data + block.batch * args.queries.batch_stride +
                        (block.kv_head * group + row % group) * args.queries.head_stride +
                        row / group * args.queries.row_stride;
    float* to = q + r * q_features;
    for (std::size_t i = 0; i < size; ++i) to[i] = from[i] * args.scale * kLog2E;
    std::fill(to + size, to + q_features, 0.0f);
  }

  const StepReader keys(args.keys, block.batch, block.kv_head, scratch);
  for (std::size_t j = 0, count = 0; j < columns; j += count) {
    const int column = block.columns.begin + static_cast<int>(j);
    count = keys.columns_of_step(column, columns - j);
    keys.with(column, count, ScoreStep{q, rows, keys.vectors(), count, scores + j, stride});
  }
  const StepReader values(args.values, block.batch, block.kv_head, scratch + StepReader::scratch_floats(args.keys));
  values.ask_for_page_of(block.columns.begin);
  for (std::size_t r = 0; r < rows; ++r) {
    if (args.softcap != 0.0f) cap_scores(args.softcap * kLog2E, stride, scores + r * stride);
    hide(args, block, block.rows.begin + static_cast<int>(r), scores + r * stride);
    softmax(scores + r * stride, stride, out.top + r, out.total + r);
  }
  for (std::size_t i = 0; i < rows * features; i += kLanes) hn::StoreU(hn::Zero(d), d, out.values + i);
  for (std::size_t j = 0, count = 0; j < columns; j += count) {
    const int column = block.columns.begin + static_cast<int>(j);
    count = values.columns_of_step(column, columns - j);
    values.with(column, count, AccumulateStep{scores + j, stride, rows, values.vectors(), count, out.values, features});
  }
}

void merge_sums(const AttentionArgs& args, const Block& block, const PartialSums& first, int count,
                std::ptrdiff_t stride) {
  const int group = args.heads / args.kv_heads;
  const auto size = static_cast<std::size_t>(args.values.size);
  const std::size_t features = padded(size);
  for (int row = block.rows.begin; row < block.rows.end; ++row) {
    const int head = block.kv_head * group + row % group;
    const std::ptrdiff_t r = row - block.rows.begin;
    float top = args.sinks ? args.sinks[head] * kLog2E : std::numeric_limits<float>::lowest();
    for (int i = 0; i < count; ++i) top = std::max(top, first.top[i * stride + r]);
    const auto weight = [top](float score)
                            HWY_ATTR { return hn::GetLane(exp2_of_nonpositive(hn::Set(F32(), score - top))); };
    float total = args.sinks ? weight(args.sinks[head] * kLog2E) : 0.0f;
    float* out = args.output.data + block.batch * args.output.batch_stride + head * args.output.head_stride +
                 row / group * args.output.row_stride;
    for (int i = 0; i < count; ++i) {
      const float share = weight(first.top[i * stride + r]);
      total += share * first.total[i * stride + r];
      const float* from = first.values + i * stride + r * static_cast<std::ptrdiff_t>(features);
      if (i == 0) {
        for (std::size_t f = 0; f < size; ++f) out[f] = share * from[f];
      } else {
        for (std::size_t f = 0; f < size; ++f) out[f] += share * from[f];
      }
    }
    const float factor = total > 0.0f ? 1.0f / total : (total == total ? 0.0f : total);
    for (std::size_t f = 0; f < size; ++f) out[f] *= factor;
  }
}

}  // namespace reprise::kernels::cpu::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu::internal {

HWY_EXPORT(few_rows);
HWY_EXPORT(merge_sums);

void attend_few_rows(const AttentionArgs& args, const Block& block, const PartialSums& out) {
  HWY_DYNAMIC_DISPATCH(few_rows)(args, block, out);
}

void merge(const AttentionArgs& args, const Block& block, const PartialSums& first, int count, std::ptrdiff_t stride) {
  HWY_DYNAMIC_DISPATCH(merge_sums)(args, block, first, count, stride);
}

}  // namespace reprise::kernels::cpu::internal
#endif
