// Where an answer stands in the rendered text is found by rendering once more with a marker in its place: if putting
// the answer's text back for the marker gives the plain rendering, the template repeats the answer word for word, and
// its ids may stand for it.
#include "reprise/generate/transcript.h"

#include <algorithm>
#include <string>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/text/detokenizer.h"

namespace reprise::internal {
namespace {

struct AnswerSlot {
  std::size_t message;  // index in messages
  std::string marker;   // stands for the answer's text; occurs nowhere else
  const Tokens* ids;
};

// Private-use characters and a number that no message contains.
std::string unused_mark(const std::vector<ChatMessage>& messages) {
  for (int n = 0;; ++n) {
    std::string mark = "\uF8FEanswer" + std::to_string(n) + "\uF8FF";
    const bool used = std::any_of(messages.begin(), messages.end(), [&](const ChatMessage& message) {
      return message.content.find(mark) != std::string::npos || message.extra_json.find(mark) != std::string::npos;
    });
    if (!used) return mark;
  }
}

std::vector<AnswerSlot> find_slots(const std::vector<ChatMessage>& messages, const std::vector<Tokens>& answers) {
  const std::string mark = unused_mark(messages);
  std::vector<AnswerSlot> slots;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role != "assistant") continue;
    if (slots.size() == answers.size()) break;
    slots.push_back({i, mark + std::to_string(slots.size()) + "\uF8FF", &answers[slots.size()]});
  }
  if (slots.size() != answers.size()) {
    throw Error(ErrorCode::invalid_argument,
                "[transcript_ids] there must be one recorded answer per assistant message, "
                "but got " +
                    std::to_string(answers.size()));
  }
  return slots;
}

std::string render_marked(const ChatTemplate& chat_template, std::vector<ChatMessage> messages,
                          const std::vector<AnswerSlot>& slots, const RenderOptions& options) {
  for (const AnswerSlot& slot : slots) messages[slot.message].content = slot.marker;
  return chat_template.render(messages, options);
}

// The text before each marker and after the last; empty when a marker does not occur exactly once, in order.
std::vector<std::string> split_at_markers(const std::string& marked, const std::vector<AnswerSlot>& slots) {
  std::vector<std::string> parts;
  std::size_t at = 0;
  for (const AnswerSlot& slot : slots) {
    const std::size_t found = marked.find(slot.marker);
    if (found == std::string::npos || found < at || marked.find(slot.marker, found + 1) != std::string::npos) return {};
    parts.push_back(marked.substr(at, found - at));
    at = found + slot.marker.size();
  }
  parts.push_back(marked.substr(at));
  return parts;
}

bool restores(const std::vector<std::string>& parts, const std::vector<AnswerSlot>& slots,
              const std::vector<ChatMessage>& messages, const std::string& plain) {
  if (parts.empty()) return false;
  std::string text = parts[0];
  for (std::size_t i = 0; i < slots.size(); ++i) text += messages[slots[i].message].content + parts[i + 1];
  return text == plain;
}

}  // namespace

std::string answer_text(const Tokenizer& tokenizer, const Tokens& ids) {
  Detokenizer detokenizer(tokenizer);
  std::string text;
  for (TokenId id : ids) text += detokenizer.add(id);
  return text + detokenizer.finish();
}

Tokens transcript_ids(const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                      const std::vector<ChatMessage>& messages, const std::vector<Tokens>& answers,
                      const RenderOptions& options) {
  const std::string plain = chat_template.render(messages, options);
  std::vector<AnswerSlot> slots = find_slots(messages, answers);
  const auto parts_of = [&](const std::vector<AnswerSlot>& of) {
    return split_at_markers(render_marked(chat_template, messages, of, options), of);
  };
  std::vector<std::string> parts = parts_of(slots);
  if (!restores(parts, slots, messages, plain)) {
    // Some answer is rewritten: keep those that alone are repeated word for word.
    std::erase_if(slots, [&](const AnswerSlot& slot) { return !restores(parts_of({slot}), {slot}, messages, plain); });
    parts = parts_of(slots);
    if (!restores(parts, slots, messages, plain)) return tokenizer.encode(plain);
  }
  Tokens ids = tokenizer.encode(parts[0]);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    ids.insert(ids.end(), slots[i].ids->begin(), slots[i].ids->end());
    const Tokens after = tokenizer.encode(parts[i + 1]);
    ids.insert(ids.end(), after.begin(), after.end());
  }
  return ids;
}

}  // namespace reprise::internal
