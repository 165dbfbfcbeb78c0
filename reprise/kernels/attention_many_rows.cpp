// Attention of many rows (prefill), bound by arithmetic: rows lie in a vector's lanes, so that neither the products nor
// the softmax sum across lanes. A tile of stored rows is unpacked to float32 once for all rows of the block.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/attention_many_rows.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <algorithm>
#include <limits>

#include "reprise/kernels/attention_blocks.h"
#include "reprise/kernels/attention_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::internal::HWY_NAMESPACE {
namespace {

constexpr std::size_t kTile = 96;    // columns unpacked at a time
constexpr std::size_t kPanel = 48;   // rows whose scores of a tile are held at a time
constexpr std::size_t kVectors = 3;  // of rows, in one register tile
constexpr std::size_t kScalars = HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM ? 8 : 4;  // what 32 or 16 registers hold
constexpr std::size_t kPad = 8;  // columns and features of tiles come in multiples of this
static_assert(kTile % kPad == 0 && kPad % kScalars == 0 && kPanel % (kVectors * kLanes) == 0);

constexpr std::size_t up(std::size_t count) { return (count + kPad - 1) / kPad * kPad; }

// A register tile: kCount scalars by kWidth vectors. Nested structures, not arrays, so that each is a register.
template <std::size_t kCount>
struct Sums {
  VF a, b, c;
  Sums<kCount - 1> rest;
};
template <>
struct Sums<0> {};

template <std::size_t kWidth, std::size_t kCount>
HWY_INLINE void load_sums(Sums<kCount>& sums, const float* from, VF fa, VF fb, VF fc) {
  if constexpr (kCount > 0) {
    const F32 d;
    sums.a = hn::Mul(hn::Load(d, from), fa);
    if constexpr (kWidth > 1) sums.b = hn::Mul(hn::Load(d, from + kLanes), fb);
    if constexpr (kWidth > 2) sums.c = hn::Mul(hn::Load(d, from + 2 * kLanes), fc);
    load_sums<kWidth>(sums.rest, from + kPanel, fa, fb, fc);
  }
}

template <std::size_t kWidth, std::size_t kCount>
HWY_INLINE void zero_sums(Sums<kCount>& sums) {
  if constexpr (kCount > 0) {
    sums.a = hn::Zero(F32());
    if constexpr (kWidth > 1) sums.b = sums.a;
    if constexpr (kWidth > 2) sums.c = sums.a;
    zero_sums<kWidth>(sums.rest);
  }
}

template <std::size_t kWidth, std::size_t kCount>
HWY_INLINE void store_sums(const Sums<kCount>& sums, float* to) {
  if constexpr (kCount > 0) {
    const F32 d;
    hn::Store(sums.a, d, to);
    if constexpr (kWidth > 1) hn::Store(sums.b, d, to + kLanes);
    if constexpr (kWidth > 2) hn::Store(sums.c, d, to + 2 * kLanes);
    store_sums<kWidth>(sums.rest, to + kPanel);
  }
}

template <std::size_t kWidth, std::size_t kCount>
HWY_INLINE void add_products(Sums<kCount>& sums, const float* scalars, std::size_t stride, VF a, VF b, VF c) {
  if constexpr (kCount > 0) {
    const VF x = hn::Set(F32(), *scalars);
    sums.a = hn::MulAdd(x, a, sums.a);
    if constexpr (kWidth > 1) sums.b = hn::MulAdd(x, b, sums.b);
    if constexpr (kWidth > 2) sums.c = hn::MulAdd(x, c, sums.c);
    add_products<kWidth>(sums.rest, scalars + stride, stride, a, b, c);
  }
}

// sums[s][lane] += Σ_k scalars[s * stride + k * step] · vectors[k][lane]
template <std::size_t kWidth>
HWY_INLINE void multiply(Sums<kScalars>& sums, const float* scalars, std::size_t stride, std::size_t step,
                         const float* vectors, std::size_t count) {
  const F32 d;
  for (std::size_t k = 0; k < count; ++k) {
    const VF a = hn::Load(d, vectors);
    VF b = a, c = a;
    if constexpr (kWidth > 1) b = hn::Load(d, vectors + kLanes);
    if constexpr (kWidth > 2) c = hn::Load(d, vectors + 2 * kLanes);
    add_products<kWidth>(sums, scalars, stride, a, b, c);
    scalars += step;
    vectors += kPanel;
  }
}

// scores [columns, kPanel] = keys [columns, features] · queries [features, kPanel], kWidth vectors of rows.
template <std::size_t kWidth>
HWY_INLINE void score(const float* keys, std::size_t columns, std::size_t features, const float* queries,
                      float* scores) {
  for (std::size_t j = 0; j < columns; j += kScalars) {
    Sums<kScalars> sums;
    zero_sums<kWidth>(sums);
    multiply<kWidth>(sums, keys + j * features, features, 1, queries, features);
    store_sums<kWidth>(sums, scores + j * kPanel);
  }
}

// out [features, kPanel] = out · factors + valuesᵀ · weights. values [columns, features], weights [columns, kPanel].
template <std::size_t kWidth>
HWY_INLINE void accumulate(const float* values, std::size_t columns, std::size_t features, const float* weights,
                           const float* factors, float* out) {
  const F32 d;
  const VF fa = hn::Load(d, factors);
  const VF fb = hn::Load(d, factors + (kWidth > 1 ? kLanes : 0));
  const VF fc = hn::Load(d, factors + (kWidth > 2 ? 2 * kLanes : 0));
  for (std::size_t f = 0; f < features; f += kScalars) {
    Sums<kScalars> sums;
    load_sums<kWidth>(sums, out + f * kPanel, fa, fb, fc);
    multiply<kWidth>(sums, values + f, 1, features, weights, columns);
    store_sums<kWidth>(sums, out + f * kPanel);
  }
}

// Calls use.operator()<width>(first lane) over as many vectors as hold `rows` rows.
template <class Use>
HWY_INLINE void over_vectors(std::size_t rows, const Use& use) {
  for (std::size_t lane = 0; lane < rows; lane += kVectors * kLanes) {
    const std::size_t left = (rows - lane + kLanes - 1) / kLanes;
    if (left == 1) {
      use.template run<1>(lane);
    } else if (left == 2) {
      use.template run<2>(lane);
    } else {
      use.template run<3>(lane);
    }
  }
}

struct ScorePanel {
  const float* keys;
  std::size_t columns, features;
  const float* queries;
  float* scores;
  template <std::size_t kWidth>
  HWY_INLINE void run(std::size_t lane) const {
    score<kWidth>(keys, columns, features, queries + lane, scores + lane);
  }
};

struct AccumulatePanel {
  const float* values;
  std::size_t columns, features;
  const float* weights;
  const float* factors;
  float* out;
  template <std::size_t kWidth>
  HWY_INLINE void run(std::size_t lane) const {
    accumulate<kWidth>(values, columns, features, weights + lane, factors + lane, out + lane);
  }
};

// One panel of rows with its running softmax.
struct Panel {
  const float* queries;  // [D, kPanel]
  float* top;            // [kPanel]
  float* total;          // [kPanel]
  float* values;         // [up(Dv), kPanel]
  Range rows;            // in the block's numbering
  Range columns;         // columns that some row sees
  Range whole;           // columns that all rows see
};

// Of scores [columns, kPanel].
HWY_INLINE void cap_scores(float cap, std::size_t columns, std::size_t rows, float* scores) {
  const F32 d;
  for (std::size_t lane = 0; lane < rows; lane += kLanes) {
    float* at = scores + lane;
    for (std::size_t j = 0; j < columns; ++j, at += kPanel) hn::Store(capped(hn::Load(d, at), cap), d, at);
  }
}

// Scores [columns, kPanel] → weights in place; factors: what earlier sums are multiplied by.
HWY_INLINE void softmax(float* scores, std::size_t columns, std::size_t rows, const Panel& panel, float* factors) {
  const F32 d;
  for (std::size_t lane = 0; lane < rows; lane += kLanes) {
    float* at = scores + lane;
    const VF before = hn::Load(d, panel.top + lane);
    VF top = before;
    for (std::size_t j = 0; j < columns; ++j) top = hn::Max(top, hn::Load(d, at + j * kPanel));
    VF total = hn::Zero(d);
    for (std::size_t j = 0; j < columns; ++j) {
      const VF weight = exp2_of_nonpositive(hn::Sub(hn::Load(d, at + j * kPanel), top));
      total = hn::Add(total, weight);
      hn::Store(weight, d, at + j * kPanel);
    }
    const VF factor = exp2_of_nonpositive(hn::Sub(before, top));
    hn::Store(factor, d, factors + lane);
    hn::Store(top, d, panel.top + lane);
    hn::Store(hn::MulAdd(hn::Load(d, panel.total + lane), factor, total), d, panel.total + lane);
  }
}

// Hides columns [columns.begin, columns.end) from the panel's rows where they must not be seen.
void hide(const AttentionArgs& args, const Block& block, const Panel& panel, Range columns, float* row_scores,
          float* scores) {
  const int group = args.heads / args.kv_heads;
  const bool inside = columns.begin >= panel.whole.begin && columns.end <= panel.whole.end;
  if (inside && args.mask.kind == MaskKind::none) return;
  const auto count = static_cast<std::size_t>(columns.end - columns.begin);
  for (int row = panel.rows.begin; row < panel.rows.end; ++row) {
    float* at = scores + (row - panel.rows.begin);
    const int query = row / group;
    if (args.mask.kind != MaskKind::none &&
        !mask_is_open(args, block.batch, block.kv_head * group + row % group, query, columns)) {
      for (std::size_t j = 0; j < count; ++j) row_scores[j] = at[j * kPanel];
      add_mask(args, block.batch, block.kv_head * group + row % group, query, columns, row_scores);
      for (std::size_t j = 0; j < count; ++j) at[j * kPanel] = row_scores[j];
    }
    if (inside) continue;
    const Range visible = visible_columns(args, block.batch, query);
    const float never = -std::numeric_limits<float>::infinity();
    for (int j = columns.begin; j < columns.end; ++j) {
      if (j < visible.begin || j >= visible.end) at[static_cast<std::size_t>(j - columns.begin) * kPanel] = never;
    }
  }
}

struct Sizes {
  std::size_t rows, panels, keys, values;  // values: padded
  explicit Sizes(const AttentionArgs& args, const Block& block)
      : rows(static_cast<std::size_t>(block.rows.end - block.rows.begin)),
        panels((rows + kPanel - 1) / kPanel),
        keys(static_cast<std::size_t>(args.keys.size)),
        values(up(static_cast<std::size_t>(args.values.size))) {}
};

Panel make_panel(const AttentionArgs& args, const Block& block, const Sizes& n, std::size_t index, float* memory) {
  const int group = args.heads / args.kv_heads;
  Panel panel{memory, memory + n.keys * kPanel, nullptr, nullptr, {}, {}, {}};
  float* queries = memory;
  panel.total = panel.top + kPanel;
  panel.values = panel.total + kPanel;
  panel.rows.begin = block.rows.begin + static_cast<int>(index * kPanel);
  panel.rows.end = std::min(block.rows.end, panel.rows.begin + static_cast<int>(kPanel));
  std::fill(queries, panel.top, 0.0f);
  for (int row = panel.rows.begin; row < panel.rows.end; ++row) {
    const float* from = args.queries.data + block.batch * args.queries.batch_stride +
                        (block.kv_head * group + row % group) * args.queries.head_stride +
                        row / group * args.queries.row_stride;
    float* to = queries + (row - panel.rows.begin);
    for (std::size_t i = 0; i < n.keys; ++i) to[i * kPanel] = from[i] * args.scale * kLog2E;
  }
  std::fill(panel.top, panel.total, std::numeric_limits<float>::lowest());
  std::fill(panel.total, panel.values + n.values * kPanel, 0.0f);
  // What a query sees moves forward with it.
  const Range first = visible_columns(args, block.batch, panel.rows.begin / group);
  const Range last = visible_columns(args, block.batch, (panel.rows.end - 1) / group);
  panel.columns = {first.begin, last.end};
  panel.whole = {last.begin, first.end};
  return panel;
}

}  // namespace

