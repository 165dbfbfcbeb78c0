// Numbers and other values of the command line, parsed to the last character.
// Threads: free functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "reprise/base/tokens.h"

namespace reprise::app {

// All throw UsageError: `FLAG must be …, but got "TEXT"`. Nothing but the number may stand in `text`; NaN and what does
// not fit are refused.
int parse_int(const std::string& flag, std::string_view text, int least);
int parse_choice(const std::string& flag, std::string_view text, const std::vector<int>& choices);
std::uint64_t parse_seed(const std::string& flag, std::string_view text);
// A number of bytes, or of KB, MB or GB (thousands, as in mlx-lm; the B may be left out): "1.5G".
std::size_t parse_bytes(const std::string& flag, std::string_view text);
float parse_float(const std::string& flag, std::string_view text, float least = -std::numeric_limits<float>::infinity(),
                  float most = std::numeric_limits<float>::infinity());

// A JSON object from token id to bias: {"42": -3.5}.
std::map<TokenId, float> parse_logit_bias(const std::string& flag, const std::string& text);
// Returns: `text`. Throws: UsageError when it is no JSON object, or sets what a chat template gets by other ways.
std::string check_template_variables(const std::string& flag, const std::string& text);

// As mlx-lm: everything but "false" and "f" (in any case) is true.
bool str2bool(std::string text);

// The two characters \n become a newline, \t a tab.
std::string unescape(const std::string& text);

}  // namespace reprise::app
