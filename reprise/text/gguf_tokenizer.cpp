#include "reprise/text/gguf_tokenizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "reprise/base/error.h"
#include "reprise/text/gguf_pre_tokenizers.h"
#include "reprise/text/textkit_call.h"
#include "textkit.h"

namespace reprise::internal {

namespace {

using nlohmann::json;

// `tokenizer.ggml.token_type`: stored on disk.
constexpr int kUnknown = 2;
constexpr int kControl = 3;
constexpr int kUserDefined = 4;
constexpr int kByte = 6;

[[noreturn]] void corrupt(const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[Tokenizer] GGUF tokenizer: " + what);
}

void check_sizes(const GgufTokenizerData& gguf) {
  const std::size_t size = gguf.tokens.size();
  if (size == 0) corrupt("tokenizer.ggml.tokens is empty");
  if (!gguf.scores.empty() && gguf.scores.size() != size) {
    corrupt("scores for " + std::to_string(gguf.scores.size()) + " of " + std::to_string(size) + " tokens");
  }
  if (!gguf.token_types.empty() && gguf.token_types.size() != size) {
    corrupt("types for " + std::to_string(gguf.token_types.size()) + " of " + std::to_string(size) + " tokens");
  }
}

// The token's index, checked.
std::size_t index_of(const GgufTokenizerData& gguf, TokenId id, const char* what) {
  if (id < 0 || static_cast<std::size_t>(id) >= gguf.tokens.size()) {
    corrupt(std::string(what) + " token id " + std::to_string(id) + " is outside the vocabulary of " +
            std::to_string(gguf.tokens.size()));
  }
  return static_cast<std::size_t>(id);
}

// Left and right of each.
std::vector<textkit_slice> written_merges(const GgufTokenizerData& gguf) {
  std::vector<textkit_slice> merges;
  merges.reserve(2 * gguf.merges.size());
  for (const std::string& merge : gguf.merges) {
    // A token may begin with a space, but not hold one further on.
    const std::size_t space = merge.find(' ', 1);
    if (merge.empty() || space == std::string::npos) corrupt("merge '" + merge + "' does not name two tokens");
    merges.push_back({merge.data(), space});
    merges.push_back({merge.data() + space + 1, merge.size() - space - 1});
  }
  return merges;
}

struct AddedTokens {
  std::vector<std::uint32_t> ids;
  std::vector<std::uint8_t> is_special;
};

AddedTokens added_tokens(const GgufTokenizerData& gguf) {
  AddedTokens added;
  for (std::size_t id = 0; id < gguf.token_types.size(); ++id) {
    const int type = gguf.token_types[id];
    if ((type != kControl && type != kUserDefined) || gguf.tokens[id].empty()) continue;
    added.ids.push_back(static_cast<std::uint32_t>(id));
    added.is_special.push_back(type == kControl ? 1 : 0);
  }
  return added;
}

// What add_special_tokens puts around a text. `adds_bos`: where the file does not say.
struct Around {
  std::vector<TokenId> before;
  std::vector<TokenId> after;
};

Around around(const TokenizerData& data, bool adds_bos) {
  const GgufTokenizerData& gguf = *data.gguf;
  Around ids;
  if (gguf.add_bos_token.value_or(adds_bos) && data.bos_token_id) ids.before.push_back(*data.bos_token_id);
  if (gguf.add_eos_token.value_or(false) && !data.eos_token_ids.empty())
    ids.after.push_back(data.eos_token_ids.front());
  for (const TokenId id : ids.before) index_of(gguf, id, "BOS");
  for (const TokenId id : ids.after) index_of(gguf, id, "EOS");
  return ids;
}

// The same; null for nothing.
json post_processor(const TokenizerData& data, bool adds_bos) {
  const Around ids = around(data, adds_bos);
  if (ids.before.empty() && ids.after.empty()) return nullptr;
  json single = json::array();
  json specials = json::object();
  const auto add = [&](TokenId id) {
    const std::string& token = data.gguf->tokens[static_cast<std::size_t>(id)];
    single.push_back({{"SpecialToken", {{"id", token}, {"type_id", 0}}}});
    specials[token] = {{"id", token}, {"ids", {id}}, {"tokens", {token}}};
  };
  for (const TokenId id : ids.before) add(id);
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  for (const TokenId id : ids.after) add(id);
  json pair = single;
  pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 1}}}});
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", specials}};
}

