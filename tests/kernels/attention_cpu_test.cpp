#define HWY_WANT_AVX3_DL  // as the kernels have it
// Attention by pointers against its definition in float64, for every instruction set that this machine has.
#include "reprise/kernels/attention_cpu.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <vector>

namespace reprise::kernels::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::uint16_t half_of(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  if (x != x) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (std::abs(x) < 6.2e-5f) {
    return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(std::lround(std::abs(x) * 16777216.0f)));
  }
  const std::uint32_t rounded = (bits & 0x7fffffffu) + 0x1000u;
  return static_cast<std::uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

float float_of_half(std::uint16_t h) {
  const int exponent = h >> 10 & 31;
  const float fraction = static_cast<float>(h & 1023);
  const float value = exponent == 0    ? std::ldexp(fraction, -24)
                      : exponent == 31 ? kNaN
                                       : std::ldexp(1024.0f + fraction, exponent - 25);
  return h & 0x8000 ? -value : value;
}

// Numbers as an element type stores them; `at` says what was stored.
struct Elements {
  Element element = Element::f32;
  std::vector<float> wide;
  std::vector<std::uint16_t> narrow;

  Elements(Element kind, std::size_t count) : element(kind) {
    (kind == Element::f32 ? wide.resize(count) : wide.resize(0));
    narrow.resize(kind == Element::f32 ? 0 : count);
    for (std::size_t i = 0; i < count; ++i) set(i, kNaN);
  }
  void set(std::size_t i, float x) {
    if (element == Element::f32) wide[i] = x;
    if (element == Element::f16) narrow[i] = half_of(x);
    if (element == Element::bf16) narrow[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
  }
  float at(std::size_t i) const {
    if (element == Element::f32) return wide[i];
    return element == Element::f16 ? float_of_half(narrow[i])
                                   : std::bit_cast<float>(static_cast<std::uint32_t>(narrow[i]) << 16);
  }
  const void* data() const {
    return element == Element::f32 ? static_cast<const void*>(wide.data()) : static_cast<const void*>(narrow.data());
  }
};

struct Sizes {
  int B = 1, H = 4, Hkv = 2, L = 1, S = 70, D = 64, Dv = 64;
};

struct Storage {
  int bits = 0;
  int group_size = 0;
  Element element = Element::f16;
};

// Keys or values in a buffer with room after the last column, which holds NaN.
struct Stored {
  StoredRows view;
  Elements elements, biases;
  std::vector<std::uint32_t> words;
  std::size_t capacity;

  Stored(const Sizes& n, int size, const Storage& storage, std::mt19937& random)
      : elements(storage.element, 0), biases(storage.element, 0), capacity(static_cast<std::size_t>(n.S) + 3) {
    const std::size_t columns = static_cast<std::size_t>(n.B * n.Hkv) * capacity;
    const auto width = static_cast<std::size_t>(size);
    std::normal_distribution<float> normal;
    view.size = size;
    view.bits = storage.bits;
    view.group_size = storage.group_size;
    view.element = storage.element;
    const std::size_t of_column = storage.bits == 0 ? width : width / static_cast<std::size_t>(storage.group_size);
    elements = Elements(storage.element, columns * of_column);
    biases = elements;
    for (std::size_t i = 0; i < columns * of_column; ++i) {
      if (i / of_column % capacity >= static_cast<std::size_t>(n.S)) continue;
      if (storage.bits == 0) {
        elements.set(i, normal(random));
      } else {
        elements.set(i, (0.5f + 0.1f * normal(random)) * 4.0f / static_cast<float>(1 << storage.bits));
        biases.set(i, normal(random) * 0.2f - 1.0f);
      }
    }
    const std::size_t words_of_column = width * static_cast<std::size_t>(storage.bits) / 32;
    words.resize(columns * words_of_column);
    for (auto& word : words) word = static_cast<std::uint32_t>(random());
    const std::size_t step = storage.bits == 0 ? width : words_of_column;
    view.column_stride = static_cast<std::ptrdiff_t>(step);
    view.head_stride = static_cast<std::ptrdiff_t>(step * capacity);
    view.batch_stride = view.head_stride * n.Hkv;
    view.group_column_stride = static_cast<std::ptrdiff_t>(of_column);
    view.group_head_stride = static_cast<std::ptrdiff_t>(of_column * capacity);
    view.group_batch_stride = view.group_head_stride * n.Hkv;
    view.data = storage.bits == 0 ? elements.data() : words.data();
    view.scales = elements.data();
    view.biases = biases.data();
  }
  Stored(const Stored&) = delete;

