#include "apps/reprise/bench_trace.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "apps/reprise/output.h"

namespace reprise::app {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014): the standard's distributions differ between libraries.
std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t value = state += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

class Maker {
 public:
  Maker(const TraceOptions& options, const TextSource& text)
      : options_(options), text_(text), random_(options.seed ^ 0x7472616365u) {}

  Trace multi_turn();
  Trace shared_prefix();
  Trace fork();
  Trace document();
  Trace edit();

 private:
  int scaled(int count) const { return std::max(1, static_cast<int>(std::lround(count * options_.scale))); }
  Tokens exactly(int count) { return text_(scaled(count)); }
  // Half as many to half as many again.
  Tokens about(int count) {
    const int half = count / 2;
    return exactly(count - half + static_cast<int>(next_random(random_) % static_cast<std::uint64_t>(2 * half + 1)));
  }
  Tokens opening(Tokens tokens) const {
    tokens.insert(tokens.begin(), options_.beginning.begin(), options_.beginning.end());
    return tokens;
  }
  TraceTurn turn(Tokens tokens, int after) const {
    TraceTurn made;
    made.tokens = after < 0 ? opening(std::move(tokens)) : std::move(tokens);
    made.after = after;
    made.max_tokens = options_.answer;
    return made;
  }
  template <typename Fill>  // conversation number → its turns
  Trace each(const char* name, Fill fill) {
    Trace trace{name, {}};
    for (int i = 0; i < options_.conversations; ++i) trace.conversations.push_back({std::to_string(i), fill(i)});
    return trace;
  }

  const TraceOptions& options_;
  const TextSource& text_;
  std::uint64_t random_;
};

Tokens joined(Tokens first, const Tokens& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

Trace Maker::multi_turn() {
  return each("multi-turn", [this](int) {
    std::vector<TraceTurn> turns;
    for (int i = 0; i < 6; ++i) turns.push_back(turn(about(120), i - 1));
    return turns;
  });
}

Trace Maker::shared_prefix() {
  const Tokens prefix = exactly(1500);
  return each("shared-prefix", [&](int) { return std::vector{turn(joined(prefix, about(50)), -1)}; });
}

Trace Maker::fork() {
  Tokens history;
  return each("fork", [&](int i) {
    if (i % 5 == 0) history = exactly(1000);
    return std::vector{turn(joined(history, about(80)), -1), turn(about(80), 0)};
  });
}

Trace Maker::document() {
  Tokens document;
  Trace trace = each("document", [&](int i) {
    if (i % 3 == 0) document = exactly(3000);
    return std::vector{turn(joined(document, about(30)), -1)};
  });
  auto& all = trace.conversations;
  for (std::size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[next_random(random_) % i]);
  return trace;
}

Trace Maker::edit() {
  return each("edit", [this](int) {
    std::vector<TraceTurn> turns = {turn(exactly(1000), -1)};
    for (int i = 1; i < 4; ++i) turns.push_back(turn(about(150), i - 1));
    turns.push_back(turn(about(150), 1));
    turns.push_back(turn(about(150), 4));
    return turns;
  });
}

constexpr std::array kWho = {"the old captain",     "a young teacher",    "our neighbour",      "the night train",
                             "every new student",   "the city council",   "a careful engineer", "his younger sister",
                             "the small bakery",    "a group of farmers", "the second report",  "my former colleague",
                             "the visiting doctor", "an honest clerk",    "the river",          "her favourite book",
                             "the software team",   "a retired judge",    "the new library",    "the last message"};
constexpr std::array kDoes = {"explains",        "remembers",     "wants to change",  "never mentions",
                              "quietly repairs", "has described", "is looking for",   "depends on",
                              "will follow",     "cannot find",   "once belonged to", "carefully measures",
                              "asked about",     "stands beside", "compares",         "keeps a list of",
                              "should improve",  "was built for", "has forgotten",    "writes down"};
constexpr std::array kWhat = {
    "the long way home",           "a list of numbers",     "three broken clocks",     "the price of bread",
    "an unusual question",         "the map of the valley", "yesterday's meeting",     "a safer bridge",
    "the meaning of the word",     "seven letters",         "the rules of the game",   "a cheaper plan",
    "the garden behind the house", "an early winter",       "the missing key",         "a better answer",
    "the results of the test",     "some fresh paint",      "the history of the town", "a quiet room"};
constexpr std::array kWhen = {"before the end of the week", "although nobody asked", "in the middle of the night",
                              "because it rained all day",  "without saying why",    "for the third time this year",
                              "when the lights went out",   "as soon as possible",   "under a different name",
                              "while the others waited",    "with some surprise",    "just to be sure"};

}  // namespace

std::size_t Sentences::below(std::size_t bound) { return next_random(state_) % bound; }

std::string Sentences::next() {
  std::string text = kWho[below(kWho.size())];
  text += std::string(" ") + kDoes[below(kDoes.size())] + " " + kWhat[below(kWhat.size())];
  if (below(2) == 0) text += std::string(" ") + kWhen[below(kWhen.size())];
  if (below(3) == 0) text += std::string(", and ") + kWho[below(kWho.size())] + " has " + std::to_string(below(1000));
  text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text + (below(5) == 0 ? "? " : ". ");
}

TextSource tokenized_sentences(const Tokenizer& tokenizer, std::uint64_t seed) {
  return [&tokenizer, sentences = Sentences(seed)](int count) mutable {
    Tokens tokens;
    while (tokens.size() < static_cast<std::size_t>(count)) {
      const auto more = tokenizer.encode(sentences.next());
      if (more.empty()) throw UsageError("--trace needs a tokenizer that knows English words");
      tokens.insert(tokens.end(), more.begin(), more.end());
    }
    tokens.resize(static_cast<std::size_t>(count));
    return tokens;
  };
}

Tokens beginning_of(const Tokenizer& tokenizer) {
  const auto marked = tokenizer.encode("a", {.add_special_tokens = true});
  const auto bos = tokenizer.bos_token_id();
  return bos && !marked.empty() && marked.front() == *bos ? Tokens{*bos} : Tokens{};
}

const std::vector<std::string>& trace_names() {
  static const std::vector<std::string> names = {"multi-turn", "shared-prefix", "fork", "document", "edit"};
  return names;
}

Trace make_trace(const std::string& name, const TraceOptions& options, const TextSource& text) {
  Maker maker(options, text);
  if (name == "multi-turn") return maker.multi_turn();
  if (name == "shared-prefix") return maker.shared_prefix();
  if (name == "fork") return maker.fork();
  if (name == "document") return maker.document();
  if (name == "edit") return maker.edit();
  std::string list;
  for (const auto& known : trace_names()) list += known + ", ";
  throw UsageError("--trace must be " + list + "or a file, but got \"" + name + "\"");
}

}  // namespace reprise::app
