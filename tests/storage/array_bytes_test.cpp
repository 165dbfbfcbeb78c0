#include "reprise/storage/array_bytes.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

std::vector<std::byte> bytes_of(const mx::array& array, int* num_runs = nullptr) {
  std::vector<std::byte> bytes;
  int runs = 0;
  for_each_run(array, [&](std::span<const std::byte> run) {
    bytes.insert(bytes.end(), run.begin(), run.end());
    ++runs;
  });
  if (num_runs != nullptr) *num_runs = runs;
  return bytes;
}

std::vector<std::byte> row_major(const mx::array& array) {
  auto copy = mx::contiguous(array);
  mx::eval(copy);
  std::vector<std::byte> bytes(copy.nbytes());
  if (!bytes.empty()) std::memcpy(bytes.data(), copy.data<char>(), bytes.size());
  return bytes;
}

TEST(ForEachRun, RunsAreTheRowMajorArrayWhateverItsStrides) {
  const auto base = mx::reshape(mx::arange(0, 2 * 3 * 40 * 8, mx::int32), {2, 3, 40, 8});
  for (mx::array array : {base, mx::astype(base, mx::float16), mx::slice(base, {0, 0, 3, 0}, {2, 3, 33, 8}),
                          mx::slice(base, {0, 1, 0, 0}, {2, 3, 40, 8}), mx::slice(base, {0, 0, 0, 2}, {2, 3, 40, 3}),
                          mx::slice(base, {0, 0, 0, 0}, {2, 3, 40, 8}, {1, 2, 7, 3}), mx::transpose(base),
                          mx::broadcast_to(mx::slice(base, {0, 0, 0, 0}, {1, 3, 40, 8}), {5, 3, 40, 8}),
                          mx::zeros({3, 0, 2}), mx::array(7.0f), mx::slice(base, {1, 1, 1, 0}, {2, 2, 2, 8})}) {
    array.eval();
    EXPECT_EQ(bytes_of(array), row_major(array));
    EXPECT_EQ(bytes_of(with_long_runs(array)), row_major(array));
  }
}

TEST(ForEachRun, ACutOutOfABufferIsARunAHead) {
  auto cut = mx::slice(mx::zeros({1, 3, 256, 64}), {0, 0, 0, 0}, {1, 3, 200, 64});
  cut.eval();
  int runs = 0;
  bytes_of(cut, &runs);
  EXPECT_EQ(runs, 3);
}

TEST(WithLongRuns, CopiesOnlyWhatLiesInSmallParts) {
  auto cut = mx::slice(mx::zeros({1, 3, 512, 64}), {0, 0, 0, 0}, {1, 3, 400, 64});
  cut.eval();
  EXPECT_EQ(with_long_runs(cut).data<float>(), cut.data<float>());
  auto turned = mx::transpose(mx::reshape(mx::arange(0, 512 * 64, mx::int32), {512, 64}));
  turned.eval();
  int runs = 0;
  bytes_of(with_long_runs(turned), &runs);
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace reprise
