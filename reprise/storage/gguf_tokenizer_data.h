// A GGUF file's tokenizer, out of its metadata. Private to storage.
#pragma once

#include "reprise/base/tokenizer_data.h"
#include "reprise/storage/gguf_metadata.h"

namespace reprise::internal {

// Without `gguf` when the file has no tokenizer. Throws: corrupt_data for lists of different lengths and for ids beyond
// them.
TokenizerData gguf_tokenizer_data(const GgufMetadata& metadata);

}  // namespace reprise::internal
