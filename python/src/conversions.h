// Python's values and ours.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/state.h"
#include "reprise/nn/keys_values.h"

namespace reprise::python {

// None, mx.array, bool, int, float, str; lists become tuples.
nanobind::object to_python(const State& state);
// None, mx.array, bool, whatever is an integer, float, str, and lists or tuples of such.
// Throws: TypeError for anything else, naming it; ValueError for an integer of more than 64 bits.
State to_state(nanobind::handle value);
// Numbers of rows for a state: None, or integers in an array or a list, as int32. Throws: TypeError, ValueError.
State to_counts(nanobind::handle value, const char* name);

// (keys, values): arrays, or triples of such.
nanobind::tuple to_python(const KeysValues& keys_values);
// None, "causal" or an array.
nanobind::object to_python(const Mask& mask);

// A list, a tuple or any iterable of integers, or an array of integers with one axis, which is evaluated.
// Throws: TypeError, ValueError; `name` is the argument's.
std::vector<int> to_ints(nanobind::handle value, const char* name);
// Empty for None.
std::vector<int> to_ints_or_none(nanobind::handle value, const char* name);

// int32 [n].
mlx::core::array int_array(const std::vector<int>& values);

}  // namespace reprise::python
