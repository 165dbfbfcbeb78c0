// One number for each row of a batch, on the host: what batch caches check, choose and hand to MLX.
// Threads: free functions.
#pragma once

#include <string>
#include <vector>

#include "mlx/array.h"

namespace reprise::internal {

// Throws: invalid_argument, naming the numbers, when there are some but not one for each row.
void check_one_per_row(const std::string& function, const char* name, const std::vector<int>& numbers, int rows);

bool any_positive(const std::vector<int>& numbers);

// Those of these rows, in this order; none of none. Requires: rows that are there.
std::vector<int> chosen_rows(const std::vector<int>& numbers, const std::vector<int>& rows);

// int32 [size].
mlx::core::array int_array(const std::vector<int>& numbers);

}  // namespace reprise::internal
