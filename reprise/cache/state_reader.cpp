#include "reprise/cache/state_reader.h"

#include <charconv>
#include <sstream>
#include <utility>

#include "mlx/dtype.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "reprise/base/error.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

std::string range(int low, int high) {
  return low == high ? "be " + std::to_string(low)
                     : "lie in [" + std::to_string(low) + ", " + std::to_string(high) + "]";
}

KVQuantization read_quantization(const std::string& function, int group_size, int bits) {
  const KVQuantization quantization{group_size, bits};
  try {
    check_quantization(function, quantization);
  } catch (const Error& error) {
    throw Error(ErrorCode::corrupt_data, error.what());
  }
  return quantization;
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

bool StateReader::boolean(std::size_t item) const {
  const auto* value = (*items_)[item].as_bool();
  if (!value) fail(item_name(item) + " must be true or false", describe((*items_)[item]));
  return *value;
}

std::vector<int> StateReader::integers(std::size_t item, std::optional<int> count) const {
  const auto* array = (*items_)[item].as_array();
  const bool fits = array && array->ndim() == 1 && array->dtype() == mx::int32 && (!count || array->shape(0) == *count);
  if (!fits) {
    fail(item_name(item) + " must be an int32 array of " + (count ? std::to_string(*count) : "any number of") +
             " values",
         describe((*items_)[item]));
  }
  if (array->size() == 0) return {};
  mx::array dense = mx::contiguous(*array);
  dense.eval();
  return std::vector<int>(dense.data<int>(), dense.data<int>() + dense.size());
}

std::optional<KVColumns> StateReader::columns(std::size_t keys_item, std::size_t values_item,
                                              const std::optional<KVQuantization>& quantization,
                                              bool may_lack_rows) const {
  if (is_null(keys_item) && is_null(values_item)) return std::nullopt;
  std::vector<mx::array> all = tensors(keys_item, quantization, may_lack_rows);
  if (all.front().shape(3) < 1) fail(item_name(keys_item) + " must have a head size of at least 1", "0");
  for (mx::array& tensor : tensors(values_item, quantization, may_lack_rows)) all.push_back(std::move(tensor));
  for (const mx::array& tensor : all) {
    for (int axis = 0; axis < 3; ++axis) {
      if (tensor.shape(axis) == all.front().shape(axis)) continue;
      std::ostringstream got;
      for (const mx::array& each : all) got << (&each == &all.front() ? "" : " and ") << each.shape();
      fail(item_name(keys_item) + " and " + item_name(values_item) + " must agree in B, Hkv and columns", got.str());
    }
  }
  return KVColumns(std::move(all), quantization);
}

KVQuantization StateReader::quantization(std::size_t group_size_item, std::size_t bits_item) const {
  return read_quantization(function_, integer(group_size_item, 1, 128), integer(bits_item, 1, 8));
}

std::vector<mx::array> StateReader::tensors(std::size_t item, const std::optional<KVQuantization>& quantization,
                                            bool may_lack_rows) const {
  const State& state = (*items_)[item];
  const auto is_buffer = [&](const mx::array* array) {
    return array && array->ndim() == 4 && (array->shape(0) > 0 || may_lack_rows) && array->shape(1) > 0;
  };
  if (!quantization) {
    const auto* array = state.as_array();
    if (!is_buffer(array) || !mx::issubdtype(array->dtype(), mx::floating)) {
      fail(item_name(item) + " must be a floating array [B, Hkv, columns, D]", describe(state));
    }
    return {*array};
  }
  std::vector<mx::array> triple;
  if (const auto* list = state.as_list()) {
    for (const State& member : *list) {
      if (is_buffer(member.as_array())) triple.push_back(*member.as_array());
    }
    if (list->size() != triple.size()) triple.clear();
  }
  const bool fits = triple.size() == 3 && triple[0].dtype() == mx::uint32 &&
                    mx::issubdtype(triple[1].dtype(), mx::floating) && triple[1].dtype() != mx::float64 &&
                    triple[2].dtype() == triple[1].dtype() && triple[2].shape(3) == triple[1].shape(3) &&
                    std::int64_t{triple[0].shape(3)} * 32 ==
                        std::int64_t{triple[1].shape(3)} * quantization->group_size * quantization->bits;
  if (!fits) {
    fail(item_name(item) + " must be packed uint32, scales and biases [B, Hkv, columns, …] of groups of " +
             std::to_string(quantization->group_size) + " and " + std::to_string(quantization->bits) + " bits",
         describe(state));
  }
  return triple;
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

bool MetaReader::boolean(std::size_t item) const {
  const auto* text = items_[item].as_string();
  if (text && (*text == "True" || *text == "False")) return *text == "True";
  fail(std::string("meta ") + names_[item] + " must be True or False", text ? "\"" + *text + "\"" : "a list");
}

KVQuantization MetaReader::quantization(std::size_t group_size_item, std::size_t bits_item) const {
  return read_quantization(function_, integer(group_size_item, 1, 128), integer(bits_item, 1, 8));
}

void MetaReader::fail(const std::string& what, const std::string& got) const {
  throw Error(ErrorCode::corrupt_data, "[" + function_ + "] " + what + ", but got " + got);
}

}  // namespace reprise::internal
