#include "reprise/cache/row_numbers.h"

#include <algorithm>

#include "reprise/base/error.h"

namespace reprise::internal {

namespace mx = mlx::core;

void check_one_per_row(const std::string& function, const char* name, const std::vector<int>& numbers, int rows) {
  if (numbers.empty() || numbers.size() == static_cast<std::size_t>(rows)) return;
  throw Error(ErrorCode::invalid_argument, "[" + function + "] " + name + " must have one number for each of " +
                                               std::to_string(rows) + " rows, but got " +
                                               std::to_string(numbers.size()));
}

bool any_positive(const std::vector<int>& numbers) {
  return std::any_of(numbers.begin(), numbers.end(), [](int number) { return number > 0; });
}

std::vector<int> chosen_rows(const std::vector<int>& numbers, const std::vector<int>& rows) {
  if (numbers.empty()) return {};
  std::vector<int> result;
  for (const int row : rows) result.push_back(numbers[static_cast<std::size_t>(row)]);
  return result;
}

mx::array int_array(const std::vector<int>& numbers) {
  return mx::array(numbers.begin(), mx::Shape{static_cast<mx::ShapeElem>(numbers.size())}, mx::int32);
}

}  // namespace reprise::internal
