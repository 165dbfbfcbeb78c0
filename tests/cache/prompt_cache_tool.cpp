// prompt_cache_tool: the C++ side of tests/oracle/prompt_cache_interchange.py.
//   write-sample FILE [layout=legacy] [layers=N] [rows=N] [trim=N] [dtype=NAME] [tokens=1] [KEY:VALUE…]
//   continue FILE COUNT OUT   loads FILE, appends COUNT sample rows and writes what each layer shows to OUT
//   describe FILE             one JSON object on stdout
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "mlx/transforms.h"
#include "nlohmann/json.hpp"
#include "reprise/base/error.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/storage/safetensors.h"
#include "tests/cache/sample_rows.h"

namespace {

namespace mx = mlx::core;
using namespace reprise;
using namespace reprise::cache_test;

mx::Dtype dtype_named(const std::string& name) {
  if (name == "float32") return mx::float32;
  if (name == "float16") return mx::float16;
  if (name == "bfloat16") return mx::bfloat16;
  throw std::invalid_argument("unknown dtype " + name);
}

int write_sample(const std::vector<std::string>& words) {
  std::map<std::string, std::string> options = {{"layers", "2"}, {"rows", "5"}, {"trim", "0"}, {"dtype", "float32"}};
  std::map<std::string, std::string> metadata;
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::size_t at = words[i].find_first_of(":=");
    if (at == std::string::npos) throw std::invalid_argument("neither option nor metadata: " + words[i]);
    (words[i][at] == ':' ? metadata : options)[words[i].substr(0, at)] = words[i].substr(at + 1);
  }
  PromptCache cache = make_kv_prompt_cache(std::stoi(options["layers"]));
  const int rows = std::stoi(options["rows"]);
  if (rows > 0) append_sample(cache, rows, dtype_named(options["dtype"]));
  trim_prompt_cache(cache, std::stoi(options["trim"]));
  SaveOptions save;
  if (options["layout"] == "legacy") save.layout = PromptCacheLayout::legacy;
  if (options["tokens"] == "1") save.extension.tokens = Tokens(static_cast<std::size_t>(cache_length(cache)), 7);
  std::cout << save_prompt_cache(words[0], cache, metadata, save) << std::endl;
  return 0;
}

int continue_file(const std::vector<std::string>& words) {
  PromptCache cache = load_prompt_cache(words[0]);
  mx::Dtype dtype = mx::float32;
  for (const auto& [name, tensor] : read_safetensors(words[0]).tensors) {
    if (name == "0.0") dtype = tensor.size() > 0 ? tensor.dtype() : mx::float32;
  }
  std::map<std::string, mx::array> shown;
  std::size_t layer = 0;
  for (const SampleRows& rows : append_sample(cache, std::stoi(words[1]), dtype)) {
    shown.emplace(std::to_string(layer) + ".keys", rows.keys);
    shown.emplace(std::to_string(layer) + ".values", rows.values);
    ++layer;
  }
  write_safetensors(words[2], shown, {});
  return 0;
}

int describe(const std::vector<std::string>& words) {
  const LoadedPromptCache loaded = load_prompt_cache_file(words[0]);
  nlohmann::json layers = nlohmann::json::array();
  for (std::size_t layer = 0; layer < loaded.cache.size(); ++layer) {
    const LayerCache& cache = loaded.cache[layer];
    layers.push_back({{"class", cache.class_name()}, {"length", cache.length()}, {"empty", cache.empty()}});
  }
  nlohmann::json out = {{"layers", layers},
                        {"metadata", loaded.metadata},
                        {"layout", loaded.layout == PromptCacheLayout::current ? "current" : "legacy"}};
  if (loaded.extension.tokens) out["tokens"] = *loaded.extension.tokens;
  std::cout << out.dump() << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    const std::vector<std::string> rest(words.begin() + (words.empty() ? 0 : 1), words.end());
    if (!rest.empty() && words[0] == "write-sample") return write_sample(rest);
    if (rest.size() == 3 && words[0] == "continue") return continue_file(rest);
    if (rest.size() == 1 && words[0] == "describe") return describe(rest);
    std::cerr << "usage: prompt_cache_tool write-sample|continue|describe FILE …" << std::endl;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "prompt_cache_tool: " << error.what() << std::endl;
    return 1;
  }
}
