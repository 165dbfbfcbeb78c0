#include "tests/models/replay_program.h"

#include <algorithm>
#include <charconv>
#include <iostream>
#include <set>
#include <sstream>
#include <stdexcept>

#include "reprise/models/config.h"
#include "reprise/storage/model_files.h"

namespace reprise::test {

namespace fs = std::filesystem;

namespace {

constexpr const char* kUsage =
    " DIR [--only NAME...] [--part K/N] [--known] [--verbose]\n"
    "  --only NAME...  these folders of DIR (separated by spaces or commas)\n"
    "  --part K/N      the K-th of N parts of the folders\n"
    "  --known         skip models whose model_type is not known, and say so\n"
    "  --verbose       also tell what passed, and how near it came";

struct Arguments {
  std::string folder;
  std::set<std::string> only;
  std::size_t part = 1;
  std::size_t parts = 1;
  bool known = false;
  bool verbose = false;
};

void add_names(const std::string& list, std::set<std::string>& names) {
  std::istringstream stream(list);
  for (std::string name; std::getline(stream, name, ',');) {
    if (!name.empty()) names.insert(name);
  }
}

void read_part(const std::string& text, Arguments& arguments) {
  std::istringstream stream(text);
  char slash = 0;
  stream >> arguments.part >> slash >> arguments.parts;
  if (stream.fail() || !stream.eof() || slash != '/' || arguments.part < 1 || arguments.part > arguments.parts) {
    throw std::invalid_argument("--part needs K/N with K from 1 to N, but got " + text);
  }
}

Arguments parse(const std::vector<std::string>& words) {
  Arguments arguments;
  bool in_names = false;
  bool wants_names = false;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--only" || word.starts_with("--only=")) {
      in_names = wants_names = true;
      if (word.size() > 7) add_names(word.substr(7), arguments.only);
      continue;
    }
    if (in_names && !word.starts_with("-")) {
      add_names(word, arguments.only);
      continue;
    }
    in_names = false;
    if (word == "--part") {
      read_part(i + 1 < words.size() ? words[++i] : "nothing", arguments);
    } else if (word == "--known") {
      arguments.known = true;
    } else if (word == "--verbose") {
      arguments.verbose = true;
    } else if (word.starts_with("-")) {
      throw std::invalid_argument("unknown option " + word);
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

std::string name_of(const fs::path& folder) {
  return folder.filename().empty() ? folder.parent_path().filename().string() : folder.filename().string();
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
  for (const std::string& name : arguments.only) {
    if (std::none_of(folders.begin(), folders.end(), [&](const fs::path& folder) { return name_of(folder) == name; })) {
      throw std::runtime_error("no model \"" + name + "\" in " + arguments.folder);
    }
  }
  std::vector<fs::path> chosen;
  std::size_t index = 0;
  for (const fs::path& folder : folders) {
    if (!arguments.only.empty() && !arguments.only.contains(name_of(folder))) continue;
    if (index++ % arguments.parts == arguments.part - 1) chosen.push_back(folder);
  }
  if (folders.empty()) throw std::runtime_error(arguments.folder + " has no models");
  return chosen;
}

bool is_known(const fs::path& folder) {
  const internal::Config config(read_model_files(folder).config_json);
  const auto types = known_model_types();
  return std::find(types.begin(), types.end(), config.require_string("model_type")) != types.end();
}

int run(const std::string& program, const Arguments& arguments, const CheckFolder& check) {
  int passed = 0;
  int failed = 0;
  int skipped = 0;
  const auto folders = folders_of(arguments);
  for (const fs::path& folder : folders) {
    const std::string name = name_of(folder);
    const auto report = [&](const KitOutcome& outcome) {
      const std::string where = name + (outcome.name.empty() ? "" : " ") + outcome.name;
      if (!outcome.failure.empty()) {
        ++failed;
        std::cout << "FAILED " << where << ": " << outcome.failure << std::endl;
        return;
      }
      ++passed;
      if (arguments.verbose) std::cout << "passed " << where << ": " << outcome.error << std::endl;
    };
    try {
      if (arguments.known && !is_known(folder)) {
        ++skipped;
        std::cout << "SKIPPED " << name << ": its model_type is not known" << std::endl;
        continue;
      }
      check(folder, report);
    } catch (const std::exception& error) {
      report({"", error.what(), 0});
    }
  }
  std::cout << passed << " passed, " << failed << " failed";
  if (skipped > 0) std::cout << ", " << skipped << " skipped";
  std::cout << std::endl;
  if (passed + failed == 0 && !folders.empty()) {
    std::cerr << program << ": no model of a known model_type" << std::endl;
    return 2;
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace

int replay_folders(const std::string& program, const std::vector<std::string>& words, const CheckFolder& check) {
  try {
    return run(program, parse(words), check);
  } catch (const std::invalid_argument& error) {
    std::cerr << program << ": " << error.what() << "\nusage: " << program << kUsage << std::endl;
  } catch (const std::exception& error) {
    std::cerr << program << ": " << error.what() << std::endl;
  }
  return 2;
}

}  // namespace reprise::test
