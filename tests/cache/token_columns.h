// Columns of keys and values whose every feature is a token's number, and what a cache shows of them.
// Threads: free functions.
#pragma once

#include <functional>
#include <vector>

#include "mlx/array.h"
#include "reprise/nn/keys_values.h"

namespace reprise::cache_test {

// [B, 1, width, size]: row b's tokens times `sign`, 0 behind them. Affine quantisation keeps such columns exactly.
mlx::core::array token_columns(const std::vector<std::vector<int>>& rows, int width, int size, float sign);

// Last feature of each column, [B][S], dequantised where need be.
std::vector<std::vector<float>> shown_keys(const KeysValues& seen);
std::vector<std::vector<float>> shown_values(const KeysValues& seen);

// Whether query i of N in row b may see column c of `width`. Fails the test for a mask of another dtype or width.
std::function<bool(int b, int i, int c)> visibility(const Mask& mask, int N, int width);

}  // namespace reprise::cache_test
