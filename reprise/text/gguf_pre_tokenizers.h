// Private to text: the pre-tokenizers that a GGUF file names by `tokenizer.ggml.pre`.
// Threads: free functions over constants.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reprise::internal {

struct PreTokenizer {
  bool nfc = false;                             // the text is brought to Unicode's form C first
  bool split_digits = false;                    // every digit stands alone, before anything else is split
  bool gpt2_split = false;                      // split by GPT-2's own pattern, last
  bool ignore_merges = false;                   // a word that is a token is taken whole
  bool adds_bos = false;                        // where the file does not say
  std::vector<std::string_view> patterns = {};  // each match becomes a word, one pattern after the other
};

// Returns: nothing for a name that is not known.
std::optional<PreTokenizer> find_pre_tokenizer(std::string_view name);

}  // namespace reprise::internal
