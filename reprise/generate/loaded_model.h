// A model with its tokenizer and chat template: everything that generation needs.
// Threads: immutable after load; see LanguageModel, Tokenizer, ChatTemplate for their use.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "reprise/models/language_model.h"
#include "reprise/text/chat_template.h"
#include "reprise/text/tokenizer.h"

namespace reprise {

struct LoadOptions {
  ModelOptions model = {};
  std::optional<std::filesystem::path> adapter = {};  // a folder, see read_adapter
  // Also hashes all weights: for an engine with a cache_dir. It takes about a second for each GB.
  bool full_fingerprint = false;
};

struct LoadedModel {
  std::string path;         // as given
  std::string fingerprint;  // of the model and its adapter; of the weights only a sample
  // Likewise, but of all bytes of what was loaded. Empty: it was not asked for.
  std::string full_fingerprint = {};
  std::unique_ptr<LanguageModel> model;
  Tokenizer tokenizer;
  std::optional<ChatTemplate> chat_template;  // none: the model has none; prompts are plain text
  std::string tokenizer_config_json;          // what cache files record of the tokenizer
};

// `path`: a model folder or a .gguf file. Throws: as read_adapter, read_model_files, make_model, Tokenizer,
// ChatTemplate.
LoadedModel load(const std::filesystem::path& path, const LoadOptions& options = {});

}  // namespace reprise
