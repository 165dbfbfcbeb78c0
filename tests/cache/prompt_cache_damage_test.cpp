// [P6]: each item of each class's state, damaged in each way, is an Error that names it, and never a crash. There is no
// digest in these files: only the classes' own checks stand between the damage and a cache.
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "nlohmann/json.hpp"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/storage/safetensors.h"
#include "tests/cache/cache_samples.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;
using Json = nlohmann::ordered_json;

struct Content {
  std::map<std::string, mx::array> tensors;
  std::map<std::string, std::string> metadata;
};

Content content_of(const CacheSample& sample, const SaveOptions& options = {}) {
  const TemporaryFolder folder;
  PromptCache cache;
  cache.push_back(sample.make());
  const Safetensors file = read_safetensors(save_prompt_cache(folder.file("c"), cache, {}, options), ReadMode::copy);
  Content content{file.tensors, file.header.metadata};
  if (options.layout == PromptCacheLayout::current) {
    Json json = Json::parse(content.metadata.at("2.0"));
    json.erase("digest");
    json.erase("sealed");
    content.metadata["2.0"] = json.dump();
  }
  return content;
}

void set_kind(Content& content, const std::string& tensor, const std::string& kind) {
  std::size_t k = 1;
  for (;; ++k) {
    const auto name = content.metadata.find("2." + std::to_string(k) + ".0");
    if (name == content.metadata.end() || name->second == tensor) break;
  }
  content.metadata["2." + std::to_string(k) + ".0"] = tensor;
  content.metadata["2." + std::to_string(k) + ".1"] = kind;
}

// As if the tensor had never had a kind; the numbering may have holes.
void drop_kind(Content& content, const std::string& tensor) {
  for (auto entry = content.metadata.begin(); entry != content.metadata.end(); ++entry) {
    if (!entry->first.starts_with("2.") || !entry->first.ends_with(".0") || entry->second != tensor) continue;
    content.metadata.erase(entry->first.substr(0, entry->first.size() - 1) + "1");
    content.metadata.erase(entry);
    return;
  }
}

struct Damage {
  std::string what;
  std::function<void(Content&)> apply;
};

mx::array filled_like(const mx::array& array, int value) { return mx::full(array.shape(), value, array.dtype()); }

