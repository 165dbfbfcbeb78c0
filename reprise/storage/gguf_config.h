// What a GGUF file's metadata and tensors say about a model, as Hugging Face's config.json. Private to storage.
// Threads: free functions.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "reprise/storage/gguf.h"
#include "reprise/storage/gguf_architecture.h"
#include "reprise/storage/gguf_metadata.h"
#include "reprise/storage/gguf_weights.h"

namespace reprise::internal {

struct GgufModelView {
  const GgufHeader& header;
  std::span<const std::byte> bytes;  // the whole file
  GgufMetadata metadata;
  const GgufArchitecture& architecture;

  // A metadata key of the architecture: "llama." + `rest`.
  std::string key(const std::string& rest) const { return std::string(architecture.name) + "." + rest; }
};

// Throws: corrupt_data for keys that are missing or 0.
GgufHeads gguf_heads(const GgufModelView& file);

// Throws: unsupported (named) for settings that would change the result and that Hugging Face's config has no place
// for.
void refuse_gguf_variants(const GgufModelView& file);

// The text of a config.json. Throws: corrupt_data for settings that are missing or of another type, unsupported for
// those that no model has.
std::string gguf_config(const GgufModelView& file, const GgufHeads& heads,
                        const std::vector<GgufConversion>& conversions);

}  // namespace reprise::internal
