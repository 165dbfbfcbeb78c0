#include "reprise/text/gguf_tokenizer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "reprise/base/error.h"
#include "reprise/text/gguf_pre_tokenizers.h"

namespace reprise::internal {

namespace {

using nlohmann::json;

// `tokenizer.ggml.token_type`: stored on disk.
constexpr int kControl = 3;
constexpr int kUserDefined = 4;

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581, SentencePiece's space

[[noreturn]] void corrupt(const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[Tokenizer] GGUF tokenizer: " + what);
}

using Merges = std::vector<std::pair<std::string_view, std::string_view>>;

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

Merges written_merges(const GgufTokenizerData& gguf) {
  Merges merges;
  merges.reserve(gguf.merges.size());
  for (const std::string& merge : gguf.merges) {
    // A token may begin with a space, but not hold one further on.
    const std::size_t space = merge.find(' ', 1);
    if (merge.empty() || space == std::string::npos) corrupt("merge '" + merge + "' does not name two tokens");
    const std::string_view view = merge;
    merges.emplace_back(view.substr(0, space), view.substr(space + 1));
  }
  return merges;
}

bool is_character_start(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U; }

// SentencePiece joins the two neighbours whose joint token scores best; a BPE joins by the rank of a pair. So: every
// way to cut a token into two tokens, by the token's score, best first; among equals longer left parts first.
Merges scored_merges(const GgufTokenizerData& gguf) {
  if (gguf.scores.empty()) corrupt("a SentencePiece vocabulary needs scores");
  const std::unordered_set<std::string_view> known(gguf.tokens.begin(), gguf.tokens.end());
  std::vector<std::tuple<float, std::string_view, std::string_view>> scored;
  for (std::size_t id = 0; id < gguf.tokens.size(); ++id) {
    const std::string_view token = gguf.tokens[id];
    if (!std::isfinite(gguf.scores[id])) corrupt("score of token " + std::to_string(id) + " is not finite");
    for (std::size_t cut = 1; cut < token.size(); ++cut) {
      if (!is_character_start(token[cut])) continue;
      const std::string_view left = token.substr(0, cut);
      const std::string_view right = token.substr(cut);
      if (known.contains(left) && known.contains(right)) scored.emplace_back(gguf.scores[id], left, right);
    }
  }
  std::stable_sort(scored.begin(), scored.end(), [](const auto& a, const auto& b) {
    return std::make_tuple(std::get<0>(a), std::get<1>(a).size(), std::get<2>(a).size()) >
           std::make_tuple(std::get<0>(b), std::get<1>(b).size(), std::get<2>(b).size());
  });
  Merges merges;
  merges.reserve(scored.size());
  for (const auto& [score, left, right] : scored) merges.emplace_back(left, right);
  return merges;
}

void add_added_tokens(const GgufTokenizerData& gguf, GgufTokenizer& made) {
  for (std::size_t id = 0; id < gguf.token_types.size(); ++id) {
    const int type = gguf.token_types[id];
    if ((type != kControl && type != kUserDefined) || gguf.tokens[id].empty()) continue;
    made.added.push_back(static_cast<std::uint32_t>(id));
    made.added_is_special.push_back(type == kControl ? 1 : 0);
  }
}

// What add_special_tokens puts around a text; null for nothing.
json post_processor(const TokenizerData& data, bool adds_bos) {
  const GgufTokenizerData& gguf = *data.gguf;
  json single = json::array();
  json specials = json::object();
  const auto add = [&](TokenId id, const char* what) {
    const std::string& token = gguf.tokens[index_of(gguf, id, what)];
    single.push_back({{"SpecialToken", {{"id", token}, {"type_id", 0}}}});
    specials[token] = {{"id", token}, {"ids", {id}}, {"tokens", {token}}};
  };
  if (gguf.add_bos_token.value_or(adds_bos) && data.bos_token_id) add(*data.bos_token_id, "BOS");
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  if (gguf.add_eos_token.value_or(false) && !data.eos_token_ids.empty()) add(data.eos_token_ids.front(), "EOS");
  if (specials.empty()) return nullptr;
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

json replace(std::string_view from, std::string_view to) {
  return {{"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}};
}

GgufTokenizer made_of(const GgufTokenizerData& gguf, const Merges& merges, json outer, json model) {
  model["type"] = "BPE";
  model["vocab"] = json::object();
  model["merges"] = json::array();
  outer["version"] = "1.0";
  outer["added_tokens"] = json::array();
  outer["model"] = std::move(model);
  GgufTokenizer made;
  made.json = outer.dump();
  made.tokens.reserve(gguf.tokens.size());
  for (const std::string& token : gguf.tokens) made.tokens.push_back({token.data(), token.size()});
  made.merges.reserve(2 * merges.size());
  for (const auto& [left, right] : merges) {
    made.merges.push_back({left.data(), left.size()});
    made.merges.push_back({right.data(), right.size()});
  }
  add_added_tokens(gguf, made);
  return made;
}

GgufTokenizer byte_level_bpe(const TokenizerData& data) {
  const GgufTokenizerData& gguf = *data.gguf;
  const auto pre = find_pre_tokenizer(gguf.pre);
  if (!pre) throw Error(ErrorCode::unsupported, "[Tokenizer] GGUF pre-tokenizer '" + gguf.pre + "' is not known");
  json outer = {{"normalizer", pre->nfc ? json{{"type", "NFC"}} : json(nullptr)},
                {"pre_tokenizer", pre_tokenizers(*pre, gguf.add_space_prefix.value_or(false))},
                {"post_processor", post_processor(data, pre->adds_bos)},
                {"decoder", byte_level(true, true)}};
  return made_of(gguf, written_merges(gguf), std::move(outer), {{"ignore_merges", pre->ignore_merges}});
}

GgufTokenizer sentencepiece_bpe(const TokenizerData& data) {
  const GgufTokenizerData& gguf = *data.gguf;
  const bool space_prefix = gguf.add_space_prefix.value_or(true);
  json normalizers = json::array();
  if (space_prefix) normalizers.push_back({{"type", "Prepend"}, {"prepend", kSpace}});
  normalizers.push_back(replace(" ", kSpace));
  json decoders = json::array({replace(kSpace, " "), {{"type", "ByteFallback"}}, {{"type", "Fuse"}}});
  if (space_prefix) decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  json options = {{"fuse_unk", true}, {"byte_fallback", true}};
  if (gguf.unknown_token_id) {
    options["unk_token"] = gguf.tokens[index_of(gguf, *gguf.unknown_token_id, "unknown")];
  }
  json outer = {{"normalizer", {{"type", "Sequence"}, {"normalizers", normalizers}}},
                {"pre_tokenizer", nullptr},
                {"post_processor", post_processor(data, true)},
                {"decoder", {{"type", "Sequence"}, {"decoders", decoders}}}};
  return made_of(gguf, gguf.merges.empty() ? scored_merges(gguf) : written_merges(gguf), std::move(outer),
                 std::move(options));
}

}  // namespace

GgufTokenizer gguf_tokenizer(const TokenizerData& data) {
  check_sizes(*data.gguf);
  try {
    const std::string& model = data.gguf->model;
    if (model == "gpt2") return byte_level_bpe(data);
    if (model == "llama") return sentencepiece_bpe(data);
    throw Error(ErrorCode::unsupported, "[Tokenizer] GGUF tokenizer model '" + model + "' is not known");
  } catch (const json::exception&) {
    corrupt("a special token is not UTF-8");
  }
}

}  // namespace reprise::internal
