// Links reprise::cache alone and uses a cache; prints where BLAS comes from.
#include <iostream>
#include <variant>

#include "blas.h"
#include "mlx/mlx.h"
#include "reprise/cache/kv_cache.h"

namespace mx = mlx::core;

int main() {
  reprise::KVCache cache;
  const auto rows = mx::reshape(mx::arange(12.0f), {1, 1, 3, 4});
  cache.update_and_fetch(rows, rows);
  const auto fork = cache.fork();
  cache.trim(1);
  if (cache.length() != 2 || fork->length() != 3) {
    std::cerr << "lengths " << cache.length() << " and " << fork->length() << ", not 2 and 3\n";
    return 1;
  }
  const auto product = mx::matmul(mx::full({64, 64}, 1.0f), mx::full({64, 64}, 2.0f));
  if (mx::max(product).item<float>() != 128.0f) return 1;
  std::cout << "blas " << blas_library() << "\n";
}
