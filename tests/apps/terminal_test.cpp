// `reprise chat` on a pseudo-terminal: prompt, editing, paste, history, interrupts.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/apps/program.h"

namespace reprise::test {
namespace {

using std::chrono::seconds;

class Terminal : public ::testing::Test {
 protected:
  void SetUp() override {
    REPRISE_NEED_MODEL(model);
    model_ = model;
  }

  LaunchOptions options() const {
    return {.environment = {{"XDG_STATE_HOME", folder_.file("state")},
                            {"TERM", "xterm"},
                            {"LANG", ""},
                            {"LC_ALL", "C"},
                            {"HOME", folder_.file("")}},
            .pseudo_terminal = true};
  }

  std::string history() const {
    std::ifstream file(folder_.file("state/reprise/history"));
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

  TemporaryFolder folder_;
  std::string model_;
};

TEST_F(Terminal, BytesThatAreNoTextTakeNothingElseAlong) {
  Program program({"chat", "--model", model_, "--stats", "--max-tokens", "2"}, options());
  ASSERT_TRUE(program.wait_for_output(">> ")) << program.out();
  program.write("\033[200~/first\003\032\034\tword\033[201~\r");
  ASSERT_TRUE(program.wait_for_output("there is no command /first word")) << program.out();
  ASSERT_TRUE(program.wait_for_output(">> "));
  program.write("/half\xC3\r");
  ASSERT_TRUE(program.wait_for_output("there is no command /half\uFFFD")) << program.out();
  ASSERT_TRUE(program.wait_for_output(">> "));
  program.write("/more\xE2\x82x\r");
  ASSERT_TRUE(program.wait_for_output("there is no command /more\uFFFDx")) << program.out();
  ASSERT_TRUE(program.wait_for_output(">> "));
  program.write("\034");  // Ctrl-\ is still a key
  EXPECT_EQ(program.finish(seconds(30)).exit_code, 128 + SIGQUIT);
}

TEST_F(Terminal, PastedLinesAreOneMessageAndTypedOnesAreEdited) {
  Program program({"chat", "--model", model_, "--stats", "--max-tokens", "2"}, options());
  ASSERT_TRUE(program.wait_for_output(">> ")) << program.out();
  program.write("\033[200~First line\r/quit\rthird line\033[201~\r");
  ASSERT_TRUE(program.wait_for_output("stats {")) << program.out();
  ASSERT_TRUE(program.wait_for_output(">> "));
  program.write("/stats\r");
  ASSERT_TRUE(program.wait_for_output("1 turn,")) << program.out();
  ASSERT_TRUE(program.wait_for_output(">> "));  // keys before the prompt are the kernel's to edit
  // Backspace takes a whole character away; letters beyond ASCII survive without a locale.
  program.write("/nonseü\177ß\r");
  ASSERT_TRUE(program.wait_for_output("there is no command /nonseß")) << program.out();
  program.write("/quit\r");
  const auto outcome = program.finish(seconds(30));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
  EXPECT_NE(outcome.out.find("\033[?2004h"), std::string::npos) << "bracketed paste was never switched on";
  EXPECT_GT(outcome.out.rfind("\033[?2004l"), outcome.out.rfind("\033[?2004h")) << "it must be off at the end";
  EXPECT_NE(history().find("/stats"), std::string::npos) << history();
  EXPECT_NE(history().find("third"), std::string::npos) << history();
}

TEST_F(Terminal, InterruptAtThePromptClearsTheLineAndTheSecondLeaves) {
  Program program({"chat", "--model", model_, "--max-tokens", "2"}, options());
  ASSERT_TRUE(program.wait_for_output(">> ")) << program.out();
  program.write("half a mess\003");
  ASSERT_TRUE(program.wait_for_output("once more")) << program.out();
  ASSERT_TRUE(program.wait_for_output(">> "));
  program.write("/stats\r");
  ASSERT_TRUE(program.wait_for_output("0 turns")) << program.out();
  ASSERT_TRUE(program.wait_for_output(">> "));
  program.write("\003");
  ASSERT_TRUE(program.wait_for_output("once more")) << "a command in between begins the count anew: " << program.out();
  ASSERT_TRUE(program.wait_for_output(">> "));
  program.write("\003");
  EXPECT_EQ(program.finish(seconds(30)).exit_code, 0);
}

TEST_F(Terminal, InterruptStopsTheAnswer) {
  Program program({"chat", "--model", model_, "--stats", "--max-tokens", "400"}, options());
  ASSERT_TRUE(program.wait_for_output(">> ")) << program.out();
  program.write("Tell me a long story.\r");
  ASSERT_TRUE(program.wait_for_output("\n")) << program.out();
  ASSERT_TRUE(program.wait_for_output(" ")) << program.out();
  program.write("\003");
  ASSERT_TRUE(program.wait_for_output("(stopped")) << program.out();
  ASSERT_TRUE(program.wait_for_output("stats {"));
  ASSERT_TRUE(program.wait_for_output(">> "));
  program.write("\004");
  const auto outcome = program.finish(seconds(30));
  EXPECT_EQ(outcome.exit_code, 0) << "Ctrl-D ends: " << outcome.out;
}

TEST_F(Terminal, TheArrowBringsBackTheLastChatsLine) {
  {
    Program program({"chat", "--model", model_}, options());
    ASSERT_TRUE(program.wait_for_output(">> ")) << program.out();
    program.write("/system Be kind.\r");
    ASSERT_TRUE(program.wait_for_output("new conversation")) << program.out();
    program.write("q\r");
    EXPECT_EQ(program.finish(seconds(30)).exit_code, 0);
  }
  Program program({"chat", "--model", model_}, options());
  ASSERT_TRUE(program.wait_for_output(">> ")) << program.out();
  program.write("\033[A\033[A\r");
  EXPECT_TRUE(program.wait_for_output("new conversation")) << program.out();
  const auto permissions = std::filesystem::status(folder_.file("state/reprise/history")).permissions();
  EXPECT_EQ(permissions & std::filesystem::perms::others_read, std::filesystem::perms::none);
}

TEST_F(Terminal, ASignalThatEndsItLeavesTheTerminalInOrder) {
  Program program({"chat", "--model", model_}, options());
  ASSERT_TRUE(program.wait_for_output(">> ")) << program.out();
  program.signal(SIGTERM);
  const auto outcome = program.finish(seconds(30));
  EXPECT_EQ(outcome.exit_code, 128 + SIGTERM);
  EXPECT_GT(outcome.out.rfind("\033[?2004l"), outcome.out.rfind("\033[?2004h"));
}

}  // namespace
}  // namespace reprise::test
