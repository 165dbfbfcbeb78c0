// libtextkit exports its header, all of it and nothing else.
#include <gtest/gtest.h>

#include <cctype>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

namespace reprise {
namespace {

std::set<std::string> declared() {
  std::ifstream file(REPRISE_SOURCE_DIR "/rust/textkit/include/textkit.h");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  // Every "textkit_name(" declares one.
  std::set<std::string> names;
  const std::string prefix = "textkit_";
  for (std::size_t at = text.find(prefix); at != std::string::npos; at = text.find(prefix, at + 1)) {
    std::size_t end = at;
    while (std::isalnum(static_cast<unsigned char>(text[end])) != 0 || text[end] == '_') ++end;
    if (text[end] == '(') names.insert(text.substr(at, end - at));
  }
  return names;
}

std::set<std::string> exported() {
  const std::string command = std::string("nm -D --defined-only '") + REPRISE_TEXTKIT_FILE + "' 2>/dev/null";
  FILE* pipe = popen(command.c_str(), "r");
  std::set<std::string> names;
  if (pipe == nullptr) return names;
  char address[64];
  char kind = 0;
  char name[512];
  while (std::fscanf(pipe, "%63s %c %511s", address, &kind, name) == 3) names.insert(name);
  pclose(pipe);
  return names;
}

TEST(Textkit, ExportsItsHeaderAndNothingElse) {
  const std::set<std::string> found = exported();
  if (found.empty()) GTEST_SKIP() << "nm is not there to list " << REPRISE_TEXTKIT_FILE;
  EXPECT_EQ(found, declared());
  EXPECT_GE(found.size(), 14U);
}

}  // namespace
}  // namespace reprise
