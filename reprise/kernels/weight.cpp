#include "reprise/kernels/weight.h"

namespace reprise {

int AffineMap::in() const {
  if (const auto* dense = std::get_if<DenseWeight>(&weight)) return dense->shape(-1);
  const auto& w = std::get<QuantizedWeight>(weight);
  return w.scales.shape(-1) * w.group_size;
}

int AffineMap::out() const {
  if (const auto* dense = std::get_if<DenseWeight>(&weight)) return dense->shape(0);
  return std::get<QuantizedWeight>(weight).packed.shape(0);
}

}  // namespace reprise
