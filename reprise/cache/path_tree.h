// Names such as "3.0.12" as a tree: what both file layouts keep their states and metas in.
// Threads: values.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace reprise::internal {

// A decimal index without leading zeros, none for anything else.
std::optional<std::size_t> parse_index(std::string_view text);

// The part before the first dot and the rest; the rest is none when there is no dot.
std::pair<std::string_view, std::optional<std::string_view>> split_first(std::string_view path);

// Components joined by dots. Throws: corrupt_data for more of them than any cache nests.
std::vector<std::string> split_path(std::string_view path);

[[noreturn]] void fail_path(std::string_view path, const std::string& what);

// A node is a leaf or has items; an index that is missing between items reads as a node without either.
template <typename Leaf>
class PathTree {
 public:
  // Throws: corrupt_data for a component that is no index, and for a path that is both a leaf and a list.
  void insert(std::string_view path, Leaf leaf) {
    PathTree* node = this;
    for (const std::string& component : split_path(path)) {
      const std::optional<std::size_t> index = parse_index(component);
      if (!index) fail_path(path, "every part must be a decimal index");
      if (node->leaf_) fail_path(path, "a leaf must not have items");
      node = &node->items_[*index];
    }
    if (node->leaf_ || !node->items_.empty()) fail_path(path, "a list must not be a leaf");
    node->leaf_ = std::move(leaf);
  }

  const std::optional<Leaf>& leaf() const { return leaf_; }
  const std::map<std::size_t, PathTree>& items() const { return items_; }

  // The item at `index`; a node without leaf and items when there is none.
  const PathTree& item(std::size_t index) const {
    static const PathTree nothing;
    const auto found = items_.find(index);
    return found == items_.end() ? nothing : found->second;
  }

  // The tree as nested values: `to_leaf(Leaf)` and `to_list(std::vector<Value>)` make a Value. `path`: this node's.
  template <typename Value, typename ToLeaf, typename ToList>
  Value convert(const std::string& path, const ToLeaf& to_leaf, const ToList& to_list) const {
    if (leaf_) return to_leaf(*leaf_);
    std::vector<Value> values;
    for (const auto& [index, item] : items_) {
      const std::string name = path + "." + std::to_string(index);
      // Empty lists leave no trace, so some holes are right; a damaged index must not make us allocate.
      if (index > values.size() + kMaxHoles) fail_path(name, "a list must not have so many holes");
      while (values.size() < index) values.push_back(to_list({}));
      values.push_back(item.template convert<Value>(name, to_leaf, to_list));
    }
    return to_list(std::move(values));
  }

 private:
  static constexpr std::size_t kMaxHoles = 16;

  std::optional<Leaf> leaf_;
  std::map<std::size_t, PathTree> items_;
};

}  // namespace reprise::internal
