#include "reprise/kernels/choice.h"

#include <atomic>

#include "mlx/device.h"
#include "reprise/kernels/cpu_target.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels {

namespace {

std::atomic<int> reference_scopes = 0;

}  // namespace

namespace reference {

Scope::Scope() { ++reference_scopes; }
Scope::~Scope() { --reference_scopes; }

}  // namespace reference

bool internal::use_kernels() {
  if (reference_scopes.load(std::memory_order_relaxed) != 0 || mlx::core::default_device() != mlx::core::Device::cpu) {
    return false;
  }
  cpu_target();  // chosen before the first kernel runs
  return true;
}

}  // namespace reprise::kernels
