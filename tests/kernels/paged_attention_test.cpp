// Attention over pages, against the same steps over a buffer of each sequence.
#include "reprise/kernels/paged_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels {
namespace {

namespace mx = mlx::core;

mx::array draw(mx::Shape shape, std::uint64_t seed, mx::Dtype dtype = mx::float32) {
  mx::array x = mx::astype(mx::random::uniform(-1.7f, 1.7f, shape, mx::float32, mx::random::key(seed)), dtype);
  x.eval();
  return x;
}

RopeParams rope(int dims, bool traditional = false, float scale = 1.0f) {
  auto frequencies = std::make_shared<std::vector<float>>();
  for (int i = 0; i < dims / 2; ++i) {
    frequencies->push_back(std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(dims)));
  }
  return {dims, traditional, scale, 1.0f, std::move(frequencies)};
}

// A page with bytes in it that are NaN in every dtype, and no plausible words.
PageMemory page(const PageLayout& layout) {
  const std::size_t bytes = layout.nbytes();
  auto* data = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{64}));
  std::memset(data, 0xff, bytes);
  return {data, [](std::byte* memory) { ::operator delete (memory, std::align_val_t{64}); }};
}

bool identical(const mx::array& a, const mx::array& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() && mx::array_equal(a, b).item<bool>();
}

float error(const mx::array& got, const mx::array& want) {
  const mx::array a = mx::astype(got, mx::float32), b = mx::astype(want, mx::float32);
  return mx::divide(mx::max(mx::abs(mx::subtract(a, b))), mx::max(mx::abs(b))).item<float>();
}

mx::array rows_of(const mx::array& x, int begin, int end) {
  return mx::slice(x, {begin, 0, 0}, {end, x.shape(1), x.shape(2)});
}

struct Setting {
  std::string name = "";
  int heads = 4;
  PageLayout layout = {2, 64, 64, mx::float16, {}};
  mx::Dtype dtype = mx::float32;
  std::optional<RopeParams> rope = rope_of_64();
  PagedAttentionOptions options = {.scale = 0.2f};
  static RopeParams rope_of_64() { return kernels::rope(64); }
};

std::vector<Setting> settings() {
  std::vector<Setting> out;
  const auto add = [&](const char* name, const auto& change) { change(out.emplace_back(Setting{.name = name})); };
  add("plain", [](Setting&) {});
  add("float32 pages", [](Setting& s) { s.layout.dtype = mx::float32; });
  add("bfloat16 pages and queries", [](Setting& s) { s.layout.dtype = s.dtype = mx::bfloat16; });
  add("float16 queries", [](Setting& s) { s.dtype = mx::float16; });
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    add("quantised", [=](Setting& s) { s.layout.quantization = KVQuantization{32, bits}; });
  }
  add("quantised, float32 scales", [](Setting& s) {
    s.layout.quantization = KVQuantization{64, 8};
    s.layout.dtype = mx::float32;
  });
  add("heads of 16, one for all", [](Setting& s) {
    s.layout = {1, 16, 16, mx::float16, {}};
    s.rope = kernels::rope(16, true);
  });
  add("heads of 80", [](Setting& s) {
    s.layout = {4, 80, 80, mx::float16, {}};
    s.rope = kernels::rope(32, false, 0.25f);
  });
  add("heads of 128 and 32, groups of 3", [](Setting& s) {
    s.heads = 9;
    s.layout = {3, 128, 32, mx::bfloat16, {}};
    s.rope = kernels::rope(128);
  });
  add("no rope", [](Setting& s) { s.rope.reset(); });
  add("window", [](Setting& s) { s.options.visibility.window = 90; });
  add("narrow window", [](Setting& s) { s.options.visibility.window = 3; });
  add("chunk", [](Setting& s) { s.options.visibility.chunk = 100; });
  add("window and chunk", [](Setting& s) { s.options.visibility = {40, 128}; });
  add("sinks", [](Setting& s) { s.options.sinks = draw({4}, 9); });
  add("softcap", [](Setting& s) { s.options.softcap = 2.0f; });
  add("norms", [](Setting& s) {
    s.options.norms = {RmsNormParams{draw({64}, 11), 1e-3f}, RmsNormParams{draw({64}, 12, mx::bfloat16), 1e-6f}};
  });
  return out;
}

// One sequence both ways. The buffer's way is told by a mask what the pages' way is told by its visibility.
class Sequence {
 public:
  Sequence(const Setting& setting, std::uint64_t seed) : setting_(&setting), seed_(seed) {}

