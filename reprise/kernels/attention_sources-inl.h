// A head's stored rows in the form that few queries read fastest, for each instruction set: included once per Highway
// target. Private to `kernels`.
#if defined(REPRISE_KERNELS_ATTENTION_SOURCES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_ATTENTION_SOURCES_INL_H_
#undef REPRISE_KERNELS_ATTENTION_SOURCES_INL_H_
#else
#define REPRISE_KERNELS_ATTENTION_SOURCES_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "reprise/kernels/attention_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::internal::HWY_NAMESPACE {

// Columns whose scales are widened, or which are unpacked, at a time: they stay in the first-level cache.
inline constexpr std::size_t kStep = 64;

// Columns that are asked for ahead of use: a processor's own looking ahead ends where a page does.
inline constexpr std::size_t kAhead = 24;
inline constexpr std::size_t kAskedOfPage = 2048;  // bytes of the rows of a head

HWY_INLINE void ask_for(const void* data, std::ptrdiff_t bytes_from_here, std::size_t bytes) {
  const auto at = reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes_from_here);
  for (std::size_t i = 0; i < bytes; i += 64) hwy::Prefetch(reinterpret_cast<const char*>(at + i));
}

// Sources of stored rows: vector i of column j of the step.
template <typename T>
struct DenseSource {
  const T* data;
  std::ptrdiff_t stride;
  const T* next;       // of columns from `border` on, which are asked for but not read
  std::size_t border;  // where another page begins
  HWY_INLINE VF operator()(std::size_t j, std::size_t i) const {
    return load_floats(data + static_cast<std::ptrdiff_t>(j) * stride + i * kLanes);
  }
  HWY_INLINE void ask(std::size_t j, std::size_t vectors) const {
    const std::size_t column = j + kAhead;
    const bool beyond = column >= border;
    ask_for(beyond ? next : data,
            static_cast<std::ptrdiff_t>(beyond ? column - border : column) * stride *
                static_cast<std::ptrdiff_t>(sizeof(T)),
            vectors * kLanes * sizeof(T));
  }
};

template <int kBits>
struct PackedSource {
  const std::uint8_t* data;
  std::ptrdiff_t stride;
  const float* scales;  // [columns, groups]
  const float* biases;
  std::size_t groups;
  std::size_t vectors_of_group;
  HWY_INLINE VF operator()(std::size_t j, std::size_t i) const {
    const F32 d;
    const std::uint8_t* row = data + static_cast<std::ptrdiff_t>(j) * stride;
    const std::size_t group = j * groups + i / vectors_of_group;
    const VF q = kBits == 8 ? numbers8(row, i * kLanes) : numbers4(row, i * kLanes);
    return hn::MulAdd(hn::Set(d, scales[group]), q, hn::Set(d, biases[group]));
  }
  HWY_INLINE void ask(std::size_t, std::size_t) const {}  // bound by unpacking: it made them slower
};

// Stored rows of one head, step by step, in the form that reads them fastest.
class StepReader {
 public:
  static std::size_t scratch_floats(const StoredRows& rows) {
    const auto size = static_cast<std::size_t>(rows.size);
    return kStep * padded(size) + 4 * padded(size);
  }

  StepReader(const StoredRows& rows, int batch, int head, float* scratch)
      : rows_(rows), batch_(batch), head_(head), scratch_(scratch) {
    const auto size = static_cast<std::size_t>(rows.size);
    whole_ = size % kLanes == 0;
    vectors_ = (size + kLanes - 1) / kLanes;
  }

  std::size_t vectors() const { return vectors_; }

  // Of the columns from `column` on, at most `most`: those that can be read in one step.
  std::size_t columns_of_step(int column, std::size_t most) const {
    const auto in_page = static_cast<std::size_t>(column % kPageColumns);
    return std::min(most, rows_.pages.empty() ? kStep : static_cast<std::size_t>(kPageColumns) - in_page);
  }

