#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "apps/reprise/inspect_report.h"
#include "reprise/base/error.h"
#include "reprise/models/language_model.h"
#include "reprise/storage/file_system.h"
#include "reprise/storage/gguf.h"
#include "reprise/storage/model_files.h"
#include "reprise/storage/safetensors.h"

namespace reprise::app {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::uint64_t elements(const std::vector<std::int64_t>& shape) {
  std::uint64_t count = 1;
  for (const auto n : shape) count *= static_cast<std::uint64_t>(n);
  return count;
}

std::string plural(std::size_t count, const std::string& word) {
  return std::to_string(count) + " " + word + (count == 1 ? "" : "s");
}

// Weights of some files together.
struct WeightSums {
  std::size_t tensors = 0;
  std::uint64_t parameters = 0;  // quantised weights counted unpacked, scales and biases not
  std::uint64_t bytes = 0;
  std::map<std::string, std::uint64_t> bytes_by_kind;  // "4-bit", "F32", …
};

std::string kinds_text(const WeightSums& sums) {
  std::vector<std::pair<std::uint64_t, std::string>> kinds;
  for (const auto& [kind, bytes] : sums.bytes_by_kind) kinds.emplace_back(bytes, kind);
  std::sort(kinds.rbegin(), kinds.rend());
  std::string text;
  for (const auto& [bytes, kind] : kinds) text += (text.empty() ? "" : ", ") + kind + " (" + format_bytes(bytes) + ")";
  return text;
}

// config.json, with every member optional.
class Config {
 public:
  explicit Config(Json json) : json_(std::move(json)) {}

  std::optional<std::int64_t> integer(const std::string& key) const {
    const auto found = json_.find(key);
    return found != json_.end() && found->is_number_integer() ? std::optional(found->get<std::int64_t>())
                                                              : std::nullopt;
  }
  std::string text(const std::string& key) const {
    const auto found = json_.find(key);
    return found != json_.end() && found->is_string() ? found->get<std::string>() : "";
  }
  // Of `weight` ("model.layers.0.mlp.up_proj"): its own entry in `quantization`, else the general one.
  std::uint64_t group_size(const std::string& weight) const {
    const auto found = json_.find("quantization");
    if (found == json_.end() || !found->is_object()) return 64;
    const Json& own = found->contains(weight) && (*found)[weight].is_object() ? (*found)[weight] : *found;
    const auto size = own.find("group_size");
    return size != own.end() && size->is_number_unsigned() ? size->get<std::uint64_t>() : 64;
  }

 private:
  Json json_;
};

void add_safetensors(WeightSums& sums, const SafetensorsHeader& header, const Config& config) {
  std::map<std::string, const TensorRecord*> scales;
  for (const auto& tensor : header.tensors) {
    if (tensor.name.ends_with(".scales")) scales[tensor.name.substr(0, tensor.name.size() - 7)] = &tensor;
  }
  for (const auto& tensor : header.tensors) {
    ++sums.tensors;
    const auto bytes = tensor.end - tensor.begin;
    sums.bytes += bytes;
    const auto dot = tensor.name.rfind('.');
    const auto layer = tensor.name.substr(0, dot);
    const auto found = dot == std::string::npos ? scales.end() : scales.find(layer);
    if (found == scales.end()) {
      sums.parameters += elements(tensor.shape);
      sums.bytes_by_kind[tensor.dtype] += bytes;
    } else if (tensor.name.ends_with(".weight")) {
      const auto unpacked = elements(found->second->shape) * config.group_size(layer);
      sums.parameters += unpacked;
      const auto bits = unpacked == 0 ? 0 : elements(tensor.shape) * 32 / unpacked;
      sums.bytes_by_kind[std::to_string(bits) + "-bit, groups of " + std::to_string(config.group_size(layer))] += bytes;
    } else {
      sums.bytes_by_kind["scales and biases"] += bytes;
    }
  }
}

void add_weights(Report& report, const WeightSums& sums, std::size_t files) {
  report.add("parameters", format_count(sums.parameters));
  report.add("weights", format_bytes(sums.bytes) + " in " + plural(sums.tensors, "tensor") +
                            (files == 0 ? "" : ", " + plural(files, "file")));
  report.add("types", kinds_text(sums));
}

Json parse_json(const fs::path& file) {
  require_regular(file);
  auto json = Json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) throw Error(ErrorCode::corrupt_data, file.string() + " is no JSON object");
  return json;
}

