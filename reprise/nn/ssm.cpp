#include "reprise/nn/ssm.h"

#include <utility>
#include <variant>

#include "mlx/ops.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

ScanInputs masked(ScanInputs inputs, const RealColumns& real) {
  if (const auto* mask = std::get_if<mx::array>(&real.mask)) inputs.mask = *mask;
  return inputs;
}

}  // namespace

ScanResult selective_scan(ScanInputs inputs, const std::shared_ptr<const SelectiveScan>& scan,
                          const RealColumns& real) {
  return kernels::selective_scan(masked(std::move(inputs), real), scan);
}

ScanResult head_scan(ScanInputs inputs, const std::shared_ptr<const HeadScan>& scan, const RealColumns& real) {
  return kernels::head_scan(masked(std::move(inputs), real), scan);
}

mx::array decay_rates(const mx::array& a_log) { return mx::negative(mx::exp(mx::astype(a_log, mx::float32))); }

}  // namespace reprise
