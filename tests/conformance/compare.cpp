#include "tests/conformance/compare.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "mlx/ops.h"
#include "tests/conformance/compare_arrays.h"

namespace reprise::conformance {

namespace mx = mlx::core;

namespace {

using Differences = std::vector<std::string>;

// Where floating-point work is done and the trace states nothing (README, "Tolerances").
constexpr double kComputedTolerance = 1e-5;

constexpr std::array<std::string_view, 21> kKnown = {
    "error",   "python_error", "keys",     "values", "in_keys", "in_values",   "valid",
    "compare", "tol",          "mask",     "array",  "result",  "can_trim",    "metadata",
    "after",   "state_v2",     "state_v1", "out",    "classes", "dequantized", "queries_after"};

bool is_known(const std::string& field) {
  // `upstream_mask` is what mlx-lm answers in place of the right mask; `quantized` is compared below.
  return field == "upstream_mask" || field == "quantized" || field == "layers" ||
         std::find(kKnown.begin(), kKnown.end(), field) != kKnown.end();
}

void add(Differences& out, const std::string& where, const std::string& what) {
  if (!what.empty()) out.push_back(where + ": " + what);
}

ArrayRules rules_of(const Json& expect, const Family& family) {
  ArrayRules rules;
  rules.tolerance = expect.value("tol", 0.0);
  if (const auto compare = expect.find("compare"); compare != expect.end()) {
    if (*compare != "token_set") throw std::runtime_error("unknown way of comparing " + compare->dump());
    rules.token_set = true;
  }
  if (expect.contains("valid")) rules.valid = family.array(expect["valid"]);
  return rules;
}

void compare_named(const Observation& got, const Json& expect, const Family& family, const std::string& name,
                   const ArrayRules& rules, Differences& out) {
  if (!expect.contains(name)) return;
  const Json& wanted = expect[name];
  const std::vector<std::string> names =
      wanted.is_array() ? wanted.get<std::vector<std::string>>() : std::vector{wanted.get<std::string>()};
  const auto found = got.arrays.find(name);
  const std::size_t count = found == got.arrays.end() ? 0 : found->second.size();
  if (count != names.size()) {
    out.push_back(name + ": got " + std::to_string(count) + " arrays, want " + std::to_string(names.size()));
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::string where = count == 1 ? name : name + "[" + std::to_string(i) + "]";
    add(out, where, compare_arrays(found->second[i], family.array(names[i]), rules));
  }
}

std::string mask_kind(const Mask& mask) {
  return std::holds_alternative<NoMask>(mask) ? "null" : std::holds_alternative<Causal>(mask) ? "causal" : "array";
}

void compare_mask(const Observation& got, const Json& wanted, const Family& family, Differences& out) {
  const std::string kind = wanted.at("kind");
  const std::string got_kind = got.mask ? mask_kind(*got.mask) : "none at all";
  if (kind != got_kind) {
    out.push_back("mask: got kind " + got_kind + ", want " + kind);
  } else if (kind == "array") {
    ArrayRules rules;
    if (wanted.contains("care")) rules.care = family.array(wanted["care"]);
    const mx::array& mask = std::get<mx::array>(*got.mask);
    mx::array wanted_mask = family.array(wanted["array"]);
    // Some cases record the mask of a single cache with a batch axis of 1.
    if (wanted_mask.ndim() == 3 && wanted_mask.shape(0) == 1 && mask.ndim() == 2)
      wanted_mask = mx::squeeze(wanted_mask, 0);
    add(out, "mask", compare_arrays(mask, wanted_mask, rules));
  }
}

void compare_entry(const Observation& got, const Json& wanted, const Family& family, const ArrayRules& rules,
                   Differences& out) {
  if (!got.entry) {
    out.push_back("array: the step gives none");
  } else if (wanted.is_null() != !*got.entry) {
    out.push_back(wanted.is_null() ? "array: got one, want unset" : "array: got unset, want one");
  } else if (*got.entry) {
    add(out, "array", compare_arrays(**got.entry, family.array(wanted), rules));
  }
}

std::string leaf_text(const State& state) {
  if (const auto* array = state.as_array()) return describe(*array);
  if (const auto* integer = state.as_int()) return std::to_string(*integer);
  if (const auto* boolean = state.as_bool()) return *boolean ? "true" : "false";
  if (const auto* text = state.as_string()) return "\"" + *text + "\"";
  if (const auto* list = state.as_list()) return "a list of " + std::to_string(list->size());
  return state.is_null() ? "null" : "a real number";
}

bool leaf_equals(const State& state, const Json& wanted) {
  if (wanted.is_null()) return state.is_null();
  if (wanted.is_boolean()) return state.as_bool() && *state.as_bool() == wanted.get<bool>();
  if (wanted.is_number_integer()) return state.as_int() && *state.as_int() == wanted.get<std::int64_t>();
  if (wanted.is_string()) return state.as_string() && *state.as_string() == wanted.get<std::string>();
  const auto* number = std::get_if<double>(&state.value());
  return number && wanted.is_number() && *number == wanted.get<double>();
}

void compare_state_array(const State& state, const Json& wanted, const Family& family, bool own_capacity,
                         const std::string& path, Differences& out) {
  if (!state.as_array()) {
    out.push_back(path + ": got " + leaf_text(state) + ", want an array");
    return;
  }
  mx::array array = *state.as_array();
  const mx::array& reference = family.array(wanted["array"]);
  if (wanted.contains("capacity")) {
    const int capacity = wanted["capacity"];
    const int columns = array.ndim() > 2 ? array.shape(2) : -1;
    if (columns != capacity && !own_capacity) {
      out.push_back(path + ": got a capacity of " + std::to_string(columns) + ", want " + std::to_string(capacity));
      return;
    }
    if (columns > reference.shape(2)) {
      mx::Shape stop = array.shape();
      stop[2] = reference.shape(2);
      array = mx::slice(array, mx::Shape(array.ndim(), 0), stop);
    }
  }
  ArrayRules rules;
  rules.tolerance = wanted.value("tol", 0.0);
  if (wanted.contains("valid")) rules.valid = family.array(wanted["valid"]);
  add(out, path, compare_arrays(array, reference, rules));
}

void compare_state(const State& state, const Json& wanted, const Family& family, bool own_capacity,
                   const std::string& path, Differences& out) {
  if (wanted.is_object() && wanted.contains("array")) {
    compare_state_array(state, wanted, family, own_capacity, path, out);
  } else if (wanted.is_array()) {
    const auto* list = state.as_list();
    if (!list || list->size() != wanted.size()) {
      out.push_back(path + ": got " + leaf_text(state) + ", want a list of " + std::to_string(wanted.size()));
      return;
    }
    for (std::size_t i = 0; i < list->size(); ++i) {
      compare_state((*list)[i], wanted[i], family, own_capacity, path + "." + std::to_string(i), out);
    }
  } else if (!leaf_equals(state, wanted)) {
    out.push_back(path + ": got " + leaf_text(state) + ", want " + wanted.dump());
  }
}

Json meta_json(const Meta& meta) {
  if (const auto* text = meta.as_string()) return *text;
  Json list = Json::array();
  for (const Meta& item : *meta.as_list()) list.push_back(meta_json(item));
  return list;
}

void compare_legacy(const Observation& got, const Json& wanted, const Family& family, Differences& out) {
  if (wanted.contains("error")) return;  // that format cannot hold this state
  if (!got.legacy_state || !got.legacy_meta) {
    out.push_back("state_v1: the step gives none");
    return;
  }
  compare_state(*got.legacy_state, wanted.at("state"), family, got.own_capacity, "state_v1", out);
  if (const Json meta = meta_json(*got.legacy_meta); meta != wanted.at("meta_state")) {
    out.push_back("meta_state: got " + meta.dump() + ", want " + wanted["meta_state"].dump());
  }
}

// Everything that was computed, with the tolerance of its own.
void compare_computed(const Observation& got, const Json& expect, const Family& family, Differences& out) {
  ArrayRules rules;
  rules.tolerance = expect.value("tol", kComputedTolerance);
  for (const char* name : {"out", "dequantized"}) compare_named(got, expect, family, name, rules, out);
  compare_named(got, expect, family, "queries_after", {}, out);
  ArrayRules exact;
  exact.tolerance = expect.value("tol", 0.0);
  compare_named(got, expect, family, "quantized", exact, out);
}

}  // namespace

std::vector<std::string> compare_scalars(const Json& got, const Json& want, bool own_capacity,
                                         const std::string& path) {
  Differences out;
  for (const auto& [name, wanted] : want.items()) {
    const std::string where = path + "." + name;
    if (name == "nbytes" && own_capacity) continue;
    if (!got.contains(name)) {
      out.push_back(where + ": got nothing, want " + wanted.dump());
    } else if (name == "children") {
      if (got[name].size() != wanted.size()) {
        out.push_back(where + ": got " + std::to_string(got[name].size()) + ", want " + std::to_string(wanted.size()));
        continue;
      }
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        for (auto& text : compare_scalars(got[name][i], wanted[i], own_capacity, where + "." + std::to_string(i))) {
          out.push_back(std::move(text));
        }
      }
    } else if (got[name] != wanted) {
      out.push_back(where + ": got " + got[name].dump() + ", want " + wanted.dump());
    }
  }
  return out;
}

