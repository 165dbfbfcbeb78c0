#include "reprise/cache/file_extension.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/array.h"
#include "nlohmann/json.hpp"
#include "reprise/base/error.h"
#include "reprise/cache/state_reader.h"

namespace reprise::internal {

namespace mx = mlx::core;
using Json = nlohmann::ordered_json;

namespace {

constexpr int kVersion = 1;

// Members of the JSON object, stored on disk: never rename.
constexpr const char* kVersionMember = "reprise";
constexpr const char* kDigestMember = "digest";
constexpr const char* kSealedMember = "sealed";  // true: the writer put a digest, so one must be there
constexpr const char* kTokensMember = "tokens";
constexpr const char* kFingerprintMember = "model_fingerprint";
constexpr const char* kAppMember = "app";
constexpr const char* kLayersMember = "layers";  // path → an object of the following
constexpr const char* kClassMember = "class";
constexpr const char* kGroupSizeMember = "group_size";
constexpr const char* kBitsMember = "bits";
constexpr const char* kStateMember = "state";

[[noreturn]] void fail(const std::string& what, const std::string& got) {
  throw Error(ErrorCode::corrupt_data, "[load_prompt_cache] the extension's " + what + ", but got " + got);
}

Json parse_sentinel(const std::string& sentinel) {
  Json json = Json::parse(sentinel, nullptr, false);
  if (!json.is_object()) fail("text must be a JSON object", "something else");
  return json;
}

std::string excerpt(const Json& json) {
  const std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() <= 40 ? text : text.substr(0, 40) + "…";
}

bool is_json_object(const std::string& text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string::npos && text[first] == '{' && Json::accept(text);
}

bool is_digest(const std::string& text) {
  return text.size() == kDigestDigits && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

const std::string* string_member(const Json& json, const char* name) {
  const auto member = json.find(name);
  if (member == json.end()) return nullptr;
  if (!member->is_string()) fail("member " + std::string(name) + " must be a string", member->type_name());
  return member->get_ptr<const std::string*>();
}

Json to_json(const LayerExtension& layer) {
  Json json = Json::object();
  if (!layer.class_name.empty()) json[kClassMember] = layer.class_name;
  if (layer.quantization) {
    json[kGroupSizeMember] = layer.quantization->group_size;
    json[kBitsMember] = layer.quantization->bits;
  }
  for (const auto& [name, value] : layer.state) {
    std::visit([&](const auto& number_or_list) { json[kStateMember][name] = number_or_list; }, value);
  }
  return json;
}

template <typename Integer>
Integer integer_of(const Json& json, const std::string& what) {
  constexpr std::int64_t low = std::numeric_limits<Integer>::min(), high = std::numeric_limits<Integer>::max();
  const bool fits = json.is_number_integer() &&
                    !(json.is_number_unsigned() &&
                      json.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  const std::int64_t value = fits ? json.get<std::int64_t>() : 0;
  if (!fits || value < low || value > high) fail(what + " must be an integer that fits", excerpt(json));
  return static_cast<Integer>(value);
}

ExtraState extra_state_of(const Json& json, const std::string& what) {
  if (!json.is_object()) fail(what + " must be an object", json.type_name());
  ExtraState state;
  for (const auto& [name, value] : json.items()) {
    const std::string member = what + "." + name;
    if (!value.is_array()) {
      state.emplace(name, integer_of<std::int64_t>(value, member));
      continue;
    }
    std::vector<int> list;
    for (const Json& item : value) list.push_back(integer_of<int>(item, member));
    state.emplace(name, std::move(list));
  }
  return state;
}

LayerExtension layer_extension_of(const Json& json, const std::string& what) {
  if (!json.is_object()) fail(what + " must be an object", json.type_name());
  LayerExtension layer;
  if (const auto name = json.find(kClassMember); name != json.end()) {
    if (!name->is_string()) fail(what + ".class must be a string", name->type_name());
    layer.class_name = name->get<std::string>();
  }
  const auto group_size = json.find(kGroupSizeMember), bits = json.find(kBitsMember);
  if ((group_size == json.end()) != (bits == json.end())) fail(what + " must have both group_size and bits", "one");
  if (group_size != json.end()) {
    layer.quantization = {integer_of<int>(*group_size, what + ".group_size"), integer_of<int>(*bits, what + ".bits")};
    if (layer.class_name.empty()) fail(what + " must name the quantised class", "none");
  }
  if (const auto state = json.find(kStateMember); state != json.end()) {
    layer.state = extra_state_of(*state, what + ".state");
  }
  return layer;
}

LayerExtensions layer_extensions_of(const Json& json) {
  LayerExtensions layers;
  if (const auto member = json.find(kLayersMember); member != json.end()) {
    if (!member->is_object()) fail("member layers must be an object", member->type_name());
    for (const auto& [path, layer] : member->items()) {
      layers.emplace(path, layer_extension_of(layer, "member of layer " + path));
    }
  }
  return layers;
}

}  // namespace

void add_extension(const FileExtension& whole, std::size_t num_layers, FileContent& content) {
  const PromptCacheExtension& extension = whole.callers;
  Json json = {{kVersionMember, kVersion}, {kDigestMember, kNoDigest}, {kSealedMember, true}};
  if (extension.tokens) {
    const std::string name = std::to_string(num_layers) + ".0";
    const auto count = static_cast<mx::ShapeElem>(extension.tokens->size());
    content.tensors.emplace(name, mx::array(extension.tokens->begin(), mx::Shape{count}, mx::int32));
    json[kTokensMember] = name;
  }
  if (!extension.model_fingerprint.empty()) json[kFingerprintMember] = extension.model_fingerprint;
  if (!extension.app_json.empty()) {
    if (!is_json_object(extension.app_json)) {
      throw Error(ErrorCode::invalid_argument,
                  "[save_prompt_cache] app_json must be a JSON object, but got something else");
    }
    json[kAppMember] = extension.app_json;
  }
  for (const auto& [path, layer] : whole.layers) json[kLayersMember][path] = to_json(layer);
  try {
    content.metadata[kSentinelKey] = json.dump();
  } catch (const Json::exception&) {
    throw Error(ErrorCode::invalid_argument,
                "[save_prompt_cache] the extension's texts must be UTF-8, but got other bytes");
  }
}

FileExtension read_extension(const ParsedFile& file) {
  FileExtension whole;
  PromptCacheExtension& extension = whole.callers;
  if (file.sentinel.empty()) return whole;
  const Json json = parse_sentinel(file.sentinel);
  const auto version = json.find(kVersionMember);
  if (version == json.end()) return whole;  // somebody else's
  if (!version->is_number_integer()) fail("version must be an integer", version->type_name());
  if (*version != kVersion) {
    throw Error(ErrorCode::unsupported, "[load_prompt_cache] the extension must be of version " +
                                            std::to_string(kVersion) + ", but got " + version->dump());
  }
  if (const std::string* fingerprint = string_member(json, kFingerprintMember))
    extension.model_fingerprint = *fingerprint;
  if (const std::string* app = string_member(json, kAppMember)) {
    if (!is_json_object(*app)) fail("member app must hold a JSON object", "something else");
    extension.app_json = *app;
  }
  if (const std::string* name = string_member(json, kTokensMember)) {
    const auto tensor = file.extra.find(*name);
    if (tensor == file.extra.end()) fail("tokens must be in a tensor of the file", "\"" + *name + "\"");
    const mx::array& ids = tensor->second;
    if (ids.ndim() != 1 || ids.dtype() != mx::int32) fail("tokens must be I32 of one axis", describe(State(ids)));
    const auto* data = ids.size() > 0 ? ids.data<TokenId>() : nullptr;
    extension.tokens = Tokens(data, data + ids.size());
  }
  whole.layers = layer_extensions_of(json);
  return whole;
}

std::optional<std::string> stated_digest(const std::string& sentinel) {
  if (sentinel.empty()) return std::nullopt;
  const Json json = parse_sentinel(sentinel);
  const auto digest = json.find(kDigestMember);
  if (digest != json.end() && digest->is_string() && is_digest(digest->get_ref<const std::string&>())) return *digest;
  if (json.contains(kVersionMember) && digest != json.end()) {
    fail("digest must be 64 hex digits", digest->is_string() ? "other text" : digest->type_name());
  }
  if (json.contains(kSealedMember)) fail("digest must be there, since the file was sealed", "none");
  return std::nullopt;
}

void fill_digest(TextMap& metadata, const std::string& digest) {
  std::string& sentinel = metadata.at(kSentinelKey);
  sentinel.replace(sentinel.find(kNoDigest), kDigestDigits, digest);
}

}  // namespace reprise::internal
