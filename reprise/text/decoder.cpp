#include "reprise/text/decoder.h"

#include <cstdint>

namespace reprise::internal {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

struct Lead {
  std::size_t length = 0;  // of the whole character; 0: no character starts with this byte
  // Range of the second byte; the later ones are 80 to BF.
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
};

Lead lead(unsigned char byte) {
  if (byte < 0x80) return {1};
  if (byte >= 0xC2 && byte <= 0xDF) return {2};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};  // below: overlong
  if (byte == 0xED) return {3, 0x80, 0x9F};  // above: surrogates
  if (byte >= 0xE1 && byte <= 0xEF) return {3};
  if (byte == 0xF0) return {4, 0x90, 0xBF};  // below: overlong
  if (byte >= 0xF1 && byte <= 0xF3) return {4};
  if (byte == 0xF4) return {4, 0x80, 0x8F};  // above: beyond U+10FFFF
  return {0};
}

// Length of the longest start of a character at the front of `bytes`, which are not empty.
std::size_t valid_prefix(std::string_view bytes, const Lead& lead) {
  std::size_t length = 1;
  while (length < lead.length && length < bytes.size()) {
    const auto byte = static_cast<unsigned char>(bytes[length]);
    const bool second = length == 1;
    if (byte < (second ? lead.low : 0x80) || byte > (second ? lead.high : 0xBF)) break;
    ++length;
  }
  return length;
}

}  // namespace

void Utf8Stream::add(std::string_view bytes, std::string& out) {
  std::string joined;
  if (!held_.empty()) {
    joined = std::move(held_);
    joined += bytes;
    bytes = joined;
    held_.clear();
  }
  while (!bytes.empty()) {
    const Lead start = lead(static_cast<unsigned char>(bytes.front()));
    if (start.length == 0) {
      out += kReplacement;
      bytes.remove_prefix(1);
      continue;
    }
    const std::size_t length = valid_prefix(bytes, start);
    if (length == start.length) {
      out += bytes.substr(0, length);
    } else if (length == bytes.size()) {
      held_ = std::string(bytes);
    } else {
      out += kReplacement;
    }
    bytes.remove_prefix(length);
  }
}

void Utf8Stream::finish(std::string& out) {
  if (!held_.empty()) {
    out += kReplacement;
    held_.clear();
  }
}

Decoder::Decoder(const textkit_tokenizer* tokenizer, DecodeOptions options)
    : tokenizer_(tokenizer), options_(options), strip_left_(textkit_tokenizer_strip_left(tokenizer)) {}

void Decoder::add(TokenId id, std::string& out) {
  if (id < 0) return;
  const auto token = static_cast<std::uint32_t>(id);
  if (options_.skip_special_tokens && textkit_tokenizer_is_special(tokenizer_, token) != 0) return;
  const char* data = nullptr;
  std::size_t size = 0;
  if (textkit_tokenizer_piece(tokenizer_, token, first_ ? 1 : 0, &data, &size) == 0) return;
  first_ = false;
  std::string_view piece(data, size);
  while (strip_left_ > 0 && !piece.empty()) {
    if (piece.front() != ' ') {
      strip_left_ = 0;
      break;
    }
    piece.remove_prefix(1);
    --strip_left_;
  }
  utf8_.add(piece, out);
}

void Decoder::finish(std::string& out) {
  utf8_.finish(out);
  first_ = true;
  strip_left_ = textkit_tokenizer_strip_left(tokenizer_);
}

}  // namespace reprise::internal