std::string compare_states(const State& got, const State& want) {
  if (const auto* wanted = want.as_list()) {
    const auto* list = got.as_list();
    if (!list || list->size() != wanted->size()) return "got " + leaf_text(got) + ", want " + leaf_text(want);
    for (std::size_t i = 0; i < list->size(); ++i) {
      if (std::string text = compare_states((*list)[i], (*wanted)[i]); !text.empty()) {
        return "item " + std::to_string(i) + " " + text;
      }
    }
    return "";
  }
  if (const auto* wanted = want.as_array()) {
    return got.as_array() ? compare_arrays(*got.as_array(), *wanted) : "got " + leaf_text(got) + ", want an array";
  }
  const bool same = got.value().index() == want.value().index() && leaf_text(got) == leaf_text(want);
  return same ? "" : "got " + leaf_text(got) + ", want " + leaf_text(want);
}

std::vector<std::string> compare(const Observation& got, const Json& expect, const Family& family) {
  Differences out = got.defects;
  for (const auto& [field, value] : expect.items()) {
    if (!is_known(field)) out.push_back("unknown expectation \"" + field + "\"");
  }
  const bool error_expected = expect.value("error", false);
  if (error_expected && !got.error) out.push_back("got success, want an error");
  if (!error_expected && got.error) {
    out.push_back("unexpected error: " + *got.error);
    return out;
  }
  if (expect.contains("after")) {
    for (auto& text : compare_scalars(got.after.value_or(Json::object()), expect["after"], got.own_capacity, "after")) {
      out.push_back(std::move(text));
    }
  }
  if (error_expected) return out;

  ArrayRules rules = rules_of(expect, family);
  for (const char* name : {"keys", "values"}) compare_named(got, expect, family, name, rules, out);
  rules.valid.reset();
  for (const char* name : {"in_keys", "in_values"}) compare_named(got, expect, family, name, rules, out);
  compare_computed(got, expect, family, out);
  if (expect.contains("mask")) compare_mask(got, expect["mask"], family, out);
  if (expect.contains("array")) compare_entry(got, expect["array"], family, rules, out);
  for (const char* name : {"result", "can_trim", "metadata", "classes"}) {
    if (!expect.contains(name)) continue;
    const auto found = got.scalars.find(name);
    const Json value = found == got.scalars.end() ? Json("nothing") : found->second;
    if (value != expect[name])
      out.push_back(std::string(name) + ": got " + value.dump() + ", want " + expect[name].dump());
  }
  if (expect.contains("state_v2")) {
    if (got.state) {
      compare_state(*got.state, expect["state_v2"], family, got.own_capacity, "state_v2", out);
    } else {
      out.push_back("state_v2: the step gives none");
    }
  }
  if (expect.contains("state_v1")) compare_legacy(got, expect["state_v1"], family, out);
  return out;
}

}  // namespace reprise::conformance
