// One operation that rotates, stores and attends, against its reference made of MLX's operations.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels {
namespace {

namespace mx = mlx::core;

constexpr int kHeads = 4, kKvHeads = 2, kSize = 64, kValueSize = 32;

mx::array draw(mx::Shape shape, std::uint64_t seed, mx::Dtype dtype = mx::float32) {
  mx::array x = mx::astype(mx::random::uniform(-1.7f, 1.7f, shape, mx::float32, mx::random::key(seed)), dtype);
  x.eval();
  return x;
}

struct Inputs {
  mx::array queries, keys, values;
};

Inputs inputs(int batch, int length, mx::Dtype dtype = mx::float32) {
  return {draw({batch, length, kHeads * kSize}, 1, dtype), draw({batch, length, kKvHeads * kSize}, 2, dtype),
          draw({batch, length, kKvHeads * kValueSize}, 3, dtype)};
}

// What mx::fast::rope takes for frequencies.
float period(int pair, int dims) {
  return std::pow(10000.0f, 2.0f * static_cast<float>(pair) / static_cast<float>(dims));
}

RopeParams rope(int dims = kSize, bool traditional = false) {
  auto frequencies = std::make_shared<std::vector<float>>();
  for (int i = 0; i < dims / 2; ++i) frequencies->push_back(1.0f / period(i, dims));
  return {dims, traditional, 1.0f, 1.0f, std::move(frequencies)};
}

StoreTarget target(int batch, int columns, const std::optional<KVQuantization>& quantization, mx::Dtype dtype) {
  StoreTarget out;
  out.quantization = quantization;
  const mx::array keys = draw({batch, kKvHeads, columns, kSize}, 4, dtype);
  const mx::array values = draw({batch, kKvHeads, columns, kValueSize}, 5, dtype);
  if (!quantization) {
    out.tensors = {keys, values};
    return out;
  }
  for (const mx::array& x : {keys, values}) {
    for (mx::array& tensor : mx::quantize(x, quantization->group_size, quantization->bits)) {
      out.tensors.push_back(std::move(tensor));
    }
  }
  return out;
}

// Error as the project measures it.
float error(const mx::array& got, const mx::array& want) {
  const mx::array a = mx::astype(got, mx::float32), b = mx::astype(want, mx::float32);
  return mx::divide(mx::max(mx::abs(mx::subtract(a, b))), mx::max(mx::abs(b))).item<float>();
}

bool identical(const mx::array& a, const mx::array& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() && mx::array_equal(a, b).item<bool>();
}

struct Case {
  int batch = 1;
  int length = 1;
  std::optional<KVQuantization> quantization = {};
  mx::Dtype dtype = mx::float32;
  mx::Dtype stored = mx::float16;
};

std::string name(const Case& c) {
  return std::to_string(c.batch) + " rows of " + std::to_string(c.length) + ", " +
         (c.quantization ? std::to_string(c.quantization->bits) + " bits" : "dense") + ", size " +
         std::to_string(mx::size_of(c.dtype)) + std::to_string(mx::size_of(c.stored));
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const int batch : {1, 3}) {
    for (const int length : {1, 19}) {
      for (const mx::Dtype stored : {mx::float32, mx::float16, mx::bfloat16}) {
        out.push_back({batch, length, {}, mx::float32, stored});
        out.push_back({batch, length, KVQuantization{32, 8}, mx::float32, stored});
      }
      out.push_back({batch, length, KVQuantization{32, 4}, mx::float32, mx::float32});
      out.push_back({batch, length, KVQuantization{32, 5}, mx::float32, mx::float16});
      out.push_back({batch, length, {}, mx::bfloat16, mx::bfloat16});
      out.push_back({batch, length, {}, mx::float16, mx::float16});
    }
  }
  return out;
}

