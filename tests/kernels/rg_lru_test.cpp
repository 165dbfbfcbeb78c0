// The real-gated linear recurrent unit against a float64 loop: our kernel, and the same made of MLX's operations.
#include "reprise/kernels/rg_lru.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "reprise/base/error.h"
#include "reprise/kernels/reference.h"
#include "tests/kernels/each_target.h"
#include "tests/kernels/recurrence_for_tests.h"

namespace reprise::kernels {
namespace {

namespace mx = mlx::core;

RgLruInputs inputs_of(int B, int L, int D, std::uint64_t seed) {
  mx::array decay = mx::exp(test::random_array({D}, seed + 3, 2.0f));
  mx::eval(decay);
  return {.x = test::random_array({B, L, D}, seed),
          .input_gate = test::random_array({B, L, D}, seed + 1, 2.0f),
          .recurrent_gate = test::random_array({B, L, D}, seed + 2, 2.0f),
          .decay = decay};
}

void expect_near(const mx::array& got, const test::Doubles& want, double tolerance) {
  const auto values = test::doubles(got);
  ASSERT_EQ(values.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(values[i], want[i], tolerance) << "at " << i;
}

template <typename Check>
void with_and_without_kernels(const Check& check) {
  on_each_target(check);
  const reference::Scope scope;
  SCOPED_TRACE("reference");
  check();
}

TEST(RgLru, EqualsAFloat64Loop) {
  with_and_without_kernels([] {
    for (const int D : {1, 3, 8, 16, 37, 260}) {
      for (const int L : {1, 2, 5, 33}) {
        SCOPED_TRACE(std::to_string(D) + " features, " + std::to_string(L) + " columns");
        const auto inputs = inputs_of(2, L, D, 1);
        for (const auto& before : {std::optional<mx::array>(), std::optional(test::random_array({2, D}, 9))}) {
          const auto got = rg_lru(inputs, before);
          const auto want = test::rg_lru_loop(inputs, before);
          EXPECT_EQ(got.output.shape(), inputs.x.shape());
          expect_near(got.output, want.output, 1e-5);
          expect_near(got.state, want.state, 1e-5);
        }
      }
    }
  });
}

TEST(RgLru, ARowThatHasNotBegunBeginsAtItsFirstRealColumn) {
  with_and_without_kernels([] {
    auto inputs = inputs_of(4, 4, 19, 1);
    inputs.real = test::bool_array({{false, false, true, true},
                                    {true, true, false, false},
                                    {false, false, false, false},
                                    {true, true, true, true}});
    mx::array state = test::random_array({4, 19}, 9);
    state = mx::where(mx::array({1.0f, 0.0f, 0.0f, 1.0f}, {4, 1}), state, mx::array(0.0f));
    for (const auto& before : {std::optional<mx::array>(), std::optional(state)}) {
      const auto got = rg_lru(inputs, before);
      const auto want = test::rg_lru_loop(inputs, before);
      expect_near(got.state, want.state, 1e-5);
      const mx::array real = mx::expand_dims(*inputs.real, -1);
      expect_near(mx::where(real, got.output, mx::array(0.0f)), want.output, 1e-5);
      // Nothing was written, so that the row has still not begun.
      EXPECT_TRUE(mx::all(mx::equal(mx::take(got.state, 2, 0), mx::array(0.0f))).item<bool>());
    }
  });
}

TEST(RgLru, InPiecesEqualsAtOnce) {
  with_and_without_kernels([] {
    const int L = 29;
    const auto inputs = inputs_of(2, L, 21, 1);
    const auto whole = rg_lru(inputs, {});
    std::optional<mx::array> state;
    std::vector<mx::array> outputs;
    for (int first = 0, n = 1; first < L; first += n, n = n % 7 + 2) {
      const int last = std::min(first + n, L);
      const auto cut = [&](const mx::array& x) { return mx::slice(x, {0, first, 0}, {2, last, 21}); };
      const auto piece =
          rg_lru({cut(inputs.x), cut(inputs.input_gate), cut(inputs.recurrent_gate), inputs.decay}, state);
      outputs.push_back(piece.output);
      state = piece.state;
    }
    expect_near(mx::concatenate(outputs, 1), test::doubles(whole.output), 1e-5);
    expect_near(*state, test::doubles(whole.state), 1e-5);
  });
}

TEST(RgLru, TakesNarrowInputsAndKeepsItsStateWide) {
  with_and_without_kernels([] {
    auto inputs = inputs_of(2, 6, 40, 1);
    for (mx::array* x : {&inputs.x, &inputs.input_gate, &inputs.recurrent_gate}) *x = mx::astype(*x, mx::bfloat16);
    const auto got = rg_lru(inputs, {});
    const auto want = test::rg_lru_loop(inputs, {});
    EXPECT_EQ(got.output.dtype(), mx::bfloat16);
    EXPECT_EQ(got.state.dtype(), mx::float32);
    expect_near(got.output, want.output, 2e-2);
    expect_near(got.state, want.state, 1e-5);
  });
}

TEST(RgLru, ShapesThatDoNotFitAreRefused) {
  const auto inputs = inputs_of(2, 3, 8, 1);
  auto changed = inputs;
  changed.input_gate = mx::zeros({2, 3, 4});
  EXPECT_THROW(rg_lru(changed, {}), Error);
  changed = inputs;
  changed.real = mx::full({2, 2}, true);
  EXPECT_THROW(rg_lru(changed, {}), Error);
  EXPECT_THROW(rg_lru(inputs, mx::zeros({1, 8})), Error);
}

}  // namespace
}  // namespace reprise::kernels
