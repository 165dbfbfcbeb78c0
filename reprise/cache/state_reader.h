// Reads a cache's state or legacy meta item by item and refuses whatever is not as its class needs it, so that every
// from_state is a list of what it expects.
// Threads: values of one call.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/state.h"

namespace reprise::internal {

class StateReader {
 public:
  // `function` opens every message; `items` are the items' names, in order, and their exact number.
  // Throws: corrupt_data when `state` is not a list of that many items.
  StateReader(std::string function, const State& state, std::initializer_list<const char*> items);

  // The item as an integer in [low, high]. Throws: corrupt_data.
  int integer(std::size_t item, int low, int high) const;

  struct Buffers {
    mlx::core::array keys;
    mlx::core::array values;
  };
  // Keys [B, Hkv, W, D] and values [B, Hkv, W, Dv] of floating dtypes, with B, Hkv, D and Dv at least 1; none when both
  // items are null. Throws: corrupt_data.
  std::optional<Buffers> keys_values(std::size_t keys_item, std::size_t values_item) const;

  // "item 2 (offset)" for messages.
  std::string item_name(std::size_t item) const;
  [[noreturn]] void fail(const std::string& what, const std::string& got) const;

 private:
  const mlx::core::array& buffer(std::size_t item) const;

  std::string function_;
  std::vector<const char*> names_;
  const State::List* items_;
};

class MetaReader {
 public:
  // A meta of no items is "" or an empty list. Throws: corrupt_data when `meta` is not a list of that many items.
  MetaReader(std::string function, const Meta& meta, std::initializer_list<const char*> items);

  // The item's text as a decimal integer in [low, high]. Throws: corrupt_data.
  int integer(std::size_t item, int low, int high) const;

 private:
  [[noreturn]] void fail(const std::string& what, const std::string& got) const;

  std::string function_;
  std::vector<const char*> names_;
  Meta::List items_;
};

// "a float32 array of shape (1,2,3,4)", "the integer 7", "null", …
std::string describe(const State& state);

}  // namespace reprise::internal
