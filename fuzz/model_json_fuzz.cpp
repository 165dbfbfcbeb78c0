// The JSON of model folders: whatever its bare numbers, the text that comes out is read as it came in.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "reprise/storage/json_text.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const std::string replaced = reprise::internal::replace_bare_numbers(text);
  // What was JSON before is the same JSON after.
  const auto before = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!before.is_discarded() && before != nlohmann::json::parse(replaced)) std::abort();
  reprise::internal::added_tokens_of(text);
  return 0;
}
