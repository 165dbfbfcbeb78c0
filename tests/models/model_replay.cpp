// model_replay DIR [--only NAME…] [--known] [--verbose]: runs tiny models in the conformance kit's format, one folder a
// model, and tells where we differ from the outputs stored beside them. DIR may be one such folder itself.
// Exit status: 0 all passed, 1 a case failed, 2 nothing could be run as asked.
#include <algorithm>
#include <iostream>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "reprise/kernels/reference.h"
#include "reprise/models/config.h"
#include "reprise/storage/file_system.h"
#include "tests/models/kit_checks.h"

namespace {

using namespace reprise;
using namespace reprise::test;
namespace fs = std::filesystem;

constexpr const char* kUsage =
    "usage: model_replay DIR [--only NAME...] [--known] [--verbose]\n"
    "  --only NAME...  these folders of DIR (separated by spaces or commas)\n"
    "  --known         skip models whose model_type is not known, and say so\n"
    "  --verbose       also tell what passed, and how near it came";

struct Arguments {
  std::string folder;
  std::set<std::string> only;
  bool known = false;
  bool verbose = false;
};

struct Totals {
  int passed = 0;
  int failed = 0;
  int skipped = 0;
};

void add_names(const std::string& list, std::set<std::string>& names) {
  std::istringstream stream(list);
  for (std::string name; std::getline(stream, name, ',');) {
    if (!name.empty()) names.insert(name);
  }
}

Arguments parse(const std::vector<std::string>& words) {
  Arguments arguments;
  bool in_names = false;
  bool wants_names = false;
  for (const std::string& word : words) {
    if (word == "--only" || word.starts_with("--only=")) {
      in_names = wants_names = true;
      if (word.size() > 7) add_names(word.substr(7), arguments.only);
    } else if (word == "--known") {
      arguments.known = true;
      in_names = false;
    } else if (word == "--verbose") {
      arguments.verbose = true;
      in_names = false;
    } else if (word.starts_with("-")) {
      throw std::invalid_argument("unknown option " + word);
    } else if (in_names) {
      add_names(word, arguments.only);
    } else if (arguments.folder.empty()) {
      arguments.folder = word;
    } else {
      throw std::invalid_argument("one folder is enough, but got " + word + " too");
    }
  }
  if (arguments.folder.empty()) throw std::invalid_argument("a folder is needed");
  if (wants_names && arguments.only.empty()) throw std::invalid_argument("--only needs names of folders");
  return arguments;
}

bool is_model(const fs::path& folder) {
  return fs::exists(folder / "expected.json") || fs::exists(folder / "config.json");
}

// The folders to run, by name.
std::vector<fs::path> folders_of(const Arguments& arguments) {
  const fs::path root(arguments.folder);
  if (!fs::is_directory(root)) throw std::runtime_error("no folder " + arguments.folder);
  std::vector<fs::path> folders;
  if (is_model(root)) {
    folders.push_back(root);
  } else {
    for (const auto& entry : fs::directory_iterator(root)) {
      if (entry.is_directory() && is_model(entry.path())) folders.push_back(entry.path());
    }
  }
  std::sort(folders.begin(), folders.end());
  const auto name_of = [](const fs::path& folder) {
    return folder.filename().empty() ? folder.parent_path().filename().string() : folder.filename().string();
  };
  for (const std::string& name : arguments.only) {
    if (std::none_of(folders.begin(), folders.end(), [&](const fs::path& folder) { return name_of(folder) == name; })) {
      throw std::runtime_error("no model \"" + name + "\" in " + arguments.folder);
    }
  }
  if (!arguments.only.empty()) {
    std::erase_if(folders, [&](const fs::path& folder) { return !arguments.only.contains(name_of(folder)); });
  }
  if (folders.empty()) throw std::runtime_error(arguments.folder + " has no models");
  return folders;
}

class Replay {
 public:
  explicit Replay(const Arguments& arguments) : arguments_(arguments) {}

  void folder(const fs::path& folder) {
    const std::string name =
        folder.filename().empty() ? folder.parent_path().filename().string() : folder.filename().string();
    try {
      if (arguments_.known && !is_known(folder)) {
        ++totals_.skipped;
        std::cout << "SKIPPED " << name << ": its model_type is not known" << std::endl;
        return;
      }
      const KitModel kit = read_kit(folder);
      if (kit.scenarios.empty()) throw std::runtime_error("expected.json has no scenario of one sequence");
      for (const KitMode& mode : modes_for(kit)) {
        std::optional<kernels::reference::Scope> scope;
        if (mode.kind != KitMode::Kind::kernels) scope.emplace();
        run(name, folder, kit, kit.scenarios, mode, true);
        if (fs::exists(folder / "hf")) run(name + "/hf", folder / "hf", kit, {kit.scenarios.front()}, mode, false);
      }
    } catch (const std::exception& error) {
      report(name, {"", error.what(), 0});
    }
  }

  const Totals& totals() const { return totals_; }

 private:
  void run(const std::string& name, const fs::path& folder, const KitModel& kit,
           const std::vector<KitScenario>& scenarios, const KitMode& mode, bool with_batches) {
    const auto tell = [&](KitOutcome outcome) {
      outcome.name += (outcome.name.empty() ? "" : " ") + ("(" + mode.name + ")");
      report(name, outcome);
    };
    std::unique_ptr<LanguageModel> model;
    try {
      model = make_kit_model(folder, kit, mode);
    } catch (const std::exception& error) {
      tell({"", error.what(), 0});
      return;
    }
    check_sequences(*model, kit, scenarios, mode, tell);
    if (with_batches) check_batches(*model, kit, mode, tell);
  }

  static bool is_known(const fs::path& folder) {
    const internal::Config config(read_file(folder / "config.json"));
    const auto types = known_model_types();
    return std::find(types.begin(), types.end(), config.require_string("model_type")) != types.end();
  }

  void report(const std::string& folder, const KitOutcome& outcome) {
    const std::string where = folder + (outcome.name.empty() ? "" : " ") + outcome.name;
    if (!outcome.failure.empty()) {
      ++totals_.failed;
      std::cout << "FAILED " << where << ": " << outcome.failure << std::endl;
      return;
    }
    ++totals_.passed;
    if (arguments_.verbose) std::cout << "passed " << where << ": " << outcome.error << std::endl;
  }

  const Arguments& arguments_;
  Totals totals_;
};

int run(const Arguments& arguments) {
  Replay replay(arguments);
  for (const fs::path& folder : folders_of(arguments)) replay.folder(folder);
  const Totals& totals = replay.totals();
  std::cout << totals.passed << " passed, " << totals.failed << " failed";
  if (totals.skipped > 0) std::cout << ", " << totals.skipped << " skipped";
  std::cout << std::endl;
  if (totals.passed + totals.failed == 0) {
    std::cerr << "model_replay: no model of a known model_type" << std::endl;
    return 2;
  }
  return totals.failed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(std::vector<std::string>(argv + 1, argv + argc)));
  } catch (const std::invalid_argument& error) {
    std::cerr << "model_replay: " << error.what() << "\n" << kUsage << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "model_replay: " << error.what() << std::endl;
  }
  return 2;
}