  double at(int row, int column, int feature) const {  // row: batch * Hkv + head
    const std::size_t c = static_cast<std::size_t>(row) * capacity + static_cast<std::size_t>(column);
    const auto width = static_cast<std::size_t>(view.size), f = static_cast<std::size_t>(feature);
    if (view.bits == 0) return elements.at(c * width + f);
    const auto bits = static_cast<std::size_t>(view.bits);
    std::size_t q = 0;
    for (std::size_t i = 0; i < bits; ++i) {
      const std::size_t bit = c * width * bits + f * bits + i;
      q |= static_cast<std::size_t>(words[bit / 32] >> bit % 32 & 1u) << i;
    }
    const auto group_size = static_cast<std::size_t>(view.group_size);
    const std::size_t group = c * (width / group_size) + f / group_size;
    return static_cast<double>(elements.at(group)) * static_cast<double>(q) + static_cast<double>(biases.at(group));
  }
};

struct Problem {
  Sizes n;
  std::mt19937 random{7};
  Stored keys, values;
  std::vector<float> queries;
  AttentionArgs args;

  explicit Problem(const Sizes& sizes, const Storage& key_storage = {}, const Storage& value_storage = {})
      : n(sizes), keys(n, n.D, key_storage, random), values(n, n.Dv, value_storage, random) {
    std::normal_distribution<float> normal;
    queries.resize(static_cast<std::size_t>(n.B * n.H * n.L * n.D));
    for (float& q : queries) q = normal(random);
    args = {n.B, n.H, n.Hkv, n.L, n.S, 0.3f, {}, keys.view, values.view, {}, false, 0, {}, nullptr, nullptr};
    args.queries = {queries.data(), n.H * n.L * n.D, n.L * n.D, n.D};
  }

  // [B, L, H, Dv], as a linear layer takes it.
  std::vector<float> attend(int threads = 2) {
    std::vector<float> out(static_cast<std::size_t>(n.B * n.L * n.H * n.Dv), kNaN);
    args.output = {out.data(), n.L * n.H * n.Dv, n.Dv, n.H * n.Dv};
    ThreadPool pool(threads);
    cpu::attend(args, pool);
    return out;
  }

  // `added(b, h, i, j)` to a score of base e; -infinity: hidden.
  std::vector<double> expected(const std::function<double(int, int, int, int)>& added) const {
    std::vector<double> out;
    for (int b = 0; b < n.B; ++b) {
      for (int i = 0; i < n.L; ++i) {
        for (int h = 0; h < n.H; ++h) {
          const int row = b * n.Hkv + h / (n.H / n.Hkv);
          const float* q = queries.data() + static_cast<std::size_t>(((b * n.H + h) * n.L + i) * n.D);
          std::vector<double> scores;
          double top = args.sinks ? static_cast<double>(args.sinks[h]) : -1e300;
          for (int j = 0; j < n.S; ++j) {
            double dot = added(b, h, i, j);
            if (dot > -1e300) {
              double score = 0.0;
              for (int d = 0; d < n.D; ++d) score += 0.3f * static_cast<double>(q[d]) * keys.at(row, j, d);
              if (const auto cap = static_cast<double>(args.softcap); cap != 0.0) score = cap * std::tanh(score / cap);
              dot += score;
            }
            scores.push_back(dot);
            top = std::max(top, dot);
          }
          double total = args.sinks ? std::exp(static_cast<double>(args.sinks[h]) - top) : 0.0;
          std::vector<double> sums(static_cast<std::size_t>(n.Dv));
          for (int j = 0; j < n.S; ++j) {
            const double weight = std::exp(scores[static_cast<std::size_t>(j)] - top);
            if (weight == 0.0) continue;
            total += weight;
            for (int d = 0; d < n.Dv; ++d) sums[static_cast<std::size_t>(d)] += weight * values.at(row, j, d);
          }
          for (double sum : sums) out.push_back(total > 0 ? sum / total : 0.0);
        }
      }
    }
    return out;
  }
};

constexpr double kHidden = -std::numeric_limits<double>::infinity();
double nothing(int, int, int, int) { return 0.0; }

void expect_near(const std::vector<float>& got, const std::vector<double>& want, double tolerance = 2e-5) {
  ASSERT_EQ(got.size(), want.size());
  double largest = 0.0;
  for (double x : want) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(got[i]), want[i], tolerance * largest) << "at " << i;
  }
}

