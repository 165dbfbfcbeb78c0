// What `reprise bench engine` replays: conversations, each a list of requests. Traces that are made, the same for the
// same seed on every machine, and traces that are read from a file of JSON lines (docs/performance.md).
// Threads: values and free functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "reprise/base/tokens.h"
#include "reprise/generate/loaded_model.h"

namespace reprise::app {

inline constexpr int kAnswerTokens = 64;

struct TraceTurn {
  Tokens tokens;       // added to what was said before, the engine's own answers included
  int after = -1;      // the turn of this conversation whose prompt and answer come before; -1: nothing comes before
  int max_tokens = 0;  // of the answer: exactly so many
  double at_ms = 0.0;  // not before, from the beginning of the replay on
};

struct TraceConversation {
  std::string id;
  std::vector<TraceTurn> turns;
};

struct Trace {
  std::string name;
  std::vector<TraceConversation> conversations;
};

struct TraceOptions {
  int conversations = 16;
  std::uint64_t seed = 0;
  double scale = 1.0;  // of all lengths but the answers'
  int answer = kAnswerTokens;
  Tokens beginning = {};  // of every prompt
};

// Exactly so many tokens of a text that has not come before.
using TextSource = std::function<Tokens(int count)>;

// Names of the traces that can be made.
const std::vector<std::string>& trace_names();
// multi-turn     six turns of about 120 tokens
// shared-prefix  one system prompt of 1,500 tokens, a question of about 50
// fork           five agents go on from one history of 1,000 tokens, two turns of about 80 each
// document       three questions of about 30 tokens about each document of 3,000, in any order
// edit           1,000 tokens and three turns of about 150; then the third message is changed, and one turn more
// Throws: UsageError for another name.
Trace make_trace(const std::string& name, const TraceOptions& options, const TextSource& text);

// Plausible sentences, the same for the same seed.
class Sentences {
 public:
  explicit Sentences(std::uint64_t seed) : state_(seed) {}
  std::string next();

 private:
  std::size_t below(std::size_t bound);
  std::uint64_t state_;
};
TextSource tokenized_sentences(const Tokenizer& tokenizer, std::uint64_t seed);
// What the tokenizer puts before a text: the id of the beginning, or nothing.
Tokens beginning_of(const Tokenizer& tokenizer);

// Reads a trace; texts and messages become tokens of the model. Answers have `answer` tokens where the file does not
// say. Throws: corrupt_data, naming the line; not_found.
Trace read_trace(const std::filesystem::path& file, const LoadedModel& model, int answer);
Trace parse_trace(std::string_view lines, const LoadedModel* model, int answer);
// The same trace as lines that read_trace reads with any model of this vocabulary.
std::string trace_lines(const Trace& trace);

}  // namespace reprise::app
