// Contents with a number and a size, counted while they live, prompts, and a clock that stands still. Threads: one.
#pragma once

#include <memory>
#include <numeric>
#include <string>

#include "reprise/prefix/prefix_tree.h"

namespace reprise {

struct Numbered final : Stored {
  Numbered(int the_number, std::size_t the_size) : number(the_number), size(the_size) { ++alive; }
  Numbered(const Numbered&) = delete;
  Numbered& operator=(const Numbered&) = delete;
  ~Numbered() override { --alive; }
  std::size_t nbytes() const override { return size; }

  int number;
  std::size_t size;
  static inline int alive = 0;
};

inline StoredRef numbered(int number, std::size_t size) { return std::make_shared<Numbered>(number, size); }
inline int number_of(const StoredRef& content) { return content ? static_cast<const Numbered&>(*content).number : -1; }

struct StillClock final : Clock {
  TimePoint now() const override { return time; }
  TimePoint time{};
};

// Contents carry the number begin * 1000 + end and one byte a token.
inline PrefixTree::MakeContent by_range(int factor = 1) {
  return [factor](int begin, int end) {
    return numbered(begin * 1000 + end, static_cast<std::size_t>((end - begin) * factor));
  };
}

inline PrefixTreeOptions blocks_of(int block_size) {
  PrefixTreeOptions options;
  options.block_size = block_size;
  return options;
}

inline PrefixTreeOptions blocks_of(int block_size, std::size_t max_bytes) {
  PrefixTreeOptions options = blocks_of(block_size);
  options.max_bytes = max_bytes;
  return options;
}

inline Tokens counting(int count, int from = 0) {
  Tokens tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}

// "begin-end:number" of each block.
inline std::string text_of(const PrefixTree::Match& match) {
  std::string text;
  for (const auto& block : match.blocks) {
    text += (text.empty() ? "" : " ") + std::to_string(block.begin) + "-" + std::to_string(block.end) + ":" +
            std::to_string(number_of(block.content));
  }
  return text;
}

}  // namespace reprise
