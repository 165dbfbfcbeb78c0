#include "reprise/kernels/many_rows.h"

#include <gtest/gtest.h>

#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "reprise/kernels/products.h"
#include "tests/kernels/weight_for_tests.h"

namespace reprise::kernels::cpu {
namespace {

struct AlignedDelete {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(64)); }
};

std::vector<float> random_rows(int num_rows, int cols, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(cols));
  for (float& value : x) value = normal(random);
  return x;
}

// x · wᵀ by prepare and multiply, the rows prepared in two ranges and the columns multiplied in tasks of `task`.
std::vector<float> product(const WeightForTests& weight, const std::vector<float>& x, int num_rows, int task) {
  const WeightView view = weight.view();
  const InputForm form = {view.cols, view.bits, view.group_size, false};
  const auto cols = static_cast<std::size_t>(view.cols);
  const std::size_t bytes = many_rows::prepared_bytes(form, num_rows);
  EXPECT_EQ(bytes % 64, 0U);
  const std::unique_ptr<std::byte, AlignedDelete> prepared(new (std::align_val_t(64)) std::byte[bytes]);
  const int half = std::min(num_rows, (num_rows / 2 + kPrepareBlock - 1) / kPrepareBlock * kPrepareBlock);
  many_rows::prepare(form, num_rows, x.data(), cols, half, num_rows, prepared.get());
  many_rows::prepare(form, num_rows, x.data(), cols, 0, half, prepared.get());
  const auto ldo = static_cast<std::size_t>(view.rows) + 3;
  std::vector<float> out(static_cast<std::size_t>(num_rows) * ldo, -7.0F);
  for (int n = 0; n < view.rows; n += task) {
    many_rows::multiply(view, num_rows, prepared.get(), n, std::min(view.rows, n + task), out.data() + n, ldo);
  }
  for (std::size_t m = 0; m < static_cast<std::size_t>(num_rows); ++m) {
    for (std::size_t n = static_cast<std::size_t>(view.rows); n < ldo; ++n) {
      EXPECT_EQ(out[m * ldo + n], -7.0F) << "written past the columns in row " << m;
    }
  }
  return out;
}

// max |out − exact| / max |exact| over the rows for which `counts` holds.
template <typename Counts>
double error_of(const WeightForTests& weight, const std::vector<float>& x, const std::vector<float>& out, int num_rows,
                Counts counts) {
  const auto rows = static_cast<std::size_t>(weight.view().rows);
  const auto cols = static_cast<std::size_t>(weight.view().cols);
  double difference = 0;
  double largest = 1e-300;
  for (std::size_t m = 0; m < static_cast<std::size_t>(num_rows); ++m) {
    if (!counts(static_cast<int>(m))) continue;
    for (std::size_t n = 0; n < rows; ++n) {
      double exact = 0;
      for (std::size_t k = 0; k < cols; ++k) exact += weight.at(n, k) * static_cast<double>(x[m * cols + k]);
      const float value = out[m * (rows + 3) + n];
      if (!std::isfinite(value)) return std::numeric_limits<double>::infinity();
      difference = std::max(difference, std::abs(exact - static_cast<double>(value)));
      largest = std::max(largest, std::abs(exact));
    }
  }
  return difference / largest;
}

double error_of(const WeightForTests& weight, const std::vector<float>& x, const std::vector<float>& out,
                int num_rows) {
  return error_of(weight, x, out, num_rows, [](int) { return true; });
}

// Every instruction set that this machine has, one at a time.
class ManyRows : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

std::vector<std::int64_t> targets() {
  std::vector<std::int64_t> result;
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) result.push_back(left & -left);
  return result;
}

INSTANTIATE_TEST_SUITE_P(EachTarget, ManyRows, testing::ValuesIn(targets()),
                         [](const auto& test) { return std::string(hwy::TargetName(test.param)); });

// Inputs rounded to one part in 65,534 of their group's largest: an error of about 2e-5 of the largest result.
constexpr double kQuantisedError = 4e-5;
constexpr double kDenseError = 2e-6;

constexpr Element kElements[] = {Element::f16, Element::bf16, Element::f32};

TEST_P(ManyRows, Mxfp4ProductsAreNearTheExactOnes) {
  unsigned seed = 1;
  for (const int groups : {1, 2, 3, 5, 17, 90}) {
    const int num_rows = 9 + static_cast<int>(seed % 11);
    const int rows = 33 + static_cast<int>(seed * 7 % 60);
    const WeightForTests weight(rows, 32 * groups, 4, 32, Element::e8m0, seed++);
    const std::vector<float> x = random_rows(num_rows, 32 * groups, seed);
    EXPECT_LT(error_of(weight, x, product(weight, x, num_rows, 64), num_rows), kQuantisedError)
        << groups << " groups, " << num_rows << " rows";
  }
}

TEST_P(ManyRows, QuantisedProductsAreNearTheExactOnes) {
  unsigned seed = 1;
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const int group : {16, 32, 64, 128}) {
      if (group == 16 && bits == 4) continue;
      for (const Element element : kElements) {
        const int num_rows = 9 + static_cast<int>(seed % 11);
        const int rows = 33 + static_cast<int>(seed * 7 % 60);
        // Of groups of 16 also more than a panel is deep.
        const int cols =
            group == 16 ? 32 * (1 + static_cast<int>(seed * 7 % 38)) : group * (1 + static_cast<int>(seed % 5));
        const WeightForTests weight(rows, cols, bits, group, element, seed++);
        const std::vector<float> x = random_rows(num_rows, cols, seed);
        EXPECT_LT(error_of(weight, x, product(weight, x, num_rows, 64), num_rows), kQuantisedError)
            << bits << " bits, groups of " << group << ", " << num_rows << " x " << cols << " x " << rows;
      }
    }
  }
}