  // Asks for the page of that column, if there is one: its groups and its first rows. From there on a processor looks
  // ahead by itself.
  HWY_INLINE void ask_for_page_of(int column) const {
    const auto page = static_cast<std::size_t>(column / kPageColumns);
    if (page >= rows_.pages.size()) return;
    const std::byte* at = rows_.pages[page];
    const auto element = static_cast<std::ptrdiff_t>(rows_.bits == 0 ? size_of(rows_.element) : 4);
    const std::ptrdiff_t bytes = rows_.head_stride * element;
    ask_for(at + rows_.data_at, head_ * bytes, std::min(kAskedOfPage, static_cast<std::size_t>(bytes)));
    if (rows_.bits == 0) return;
    const std::ptrdiff_t groups = rows_.group_head_stride * static_cast<std::ptrdiff_t>(size_of(rows_.element));
    ask_for(at + rows_.scales_at, head_ * groups, static_cast<std::size_t>(groups));
    ask_for(at + rows_.biases_at, head_ * groups, static_cast<std::size_t>(groups));
  }

  // Calls use(source) for the `count` columns of a step from `column` on.
  template <class Use>
  HWY_INLINE void with(int column, std::size_t count, const Use& use) const {
    const ColumnPlace place = place_of(rows_, column);
    const std::ptrdiff_t at =
        batch_ * rows_.batch_stride + head_ * rows_.head_stride + place.column * rows_.column_stride;
    if (whole_ && rows_.bits == 0) {
      if (rows_.element == Element::f32) {
        use(dense<float>(column, place, at));
      } else if (rows_.element == Element::f16) {
        use(dense<hwy::float16_t>(column, place, at));
      } else {
        use(dense<hwy::bfloat16_t>(column, place, at));
      }
    } else if (rows_.bits == 8) {
      use(packed<8>(column, place, count, at));
    } else if (rows_.bits == 4) {
      use(packed<4>(column, place, count, at));
    } else {
      use(unpacked(column, count));
    }
  }

 private:
  template <typename T>
  HWY_INLINE DenseSource<T> dense(int column, const ColumnPlace& place, std::ptrdiff_t at) const {
    const T* data = static_cast<const T*>(place.data) + at;
    const std::size_t page = static_cast<std::size_t>(column / kPageColumns) + 1;
    if (page >= rows_.pages.size()) return {data, rows_.column_stride, data, ~std::size_t{0}};
    const auto* next = reinterpret_cast<const T*>(rows_.pages[page] + rows_.data_at) + head_ * rows_.head_stride;
    return {data, rows_.column_stride, next, static_cast<std::size_t>(kPageColumns - place.column)};
  }

  template <int kBits>
  HWY_INLINE PackedSource<kBits> packed(int column, const ColumnPlace& place, std::size_t count,
                                        std::ptrdiff_t at) const {
    const auto groups = static_cast<std::size_t>(rows_.size / rows_.group_size);
    float* scales = scratch_;
    float* biases = scratch_ + kStep * groups;
    const auto stride = rows_.group_column_stride;
    std::ptrdiff_t group_at =
        batch_ * rows_.group_batch_stride + head_ * rows_.group_head_stride + place.column * stride;
    if (stride == static_cast<std::ptrdiff_t>(groups)) {
      with_element(rows_.element, place.scales, WidenTo{group_at, count * groups, scales});
      with_element(rows_.element, place.biases, WidenTo{group_at, count * groups, biases});
    } else {
      for (std::size_t j = 0; j < count; ++j, group_at += stride) {
        with_element(rows_.element, place.scales, WidenTo{group_at, groups, scales + j * groups});
        with_element(rows_.element, place.biases, WidenTo{group_at, groups, biases + j * groups});
      }
    }
    ask_for_page_of(column + kPageColumns);
    return {reinterpret_cast<const std::uint8_t*>(static_cast<const std::uint32_t*>(place.data) + at),
            rows_.column_stride * 4,
            scales,
            biases,
            groups,
            static_cast<std::size_t>(rows_.group_size) / kLanes};
  }

  HWY_INLINE DenseSource<float> unpacked(int column, std::size_t count) const {
    const std::size_t stride = vectors_ * kLanes;
    const auto size = static_cast<std::size_t>(rows_.size);
    float* groups = scratch_ + kStep * stride;
    for (std::size_t j = 0; j < count; ++j) {
      float* row = scratch_ + j * stride;
      unpack_row(rows_, batch_, head_, column + static_cast<int>(j), groups, row);
      std::fill(row + size, row + stride, 0.0f);
    }
    return {scratch_, static_cast<std::ptrdiff_t>(stride), scratch_, ~std::size_t{0}};
  }

  const StoredRows& rows_;
  int batch_;
  int head_;
  float* scratch_;
  bool whole_;
  std::size_t vectors_;
};

}  // namespace reprise::kernels::cpu::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
