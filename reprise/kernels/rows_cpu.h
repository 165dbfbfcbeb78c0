// Rows of features between float32 and the forms in which caches store them, by pointers and sizes, no MLX. Private to
// `kernels`. float16 and bfloat16 round to nearest even; what float16 cannot hold becomes its largest number (an
// infinity in one key would make every later score NaN).
// Threads: free functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reprise/kernels/cpu.h"

namespace reprise::kernels::cpu {

// `stride`: elements from one feature to the next.
void load_row(const void* data, Element element, std::ptrdiff_t stride, int size, float* out);
void store_row(const float* x, Element element, int size, void* out);

// What a row is after store_row and load_row.
void round_row(Element element, int size, float* x);

struct QuantizedForm {
  int group_size = 64;
  int bits = 8;
  Element element = Element::f32;  // of scales and biases
};

// Bit for bit what mx::quantize makes of a row whose dtype is the form's element. `packed`: size * bits / 8 bytes.
// Requires: x rounded to that dtype; group_size divides size.
void quantize_row(const QuantizedForm& form, const float* x, int size, std::uint8_t* packed, void* scales,
                  void* biases);

}  // namespace reprise::kernels::cpu
