// Linear maps per head, and attention over latents in both of its ways.
#include "reprise/nn/mla.h"

#include <gtest/gtest.h>

#include <cmath>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/nn/masks.h"
#include "tests/nn/arrays.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using test::normal;

float difference(const mx::array& a, const mx::array& b) {
  return mx::max(mx::abs(mx::subtract(mx::astype(a, mx::float32), mx::astype(b, mx::float32)))).item<float>();
}

QuantizedWeight quantized(const mx::array& matrices, int group_size, int bits) {
  const auto parts = mx::quantize(matrices, group_size, bits);
  return {parts[0], parts[1], parts[2], group_size, bits};
}

mx::array dequantized(const QuantizedWeight& q) {
  return mx::dequantize(q.packed, q.scales, q.biases, q.group_size, q.bits);
}

TEST(MultiLinear, EachHeadHasItsOwnMatrixBothWays) {
  const mx::array matrices = normal({3, 64, 32}, 1);
  const mx::array x = normal({2, 3, 5, 32}, 2);
  const MultiLinear maps(matrices);
  EXPECT_EQ(maps.heads(), 3);
  EXPECT_EQ(maps.out(), 64);
  EXPECT_EQ(maps.in(), 32);
  const mx::array y = maps(x);
  ASSERT_EQ(y.shape(), (mx::Shape{2, 3, 5, 64}));
  for (int head = 0; head < 3; ++head) {
    const mx::array one = mx::matmul(mx::take(x, head, 1), mx::transpose(mx::take(matrices, head, 0)));
    EXPECT_LT(difference(mx::take(y, head, 1), one), 1e-4f);
    const mx::array back = mx::matmul(mx::take(y, head, 1), mx::take(matrices, head, 0));
    EXPECT_LT(difference(mx::take(maps.transposed(y), head, 1), back), 1e-3f);
  }
}

TEST(MultiLinear, RowsOfOneHeadServeAllHeads) {
  const QuantizedWeight packed = quantized(normal({3, 64, 32}, 1), 32, 4);
  for (const MultiLinear& maps : {MultiLinear(normal({3, 64, 32}, 1)), MultiLinear(packed)}) {
    const mx::array x = normal({2, 1, 5, 32}, 2);
    EXPECT_LT(difference(maps(x), maps(mx::repeat(x, 3, 1))), 1e-5f);
    const mx::array y = normal({2, 1, 5, 64}, 3);
    EXPECT_LT(difference(maps.transposed(y), maps.transposed(mx::repeat(y, 3, 1))), 1e-5f);
  }
}

TEST(MultiLinear, QuantisedOnesAreWhatTheyDequantiseTo) {
  for (const int bits : {4, 8}) {
    const QuantizedWeight packed = quantized(normal({3, 64, 32}, 1), 32, bits);
    const MultiLinear dense(dequantized(packed));
    const MultiLinear maps(packed);
    EXPECT_EQ(maps.in(), 32);
    EXPECT_LT(difference(maps(normal({2, 3, 5, 32}, 2)), dense(normal({2, 3, 5, 32}, 2))), 1e-4f);
    EXPECT_LT(difference(maps.transposed(normal({2, 3, 5, 64}, 3)), dense.transposed(normal({2, 3, 5, 64}, 3))), 1e-4f);
  }
  const auto narrow = mx::quantize(normal({3, 64, 32}, 1), 32, 4, "mxfp4");
  const MultiLinear maps(MicroscaledWeight{narrow[0], narrow[1], MicroscalingFormat::mxfp4});
  const MultiLinear dense(mx::dequantize(narrow[0], narrow[1], std::nullopt, 32, 4, "mxfp4"));
  EXPECT_LT(difference(maps(normal({1, 3, 5, 32}, 2)), dense(normal({1, 3, 5, 32}, 2))), 1e-4f);
}

TEST(MultiLinear, ShapesThatDoNotFitAreRefused) {
  EXPECT_THROW(MultiLinear(normal({64, 32}, 1)), Error);
  const MultiLinear maps(normal({3, 64, 32}, 1));
  EXPECT_THROW(maps(normal({2, 3, 5, 64}, 2)), Error);
  EXPECT_THROW(maps(normal({2, 2, 5, 32}, 2)), Error);
  EXPECT_THROW(maps(normal({3, 5, 32}, 2)), Error);
  EXPECT_THROW(maps.transposed(normal({2, 3, 5, 32}, 2)), Error);
}

struct Case {
  int B = 2, heads = 3, L, S, R = 64, nope = 32, rope = 32, value = 32;
};

LatentAttention attention_of(const Case& n, float scale = 0.11f) {
  const float size = 1.0f / std::sqrt(static_cast<float>(n.R));
  return {.embed_q = MultiLinear(mx::multiply(normal({n.heads, n.R, n.nope}, 1), mx::array(size))),
          .unembed_out = MultiLinear(mx::multiply(normal({n.heads, n.value, n.R}, 2), mx::array(size))),
          .scale = scale};
}

