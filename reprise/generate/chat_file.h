// A chat's transcript as the JSON text that goes into a prompt-cache file's extension ("app"). Private to `generate`.
// Members: docs/prompt_cache_format.md. Threads: free functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reprise/base/tokens.h"
#include "reprise/generate/kv_cache_options.h"
#include "reprise/sampling/sampling_params.h"
#include "reprise/text/chat_template.h"

namespace reprise::internal {

struct SavedChat {
  std::vector<ChatMessage> messages;
  std::vector<Tokens> answers;  // one per assistant message
  std::vector<std::uint64_t> draws_before;
  std::uint64_t num_draws = 0;
  SamplingParams sampling;
  std::string tools_json;
  std::string kwargs_json;
  KVCacheOptions kv_cache = {};
  std::vector<int> pieces = {};  // see RecordedCache; only where a layer depends on them
};

std::string chat_to_json(const SavedChat& chat);

// Throws: corrupt_data, naming the member, for text that is no such transcript; unsupported for a newer version of it;
// failed_precondition when it is another program's.
SavedChat chat_from_json(const std::string& text);

}  // namespace reprise::internal
