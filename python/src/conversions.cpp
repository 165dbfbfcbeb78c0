#include "python/src/conversions.h"

#include <nanobind/stl/string.h>

#include <limits>

#include "mlx/ops.h"
#include "reprise/base/error.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace reprise::python {

namespace {

std::string name_of_type(nb::handle value) { return nb::cast<std::string>(value.type().attr("__name__")); }

[[noreturn]] void fail_type(const std::string& what, nb::handle value) {
  throw nb::type_error((what + ", but got " + name_of_type(value)).c_str());
}

nb::tuple triple(const QuantizedTensor& tensor) { return nb::make_tuple(tensor.packed, tensor.scales, tensor.biases); }

std::int64_t to_int64(nb::handle value) {
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) nb::raise_python_error();
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) throw nb::value_error("an integer must fit into 64 bits");
  return number;
}

int to_int(nb::handle value, const char* name) {
  if (!PyIndex_Check(value.ptr()) || PyBool_Check(value.ptr())) {
    fail_type(std::string(name) + " must hold integers", value);
  }
  const std::int64_t number = to_int64(value);
  if (number < std::numeric_limits<int>::min() || number > std::numeric_limits<int>::max()) {
    throw nb::value_error((std::string(name) + " must fit into 32 bits, but got " + std::to_string(number)).c_str());
  }
  return static_cast<int>(number);
}

std::vector<int> ints_of(mx::array values, const char* name) {
  if (values.ndim() != 1 || !mx::issubdtype(values.dtype(), mx::integer)) {
    throw nb::value_error((std::string(name) + " must be an array of integers with one axis").c_str());
  }
  values = mx::contiguous(mx::astype(values, mx::int32));
  values.eval();
  const int* data = values.data<int>();
  return std::vector<int>(data, data + values.size());
}

}  // namespace

nb::object to_python(const State& state) {
  struct Visitor {
    nb::object operator()(std::monostate) const { return nb::none(); }
    nb::object operator()(const mx::array& value) const { return nb::cast(value); }
    nb::object operator()(std::int64_t value) const { return nb::cast(value); }
    nb::object operator()(bool value) const { return nb::cast(value); }
    nb::object operator()(double value) const { return nb::cast(value); }
    nb::object operator()(const std::string& value) const { return nb::cast(value); }
    nb::object operator()(const State::List& values) const {
      nb::list items;
      for (const State& value : values) items.append(to_python(value));
      return nb::tuple(items);
    }
  };
  return std::visit(Visitor{}, state.value());
}

namespace {

// Deeper than any state; a list may hold itself.
constexpr int kMaxDepth = 16;

State to_state(nb::handle value, int depth) {
  if (value.is_none()) return {};
  if (nb::isinstance<mx::array>(value)) return nb::cast<mx::array>(value);
  if (PyBool_Check(value.ptr())) return nb::cast<bool>(value);
  if (nb::isinstance<nb::str>(value)) return nb::cast<std::string>(value);
  if (PyFloat_Check(value.ptr())) return nb::cast<double>(value);
  if (PyIndex_Check(value.ptr())) return to_int64(value);
  if (PyList_Check(value.ptr()) || PyTuple_Check(value.ptr())) {
    if (depth >= kMaxDepth) throw nb::value_error("a state must not be nested so deeply");
    State::List items;
    for (nb::handle item : nb::borrow<nb::sequence>(value)) items.push_back(to_state(item, depth + 1));
    return items;
  }
  fail_type("a state holds arrays, numbers, text, None, and lists of such", value);
}

}  // namespace

State to_state(nb::handle value) { return to_state(value, 0); }

State to_counts(nb::handle value, const char* name) {
  if (value.is_none()) return {};
  if (!nb::isinstance<mx::array>(value)) return int_array(to_ints(value, name));
  const auto counts = nb::cast<mx::array>(value);
  return mx::issubdtype(counts.dtype(), mx::integer) ? mx::astype(counts, mx::int32) : counts;
}

nb::tuple to_python(const KeysValues& keys_values) {
  if (const auto* dense = std::get_if<DenseKV>(&keys_values)) return nb::make_tuple(dense->keys, dense->values);
  const auto& quantized = std::get<QuantizedKV>(keys_values);
  return nb::make_tuple(triple(quantized.keys), triple(quantized.values));
}

nb::object to_python(const Mask& mask) {
  if (std::holds_alternative<NoMask>(mask)) return nb::none();
  if (std::holds_alternative<Causal>(mask)) return nb::str("causal");
  return nb::cast(std::get<mx::array>(mask));
}

std::vector<int> to_ints(nb::handle value, const char* name) {
  if (nb::isinstance<mx::array>(value)) return ints_of(nb::cast<mx::array>(value), name);
  if (nb::isinstance<nb::str>(value) || nb::isinstance<nb::bytes>(value) || !nb::hasattr(value, "__iter__")) {
    fail_type(std::string(name) + " must be a list of integers or an array", value);
  }
  std::vector<int> numbers;
  for (nb::handle item : nb::iter(value)) {
    if (nb::isinstance<mx::array>(item)) {
      const nb::object number = item.attr("item")();
      numbers.push_back(to_int(number, name));
    } else {
      numbers.push_back(to_int(item, name));
    }
  }
  return numbers;
}

std::vector<int> to_ints_or_none(nb::handle value, const char* name) {
  return value.is_none() ? std::vector<int>{} : to_ints(value, name);
}

mx::array int_array(const std::vector<int>& values) {
  return mx::array(values.begin(), mx::Shape{static_cast<int>(values.size())}, mx::int32);
}

}  // namespace reprise::python