void expect_reference(const Case& c, StoreTarget to, const RopeParams* params, const Offset& offset,
                      const AttentionParams& attention) {
  const Inputs in = inputs(c.batch, c.length, c.dtype);
  StoreTarget copy = to;
  const auto got = store_and_attend(in.queries, in.keys, in.values, kHeads, params, offset, std::move(to), attention);
  const auto want =
      reference::store_and_attend(in.queries, in.keys, in.values, kHeads, params, offset, std::move(copy), attention);
  ASSERT_EQ(got.output.shape(), want.output.shape());
  EXPECT_EQ(got.output.dtype(), c.dtype);
  EXPECT_LE(error(got.output, want.output), c.dtype == mx::float32 ? 2e-4f : 2e-2f);
  ASSERT_EQ(got.tensors.size(), want.tensors.size());
  for (std::size_t i = 0; i < got.tensors.size(); ++i) {
    if (c.dtype == mx::float32 && params == nullptr) {
      EXPECT_TRUE(identical(got.tensors[i], want.tensors[i])) << "buffer " << i;
    } else if (got.tensors[i].dtype() != mx::uint32) {
      ASSERT_EQ(got.tensors[i].dtype(), want.tensors[i].dtype());
      EXPECT_LE(error(got.tensors[i], want.tensors[i]), c.dtype == mx::float32 ? 1e-3f : 2e-2f) << "buffer " << i;
    }
  }
}

TEST(StoreAndAttend, GivesWhatItsReferenceGives) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(name(c));
    const RopeParams whole = rope(), partial = rope(32, true);
    for (const RopeParams* params : {static_cast<const RopeParams*>(nullptr), &whole, &partial}) {
      if (params == &partial && c.stored != mx::float16) continue;
      StoreTarget to = target(c.batch, 80, c.quantization, c.stored);
      to.at = 40;
      to.visible = to.at + c.length;
      expect_reference(c, to, params, 40, {.scale = 0.2f, .mask = Causal{}});
      // A buffer that grows.
      StoreTarget grows = target(c.batch, 40, c.quantization, c.stored);
      grows.at = 40;
      grows.visible = grows.at + c.length;
      grows.capacity = 96;
      expect_reference(c, grows, params, 40, {.scale = 0.2f, .mask = Causal{}});
      // None yet.
      StoreTarget fresh;
      fresh.quantization = c.quantization;
      fresh.visible = c.length;
      fresh.capacity = 64;
      fresh.dtype = c.stored;
      expect_reference(c, fresh, params, 0, {.scale = 0.2f, .mask = Causal{}});
    }
  }
}

TEST(StoreAndAttend, TakesOffsetsMasksAndSinks) {
  const Case c{3, 5, {}, mx::float32, mx::float32};
  const RopeParams params = rope();
  StoreTarget to = target(3, 20, {}, mx::float32);
  to.at = 10;
  to.visible = 15;
  const Offset offsets = mx::array({10, 3, -2}, mx::int32);
  expect_reference(c, to, &params, offsets, {.mask = Causal{}});
  mx::array seen = mx::greater(draw({3, 1, 5, 15}, 7), mx::array(-0.5f));
  expect_reference(c, to, &params, offsets, {.mask = seen});
  expect_reference(c, to, &params, offsets, {.mask = draw({5, 15}, 8)});
  expect_reference(c, to, &params, offsets, {.mask = draw({5, 15}, 8, mx::bfloat16)});
  expect_reference(c, to, &params, offsets, {.mask = mx::transpose(draw({15, 5}, 8))});
  expect_reference(c, to, &params, offsets, {.mask = Causal{}, .sinks = draw({kHeads}, 9)});
}

