#include "reprise/text/tokenizer.h"

#include <utility>

#include "reprise/base/error.h"
#include "reprise/text/decoder.h"
#include "reprise/text/gguf_tokenizer.h"
#include "reprise/text/tokenizer_impl.h"

namespace reprise {

namespace {

internal::TextkitTokenizer make_textkit(const std::string& json) {
  textkit_tokenizer* made = nullptr;
  internal::TextkitText message;
  const textkit_status status = textkit_tokenizer_new(json.data(), json.size(), &made, message.out());
  internal::check_textkit(status, "Tokenizer", message);
  return internal::TextkitTokenizer(made);
}

class TextkitIds {
 public:
  TextkitIds() = default;
  TextkitIds(const TextkitIds&) = delete;
  TextkitIds& operator=(const TextkitIds&) = delete;
  ~TextkitIds() { textkit_ids_free(&ids_); }

  textkit_ids* out() { return &ids_; }
  std::span<const std::uint32_t> view() const { return {ids_.data, ids_.size}; }

 private:
  textkit_ids ids_{nullptr, 0};
};

std::optional<TokenId> find_token(const textkit_tokenizer* textkit, std::string_view token) {
  std::uint32_t id = 0;
  if (textkit_tokenizer_token_to_id(textkit, token.data(), token.size(), &id) == 0) return std::nullopt;
  return static_cast<TokenId>(id);
}

}  // namespace

Tokenizer::Tokenizer(const TokenizerData& data) {
  if (data.gguf.has_value() == !data.tokenizer_json.empty()) {
    throw Error(ErrorCode::invalid_argument,
                std::string("[Tokenizer] needs either a tokenizer.json or GGUF fields, but got ") +
                    (data.gguf ? "both" : "neither"));
  }
  auto impl = std::make_shared<Impl>();
  impl->textkit = data.gguf ? internal::make_gguf_tokenizer(data) : make_textkit(data.tokenizer_json);
  const textkit_tokenizer* textkit = impl->textkit.get();
  impl->bos_token_id = data.bos_token_id;
  if (!impl->bos_token_id && !data.bos_token.empty()) impl->bos_token_id = find_token(textkit, data.bos_token);
  impl->eos_token_ids = data.eos_token_ids;
  if (impl->eos_token_ids.empty() && !data.eos_token.empty()) {
    if (const auto id = find_token(textkit, data.eos_token)) impl->eos_token_ids.push_back(*id);
  }
  impl_ = std::move(impl);
}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokens Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  TextkitIds ids;
  internal::TextkitText message;
  const textkit_status status = textkit_tokenizer_encode(impl_->textkit.get(), text.data(), text.size(),
                                                         options.add_special_tokens ? 1 : 0, ids.out(), message.out());
  internal::check_textkit(status, "Tokenizer::encode", message);
  Tokens tokens;
  tokens.reserve(ids.view().size());
  for (const std::uint32_t id : ids.view()) tokens.push_back(static_cast<TokenId>(id));
  return tokens;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, DecodeOptions options) const {
  internal::Decoder decoder(impl_->textkit.get(), options);
  std::string text;
  for (const TokenId id : ids) decoder.add(id, text);
  decoder.finish(text);
  return text;
}

std::optional<TokenId> Tokenizer::token_to_id(std::string_view token) const {
  return find_token(impl_->textkit.get(), token);
}

std::optional<std::string> Tokenizer::id_to_token(TokenId id) const {
  const char* data = nullptr;
  std::size_t size = 0;
  if (id < 0 || textkit_tokenizer_token(impl_->textkit.get(), static_cast<std::uint32_t>(id), &data, &size) == 0) {
    return std::nullopt;
  }
  return std::string(data, size);
}

bool Tokenizer::is_special(TokenId id) const {
  return id >= 0 && textkit_tokenizer_is_special(impl_->textkit.get(), static_cast<std::uint32_t>(id)) != 0;
}

std::size_t Tokenizer::vocab_size() const { return textkit_tokenizer_vocab_size(impl_->textkit.get()); }

std::optional<TokenId> Tokenizer::bos_token_id() const { return impl_->bos_token_id; }

const std::vector<TokenId>& Tokenizer::eos_token_ids() const { return impl_->eos_token_ids; }

}  // namespace reprise
