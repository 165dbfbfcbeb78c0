// Reuse as those who chat meet it.
#include <unistd.h>

#include <filesystem>
#include <sstream>
#include <stdexcept>

#include "reprise/generate/chat_session.h"
#include "tests/generate/reuse_checks.h"

namespace reprise::test {

namespace fs = std::filesystem;

namespace {

constexpr const char* kTemplate =
    "<s>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role != 'assistant' or not loop.last or "
    "add_generation_prompt %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
const std::vector<std::string> kSpecial = {"<s>", "<user>", "<assistant>", "<system>", "<end>"};

std::string tokenizer_json(int vocab_size) {
  std::string characters;
  for (char c = 'a'; c <= 'z'; ++c) characters += c;
  for (char c = '!'; c <= '~'; ++c) {
    if (c != '"' && c != '\\' && (c < 'a' || c > 'z')) characters += c;
  }
  std::string vocab = "\"\\u0120\":0";  // the byte-level name of a space
  int id = 1;
  for (const char c : characters) {
    if (id >= vocab_size - static_cast<int>(kSpecial.size())) break;
    vocab += ",\"" + std::string(1, c) + "\":" + std::to_string(id++);
  }
  std::string added;
  for (const std::string& text : kSpecial) {
    added += (added.empty() ? "" : ",") + ("{\"id\":" + std::to_string(id)) + ",\"content\":\"" + text +
             "\",\"special\":true,\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false}";
    vocab += ",\"" + text + "\":" + std::to_string(id++);
  }
  return R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[)" + added +
         R"(],"normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,)"
         R"("use_regex":false},"post_processor":null,"decoder":{"type":"ByteLevel","add_prefix_space":false,)"
         R"("trim_offsets":true,"use_regex":false},"model":{"type":"BPE","dropout":null,"unk_token":null,)"
         R"("continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,)"
         R"("vocab":{)" +
         vocab + R"(},"merges":[]}})";
}

class ChatChecks {
 public:
  ChatChecks(const LoadedModel& model, const ReuseSetting& setting, double tolerance)
      : model_(model), setting_(setting), tolerance_(tolerance) {}

  double error = 0;

  void run() {
    ChatSession session = start();
    say(session, "hello there");
    say(session, "how are you");
    say(session, "a long message, so that a window is passed");

    ChatSession branch = session.fork();
    say(branch, "another way");
    say(session, "straight on");
    branch.undo();
    branch.undo();
    say(branch, "the branch goes back");
    say(branch, "and on");

    for (int i = 0; i < 3; ++i) session.undo();
    say(session, "an edit of the second message");
    say(session, "and what follows");

    const fs::path file = fs::temp_directory_path() / ("chat_reuse_" + std::to_string(::getpid()) + ".safetensors");
    session.save(file);
    ChatSession loaded = start();
    loaded.load(file);
    fs::remove(file);
    if (say(loaded, "after loading") != say(session, "after loading")) {
      throw std::runtime_error("a loaded chat gives another answer than the live one");
    }
    loaded.undo();
    loaded.undo();
    say(loaded, "an edit after loading");
    session.reset();
    say(session, "from the beginning");
  }

 private:
  ChatSession start() const {
    return ChatSession(model_, {.generate = {.max_tokens = 9, .kv_cache = setting_.kv, .verify_reuse = 1.0}});
  }

  Tokens say(ChatSession& session, const std::string& text) {
    const GenerateResult result = session.say(text);
    error = std::max(error, result.stats.reuse_error);
    if (result.stats.reuse_mismatches > 0) {
      std::ostringstream what;
      what << "\"" << text << "\": the library's own check finds " << result.stats.reuse_error;
      throw std::runtime_error(what.str());
    }
    const double distance = distance_from_cold(*model_.model, session.cache(), setting_.kv);
    error = std::max(error, distance);
    if (!(distance <= tolerance_)) {
      std::ostringstream what;
      what << "after \"" << text << "\" the cache is off by " << distance << ", allowed " << tolerance_;
      throw std::runtime_error(what.str());
    }
    return result.tokens;
  }

  const LoadedModel& model_;
  const ReuseSetting& setting_;
  double tolerance_;
};

}  // namespace

LoadedModel with_kit_tokenizer(std::unique_ptr<LanguageModel> model) {
  TokenizerData data;
  data.tokenizer_json = tokenizer_json(model->info().vocab_size);
  data.chat_template = kTemplate;
  data.bos_token = kSpecial.front();
  data.eos_token = kSpecial.back();
  data.eos_token_ids = {model->info().vocab_size - 1};
  return {.path = "kit",
          .fingerprint = "kit-1",
          .full_fingerprint = "kit-1, all of it",
          .model = std::move(model),
          .tokenizer = Tokenizer(data),
          .chat_template = ChatTemplate(data),
          .tokenizer_config_json = "{}"};
}

void check_reuse_of_chats(const LoadedModel& model, const ReuseSetting& setting, double tolerance,
                          const ReportOutcome& report) {
  KitOutcome outcome{setting.name + ": chat", "", 0};
  ChatChecks checks(model, setting, tolerance);
  try {
    checks.run();
  } catch (const std::exception& error) {
    outcome.failure = error.what();
  }
  outcome.error = checks.error;
  report(outcome);
}

}  // namespace reprise::test
