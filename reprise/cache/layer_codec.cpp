#include "reprise/cache/layer_codec.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/state_reader.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// Lists deeper than this would have paths that no reader takes.
constexpr int kMaxNesting = 12;

// mlx-lm has no such classes. The states of those with a nearest one there end in group_size and bits.
constexpr std::string_view kOwnClasses[] = {"BatchChunkedKVCache", "BatchQuantizedKVCache",
                                            "BatchQuantizedRotatingKVCache", "QuantizedRotatingKVCache"};
constexpr std::string_view kWithoutNearest = "BatchChunkedKVCache";
constexpr const char* kConcatenate = "ConcatenateKVCache";

using CachePtr = std::unique_ptr<LayerCache>;

const CacheList* as_list(const LayerCache& cache) { return dynamic_cast<const CacheList*>(&cache); }

bool is_own_class(const LayerCache& cache) {
  return std::find(std::begin(kOwnClasses), std::end(kOwnClasses), cache.class_name()) != std::end(kOwnClasses);
}

std::string child_path(const std::string& path, std::size_t child) { return path + "." + std::to_string(child); }

std::string named(const std::string& path, const std::string& class_name) {
  return "layer " + path + " (" + class_name + ")";
}

[[noreturn]] void cannot_save(const std::string& path, const LayerCache& cache, const std::string& what) {
  throw Error(ErrorCode::unsupported,
              "[save_prompt_cache] " + named(path, cache.class_name()) + ": the layout has no place for " + what);
}

[[noreturn]] void cannot_load(const std::string& path, const std::string& class_name, const std::string& what) {
  throw Error(ErrorCode::corrupt_data, named(path, class_name) + ": " + what);
}

// Says which layer an Error of `call` is about.
template <typename Call>
auto naming(const std::string& path, const std::string& class_name, const Call& call) {
  try {
    return call();
  } catch (const Error& error) {
    const bool is_damage = error.code() == ErrorCode::invalid_argument;  // what a file made us ask for
    throw Error(is_damage ? ErrorCode::corrupt_data : error.code(), named(path, class_name) + ": " + error.what());
  }
}

void check_nesting(const std::string& path, const LayerCache& cache) {
  if (std::count(path.begin(), path.end(), '.') > kMaxNesting) cannot_save(path, cache, "lists nested so deeply");
}

KVQuantization quantization_of(const LayerCache& cache) {
  const State state = cache.state();
  const State::List& items = *state.as_list();
  return {static_cast<int>(*items[items.size() - 2].as_int()), static_cast<int>(*items.back().as_int())};
}

// A state of which the file's names would show nothing at the top level: mlx-lm would count one layer less.
bool leaves_no_trace(const State& state) {
  const auto* list = state.as_list();
  return list && (list->empty() || (list->front().as_list() && list->front().as_list()->empty()));
}

struct Encoded {
  std::string class_name;
  State state;
};

Encoded encode(const LayerCache& cache, const std::string& path, bool portable, LayerExtensions& extensions) {
  if (const CacheList* list = as_list(cache)) {
    check_nesting(path, cache);
    State::List pairs;
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      Encoded child = encode((*list)[i], child_path(path, i), portable, extensions);
      pairs.push_back(State(State::List{std::move(child.state), State(std::move(child.class_name))}));
    }
    return {cache.class_name(), State(std::move(pairs))};
  }
  LayerExtension extension;
  CachePtr plain;
  if (portable && cache.class_name() == kWithoutNearest) {
    cannot_save(path, cache, "such a batch in mlx-lm's classes (its rows, extracted, are portable)");
  }
  if (portable && is_own_class(cache)) {
    extension.class_name = cache.class_name();
    extension.quantization = quantization_of(cache);
    plain = cache.to_dequantized();
  }
  const LayerCache& written = plain ? *plain : cache;
  extension.state = written.extra_state();
  Encoded encoded{written.class_name(), written.saved_state()};
  // mlx-lm cannot load its own empty one.
  if (encoded.class_name == kConcatenate && written.empty()) {
    extension.class_name = kConcatenate;
    encoded = {KVCache::kClassName, KVCache().saved_state()};
  }
  if (!extension.empty()) extensions.emplace(path, std::move(extension));
  return encoded;
}

// The same cache with every class of our own as mlx-lm's nearest.
CachePtr portable_form(const LayerCache& cache) {
  if (const CacheList* list = as_list(cache)) {
    std::vector<CachePtr> children;
    for (std::size_t i = 0; i < list->num_children(); ++i) children.push_back(portable_form((*list)[i]));
    return std::make_unique<CacheList>(std::move(children));
  }
  return is_own_class(cache) && cache.class_name() != kWithoutNearest ? cache.to_dequantized() : cache.fork();
}

bool holds_arrays_only(const State& state) {
  const auto* list = state.as_list();
  return list ? std::all_of(list->begin(), list->end(), holds_arrays_only) : state.as_array() != nullptr;
}

