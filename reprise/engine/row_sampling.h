// How the rows of a batch get their next tokens: each as its own request says, and as it would alone.
// Threads: one object belongs to one thread at a time; results are unevaluated arrays. Private to `engine`.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "mlx/array.h"
#include "reprise/base/tokens.h"
#include "reprise/sampling/sampler.h"

namespace reprise::internal {

// A copy goes on by itself from where the original was.
class RowSampler {
 public:
  // Throws: invalid_argument (check_sampling_params).
  RowSampler(const SamplingParams& params, std::uint64_t num_draws);

  // The likeliest token of the logits as they are: rows of that kind need no sampler of their own.
  bool is_plain() const { return greedy_ && processors_.empty(); }

  // logits [1, …, V] of one row. The row's tokens so far: `known`, and after them `last`, int32 [1].
  SampledTokens operator()(const mlx::core::array& logits, const std::vector<TokenId>& known,
                           const mlx::core::array& last);
  // How many of the most recent tokens the row's processors want.
  int context_size() const { return context_size_; }

 private:
  bool greedy_;
  int context_size_ = 0;
  LogitsSampler sampler_;
  std::vector<LogitsProcessor> processors_;
};

struct RowToSample {
  RowSampler* sampler;
  const Tokens* record;
  std::optional<TokenId> pending;  // fed after the record and before `fed`
};

// logits [B, 1, V]; `fed` int32 [B]: each row's most recent token. Returns: both arrays [B].
SampledTokens sample_rows(const mlx::core::array& logits, const mlx::core::array& fed,
                          const std::vector<RowToSample>& rows);

}  // namespace reprise::internal
