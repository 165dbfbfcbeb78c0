#include "reprise/kernels/few_rows.h"

#include <gtest/gtest.h>

#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "reprise/kernels/scratch.h"
#include "tests/kernels/weight_for_tests.h"

namespace reprise::kernels::cpu {
namespace {

using few_rows::kMaxRows;

std::vector<float> random_rows(int num_rows, int cols, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(cols));
  for (float& value : x) value = normal(random);
  return x;
}

// x · wᵀ, the columns multiplied in tasks of `task`. [num_rows, weight.rows]
std::vector<float> product(const WeightForTests& weight, const std::vector<float>& x, int num_rows, int task = 64) {
  const WeightView view = weight.view();
  const InputForm form = {view.cols, view.bits, view.group_size, true};
  const auto cols = static_cast<std::size_t>(view.cols);
  const auto rows = static_cast<std::size_t>(view.rows);
  struct alignas(64) Line {
    std::uint8_t bytes[64];
  };
  const std::size_t bytes = few_rows::prepared_bytes(form, num_rows);
  EXPECT_EQ(bytes % 64, 0U);
  // What is not written must not matter.
  std::vector<Line> prepared(bytes / 64);
  std::fill_n(prepared.front().bytes, bytes, std::uint8_t{0xff});
  few_rows::prepare(form, num_rows, x.data(), cols, 0, num_rows, prepared.data());
  const std::size_t ldo = rows + 3;
  std::vector<float> out(static_cast<std::size_t>(num_rows) * ldo, -7.0F);
  constexpr std::size_t kScratch = std::size_t{1} << 18;
  for (int n = 0; n < view.rows; n += task) {
    std::memset(scratch(kScratch), 0xff, kScratch);
    few_rows::multiply(view, num_rows, prepared.data(), n, std::min(view.rows, n + task), out.data() + n, ldo);
  }
  std::vector<float> result;
  for (std::size_t m = 0; m < static_cast<std::size_t>(num_rows); ++m) {
    const float* row = out.data() + m * ldo;
    EXPECT_TRUE(std::all_of(row + rows, row + ldo, [](float v) { return v == -7.0F; })) << "written past row " << m;
    result.insert(result.end(), row, row + rows);
  }
  return result;
}

// max |out − exact| over row m, as a part of what such sums come to when signs are random: the largest sqrt(Σ (x w)²).
// (The largest |exact| would do for many columns; of a few, all may be near zero.)
double error_of_row(const WeightForTests& weight, const std::vector<float>& x, const std::vector<float>& out,
                    std::size_t m) {
  const auto rows = static_cast<std::size_t>(weight.view().rows);
  const auto cols = static_cast<std::size_t>(weight.view().cols);
  double difference = 0;
  double largest = 1e-300;
  for (std::size_t n = 0; n < rows; ++n) {
    double exact = 0;
    double squares = 0;
    for (std::size_t k = 0; k < cols; ++k) {
      const double term = weight.at(n, k) * static_cast<double>(x[m * cols + k]);
      exact += term;
      squares += term * term;
    }
    const float value = out[m * rows + n];
    if (!std::isfinite(value)) return std::numeric_limits<double>::infinity();
    difference = std::max(difference, std::abs(exact - static_cast<double>(value)));
    largest = std::max(largest, std::sqrt(squares));
  }
  return difference / largest;
}

double error_of(const WeightForTests& weight, const std::vector<float>& x, const std::vector<float>& out,
                int num_rows) {
  double error = 0;
  for (std::size_t m = 0; m < static_cast<std::size_t>(num_rows); ++m)
    error = std::max(error, error_of_row(weight, x, out, m));
  return error;
}

// Every instruction set that this machine has, one at a time.
class FewRows : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

std::vector<std::int64_t> targets() {
  std::vector<std::int64_t> result;
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) result.push_back(left & -left);
  return result;
}

INSTANTIATE_TEST_SUITE_P(EachTarget, FewRows, testing::ValuesIn(targets()),
                         [](const auto& test) { return std::string(hwy::TargetName(test.param)); });

// Inputs are rounded to one part in 65,534 of their group's largest.
constexpr double kQuantisedError = 1.2e-4;
constexpr double kDenseError = 2e-6;
constexpr int kBits[] = {2, 3, 4, 5, 6, 8};
constexpr Element kElements[] = {Element::f16, Element::bf16, Element::f32};

