// The gated delta rule against a float64 loop: our kernel, and the same made of MLX's operations.
#include "reprise/kernels/delta_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "reprise/base/error.h"
#include "reprise/kernels/reference.h"
#include "tests/kernels/each_target.h"
#include "tests/kernels/recurrence_for_tests.h"

namespace reprise::kernels {
namespace {

namespace mx = mlx::core;

struct Case {
  int B, L, Hk, Hv, Dk, Dv;
};

DeltaRuleParams params_of(const Case& c) {
  mx::array decay = mx::exp(test::random_array({c.Hv}, 11));
  mx::eval(decay);
  return {.key_heads = c.Hk,
          .value_heads = c.Hv,
          .key_dim = c.Dk,
          .value_dim = c.Dv,
          .decay = decay,
          .dt_bias = test::random_array({c.Hv}, 12)};
}

DeltaRuleInputs inputs_of(const Case& c, std::uint64_t seed) {
  return {.qkv = test::random_array({c.B, c.L, 2 * c.Hk * c.Dk + c.Hv * c.Dv}, seed),
          .a = test::random_array({c.B, c.L, c.Hv}, seed + 1, 2.0f),
          .b = test::random_array({c.B, c.L, c.Hv}, seed + 2, 2.0f)};
}

DeltaRuleInputs columns(const DeltaRuleInputs& inputs, int first, int last) {
  const auto cut = [&](const mx::array& x) {
    mx::Shape start(x.ndim(), 0);
    mx::Shape stop = x.shape();
    start[1] = first;
    stop[1] = last;
    return mx::slice(x, start, stop);
  };
  DeltaRuleInputs out{cut(inputs.qkv), cut(inputs.a), cut(inputs.b)};
  if (inputs.real) out.real = cut(*inputs.real);
  return out;
}

void expect_near(const mx::array& got, const test::Doubles& want, double tolerance) {
  const auto values = test::doubles(got);
  ASSERT_EQ(values.size(), want.size());
  double largest = 0.0;
  for (const double x : want) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(values[i], want[i], tolerance * largest) << "at " << i;
}

template <typename Check>
void with_and_without_kernels(const Check& check) {
  on_each_target(check);
  const reference::Scope scope;
  SCOPED_TRACE("reference");
  check();
}

const std::vector<Case> kCases = {{1, 1, 1, 1, 1, 1},   {1, 5, 1, 2, 3, 5},     {2, 7, 2, 4, 8, 12},
                                  {1, 70, 2, 2, 16, 9}, {1, 3, 1, 3, 128, 130}, {2, 20, 2, 6, 33, 17}};

TEST(DeltaRule, EqualsAFloat64Loop) {
  with_and_without_kernels([] {
    for (const Case& c : kCases) {
      SCOPED_TRACE(std::to_string(c.L) + " columns, keys of " + std::to_string(c.Dk));
      const auto params = params_of(c);
      const auto inputs = inputs_of(c, 1);
      const auto state = test::random_array({c.B, c.Hv, c.Dv, c.Dk}, 9);
      for (const auto& before : {std::optional<mx::array>(), std::optional(state)}) {
        const auto got = gated_delta_rule(inputs, params, before);
        const auto want = test::delta_rule_loop(inputs, params, before);
        EXPECT_EQ(got.output.shape(), (mx::Shape{c.B, c.L, c.Hv, c.Dv}));
        EXPECT_EQ(got.state.shape(), (mx::Shape{c.B, c.Hv, c.Dv, c.Dk}));
        expect_near(got.output, want.output, 1e-5);
        expect_near(got.state, want.state, 1e-5);
      }
    }
  });
}

TEST(DeltaRule, InPiecesEqualsAtOnce) {
  with_and_without_kernels([] {
    const Case c{2, 40, 2, 4, 24, 20};
    const auto params = params_of(c);
    const auto inputs = inputs_of(c, 1);
    const auto whole = gated_delta_rule(inputs, params, {});
    std::optional<mx::array> state;
    std::vector<mx::array> outputs;
    for (int first = 0, n = 1; first < c.L; first += n, n = n % 13 + 4) {
      const auto piece = gated_delta_rule(columns(inputs, first, std::min(first + n, c.L)), params, state);
      outputs.push_back(piece.output);
      state = piece.state;
    }
    expect_near(mx::concatenate(outputs, 1), test::doubles(whole.output), 1e-6);
    expect_near(*state, test::doubles(whole.state), 1e-6);
  });
}

TEST(DeltaRule, PaddingLeavesTheStateAsItWas) {
  with_and_without_kernels([] {
    const Case c{3, 6, 2, 4, 8, 12};
    const auto params = params_of(c);
    auto inputs = inputs_of(c, 1);
    inputs.real = test::bool_array({{false, false, true, true, true, true},
                                    {true, true, true, false, false, false},
                                    {false, false, false, false, false, false}});
    const auto state = test::random_array({c.B, c.Hv, c.Dv, c.Dk}, 9);
    const auto got = gated_delta_rule(inputs, params, state);
    const auto want = test::delta_rule_loop(inputs, params, state);
    expect_near(got.state, want.state, 1e-5);
    // Bit for bit where nothing was written.
    EXPECT_TRUE(mx::array_equal(mx::take(got.state, 2, 0), mx::take(state, 2, 0)).item<bool>());
    expect_near(mx::slice(got.output, {0, 2, 0, 0}, {1, 6, c.Hv, c.Dv}),
                test::doubles(mx::reshape(mx::slice(mx::array(want.output.data(), got.output.shape(), mx::float32),
                                                    {0, 2, 0, 0}, {1, 6, c.Hv, c.Dv}),
                                          {-1})),
                1e-5);
  });
}

TEST(DeltaRule, TakesNarrowAndStridedInputs) {
  with_and_without_kernels([] {
    const Case c{2, 9, 1, 2, 16, 8};
    const auto params = params_of(c);
    const auto wide = inputs_of(c, 1);
    for (const mx::Dtype dtype : {mx::float16, mx::bfloat16}) {
      const DeltaRuleInputs narrow{mx::astype(wide.qkv, dtype), mx::astype(wide.a, dtype), mx::astype(wide.b, dtype)};
      const auto got = gated_delta_rule(narrow, params, {});
      EXPECT_EQ(got.output.dtype(), dtype);
      EXPECT_EQ(got.state.dtype(), mx::float32);
      const auto want = test::delta_rule_loop(narrow, params, {});
      expect_near(got.output, want.output, 1e-2);
      expect_near(got.state, want.state, 1e-5);
    }
    const auto swapped = [](const mx::array& x) { return mx::swapaxes(mx::contiguous(mx::swapaxes(x, 0, 1)), 0, 1); };
    const auto got = gated_delta_rule({swapped(wide.qkv), swapped(wide.a), swapped(wide.b)}, params, {});
    expect_near(got.output, test::delta_rule_loop(wide, params, {}).output, 1e-5);
  });
}

TEST(DeltaRule, KeysOfZeroAndHugeGatesStayFinite) {
  with_and_without_kernels([] {
    const Case c{1, 4, 1, 1, 8, 8};
    const auto params = params_of(c);
    auto inputs = inputs_of(c, 1);
    inputs.qkv = mx::zeros(inputs.qkv.shape());
    inputs.a = mx::full(inputs.a.shape(), 1e4f);
    inputs.b = mx::full(inputs.b.shape(), -1e4f);
    const auto got = gated_delta_rule(inputs, params, test::random_array({1, 1, 8, 8}, 9));
    expect_near(got.output, test::Doubles(32, 0.0), 1e-6);
    for (const double x : test::doubles(got.state)) EXPECT_EQ(x, 0.0);
  });
}

// The hardest for sums over many columns: every column meets what all before it wrote along the same key.
TEST(DeltaRule, TheSameKeyOverAndOverStaysExact) {
  with_and_without_kernels([] {
    const Case c{1, 200, 1, 2, 16, 8};
    auto params = params_of(c);
    params.decay = mx::array({1e-4f, 0.5f});
    auto inputs = inputs_of(c, 1);
    const mx::array same = mx::broadcast_to(mx::slice(inputs.qkv, {0, 0, 0}, {1, 1, 32}), {1, c.L, 32});
    inputs.qkv = mx::concatenate({same, mx::slice(inputs.qkv, {0, 0, 32}, {1, c.L, 48})}, 2);
    inputs.b = mx::full(inputs.b.shape(), 6.0f);
    // Now and then a column forgets everything.
    inputs.a = mx::where(mx::equal(mx::remainder(mx::arange(c.L), mx::array(37)), mx::array(5)), mx::array(3e4f),
                         mx::array(-2.0f));
    inputs.a = mx::broadcast_to(mx::reshape(inputs.a, {1, c.L, 1}), {1, c.L, 2});
    const auto got = gated_delta_rule(inputs, params, {});
    const auto want = test::delta_rule_loop(inputs, params, {});
    expect_near(got.output, want.output, 1e-5);
    expect_near(got.state, want.state, 1e-5);
  });
}

TEST(DeltaRule, ShapesThatDoNotFitAreRefused) {
  const Case c{2, 3, 1, 2, 4, 4};
  const auto params = params_of(c);
  const auto inputs = inputs_of(c, 1);
  const auto with = [&](auto change) {
    DeltaRuleInputs changed = inputs;
    change(changed);
    return changed;
  };
  EXPECT_THROW(gated_delta_rule(with([](auto& x) { x.qkv = mx::zeros({2, 3, 15}); }), params, {}), Error);
  EXPECT_THROW(gated_delta_rule(with([](auto& x) { x.a = mx::zeros({2, 3, 1}); }), params, {}), Error);
  EXPECT_THROW(gated_delta_rule(with([](auto& x) { x.real = mx::full({2, 4}, true); }), params, {}), Error);
  EXPECT_THROW(gated_delta_rule(inputs, params, mx::zeros({1, 2, 4, 4})), Error);
}

}  // namespace
}  // namespace reprise::kernels
