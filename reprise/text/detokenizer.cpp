#include "reprise/text/detokenizer.h"

#include <utility>

#include "reprise/text/decoder.h"
#include "reprise/text/tokenizer_impl.h"

namespace reprise {

struct Detokenizer::Impl {
  std::shared_ptr<const Tokenizer::Impl> tokenizer;
  internal::Decoder decoder;
};

Detokenizer::Detokenizer(const Tokenizer& tokenizer, DecodeOptions options)
    : impl_(std::make_unique<Impl>(Impl{tokenizer.impl_, internal::Decoder(tokenizer.impl_->textkit.get(), options)})) {
}
Detokenizer::~Detokenizer() = default;
Detokenizer::Detokenizer(Detokenizer&&) noexcept = default;
Detokenizer& Detokenizer::operator=(Detokenizer&&) noexcept = default;

std::string Detokenizer::add(TokenId id) {
  std::string text;
  impl_->decoder.add(id, text);
  return text;
}

std::string Detokenizer::finish() {
  std::string text;
  impl_->decoder.finish(text);
  return text;
}

}  // namespace reprise