void many_rows(const AttentionArgs& args, const Block& block, const PartialSums& out) {
  const Sizes n(args, block);
  const std::size_t panel_floats = (n.keys + 2 + n.values) * kPanel;
  thread_local Scratch memory;
  float* panels = memory.floats(n.panels * panel_floats + kTile * (padded(n.keys) + padded(n.values) + kPanel + 1) +
                                kPanel + 2 * padded(n.keys + n.values));
  float* keys = panels + n.panels * panel_floats;
  float* values = keys + kTile * padded(n.keys);
  float* scores = values + kTile * padded(n.values);
  float* row_scores = scores + kTile * kPanel;
  float* factors = row_scores + kTile;
  float* groups = factors + kPanel;

  HWY_ALIGN Panel panel_of[kMaxRowsOfBlock / kPanel];
  for (std::size_t p = 0; p < n.panels; ++p) panel_of[p] = make_panel(args, block, n, p, panels + p * panel_floats);

  for (int begin = block.columns.begin; begin < block.columns.end; begin += static_cast<int>(kTile)) {
    const Range columns{begin, std::min(block.columns.end, begin + static_cast<int>(kTile))};
    const auto count = static_cast<std::size_t>(columns.end - columns.begin);
    for (std::size_t j = 0; j < count; ++j) {
      const int column = begin + static_cast<int>(j);
      unpack_row(args.keys, block.batch, block.kv_head, column, groups, keys + j * n.keys);
      float* value = values + j * n.values;
      unpack_row(args.values, block.batch, block.kv_head, column, groups, value);
      std::fill(value + args.values.size, value + n.values, 0.0f);
    }
    std::fill(keys + count * n.keys, keys + up(count) * n.keys, 0.0f);

    for (std::size_t p = 0; p < n.panels; ++p) {
      const Panel& panel = panel_of[p];
      if (columns.begin >= panel.columns.end || columns.end <= panel.columns.begin) continue;
      const auto rows = static_cast<std::size_t>(panel.rows.end - panel.rows.begin);
      over_vectors(rows, ScorePanel{keys, up(count), n.keys, panel.queries, scores});
      if (args.softcap != 0.0f) cap_scores(args.softcap * kLog2E, count, rows, scores);
      hide(args, block, panel, columns, row_scores, scores);
      softmax(scores, count, rows, panel, factors);
      over_vectors(rows, AccumulatePanel{values, count, n.values, scores, factors, panel.values});
    }
  }

  const std::size_t features = padded(static_cast<std::size_t>(args.values.size));
  for (std::size_t r = 0; r < n.rows; ++r) {
    const Panel& panel = panel_of[r / kPanel];
    const std::size_t lane = r % kPanel;
    out.top[r] = panel.top[lane];
    out.total[r] = panel.total[lane];
    float* to = out.values + r * features;
    for (std::size_t f = 0; f < n.values; ++f) to[f] = panel.values[f * kPanel + lane];
  }
}

}  // namespace reprise::kernels::cpu::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu::internal {

HWY_EXPORT(many_rows);

void attend_many_rows(const AttentionArgs& args, const Block& block, const PartialSums& out) {
  HWY_DYNAMIC_DISPATCH(many_rows)(args, block, out);
}

}  // namespace reprise::kernels::cpu::internal
#endif
