#include "tests/models/cache_facts.h"

#include <sstream>

#include "mlx/mlx.h"
#include "reprise/cache/cache_list.h"

namespace reprise::test {

namespace mx = mlx::core;
using Json = nlohmann::json;

namespace {

// A buffer's shape, or the shapes of a quantised one's parts; null where there is none.
Json shape_of(const State& item) {
  if (const auto* array = item.as_array()) return Json(array->shape());
  Json shapes;
  if (const auto* parts = item.as_list()) {
    for (const State& part : *parts) shapes.push_back(shape_of(part));
  }
  return shapes;
}

std::string text_of(mx::Dtype dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}

Json number(const State& item) { return item.as_int() != nullptr ? Json(*item.as_int()) : Json(); }

// The item order of each class is that of docs/prompt_cache_format.md.
void add_state(Json& facts, const LayerCache& cache) {
  const State state = cache.state();
  const auto& items = *state.as_list();
  const std::string name = cache.class_name();
  if (name == "ArraysCache") {
    facts["arrays"] = Json::array();
    for (const State& slot : *items.at(0).as_list()) {
      const auto* array = slot.as_array();
      facts["arrays"].push_back(array == nullptr ? Json()
                                                 : Json{{"shape", array->shape()}, {"dtype", text_of(array->dtype())}});
    }
    return;
  }
  facts["keys_shape"] = shape_of(items.at(0));
  facts["values_shape"] = shape_of(items.at(1));
  if (name == "RotatingKVCache") {
    facts["keep"] = number(items.at(3));
    facts["max_size"] = number(items.at(4));
    facts["idx"] = number(items.at(5));
  } else if (name == "QuantizedKVCache") {
    facts["group_size"] = number(items.at(3));
    facts["bits"] = number(items.at(4));
  } else if (name == "ChunkedKVCache") {
    facts["chunk_size"] = number(items.at(3));
    facts["start_position"] = number(items.at(4));
  }
}

Json facts_of(const LayerCache& cache) {
  Json facts = {{"class", cache.class_name()}, {"nbytes", cache.nbytes()}};
  if (const auto position = cache.position()) facts["offset"] = *position;
  if (const auto* list = dynamic_cast<const CacheList*>(&cache)) {
    facts["children"] = Json::array();
    for (std::size_t i = 0; i < list->num_children(); ++i) facts["children"].push_back(facts_of(list->child(i)));
  } else {
    add_state(facts, cache);
  }
  return facts;
}

std::string differing(const Json& got, const Json& want, StoredAs stored, const std::string& where) {
  if (want.is_object() && got.is_object()) {
    for (const auto& [key, value] : want.items()) {
      if (stored == StoredAs::another_dtype && (key == "nbytes" || key == "dtype")) continue;
      const std::string name = where + (where.empty() ? "" : ".") + key;
      if (!got.contains(key)) return name + ": got nothing, want " + value.dump();
      if (auto text = differing(got.at(key), value, stored, name); !text.empty()) return text;
    }
    return "";
  }
  const bool objects =
      want.is_array() && got.is_array() && want.size() == got.size() && !want.empty() && want.front().is_object();
  if (objects) {
    for (std::size_t i = 0; i < want.size(); ++i) {
      if (auto text = differing(got[i], want[i], stored, where + "[" + std::to_string(i) + "]"); !text.empty())
        return text;
    }
    return "";
  }
  return got == want ? "" : where + ": got " + got.dump() + ", want " + want.dump();
}

}  // namespace

Json facts_of(const PromptCache& cache) {
  Json facts = Json::array();
  for (std::size_t i = 0; i < cache.size(); ++i) facts.push_back(facts_of(cache[i]));
  return facts;
}

std::string differing_fact(const Json& got, const Json& want, StoredAs stored) {
  if (got.size() != want.size()) {
    return "got " + std::to_string(got.size()) + " caches, want " + std::to_string(want.size());
  }
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (auto text = differing(got[i], want[i], stored, "layer " + std::to_string(i)); !text.empty()) return text;
  }
  return "";
}

}  // namespace reprise::test
