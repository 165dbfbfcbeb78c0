// Which instruction set the CPU kernels use: the best that this machine has, or a lesser one that $REPRISE_CPU_TARGET
// names, as for tests and comparisons.
// Threads: any.
#pragma once

#include <string>

namespace reprise::kernels {

// The set's name: on x86 AVX3_DL (AVX-512 with VNNI), AVX3 (AVX-512), AVX2, SSE4, SSSE3 or SSE2; NEON on 64-bit Arm.
// The first call reads the variable, and what it names that is not there is reported through the log hook and ignored.
// All CPU kernels call this before they run.
const std::string& cpu_target();

}  // namespace reprise::kernels
