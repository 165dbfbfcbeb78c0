#include "tests/conformance/selection.h"

#include "tests/conformance/functions.h"

namespace reprise::conformance {

namespace {

// What merging caches of a class gives.
std::string merged_class(const std::string& name) {
  return name == "KVCache" || name == "RotatingKVCache" || name == "QuantizedKVCache" ? "Batch" + name : name;
}

void add_spec(const Json& spec, std::set<std::string>& out) {
  out.insert(spec.at("type").get<std::string>());
  const Json args = spec.value("args", Json::object());
  for (const Json& child : args.value("caches", Json::array())) add_spec(child, out);
}

// `type` of an `after`, and of its children.
void add_after(const Json& after, std::set<std::string>& out) {
  if (after.contains("type")) out.insert(after["type"].get<std::string>());
  for (const Json& child : after.value("children", Json::array())) add_after(child, out);
}

void add_step(const Json& step, std::set<std::string>& out) {
  const std::string op = step.value("op", "");
  if (op == "merge") {
    const std::string name = step.at("class");
    out.insert(name);
    out.insert(merged_class(name));
  }
  const Json expect = step.value("expect", Json::object());
  if (expect.contains("after")) add_after(expect["after"], out);
}

}  // namespace

std::set<std::string> needs(const Json& test_case) {
  std::set<std::string> out;
  if (test_case.contains("fn")) {
    const std::string function = test_case["fn"];
    if (function == "rope") out.insert(rope_kind(test_case.at("args")));
    if (function == "quantized_sdpa" || function == "quantize") out.insert(function);
    return out;
  }
  if (test_case.contains("cache")) add_spec(test_case["cache"], out);
  const Json others = test_case.value("others", Json::object());
  for (const auto& [name, spec] : others.items()) add_spec(spec, out);
  const Json expect = test_case.value("expect", Json::object());
  for (const Json& name : expect.value("classes", Json::array())) out.insert(name.get<std::string>());
  for (const Json& layer : expect.value("layers", Json::array())) {
    if (layer.contains("after")) add_after(layer["after"], out);
  }
  for (const Json& step : test_case.value("steps", Json::array())) add_step(step, out);
  return out;
}

}  // namespace reprise::conformance
