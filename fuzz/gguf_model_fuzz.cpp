// A GGUF file from its first byte to evaluated arrays: any bytes give a whole model or an Error.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "reprise/base/error.h"
#include "reprise/storage/model_files.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("reprise_fuzz_" + std::to_string(::getpid()) + ".gguf");
  std::filesystem::remove(file);
  std::ofstream(file, std::ios::binary).write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  try {
    const reprise::ModelFiles files = reprise::read_model_files(file);
    std::uint64_t sum = 0;
    for (const auto& [name, array] : files.weights) {
      const auto* bytes = array.data<unsigned char>();
      for (std::size_t i = 0; i < array.nbytes(); ++i) sum += bytes[i];
    }
    if (sum == ~std::uint64_t{0}) std::abort();  // keeps the reads
  } catch (const reprise::Error& error) {
    if (error.code() == reprise::ErrorCode::internal) std::abort();
  }
  std::filesystem::remove(file);
  return 0;
}
