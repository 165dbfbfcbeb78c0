#include "reprise/storage/json_text.h"

#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/storage/file_system.h"

namespace reprise::internal {
namespace {

using json = nlohmann::json;

constexpr std::string_view kLargest = "3.4028234663852886e38";
constexpr int kMaxDepth = 100;

struct BareNumber {
  std::string_view word;
  std::string_view replacement;
};

constexpr std::array<BareNumber, 3> kBareNumbers{
    {{"-Infinity", "-3.4028234663852886e38"}, {"Infinity", kLargest}, {"NaN", "null"}}};

// transformers' {"__float__": "Infinity"} as the number it means, anywhere below `value`.
// Returns: whether something was replaced. Throws: corrupt_data when nested too deeply.
bool replace_tagged_numbers(json& value, int depth) {
  if (depth > kMaxDepth) throw Error(ErrorCode::corrupt_data, "[read_model_files] JSON is nested too deeply");
  if (!value.is_structured()) return false;
  if (value.is_object() && value.size() == 1 && value.begin().key() == "__float__" && value.begin()->is_string()) {
    const std::string word = value.begin()->get<std::string>();
    for (const BareNumber& number : kBareNumbers) {
      if (word == number.word) {
        value = json::parse(number.replacement);
        return true;
      }
    }
  }
  bool replaced = false;
  for (json& item : value) replaced = replace_tagged_numbers(item, depth + 1) || replaced;
  return replaced;
}

// Reads `added_tokens` and ends the parse behind them.
class AddedTokensParser final : public json::json_sax_t {
 public:
  std::map<std::string, int> tokens;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool number_unsigned(number_unsigned_t value) override {
    if (in_token() && key_ == "id" && value <= std::numeric_limits<int>::max()) id_ = static_cast<int>(value);
    return true;
  }
  bool string(string_t& text) override {
    if (in_token() && key_ == "content") content_ = std::move(text);
    return true;
  }
  bool key(string_t& text) override {
    key_ = std::move(text);
    if (depth_ == 1) in_list_ = key_ == "added_tokens";
    return true;
  }
  bool start_object(std::size_t) override {
    ++depth_;
    return true;
  }
  bool end_object() override {
    if (in_token()) {
      if (content_ && id_) tokens.emplace(*content_, *id_);
      content_.reset();
      id_.reset();
    }
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return !(in_list_ && depth_ == 1);
  }
  bool parse_error(std::size_t, const std::string&, const json::exception&) override { return false; }

 private:
  bool in_token() const { return in_list_ && depth_ == 3; }  // the file's object, the list, a token's object

  int depth_ = 0;
  bool in_list_ = false;
  std::string key_;
  std::optional<std::string> content_;
  std::optional<int> id_;
};

}  // namespace

std::string replace_bare_numbers(const std::string& text) {
  if (text.find("Infinity") == std::string::npos && text.find("NaN") == std::string::npos) return text;
  std::string out;
  out.reserve(text.size());
  bool in_string = false;
  for (std::size_t i = 0; i < text.size();) {
    if (in_string && text[i] == '\\' && i + 1 < text.size()) {
      out.append(text, i, 2);
      i += 2;
      continue;
    }
    if (text[i] == '"') in_string = !in_string;
    const BareNumber* found = nullptr;
    for (const BareNumber& number : kBareNumbers) {
      if (!in_string && found == nullptr && text.compare(i, number.word.size(), number.word) == 0) found = &number;
    }
    out += found != nullptr ? found->replacement : std::string_view(text).substr(i, 1);
    i += found != nullptr ? found->word.size() : 1;
  }
  return out;
}

json read_json_object(const std::filesystem::path& file, std::string* text) {
  std::string source = replace_bare_numbers(read_file(file));
  json object = json::parse(source, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) {
    throw Error(ErrorCode::corrupt_data, "[read_model_files] " + file.string() + " holds no JSON object");
  }
  if (source.find("\"__float__\"") != std::string::npos && replace_tagged_numbers(object, 0)) source = object.dump(1);
  if (text != nullptr) *text = std::move(source);
  return object;
}

std::map<std::string, int> added_tokens_of(const std::string& tokenizer_json) {
  AddedTokensParser parser;
  json::sax_parse(tokenizer_json, &parser);
  return std::move(parser.tokens);
}

}  // namespace reprise::internal
