// Small helpers to read MLX arrays in tests.
#pragma once

#include <vector>

#include "mlx/mlx.h"

namespace reprise::test {

// Row-major values of any float array as float32.
inline std::vector<float> floats(const mlx::core::array& a) {
  auto x = mlx::core::contiguous(mlx::core::astype(a, mlx::core::float32));
  mlx::core::eval(x);
  return std::vector<float>(x.data<float>(), x.data<float>() + x.size());
}

inline std::vector<bool> bools(const mlx::core::array& a) {
  auto x = mlx::core::contiguous(a);
  mlx::core::eval(x);
  return std::vector<bool>(x.data<bool>(), x.data<bool>() + x.size());
}

// Standard normal values that depend on the seed alone.
inline mlx::core::array normal(const mlx::core::Shape& shape, std::uint64_t seed) {
  auto x = mlx::core::random::normal(shape, mlx::core::float32, mlx::core::random::key(seed));
  mlx::core::eval(x);
  return x;
}

}  // namespace reprise::test
