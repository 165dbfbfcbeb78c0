// JSON as model folders have it, which is not always JSON. Private to storage.
// Threads: free functions.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace reprise::internal {

// Python writes infinities as bare Infinity and -Infinity, transformers as {"__float__": "Infinity"}, and NaN likewise.
// Returns: the text with ±3.4028234663852886e38 (the largest float) for infinities and null for NaN; unchanged when it
// has none. The text need not be JSON otherwise.
std::string replace_bare_numbers(const std::string& text);

// A JSON object in `file`, after replace_bare_numbers. `text` receives what was parsed.
// Throws: not_found, corrupt_data (no JSON object, nested deeper than 100), naming the file.
nlohmann::json read_json_object(const std::filesystem::path& file, std::string* text = nullptr);

// content → id of a tokenizer.json's `added_tokens`; stops reading behind them, so that a large vocabulary costs
// nothing. Empty when the text has none or is damaged before their end.
std::map<std::string, int> added_tokens_of(const std::string& tokenizer_json);

}  // namespace reprise::internal
