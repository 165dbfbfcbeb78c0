// Linear maps of which each row takes some, over float32 rows: rows are brought together by expert, and the products of
// products.h run over each expert's. Pointers and sizes, no MLX. Private to `kernels`. Work is spread over the pool's
// threads by experts and output columns; results do not depend on how.
#pragma once

#include <cstdint>
#include <variant>

#include "reprise/base/thread_pool.h"
#include "reprise/kernels/linear_cpu.h"

namespace reprise::kernels::cpu {

// Which experts each token chose. A slot is one choice: token · per_token + place.
struct Choices {
  const std::int32_t* experts = nullptr;  // [tokens, per_token], each in [0, number of experts)
  int tokens = 0;
  int per_token = 0;
};

struct ExpertMap {
  WeightView stacked;           // the matrices of all experts, one below the other
  int experts = 0;              //
  const float* bias = nullptr;  // [experts, out], or null

  int out() const { return stacked.rows / experts; }
  Map of(int expert) const {
    const auto first = static_cast<std::size_t>(expert) * static_cast<std::size_t>(out());
    return {rows_of(stacked, first, out()), bias ? bias + first : nullptr};
  }
};

struct ClippedSwiglu {
  float alpha;
  float limit;
};

struct ExpertGlu {
  ExpertMap gate;
  ExpertMap up;
  ExpertMap down;
  std::variant<Activation, ClippedSwiglu> activation = Activation::silu;
};

// out [slots, out] = each slot's row times its expert's map. x has a row for each token, or one for each slot.
// Throws: bad_alloc.
void switch_linear(const Rows& x, const Choices& choices, const ExpertMap& map, float* out, ThreadPool& pool);

// Each slot's down(act(gate(x)) · up(x)) → out [slots, out]; or, with weights [slots], their weighted sums
// → out [tokens, out]. x has a row for each token. Throws: bad_alloc.
void switch_glu(const Rows& x, const Choices& choices, const ExpertGlu& glu, const float* weights, float* out,
                ThreadPool& pool);

}  // namespace reprise::kernels::cpu
