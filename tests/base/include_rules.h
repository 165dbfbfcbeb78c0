// The rules of the house about files: who includes whom (tools/layers.txt), no cycles, everything listed in a
// CMakeLists.txt. All work on strings, so that planted violations can be tested.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace reprise::house {

struct SourceFile {
  std::string path;  // from the repository's root, "reprise/cache/kv_cache.h"
  std::string text;
};

struct Room {
  std::vector<std::string> rooms;           // whose public headers it may include, itself apart
  std::vector<std::string> header_outside;  // words
  std::vector<std::string> source_outside;  // words
};

// tools/layers.txt as data.
struct LayerTable {
  std::map<std::string, std::vector<std::string>> words;  // word → include names or beginnings
  std::vector<std::string> order;                         // the rooms' names, top to bottom
  std::map<std::string, Room> rooms;

  // The room a path lies in, the longest name first; empty if in none.
  std::string room_of(std::string_view path) const;
};

// Throws std::runtime_error on a line that cannot be read, an unknown word, or a room that names one not above it.
LayerTable parse_layers(std::string_view text);

// Rows "| `reprise/ROOM` | … | rooms |" of ARCHITECTURE.md, and python's, that say something else than the table.
std::vector<std::string> architecture_mismatches(const LayerTable& table, std::string_view architecture);

struct Include {
  int line;
  std::string name;
  bool quoted;
};
std::vector<Include> includes_of(std::string_view text);

// What the calls in a CMakeLists.txt say, comments dropped: function name, then its arguments. An argument made with
// the variable of a foreach around it stands once for every value.
std::vector<std::vector<std::string>> cmake_calls(std::string_view text);

// The files named after HEADERS in reprise_room calls, as paths from the root.
std::set<std::string> public_headers(const std::vector<SourceFile>& cmake_lists);

// Each finding is one line "path:line: what".
std::vector<std::string> include_violations(const LayerTable& table, const std::vector<SourceFile>& files,
                                            const std::set<std::string>& public_headers);
std::vector<std::string> include_cycles(const std::vector<SourceFile>& files);

// Files that no CMakeLists.txt of their folder or of one above names.
std::vector<std::string> unlisted_files(const std::vector<SourceFile>& cmake_lists,
                                        const std::vector<std::string>& paths);

// Targets that link plain `mlx` and so miss OpenBLAS.
std::vector<std::string> plain_mlx_links(const std::vector<SourceFile>& cmake_lists);

}  // namespace reprise::house
