#include "reprise/generate/answer_text.h"

#include <algorithm>
#include <utility>

#include "reprise/generate/stop_matcher.h"
#include "reprise/text/detokenizer.h"

namespace reprise {

struct AnswerText::Impl {
  Detokenizer detokenizer;
  internal::StopMatcher matcher;
  std::vector<TokenId> stop_tokens;
};

AnswerText::AnswerText(const Tokenizer& tokenizer, const AnswerTextOptions& options)
    : impl_(new Impl{Detokenizer(tokenizer), internal::StopMatcher(options.stop), options.stop_tokens}) {
  if (options.ignore_eos) return;
  const auto& eos = tokenizer.eos_token_ids();
  impl_->stop_tokens.insert(impl_->stop_tokens.end(), eos.begin(), eos.end());
}

AnswerText::~AnswerText() = default;
AnswerText::AnswerText(AnswerText&&) noexcept = default;
AnswerText& AnswerText::operator=(AnswerText&&) noexcept = default;

AnswerText::Piece AnswerText::add(TokenId token) {
  const auto& stop = impl_->stop_tokens;
  if (std::find(stop.begin(), stop.end(), token) != stop.end()) return {.text = {}, .ended = true};
  std::string text = impl_->matcher.add(impl_->detokenizer.add(token));
  return {.text = std::move(text), .ended = impl_->matcher.matched()};
}

std::string AnswerText::finish() {
  std::string text = impl_->matcher.add(impl_->detokenizer.finish());
  return text + impl_->matcher.finish();
}

}  // namespace reprise
