// The command line of a measuring program: `--name VALUE …`, each name known and with a default. Threads: one.
#pragma once

#include <charconv>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

namespace reprise::bench {

class Flags {
 public:
  // By name, without the dashes.
  explicit Flags(std::map<std::string, std::string> defaults) : values_(std::move(defaults)) {}

  // False, after a line on standard error: what is there is no such list.
  bool read(int argc, char** argv) {
    bool good = argc % 2 == 1;
    for (int i = 1; good && i < argc; i += 2) {
      const auto found = std::strncmp(argv[i], "--", 2) == 0 ? values_.find(argv[i] + 2) : values_.end();
      good = found != values_.end();
      if (good) found->second = argv[i + 1];
    }
    for (const auto& [name, text] : values_) good = good && (!is_number(defaults_.at(name)) || is_number(text));
    if (good) return true;
    std::string usage = std::string("usage: ") + argv[0];
    for (const auto& [name, text] : defaults_) usage += " [--" + name + " " + (text.empty() ? "TEXT" : text) + "]";
    std::fprintf(stderr, "%s\n", usage.c_str());
    return false;
  }

  const std::string& text(const std::string& name) const { return values_.at(name); }
  // A positive whole number. Requires: the default is one.
  int number(const std::string& name) const {
    int number = 0;
    const std::string& text = values_.at(name);
    std::from_chars(text.data(), text.data() + text.size(), number);
    return number;
  }

 private:
  static bool is_number(const std::string& text) {
    int number = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
    return result.ec == std::errc() && result.ptr == text.data() + text.size() && number >= 1;
  }

  std::map<std::string, std::string> values_;
  std::map<std::string, std::string> defaults_ = values_;
};

}  // namespace reprise::bench
