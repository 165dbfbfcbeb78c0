// Private to text: a GGUF file's tokenizer, written as the Hugging Face tokenizer.json that gives the same ids.
// Threads: free function.
#pragma once

#include <string>

#include "reprise/base/tokenizer_data.h"

namespace reprise::internal {

// Requires: data.gguf. Throws: unsupported (tokenizer model or pre-tokenizer: named), corrupt_data (names which).
std::string gguf_tokenizer_json(const TokenizerData& data);

}  // namespace reprise::internal
