#include "reprise/generate/loaded_model.h"

#include <memory>
#include <optional>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/base/sha256.h"
#include "reprise/models/adapter.h"
#include "reprise/storage/model_files.h"

namespace reprise {

LoadedModel load(const std::filesystem::path& path, const LoadOptions& options) {
  std::optional<Tokenizer> tokenizer;
  std::optional<ChatTemplate> chat_template;
  // Building a tokenizer takes about as long as reading the weights: they go side by side.
  ModelFiles files = read_model_files(path, [&](const TokenizerData& data) {
    if (data.tokenizer_json.empty() && !data.gguf) {
      throw Error(ErrorCode::not_found, "[load] '" + path.string() + "' has no tokenizer.json, or an empty one");
    }
    tokenizer.emplace(data);
    if (!data.chat_template.empty()) chat_template.emplace(data);
  });
  std::string of_all_bytes = options.full_fingerprint ? full_fingerprint(files) : "";
  ModelOptions model_options = options.model;
  if (options.adapter) {
    model_options.adapter = std::make_shared<const Adapter>(read_adapter(*options.adapter));
    // What another model has computed must not be taken for this one's.
    files.fingerprint = sha256_hex(files.fingerprint + model_options.adapter->fingerprint);
    if (options.full_fingerprint) of_all_bytes = sha256_hex(of_all_bytes + model_options.adapter->fingerprint);
  }
  auto model = make_model(files, model_options);
  return {.path = path.string(),
          .fingerprint = std::move(files.fingerprint),
          .full_fingerprint = std::move(of_all_bytes),
          .model = std::move(model),
          .tokenizer = std::move(*tokenizer),
          .chat_template = std::move(chat_template),
          .tokenizer_config_json = "{}"};
}

}  // namespace reprise