// `current`: kinds exist.
std::vector<Damage> damages_of(const std::string& name, const mx::array& tensor, bool current) {
  std::vector<Damage> damages;
  const auto put = [&](const std::string& what, mx::array value, std::optional<std::string> kind = {}) {
    if (identical(value, tensor)) return;
    damages.push_back({what, [=](Content& content) {
                         content.tensors.insert_or_assign(name, value);
                         if (kind) kind->empty() ? drop_kind(content, name) : set_kind(content, name, *kind);
                       }});
  };
  damages.push_back({"missing", [=](Content& content) {
                       content.tensors.erase(name);
                       drop_kind(content, name);
                     }});
  damages.push_back({"items below it", [=](Content& content) {
                       content.tensors.erase(name);
                       drop_kind(content, name);
                       content.tensors.insert_or_assign(name + ".0", tensor);
                     }});
  put("one axis more", mx::expand_dims(tensor, 0), current ? std::optional<std::string>("") : std::nullopt);
  if (tensor.ndim() > 0 && tensor.size() > 0) put("no axis", mx::array(7, mx::int32));
  if (current) {
    put("null", mx::zeros({0}), "none");
    put("a string", mx::array({65, 66}), "string");
    put("true", mx::array(true), "scalar");
    put("a real number", mx::array(1.5f), "scalar");
    for (const std::int64_t value :
         {std::int64_t{-1}, std::int64_t{std::numeric_limits<int>::max()},
          std::int64_t{std::numeric_limits<int>::min()}, std::numeric_limits<std::int64_t>::max(),
          std::numeric_limits<std::int64_t>::min()}) {
      put("the integer " + std::to_string(value), mx::array(value, mx::int64), "scalar");
    }
  }
  const bool is_float = mx::issubdtype(tensor.dtype(), mx::floating);
  if (tensor.ndim() > 0 && tensor.size() > 0) {
    put("another dtype", mx::astype(tensor, is_float ? mx::int32 : mx::float32));
    put("8 bits", mx::astype(tensor, mx::uint8));
  }
  for (int axis = 0; axis < static_cast<int>(tensor.ndim()); ++axis) {
    const std::string where = " on axis " + std::to_string(axis);
    put("doubled" + where, mx::concatenate({tensor, tensor}, axis));
    mx::Shape none = tensor.shape();
    none[static_cast<std::size_t>(axis)] = 0;
    if (tensor.shape(axis) > 0) put("nothing" + where, mx::zeros(none, tensor.dtype()));
  }
  if (tensor.ndim() == 1 && tensor.size() > 0 && tensor.dtype() == mx::int32) {
    for (const int value : {-1, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
      put("all " + std::to_string(value), filled_like(tensor, value));
    }
  }
  return damages;
}

// One filled state of each class and a few with more to say.
const std::set<std::string> kDamaged = {"KVCache of 3",
                                        "KVCache, empty",
                                        "KVCache, trimmed to nothing",
                                        "QuantizedKVCache(32, 5) of 3",
                                        "QuantizedKVCache(32, 5), empty",
                                        "ConcatenateKVCache of 3",
                                        "ConcatenateKVCache, empty",
                                        "ChunkedKVCache, slid and trimmed",
                                        "ChunkedKVCache(1000), empty",
                                        "RotatingKVCache that keeps of 3 one by one",
                                        "RotatingKVCache that keeps, mixed",
                                        "RotatingKVCache, empty",
                                        "QuantizedRotatingKVCache that keeps, mixed",
                                        "QuantizedRotatingKVCache, empty",
                                        "BatchKVCache with right padding",
                                        "BatchKVCache, empty",
                                        "BatchKVCache without rows",
                                        "BatchQuantizedKVCache with right padding",
                                        "BatchRotatingKVCache and 9",
                                        "BatchRotatingKVCache with right padding after more",
                                        "BatchRotatingKVCache, empty",
                                        "BatchQuantizedRotatingKVCache and 9",
                                        "Merged rings that keep and on",
                                        "Merged quantised rings that keep and on",
                                        "ArraysCache with lengths",
                                        "ArraysCache with both, unset",
                                        "ArraysCache, first unset",
                                        "CacheList, nested",
                                        "CacheList of own classes",
                                        "CacheList of batches"};

struct Outcome {
  std::string error;  // "nothing" when it loaded
  std::string after;  // of going on with what loaded
};

Outcome load_and_go_on(const Content& content, const RowShape& shape) {
  const TemporaryFolder folder;
  const std::string file = folder.file("d.safetensors");
  write_safetensors(file, content.tensors, content.metadata);
  Outcome outcome;
  PromptCache cache;
  outcome.error = error_of([&] { cache = load_prompt_cache(file); });
  if (outcome.error != "nothing") return outcome;
  outcome.after = error_of([&] {
    check_prompt_cache(cache);
    State::List answers = go_on(cache[0], shape);
    std::vector<mx::array> arrays;
    State(std::move(answers)).collect_arrays(arrays);
    mx::eval(std::move(arrays));
  });
  return outcome;
}

// What spells another cache, right in itself: only the digest, or the model that the cache is for, can tell.
bool is_another_cache(const CacheSample& sample, const std::string& item, const std::string& what) {
  const auto is_of = [&](const char* name) { return sample.name.find(name) != std::string::npos; };
  const bool is_buffer = item.ends_with(".0") || item.ends_with(".1");
  if (what == "doubled on axis 3" && is_buffer) return true;  // a head size
  if (what == "nothing on axis 3" && item.ends_with(".1") && !is_of("uantized") && !is_of("own")) return true;
  if (is_of("ArraysCache") || is_of("CacheList")) {  // slots: any arrays whose rows agree, any number of them
    if (what == "the integer 2147483647") return is_of("own");  // of a ring
    if (what == "null" || what.starts_with("all ") || what == "another dtype" || what == "8 bits") return true;
    if (what == "missing" || what == "one axis more") return is_buffer || item.ends_with(".2");
    return what.ends_with("on axis 0") || what.ends_with("on axis 1") || what.ends_with("on axis 2");
  }
  if (item.starts_with("meta ")) return what == "missing" || what == "\"7\"" || what == "\"2147483647\"";
  if (is_of("Batch") || is_of("Merged")) {
    const bool is_ring = !is_of("BatchKV") && !is_of("BatchQuantizedKV");
    return is_ring && (what == "all -1" || what == "true" || what == "the integer 2147483647");
  }
  return (is_of("Chunked") || is_of("Rotating")) && what == "the integer 2147483647";
}

void expect_damage_refused(const CacheSample& sample, const SaveOptions& options, std::vector<std::string>& loaded) {
  const Content whole = content_of(sample, options);
  const bool current = options.layout == PromptCacheLayout::current;
  EXPECT_EQ(load_and_go_on(whole, sample.shape).error, "nothing");
  std::vector<std::pair<std::string, Damage>> damages;
  for (const auto& [name, tensor] : whole.tensors) {
    for (Damage& damage : damages_of(name, tensor, current)) damages.emplace_back(name, std::move(damage));
  }
  damages.emplace_back("0", Damage{"an item too many", [&](Content& content) {
                                     content.tensors.emplace("0.19", mx::zeros({1, 2, 3, 4}));
                                   }});
  if (!current) {
    for (const auto& [key, value] : whole.metadata) {
      if (!key.starts_with("0.")) continue;
      for (const char* text :
           {"", "-1", "2147483647", "2147483648", "-99999999999999999999", "None", "1.5", "1 ", "x", "true", "7"}) {
        if (text == value) continue;
        damages.emplace_back("meta " + key, Damage{std::string("\"") + text + "\"",
                                                   [=](Content& content) { content.metadata[key] = text; }});
      }
      damages.emplace_back("meta " + key, Damage{"missing", [=](Content& content) { content.metadata.erase(key); }});
    }
  }
  for (const auto& [item, damage] : damages) {
    Content content = whole;
    damage.apply(content);
    const Outcome outcome = load_and_go_on(content, sample.shape);
    const std::string place = sample.name + " | " + item + " | " + damage.what;
    if (outcome.error == "nothing" && is_another_cache(sample, item, damage.what)) continue;
    if (outcome.error == "nothing") {
      loaded.push_back(place + (outcome.after == "nothing" ? "" : " | " + outcome.after));
      continue;
    }
    EXPECT_TRUE(outcome.error.starts_with("corrupt_data: ") || outcome.error.starts_with("unsupported: "))
        << place << ": " << outcome.error;
    EXPECT_TRUE(outcome.error.find("layer 0") != std::string::npos || outcome.error.find("\"0.") != std::string::npos)
        << place << ": " << outcome.error;
  }
}

void expect_all_damage_refused(const SaveOptions& options) {
  std::vector<std::string> loaded;
  std::size_t samples = 0;
  for (const CacheSample& sample : cache_samples()) {
    if (!kDamaged.contains(sample.name)) continue;
    ++samples;
    if (options.layout == PromptCacheLayout::legacy && !sample.not_in_legacy.empty()) continue;
    SCOPED_TRACE(sample.name);
    expect_damage_refused(sample, options, loaded);
  }
  EXPECT_EQ(samples, kDamaged.size());
  for (const std::string& place : loaded) {
    ADD_FAILURE() << "loads: " << place;
  }
}

TEST(PromptCacheDamage, P6EveryDamagedItemIsRefused) { expect_all_damage_refused({}); }

TEST(PromptCacheDamage, P6EveryDamagedItemOfTheLegacyLayoutIsRefused) {
  SaveOptions options;
  options.layout = PromptCacheLayout::legacy;
  expect_all_damage_refused(options);
}

TEST(PromptCacheDamage, P5ADamagedExtensionOfALayerIsRefusedByLayerAndMember) {
  std::size_t members = 0;
  for (const CacheSample& sample : cache_samples()) {
    if (!kDamaged.contains(sample.name)) continue;
    for (const bool portable : {false, true}) {
      SaveOptions options;
      options.portable = portable;
      const Content whole = content_of(sample, options);
      const Json json = Json::parse(whole.metadata.at("2.0"));
      if (!json.contains("layers")) continue;
      const auto expect_refused = [&](const Json& sentinel, const std::string& names) {
        Content content = whole;
        content.metadata["2.0"] = sentinel.dump();
        const std::string error = load_and_go_on(content, sample.shape).error;
        EXPECT_TRUE(error.starts_with("corrupt_data: ")) << sample.name << ": " << sentinel << ": " << error;
        EXPECT_NE(error.find(names), std::string::npos) << sample.name << ": " << sentinel << ": " << error;
      };
      for (const auto& [path, layer] : json["layers"].items()) {
        Json other = json;
        other["layers"] = Json::object({{path + ".9", layer}});
        expect_refused(other, path + ".9");
        for (const auto& [member, value] : layer.items()) {
          for (const Json& wrong :
               {Json(nullptr), Json("x"), Json(1.5), Json(-1), Json(2147483648),
                Json(std::numeric_limits<std::uint64_t>::max()), Json::array({1}), Json::object({{"x", 1}})}) {
            other = json;
            other["layers"][path][member] = wrong;
            expect_refused(other, "layer " + path);
            ++members;
          }
        }
        if (!layer.contains("state")) continue;
        for (const auto& [member, value] : layer["state"].items()) {
          for (const Json& wrong :
               {Json(nullptr), Json("x"), Json(1.5), Json(-1), Json(2147483648), Json(true),
                Json(std::numeric_limits<std::uint64_t>::max()), Json::array({1}), Json::array({1, "2", 3}),
                Json::array({-1, -1, -1000000000}), Json::array({2147483648, 0, 0}), Json::object()}) {
            other = json;
            other["layers"][path]["state"][member] = wrong;
            expect_refused(other, "layer " + path);
            ++members;
          }
        }
      }
    }
  }
  EXPECT_GT(members, 100u);
}

}  // namespace
}  // namespace reprise
