// prompt_cache_tool: the C++ side of tests/oracle/prompt_cache_interchange.py.
//   write-sample FILE [layout=legacy] [layers=N] [rows=N] [trim=N] [dtype=NAME] [tokens=1] [KEY:VALUE…]
//   continue FILE COUNT OUT   loads FILE, appends COUNT sample rows and writes what each layer shows to OUT
//   describe FILE             one JSON object on stdout
//   samples current|legacy    names of the states of cache_samples that mlx-lm's classes can hold, as JSON
//   write-state NAME FILE OUT [layout=legacy]   that state as a (portable) file; to OUT what it is given and then shows
//   continue-state FILE OUT SHOWN COPY          loads FILE, is given what OUT says, writes what it shows; FILE again as
//                                               COPY
// and of tests/python/files_test.py:
//   write-samples FOLDER [layout=legacy]   every state of cache_samples that the layout holds, as FOLDER/<number>
//   rewrite FOLDER COPIES                  loads each file of FOLDER and saves it again, as it was, under the same name
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "nlohmann/json.hpp"
#include "reprise/base/error.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/storage/safetensors.h"
#include "tests/cache/cache_samples.h"
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

using Arrays = std::map<std::string, mx::array>;

// Gives each cache below `cache` the rows `given` has for it, or new ones, and notes what it then shows.
void go_on(LayerCache& cache, const RowShape& shape, const std::string& path, Arrays& given, Arrays& shown) {
  if (auto* list = dynamic_cast<CacheList*>(&cache)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      go_on(list->child(i), shape, path + "." + std::to_string(i), given, shown);
    }
  } else if (auto* arrays = dynamic_cast<ArraysCache*>(&cache)) {
    for (int slot = 0; slot < arrays->num_slots(); ++slot) {
      if (const auto value = arrays->get(slot)) shown.emplace(path + ".slot" + std::to_string(slot), *value);
    }
  } else if (auto* attention = dynamic_cast<AttentionCache*>(&cache)) {
    int step = 0;
    for (const int count : {3, 1, 1}) {
      const std::string name = path + ".step" + std::to_string(step++);
      const auto numbers = [&](int size, float first) {
        return mx::astype(
            mx::reshape(mx::arange(first, first + static_cast<float>(shape.batch * shape.heads * count * size)),
                        {shape.batch, shape.heads, count, size}) /
                mx::array(64.0f),
            shape.dtype);
      };
      const mx::array keys = given.emplace(name + ".keys", numbers(shape.key_size, 1.0f)).first->second;
      const mx::array values = given.emplace(name + ".values", numbers(shape.value_size, 7.0f)).first->second;
      const KeysValues rows = attention->update_and_fetch(keys, values);
      if (const auto* dense = std::get_if<DenseKV>(&rows)) {
        shown.emplace(name + ".shown0", dense->keys);
        shown.emplace(name + ".shown1", dense->values);
        continue;
      }
      const auto& quantized = std::get<QuantizedKV>(rows);
      int tensor = 0;
      for (const QuantizedTensor* triple : {&quantized.keys, &quantized.values}) {
        for (const mx::array& each : {triple->packed, triple->scales, triple->biases}) {
          shown.emplace(name + ".shown" + std::to_string(tensor++), each);
        }
      }
    }
  }
}

bool mlx_lm_holds(const CacheSample& sample, bool legacy) {
  const bool own = sample.not_in_legacy.starts_with("a class that");
  const auto cache = own ? sample.make()->to_dequantized() : sample.make();
  if (sample.shape.batch == 0 || !cache->extra_state().empty()) return false;
  return legacy ? sample.not_in_legacy.empty() || (own && !cache->empty()) : true;
}

bool has_plain_form(const CacheSample& sample) { return sample.name != "CacheList of own classes"; }

int list_samples(const std::vector<std::string>& words) {
  nlohmann::json names = nlohmann::json::array();
  for (const CacheSample& sample : cache_samples()) {
    if (has_plain_form(sample) && mlx_lm_holds(sample, words[0] == "legacy")) names.push_back(sample.name);
  }
  std::cout << names.dump() << std::endl;
  return 0;
}

int write_state(const std::vector<std::string>& words) {
  for (const CacheSample& sample : cache_samples()) {
    if (sample.name != words[0]) continue;
    SaveOptions options;
    options.portable = true;
    if (words.size() > 3) options.layout = PromptCacheLayout::legacy;
    const bool own = sample.not_in_legacy.starts_with("a class that");
    PromptCache cache;
    cache.push_back(own ? sample.make()->to_dequantized() : sample.make());
    PromptCache saved;
    saved.push_back(sample.make());
    save_prompt_cache(words[1], saved, {{"sample", sample.name}}, options);
    Arrays given, out;
    go_on(cache[0], sample.shape, "0", given, out);
    out.merge(given);
    write_safetensors(words[2], out, {});
    return 0;
  }
  throw std::invalid_argument("no sample " + words[0]);
}

int continue_state(const std::vector<std::string>& words) {
  std::map<std::string, std::string> metadata;
  PromptCache cache = load_prompt_cache(words[0], &metadata);
  SaveOptions options;
  options.layout = load_prompt_cache_file(words[0]).layout;
  save_prompt_cache(words[3], cache, metadata, options);
  Arrays given = read_safetensors(words[1], ReadMode::copy).tensors, shown;
  go_on(cache[0], {}, "0", given, shown);
  write_safetensors(words[2], shown, {});
  return 0;
}

int write_samples(const std::vector<std::string>& words) {
  SaveOptions options;
  if (words.size() > 1) options.layout = PromptCacheLayout::legacy;
  int number = 0;
  for (const CacheSample& sample : cache_samples()) {
    PromptCache cache;
    cache.push_back(sample.make());
    SaveOptions each = options;
    if (const auto position = cache[0].position(); position && words.size() == 1) {
      each.extension = {.tokens = Tokens(static_cast<std::size_t>(*position), 7),
                        .model_fingerprint = "model",
                        .app_json = R"({"note":1})"};
    }
    const auto file = std::filesystem::path(words[0]) / std::to_string(number++);
    try {
      save_prompt_cache(file.string(), cache, {{"sample", sample.name}}, each);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsupported) throw;
    }
  }
  return 0;
}

int rewrite(const std::vector<std::string>& words) {
  for (const auto& entry : std::filesystem::directory_iterator(words[0])) {
    const LoadedPromptCache loaded = load_prompt_cache_file(entry.path().string());
    SaveOptions options;
    options.layout = loaded.layout;
    options.extension = loaded.extension;
    const auto copy = std::filesystem::path(words[1]) / entry.path().filename();
    save_prompt_cache(copy.string(), loaded.cache, loaded.metadata, options);
  }
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
    if (rest.size() == 1 && words[0] == "samples") return list_samples(rest);
    if (rest.size() >= 3 && words[0] == "write-state") return write_state(rest);
    if (rest.size() == 4 && words[0] == "continue-state") return continue_state(rest);
    if (!rest.empty() && words[0] == "write-samples") return write_samples(rest);
    if (rest.size() == 2 && words[0] == "rewrite") return rewrite(rest);
    std::cerr << "usage: prompt_cache_tool write-sample|continue|describe|samples|write-state|continue-state|"
                 "write-samples|rewrite …"
              << std::endl;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "prompt_cache_tool: " << error.what() << std::endl;
    return 1;
  }
}
