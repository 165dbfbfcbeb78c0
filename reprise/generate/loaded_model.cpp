#include "reprise/generate/loaded_model.h"

#include <optional>
#include <utility>

#include "reprise/base/error.h"
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
  auto model = make_model(files, options.model);
  return {.path = path.string(),
          .fingerprint = std::move(files.fingerprint),
          .model = std::move(model),
          .tokenizer = std::move(*tokenizer),
          .chat_template = std::move(chat_template),
          .tokenizer_config_json = "{}"};
}

}  // namespace reprise
