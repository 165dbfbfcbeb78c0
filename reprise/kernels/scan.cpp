#include "reprise/kernels/scan.h"

#include <string>

#include "reprise/base/error.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

// What a scan's arrays must be, beside their batch and length.
struct Sizes {
  int channels;
  int steps;  // of delta
  int maps;   // of b and c
  mx::Shape state;
};

void check(const char* function, const ScanInputs& inputs, const Sizes& sizes) {
  const mx::Shape shape = inputs.x.shape();
  const auto is = [&](const mx::array& array, int size) {
    return array.shape() == mx::Shape{shape[0], shape[1], size};
  };
  if (shape.size() == 3 && shape[1] >= 1 && is(inputs.x, sizes.channels) && is(inputs.delta, sizes.steps) &&
      is(inputs.b, sizes.maps) && is(inputs.c, sizes.maps) && (!inputs.gate || inputs.gate->shape() == shape) &&
      (!inputs.mask || inputs.mask->shape() == mx::Shape{shape[0], shape[1]}) &&
      (!inputs.state || inputs.state->shape() == sizes.state)) {
    return;
  }
  throw Error(ErrorCode::invalid_argument, std::string("[kernels::") + function +
                                               "] x, delta, b, c, gate, mask and state must fit the scan's sizes");
}

}  // namespace

ScanResult selective_scan(const ScanInputs& inputs, const std::shared_ptr<const SelectiveScan>& scan) {
  const int channels = scan->a.shape(0);
  const int N = scan->a.shape(1);
  check("selective_scan", inputs,
        {.channels = channels, .steps = channels, .maps = N, .state = {inputs.x.shape(0), channels, N}});
  return reference::selective_scan(inputs, scan);
}

ScanResult head_scan(const ScanInputs& inputs, const std::shared_ptr<const HeadScan>& scan) {
  const int heads = scan->a.shape(0);
  const int P = inputs.x.shape(-1) / heads;
  const int N = inputs.b.shape(-1) / scan->groups;
  check("head_scan", inputs,
        {.channels = heads * P, .steps = heads, .maps = scan->groups * N, .state = {inputs.x.shape(0), heads, P, N}});
  return reference::head_scan(inputs, scan);
}

}  // namespace reprise::kernels
