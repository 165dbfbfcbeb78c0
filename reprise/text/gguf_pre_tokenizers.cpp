// The patterns are those of the models' own tokenizer.json files.
#include "reprise/text/gguf_pre_tokenizers.h"

#include <algorithm>
#include <array>

namespace reprise::internal {

namespace {

constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen35 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kTekken = R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
                                     R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
                                     R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kDeepSeek3Words =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";

template <std::size_t N>
bool is_one_of(std::string_view name, const std::array<std::string_view, N>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

std::optional<PreTokenizer> find_pre_tokenizer(std::string_view name) {
  // Files without a name, or with "default", were made when GPT-2's pattern was the only one.
  if (is_one_of(name, std::array<std::string_view, 5>{"", "default", "gpt-2", "gpt2", "phi-2"})) {
    return PreTokenizer{.gpt2_split = true};
  }
  if (name == "olmo") return PreTokenizer{.nfc = true, .gpt2_split = true};
  if (is_one_of(name, std::array<std::string_view, 4>{"smollm", "starcoder", "refact", "codeshell"})) {
    return PreTokenizer{.split_digits = true, .gpt2_split = true};
  }
  if (name == "command-r") return PreTokenizer{.nfc = true, .split_digits = true, .gpt2_split = true};
  if (is_one_of(name,
                std::array<std::string_view, 6>{"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2"})) {
    return PreTokenizer{.ignore_merges = true, .adds_bos = true, .patterns = {kLlama3}};
  }
  if (is_one_of(name, std::array<std::string_view, 3>{"dbrx", "smaug-bpe", "glm4"})) {
    return PreTokenizer{.patterns = {kLlama3}};
  }
  if (name == "qwen2") return PreTokenizer{.nfc = true, .patterns = {kQwen2}};
  if (is_one_of(name, std::array<std::string_view, 4>{"deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"})) {
    return PreTokenizer{.patterns = {kQwen2}};
  }
  if (name == "qwen35") return PreTokenizer{.nfc = true, .patterns = {kQwen35}};
  if (is_one_of(name, std::array<std::string_view, 2>{"gpt-4o", "llama4"})) {
    return PreTokenizer{.patterns = {kO200k}};
  }
  if (name == "tekken") return PreTokenizer{.ignore_merges = true, .adds_bos = true, .patterns = {kTekken}};
  if (name == "deepseek-v3") {
    return PreTokenizer{.patterns = {R"(\p{N}{1,3})", "[一-龥぀-ゟ゠-ヿ]+", kDeepSeek3Words}};
  }
  return std::nullopt;
}

}  // namespace reprise::internal
