#include "reprise/storage/model_folder.h"

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/storage/file_system.h"
#include "reprise/storage/json_text.h"
#include "reprise/storage/safetensors.h"
#include "reprise/storage/system_error.h"

namespace reprise::internal {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::json;

[[noreturn]] void corrupt(const fs::path& file, const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[read_model_files] " + file.string() + ": " + what);
}

bool is_there(const fs::path& file) {
  std::error_code failure;
  return fs::exists(file, failure);
}

std::optional<json> read_optional_object(const fs::path& file) {
  if (!is_there(file)) return std::nullopt;
  return read_json_object(file);
}

// ---- weights ----

// Files named model*.safetensors, sorted.
std::vector<std::string> find_shards(const fs::path& folder) {
  std::vector<std::string> shards;
  std::error_code failure;
  for (fs::directory_iterator entry(folder, failure), end; !failure && entry != end; entry.increment(failure)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with("model") && name.ends_with(".safetensors")) shards.push_back(name);
  }
  if (failure) throw system_error("read_model_files", "list", folder, failure.value());
  std::sort(shards.begin(), shards.end());
  return shards;
}

// "model-00001-of-00003.safetensors" says how many there must be.
void check_numbered_shards(const fs::path& folder, const std::vector<std::string>& shards) {
  constexpr std::size_t kDigits = 5;
  for (const std::string& shard : shards) {
    const std::size_t of = shard.find("-of-");
    if (of == std::string::npos || of < kDigits || shard.size() < of + 4 + kDigits) continue;
    const std::string total = shard.substr(of + 4, kDigits);
    if (total.find_first_not_of("0123456789") != std::string::npos) continue;
    for (int i = 1; i <= std::stoi(total); ++i) {
      std::string number = std::to_string(i);
      number.insert(0, kDigits - std::min(kDigits, number.size()), '0');
      const std::string wanted = shard.substr(0, of - kDigits) + number + shard.substr(of);
      if (!std::binary_search(shards.begin(), shards.end(), wanted)) {
        throw Error(ErrorCode::not_found, "[read_model_files] shard " + wanted + " is missing in " + folder.string());
      }
    }
  }
}

// tensor → shard of model.safetensors.index.json.
std::map<std::string, std::string> read_index(const fs::path& file) {
  const json index = read_json_object(file);
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object()) corrupt(file, "no weight_map");
  std::map<std::string, std::string> shards;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string()) corrupt(file, "the shard of " + printable(tensor) + " is no string");
    const auto name = shard.get<std::string>();
    if (name.empty() || fs::path(name).filename() != name || name == "." || name == "..") {
      corrupt(file, "a shard must be a file of this folder, but got " + printable(name));
    }
    shards.emplace(tensor, name);
  }
  return shards;
}

WeightMap read_weights(const fs::path& folder) {
  const fs::path index_file = folder / "model.safetensors.index.json";
  const bool has_index = is_there(index_file);
  std::map<std::string, std::string> index;
  std::vector<std::string> shards;
  if (has_index) {
    index = read_index(index_file);
    std::set<std::string> names;
    for (const auto& [tensor, shard] : index) names.insert(shard);
    shards.assign(names.begin(), names.end());
    for (const std::string& shard : shards) {
      if (!is_there(folder / shard)) {
        throw Error(ErrorCode::not_found,
                    "[read_model_files] shard " + shard + ", which " + index_file.string() + " names, is missing");
      }
    }
  } else {
    shards = find_shards(folder);
    check_numbered_shards(folder, shards);
  }
  if (shards.empty()) {
    throw Error(ErrorCode::unsupported, "[read_model_files] " + folder.string() +
                                            " holds no weights: neither model*.safetensors nor an index of them");
  }

  WeightMap weights;
  std::map<std::string, std::string> origin;
  for (const std::string& shard : shards) {
    for (auto& [name, array] : read_safetensors(folder / shard, ReadMode::memory_map).tensors) {
      if (!weights.emplace(name, array).second) {
        corrupt(folder / shard, "tensor " + printable(name) + " is also in " + origin.at(name));
      }
      origin.emplace(name, shard);
    }
  }
  for (const auto& [tensor, shard] : index) {
    const auto found = origin.find(tensor);
    if (found == origin.end() || found->second != shard) {
      corrupt(index_file, "tensor " + printable(tensor) + " is not in its shard " + shard);
    }
  }
  return weights;
}

// ---- tokenizer ----