TEST(StoreAndAttend, HeadsAreNormedBeforeTheyAreRotated) {
  const RopeParams params = rope();
  HeadNorms norms{RmsNormParams{draw({kSize}, 11), 1e-3f}, RmsNormParams{draw({kSize}, 12, mx::bfloat16), 1e-6f}};
  for (const std::optional<KVQuantization>& quantization :
       {std::optional<KVQuantization>(), std::optional(KVQuantization{32, 8})}) {
    for (const RopeParams* used : {&params, static_cast<const RopeParams*>(nullptr)}) {
      for (const int length : {1, 40}) {
        for (const bool both : {true, false}) {
          HeadNorms some = norms;
          if (!both) some.keys.reset();
          const Inputs in = inputs(2, length);
          StoreTarget to = target(2, 60, quantization, mx::float32);
          to.at = 10;
          to.visible = 10 + length;
          const auto want = reference::store_and_attend(in.queries, in.keys, in.values, kHeads, used, 10, to,
                                                        {.mask = Causal{}}, some);
          const auto plain =
              reference::store_and_attend(in.queries, in.keys, in.values, kHeads, used, 10, to, {.mask = Causal{}});
          const auto got =
              store_and_attend(in.queries, in.keys, in.values, kHeads, used, 10, to, {.mask = Causal{}}, some);
          EXPECT_LE(error(got.output, want.output), 2e-4f);
          EXPECT_GE(error(plain.output, want.output), 1e-2f);
          if (!quantization) {
            EXPECT_LE(error(got.tensors[0], want.tensors[0]), 1e-5f);
          }
        }
      }
    }
  }
}

TEST(StoreAndAttend, ScoresAreCapped) {
  for (const std::optional<KVQuantization>& quantization :
       {std::optional<KVQuantization>(), std::optional(KVQuantization{32, 8})}) {
    const Case c{2, 5, quantization, mx::float32, mx::float32};
    StoreTarget to = target(2, 20, quantization, mx::float32);
    to.at = 10;
    to.visible = 15;
    expect_reference(c, to, nullptr, 0, {.mask = Causal{}, .softcap = 2.0f});
  }
}

TEST(StoreAndAttend, AWrappedRingSeesAllItsColumns) {
  const Case c{2, 1, {}, mx::float32, mx::float16};
  const RopeParams params = rope();
  StoreTarget to = target(2, 16, {}, mx::float16);
  to.at = 5;
  to.visible = 16;
  expect_reference(c, to, &params, 37, {});
}

TEST(StoreAndAttend, RowStartsHideWhatTheMaskHides) {
  const Case c{2, 3, KVQuantization{32, 8}, mx::float32, mx::float32};
  const mx::array starts({0, 6}, mx::int32);
  const mx::array columns = mx::reshape(mx::arange(0, 13, mx::int32), {1, 1, 1, 13});
  const mx::array queries = mx::reshape(mx::arange(10, 13, mx::int32), {1, 1, 3, 1});
  const mx::array mask =
      mx::logical_and(mx::less_equal(columns, queries), mx::greater_equal(columns, mx::reshape(starts, {2, 1, 1, 1})));
  StoreTarget to = target(2, 20, c.quantization, c.stored);
  to.at = 10;
  to.visible = 13;
  expect_reference(c, to, nullptr, 0, {.mask = mask, .row_starts = starts});
}

TEST(StoreAndAttend, ViewsAreReadAsTheyLie) {
  const Inputs in = inputs(2, 6);
  const auto turned = [](const mx::array& x) {
    mx::array copy = mx::contiguous(mx::transpose(x, {1, 2, 0}));
    return mx::transpose(copy, {2, 0, 1});
  };
  StoreTarget to = target(2, 30, {}, mx::float32);
  const auto view = [](const mx::array& x) {
    return mx::slice(mx::contiguous(mx::transpose(x, {3, 1, 2, 0})), {0, 0, 3, 0},
                     {x.shape(3), x.shape(1), 19, x.shape(0)});
  };
  for (mx::array& tensor : to.tensors) tensor = mx::transpose(view(tensor), {3, 1, 2, 0});
  to.at = 10;
  to.visible = 16;
  const RopeParams params = rope();
  const AttentionParams attention{.scale = 0.2f, .mask = Causal{}};
  const auto want = reference::store_and_attend(in.queries, in.keys, in.values, kHeads, &params, 10, to, attention);
  const auto got =
      store_and_attend(turned(in.queries), turned(in.keys), turned(in.values), kHeads, &params, 10, to, attention);
  EXPECT_LE(error(got.output, want.output), 1e-5f);
  EXPECT_LE(error(got.tensors[0], want.tensors[0]), 1e-5f);
  EXPECT_TRUE(identical(got.tensors[1], want.tensors[1]));
}

