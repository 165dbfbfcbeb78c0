// Private to text: what libtextkit hands out, owned, and its statuses as exceptions.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "textkit.h"

namespace reprise::internal {

// A textkit_text for an output or an error argument; freed with the object.
class TextkitText {
 public:
  TextkitText() = default;
  TextkitText(const TextkitText&) = delete;
  TextkitText& operator=(const TextkitText&) = delete;
  ~TextkitText() { textkit_text_free(&text_); }

  textkit_text* out() { return &text_; }
  std::string_view view() const { return {text_.data, text_.size}; }

 private:
  textkit_text text_{nullptr, 0};
};

struct TextkitFree {
  void operator()(textkit_tokenizer* tokenizer) const { textkit_tokenizer_free(tokenizer); }
  void operator()(textkit_template* chat_template) const { textkit_template_free(chat_template); }
};

using TextkitTokenizer = std::unique_ptr<textkit_tokenizer, TextkitFree>;
using TextkitTemplate = std::unique_ptr<textkit_template, TextkitFree>;

// Throws: Error `[function] message` with the code that belongs to `status`, unless that is textkit_ok.
void check_textkit(textkit_status status, std::string_view function, const TextkitText& message);

}  // namespace reprise::internal
