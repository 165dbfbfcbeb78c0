#include "tests/conformance/driver.h"

#include <algorithm>
#include <stdexcept>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/cache_masks.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/registry.h"
#include "tests/conformance/compare.h"

namespace reprise::conformance {

namespace mx = mlx::core;

namespace {

// A copy that shares nothing with the family's arrays.
mx::array private_copy(const mx::array& array) {
  mx::array copy = mx::copy(array);
  copy.eval();
  return copy;
}

std::string result_slot(const Json& step) {
  if (step.contains("into") && step["into"].is_string()) return step["into"];
  if (step.contains("on") || !step.contains("list") || step["list"].empty()) return step.value("on", "c");
  return step["list"][0];
}

std::optional<int> optional_int(const Json& step, const char* name) {
  const auto found = step.find(name);
  return found == step.end() || found->is_null() ? std::nullopt : std::optional(found->get<int>());
}

void eval_all(const Observation& observation) {
  std::vector<mx::array> arrays;
  for (const auto& [name, list] : observation.arrays) arrays.insert(arrays.end(), list.begin(), list.end());
  if (observation.mask && std::holds_alternative<mx::array>(*observation.mask)) {
    arrays.push_back(std::get<mx::array>(*observation.mask));
  }
  mx::eval(std::move(arrays));
}

template <typename Operation>
Operation supported(Operation operation, const LayerCache& cache, const char* name) {
  if (!operation) throw std::runtime_error("not supported: " + std::string(name) + " of " + cache.class_name());
  return operation;
}

}  // namespace

void Driver::start(const Json& test_case) {
  slots_["c"].cache = make_cache(test_case.at("cache"));
  const Json others = test_case.value("others", Json::object());
  for (const auto& [name, spec] : others.items()) slots_[name].cache = make_cache(spec);
}

namespace {

BatchPrompt batch_prompt(const Json& step) {
  const auto numbers = [&](const char* name) {
    const auto found = step.find(name);
    return found == step.end() || found->is_null() ? std::vector<int>{} : found->get<std::vector<int>>();
  };
  return {numbers("left_padding"), numbers("lengths"), numbers("right_padding")};
}

}  // namespace

Observation Driver::load(const std::filesystem::path& file) {
  Observation out;
  try {
    LoadedPromptCache loaded = load_prompt_cache_file(file.string());
    out.scalars["metadata"] = loaded.metadata;
    Json classes = Json::array();
    for (std::size_t layer = 0; layer < loaded.cache.size(); ++layer) {
      classes.push_back(loaded.cache[layer].class_name());
      slots_["l" + std::to_string(layer)].cache = loaded.cache[layer].fork();
    }
    out.scalars["classes"] = classes;
  } catch (...) {
    out = refusal();
  }
  return out;
}

Observation Driver::step(const Json& step) {
  Observation out;
  const bool refusal_expected = step.value("expect", Json::object()).value("error", false);
  std::map<std::string, State> before;
  if (refusal_expected) {
    for (const auto& [name, entry] : slots_) before.emplace(name, entry.cache->state());
  }
  try {
    run(step.at("op"), step, out);
    eval_all(out);
  } catch (...) {
    out = refusal();
  }
  for (const auto& [name, state] : before) {
    if (!out.error) break;
    const std::string difference = compare_states(slots_.at(name).cache->state(), state);
    if (!difference.empty()) out.defects.push_back("a refused step changed slot " + name + ": " + difference);
  }
  if (const auto found = slots_.find(result_slot(step)); found != slots_.end()) {
    out.own_capacity = found->second.own_capacity;
    if (!step.contains("into") || step["into"].is_string()) out.after = observe(*found->second.cache);
  }
  return out;
}

Json Driver::observe_slot(const std::string& name) const { return observe(*slots_.at(name).cache); }

void Driver::run(const std::string& op, const Json& step, Observation& out) {
  if (op == "observe" || run_attention(op, step, out) || run_state(op, step, out) || run_list(op, step, out) ||
      run_batch(op, step)) {
    return;
  }
  throw std::runtime_error("unknown operation " + op);
}

bool Driver::run_attention(const std::string& op, const Json& step, Observation& out) {
  if (op == "update") {
    update(step, out);
  } else if (op == "recheck") {
    recheck(step, out);
  } else if (op == "make_mask" || op == "attention_mask" || op == "ssm_mask") {
    make_mask(step, out);
  } else if (op == "trim") {
    out.scalars["result"] = target(step).trim(step.at("n"));
  } else {
    return false;
  }
  return true;
}

bool Driver::run_state(const std::string& op, const Json& step, Observation& out) {
  if (op == "state") {
    read_state(step, out);
  } else if (op == "reload") {
    reload(step, out);
  } else if (op == "fork") {
    const LayerCache& cache = target(step);
    const State state = cache.state();
    const bool own_capacity = slot_of(step).own_capacity;
    for (const Json& name : step.at("into")) {
      slots_[name.get<std::string>()] = {cache_from_state(cache.class_name(), state), own_capacity};
    }
  } else if (op == "copy") {
    auto copy = target(step).fork();
    slots_[step.at("into").get<std::string>()] = {std::move(copy), slot_of(step).own_capacity};
  } else if (op == "to_quantized") {
    auto quantized = target(step).to_quantized(step.at("group_size"), step.at("bits"));
    slots_[step.at("into").get<std::string>()] = {std::move(quantized), slot_of(step).own_capacity};
  } else {
    return false;
  }
  return true;
}

bool Driver::run_list(const std::string& op, const Json& step, Observation& out) {
  if (op == "trim_prompt_cache") {
    trim_list(step, out);
  } else if (op == "save_load") {
    save_load(step, out);
  } else if (op == "set") {
    LayerCache& cache = target(step);
    const auto set = supported(cache_class(cache.class_name()).set, cache, "set");
    const Json& name = step.at("array");
    set(cache, step.at("index"), name.is_null() ? nullptr : &family_.array(name));
  } else if (op == "get") {
    const LayerCache& cache = target(step);
    out.entry = supported(cache_class(cache.class_name()).get, cache, "get")(cache, step.at("index"));
  } else {
    return false;
  }
  return true;
}

bool Driver::run_batch(const std::string& op, const Json& step) {
  if (op == "merge") {
    std::vector<const LayerCache*> caches;
    for (const Json& name : step.at("from")) caches.push_back(slot(name).cache.get());
    slots_[step.at("into").get<std::string>()] = {merge_caches(caches), false};
    return true;
  }
  static const std::vector<std::string> kOperations = {"prepare", "finalize", "advance",         "filter",
                                                       "extend",  "extract",  "maybe_trim_front"};
  if (std::find(kOperations.begin(), kOperations.end(), op) == kOperations.end()) return false;

  LayerCache& cache = target(step);
  if (op == "maybe_trim_front") {
    supported(cache_class(cache.class_name()).maybe_trim_front, cache, "maybe_trim_front")(cache);
    return true;
  }
  BatchedCache* batch = batched(cache);
  if (batch == nullptr) throw std::runtime_error("not supported: " + op + " of " + cache.class_name());
  if (op == "prepare") {
    batch->prepare(batch_prompt(step));
  } else if (op == "finalize") {
    batch->finalize();
  } else if (op == "advance") {
    batch->advance(step.at("n"));
  } else if (op == "filter") {
    batch->filter(step.at("indices"));
  } else if (op == "extend") {
    batch->extend(*slot(step.at("other")).cache);
  } else {
    slots_[step.at("into").get<std::string>()] = {batch->extract(step.at("index")), slot_of(step).own_capacity};
  }
  return true;
}

void Driver::update(const Json& step, Observation& out) {
  const mx::array keys = private_copy(family_.array(step.at("keys")));
  const mx::array values = private_copy(family_.array(step.at("values")));
  const KeysValues all = attention_target(step).update_and_fetch(keys, values);
  out.arrays["keys"] = keys_of(all);
  out.arrays["values"] = values_of(all);
  if (step.contains("keep")) kept_[step["keep"]] = {keys_of(all), values_of(all), {keys}, {values}};
}

void Driver::recheck(const Json& step, Observation& out) {
  const Kept& kept = kept_.at(step.at("name"));
  out.arrays["keys"] = kept.keys;
  out.arrays["values"] = kept.values;
  out.arrays["in_keys"] = kept.in_keys;
  out.arrays["in_values"] = kept.in_values;
}

void Driver::make_mask(const Json& step, Observation& out) {
  const std::string op = step.at("op");
  const int N = step.at("N");
  const std::optional<int> window = optional_int(step, "window_size");
  const bool return_array = step.value("return_array", false);
  if (op != "make_mask") {
    const LayerCache* cache = step.value("no_cache", false) ? nullptr : &target(step);
    out.mask = op == "ssm_mask" ? create_ssm_mask(N, cache) : create_attention_mask(N, cache, {window, return_array});
    return;
  }
  const LayerCache& cache = target(step);
  if (const auto own = cache_class(cache.class_name()).make_mask) {
    out.mask = own(cache, N);
  } else {
    out.mask = attention_target(step).make_mask(N, {window, return_array});
  }
}

Driver::Slot& Driver::slot(const std::string& name) {
  const auto found = slots_.find(name);
  if (found == slots_.end()) throw std::runtime_error("no slot \"" + name + "\"");
  return found->second;
}

LayerCache& Driver::target(const Json& step) {
  LayerCache* cache = slot_of(step).cache.get();
  for (const Json& index : step.value("path", Json::array())) {
    cache = &supported(cache_class(cache->class_name()).child, *cache, "child")(*cache, index);
  }
  return *cache;
}

AttentionCache& Driver::attention_target(const Json& step) {
  LayerCache& cache = target(step);
  if (auto* attention = dynamic_cast<AttentionCache*>(&cache)) return *attention;
  throw std::runtime_error("not supported: " + step.at("op").get<std::string>() + " of " + cache.class_name());
}

}  // namespace reprise::conformance
