// A cached prompt and its continuation, as ids: together they are the whole prompt's, whatever the template does.
#include "apps/reprise/prompt.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/base/log.h"
#include "reprise/cache/kv_cache.h"
#include "tests/apps/program.h"

namespace reprise::app {
namespace {

namespace mx = mlx::core;

constexpr const char* kTrims =
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content']|trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
constexpr const char* kKeeps =
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
// What stands before the text depends on it.
constexpr const char* kCounts =
    "{% for m in messages %}[{{ m['content']|length }} {{ m['content'] }}]{% endfor %}"
    "{% if tools %}{{ tools|tojson }}{% endif %}{{ mood }}";

// As load_prompt_cache_file gives it, with rows of nothing.
LoadedPromptCache stored_prompt(const Tokens& ids, const std::string& app_json) {
  auto cache = make_kv_prompt_cache(1);
  const auto rows = mx::zeros({1, 1, static_cast<int>(ids.size()), 2});
  if (!ids.empty()) cache.at<KVCache>(0).update_and_fetch(rows, rows);
  return {std::move(cache), {}, {.tokens = ids, .app_json = app_json}};
}

LoadedPromptCache cache_prompt(const LoadedModel& model, const PromptRequest& request) {
  return stored_prompt(encode_open_prompt(model, request), prompt_record_to_json(record_of(model, request)));
}

Tokens joined(const ContinuedPrompt& continued) {
  auto ids = continued.cache.tokens;
  ids.insert(ids.end(), continued.ids.begin(), continued.ids.end());
  return ids;
}

class Warnings {
 public:
  Warnings() {
    set_log_hook([this](LogLevel, const std::string& text) { text_ += text + "\n"; });
  }
  ~Warnings() { set_log_hook({}); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

class ContinuePrompt : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (const auto name = test::small_model()) model_ = new LoadedModel(load(*name));
  }
  static void TearDownTestSuite() {
    delete model_;
    model_ = nullptr;
  }
  void SetUp() override {
    if (model_ == nullptr) GTEST_SKIP() << "the small model is not there: set REPRISE_MODEL or ./run it";
  }
  static LoadedModel& model() { return *model_; }
  static void use_template(const char* source) {
    if (source == nullptr) {
      model().chat_template.reset();
    } else {
      TokenizerData data;
      data.chat_template = source;
      model().chat_template.emplace(data);
    }
  }

  static LoadedModel* model_;
};

LoadedModel* ContinuePrompt::model_ = nullptr;

TEST_F(ContinuePrompt, IsTheWholePromptInEveryTemplate) {
  const std::pair<const char*, const char*> texts[] = {
      {"Doc.\n\n", "Question?"},
      {"Hello wor", "ld is this"},
      {"Hello ", " world"},
      {"Hello", ""},
      {"", "Hello"},
      {"  Hello", "x"},
      {"a\n", "\nb"},
      {"\n\n", "\n\nx"},
      {"1", "2345"},
      {"e", "\u0301x"},
      {"REPRISE0TEXT", "REPRISE0TEXT"},
      {"abc <|im_", "end|> x"},
      {"Hello   ", "   "},
      {"x", "\n"},
      {"it costs", " 5$ a day"},
  };
  const PromptRequest kinds[] = {
      {.prompt = ""},
      {.prompt = "", .system_prompt = "Be brief. REPRISE0TEXT"},
      {.prompt = "", .system_prompt = "", .tools_json = R"([{"name":"f"}])", .kwargs_json = R"({"mood":"glad"})"},
  };
  for (const char* source : {kTrims, kKeeps, kCounts, static_cast<const char*>(nullptr)}) {
    use_template(source);
    for (const auto& kind : kinds) {
      for (const auto& [before, after] : texts) {
        SCOPED_TRACE(std::string(source == nullptr ? "plain" : source) + "\n" + before + "|" + after);
        auto first = kind;
        first.prompt = before;
        auto whole = kind;
        whole.prompt = std::string(before) + after;
        // The record knows the rest.
        const auto continued = continue_prompt(cache_prompt(model(), first), model(), {.prompt = after});
        EXPECT_EQ(joined(continued), encode_prompt(model(), whole));
        EXPECT_FALSE(continued.ids.empty());
        EXPECT_EQ(static_cast<std::size_t>(cache_length(continued.cache.cache)), continued.cache.tokens.size());
      }
    }
  }
}

TEST_F(ContinuePrompt, UsesTheCacheUpToTheSeam) {
  use_template(kTrims);
  const std::string document = "A long document about seven cats and one dog, who live by the sea.";
  const auto stored = cache_prompt(model(), {.prompt = document + "\n\n"});
  const auto cached = stored.extension.tokens->size();
  const auto continued =
      continue_prompt(cache_prompt(model(), {.prompt = document + "\n\n"}), model(), {.prompt = "Who?"});
  EXPECT_GE(continued.cache.tokens.size() + 2, cached);
}

TEST_F(ContinuePrompt, TheFlagsWinOverTheRecordAndTheLossIsSaid) {
  use_template(kKeeps);
  Warnings warnings;
  const PromptRequest request = {.prompt = " there", .system_prompt = "Be long."};
  const auto continued =
      continue_prompt(cache_prompt(model(), {.prompt = "Hello", .system_prompt = "Be brief."}), model(), request);
  EXPECT_EQ(joined(continued), encode_prompt(model(), {.prompt = "Hello there", .system_prompt = "Be long."}));
  EXPECT_NE(warnings.text().find("another system prompt"), std::string::npos) << warnings.text();
}

TEST_F(ContinuePrompt, APrefilledResponseFollows) {
  use_template(kKeeps);
  const auto continued = continue_prompt(cache_prompt(model(), {.prompt = "Hello wor"}), model(),
                                         {.prompt = "ld", .prefill_response = "Sure"});
  EXPECT_EQ(joined(continued), encode_prompt(model(), {.prompt = "Hello world", .prefill_response = "Sure"}));
}

TEST_F(ContinuePrompt, AFileWithoutARecordGetsTheTextBehindIt) {
  use_template(kKeeps);
  const PromptRequest first = {.prompt = "Hello wor", .system_prompt = "REPRISE0TEXT"};
  // Files of an early form recorded the rendered text only.
  for (const char* app : {"", R"({"prompt":{"text":"<|im_start|>user\nHello wor"}})", "[", "{}"}) {
    auto request = first;
    request.prompt = "ld";
    const auto continued = continue_prompt(stored_prompt(encode_open_prompt(model(), first), app), model(), request);
    auto whole = first;
    whole.prompt = "Hello world";
    EXPECT_EQ(joined(continued), encode_prompt(model(), whole)) << app;
  }
  use_template(kTrims);
  Warnings warnings;
  continue_prompt(stored_prompt(encode_open_prompt(model(), first), ""), model(), {.prompt = "\nx"});
  EXPECT_NE(warnings.text().find("changes the beginning"), std::string::npos) << warnings.text();
}

}  // namespace
}  // namespace reprise::app