std::vector<std::int64_t> targets() {
  std::vector<std::int64_t> out;
  for (std::int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
    out.push_back(left & -left);
  }
  return out;
}

template <typename Check>
void with_each_target(const Check& check) {
  for (const std::int64_t target : targets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    check();
    hwy::SetSupportedTargetsForTest(0);
    if (testing::Test::HasFatalFailure()) return;
  }
}

// On every instruction set.
void expect_attention(Problem& p, const std::vector<double>& want, double tolerance = 2e-5) {
  with_each_target([&] { expect_near(p.attend(), want, tolerance); });
}

TEST(AttentionCpu, EveryShapeEqualsTheDefinition) {
  for (const auto& [H, Hkv] : {std::pair(3, 3), std::pair(4, 2), std::pair(9, 3), std::pair(7, 1)}) {
    for (const auto& [D, Dv] : {std::pair(64, 64), std::pair(80, 80), std::pair(96, 32), std::pair(20, 13),
                                std::pair(192, 128), std::pair(3, 256)}) {
      for (const int L : {1, 2, 9, 40}) {
        for (const int S : {1, 6, 97}) {
          SCOPED_TRACE(testing::PrintToString(std::vector<int>{H, Hkv, D, Dv, L, S}));
          Problem p({.B = 2, .H = H, .Hkv = Hkv, .L = L, .S = S, .D = D, .Dv = Dv});
          expect_attention(p, p.expected(nothing));
        }
      }
    }
  }
}

TEST(AttentionCpu, EveryElementTypeOfKeysAndValuesWorks) {
  for (const Element key : {Element::f32, Element::f16, Element::bf16}) {
    for (const Element value : {Element::f32, Element::f16, Element::bf16}) {
      for (const int L : {1, 9}) {
        for (const int D : {32, 21}) {
          Problem p({.L = L, .D = D, .Dv = D}, {0, 0, key}, {0, 0, value});
          expect_attention(p, p.expected(nothing));
        }
      }
    }
  }
}

TEST(AttentionCpu, EveryNumberOfBitsAndGroupSizeWorks) {
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const int group_size : {32, 64, 128}) {
      for (const Element element : {Element::f32, Element::f16, Element::bf16}) {
        for (const int L : {1, 12}) {
          SCOPED_TRACE(testing::PrintToString(std::vector<int>{bits, group_size, static_cast<int>(element), L}));
          const Storage storage{bits, group_size, element};
          Problem p({.L = L, .S = 67, .D = 128, .Dv = 256}, storage, storage);
          expect_attention(p, p.expected(nothing));
        }
      }
    }
  }
}

TEST(AttentionCpu, LongRowsEqualTheDefinition) {
  for (const int L : {1, 40}) {
    for (const int S : {255, 256, 257, 1500}) {
      Problem p({.L = L, .S = S, .D = 32, .Dv = 32});
      expect_attention(p, p.expected(nothing));
    }
  }
}

TEST(AttentionCpu, CausalAndWindowHideWhatTheyMust) {
  for (const int window : {0, 1, 5, 200}) {
    for (const int L : {1, 3, 70, 200}) {
      for (const int S : {L, L + 1, L + 300}) {
        SCOPED_TRACE(testing::PrintToString(std::vector<int>{window, L, S}));
        Problem p({.B = 2, .H = 3, .Hkv = 1, .L = L, .S = S, .D = 16, .Dv = 16});
        p.args.causal = true;
        p.args.window = window;
        expect_attention(p, p.expected([&](int, int, int i, int j) {
          const int end = S - L + i + 1;
          return j < end && (window == 0 || j >= end - window) ? 0.0 : kHidden;
        }));
      }
    }
  }
}