json byte_level(bool use_regex, bool add_prefix_space) {
  return {
      {"type", "ByteLevel"}, {"add_prefix_space", add_prefix_space}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

json pre_tokenizers(const PreTokenizer& pre, bool add_prefix_space) {
  json steps = json::array();
  if (pre.split_digits) steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
  for (const std::string_view pattern : pre.patterns) {
    steps.push_back(
        {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}});
  }
  steps.push_back(byte_level(pre.gpt2_split, add_prefix_space));
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

std::vector<textkit_slice> slices_of(const std::vector<std::string>& texts) {
  std::vector<textkit_slice> slices;
  slices.reserve(texts.size());
  for (const std::string& text : texts) slices.push_back({text.data(), text.size()});
  return slices;
}

TextkitTokenizer byte_level_bpe(const TokenizerData& data) {
  const GgufTokenizerData& gguf = *data.gguf;
  const auto pre = find_pre_tokenizer(gguf.pre);
  if (!pre) throw Error(ErrorCode::unsupported, "[Tokenizer] GGUF pre-tokenizer '" + gguf.pre + "' is not known");
  // A tokenizer.json without its vocabulary, which would take several times as long.
  const json outer = {
      {"version", "1.0"},
      {"added_tokens", json::array()},
      {"normalizer", pre->nfc ? json{{"type", "NFC"}} : json(nullptr)},
      {"pre_tokenizer", pre_tokenizers(*pre, gguf.add_space_prefix.value_or(false))},
      {"post_processor", post_processor(data, pre->adds_bos)},
      {"decoder", byte_level(true, true)},
      {"model",
       {{"type", "BPE"}, {"vocab", json::object()}, {"merges", json::array()}, {"ignore_merges", pre->ignore_merges}}}};
  const std::string text = outer.dump();
  const auto tokens = slices_of(gguf.tokens);
  const auto merges = written_merges(gguf);
  const AddedTokens added = added_tokens(gguf);
  const textkit_bpe bpe{.tokens = tokens.data(),
                        .num_tokens = tokens.size(),
                        .merges = merges.data(),
                        .num_merges = merges.size() / 2,
                        .added = added.ids.data(),
                        .added_is_special = added.is_special.data(),
                        .num_added = added.ids.size()};
  textkit_tokenizer* made = nullptr;
  TextkitText message;
  const textkit_status status = textkit_tokenizer_new_bpe(text.data(), text.size(), &bpe, &made, message.out());
  check_textkit(status, "Tokenizer", message);
  return TextkitTokenizer(made);
}

// The special tokens that keep the blanks behind them where others do not (Phi 3).
constexpr std::array<std::string_view, 3> kNeverStripping{"<unk>", "<s>", "<|endoftext|>"};

std::vector<std::uint8_t> kinds_of(const GgufTokenizerData& gguf) {
  const auto strips = [&](const std::string& token) {
    return gguf.strips_after_special &&
           std::find(kNeverStripping.begin(), kNeverStripping.end(), token) == kNeverStripping.end();
  };
  std::vector<std::uint8_t> kinds(gguf.tokens.size(), textkit_kind_normal);
  for (std::size_t id = 0; id < gguf.token_types.size(); ++id) {
    const int type = gguf.token_types[id];
    if (type == kControl || type == kUnknown) {
      kinds[id] = strips(gguf.tokens[id]) ? textkit_kind_special_strips : textkit_kind_special;
    }
    if (type == kUserDefined) kinds[id] = textkit_kind_user_defined;
    if (type == kByte) kinds[id] = textkit_kind_byte;
  }
  return kinds;
}

std::vector<std::uint32_t> unsigned_ids(const std::vector<TokenId>& ids) { return {ids.begin(), ids.end()}; }

TextkitTokenizer sentencepiece(const TokenizerData& data) {
  const GgufTokenizerData& gguf = *data.gguf;
  if (gguf.scores.empty()) corrupt("a SentencePiece vocabulary needs scores");
  const auto odd = std::find_if_not(gguf.scores.begin(), gguf.scores.end(), [](float s) { return std::isfinite(s); });
  if (odd != gguf.scores.end()) {
    corrupt("score of token " + std::to_string(odd - gguf.scores.begin()) + " is not finite");
  }
  std::optional<std::uint32_t> unknown;
  if (gguf.unknown_token_id) {
    unknown = static_cast<std::uint32_t>(index_of(gguf, *gguf.unknown_token_id, "unknown"));
  }
  const Around ids = around(data, true);
  const auto before = unsigned_ids(ids.before);
  const auto after = unsigned_ids(ids.after);
  const auto tokens = slices_of(gguf.tokens);
  const auto kinds = kinds_of(gguf);
  const textkit_sentencepiece vocabulary{.tokens = tokens.data(),
                                         .scores = gguf.scores.data(),
                                         .kinds = kinds.data(),
                                         .num_tokens = tokens.size(),
                                         .unknown = unknown ? &*unknown : nullptr,
                                         .before = before.data(),
                                         .num_before = before.size(),
                                         .after = after.data(),
                                         .num_after = after.size(),
                                         .space_prefix = gguf.add_space_prefix.value_or(true) ? 1 : 0};
  textkit_tokenizer* made = nullptr;
  TextkitText message;
  const textkit_status status = textkit_tokenizer_new_sentencepiece(&vocabulary, &made, message.out());
  check_textkit(status, "Tokenizer", message);
  return TextkitTokenizer(made);
}

}  // namespace

TextkitTokenizer make_gguf_tokenizer(const TokenizerData& data) {
  check_sizes(*data.gguf);
  try {
    const std::string& model = data.gguf->model;
    if (model == "gpt2") return byte_level_bpe(data);
    if (model == "llama") return sentencepiece(data);
    throw Error(ErrorCode::unsupported, "[Tokenizer] GGUF tokenizer model '" + model + "' is not known");
  } catch (const json::exception&) {
    corrupt("a special token is not UTF-8");
  }
}

}  // namespace reprise::internal