// Python's bare NaN and Infinity are no JSON; the reader that loading uses gives a text that is.
Json read_config(const fs::path& folder) {
  try {
    return parse_json(folder / "config.json");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt_data) throw;
    return Json::parse(read_model_files(folder).config_json);
  }
}

// The weight files: those that the index names, else all there are.
std::vector<fs::path> weight_files(const fs::path& folder) {
  std::set<fs::path> files;
  const auto index = folder / "model.safetensors.index.json";
  if (fs::exists(index)) {
    const auto json = parse_json(index);
    const auto map = json.find("weight_map");
    if (map == json.end() || !map->is_object()) {
      throw Error(ErrorCode::corrupt_data, index.string() + " has no weight_map");
    }
    for (const auto& [name, file] : map->items()) {
      const auto shard = file.is_string() ? file.get<std::string>() : "";
      if (shard.empty() || shard == "." || shard == ".." || fs::path(shard).filename() != shard) {
        throw Error(ErrorCode::corrupt_data, index.string() + ": the weights of " + excerpt(name) +
                                                 " must be in a file of this folder, but got " + file.dump());
      }
      files.insert(folder / shard);
    }
  } else {
    for (const auto& entry : fs::directory_iterator(folder)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with("model") && name.ends_with(".safetensors")) files.insert(entry.path());
    }
  }
  if (files.empty()) throw Error(ErrorCode::not_found, folder.string() + " holds no model*.safetensors");
  return {files.begin(), files.end()};
}

struct Shape {
  std::optional<std::int64_t> layers, hidden, heads, kv_heads, mlp, context, vocabulary;
};

void add_shape(Report& report, const std::string& model_type, const std::string& architecture, const Shape& shape) {
  const auto known = known_model_types();
  const bool runs = std::find(known.begin(), known.end(), model_type) != known.end();
  report.add("architecture", (model_type.empty() ? "not named" : model_type) +
                                 (architecture.empty() ? "" : " (" + architecture + ")") +
                                 (runs ? "" : ": this version cannot run it"));
  std::string text;
  const auto part = [&](const std::optional<std::int64_t>& value, const std::string& before, const std::string& after) {
    if (value) text += (text.empty() ? "" : ", ") + before + std::to_string(*value) + after;
  };
  part(shape.layers, "", " layers");
  part(shape.hidden, "hidden size ", "");
  part(shape.heads, "", " heads");
  if (shape.kv_heads != shape.heads) part(shape.kv_heads, "", " of keys and values");
  part(shape.mlp, "MLP ", "");
  report.add("shape", text.empty() ? "not recorded" : text);
  report.add("context", shape.context ? std::to_string(*shape.context) + " tokens" : "not recorded");
  if (shape.vocabulary) report.add("vocabulary", std::to_string(*shape.vocabulary) + " tokens");
}

void add_tokenizer(Report& report, const fs::path& folder) {
  if (!fs::exists(folder / "tokenizer.json")) {
    report.add("tokenizer", "MISSING: there is no tokenizer.json");
  } else {
    require_regular(folder / "tokenizer.json");
    report.add("tokenizer", "tokenizer.json, " + format_bytes(fs::file_size(folder / "tokenizer.json")));
  }
  bool has_template = fs::exists(folder / "chat_template.jinja") || fs::exists(folder / "chat_template.json");
  if (fs::exists(folder / "tokenizer_config.json")) {
    require_regular(folder / "tokenizer_config.json");
    const auto config = Json::parse(read_file(folder / "tokenizer_config.json"), nullptr, /*allow_exceptions=*/false);
    has_template =
        has_template || (config.is_object() ? config.contains("chat_template") && !config["chat_template"].is_null()
                                            : !read_model_files(folder).tokenizer.chat_template.empty());
  }
  report.add("chat template", has_template ? "yes" : "no: prompts are plain text, `chat` does not work");
}