TEST(AttentionCpu, ChunksHideWhatLiesBeforeThem) {
  for (const int chunk : {1, 7, 64, 300}) {
    for (const int L : {1, 3, 70}) {
      for (const int position : {0, 128}) {
        SCOPED_TRACE(testing::PrintToString(std::vector<int>{chunk, L, position}));
        Problem p({.L = L, .S = L + 300, .D = 16, .Dv = 16});
        p.args.causal = true;
        p.args.chunk = chunk;
        p.args.position = position;
        expect_attention(p, p.expected([&](int, int, int i, int j) {
          const int query = position + 300 + i;
          return j <= 300 + i && position + j >= query / chunk * chunk ? 0.0 : kHidden;
        }));
      }
    }
  }
}

// A buffer's columns in pages, of which the last is only partly there.
struct Paged {
  std::vector<std::vector<std::byte>> memory;
  std::vector<const std::byte*> pages;

  StoredRows add(const Stored& from, int heads) {
    StoredRows out = from.view;
    const auto columns = from.capacity - 3;
    const std::size_t element = size_of(from.view.element);
    const auto part = [&](const void* data, std::ptrdiff_t column_stride, std::size_t item, std::size_t& at) {
      const std::size_t row = static_cast<std::size_t>(column_stride) * item;
      const std::size_t of_page = row * kPageColumns * static_cast<std::size_t>(heads);
      memory.resize((columns + kPageColumns - 1) / kPageColumns);
      at = memory[0].size();
      for (std::size_t page = 0; page < memory.size(); ++page) {
        memory[page].resize(at + of_page, std::byte{0xff});
        for (std::size_t i = 0; i < of_page / row; ++i) {
          const std::size_t column = page * kPageColumns + i % kPageColumns;
          if (column >= columns) continue;
          std::memcpy(memory[page].data() + at + i * row,
                      static_cast<const std::byte*>(data) + (i / kPageColumns * from.capacity + column) * row, row);
        }
      }
    };
    if (out.bits == 0) {
      part(out.data, out.column_stride, element, out.data_at);
    } else {
      part(out.data, out.column_stride, 4, out.data_at);
      part(out.scales, out.group_column_stride, element, out.scales_at);
      part(out.biases, out.group_column_stride, element, out.biases_at);
    }
    out.data = out.scales = out.biases = nullptr;
    out.head_stride = out.column_stride * kPageColumns;
    out.group_head_stride = out.group_column_stride * kPageColumns;
    return out;
  }

  void read_by(AttentionArgs& args) {
    for (const auto& page : memory) pages.push_back(page.data());
    args.keys.pages = args.values.pages = pages;
  }
};

TEST(AttentionCpu, PagesGiveTheBitsOfABufferWhateverElseIsInTheBatch) {
  for (const int bits : {0, 3, 4, 8}) {
    for (const Element element : {Element::f32, Element::f16, Element::bf16}) {
      for (const int L : {1, 5, 70}) {
        for (const int window : {0, 90}) {
          if (L != 1 && (window != 0 || element != Element::f16)) continue;
          SCOPED_TRACE(testing::PrintToString(std::vector<int>{bits, static_cast<int>(element), L, window}));
          const Storage storage{bits, bits == 0 ? 0 : 32, element};
          const int dense = bits == 0 ? 20 : 32;
          std::vector<std::unique_ptr<Problem>> problems;
          for (const int S : {L, L + 64, L + 330}) {
            for (const int D : {64, dense}) {
              auto& p = *problems.emplace_back(
                  std::make_unique<Problem>(Sizes{.L = L, .S = S, .D = D, .Dv = D}, storage, storage));
              p.args.causal = true;
              p.args.window = window;
            }
          }
          with_each_target([&] {
            std::vector<std::vector<float>> want;
            for (auto& p : problems) want.push_back(p->attend(1));
            std::vector<Paged> paged(problems.size());
            std::vector<std::vector<float>> got;
            std::vector<AttentionArgs> several;
            for (std::size_t i = 0; i < problems.size(); ++i) {
              got.emplace_back(want[i].size(), kNaN);
              AttentionArgs args = problems[i]->args;
              args.keys = paged[i].add(problems[i]->keys, args.kv_heads);
              args.values = paged[i].add(problems[i]->values, args.kv_heads);
              paged[i].read_by(args);
              args.output.data = got[i].data();
              several.push_back(args);
            }
            ThreadPool pool(2);
            cpu::attend(several, pool);
            ASSERT_EQ(got, want);
          });
        }
      }
    }
  }
}