// Keys and values of each head written out, the mask too.
mx::array written_out(const LatentAttention& attention, const mx::array& content, const mx::array& positions,
                      const DenseKV& stored, const mx::array& visible) {
  const mx::array keys = attention.embed_q.transposed(stored.keys);
  const mx::array values = attention.unembed_out(stored.keys);
  mx::array scores = mx::add(mx::matmul(content, mx::swapaxes(keys, -1, -2)),
                             mx::matmul(positions, mx::swapaxes(stored.values, -1, -2)));
  scores = mx::where(visible, mx::multiply(scores, mx::array(attention.scale)), mx::array(-1e30f));
  return mx::matmul(mx::softmax(scores, -1), values);
}

// Few queries and many, with each kind of mask.
TEST(LatentAttention, BothWaysGiveWhatEachHeadsKeysAndValuesDo) {
  int made = 0;
  for (const Case n : {Case{.L = 1, .S = 9}, Case{.L = 5, .S = 9}, Case{.L = 90, .S = 100}, Case{.L = 90, .S = 90}}) {
    const LatentAttention attention = attention_of(n);
    made += attention.makes_keys_for(n.L) ? 1 : 0;
    const mx::array content = normal({n.B, n.heads, n.L, n.nope}, 3);
    const mx::array positions = normal({n.B, n.heads, n.L, n.rope}, 4);
    const DenseKV stored{normal({n.B, 1, n.S, n.R}, 5), normal({n.B, 1, n.S, n.rope}, 6)};
    const mx::array causal = create_causal_mask(n.L, n.S - n.L);
    const mx::array padded = create_causal_mask(n.L, n.S - n.L, {.left_padding = mx::array({0, 3}, {2}, mx::int32)});
    const mx::array all = mx::full({n.L, n.S}, true, mx::bool_);
    for (const auto& [mask, visible] :
         {std::pair<Mask, mx::array>{NoMask{}, all}, {Causal{}, causal}, {causal, causal}, {padded, padded}}) {
      const mx::array out = attention(content, positions, stored, mask);
      ASSERT_EQ(out.shape(), (mx::Shape{n.B, n.heads, n.L, n.value}));
      mx::array wrong = mx::abs(mx::subtract(out, written_out(attention, content, positions, stored, visible)));
      // What sees nothing must only be finite.
      wrong = mx::where(mx::any(visible, -1, true), wrong, mx::array(0.0f));
      EXPECT_LT(mx::max(wrong).item<float>(), 1e-4f) << n.L << " of " << n.S;
      EXPECT_TRUE(mx::all(mx::isfinite(out)).item<bool>());
    }
  }
  EXPECT_EQ(made, 2) << "both ways must be among the cases";
}

TEST(LatentAttention, QuantisedLatentsAreAttendedAsTheyAre) {
  for (const int L : {1, 90}) {
    const Case n{.L = L, .S = 100};
    const LatentAttention attention = attention_of(n);
    const auto packed = [](const mx::array& x) {
      const auto parts = mx::quantize(x, 32, 8);
      return QuantizedTensor{parts[0], parts[1], parts[2]};
    };
    const auto unpacked = [](const QuantizedTensor& t) { return mx::dequantize(t.packed, t.scales, t.biases, 32, 8); };
    const QuantizedKV stored{packed(normal({n.B, 1, n.S, n.R}, 5)), packed(normal({n.B, 1, n.S, n.rope}, 6)), {32, 8}};
    const mx::array content = normal({n.B, n.heads, n.L, n.nope}, 3);
    const mx::array positions = normal({n.B, n.heads, n.L, n.rope}, 4);
    const DenseKV dense{unpacked(stored.keys), unpacked(stored.values)};
    EXPECT_LT(
        difference(attention(content, positions, stored, Causal{}), attention(content, positions, dense, Causal{})),
        1e-4f)
        << L;
  }
}

TEST(LatentAttention, NarrowLatentsComeBackInTheQueriesDtype) {
  for (const int L : {1, 90}) {
    const Case n{.L = L, .S = 100};
    const LatentAttention attention = attention_of(n);
    const DenseKV stored{mx::astype(normal({n.B, 1, n.S, n.R}, 5), mx::float16),
                         mx::astype(normal({n.B, 1, n.S, n.rope}, 6), mx::float16)};
    const DenseKV wide{mx::astype(stored.keys, mx::float32), mx::astype(stored.values, mx::float32)};
    const mx::array content = normal({n.B, n.heads, n.L, n.nope}, 3);
    const mx::array positions = normal({n.B, n.heads, n.L, n.rope}, 4);
    const mx::array out = attention(content, positions, stored, Causal{});
    EXPECT_EQ(out.dtype(), mx::float32);
    EXPECT_LT(difference(out, attention(content, positions, wide, Causal{})), 1e-4f) << L;
  }
}

}  // namespace
}  // namespace reprise
