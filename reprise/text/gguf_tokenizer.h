// Private to text: a GGUF file's tokenizer, as textkit takes it.
// Threads: free function.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reprise/base/tokenizer_data.h"
#include "textkit.h"

namespace reprise::internal {

// A Hugging Face tokenizer.json without its vocabulary, and the vocabulary. Looks into the TokenizerData it was made
// of.
struct GgufTokenizer {
  std::string json;
  std::vector<textkit_slice> tokens;
  std::vector<textkit_slice> merges;  // left and right of each
  std::vector<std::uint32_t> added;
  std::vector<std::uint8_t> added_is_special;
};

// Requires: data.gguf. Throws: unsupported (tokenizer model or pre-tokenizer: named), corrupt_data (names which).
// Spellings that occur twice, and bytes that are no UTF-8, are left to textkit to refuse.
GgufTokenizer gguf_tokenizer(const TokenizerData& data);

}  // namespace reprise::internal
