// A conversation as token ids: the template's text around the answers is encoded, the answers themselves are the ids
// that were generated. Private to `generate`; free of MLX. Threads: free functions over immutable objects.
#pragma once

#include <string>
#include <vector>

#include "reprise/base/tokens.h"
#include "reprise/text/chat_template.h"
#include "reprise/text/tokenizer.h"

namespace reprise::internal {

// `answers` are the recorded ids of the assistant messages in `messages`, in order. An answer that the template does
// not repeat word for word (it drops reasoning or trims) is encoded from the template's text instead, so that the
// result is always what the template says. Throws: invalid_argument when the counts differ; what render and encode
// throw.
Tokens transcript_ids(const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                      const std::vector<ChatMessage>& messages, const std::vector<Tokens>& answers,
                      const RenderOptions& options);

// The text that a person was shown for an answer's ids.
std::string answer_text(const Tokenizer& tokenizer, const Tokens& ids);

}  // namespace reprise::internal