// A file mapped for reading.
class MappedBytes {
 public:
  explicit MappedBytes(const fs::path& file) {
    const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info = {};
    if (descriptor < 0 || ::fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) {
      if (descriptor >= 0) ::close(descriptor);
      throw Error(ErrorCode::not_found, "cannot read " + file.string());
    }
    size_ = static_cast<std::size_t>(info.st_size);
    if (size_ > 0) data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    ::close(descriptor);
    if (data_ == MAP_FAILED) throw Error(ErrorCode::resource_exhausted, "cannot map " + file.string());
  }
  ~MappedBytes() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }
  MappedBytes(const MappedBytes&) = delete;
  MappedBytes& operator=(const MappedBytes&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

class GgufMetadata {
 public:
  explicit GgufMetadata(const GgufHeader& header) : header_(header) {}

  std::optional<std::int64_t> integer(const std::string& key) const {
    const auto* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (const auto* number = std::get_if<std::int64_t>(value)) return *number;
    if (const auto* number = std::get_if<std::uint64_t>(value)) return static_cast<std::int64_t>(*number);
    return std::nullopt;
  }
  std::string text(const std::string& key) const {
    const auto* value = find(key);
    const auto* text = value == nullptr ? nullptr : std::get_if<std::string>(value);
    return text == nullptr ? "" : *text;
  }
  std::optional<std::int64_t> array_size(const std::string& key) const {
    const auto* value = find(key);
    const auto* array = value == nullptr ? nullptr : std::get_if<GgufArray>(value);
    if (array == nullptr) return std::nullopt;
    return std::visit([](const auto& items) { return static_cast<std::int64_t>(items.size()); }, *array);
  }

 private:
  const GgufValue* find(const std::string& key) const {
    const auto found = header_.metadata.find(key);
    return found == header_.metadata.end() ? nullptr : &found->second;
  }

  const GgufHeader& header_;
};

}  // namespace

Report inspect_model_folder(const fs::path& folder) {
  Report report;
  if (!fs::exists(folder / "config.json")) {
    throw Error(ErrorCode::not_found, folder.string() + " is no model folder: it has no config.json");
  }
  const auto json = read_config(folder);
  const Config config(json);
  report.add("model folder", folder.string());
  const auto architectures = json.find("architectures");
  const bool named = architectures != json.end() && architectures->is_array() && !architectures->empty() &&
                     architectures->front().is_string();
  const auto heads = config.integer("num_attention_heads");
  const auto kv_heads = config.integer("num_key_value_heads");
  add_shape(
      report, config.text("model_type"), named ? architectures->front().get<std::string>() : "",
      {config.integer("num_hidden_layers"), config.integer("hidden_size"), heads, kv_heads ? kv_heads : heads,
       config.integer("intermediate_size"), config.integer("max_position_embeddings"), config.integer("vocab_size")});
  WeightSums sums;
  const auto files = weight_files(folder);
  for (const auto& file : files) add_safetensors(sums, read_safetensors_header(file), config);
  add_weights(report, sums, files.size());
  add_tokenizer(report, folder);
  return report;
}

Report inspect_gguf(const fs::path& file) {
  const MappedBytes mapped(file);
  const auto header = parse_gguf(mapped.bytes(), mapped.bytes().size());
  const GgufMetadata metadata(header);
  Report report;
  report.add("GGUF file", file.string() + ", version " + std::to_string(header.version));
  const auto name = metadata.text("general.name");
  if (!name.empty()) report.add("name", name);
  const auto architecture = metadata.text("general.architecture");
  const auto number = [&](const std::string& key) { return metadata.integer(architecture + "." + key); };
  const auto heads = number("attention.head_count");
  const auto kv_heads = number("attention.head_count_kv");
  add_shape(report, architecture, "",
            {number("block_count"), number("embedding_length"), heads, kv_heads ? kv_heads : heads,
             number("feed_forward_length"), number("context_length"), metadata.array_size("tokenizer.ggml.tokens")});
  WeightSums sums;
  for (const auto& tensor : header.tensors) {
    ++sums.tensors;
    sums.parameters += elements(tensor.shape);
    sums.bytes += tensor.size_bytes;
    sums.bytes_by_kind[gguf_type_name(tensor.type)] += tensor.size_bytes;
  }
  add_weights(report, sums, 0);
  const auto tokenizer = metadata.text("tokenizer.ggml.model");
  const auto pre = metadata.text("tokenizer.ggml.pre");
  report.add("tokenizer", tokenizer.empty() ? "MISSING" : tokenizer + (pre.empty() ? "" : ", pre-tokenizer " + pre));
  report.add("chat template", metadata.text("tokenizer.chat_template").empty()
                                  ? "no: prompts are plain text, `chat` does not work"
                                  : "yes");
  return report;
}

Report inspect_safetensors(const fs::path& file) {
  const auto header = read_safetensors_header(file);
  Report report;
  report.add("safetensors", file.string() + ": weights, not a prompt cache");
  WeightSums sums;
  add_safetensors(sums, header, Config(Json::object()));
  add_weights(report, sums, 0);
  for (const auto& [key, value] : header.metadata) report.add("metadata", key + " = " + excerpt(value));
  return report;
}

}  // namespace reprise::app
