// A step of attention as one kernel: new rows are rotated and stored, and attention runs over the buffer. What the
// caches share that do it; each says where the rows go and commits the buffer that comes back. Threads: values of one
// step; results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/kv_columns.h"
#include "reprise/cache/layer_cache.h"
#include "reprise/kernels/attention.h"
#include "reprise/kernels/rope.h"

namespace reprise::internal {

// Which columns are written and seen.
struct StepColumns {
  int at = 0;        // of the first new row
  int visible = 0;   // columns that attention sees, from 0 on
  int capacity = 0;  // of the buffer afterwards; if it grows, its columns from `at` on are replaced
};

struct StepResult {
  mlx::core::array output;  // [B, L, heads * Dv]
  KVColumns buffer;
};

// What the kernels take: rotated and normed before where their parameters cannot say how.
struct StepInputs {
  mlx::core::array queries;
  mlx::core::array keys;
  const kernels::RopeParams* rope = nullptr;
  kernels::HeadNorms norms = {};
};

class FusedStep {
 public:
  // Whether the kernel takes such rows and stores them in such a buffer: on a CPU, floats of at most 32 bits, at least
  // one row.
  static bool takes(const Projections& projections, const std::optional<KVColumns>& buffer);

  // Checks all that can be wrong with the step before anything changes. `buffer`: what is stored; none yet.
  // Requires: takes(projections). Throws: invalid_argument for shapes or a quantisation that do not fit.
  FusedStep(const std::string& function, const Projections& projections, const AttentionOptions& options,
            const std::optional<KVColumns>& buffer, const std::optional<KVQuantization>& quantization);

  int batch_size() const { return projections_.queries.shape(0); }
  int width() const { return projections_.queries.shape(1); }  // new rows
  int key_size() const { return key_size_; }
  int value_size() const { return projections_.values.shape(2) / projections_.kv_heads; }

  StepInputs inputs(const Offset& offset) const;
  // Throws: invalid_argument for sinks, a soft cap, or a mask over so many columns that do not fit.
  void check_scores(int columns) const;

  // `stored`: the columns that exist, none for none. `row_starts`: columns before row_starts[b] hold nothing of row b.
  // The buffer is written in place if nobody else holds `stored`'s arrays at evaluation.
  // Throws: invalid_argument for a mask, sinks or offsets that do not fit, bad_alloc.
  StepResult run(const std::optional<KVColumns>& stored, const StepColumns& columns, const Offset& offset,
                 const std::vector<int>& row_starts = {}) const;

 private:
  void check_mask(int columns) const;

  std::string function_;
  Projections projections_;
  const AttentionOptions& options_;
  std::optional<KVQuantization> quantization_;
  int key_size_;
};

// AttentionCache::attend of a class whose attend_projections is the kernel. Throws also: invalid_argument unless
// queries, keys and values are of rank 4 and agree in L.
mlx::core::array attend_by_projections(AttentionCache& cache, const mlx::core::array& queries,
                                       const mlx::core::array& keys, const mlx::core::array& values,
                                       const AttentionOptions& options);

}  // namespace reprise::internal
