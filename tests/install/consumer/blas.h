// Which library answers libmlx's calls of BLAS in this process.
#pragma once

#include <dlfcn.h>

#include <string>

inline std::string blas_library() {
  void* function = dlsym(RTLD_DEFAULT, "cblas_sgemm");
  Dl_info info{};
  return function != nullptr && dladdr(function, &info) != 0 ? info.dli_fname : "none";
}
