#include "tests/conformance/compare_arrays.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <vector>

#include "mlx/ops.h"
#include "mlx/utils.h"

namespace reprise::conformance {

namespace mx = mlx::core;

namespace {

// Every dtype of the traces is exact in double.
std::vector<double> numbers(const mx::array& array) {
  mx::array dense = mx::contiguous(mx::astype(array, mx::float64, mx::Device::cpu), false, mx::Device::cpu);
  dense.eval();
  if (dense.size() == 0) return {};
  return {dense.data<double>(), dense.data<double>() + dense.size()};
}

std::string position(std::size_t flat, const mx::Shape& shape) {
  std::vector<std::size_t> index(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    const auto extent = static_cast<std::size_t>(shape[axis]);
    index[axis] = flat % extent;
    flat /= extent;
  }
  std::ostringstream text;
  text << "[";
  for (std::size_t axis = 0; axis < index.size(); ++axis) text << (axis ? "," : "") << index[axis];
  text << "]";
  return text.str();
}

// [B, H, tokens, D] → per batch row its tokens' numbers, sorted.
std::vector<std::vector<std::vector<double>>> sorted_tokens(const mx::array& array) {
  const std::vector<double> flat = numbers(mx::moveaxis(array, 2, 1));
  const auto rows = static_cast<std::size_t>(array.shape(0));
  const auto tokens = static_cast<std::size_t>(array.shape(2));
  const auto width = static_cast<std::size_t>(array.shape(1)) * static_cast<std::size_t>(array.shape(3));
  std::vector<std::vector<std::vector<double>>> result(rows);
  for (std::size_t b = 0; b < rows; ++b) {
    for (std::size_t t = 0; t < tokens; ++t) {
      const auto* begin = flat.data() + (b * tokens + t) * width;
      result[b].emplace_back(begin, begin + width);
    }
    std::sort(result[b].begin(), result[b].end());
  }
  return result;
}

// One flag per element of a [B, H, tokens, D] array.
std::vector<bool> counted(const mx::array& array, const ArrayRules& rules) {
  std::vector<bool> flags(array.size(), true);
  if (rules.care) {
    const std::vector<double> care = numbers(*rules.care);
    for (std::size_t i = 0; i < flags.size(); ++i) flags[i] = care[i] != 0.0;
  } else if (rules.valid) {
    mx::Shape shape = array.shape();
    const mx::array spread = mx::broadcast_to(mx::reshape(*rules.valid, {shape[0], 1, shape[2], 1}), shape);
    const std::vector<double> valid = numbers(spread);
    for (std::size_t i = 0; i < flags.size(); ++i) flags[i] = valid[i] != 0.0;
  }
  return flags;
}

}  // namespace

std::string describe(const mx::array& array) {
  std::ostringstream text;
  text << array.dtype() << array.shape();
  return text.str();
}

std::string compare_arrays(const mx::array& got, const mx::array& want, const ArrayRules& rules) {
  if (got.dtype() != want.dtype()) return "got " + describe(got) + ", want " + describe(want);
  if (rules.token_set) {
    if (got.ndim() != 4 || want.ndim() != 4) return "got " + describe(got) + ", want " + describe(want);
    return sorted_tokens(got) == sorted_tokens(want) ? "" : "the sets of tokens differ";
  }
  if (got.shape() != want.shape()) return "got " + describe(got) + ", want " + describe(want);
  if (rules.valid) {
    const bool fits = got.ndim() == 4 && rules.valid->ndim() == 2 && rules.valid->shape(0) == got.shape(0) &&
                      rules.valid->shape(1) == got.shape(2);
    if (!fits) return "`valid` does not fit " + describe(got);
  }
  if (rules.care && rules.care->shape() != got.shape()) return "`care` does not fit " + describe(got);

  const std::vector<double> a = numbers(got);
  const std::vector<double> b = numbers(want);
  const std::vector<bool> flags = counted(got, rules);
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!flags[i] || a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    if (std::abs(a[i] - b[i]) <= rules.tolerance * (1.0 + std::abs(b[i]))) continue;
    std::ostringstream text;
    text.precision(9);
    text << "at " << position(i, got.shape()) << " got " << a[i] << ", want " << b[i];
    return text.str();
  }
  return "";
}

}  // namespace reprise::conformance
