// Uses the repository by add_subdirectory.
#include <iostream>

#include "mlx/mlx.h"
#include "reprise/base/error.h"

int main() {
  std::cout << reprise::to_string(reprise::ErrorCode::not_found) << " " << mlx::core::ones({2}).size() << "\n";
}
