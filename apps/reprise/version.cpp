#include "apps/reprise/version.h"

#include <dlfcn.h>

#include <filesystem>

#include "mlx/version.h"

namespace reprise::app {
namespace {

// The file that holds `symbol`; empty when nothing does.
std::string file_of(const void* symbol) {
  Dl_info info = {};
  if (symbol == nullptr || ::dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code error;
  const auto path = std::filesystem::canonical(info.dli_fname, error);
  return error ? info.dli_fname : path.string();
}

}  // namespace

std::string version_text() {
  const auto blas = file_of(::dlsym(RTLD_DEFAULT, "cblas_sgemm"));
  return std::string("reprise ") + REPRISE_VERSION + "\nMLX " + mlx::core::version() + "\nBLAS " +
         (blas.empty() ? "none" : blas);
}

}  // namespace reprise::app
