// The same operations made of MLX's own: what the kernels are held against in tests, and what runs on a GPU.
// Threads: results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>
#include <vector>

#include "mlx/array.h"
#include "reprise/kernels/attention.h"
#include "reprise/kernels/delta_rule.h"
#include "reprise/kernels/experts.h"
#include "reprise/kernels/linear.h"
#include "reprise/kernels/rg_lru.h"
#include "reprise/kernels/scan.h"
#include "reprise/kernels/short_conv.h"

namespace reprise::kernels::reference {

// While one lives, all operations of this room, asked for in any thread, are these: for tests and comparisons.
class Scope {
 public:
  Scope();
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

// The matrix itself, or a stack of matrices: [..., out, in] in `dtype`.
mlx::core::array unpacked(const Weight& weight, mlx::core::Dtype dtype);
mlx::core::array multiply_transposed(const mlx::core::array& x, const Weight& weight);
std::vector<mlx::core::array> linear(const mlx::core::array& x, const std::vector<AffineMapPtr>& maps,
                                     const std::optional<RmsNormParams>& norm = {});
mlx::core::array linear_add(const mlx::core::array& x, const AffineMapPtr& map, const mlx::core::array& residual,
                            const std::optional<RmsNormParams>& output_norm = {});
mlx::core::array gated_mlp(const mlx::core::array& x, const AffineMapPtr& gate, const AffineMapPtr& up,
                           const AffineMapPtr& down, GateActivation activation,
                           const std::optional<RmsNormParams>& norm, const std::optional<mlx::core::array>& residual,
                           const std::optional<RmsNormParams>& output_norm = {});
mlx::core::array rms_norm(const mlx::core::array& x, const RmsNormParams& norm);
mlx::core::array embedding(const mlx::core::array& ids, const Weight& weight, mlx::core::Dtype dtype);
mlx::core::array switch_linear(const mlx::core::array& x, const mlx::core::array& experts, const ExpertMapsPtr& map);
mlx::core::array switch_glu(const mlx::core::array& x, const mlx::core::array& experts, const ExpertGlu& glu,
                            const std::optional<mlx::core::array>& weights = {});
mlx::core::array attention(const mlx::core::array& queries, const KeysValues& keys_values,
                           const AttentionParams& params);
StoreAndAttendResult store_and_attend(const mlx::core::array& queries, const mlx::core::array& keys,
                                      const mlx::core::array& values, int heads, const RopeParams* rope,
                                      const Offset& offset, StoreTarget target, const AttentionParams& params,
                                      const HeadNorms& norms = {});
ScanResult selective_scan(const ScanInputs& inputs, const std::shared_ptr<const SelectiveScan>& scan);
ShortConvResult short_conv(const ShortConvInputs& inputs, const ShortConvParams& params);
ScanResult head_scan(const ScanInputs& inputs, const std::shared_ptr<const HeadScan>& scan);
DeltaRuleResult gated_delta_rule(const DeltaRuleInputs& inputs, const DeltaRuleParams& params,
                                 const std::optional<mlx::core::array>& state);
RgLruResult rg_lru(const RgLruInputs& inputs, const std::optional<mlx::core::array>& state);

}  // namespace reprise::kernels::reference