TEST_P(ManyRows, DenseProductsAreNearTheExactOnes) {
  unsigned seed = 1;
  for (const Element element : kElements) {
    for (const int cols : {1, 7, 31, 64, 161, 300, 777}) {
      const int num_rows = 9 + static_cast<int>(seed % 11);
      const int rows = 1 + static_cast<int>(seed * 17 % 100);
      const WeightForTests weight(rows, cols, 0, 0, element, seed++);
      const std::vector<float> x = random_rows(num_rows, cols, seed);
      EXPECT_LT(error_of(weight, x, product(weight, x, num_rows, 32), num_rows), kDenseError)
          << num_rows << " x " << cols << " x " << rows;
    }
  }
}

TEST_P(ManyRows, EveryNumberOfRowsAndColumnsIsTaken) {
  const WeightForTests weight(97, 96, 4, 32, Element::f16, 1);
  const WeightForTests dense(97, 96, 0, 0, Element::f16, 2);
  for (int num_rows = 1; num_rows < 70; ++num_rows) {
    const std::vector<float> x = random_rows(num_rows, 96, 3);
    EXPECT_LT(error_of(weight, x, product(weight, x, num_rows, 96), num_rows), kQuantisedError) << num_rows;
    EXPECT_LT(error_of(dense, x, product(dense, x, num_rows, 96), num_rows), kDenseError) << num_rows;
  }
  for (int rows = 1; rows < 70; ++rows) {
    const WeightForTests narrow(rows, 64, 4, 32, Element::bf16, 1);
    const std::vector<float> x = random_rows(17, 64, 3);
    EXPECT_LT(error_of(narrow, x, product(narrow, x, 17, 32), 17), kQuantisedError) << rows;
  }
}

TEST_P(ManyRows, LongRowsAndManyRowsAreTaken) {
  const WeightForTests weight(20, 1536, 4, 32, Element::f16, 1);
  const std::vector<float> x = random_rows(360, 1536, 2);
  EXPECT_LT(error_of(weight, x, product(weight, x, 360, 32), 360), kQuantisedError);
  const WeightForTests dense(20, 1537, 0, 0, Element::bf16, 1);
  const std::vector<float> y = random_rows(360, 1537, 2);
  EXPECT_LT(error_of(dense, y, product(dense, y, 360, 32), 360), kDenseError);
}

TEST_P(ManyRows, OneLargeInputSpoilsNeitherItsRowNorOthers) {
  for (const int bits : {4, 8}) {
    const WeightForTests weight(48, 256, bits, 32, Element::f16, 5);
    std::vector<float> x = random_rows(20, 256, 6);
    x[3 * 256 + 70] = 3000.0F;
    const std::vector<float> out = product(weight, x, 20, 64);
    EXPECT_LT(error_of(weight, x, out, 20, [](int m) { return m == 3; }), 1e-4) << bits;
    EXPECT_LT(error_of(weight, x, out, 20, [](int m) { return m != 3; }), kQuantisedError) << bits;
  }
}

TEST_P(ManyRows, ZerosGiveZerosAndTinyOrHugeInputsAreScaled) {
  for (const int bits : {0, 4}) {
    const WeightForTests weight(48, 128, bits, 32, Element::f16, 5);
    for (const float factor : {0.0F, 1e-25F, 1e30F}) {
      std::vector<float> x = random_rows(20, 128, 6);
      for (float& value : x) value *= factor;
      EXPECT_LT(error_of(weight, x, product(weight, x, 20, 64), 20), kQuantisedError)
          << bits << " bits, times " << factor;
    }
  }
}

TEST_P(ManyRows, RowsThatAreNotFiniteStayTheirOwn) {
  for (const int bits : {0, 3, 4}) {
    const WeightForTests weight(48, 128, bits, 64, Element::f16, 5);
    std::vector<float> x = random_rows(33, 128, 6);
    x[4 * 128 + 9] = std::numeric_limits<float>::quiet_NaN();
    x[17 * 128 + 127] = std::numeric_limits<float>::infinity();
    const std::vector<float> out = product(weight, x, 33, 64);
    for (std::size_t n = 0; n < 48; ++n) {
      EXPECT_TRUE(std::isnan(out[4 * 51 + n])) << bits << ' ' << n;
      EXPECT_FALSE(std::isfinite(out[17 * 51 + n])) << bits << ' ' << n;
    }
    EXPECT_LT(error_of(weight, x, out, 33, [](int m) { return m != 4 && m != 17; }), kQuantisedError) << bits;
  }
}

TEST_P(ManyRows, ColumnsDoNotDependOnHowTheyAreHandedOut) {
  const WeightForTests weight(150, 192, 4, 32, Element::f16, 5);
  const std::vector<float> x = random_rows(37, 192, 6);
  const std::vector<float> whole = product(weight, x, 37, 160);
  EXPECT_EQ(whole, product(weight, x, 37, 32));
  EXPECT_EQ(whole, product(weight, x, 37, 96));
}

}  // namespace
}  // namespace reprise::kernels::cpu
