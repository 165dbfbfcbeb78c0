// Private to text: a GGUF file's tokenizer, as textkit makes it.
// Threads: free function.
#pragma once

#include "reprise/base/tokenizer_data.h"
#include "reprise/text/textkit_call.h"

namespace reprise::internal {

// Requires: data.gguf. Throws: unsupported (tokenizer model or pre-tokenizer: named), corrupt_data (names which;
// spellings that occur twice and bytes that are no UTF-8 too).
TextkitTokenizer make_gguf_tokenizer(const TokenizerData& data);

}  // namespace reprise::internal