// Whether two states say the same, buffers by their form: what the same rows went into.
bool say_the_same(const State& a, const State& b) {
  if (a.value().index() != b.value().index()) return false;
  if (const auto* list = a.as_list()) {
    return std::equal(list->begin(), list->end(), b.as_list()->begin(), b.as_list()->end(), say_the_same);
  }
  if (const auto* array = a.as_array()) {
    const mx::array& other = *b.as_array();
    if (array->dtype() != other.dtype() || array->shape() != other.shape()) return false;
    return array->ndim() > 1 || mx::array_equal(*array, other).item<bool>();
  }
  if (a.as_int()) return *a.as_int() == *b.as_int();
  return !a.as_bool() || *a.as_bool() == *b.as_bool();
}

void check_legacy_holds(const LayerCache& cache, const std::string& path) {
  if (const CacheList* list = as_list(cache)) {
    check_nesting(path, cache);
    if (list->num_children() == 0) cannot_save(path, cache, "a list without children");
    for (std::size_t i = 0; i < list->num_children(); ++i) check_legacy_holds((*list)[i], child_path(path, i));
    return;
  }
  if (is_own_class(cache)) cannot_save(path, cache, "a class that mlx-lm does not have (a portable file has its rows)");
  if (const ExtraState extra = cache.extra_state(); !extra.empty()) cannot_save(path, cache, extra.begin()->first);
  const State pair = cache.legacy_state();
  if (pair.as_list()->empty()) cannot_save(path, cache, "a cache without slots");
  if (!holds_arrays_only(pair)) return;  // encode_legacy says so
  const State saved = cache.saved_state();
  const State restored = cache_from_legacy(cache.class_name(), pair, cache.legacy_meta())->saved_state();
  for (std::size_t item = 0; item < saved.as_list()->size(); ++item) {
    const State& wanted = (*saved.as_list())[item];
    if (item < restored.as_list()->size() && say_the_same((*restored.as_list())[item], wanted)) continue;
    cannot_save(path, cache, "item " + std::to_string(item) + " of its state, " + describe(wanted));
  }
}

// Takes each extension that it uses.
CachePtr decode(const std::string& class_name, const State& state, const std::string& path,
                LayerExtensions& extensions) {
  const auto found = extensions.extract(path);
  const LayerExtension extension = found ? found.mapped() : LayerExtension();
  if (class_name == CacheList::kClassName) {
    if (!extension.empty()) cannot_load(path, class_name, "a list must be without an extension, but got one");
    if (!state.as_list()) cannot_load(path, class_name, "the state must be a list, but got " + describe(state));
    std::vector<CachePtr> children;
    for (const State& item : *state.as_list()) {
      const std::string child = child_path(path, children.size());
      const auto* pair = item.as_list();
      if (!pair || pair->size() != 2 || !(*pair)[1].as_string()) {
        cannot_load(child, class_name, "a child must be a pair of state and class name, but got " + describe(item));
      }
      children.push_back(decode(*(*pair)[1].as_string(), (*pair)[0], child, extensions));
    }
    return std::make_unique<CacheList>(std::move(children));
  }
  return naming(path, class_name, [&]() -> CachePtr {
    CachePtr cache = cache_from_state(class_name, state);
    if (!extension.state.empty()) cache->set_extra_state(extension.state);
    if (extension.quantization) {
      const auto [group_size, bits] = *extension.quantization;
      cache = cache->to_quantized(group_size, bits);
    } else if (extension.class_name == kConcatenate && class_name == KVCache::kClassName && cache->empty()) {
      cache = cache_from_state(kConcatenate, State(State::List(2)));
    }
    if (!extension.class_name.empty() && cache->class_name() != extension.class_name) {
      throw Error(ErrorCode::corrupt_data, "the extension's class must be one that this is written as, but got \"" +
                                               extension.class_name + "\"");
    }
    return cache;
  });
}

}  // namespace

std::vector<LayerRecord> encode_layers(const PromptCache& cache, bool portable, LayerExtensions& extensions) {
  std::vector<LayerRecord> records;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    const std::string path = std::to_string(layer);
    Encoded encoded = encode(cache[layer], path, portable, extensions);
    if (leaves_no_trace(encoded.state)) cannot_save(path, cache[layer], "a layer without children or slots");
    records.push_back({std::move(encoded.class_name), std::move(encoded.state), {}});
  }
  return records;
}

std::vector<LayerRecord> encode_legacy_layers(const PromptCache& cache, bool portable) {
  std::vector<LayerRecord> records;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    const CachePtr written = portable ? portable_form(cache[layer]) : cache[layer].fork();
    check_legacy_holds(*written, std::to_string(layer));
    records.push_back({written->class_name(), written->legacy_state(), written->legacy_meta()});
  }
  return records;
}

PromptCache decode_layers(const std::vector<LayerRecord>& records, const LayerExtensions& extensions) {
  PromptCache cache;
  LayerExtensions unused = extensions;
  for (const LayerRecord& record : records) {
    cache.push_back(decode(record.class_name, record.state, std::to_string(cache.size()), unused));
  }
  if (!unused.empty()) {
    throw Error(ErrorCode::corrupt_data,
                "the extension must be of layers of the file, but got one of \"" + unused.begin()->first + "\"");
  }
  return cache;
}

PromptCache decode_legacy_layers(const std::vector<LayerRecord>& records) {
  PromptCache cache;
  for (const LayerRecord& record : records) {
    cache.push_back(naming(std::to_string(cache.size()), record.class_name,
                           [&] { return cache_from_legacy(record.class_name, record.state, record.meta); }));
  }
  return cache;
}

}  // namespace reprise::internal