TEST_P(FewRows, Mxfp4ProductsAreNearTheExactOnes) {
  unsigned seed = 1;
  for (const int groups : {1, 2, 3, 4, 5, 8, 9, 18, 90}) {
    for (int num_rows = 1; num_rows <= kMaxRows; ++num_rows, ++seed) {
      const int rows = 33 + static_cast<int>(seed * 7 % 60);
      const WeightForTests weight(rows, 32 * groups, 4, 32, Element::e8m0, seed);
      const std::vector<float> x = random_rows(num_rows, 32 * groups, seed + 1);
      EXPECT_LT(error_of(weight, x, product(weight, x, num_rows), num_rows), kQuantisedError)
          << groups << " groups, " << num_rows << " rows";
    }
  }
}

TEST_P(FewRows, QuantisedProductsAreNearTheExactOnes) {
  unsigned seed = 1;
  for (const int bits : kBits) {
    for (const int group : {16, 32, 64, 128}) {
      if (group == 16 && bits == 4) continue;
      for (const Element element : kElements) {
        for (int groups : {1, 2, 3, 5, 8, 9, 18}) {
          if (group == 16) groups *= 2;
          const int num_rows = 1 + static_cast<int>(seed % kMaxRows);
          const int rows = 33 + static_cast<int>(seed * 7 % 60);
          const WeightForTests weight(rows, group * groups, bits, group, element, seed++);
          const std::vector<float> x = random_rows(num_rows, group * groups, seed);
          EXPECT_LT(error_of(weight, x, product(weight, x, num_rows), num_rows), kQuantisedError)
              << bits << " bits, " << groups << " groups of " << group << ", " << num_rows << " rows";
        }
      }
    }
  }
}

TEST_P(FewRows, DenseProductsAreNearTheExactOnes) {
  unsigned seed = 1;
  for (const Element element : kElements) {
    for (const int cols : {1, 2, 7, 15, 16, 17, 31, 64, 161, 300, 777}) {
      for (int num_rows = 1; num_rows <= kMaxRows; ++num_rows) {
        const WeightForTests weight(35 + num_rows, cols, 0, 0, element, seed++);
        const std::vector<float> x = random_rows(num_rows, cols, seed);
        EXPECT_LT(error_of(weight, x, product(weight, x, num_rows), num_rows), kDenseError)
            << cols << " columns, " << num_rows << " rows";
      }
    }
  }
}

TEST_P(FewRows, RowsDoNotDependOnThoseBesideThem) {
  for (const int bits : {0, 2, 3, 4, 8}) {
    for (const int cols : {96, 576}) {
      const WeightForTests weight(37, cols, bits, 32, Element::f16, 1);
      const std::vector<float> x = random_rows(kMaxRows, cols, 2);
      // A single quantised row is added up in another order.
      const int least = bits == 0 ? 1 : 2;
      const std::vector<float> expected = product(weight, {x.end() - least * cols, x.end()}, least);
      for (int num_rows = least; num_rows <= kMaxRows; ++num_rows) {
        const std::vector<float> out = product(weight, {x.end() - num_rows * cols, x.end()}, num_rows);
        EXPECT_TRUE(std::equal(out.end() - 37, out.end(), expected.end() - 37)) << bits << ' ' << num_rows;
      }
    }
  }
}

TEST_P(FewRows, ColumnsDoNotDependOnHowTheyAreHandedOut) {
  for (const int bits : {0, 4, 6}) {
    for (int rows = 1; rows < 70; ++rows) {
      const WeightForTests weight(rows, 160, bits, 32, Element::bf16, 1);
      const std::vector<float> x = random_rows(3, 160, 2);
      const std::vector<float> out = product(weight, x, 3, 96);
      EXPECT_EQ(out, product(weight, x, 3, kColumnBlock)) << bits << ' ' << rows;
      EXPECT_LT(error_of(weight, x, out, 3), kQuantisedError) << bits << ' ' << rows;
    }
  }
}

