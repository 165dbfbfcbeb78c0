#include "reprise/cache/path_tree.h"

#include <charconv>

#include "reprise/base/error.h"

namespace reprise::internal {

namespace {

constexpr std::size_t kMaxDepth = 32;

}  // namespace

std::optional<std::size_t> parse_index(std::string_view text) {
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (text.size() > 1 && text.front() == '0') return std::nullopt;
  return value;
}

std::pair<std::string_view, std::optional<std::string_view>> split_first(std::string_view path) {
  const std::size_t dot = path.find('.');
  if (dot == std::string_view::npos) return {path, std::nullopt};
  return {path.substr(0, dot), path.substr(dot + 1)};
}

std::vector<std::string> split_path(std::string_view path) {
  std::vector<std::string> components;
  std::optional<std::string_view> rest = path;
  while (rest) {
    if (components.size() == kMaxDepth) fail_path(path, "a path must not nest so deeply");
    const auto [component, next] = split_first(*rest);
    components.emplace_back(component);
    rest = next;
  }
  return components;
}

void fail_path(std::string_view path, const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[load_prompt_cache] " + what + ", but got \"" + std::string(path) + "\"");
}

}  // namespace reprise::internal
