#include "apps/reprise/numbers.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/reprise/output.h"

namespace reprise::app {
namespace {

[[noreturn]] void fail(const std::string& flag, const std::string& expected, std::string_view got) {
  throw UsageError(flag + " must be " + expected + ", but got \"" + std::string(got) + "\"");
}

// The whole of `text` as a number, or nothing. A leading plus is allowed.
template <typename Number>
bool read_number(std::string_view text, Number& number) {
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number);
  return !text.empty() && result.ec == std::errc() && result.ptr == end;
}

std::string range(float least, float most) {
  std::ostringstream text;
  if (std::isfinite(least) && std::isfinite(most)) {
    text << "a number from " << least << " to " << most;
  } else if (std::isfinite(least)) {
    text << "a number of at least " << least;
  } else {
    text << "a number";
  }
  return text.str();
}

}  // namespace

int parse_int(const std::string& flag, std::string_view text, int least) {
  int number = 0;
  if (!read_number(text, number) || number < least) {
    fail(flag,
         "a whole number from " + std::to_string(least) + " to " + std::to_string(std::numeric_limits<int>::max()),
         text);
  }
  return number;
}

int parse_choice(const std::string& flag, std::string_view text, const std::vector<int>& choices) {
  int number = 0;
  if (read_number(text, number) && std::find(choices.begin(), choices.end(), number) != choices.end()) return number;
  std::string list;
  for (const int choice : choices) {
    list += (list.empty() ? "" : choice == choices.back() ? " or " : ", ") + std::to_string(choice);
  }
  fail(flag, list, text);
}

std::uint64_t parse_seed(const std::string& flag, std::string_view text) {
  std::uint64_t number = 0;
  if (!read_number(text, number)) fail(flag, "a whole number from 0 to 2^64 - 1", text);
  return number;
}

std::size_t parse_bytes(const std::string& flag, std::string_view text) {
  std::string_view digits = text;
  double unit = 1;
  if (digits.size() > 1 && (digits.back() == 'B' || digits.back() == 'b')) digits.remove_suffix(1);
  const char last = digits.empty() ? '\0' : static_cast<char>(std::toupper(static_cast<unsigned char>(digits.back())));
  if (last == 'K' || last == 'M' || last == 'G') {
    unit = last == 'K' ? 1e3 : last == 'M' ? 1e6 : 1e9;
    digits.remove_suffix(1);
  }
  double number = 0;
  const double most = 9e15;  // whole numbers are exact up to here
  if (!read_number(digits, number) || !(number >= 0) || !(number * unit <= most)) {
    fail(flag, "a number of bytes, as in 500M or 2G", text);
  }
  return static_cast<std::size_t>(number * unit);
}

float parse_float(const std::string& flag, std::string_view text, float least, float most) {
  double wide = 0;
  const bool is_number = read_number(text, wide);
  const auto number = static_cast<float>(wide);
  if (!is_number || !std::isfinite(number) || number < least || number > most) fail(flag, range(least, most), text);
  return number;
}

std::map<TokenId, float> parse_logit_bias(const std::string& flag, const std::string& text) {
  const char* expected = "a JSON object from token id to number, as in {\"42\": -3.5}";
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) fail(flag, expected, text);
  std::map<TokenId, float> bias;
  for (const auto& [key, value] : json.items()) {
    int id = 0;
    if (!read_number(key, id) || id < 0 || !value.is_number()) fail(flag, expected, text);
    const auto number = static_cast<float>(value.get<double>());
    if (!std::isfinite(number)) fail(flag, expected, text);
    bias[id] = number;
  }
  return bias;
}

std::string check_template_variables(const std::string& flag, const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) fail(flag, "a JSON object", text);
  for (const char* reserved : {"messages", "tools", "add_generation_prompt", "continue_final_message"}) {
    if (json.contains(reserved)) fail(flag, std::string("a JSON object without \"") + reserved + "\"", text);
  }
  return text;
}

bool str2bool(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text != "false" && text != "f";
}

std::string unescape(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char next = text[i] == '\\' && i + 1 < text.size() ? text[i + 1] : '\0';
    if (next == 'n' || next == 't') {
      out += next == 'n' ? '\n' : '\t';
      ++i;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace reprise::app
