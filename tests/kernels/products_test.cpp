#include "reprise/kernels/products.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "reprise/kernels/few_rows.h"
#include "tests/kernels/weight_for_tests.h"

namespace reprise::kernels::cpu {
namespace {

TEST(Products, WeightsOfOneFormShareTheirPreparedRows) {
  const WeightForTests gate(96, 64, 4, 32, Element::f16, 1);
  const WeightForTests up(32, 64, 4, 32, Element::bf16, 2);
  const WeightForTests other_bits(32, 64, 8, 32, Element::f16, 3);
  const WeightForTests other_group(32, 64, 4, 64, Element::f16, 4);
  EXPECT_EQ(input_form(gate.view(), 20), input_form(up.view(), 20));
  EXPECT_NE(input_form(gate.view(), 20), input_form(other_bits.view(), 20));
  EXPECT_NE(input_form(gate.view(), 20), input_form(other_group.view(), 20));
  EXPECT_NE(input_form(gate.view(), 20), input_form(gate.view(), few_rows::kMaxRows));
}

TEST(Products, AnyNumberOfRowsIsMultiplied) {
  for (const int bits : {0, 4}) {
    const WeightForTests weight(70, 128, bits, 32, Element::f16, 1);
    for (int num_rows = 1; num_rows < 3 * few_rows::kMaxRows; ++num_rows) {
      std::mt19937 random(2);
      std::normal_distribution<float> normal;
      std::vector<float> x(static_cast<std::size_t>(num_rows) * 128);
      for (float& value : x) value = normal(random);
      const InputForm form = input_form(weight.view(), num_rows);
      struct alignas(64) Line {
        char bytes[64];
      };
      std::vector<Line> prepared(prepared_bytes(form, num_rows) / 64);
      for (int m = 0; m < num_rows; m += kPrepareBlock) {
        prepare(form, num_rows, x.data(), 128, m, std::min(num_rows, m + kPrepareBlock), prepared.data());
      }
      std::vector<float> out(static_cast<std::size_t>(num_rows) * 70);
      for (int n = 0; n < 70; n += kColumnBlock) {
        multiply(weight.view(), num_rows, prepared.data(), n, std::min(70, n + kColumnBlock), out.data() + n, 70);
      }
      double difference = 0;
      double largest = 0;
      for (std::size_t m = 0; m < static_cast<std::size_t>(num_rows); ++m) {
        for (std::size_t n = 0; n < 70; ++n) {
          double exact = 0;
          for (std::size_t k = 0; k < 128; ++k) exact += weight.at(n, k) * static_cast<double>(x[m * 128 + k]);
          difference = std::max(difference, std::abs(exact - static_cast<double>(out[m * 70 + n])));
          largest = std::max(largest, std::abs(exact));
        }
      }
      EXPECT_LT(difference / largest, 4e-5) << bits << " bits, " << num_rows << " rows";
    }
  }
}

TEST(Products, TasksAreWholeBlocksOfColumns) {
  for (const int rows : {1, 31, 192, 576, 1536, 49152}) {
    WeightView weight;
    weight.rows = rows;
    weight.cols = 576;
    for (const int num_rows : {1, 16, 512}) {
      for (const int threads : {1, 2, 64}) {
        const int columns = columns_per_task(weight, num_rows, threads);
        EXPECT_GE(columns, kColumnBlock);
        EXPECT_EQ(columns % kColumnBlock, 0);
        EXPECT_LT(columns, rows + kColumnBlock);
      }
    }
  }
}

TEST(Products, TasksAreSpreadEvenly) {
  WeightView weight;
  weight.rows = 640;
  weight.cols = 2048;
  EXPECT_EQ(columns_per_task(weight, 1, 2), 64);
  EXPECT_EQ(columns_per_task(weight, 256, 2), 64);
  weight.rows = 576;
  EXPECT_EQ(columns_per_task(weight, 1, 2), 96);
}

}  // namespace
}  // namespace reprise::kernels::cpu
