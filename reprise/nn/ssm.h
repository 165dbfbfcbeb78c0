// State space layers: what is between their projections. A short convolution with silu, then a scan (kernels/scan.h);
// both carry a state from chunk to chunk, and padded columns leave it as it was.
// Threads: immutable after construction; results are unevaluated arrays of the calling thread.
#pragma once

#include <memory>
#include <optional>

#include "mlx/array.h"
#include "reprise/kernels/scan.h"
#include "reprise/nn/norms.h"
#include "reprise/nn/short_conv.h"

namespace reprise {

using kernels::HeadScan;
using kernels::ScanInputs;
using kernels::ScanResult;
using kernels::SelectiveScan;

// As kernels::selective_scan and head_scan, over the real columns; `inputs` without a mask.
ScanResult selective_scan(ScanInputs inputs, const std::shared_ptr<const SelectiveScan>& scan, const RealColumns& real);
ScanResult head_scan(ScanInputs inputs, const std::shared_ptr<const HeadScan>& scan, const RealColumns& real);

// a = -exp(A_log), float32: the decay rates as they are stored.
mlx::core::array decay_rates(const mlx::core::array& a_log);

}  // namespace reprise
