// Threads: free functions.
#pragma once

#include <string>

namespace reprise::app {

// What --version prints: this program's version, MLX's, and the BLAS that MLX's calls end up in.
std::string version_text();

}  // namespace reprise::app