  int length() const { return length_; }

  mx::array projection(int part, int rows) const {
    const PageLayout& n = setting_->layout;
    const int features =
        part == 0 ? setting_->heads * n.key_size : n.kv_heads * (part == 1 ? n.key_size : n.value_size);
    return draw({1, rows, features}, seed_ * 1000 + static_cast<std::uint64_t>(length_ * 3 + part), setting_->dtype);
  }

  // For the next `rows` rows, which then count as there.
  PagedSequence grow(int rows) {
    const int pages = (length_ + rows + kPageRows - 1) / kPageRows;
    while (first_page_ + static_cast<int>(pages_.size()) < pages) pages_.push_back(page(setting_->layout));
    PagedSequence out{pages_, first_page_, length_, std::exchange(copy_from_, {})};
    length_ += rows;
    return out;
  }

  // Pages that no later query sees are given up.
  void drop() {
    const int first = setting_->options.visibility.first_visible(length_) / kPageRows;
    const int gone = std::min(first - first_page_, static_cast<int>(pages_.size()));
    if (gone <= 0) return;
    pages_.erase(pages_.begin(), pages_.begin() + gone);
    first_page_ += gone;
  }

  // Goes on from here beside the original: the last page, which both would write, becomes its own.
  Sequence fork(std::uint64_t seed) const {
    Sequence out = *this;
    out.seed_ = seed;
    if (length_ % kPageRows != 0) {
      out.copy_from_ = out.pages_.back();
      out.pages_.back() = page(setting_->layout);
    }
    return out;
  }

  // The buffer's way. Rows are those of projection() before grow().
  mx::array expected(const mx::array& q, const mx::array& k, const mx::array& v) {
    const int at = columns_, rows = q.shape(1);
    StoreTarget target{buffers_, setting_->layout.quantization, at, at + rows, 2048, setting_->layout.dtype};
    AttentionParams params{setting_->options.scale, Causal{}};
    const PagedVisibility& visibility = setting_->options.visibility;
    if (visibility.window > 0 || visibility.chunk > 0) {
      std::vector<std::uint8_t> sees;
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < at + rows; ++j) sees.push_back(j <= at + i && j >= visibility.first_visible(at + i));
      }
      params.mask = mx::astype(mx::array(sees.begin(), {rows, at + rows}, mx::uint8), mx::bool_);
    }
    params.sinks = setting_->options.sinks;
    params.softcap = setting_->options.softcap;
    auto result = store_and_attend(q, k, v, setting_->heads, setting_->rope ? &*setting_->rope : nullptr, at,
                                   std::move(target), params, setting_->options.norms);
    buffers_ = std::move(result.tensors);
    columns_ += rows;
    return result.output;
  }

  void expect_same_rows(const std::vector<mx::array>& after) const {
    const PagedSequence now{pages_, first_page_, length_, {}};
    const int begin = std::max(first_page_ * kPageRows, length_ - 130);
    const auto got = paged_rows(setting_->layout, now, begin, length_, after);
    ASSERT_EQ(got.size(), buffers_.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      mx::Shape stop = buffers_[i].shape();
      stop[2] = length_;
      EXPECT_TRUE(identical(got[i], mx::slice(buffers_[i], {0, 0, begin, 0}, stop))) << "part " << i;
    }
  }

  const std::vector<PageMemory>& pages() const { return pages_; }
  int first_page() const { return first_page_; }

 private:
  const Setting* setting_;
  std::uint64_t seed_;
  std::vector<PageMemory> pages_;
  int first_page_ = 0;
  int length_ = 0;
  PageMemory copy_from_;
  std::vector<mx::array> buffers_;
  int columns_ = 0;
};

struct Projections {
  mx::array q, k, v;
};

Projections projections(const Sequence& sequence, int rows) {
  return {sequence.projection(0, rows), sequence.projection(1, rows), sequence.projection(2, rows)};
}

Projections side_by_side(const std::vector<Projections>& rows) {
  std::vector<mx::array> q, k, v;
  for (const auto& row : rows) {
    q.push_back(row.q);
    k.push_back(row.k);
    v.push_back(row.v);
  }
  return {mx::concatenate(q, 0), mx::concatenate(k, 0), mx::concatenate(v, 0)};
}

