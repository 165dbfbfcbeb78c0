// What one file of the disk tier holds. Threads: values.
#pragma once

#include <map>
#include <string>

#include "mlx/array.h"

namespace reprise {

// As safetensors hold it. Evaluated arrays, so it may go to any thread.
struct TensorFile {
  std::map<std::string, mlx::core::array> tensors;
  std::map<std::string, std::string> metadata;
};

}  // namespace reprise