TEST(StoreAndAttend, RowsAreThoseThatMlxRotates) {
  const Inputs in = inputs(2, 5);
  const RopeParams params = rope();
  StoreTarget to = target(2, 20, {}, mx::float32);
  to.at = 10;
  to.visible = 15;
  const auto got = store_and_attend(in.queries, in.keys, in.values, kHeads, &params, 4000, to, {.mask = Causal{}});
  const mx::array rows = mx::transpose(mx::reshape(in.keys, {2, 5, kKvHeads, kSize}), {0, 2, 1, 3});
  std::vector<float> periods;
  for (int i = 0; i < kSize / 2; ++i) periods.push_back(period(i, kSize));
  const mx::array freqs(periods.begin(), {kSize / 2}, mx::float32);
  const mx::array rotated = mx::fast::rope(rows, kSize, false, std::nullopt, 1.0f, 4000, freqs);
  const mx::array stored = mx::slice(got.tensors[0], {0, 0, 10, 0}, {2, kKvHeads, 15, kSize});
#if defined(__x86_64__)
  EXPECT_TRUE(identical(stored, rotated));
#else
  EXPECT_TRUE(mx::allclose(stored, rotated, 1e-5, 1e-5).item<bool>());
#endif
}

TEST(StoreAndAttend, BuffersThatNobodyElseHoldsAreWrittenInPlace) {
  const Inputs in = inputs(1, 1);
  for (const std::optional<KVQuantization>& quantization :
       {std::optional<KVQuantization>(), std::optional(KVQuantization{32, 8})}) {
    StoreTarget to = target(1, 20, quantization, mx::float16);
    mx::eval(to.tensors);
    const void* address = to.tensors[0].data<char>();
    to.at = 10;
    to.visible = 11;
    auto first = store_and_attend(in.queries, in.keys, in.values, kHeads, nullptr, 0, std::move(to), {});
    first.tensors[0].eval();
    EXPECT_EQ(first.tensors[0].data<char>(), address);
    // The old buffer is still held, so it must stay as it is.
    StoreTarget shared;
    shared.tensors = first.tensors;
    shared.quantization = quantization;
    shared.at = 10;
    shared.visible = 11;
    const mx::array before = mx::add(mx::astype(first.tensors[0], mx::float32), mx::array(0.0f));
    const Inputs other{in.queries, mx::square(in.keys), mx::square(in.values)};
    auto second = store_and_attend(other.queries, other.keys, other.values, kHeads, nullptr, 0, std::move(shared), {});
    mx::eval(before, second.tensors[0]);
    EXPECT_NE(second.tensors[0].data<char>(), address);
    EXPECT_TRUE(identical(mx::astype(first.tensors[0], mx::float32), before));
    EXPECT_FALSE(identical(mx::astype(second.tensors[0], mx::float32), before));
  }
}

TEST(StoreAndAttend, KeysBeyondFloat16StayFinite) {
  Inputs in = inputs(1, 2);
  in.keys = mx::multiply(in.keys, mx::array(1e6f));
  StoreTarget to;
  to.visible = 2;
  to.capacity = 4;
  to.dtype = mx::float16;
  const auto got = store_and_attend(in.queries, in.keys, in.values, kHeads, nullptr, 0, to, {.mask = Causal{}});
  EXPECT_TRUE(mx::all(mx::isfinite(got.tensors[0])).item<bool>());
  EXPECT_TRUE(mx::all(mx::isfinite(got.output)).item<bool>());
}

}  // namespace
}  // namespace reprise::kernels