TEST(AttentionCpu, ColumnsBeforeARowsStartAreNeitherSeenNorRead) {
  for (const int L : {1, 30}) {
    for (const bool causal : {false, true}) {
      const std::vector<std::int32_t> starts = {0, 300, 399, 17};
      Problem p({.B = 4, .L = L, .S = 400, .D = 16, .Dv = 16}, {0, 0, Element::f32}, {0, 0, Element::f32});
      p.args.causal = causal;
      p.args.row_starts = starts.data();
      const auto want = p.expected([&](int b, int, int i, int j) {
        return j >= starts[static_cast<std::size_t>(b)] && (!causal || j <= 400 - L + i) ? 0.0 : kHidden;
      });
      for (std::size_t i = 0; i < p.keys.elements.wide.size(); ++i) {
        const std::size_t column = i / 16;
        const std::size_t row = column / p.keys.capacity;
        if (column % p.keys.capacity < static_cast<std::size_t>(starts[row / 2])) {
          p.keys.elements.wide[i] = p.values.elements.wide[i] = kNaN;
        }
      }
      expect_attention(p, want);
    }
  }
}

TEST(AttentionCpu, MasksOfEveryKindAndStrideAreApplied) {
  for (const int L : {1, 3, 50}) {
    for (const bool of_batch : {false, true}) {
      for (const bool of_head : {false, true}) {
        const Sizes n{.B = 2, .H = 4, .Hkv = 2, .L = L, .S = 230, .D = 16, .Dv = 16};
        Problem p(n);
        const std::size_t size = static_cast<std::size_t>(n.B * n.H * L * n.S);
        std::vector<std::uint8_t> sees(size);
        Elements added(Element::bf16, size);
        for (std::size_t i = 0; i < size; ++i) {
          sees[i] = p.random() % 3 != 0 || i % static_cast<std::size_t>(n.S) < 100;
          added.set(i, sees[i] ? 0.25f * static_cast<float>(p.random() % 8) : -std::numeric_limits<float>::infinity());
        }
        MaskView mask{MaskKind::boolean, Element::f32, sees.data(), 0, 0, n.S, 1};
        if (of_batch) mask.batch_stride = n.H * L * n.S;
        if (of_head) mask.head_stride = L * n.S;
        const auto at = [&](int b, int h, int i, int j) {
          return static_cast<std::size_t>(b * mask.batch_stride + h * mask.head_stride + i * mask.row_stride + j);
        };
        p.args.mask = mask;
        expect_attention(p,
                         p.expected([&](int b, int h, int i, int j) { return sees[at(b, h, i, j)] ? 0.0 : kHidden; }));
        p.args.mask.kind = MaskKind::additive;
        p.args.mask.element = Element::bf16;
        p.args.mask.data = added.data();
        expect_attention(p, p.expected([&](int b, int h, int i, int j) {
          return sees[at(b, h, i, j)] ? static_cast<double>(added.at(at(b, h, i, j))) : kHidden;
        }));
      }
    }
  }
}

TEST(AttentionCpu, AQueryOfMaskedColumnsGivesTheMeanAndOneWithoutColumnsZeros) {
  for (const int L : {2, 40}) {
    Problem p({.L = L, .S = 500, .D = 16, .Dv = 16});
    const std::vector<std::uint8_t> none(500);
    p.args.mask = {MaskKind::boolean, Element::f32, none.data(), 0, 0, 0, 1};
    Problem flat({.L = L, .S = 500, .D = 16, .Dv = 16});
    std::fill(flat.queries.begin(), flat.queries.end(), 0.0f);
    expect_attention(p, flat.expected(nothing));
    const std::int32_t start = 500;
    p.args.row_starts = &start;
    with_each_target([&] {
      for (float x : p.attend()) ASSERT_EQ(x, 0.0f);
    });
  }
}

