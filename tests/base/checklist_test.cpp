// Every id of tools/checklist.txt has a test that is named after it.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

// The ids that `text` begins with: "K1K2Growth" → K1, K2.
std::set<std::string> leading_ids(const std::string& text) {
  static const std::regex id("[A-Z][0-9]{1,2}");
  std::set<std::string> ids;
  std::smatch match;
  auto begin = text.cbegin();
  while (std::regex_search(begin, text.cend(), match, id, std::regex_constants::match_continuous)) {
    ids.insert(match.str());
    begin = match[0].second;
  }
  return ids;
}

std::set<std::string> ids_of_tests(const fs::path& folder) {
  static const std::regex test(R"(\bTEST(?:_F|_P)?\(\s*\w+,\s*(\w+)\))");
  std::set<std::string> ids;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".cpp") continue;
    const std::string text = read(entry.path());
    for (std::sregex_iterator found(text.begin(), text.end(), test), end; found != end; ++found) {
      ids.merge(leading_ids((*found)[1]));
    }
  }
  return ids;
}

std::set<std::string> ids_of_checklist(const fs::path& file) {
  std::set<std::string> ids;
  std::istringstream lines(read(file));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('#') || line.empty()) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string id; words >> id;) ids.insert(id);
  }
  return ids;
}

TEST(Checklist, LeadingIdsAreReadOffANameAndNoOthers) {
  EXPECT_EQ(leading_ids("K1K2GrowthAt256"), (std::set<std::string>{"K1", "K2"}));
  EXPECT_EQ(leading_ids("B10Rolls"), (std::set<std::string>{"B10"}));
  EXPECT_TRUE(leading_ids("GrowthK1").empty());
}

TEST(Checklist, EveryRequirementHasATestOfItsName) {
  const fs::path root = REPRISE_SOURCE_DIR;
  const std::set<std::string> required = ids_of_checklist(root / "tools" / "checklist.txt");
  ASSERT_GT(required.size(), 90u);
  const std::set<std::string> tested = ids_of_tests(root / "tests");
  for (const std::string& id : required) EXPECT_TRUE(tested.contains(id)) << id << " has no test";
}

}  // namespace
