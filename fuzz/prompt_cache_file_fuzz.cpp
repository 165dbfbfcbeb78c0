// A prompt-cache file of either layout: any bytes give caches that hold their invariants, or an Error.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "reprise/base/error.h"
#include "reprise/cache/prompt_cache_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string file =
      (std::filesystem::temp_directory_path() / ("prompt_cache_fuzz." + std::to_string(::getpid()) + ".safetensors"))
          .string();
  std::ofstream(file, std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  try {
    const reprise::PromptCache cache = reprise::load_prompt_cache(file);
    for (std::size_t layer = 0; layer < cache.size(); ++layer) {
      (void)cache[layer].saved_state();
      (void)cache[layer].max_trim();
      (void)cache[layer].nbytes();
    }
  } catch (const reprise::Error& error) {
    using enum reprise::ErrorCode;
    if (error.code() != corrupt_data && error.code() != unsupported) std::abort();
  }
  return 0;
}
