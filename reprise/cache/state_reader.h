// Reads a cache's state or legacy meta item by item and refuses whatever is not as its class needs it, so that every
// from_state is a list of what it expects.
// Threads: values of one call.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/kv_columns.h"
#include "reprise/cache/state.h"

namespace reprise::internal {

class StateReader {
 public:
  // `function` opens every message; `items` are the items' names, in order, and their exact number.
  // Throws: corrupt_data when `state` is not a list of that many items.
  StateReader(std::string function, const State& state, std::initializer_list<const char*> items);

  // The item as an integer in [low, high]. Throws: corrupt_data.
  int integer(std::size_t item, int low, int high) const;

  // Throws: corrupt_data.
  bool boolean(std::size_t item) const;
  // An int32 array of one axis and `count` values (none: any number), evaluated. Throws: corrupt_data.
  std::vector<int> integers(std::size_t item, std::optional<int> count = {}) const;

  // Keys [B, Hkv, W, D] and values [B, Hkv, W, Dv] of floating dtypes, or the triples that `quantization` makes of
  // such; B, Hkv and D at least 1 (B at least 0 if `may_lack_rows`); none when both items are null. Throws:
  // corrupt_data.
  std::optional<KVColumns> columns(std::size_t keys_item, std::size_t values_item,
                                   const std::optional<KVQuantization>& quantization = {},
                                   bool may_lack_rows = false) const;
  KVQuantization quantization(std::size_t group_size_item, std::size_t bits_item) const;

  bool is_null(std::size_t item) const { return (*items_)[item].is_null(); }
  const State& item(std::size_t item) const { return (*items_)[item]; }

  // "item 2 (offset)" for messages.
  std::string item_name(std::size_t item) const;
  [[noreturn]] void fail(const std::string& what, const std::string& got) const;

 private:
  // The item's tensors: one, or a triple. Their common number of columns etc. is checked by columns().
  std::vector<mlx::core::array> tensors(std::size_t item, const std::optional<KVQuantization>& quantization,
                                        bool may_lack_rows) const;

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
  // The item's text, which must be `True` or `False`. Throws: corrupt_data.
  bool boolean(std::size_t item) const;
  KVQuantization quantization(std::size_t group_size_item, std::size_t bits_item) const;

 private:
  [[noreturn]] void fail(const std::string& what, const std::string& got) const;

  std::string function_;
  std::vector<const char*> names_;
  Meta::List items_;
};

// "a float32 array of shape (1,2,3,4)", "the integer 7", "null", …
std::string describe(const State& state);

}  // namespace reprise::internal
