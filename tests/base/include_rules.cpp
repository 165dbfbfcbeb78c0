#include "tests/base/include_rules.h"

#include <algorithm>
#include <functional>
#include <sstream>
#include <stdexcept>

namespace reprise::house {
namespace {

bool starts_with(std::string_view text, std::string_view beginning) {
  return text.substr(0, beginning.size()) == beginning;
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

bool contains(const std::vector<std::string>& list, const std::string& item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

std::vector<std::string> words_of(std::string_view text) {
  std::istringstream stream{std::string(text)};
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

std::string folder_of(std::string_view path) {
  const auto slash = path.rfind('/');
  return slash == std::string_view::npos ? "" : std::string(path.substr(0, slash));
}

// The folder that a room of the table lies in, with the slash.
std::string folder_of_room(std::string_view name) {
  const bool own = name == "python" || starts_with(name, "apps/");
  return (own ? "" : "reprise/") + std::string(name) + "/";
}

// `a/b/../c` → `a/c`.
std::string normalized(std::string_view path) {
  std::vector<std::string> parts;
  std::istringstream stream{std::string(path)};
  for (std::string part; std::getline(stream, part, '/');) {
    if (part == ".." && !parts.empty()) {
      parts.pop_back();
    } else if (part != ".") {
      parts.push_back(part);
    }
  }
  std::string result;
  for (const auto& part : parts) result += (result.empty() ? "" : "/") + part;
  return result;
}

// <vector>, <cstdint>: no folder, no suffix.
bool is_standard(std::string_view name) { return name.find_first_of("/.") == std::string_view::npos; }

bool matches(std::string_view name, const std::vector<std::string>& patterns) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return ends_with(pattern, "/") ? starts_with(name, pattern) : name == pattern;
  });
}

// The word that stands for an include from outside; empty if there is none.
std::string word_for(const LayerTable& table, std::string_view name) {
  for (const auto& [word, patterns] : table.words) {
    if (matches(name, patterns)) return word;
  }
  return "";
}

bool is_header(std::string_view path) { return ends_with(path, ".h"); }

// Empty if the include is allowed, else why not.
std::string objection(const LayerTable& table, const SourceFile& file, const Include& include,
                      const std::set<std::string>& public_headers) {
  const std::string name = table.room_of(file.path);
  const Room& room = table.rooms.at(name);
  const bool is_public = public_headers.count(file.path) != 0;

  if (const std::string other = table.room_of(include.name); !other.empty()) {
    if (!include.quoted) return "our own headers are included with quotes";
    if (other != name && !contains(room.rooms, other)) return name + " may not include " + other;
    const bool target_is_public = public_headers.count(include.name) != 0;
    if (other != name && !target_is_public) return "this header is private to " + other;
    if (other == name && is_public && !target_is_public) return "a public header includes a private one";
    return "";
  }
  if (is_standard(include.name)) return "";
  const std::string word = word_for(table, include.name);
  if (word.empty()) {
    return include.quoted ? "our own headers are named from the root of the repository, and lie in a room"
                          : "no word in tools/layers.txt stands for this header";
  }
  if (contains(room.header_outside, word)) return "";
  if (is_public) return "public headers of " + name + " may not show " + word;
  return contains(room.source_outside, word) ? "" : name + " may not include " + word;
}

}  // namespace

std::string LayerTable::room_of(std::string_view path) const {
  std::string best;
  for (const auto& name : order) {
    if (starts_with(path, folder_of_room(name)) && name.size() > best.size()) best = name;
  }
  return best;
}

LayerTable parse_layers(std::string_view text) {
  LayerTable table;
  std::istringstream stream{std::string(text)};
  int number = 0;
  for (std::string line; std::getline(stream, line);) {
    ++number;
    const auto fail = [&](const std::string& what) {
      throw std::runtime_error("layers.txt:" + std::to_string(number) + ": " + what);
    };
    line = line.substr(0, line.find('#'));
    if (words_of(line).empty()) continue;

    if (const auto equals = line.find('='); equals != std::string::npos) {
      const auto word = words_of(std::string_view(line).substr(0, equals));
      if (word.size() != 1) fail("one word belongs before the =");
      table.words[word[0]] = words_of(std::string_view(line).substr(equals + 1));
      continue;
    }
    const auto colon = line.find(':');
    const auto first_bar = line.find('|');
    const auto second_bar = first_bar == std::string::npos ? first_bar : line.find('|', first_bar + 1);
    if (colon == std::string::npos || second_bar == std::string::npos || colon > first_bar) {
      fail("expected ROOM: rooms | words | words");
    }
    const auto name = words_of(line.substr(0, colon));
    if (name.size() != 1) fail("one room belongs before the colon");
    Room room{words_of(line.substr(colon + 1, first_bar - colon - 1)),
              words_of(line.substr(first_bar + 1, second_bar - first_bar - 1)), words_of(line.substr(second_bar + 1))};
    for (const auto& other : room.rooms) {
      if (!contains(table.order, other)) fail(name[0] + " names " + other + ", which is not above it");
    }
    for (const auto* list : {&room.header_outside, &room.source_outside}) {
      for (const auto& word : *list) {
        if (table.words.count(word) == 0) fail("unknown word " + word);
      }
    }
    table.order.push_back(name[0]);
    table.rooms[name[0]] = std::move(room);
  }
  return table;
}

std::vector<std::string> architecture_mismatches(const LayerTable& table, std::string_view architecture) {
  std::vector<std::string> found;
  std::istringstream stream{std::string(architecture)};
  for (std::string line; std::getline(stream, line);) {
    const auto name_end = line.find("` |");
    const std::string beginning = starts_with(line, "| `python`") ? "| `" : "| `reprise/";
    if (!starts_with(line, beginning) || name_end == std::string::npos || line.size() < 3) continue;
    const std::string name = line.substr(beginning.size(), name_end - beginning.size());
    if (name.find('`') != std::string::npos) continue;  // several rooms in one row
    std::string cell = line.substr(line.rfind('|', line.size() - 2) + 1);
    std::replace(cell.begin(), cell.end(), ',', ' ');
    std::replace(cell.begin(), cell.end(), '|', ' ');
    auto named = words_of(cell);
    if (named == std::vector<std::string>{"–"}) named.clear();
    const auto room = table.rooms.find(name);
    if (room == table.rooms.end() || room->second.rooms != named) found.push_back(line);
  }
  return found;
}

std::vector<Include> includes_of(std::string_view text) {
  std::vector<Include> includes;
  std::istringstream stream{std::string(text)};
  int number = 0;
  for (std::string line; std::getline(stream, line);) {
    ++number;
    auto at = line.find_first_not_of(" \t");
    if (at == std::string::npos || line[at] != '#') continue;
    at = line.find_first_not_of(" \t", at + 1);
    if (at == std::string::npos || line.compare(at, 7, "include") != 0) continue;
    const auto open = line.find_first_of("<\"", at);
    if (open == std::string::npos) continue;
    const auto close = line.find(line[open] == '<' ? '>' : '"', open + 1);
    if (close == std::string::npos) continue;
    includes.push_back({number, line.substr(open + 1, close - open - 1), line[open] == '"'});
  }
  return includes;
}

std::vector<std::vector<std::string>> cmake_calls(std::string_view text) {
  std::string plain;
  std::istringstream stream{std::string(text)};
  for (std::string line; std::getline(stream, line);) plain += line.substr(0, line.find('#')) + "\n";

  std::vector<std::vector<std::string>> calls;
  std::string variable;             // of the foreach around a call
  std::vector<std::string> values;  // what it runs through
  std::size_t at = 0;
  while (true) {
    const auto open = plain.find('(', at);
    if (open == std::string::npos) break;
    const auto close = plain.find(')', open);
    if (close == std::string::npos) break;
    const auto name = words_of(std::string_view(plain).substr(at, open - at));
    std::string body = plain.substr(open + 1, close - open - 1);
    std::replace(body.begin(), body.end(), '"', ' ');
    auto arguments = words_of(body);
    at = close + 1;
    if (name.empty()) continue;

    if (name.back() == "foreach" && !arguments.empty()) {
      variable = "${" + arguments[0] + "}";
      values.assign(arguments.begin() + 1, arguments.end());
      continue;
    }
    if (name.back() == "endforeach") values.clear();
    std::vector<std::string> call{name.back()};
    for (const auto& argument : arguments) {
      const auto in = argument.find(variable);
      if (values.empty() || in == std::string::npos) {
        call.push_back(argument);
        continue;
      }
      for (const auto& value : values) call.push_back(std::string(argument).replace(in, variable.size(), value));
    }
    calls.push_back(std::move(call));
  }
  return calls;
}

std::set<std::string> public_headers(const std::vector<SourceFile>& cmake_lists) {
  static const std::set<std::string> kKeywords = {"SOURCES", "LINK", "PRIVATE_LINK"};
  std::set<std::string> headers;
  for (const auto& list : cmake_lists) {
    for (const auto& call : cmake_calls(list.text)) {
      if (call[0] != "reprise_room") continue;
      bool in_headers = false;
      for (const auto& argument : call) {
        if (argument == "HEADERS") {
          in_headers = true;
        } else if (kKeywords.count(argument) != 0) {
          in_headers = false;
        } else if (in_headers) {
          headers.insert(normalized(folder_of(list.path) + "/" + argument));
        }
      }
    }
  }
  return headers;
}

std::vector<std::string> include_violations(const LayerTable& table, const std::vector<SourceFile>& files,
                                            const std::set<std::string>& public_headers) {
  std::vector<std::string> found;
  for (const auto& file : files) {
    if (table.room_of(file.path).empty()) {
      found.push_back(file.path + ":1: this file lies in no room of tools/layers.txt");
      continue;
    }
    for (const auto& include : includes_of(file.text)) {
      const std::string why = objection(table, file, include, public_headers);
      if (!why.empty()) {
        found.push_back(file.path + ":" + std::to_string(include.line) + ": " + include.name + ": " + why);
      }
    }
  }
  return found;
}

std::vector<std::string> include_cycles(const std::vector<SourceFile>& files) {
  std::map<std::string, std::vector<std::string>> graph;
  for (const auto& file : files) {
    if (!is_header(file.path)) continue;
    for (const auto& include : includes_of(file.text)) graph[file.path].push_back(include.name);
  }
  std::vector<std::string> found;
  std::set<std::string> finished;
  std::vector<std::string> trail;
  const std::function<void(const std::string&)> visit = [&](const std::string& path) {
    const auto again = std::find(trail.begin(), trail.end(), path);
    if (again != trail.end()) {
      std::string cycle = path + ":1: headers include each other:";
      for (auto step = again; step != trail.end(); ++step) cycle += " " + *step + " →";
      found.push_back(cycle + " " + path);
      return;
    }
    if (graph.count(path) == 0 || finished.count(path) != 0) return;
    trail.push_back(path);
    for (const auto& next : graph[path]) visit(next);
    trail.pop_back();
    finished.insert(path);
  };
  for (const auto& file : files) visit(file.path);
  return found;
}

std::vector<std::string> unlisted_files(const std::vector<SourceFile>& cmake_lists,
                                        const std::vector<std::string>& paths) {
  std::set<std::string> listed;
  for (const auto& list : cmake_lists) {
    for (const auto& call : cmake_calls(list.text)) {
      // reprise_fuzz(NAME …) builds NAME.cpp.
      const std::string ending = call[0] == "reprise_fuzz" ? ".cpp" : "";
      for (const auto& argument : call) listed.insert(normalized(folder_of(list.path) + "/" + argument + ending));
    }
  }
  std::vector<std::string> found;
  for (const auto& path : paths) {
    if (listed.count(path) == 0) found.push_back(path + ":1: no CMakeLists.txt names this file");
  }
  return found;
}

std::vector<std::string> plain_mlx_links(const std::vector<SourceFile>& cmake_lists) {
  std::vector<std::string> found;
  for (const auto& list : cmake_lists) {
    for (const auto& call : cmake_calls(list.text)) {
      auto link =
          std::find_if(call.begin(), call.end(), [](const std::string& word) { return ends_with(word, "LINK"); });
      if (call[0] == "target_link_libraries") link = call.begin();
      if (std::find(link, call.end(), "mlx") != call.end()) {
        found.push_back(list.path + ":1: " + call[0] + " links mlx without OpenBLAS: reprise::mlx is meant");
      }
    }
  }
  return found;
}

}  // namespace reprise::house