// A special token is a string or an object with `content`; absent and null are empty.
std::string token_text(const json& object, const char* key, const fs::path& file) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) return {};
  if (it->is_string()) return it->get<std::string>();
  if (it->is_object()) {
    const auto content = it->find("content");
    if (content != it->end() && content->is_string()) return content->get<std::string>();
  }
  corrupt(file, std::string(key) + " must be a string or have a content");
}

// `eos_token_id` and the like: a number, a list, null or absent. Negative numbers stand for "none".
std::vector<TokenId> token_ids(const json& object, const char* key, const fs::path& file) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) return {};
  std::vector<TokenId> ids;
  for (const json& item : it->is_array() ? *it : json::array({*it})) {
    if (!item.is_number_integer() || (item.is_number_unsigned() && item.get<std::uint64_t>() > INT32_MAX)) {
      corrupt(file, std::string(key) + " must be a token id or a list of them");
    }
    if (item.get<std::int64_t>() >= 0) ids.push_back(static_cast<TokenId>(item.get<std::int64_t>()));
  }
  return ids;
}

// `chat_template`: the source, or a list of named ones of which "default" counts (or the only one).
std::string template_text(const json& object, const fs::path& file) {
  const auto it = object.find("chat_template");
  if (it == object.end() || it->is_null()) return {};
  if (it->is_string()) return it->get<std::string>();
  if (!it->is_array()) corrupt(file, "chat_template must be a string or a list");
  for (const json& entry : *it) {
    const bool well_formed = entry.is_object() && entry.contains("name") && entry["name"].is_string() &&
                             entry.contains("template") && entry["template"].is_string();
    if (!well_formed) corrupt(file, "each chat_template of a list needs a name and a template");
    if (entry["name"] == "default" || it->size() == 1) return entry["template"].get<std::string>();
  }
  return {};
}

// What transformers takes: a file of its own wins over tokenizer_config.json.
std::string read_chat_template(const fs::path& folder, const json& tokenizer_config) {
  if (is_there(folder / "chat_template.jinja")) return read_file(folder / "chat_template.jinja");
  std::string text = template_text(tokenizer_config, folder / "tokenizer_config.json");
  if (!text.empty()) return text;
  const fs::path file = folder / "chat_template.json";
  const std::optional<json> object = read_optional_object(file);
  return object ? template_text(*object, file) : std::string();
}

TokenizerData read_tokenizer(const fs::path& folder, const json& config) {
  TokenizerData data;
  if (!is_there(folder / "tokenizer.json")) return data;
  data.tokenizer_json = read_file(folder / "tokenizer.json");

  const json tokenizer_config = read_optional_object(folder / "tokenizer_config.json").value_or(json::object());
  const json special_tokens = read_optional_object(folder / "special_tokens_map.json").value_or(json::object());
  const json generation_config = read_optional_object(folder / "generation_config.json").value_or(json::object());
  data.chat_template = read_chat_template(folder, tokenizer_config);

  const auto text_of = [&](const char* key) {
    const std::string text = token_text(tokenizer_config, key, folder / "tokenizer_config.json");
    return text.empty() ? token_text(special_tokens, key, folder / "special_tokens_map.json") : text;
  };
  data.bos_token = text_of("bos_token");
  data.eos_token = text_of("eos_token");
  data.unk_token = text_of("unk_token");
  data.pad_token = text_of("pad_token");

  const std::map<std::string, int> added = added_tokens_of(data.tokenizer_json);
  const auto add_eos = [&](TokenId id) {
    auto& ids = data.eos_token_ids;
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  };
  if (const auto it = added.find(data.eos_token); it != added.end()) add_eos(it->second);
  // As in mlx-lm, generation_config.json replaces config.json, and the tokenizer's own end counts beside it.
  std::vector<TokenId> ends = token_ids(generation_config, "eos_token_id", folder / "generation_config.json");
  if (ends.empty()) ends = token_ids(config, "eos_token_id", folder / "config.json");
  for (const TokenId id : ends) add_eos(id);

  if (const auto it = added.find(data.bos_token); it != added.end()) {
    data.bos_token_id = it->second;
  } else if (const auto ids = token_ids(config, "bos_token_id", folder / "config.json"); !ids.empty()) {
    data.bos_token_id = ids.front();
  }
  return data;
}

}  // namespace

ModelFiles read_model_folder(const fs::path& folder) {
  const fs::path config_file = folder / "config.json";
  if (!is_there(config_file)) {
    throw Error(ErrorCode::not_found, "[read_model_files] config.json is missing in " + folder.string());
  }
  ModelFiles files;
  files.path = folder;
  const json config = read_json_object(config_file, &files.config_json);
  files.weights = read_weights(folder);
  files.tokenizer = read_tokenizer(folder, config);
  return files;
}

}  // namespace reprise::internal