PagedResult attend(const Setting& s, const Projections& p, std::vector<PagedSequence> sequences,
                   const std::vector<mx::array>& after) {
  return paged_store_and_attend(p.q, p.k, p.v, s.heads, s.rope ? &*s.rope : nullptr, s.layout, std::move(sequences),
                                s.options, after);
}

// Hidden columns are skipped by one and masked by the other, so only what all columns are seen of is the same bit for
// bit.
void expect_same(const Setting& s, const mx::array& got, const mx::array& want) {
  ASSERT_EQ(got.shape(), want.shape());
  ASSERT_EQ(got.dtype(), want.dtype());
  if (s.options.visibility == PagedVisibility{}) {
    EXPECT_TRUE(identical(got, want)) << error(got, want);
  } else {
    EXPECT_LE(error(got, want), s.dtype == mx::float32 ? 2e-6f : 1e-2f);
  }
}

TEST(PagedAttention, EverySequenceOfARaggedBatchGivesWhatItsOwnBufferGives) {
  for (const Setting& s : settings()) {
    SCOPED_TRACE(s.name + (s.layout.quantization ? " " + std::to_string(s.layout.quantization->bits) : ""));
    std::vector<Sequence> sequences;
    mx::array stored = mx::zeros({1}, mx::int32);
    for (const int length : {0, 1, 63, 64, 65, 127, 200, 1000}) {
      Sequence& one = sequences.emplace_back(s, sequences.size() + 1);
      if (length == 0) continue;
      const Projections p = projections(one, length);
      const PagedResult result = attend(s, p, {one.grow(length)}, {stored});
      stored = result.stored;
      expect_same(s, result.output, one.expected(p.q, p.k, p.v));
      one.drop();
    }
    for (const int rows : {1, 5, 1, 64, 1}) {
      SCOPED_TRACE(rows);
      std::vector<Projections> all;
      std::vector<PagedSequence> paged;
      for (Sequence& one : sequences) {
        all.push_back(projections(one, rows));
        paged.push_back(one.grow(rows));
      }
      const PagedResult result = attend(s, side_by_side(all), std::move(paged), {stored});
      stored = result.stored;
      for (std::size_t b = 0; b < sequences.size(); ++b) {
        SCOPED_TRACE(b);
        const int row = static_cast<int>(b);
        expect_same(s, rows_of(result.output, row, row + 1), sequences[b].expected(all[b].q, all[b].k, all[b].v));
      }
    }
    for (const Sequence& one : sequences) one.expect_same_rows({stored});
    if (HasFailure()) return;
  }
}

TEST(PagedAttention, ABatchGivesTheBitsOfEachSequenceAloneOnAnyNumberOfThreads) {
  for (const Setting& s : settings()) {
    SCOPED_TRACE(s.name);
    std::vector<Sequence> together, alone;
    for (const int length : {3, 300, 64, 700}) {
      const auto seed = static_cast<std::uint64_t>(length);
      for (auto* sequences : {&together, &alone}) {
        Sequence& one = sequences->emplace_back(s, seed);
        const Projections p = projections(one, length);
        mx::eval(attend(s, p, {one.grow(length)}, {}).output);
      }
    }
    std::vector<Projections> all;
    std::vector<PagedSequence> paged;
    for (Sequence& one : together) {
      all.push_back(projections(one, 2));
      paged.push_back(one.grow(2));
    }
    ThreadPool::set_process_threads(3);
    const mx::array batch = attend(s, side_by_side(all), std::move(paged), {}).output;
    mx::eval(batch);
    ThreadPool::set_process_threads(1);
    for (std::size_t b = 0; b < alone.size(); ++b) {
      const mx::array one = attend(s, all[b], {alone[b].grow(2)}, {}).output;
      const int row = static_cast<int>(b);
      EXPECT_TRUE(identical(rows_of(batch, row, row + 1), one)) << b;
    }
    ThreadPool::set_process_threads(2);
  }
}

TEST(PagedAttention, StepsThatWereNotRunYetFollowEachOther) {
  const Setting s{.name = ""};
  Sequence one(s, 1);
  std::vector<mx::array> got, want, after;
  for (const int rows : {70, 1, 1, 256, 1, 5, 1}) {
    const Projections p = projections(one, rows);
    const PagedResult result = attend(s, p, {one.grow(rows)}, after);
    after = {result.stored, result.stored};
    got.push_back(result.output);
    want.push_back(one.expected(p.q, p.k, p.v));
  }
  const auto rows = paged_rows(s.layout, {one.pages(), 0, one.length(), {}}, 60, one.length(), after);
  mx::eval(rows);  // nothing else was asked for
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(identical(got[i], want[i])) << i;
  one.expect_same_rows({});
}

