#include "reprise/kernels/cpu_target.h"

#include <hwy/targets.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "reprise/base/log.h"

namespace reprise::kernels {
namespace {

// Older Highways have no SSE2 and compile plain C++ in its place, with what every x86-64 processor has.
std::string name_of(std::int64_t target) {
#if HWY_ARCH_X86
  if (target == HWY_EMU128 || target == HWY_SCALAR) return "SSE2";
#endif
  return hwy::TargetName(target);
}

// Those that are compiled and that this machine has, best first: in Highway's masks a lower bit is a better target.
std::vector<std::int64_t> available() {
  std::vector<std::int64_t> targets;
  for (std::int64_t left = HWY_TARGETS & hwy::SupportedTargets(); left != 0; left &= left - 1) {
    targets.push_back(left & -left);
  }
  if (targets.empty()) targets.push_back(HWY_STATIC_TARGET);
  return targets;
}

std::string choose() {
  const std::vector<std::int64_t> targets = available();
  const std::string best = name_of(targets.front());
  const char* wanted = std::getenv("REPRISE_CPU_TARGET");
  if (!wanted || !*wanted) return best;
  std::string name = wanted;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
  std::string names;
  for (const std::int64_t target : targets) {
    if (name_of(target) == name) {
      hwy::DisableTargets(target - 1);
      return name;
    }
    names += (names.empty() ? "" : ", ") + name_of(target);
  }
  log(LogLevel::warning, "[cpu_target] $REPRISE_CPU_TARGET must be one of " + names + " on this machine, but got \"" +
                             wanted + "\": using " + best);
  return best;
}

}  // namespace

const std::string& cpu_target() {
  static const std::string target = choose();
  return target;
}

}  // namespace reprise::kernels
