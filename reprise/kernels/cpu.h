// The CPU kernels' own vocabulary: pointers and sizes, no MLX. Private to `kernels`. Each kernel is compiled for
// several instruction sets (Highway) and the best is chosen at run time. Results do not depend on the number of
// threads: work is cut by shapes alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace reprise::kernels::cpu {

enum class Element : std::uint8_t { f32, f16, bf16 };

inline std::size_t size_of(Element element) { return element == Element::f32 ? 4 : 2; }

// A matrix [rows, cols] = [out, in], row-contiguous, as MLX stores it.
struct WeightView {
  int rows = 0;
  int cols = 0;
  int bits = 0;  // 0: dense
  int group_size = 0;
  Element element = Element::f32;  // of a dense matrix, or of scales and biases
  const void* data = nullptr;      // dense elements, or uint32 [rows, cols * bits / 32]
  const void* scales = nullptr;    // [rows, cols / group_size]
  const void* biases = nullptr;
};

}  // namespace reprise::kernels::cpu
