// What a cache hands to attention, and how attention is masked: closed sets, so that attention never asks a cache for
// its class.
// Threads: values; arrays follow MLX's rule (an unevaluated array belongs to the thread that built it).
#pragma once

#include <variant>

#include "mlx/array.h"

namespace reprise {

// Keys and values as stored, cut to the columns attention may see. The arrays may be strided views of a larger buffer.
struct DenseKV {
  mlx::core::array keys;    // [B, Hkv, S, D]
  mlx::core::array values;  // [B, Hkv, S, Dv]
};

// MLX's affine quantisation along the last axis.
struct QuantizedTensor {
  mlx::core::array packed;  // [B, Hkv, S, D * bits / 32] uint32
  mlx::core::array scales;  // [B, Hkv, S, D / group_size]
  mlx::core::array biases;  // [B, Hkv, S, D / group_size]
};

struct KVQuantization {
  int group_size = 64;  // 32, 64 or 128; divides D and Dv
  int bits = 8;         // 2, 3, 4, 5, 6 or 8
  bool operator==(const KVQuantization&) const = default;
};

struct QuantizedKV {
  QuantizedTensor keys;
  QuantizedTensor values;
  KVQuantization quantization;
};

using KeysValues = std::variant<DenseKV, QuantizedKV>;

struct NoMask {};  // every query sees every key
struct Causal {};  // bottom-right aligned: query i of L sees keys up to S - L + i

// An array is bool (true: may attend) or additive in the scores' dtype, broadcastable to [B, H, L, S].
using Mask = std::variant<NoMask, Causal, mlx::core::array>;

// Position of the first new token: one for all rows, or int32 [B].
using Offset = std::variant<int, mlx::core::array>;

}  // namespace reprise