TEST(PagedAttention, AForkCopiesTheRowsThatItSharesOnAPage) {
  for (const auto& quantization : {std::optional<KVQuantization>(), std::optional(KVQuantization{32, 3})}) {
    for (const int length : {1, 63, 64, 100}) {
      Setting s{.name = ""};
      s.layout.quantization = quantization;
      Sequence one(s, 1);
      Projections p = projections(one, length);
      PagedResult result = attend(s, p, {one.grow(length)}, {});
      expect_same(s, result.output, one.expected(p.q, p.k, p.v));
      const Sequence at_length = one;
      // The original goes on, in place, before the fork does.
      Sequence fork = one.fork(2);
      p = projections(one, 3);
      const Projections of_fork = projections(fork, 3);
      const PagedResult both = attend(s, side_by_side({p, of_fork}), {one.grow(3), fork.grow(3)}, {result.stored});
      expect_same(s, rows_of(both.output, 0, 1), one.expected(p.q, p.k, p.v));
      expect_same(s, rows_of(both.output, 1, 2), fork.expected(of_fork.q, of_fork.k, of_fork.v));
      one.expect_same_rows({both.stored});
      fork.expect_same_rows({both.stored});
    }
  }
}

TEST(PagedAttention, RowsThatAForkHasStillToCopyAreReadWhereTheyLie) {
  const Setting s{.name = ""};
  Sequence one(s, 1);
  const Projections p = projections(one, 100);
  const PagedResult result = attend(s, p, {one.grow(100)}, {});
  one.expected(p.q, p.k, p.v);
  std::vector<PageMemory> pages = {one.pages()[0], page(s.layout)};
  const auto got = paged_rows(s.layout, {pages, 0, 100, one.pages()[1]}, 10, 100, {result.stored});
  const auto want = paged_rows(s.layout, {one.pages(), 0, 100, {}}, 10, 100, {});
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(identical(got[i], want[i]));
}

TEST(PagedAttention, AMaskHidesWhatItHidesInABuffer) {
  for (const int length : {5, 150}) {
    for (const int window : {0, 100}) {
      Setting s{.name = ""};
      s.options.visibility.window = window;
      Sequence one(s, 1);
      Projections p = projections(one, length);
      mx::array stored = attend(s, p, {one.grow(length)}, {}).stored;
      one.expected(p.q, p.k, p.v);
      one.drop();
      for (const int rows : {1, 7, 60}) {
        const int columns = one.length() + rows;
        const mx::array sees =
            mx::logical_or(mx::greater(draw({4, rows, columns}, 7), mx::array(0.0f)),
                           mx::equal(mx::arange(columns), mx::reshape(mx::arange(one.length(), columns), {rows, 1})));
        for (const mx::array& mask : {sees, mx::where(sees, draw({4, rows, columns}, 8), mx::array(-1e9f))}) {
          Sequence other = one.fork(3);
          p = projections(other, rows);
          Setting masked = s;
          masked.options.mask = mask;
          const PagedResult got = attend(masked, p, {other.grow(rows)}, {stored});
          // Written out: over all rows as arrays of their own.
          mx::array causal =
              mx::less_equal(mx::arange(columns), mx::reshape(mx::arange(columns - rows, columns), {rows, 1}));
          if (window > 0) {
            causal = mx::logical_and(
                causal, mx::greater(mx::arange(columns),
                                    mx::reshape(mx::arange(columns - rows, columns), {rows, 1}) - mx::array(window)));
          }
          const mx::array all =
              mask.dtype() == mx::bool_ ? mx::logical_and(mask, causal) : mx::where(causal, mask, mx::array(-1e30f));
          const int begin = other.first_page() * kPageRows;
          const auto kv =
              paged_rows(s.layout, {other.pages(), other.first_page(), columns, {}}, begin, columns, {got.stored});
          const mx::array part = mx::slice(all, {0, 0, begin}, {4, rows, columns});
          StoreTarget nowhere;
          nowhere.visible = rows;
          nowhere.capacity = rows;
          AttentionParams params{s.options.scale, mx::expand_dims(part, 0)};
          const mx::array q = mx::transpose(mx::reshape(p.q, {1, rows, 4, 64}), {0, 2, 1, 3});
          const auto rotated = reference::store_and_attend(p.q, p.q, p.q, 4, &*s.rope, columns - rows, nowhere, {});
          const mx::array want = attention(rotated.tensors[0], DenseKV{kv[0], kv[1]}, params);
          const mx::array flat = mx::reshape(mx::transpose(want, {0, 2, 1, 3}), {1, rows, -1});
          EXPECT_LE(error(got.output, flat), 2e-4f) << length << " " << window << " " << rows;
        }
      }
    }
  }
}

