#include "reprise/cache/state_reader.h"

#include <charconv>
#include <sstream>
#include <utility>

#include "mlx/dtype.h"
#include "mlx/utils.h"
#include "reprise/base/error.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

std::string range(int low, int high) {
  return low == high ? "be " + std::to_string(low)
                     : "lie in [" + std::to_string(low) + ", " + std::to_string(high) + "]";
}

}  // namespace

std::string describe(const State& state) {
  std::ostringstream text;
  if (const auto* array = state.as_array()) {
    text << "a " << array->dtype() << " array of shape " << array->shape();
  } else if (const auto* integer = state.as_int()) {
    text << "the integer " << *integer;
  } else if (const auto* boolean = state.as_bool()) {
    text << (*boolean ? "true" : "false");
  } else if (const auto* string = state.as_string()) {
    text << '"' << *string << '"';
  } else if (const auto* list = state.as_list()) {
    text << "a list of " << list->size() << " items";
  } else if (state.is_null()) {
    text << "null";
  } else {
    text << "a real number";
  }
  return text.str();
}

StateReader::StateReader(std::string function, const State& state, std::initializer_list<const char*> items)
    : function_(std::move(function)), names_(items), items_(state.as_list()) {
  if (!items_ || items_->size() != names_.size()) {
    std::string wanted;
    for (const char* name : names_) wanted += (wanted.empty() ? "" : ", ") + std::string(name);
    fail("the state must be a list of " + std::to_string(names_.size()) + " items (" + wanted + ")", describe(state));
  }
}

int StateReader::integer(std::size_t item, int low, int high) const {
  const State& state = (*items_)[item];
  const auto* value = state.as_int();
  if (!value || *value < low || *value > high) {
    fail(item_name(item) + " must be an integer and " + range(low, high), describe(state));
  }
  return static_cast<int>(*value);
}

std::optional<StateReader::Buffers> StateReader::keys_values(std::size_t keys_item, std::size_t values_item) const {
  if ((*items_)[keys_item].is_null() && (*items_)[values_item].is_null()) return std::nullopt;
  Buffers buffers{buffer(keys_item), buffer(values_item)};
  for (int axis = 0; axis < 3; ++axis) {
    if (buffers.keys.shape(axis) != buffers.values.shape(axis)) {
      fail(item_name(keys_item) + " and " + item_name(values_item) + " must agree in B, Hkv and columns",
           describe((*items_)[keys_item]) + " and " + describe((*items_)[values_item]));
    }
  }
  return buffers;
}

const mx::array& StateReader::buffer(std::size_t item) const {
  const State& state = (*items_)[item];
  const auto* array = state.as_array();
  const bool fits = array && array->ndim() == 4 && array->shape(0) > 0 && array->shape(1) > 0 && array->shape(3) > 0 &&
                    mx::issubdtype(array->dtype(), mx::floating);
  if (!fits) fail(item_name(item) + " must be a floating array [B, Hkv, columns, D]", describe(state));
  return *array;
}

std::string StateReader::item_name(std::size_t item) const {
  return "item " + std::to_string(item) + " (" + names_[item] + ")";
}

void StateReader::fail(const std::string& what, const std::string& got) const {
  throw Error(ErrorCode::corrupt_data, "[" + function_ + "] " + what + ", but got " + got);
}

MetaReader::MetaReader(std::string function, const Meta& meta, std::initializer_list<const char*> items)
    : function_(std::move(function)), names_(items) {
  if (const auto* list = meta.as_list()) items_ = *list;
  const auto* text = meta.as_string();
  if ((text && !text->empty()) || items_.size() != names_.size()) {
    fail("the meta must have " + std::to_string(names_.size()) + " items",
         text ? "\"" + *text + "\"" : std::to_string(items_.size()) + " items");
  }
}

int MetaReader::integer(std::size_t item, int low, int high) const {
  const auto* text = items_[item].as_string();
  int value = 0;
  bool parsed = false;
  if (text) {
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
    parsed = error == std::errc() && end == text->data() + text->size() && !text->empty();
  }
  if (!parsed || value < low || value > high) {
    fail(std::string("meta ") + names_[item] + " must be a decimal integer and " + range(low, high),
         text ? "\"" + *text + "\"" : "a list");
  }
  return value;
}

void MetaReader::fail(const std::string& what, const std::string& got) const {
  throw Error(ErrorCode::corrupt_data, "[" + function_ + "] " + what + ", but got " + got);
}

}  // namespace reprise::internal
