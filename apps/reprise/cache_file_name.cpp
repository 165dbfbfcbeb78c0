#include "apps/reprise/cache_file_name.h"

#include <string_view>

#include "apps/reprise/output.h"

namespace reprise::app {

std::string cache_file_name(const std::string& what, const std::string& text) {
  constexpr std::string_view kSuffix = ".safetensors";
  const bool has_suffix = text.ends_with(kSuffix);
  const auto path = has_suffix ? text.substr(0, text.size() - kSuffix.size()) : text;
  const auto stem = path.substr(path.rfind('/') + 1);  // npos + 1 is 0
  const bool names_no_file = stem.empty() || stem == "." || stem == ".." || (path == "-" && !has_suffix);
  if (names_no_file || text.find('\0') != std::string::npos) {
    throw UsageError(what + " must name a file, but got \"" + one_line(text) + "\"");
  }
  return path + std::string(kSuffix);
}

}  // namespace reprise::app
