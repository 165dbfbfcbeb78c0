#include "reprise/models/adapter.h"

#include <cmath>
#include <optional>
#include <system_error>

#include "reprise/base/error.h"
#include "reprise/base/sha256.h"
#include "reprise/models/config.h"
#include "reprise/storage/file_system.h"
#include "reprise/storage/safetensors.h"

namespace reprise {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void corrupt(const fs::path& file, const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[read_adapter] " + file.string() + ": " + what);
}

Adapter::Kind kind_of(const internal::Config& config) {
  const std::string type = config.get_string("fine_tune_type").value_or("lora");
  if (type == "lora") return Adapter::Kind::lora;
  if (type == "dora") return Adapter::Kind::dora;
  if (type == "full") return Adapter::Kind::full;
  throw Error(ErrorCode::unsupported,
              "[read_adapter] fine_tune_type must be lora, dora or full, but got '" + type + "'");
}

float scale_of(const internal::Config& config, const fs::path& file) {
  const auto parameters = config.get_object("lora_parameters");
  const auto scale = parameters ? parameters->get_float("scale") : std::nullopt;
  if (!scale) {
    const bool has_alpha = parameters && parameters->has("alpha");
    corrupt(file, std::string("lora_parameters must have a member 'scale'") +
                      (has_alpha ? "; 'alpha' is another framework's word" : ""));
  }
  if (!std::isfinite(*scale)) corrupt(file, "the scale must be finite");
  return *scale;
}

}  // namespace

Adapter read_adapter(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    throw Error(ErrorCode::not_found, "[read_adapter] there is no folder " + folder.string() +
                                          "; an adapter is one with adapter_config.json and adapters.safetensors");
  }
  const fs::path config_file = folder / "adapter_config.json";
  const fs::path weights_file = folder / "adapters.safetensors";
  const std::string text = read_file(config_file);
  const internal::Config config(text);
  Adapter adapter{.kind = kind_of(config)};
  if (adapter.kind != Adapter::Kind::full) adapter.scale = scale_of(config, config_file);
  adapter.weights = read_safetensors(weights_file).tensors;
  if (adapter.weights.empty()) corrupt(weights_file, "there is nothing in it");
  Sha256 digest;
  digest.update(text);
  digest.update(sha256_hex(read_file(weights_file)));
  adapter.fingerprint = digest.hex_digest();
  return adapter;
}

}  // namespace reprise
