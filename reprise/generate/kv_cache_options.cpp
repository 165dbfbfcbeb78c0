#include "reprise/generate/kv_cache_options.h"

#include <algorithm>
#include <array>
#include <utility>

#include "mlx/array.h"
#include "reprise/base/error.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

constexpr std::array kBits = {2, 3, 4, 5, 6, 8};
constexpr std::array kGroupSizes = {32, 64, 128};

[[noreturn]] void refuse(const std::string& what, ErrorCode code = ErrorCode::invalid_argument) {
  throw Error(code, "[plan_kv_cache] " + what);
}

std::vector<std::string> describe_layers(const PromptCache& cache) {
  std::vector<std::string> layers;
  for (std::size_t i = 0; i < cache.size(); ++i) layers.push_back(describe_cache(cache[i]));
  return layers;
}

// `filled` quantised, or none where the group size does not fit.
std::optional<PromptCache> quantized(const PromptCache& filled, int group_size, int bits) {
  PromptCache cache = filled.fork();
  try {
    maybe_quantize_kv_cache(cache, 0, group_size, bits);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::invalid_argument) throw;
    return {};
  }
  return cache;
}

[[noreturn]] void refuse_group_size(const PromptCache& filled, int group_size, int bits) {
  std::string why;
  try {
    PromptCache cache = filled.fork();
    maybe_quantize_kv_cache(cache, 0, group_size, bits);
  } catch (const Error& error) {
    why = error.what();
  }
  std::string fitting;
  for (const int size : kGroupSizes) {
    if (quantized(filled, size, bits)) fitting += (fitting.empty() ? "" : " or ") + std::to_string(size);
  }
  refuse("kv_group_size must divide the head size of every layer, but got " + std::to_string(group_size) + " (" + why +
         "); " +
         (fitting.empty() ? "this model's keys and values cannot be quantised: leave --kv-bits out"
                          : "what fits: --kv-group-size " + fitting));
}

// One more step over quantised layers: a model that cannot attend to them says so while the graph is built.
void check_attention(const LanguageModel& model, PromptCache cache) {
  try {
    model.forward(mx::array({0}, {1, 1}, mx::int32), cache);
  } catch (const std::exception& error) {
    refuse(std::string("the model cannot attend to quantised keys and values: ") + error.what(),
           ErrorCode::unsupported);
  }
}

// "0-2, 5".
std::string ranges(const std::vector<std::size_t>& layers) {
  std::string text;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t last = i;
    while (last + 1 < layers.size() && layers[last + 1] == layers[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(layers[i]);
    if (last > i) text += "-" + std::to_string(layers[last]);
    i = last + 1;
  }
  return text;
}

template <std::size_t N>
void check_one_of(const char* name, int value, const std::array<int, N>& known) {
  if (std::find(known.begin(), known.end(), value) != known.end()) return;
  std::string list;
  for (const int number : known)
    list += (list.empty() ? "" : number == known.back() ? " or " : ", ") + std::to_string(number);
  refuse(std::string(name) + " must be " + list + ", but got " + std::to_string(value));
}

}  // namespace

void check_kv_cache_options(const KVCacheOptions& options) {
  if (options.max_kv_size && *options.max_kv_size <= 4) {
    refuse("max_kv_size must be at least 5, since 4 first tokens are always kept, but got " +
           std::to_string(*options.max_kv_size));
  }
  if (options.kv_bits) check_one_of("kv_bits", *options.kv_bits, kBits);
  check_one_of("kv_group_size", options.kv_group_size, kGroupSizes);
  if (options.quantized_kv_start < 0) {
    refuse("quantized_kv_start must not be negative, but got " + std::to_string(options.quantized_kv_start));
  }
}

std::vector<std::string> plan_kv_cache(const LanguageModel& model, const PromptCache& cache,
                                       const KVCacheOptions& options) {
  check_kv_cache_options(options);
  std::vector<std::string> layers = describe_layers(cache);
  if (!options.kv_bits) return layers;

  PromptCache filled = cache.fork();
  model.forward(mx::array({0}, {1, 1}, mx::int32), filled);
  auto after = quantized(filled, options.kv_group_size, *options.kv_bits);
  if (!after) refuse_group_size(filled, options.kv_group_size, *options.kv_bits);
  const std::vector<std::string> later = describe_layers(*after);
  bool any = false;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (later[i] != layers[i])
      layers[i] += ", from token " + std::to_string(options.quantized_kv_start) + " on " + later[i];
    any = any || later[i].find("Quantized") != std::string::npos;
  }
  if (!any) refuse("no layer has a quantised counterpart (" + summarize_layers(layers) + ")", ErrorCode::unsupported);
  check_attention(model, std::move(*after));
  return layers;
}

std::string summarize_layers(const std::vector<std::string>& layers) {
  std::vector<std::pair<std::string, std::vector<std::size_t>>> kinds;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& kind) { return kind.first == layers[i]; });
    if (found == kinds.end()) found = kinds.insert(kinds.end(), {layers[i], {}});
    found->second.push_back(i);
  }
  std::string text;
  for (const auto& [kind, numbers] : kinds) {
    text += (text.empty() ? "" : "\n") + std::string(numbers.size() == 1 ? "layer " : "layers ") + ranges(numbers) +
            ": " + kind;
  }
  return text;
}

}  // namespace reprise
