// The whole tree against tools/layers.txt and the CMake lists; and the checker itself against planted violations.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/base/include_rules.h"

namespace reprise::house {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = REPRISE_SOURCE_DIR;

std::string read(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

// All files below FOLDERS whose name ends in one of ENDINGS.
std::vector<SourceFile> files_below(const std::vector<std::string>& folders, const std::vector<std::string>& endings) {
  std::vector<SourceFile> files;
  for (const auto& folder : folders) {
    if (!fs::exists(kRoot / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
      const std::string path = fs::relative(entry.path(), kRoot).generic_string();
      for (const auto& ending : endings) {
        if (entry.is_regular_file() && path.size() >= ending.size() &&
            path.compare(path.size() - ending.size(), ending.size(), ending) == 0) {
          files.push_back({path, read(entry.path())});
        }
      }
    }
  }
  return files;
}

std::vector<SourceFile> all_cmake_lists() {
  return files_below({"reprise", "python", "apps", "tests", "examples", "bench", "fuzz", "rust"}, {"CMakeLists.txt"});
}

std::string lines(const std::vector<std::string>& findings) {
  std::string text;
  for (const auto& finding : findings) text += finding + "\n";
  return text;
}

TEST(Layers, EveryIncludeIsAllowedByTheTable) {
  const auto table = parse_layers(read(kRoot / "tools/layers.txt"));
  const auto files = files_below({"reprise", "python", "apps"}, {".h", ".cpp"});
  ASSERT_GE(files.size(), 10u);
  EXPECT_EQ(lines(include_violations(table, files, public_headers(all_cmake_lists()))), "");
}

TEST(Layers, ArchitectureMdSaysTheSame) {
  const auto table = parse_layers(read(kRoot / "tools/layers.txt"));
  EXPECT_EQ(lines(architecture_mismatches(table, read(kRoot / "ARCHITECTURE.md"))), "");
}

TEST(Layers, NoRoomShowsMoreThanMlxInItsHeaders) {
  const auto table = parse_layers(read(kRoot / "tools/layers.txt"));
  for (const auto& [name, room] : table.rooms) {
    for (const auto& word : room.header_outside) EXPECT_EQ(word, "mlx") << name;
  }
}

TEST(Layers, NoHeadersIncludeEachOther) {
  EXPECT_EQ(lines(include_cycles(files_below({"reprise", "python", "apps", "tests"}, {".h"}))), "");
}

TEST(Layers, EveryFileIsNamedInACMakeList) {
  std::vector<std::string> paths;
  for (const auto& file : files_below({"reprise", "python", "apps"}, {".h", ".cpp"})) paths.push_back(file.path);
  for (const auto& file : files_below({"python", "tests/python"}, {".py"})) paths.push_back(file.path);
  for (const auto& file : files_below({"tests", "examples", "bench", "fuzz"}, {".cpp"})) paths.push_back(file.path);
  for (const auto& file : files_below({"rust/textkit/src"}, {".rs"})) paths.push_back(file.path);
  EXPECT_EQ(lines(unlisted_files(all_cmake_lists(), paths)), "");
}

TEST(Layers, WhateverUsesMlxGetsOpenBlas) {
  auto lists = all_cmake_lists();
  std::erase_if(lists, [](const SourceFile& list) { return list.path.rfind("tests/install/", 0) == 0; });
  EXPECT_EQ(lines(plain_mlx_links(lists)), "");
}

// ---- the checker finds what is planted

const char kTable[] =
    "mlx = mlx/\n"
    "json = nlohmann/\n"
    "base: | | json\n"
    "nn: base | mlx |   # a remark\n"
    "nn/deep: base nn | | json\n"
    "apps/reprise: nn | | \n";

std::string check(const std::string& path, const std::string& text,
                  const std::set<std::string>& headers = {"reprise/base/error.h", "reprise/nn/rope.h"}) {
  return lines(include_violations(parse_layers(kTable), {{path, text}}, headers));
}

TEST(IncludeViolations, AnAllowedFileHasNone) {
  EXPECT_EQ(check("reprise/nn/a.cpp",
                  "#include \"reprise/nn/a.h\"\n#include <vector>\n#  include \"mlx/mlx.h\"\n"
                  "#include \"reprise/base/error.h\"\n// #include <nlohmann/json.hpp>\n"),
            "");
}

TEST(IncludeViolations, ARoomBelowIsRefused) {
  EXPECT_EQ(check("reprise/base/a.cpp", "\n#include \"reprise/nn/rope.h\"\n"),
            "reprise/base/a.cpp:2: reprise/nn/rope.h: base may not include nn\n");
}

TEST(IncludeViolations, AnotherRoomsPrivateHeaderIsRefused) {
  EXPECT_EQ(check("reprise/nn/a.cpp", "#include \"reprise/base/secret.h\"\n"),
            "reprise/nn/a.cpp:1: reprise/base/secret.h: this header is private to base\n");
}

TEST(IncludeViolations, APublicHeaderMayNotShowAPrivateOne) {
  EXPECT_EQ(check("reprise/nn/rope.h", "#include \"reprise/nn/secret.h\"\n"),
            "reprise/nn/rope.h:1: reprise/nn/secret.h: a public header includes a private one\n");
  EXPECT_EQ(check("reprise/nn/rope.cpp", "#include \"reprise/nn/secret.h\"\n"), "");
}

TEST(IncludeViolations, OutsideHeadersAreForTheNamedRoomsOnly) {
  EXPECT_EQ(check("reprise/nn/a.cpp", "#include <nlohmann/json.hpp>\n"),
            "reprise/nn/a.cpp:1: nlohmann/json.hpp: nn may not include json\n");
  EXPECT_EQ(check("reprise/base/a.cpp", "#include <nlohmann/json.hpp>\n"), "");
  EXPECT_EQ(check("reprise/base/private.h", "#include <nlohmann/json.hpp>\n"), "");
  EXPECT_EQ(check("reprise/base/error.h", "#include <nlohmann/json.hpp>\n"),
            "reprise/base/error.h:1: nlohmann/json.hpp: public headers of base may not show json\n");
}

TEST(IncludeViolations, AnUnknownHeaderIsRefused) {
  EXPECT_NE(check("reprise/base/a.cpp", "#include <fmt/format.h>\n"), "");
  EXPECT_NE(check("reprise/base/a.cpp", "#include \"error.h\"\n"), "");
  EXPECT_NE(check("reprise/nn/a.cpp", "#include <reprise/base/error.h>\n"), "");
}

TEST(IncludeViolations, AFolderThatIsNoRoomIsRefused) { EXPECT_NE(check("reprise/utils/a.cpp", ""), ""); }

TEST(IncludeViolations, ARoomWithinARoomHasItsOwnRules) {
  EXPECT_EQ(check("reprise/nn/deep/a.cpp", "#include <nlohmann/json.hpp>\n#include \"reprise/nn/rope.h\"\n"), "");
  EXPECT_NE(check("reprise/nn/a.cpp", "#include \"reprise/nn/deep/a.h\"\n", {"reprise/nn/deep/a.h"}), "");
}

TEST(IncludeViolations, ThePythonModuleIsARoomInItsOwnFolder) {
  const auto found = [](const std::string& path, const std::string& text) {
    return lines(include_violations(parse_layers(std::string(kTable) + "python: base | | mlx\n"), {{path, text}},
                                    {"reprise/base/error.h", "reprise/nn/rope.h"}));
  };
  EXPECT_EQ(found("python/src/a.cpp",
                  "#include \"python/src/a.h\"\n#include \"mlx/mlx.h\"\n#include \"reprise/base/error.h\"\n"),
            "");
  EXPECT_EQ(found("python/src/a.cpp", "#include \"reprise/nn/rope.h\"\n"),
            "python/src/a.cpp:1: reprise/nn/rope.h: python may not include nn\n");
  EXPECT_EQ(found("reprise/nn/a.cpp", "#include \"python/src/a.h\"\n"),
            "reprise/nn/a.cpp:1: python/src/a.h: nn may not include python\n");
}

TEST(ArchitectureMismatches, AreFound) {
  const auto found = [](const std::string& text) { return architecture_mismatches(parse_layers(kTable), text).size(); };
  EXPECT_EQ(found("| `reprise/base` | errors | – |\n| `reprise/nn` | layers | base |\n"), 0u);
  EXPECT_EQ(found("| `reprise/nn` | layers | – |\n"), 1u);
  EXPECT_EQ(found("| `reprise/attic` | layers | base |\n"), 1u);
  EXPECT_EQ(found("| `python` | glue | base |\n"), 1u);  // kTable has no such room
}

TEST(ParseLayers, ATableThatMakesNoSenseIsRefused) {
  EXPECT_THROW(parse_layers("base: nn | |\nnn: | |\n"), std::runtime_error);
  EXPECT_THROW(parse_layers("base: | json |\n"), std::runtime_error);
  EXPECT_THROW(parse_layers("base\n"), std::runtime_error);
  EXPECT_THROW(parse_layers("base: |\n"), std::runtime_error);
}

TEST(IncludeCycles, ACycleIsFoundAlsoWithinARoom) {
  const SourceFile a{"reprise/nn/a.h", "#include \"reprise/nn/b.h\"\n"};
  const SourceFile b{"reprise/nn/b.h", "#include \"reprise/nn/c.h\"\n"};
  const SourceFile c{"reprise/nn/c.h", "#include \"reprise/nn/a.h\"\n"};
  EXPECT_EQ(include_cycles({a, b, c}).size(), 1u);
  EXPECT_TRUE(include_cycles({a, b}).empty());
}

TEST(UnlistedFiles, ATestThatNobodyBuildsIsFound) {
  const std::vector<SourceFile> lists = {
      {"tests/nn/CMakeLists.txt",
       "reprise_test(nn unit\n  SOURCES a_test.cpp ../shared.cpp # b_test.cpp\n  LINK x)\n"}};
  EXPECT_EQ(lines(unlisted_files(lists, {"tests/nn/a_test.cpp", "tests/nn/b_test.cpp", "tests/shared.cpp"})),
            "tests/nn/b_test.cpp:1: no CMakeLists.txt names this file\n");
}

TEST(UnlistedFiles, AFileNamedByAForeachIsListed) {
  const std::vector<SourceFile> lists = {
      {"examples/CMakeLists.txt",
       "foreach(example chat trim)\n  add_executable(x_${example} ${example}.cpp)\nendforeach()\n"}};
  EXPECT_EQ(lines(unlisted_files(lists, {"examples/chat.cpp", "examples/trim.cpp", "examples/other.cpp"})),
            "examples/other.cpp:1: no CMakeLists.txt names this file\n");
}

TEST(PublicHeaders, AreThoseOfTheFileSet) {
  const std::vector<SourceFile> lists = {
      {"reprise/nn/CMakeLists.txt",
       "reprise_room(nn\n  SOURCES a.cpp secret.h\n  HEADERS rope.h masks.h\n  LINK mlx)\n"}};
  EXPECT_EQ(public_headers(lists), (std::set<std::string>{"reprise/nn/rope.h", "reprise/nn/masks.h"}));
}

TEST(PlainMlxLinks, AreFoundButTheLabelIsNot) {
  const auto found = [](const std::string& text) { return plain_mlx_links({{"x/CMakeLists.txt", text}}).size(); };
  EXPECT_EQ(found("reprise_room(nn SOURCES a.cpp LINK reprise::base mlx)"), 1u);
  EXPECT_EQ(found("target_link_libraries(a PRIVATE mlx)"), 1u);
  EXPECT_EQ(found("reprise_test(nn mlx SOURCES a.cpp LINK reprise::mlx)"), 0u);
}

}  // namespace
}  // namespace reprise::house
