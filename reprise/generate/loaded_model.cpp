#include "reprise/generate/loaded_model.h"

#include <utility>

#include "reprise/base/error.h"
#include "reprise/storage/model_files.h"

namespace reprise {

LoadedModel load(const std::filesystem::path& path, const LoadOptions& options) {
  ModelFiles files = read_model_files(path);
  if (files.tokenizer.tokenizer_json.empty() && !files.tokenizer.gguf) {
    throw Error(ErrorCode::not_found, "[load] '" + path.string() + "' has no tokenizer.json, or an empty one");
  }
  Tokenizer tokenizer(files.tokenizer);
  std::optional<ChatTemplate> chat_template;
  if (!files.tokenizer.chat_template.empty()) chat_template.emplace(files.tokenizer);
  auto model = make_model(files, options.model);
  return {.path = path.string(),
          .fingerprint = std::move(files.fingerprint),
          .model = std::move(model),
          .tokenizer = std::move(tokenizer),
          .chat_template = std::move(chat_template),
          .tokenizer_config_json = "{}"};
}

}  // namespace reprise