TEST(PagedAttention, RowsAreStoredAsTheyCome) {
  for (const auto& quantization : {std::optional<KVQuantization>(), std::optional(KVQuantization{32, 4})}) {
    const PageLayout layout{2, 64, 32, mx::float16, quantization};
    std::vector<PageMemory> pages = {page(layout), page(layout), page(layout)};
    const mx::array keys = draw({1, 2, 150, 64}, 1), values = draw({1, 2, 150, 32}, 2);
    const auto part = [](const mx::array& x, int begin, int end) {
      return mx::slice(x, {0, 0, begin, 0}, {1, 2, end, x.shape(3)});
    };
    const mx::array first = paged_store(part(keys, 0, 20), part(values, 0, 20), layout, {pages, 0, 0, {}}, {});
    const mx::array rest = paged_store(part(keys, 20, 150), part(values, 20, 150), layout, {pages, 0, 20, {}}, {first});
    const auto got = paged_rows(layout, {pages, 0, 150, {}}, 3, 140, {rest});
    std::vector<mx::array> want;
    for (const mx::array& x : {keys, values}) {
      const mx::array rows = part(mx::astype(x, mx::float16), 3, 140);
      if (!quantization) {
        want.push_back(rows);
        continue;
      }
      for (mx::array& tensor : mx::quantize(rows, 32, 4)) want.push_back(std::move(tensor));
    }
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(identical(got[i], want[i])) << i;
  }
}

TEST(PagedAttention, WhatDoesNotFitIsRefused) {
  const Setting s{.name = ""};
  Sequence one(s, 1), other(s, 2);
  const Projections p = projections(one, 3);
  const PagedSequence right = one.grow(3);
  PagedSequence few = right;
  few.length = 62;
  EXPECT_THROW(attend(s, p, {few}, {}), Error);
  PagedSequence unseen = right;
  unseen.first_page = 1;
  unseen.length = 70;
  EXPECT_THROW(attend(s, p, {unseen}, {}), Error);
  EXPECT_THROW(attend(s, p, {right, other.grow(3)}, {}), Error);
  EXPECT_THROW(paged_rows(s.layout, right, 60, 70, {}), Error);
}

TEST(PageLayout, PartsFollowEachOtherAtMultiplesOf64Bytes) {
  const PageLayout dense{3, 20, 7, mx::float16, {}};
  EXPECT_EQ(dense.offsets(), (std::vector<std::size_t>{0, 3 * 64 * 20 * 2}));
  EXPECT_EQ(dense.nbytes(), std::size_t{3 * 64 * 27 * 2});
  const PageLayout quantised{2, 64, 32, mx::float32, KVQuantization{32, 3}};
  const std::vector<std::size_t> offsets = quantised.offsets();
  const std::vector<std::size_t> sizes = {2 * 64 * 24, 2 * 64 * 2 * 4, 2 * 64 * 2 * 4,
                                          2 * 64 * 12, 2 * 64 * 4,     2 * 64 * 4};
  std::size_t at = 0;
  ASSERT_EQ(offsets.size(), sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(offsets[i], at);
    EXPECT_EQ(offsets[i] % 64, 0u);
    at += (sizes[i] + 63) / 64 * 64;
  }
  EXPECT_EQ(quantised.nbytes(), at);
}

TEST(PagedVisibility, TheFirstVisibleKeyIsThatOfWindowAndChunk) {
  EXPECT_EQ((PagedVisibility{0, 0}.first_visible(500)), 0);
  EXPECT_EQ((PagedVisibility{10, 0}.first_visible(4)), 0);
  EXPECT_EQ((PagedVisibility{10, 0}.first_visible(500)), 491);
  EXPECT_EQ((PagedVisibility{0, 128}.first_visible(500)), 384);
  EXPECT_EQ((PagedVisibility{0, 128}.first_visible(384)), 384);
  EXPECT_EQ((PagedVisibility{200, 128}.first_visible(500)), 384);
}

}  // namespace
}  // namespace reprise::kernels
