// One draw from one row. Pointers and sizes, no MLX. Private to `kernels`.
#pragma once

#include "reprise/kernels/logits_cpu.h"

namespace reprise::kernels::cpu {

struct DrawSettings {
  float temperature;
  float top_p;
  float min_p;
  int min_tokens_to_keep;
  int top_k;
  float xtc_threshold;
  const int* special_tokens;  // sorted
  int num_special_tokens;
};

// As kernels::draw says. `row`: x's summary, of numbers; with another the result is row.argmax.
int draw_token(const float* x, int n, const RowSummary& row, const DrawSettings& settings, float uniform, bool xtc);

}  // namespace reprise::kernels::cpu
