// A prompt-cache file of either layout: any bytes give caches that hold their invariants and go on, or an Error.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/prompt_cache_file.h"

namespace {

namespace mx = mlx::core;

// A few bytes of a file may stand for buffers that no step could pass through.
constexpr std::size_t kMaxBytes = std::size_t{1} << 22;

// Zeros as new rows for what is stored; none where nothing is, or where it says no size.
std::optional<reprise::DenseKV> next_rows(const reprise::AttentionCache& cache, int columns) {
  if (cache.empty()) return {};
  const reprise::KeysValues stored = cache.keys_and_values();
  const auto zeros = [&](const mx::array& like, int size) {
    return mx::zeros({like.shape(0), like.shape(1), columns, size}, like.dtype());
  };
  if (const auto* dense = std::get_if<reprise::DenseKV>(&stored)) {
    return reprise::DenseKV{zeros(dense->keys, dense->keys.shape(3)), zeros(dense->values, dense->values.shape(3))};
  }
  const auto& [keys, values, quantization] = std::get<reprise::QuantizedKV>(stored);
  return reprise::DenseKV{zeros(keys.scales, keys.scales.shape(3) * quantization.group_size),
                          zeros(values.scales, values.scales.shape(3) * quantization.group_size)};
}

void evaluate(const reprise::LayerCache& cache) {
  std::vector<mx::array> arrays;
  cache.state().collect_arrays(arrays);
  mx::eval(std::move(arrays));
}

// An operation may refuse; what it leaves must be whole.
template <typename Operation>
void attempt(reprise::LayerCache& cache, const Operation& operation) {
  if (cache.nbytes() > kMaxBytes) return;
  try {
    operation();
  } catch (const reprise::Error&) {
  }
  if (cache.nbytes() <= kMaxBytes) evaluate(cache);
}

void go_on(reprise::LayerCache& cache) {
  if (auto* list = dynamic_cast<reprise::CacheList*>(&cache)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) go_on((*list)[i]);
    return;
  }
  auto* attention = dynamic_cast<reprise::AttentionCache*>(&cache);
  for (const int columns : {2, 1, 1, 3}) {
    attempt(cache, [&] {
      if (attention == nullptr) return;
      const reprise::Mask mask = attention->make_mask(columns, {.window = 2});
      if (const auto* array = std::get_if<mx::array>(&mask)) mx::eval(*array);
      if (const auto rows = next_rows(*attention, columns)) attention->update_and_fetch(rows->keys, rows->values);
    });
    attempt(cache, [&] { cache.trim(columns); });
  }
  attempt(cache, [&] { cache.to_quantized(32, 4); });
  reprise::BatchedCache* batch = reprise::batched(cache);
  if (batch == nullptr || batch->batch_size() > 64) return;
  attempt(cache, [&] { batch->extend(*cache.fork()); });
  attempt(cache, [&] { evaluate(*batch->extract(0)); });
  attempt(cache, [&] { batch->finalize(); });
  attempt(cache, [&] { batch->filter({batch->batch_size() - 1, 0}); });
  attempt(cache, [&] { cache.trim(1); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string file =
      (std::filesystem::temp_directory_path() / ("prompt_cache_fuzz." + std::to_string(::getpid()) + ".safetensors"))
          .string();
  std::ofstream(file, std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  try {
    reprise::PromptCache cache = reprise::load_prompt_cache(file);
    for (std::size_t layer = 0; layer < cache.size(); ++layer) {
      (void)cache[layer].saved_state();
      (void)cache[layer].max_trim();
      go_on(cache[layer]);
    }
  } catch (const reprise::Error& error) {
    using enum reprise::ErrorCode;
    if (error.code() != corrupt_data && error.code() != unsupported) std::abort();
  }
  return 0;
}
