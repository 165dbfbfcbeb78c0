// conformance_replay DIR [--only CLASS,…] [FAMILY…]: replays recorded cache traces and tells where we differ.
// Exit status: 0 all passed, 1 a case failed, 2 nothing could be run as asked.
#include <algorithm>
#include <iostream>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/conformance/replay.h"
#include "tests/conformance/selection.h"

namespace {

using namespace reprise::conformance;

constexpr const char* kUsage = "usage: conformance_replay DIR [--only CLASS,...] [FAMILY...]";

struct Arguments {
  std::string folder;
  std::optional<std::set<std::string>> only;
  std::vector<std::string> families;
};

struct Totals {
  int passed = 0;
  int failed = 0;
  int skipped = 0;
};

Arguments parse(const std::vector<std::string>& words) {
  Arguments arguments;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--only" || words[i].starts_with("--only=")) {
      const bool joined = words[i].size() > 6;
      if (!joined && i + 1 == words.size()) throw std::invalid_argument("--only needs a list of classes");
      std::istringstream list(joined ? words[i].substr(7) : words[++i]);
      arguments.only.emplace();
      for (std::string name; std::getline(list, name, ',');) {
        if (!name.empty()) arguments.only->insert(name);
      }
      if (arguments.only->empty()) throw std::invalid_argument("--only needs a list of classes");
    } else if (words[i].starts_with("-")) {
      throw std::invalid_argument("unknown option " + words[i]);
    } else if (arguments.folder.empty()) {
      arguments.folder = words[i];
    } else {
      arguments.families.push_back(words[i]);
    }
  }
  if (arguments.folder.empty()) throw std::invalid_argument("a folder is needed");
  return arguments;
}

bool chosen(const Json& test_case, const Arguments& arguments) {
  if (!arguments.only) return true;
  const std::set<std::string> needed = needs(test_case);
  return std::includes(arguments.only->begin(), arguments.only->end(), needed.begin(), needed.end());
}

void run_family(const Family& family, const Arguments& arguments, Totals& totals) {
  for (std::size_t i = 0; i < family.cases.size(); ++i) {
    const Json& test_case = family.cases[i];
    const std::string name = test_case.value("name", "case " + std::to_string(i));
    std::optional<Failure> failure;
    try {
      if (!chosen(test_case, arguments)) {
        ++totals.skipped;
        continue;
      }
      failure = replay(test_case, family);
    } catch (const std::exception& error) {
      failure = Failure{std::nullopt, std::string("not a case: ") + error.what()};
    }
    if (failure) {
      ++totals.failed;
      const std::string where = failure->step ? " step " + std::to_string(*failure->step) : "";
      std::cout << "FAILED " << family.name << "/" << name << where << ": " << failure->what << "\n";
    } else {
      ++totals.passed;
    }
  }
}

int run(const Arguments& arguments) {
  const std::vector<std::string> present = family_names(arguments.folder);
  for (const std::string& name : arguments.families) {
    if (std::find(present.begin(), present.end(), name) == present.end()) {
      throw std::runtime_error("no family \"" + name + "\" in " + arguments.folder);
    }
  }
  Totals totals;
  for (const std::string& name : arguments.families.empty() ? present : arguments.families) {
    const Family family = load_family(arguments.folder, name);
    if (family.cases.empty()) throw std::runtime_error("family \"" + name + "\" has no cases");
    run_family(family, arguments, totals);
  }
  if (totals.passed + totals.failed + totals.skipped == 0) throw std::runtime_error(arguments.folder + " has no cases");

  std::cout << totals.passed << " passed, " << totals.failed << " failed";
  if (totals.skipped > 0) std::cout << ", " << totals.skipped << " skipped";
  std::cout << std::endl;
  if (totals.passed + totals.failed == 0) {
    std::cerr << "conformance_replay: --only chose no case" << std::endl;
    return 2;
  }
  return totals.failed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(std::vector<std::string>(argv + 1, argv + argc)));
  } catch (const std::invalid_argument& error) {
    std::cerr << "conformance_replay: " << error.what() << "\n" << kUsage << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "conformance_replay: " << error.what() << std::endl;
  }
  return 2;
}
