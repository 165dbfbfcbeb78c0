// Values stored under token sequences, one trie per model name: finds the longest stored prefix of a sequence and the
// shortest stored extension of what it shares with the stored ones. mlx-lm's class of that name; the empty sequence is
// a key like any other, and a prefix of every other.
// Every leaf holds a value: removing one removes the branch that led to it. Costs are linear in the tokens walked plus,
// for an extension, the nodes visited. Threads: one object belongs to one thread at a time. Owns: the values.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "reprise/base/tokens.h"

namespace reprise {

struct PromptTrieResult {
  std::optional<Tokens> exact;    // the key itself; the others are then not looked for
  std::optional<Tokens> shorter;  // longest stored proper prefix
  // Shortest stored key that begins with the first `common_prefix` tokens, when those are at least one; among equally
  // short ones the first in order of ids. It may be `shorter`.
  std::optional<Tokens> longer;
  std::size_t common_prefix = 0;  // tokens shared with any stored key; 0 for an exact match
};

template <typename Value>
class PromptTrie {
 public:
  PromptTrie() = default;
  PromptTrie(PromptTrie&&) noexcept = default;
  PromptTrie& operator=(PromptTrie&&) = delete;
  ~PromptTrie() {
    for (auto& [model, root] : roots_) clear(root);
  }

  // Stores the value. Returns: the one that it replaces.
  std::optional<Value> add(const std::string& model, std::span<const TokenId> tokens, Value value) {
    Node* node = &roots_[model];
    for (const TokenId token : tokens) {
      std::unique_ptr<Node>& child = node->children[token];
      if (!child) {
        child = std::make_unique<Node>();
        child->parent = node;
        child->token = token;
      }
      node = child.get();
    }
    return std::exchange(node->value, std::optional<Value>(std::move(value)));
  }

  // Null when nothing is stored under exactly these tokens.
  Value* get(const std::string& model, std::span<const TokenId> tokens) {
    const auto root = roots_.find(model);
    if (root == roots_.end()) return nullptr;
    const auto [node, walked] = walk(root->second, tokens);
    return walked == tokens.size() && node->value ? &*node->value : nullptr;
  }

  // Takes the value out. Returns: none when nothing is stored under exactly these tokens.
  std::optional<Value> pop(const std::string& model, std::span<const TokenId> tokens) {
    const auto root = roots_.find(model);
    if (root == roots_.end()) return std::nullopt;
    const auto [node, walked] = walk(root->second, tokens);
    if (walked < tokens.size()) return std::nullopt;
    std::optional<Value> value = std::exchange(node->value, std::nullopt);
    prune(root, node);
    return value;
  }

  // Takes out the values at proper prefixes of at least `min_length` tokens. Returns: them with their lengths, shortest
  // first.
  std::vector<std::pair<std::size_t, Value>> pop_prefixes(const std::string& model, std::span<const TokenId> tokens,
                                                          std::size_t min_length = 0) {
    std::vector<std::pair<std::size_t, Value>> values;
    const auto root = roots_.find(model);
    if (root == roots_.end()) return values;
    Node* node = &root->second;
    for (std::size_t length = 0; length < tokens.size(); ++length) {
      if (length >= min_length && node->value) {
        values.emplace_back(length, std::move(*std::exchange(node->value, std::nullopt)));
      }
      const auto child = node->children.find(tokens[length]);
      if (child == node->children.end()) break;
      node = child->second.get();
    }
    prune(root, node);
    return values;
  }

  PromptTrieResult search(const std::string& model, std::span<const TokenId> tokens) const {
    PromptTrieResult result;
    const auto root = roots_.find(model);
    if (root == roots_.end()) return result;
    const Node* node = &root->second;
    const Node* last_value = nullptr;
    std::size_t walked = 0;
    for (; walked < tokens.size(); ++walked) {
      if (node->value) last_value = node;
      const auto child = node->children.find(tokens[walked]);
      if (child == node->children.end()) break;
      node = child->second.get();
    }
    if (node->value && walked == tokens.size()) {
      result.exact = Tokens(tokens.begin(), tokens.end());
      return result;
    }
    if (last_value) result.shorter = path_to(last_value);
    result.common_prefix = walked;
    if (walked > 0) result.longer = path_to(nearest_value(*node));
    return result;
  }

  // Nodes of all models, one per stored token and one per model: the size of what the trie itself holds.
  std::size_t num_nodes() const {
    std::size_t count = 0;
    for (const auto& [model, root] : roots_) {
      std::vector<const Node*> open = {&root};
      while (!open.empty()) {
        const Node* node = open.back();
        open.pop_back();
        ++count;
        for (const auto& [token, child] : node->children) open.push_back(child.get());
      }
    }
    return count;
  }

 private:
  struct Node {
    std::optional<Value> value;
    std::map<TokenId, std::unique_ptr<Node>> children;
    Node* parent = nullptr;  // null: the root
    TokenId token = 0;       // which child of its parent it is
  };
  using Roots = std::map<std::string, Node>;

  static std::pair<Node*, std::size_t> walk(Node& root, std::span<const TokenId> tokens) {
    Node* node = &root;
    std::size_t walked = 0;
    for (; walked < tokens.size(); ++walked) {
      const auto child = node->children.find(tokens[walked]);
      if (child == node->children.end()) break;
      node = child->second.get();
    }
    return {node, walked};
  }

  // Removes the branch that ends in `node` as far up as it led nowhere else, the model's root included.
  void prune(typename Roots::iterator root, Node* node) {
    while (!node->value && node->children.empty()) {
      Node* parent = node->parent;
      if (!parent) {
        roots_.erase(root);
        return;
      }
      parent->children.erase(node->token);
      node = parent;
    }
  }

  // Level by level, so that the first value found is one of the shortest.
  static const Node* nearest_value(const Node& from) {
    std::deque<const Node*> open = {&from};
    while (!open.front()->value) {
      for (const auto& [token, child] : open.front()->children) open.push_back(child.get());
      open.pop_front();
    }
    return open.front();
  }

  static Tokens path_to(const Node* node) {
    Tokens tokens;
    for (; node->parent; node = node->parent) tokens.push_back(node->token);
    return {tokens.rbegin(), tokens.rend()};
  }

  // A branch is as deep as its key is long: too deep for destructors that call each other.
  static void clear(Node& root) {
    std::vector<std::unique_ptr<Node>> open;
    const auto take_children = [&open](Node& node) {
      for (auto& [token, child] : node.children) open.push_back(std::move(child));
      node.children.clear();
    };
    take_children(root);
    while (!open.empty()) {
      const std::unique_ptr<Node> node = std::move(open.back());
      open.pop_back();
      take_children(*node);
    }
  }

  Roots roots_;
};

}  // namespace reprise