TEST_P(FewRows, LongRowsAreTaken) {
  for (const int bits : kBits) {
    const WeightForTests weight(9, 64 * 1024, bits, 32, Element::f16, 1);
    const std::vector<float> x = random_rows(3, 64 * 1024, 2);
    EXPECT_LT(error_of(weight, x, product(weight, x, 3), 3), kQuantisedError) << bits;
  }
}

TEST_P(FewRows, OneLargeInputSpoilsNeitherItsRowNorOthers) {
  for (const int bits : {4, 8}) {
    const WeightForTests weight(48, 256, bits, 32, Element::f16, 5);
    std::vector<float> x = random_rows(4, 256, 6);
    x[2 * 256 + 70] = 3000.0F;
    const std::vector<float> out = product(weight, x, 4);
    for (std::size_t m = 0; m < 4; ++m) EXPECT_LT(error_of_row(weight, x, out, m), kQuantisedError) << bits << ' ' << m;
  }
}

TEST_P(FewRows, ZerosGiveZerosAndTinyOrHugeInputsAreScaled) {
  for (const int bits : {0, 3, 4}) {
    const WeightForTests weight(48, 128, bits, 32, Element::f16, 5);
    for (const float factor : {0.0F, 1e-25F, 1e30F}) {
      std::vector<float> x = random_rows(5, 128, 6);
      for (float& value : x) value *= factor;
      EXPECT_LT(error_of(weight, x, product(weight, x, 5), 5), kQuantisedError) << bits << " bits, times " << factor;
    }
    // Denormal inputs may count as zeros.
    std::vector<float> x = random_rows(5, 128, 6);
    for (float& value : x) value *= 1e-41F;
    for (const float value : product(weight, x, 5)) EXPECT_LT(std::abs(value), 1e-36F) << bits;
  }
}

TEST_P(FewRows, RowsThatAreNotFiniteStayTheirOwn) {
  for (const int bits : {0, 2, 3, 4, 8}) {
    const WeightForTests weight(48, 128, bits, 64, Element::f16, 5);
    std::vector<float> x = random_rows(8, 128, 6);
    x[1 * 128 + 9] = std::numeric_limits<float>::quiet_NaN();
    x[2 * 128 + 10] = -std::numeric_limits<float>::quiet_NaN();
    x[6 * 128 + 127] = std::numeric_limits<float>::infinity();
    const std::vector<float> out = product(weight, x, 8);
    for (std::size_t n = 0; n < 48; ++n) {
      EXPECT_TRUE(std::isnan(out[1 * 48 + n])) << bits << ' ' << n;
      EXPECT_TRUE(std::isnan(out[2 * 48 + n])) << bits << ' ' << n;
      EXPECT_FALSE(std::isfinite(out[6 * 48 + n])) << bits << ' ' << n;
    }
    for (const std::size_t m : {0U, 3U, 4U, 5U, 7U}) EXPECT_LT(error_of_row(weight, x, out, m), kQuantisedError) << m;
  }
}

TEST(UnpackRow, GivesExactlyTheValuesOfMxfp4) {
  const WeightForTests weight(5, 96, 4, 32, Element::e8m0, 3);
  std::vector<float> row(96);
  for (int n = 0; n < 5; ++n) {
    unpack_row(weight.view(), n, row.data());
    for (std::size_t k = 0; k < row.size(); ++k) {
      EXPECT_EQ(static_cast<double>(row[k]), weight.at(static_cast<std::size_t>(n), k)) << n << ' ' << k;
    }
  }
}

TEST(UnpackRow, GivesTheWeightsOfOneRow) {
  for (const int bits : {0, 2, 3, 4, 5, 6, 8}) {
    for (const Element element : kElements) {
      const WeightForTests weight(5, 192, bits, 64, element, 3);
      std::vector<float> row(192);
      for (int n = 0; n < 5; ++n) {
        unpack_row(weight.view(), n, row.data());
        for (std::size_t k = 0; k < 192; ++k) {
          const double exact = weight.at(static_cast<std::size_t>(n), k);
          EXPECT_NEAR(static_cast<double>(row[k]), exact, 1e-6 * (1 + std::abs(exact))) << bits << ' ' << n << ' ' << k;
        }
      }
    }
  }
}

}  // namespace
}  // namespace reprise::kernels::cpu
