#include "tests/conformance/observation.h"

#include <exception>

#include "reprise/base/error.h"

namespace reprise::conformance {

namespace {

Arrays triple(const QuantizedTensor& tensor) { return {tensor.packed, tensor.scales, tensor.biases}; }

}  // namespace

Observation refusal() {
  Observation out;
  try {
    throw;
  } catch (const Error& error) {
    out.error = error.what();
  } catch (const std::exception& error) {
    out.error = error.what();
    out.defects.push_back(error.what());
  }
  return out;
}

Arrays keys_of(const KeysValues& keys_values) {
  if (const auto* dense = std::get_if<DenseKV>(&keys_values)) return {dense->keys};
  return triple(std::get<QuantizedKV>(keys_values).keys);
}

Arrays values_of(const KeysValues& keys_values) {
  if (const auto* dense = std::get_if<DenseKV>(&keys_values)) return {dense->values};
  return triple(std::get<QuantizedKV>(keys_values).values);
}

}  // namespace reprise::conformance
