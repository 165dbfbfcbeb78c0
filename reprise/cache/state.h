// A cache's state as an ordered tree of arrays and scalars: what files hold and what generation evaluates.
// Threads: values; arrays follow MLX's rule.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/array.h"

namespace reprise {

class State {
 public:
  using List = std::vector<State>;
  using Value = std::variant<std::monostate, mlx::core::array, std::int64_t, bool, double, std::string, List>;

  State() = default;  // null
  State(mlx::core::array value) : value_(std::move(value)) {}
  State(int value) : value_(std::int64_t{value}) {}
  State(std::int64_t value) : value_(value) {}
  State(bool value) : value_(value) {}
  State(double value) : value_(value) {}
  State(std::string value) : value_(std::move(value)) {}
  State(const char* value) : value_(std::string(value)) {}
  State(List value) : value_(std::move(value)) {}

  const Value& value() const { return value_; }
  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  const mlx::core::array* as_array() const { return std::get_if<mlx::core::array>(&value_); }
  const std::int64_t* as_int() const { return std::get_if<std::int64_t>(&value_); }
  const bool* as_bool() const { return std::get_if<bool>(&value_); }
  const std::string* as_string() const { return std::get_if<std::string>(&value_); }
  const List* as_list() const { return std::get_if<List>(&value_); }

  // Appends every array of the tree, in order.
  void collect_arrays(std::vector<mlx::core::array>& out) const;

 private:
  Value value_;
};

// Text metadata of the older file layout: a string or a list, nested.
class Meta {
 public:
  using List = std::vector<Meta>;
  Meta() = default;  // ""
  Meta(std::string value) : value_(std::move(value)) {}
  Meta(const char* value) : value_(std::string(value)) {}
  Meta(List value) : value_(std::move(value)) {}

  const std::string* as_string() const { return std::get_if<std::string>(&value_); }
  const List* as_list() const { return std::get_if<List>(&value_); }

 private:
  std::variant<std::string, List> value_;
};

}  // namespace reprise