TEST(AttentionCpu, AQueryWithoutColumnsReadsNoScoreOfAnEarlierCall) {
  Problem wide({.L = 2, .S = 500, .D = 64, .Dv = 64});
  std::fill(wide.queries.begin(), wide.queries.end(), std::numeric_limits<float>::infinity());
  Problem narrow({.L = 2, .S = 500, .D = 16, .Dv = 16});
  const std::int32_t start = 500;
  narrow.args.row_starts = &start;
  with_each_target([&] {
    wide.attend(1);
    for (float x : narrow.attend(1)) ASSERT_EQ(x, 0.0f);
  });
}

TEST(AttentionCpu, SinksTakeTheirShare) {
  const std::vector<float> sinks = {-20.0f, 0.5f, 2.0f, 30.0f};
  for (const int L : {1, 20}) {
    Problem p({.B = 2, .L = L, .S = 300, .D = 16, .Dv = 16});
    p.args.sinks = sinks.data();
    expect_attention(p, p.expected(nothing));
  }
}

TEST(AttentionCpu, SoftCapsBoundScoresOfEveryStorageBeforeTheyAreMasked) {
  const std::vector<float> sinks = {-2.0f, 0.5f, 2.0f, 3.0f};
  for (const int bits : {0, 4, 5, 8}) {
    for (const int L : {1, 3, 60}) {
      for (const float cap : {0.5f, 5.0f, 50.0f}) {
        SCOPED_TRACE(testing::PrintToString(std::vector<int>{bits, L, static_cast<int>(cap)}));
        const Storage storage{bits, bits == 0 ? 0 : 32, Element::f16};
        Problem p({.L = L, .S = 300, .D = 64, .Dv = 64}, storage, storage);
        p.args.softcap = cap;
        p.args.causal = true;
        p.args.sinks = sinks.data();
        Elements added(Element::f32, static_cast<std::size_t>(300));
        for (std::size_t j = 0; j < 300; ++j) added.set(j, j % 7 == 3 ? -1e9f : 0.01f * static_cast<float>(j % 50));
        p.args.mask = {MaskKind::additive, Element::f32, added.data(), 0, 0, 0, 1};
        expect_attention(p, p.expected([&](int, int, int i, int j) {
          return j <= 300 - L + i ? static_cast<double>(added.at(static_cast<std::size_t>(j))) : kHidden;
        }));
      }
    }
  }
}

TEST(AttentionCpu, ScoresBeyondASoftCapAreTheCap) {
  for (const int L : {1, 20}) {
    Problem p({.L = L, .S = 300, .D = 16, .Dv = 16});
    for (float& q : p.queries) q *= 1e30f;
    p.args.softcap = 2.0f;
    expect_attention(p, p.expected(nothing));
  }
}

TEST(AttentionCpu, LargeScoresStayExact) {
  for (const int L : {1, 20}) {
    Problem p({.L = L, .S = 300, .D = 16, .Dv = 16});
    for (float& q : p.queries) q *= 50.0f;
    expect_attention(p, p.expected(nothing), 5e-4);
  }
}

TEST(AttentionCpu, ThreadsAndOtherRowsOfABatchChangeNoBit) {
  for (const int L : {1, 4, 100}) {
    const Sizes n{.B = 3, .H = 4, .Hkv = 2, .L = L, .S = 1100, .D = 32, .Dv = 32};
    Problem p(n);
    const std::vector<std::int32_t> starts = {0, 900, 450};
    p.args.row_starts = starts.data();
    std::vector<std::vector<float>> all;
    with_each_target([&] {
      all.push_back(p.attend(2));
      EXPECT_EQ(all.back(), p.attend(1));
      EXPECT_EQ(all.back(), p.attend(3));
    });
    // The last row alone, without the columns before it.
    AttentionArgs& args = p.args;
    args.batch = 1;
    args.row_starts = nullptr;
    args.columns -= starts[2];
    args.queries.data += 2 * args.queries.batch_stride;
    for (auto* rows : {&args.keys, &args.values}) {
      rows->data = static_cast<const std::uint16_t*>(rows->data) + 2 * rows->batch_stride + 450 * rows->column_stride;
    }
    const auto size = static_cast<std::ptrdiff_t>(L * n.H * n.Dv);
    std::size_t next = 0;
    with_each_target([&] {
      const auto alone = p.attend();
      EXPECT_TRUE(std::equal(alone.begin(), alone.begin() + size, all[next++].begin() + 2 * size));
    });
  }
}

}  // namespace
}  // namespace reprise::kernels::cpu
