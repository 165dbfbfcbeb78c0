// Prompt-cache files: the same bytes as the program's for the same cache.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>
#include <string>

#include "python/src/bindings.h"
#include "python/src/cache_class.h"
#include "python/src/layers.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/kv_columns.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/quantized_kv_cache.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace reprise::python {

namespace {

// Text, or whatever names a path. Throws: TypeError; ValueError for what names no file.
std::string path_of(nb::handle file_name) {
  const nb::object path = nb::steal(PyOS_FSPath(file_name.ptr()));
  if (!path.is_valid()) nb::raise_python_error();
  const nb::object bytes =
      nb::steal(PyUnicode_Check(path.ptr()) ? PyUnicode_EncodeFSDefault(path.ptr()) : path.inc_ref().ptr());
  if (!bytes.is_valid()) nb::raise_python_error();
  std::string name(PyBytes_AsString(bytes.ptr()), static_cast<std::size_t>(PyBytes_Size(bytes.ptr())));
  if (name.empty() || name.find('\0') != std::string::npos) {
    throw nb::value_error("a file name must have at least one character and no null character");
  }
  return name;
}

PromptCacheLayout layout_of(const std::string& name) {
  if (name == "current") return PromptCacheLayout::current;
  if (name == "legacy") return PromptCacheLayout::legacy;
  throw nb::value_error(("layout must be \"current\" or \"legacy\", but got \"" + name + '"').c_str());
}

std::string save(nb::handle file_name, nb::handle cache, std::optional<std::map<std::string, std::string>> metadata,
                 std::optional<Tokens> tokens, const std::string& model_fingerprint, const std::string& app_json,
                 const std::string& layout, bool portable) {
  const SaveOptions options{
      .layout = layout_of(layout),
      .extension = {.tokens = std::move(tokens), .model_fingerprint = model_fingerprint, .app_json = app_json},
      .portable = portable};
  return save_prompt_cache(path_of(file_name), fork_layers(cache),
                           metadata.value_or(std::map<std::string, std::string>{}), options);
}

std::optional<internal::KVColumns> with_slack(const std::optional<internal::KVColumns>& buffer) {
  const int width = buffer->width();
  const int capacity = (width + internal::kColumnStep - 1) / internal::kColumnStep * internal::kColumnStep;
  if (capacity == width) return buffer;
  internal::KVColumns columns = buffer->padded(0, capacity - width);
  columns.eval();
  return columns;
}

// A file holds rows and no slack. mlx-lm's users compare `state` before saving and after loading, so a growing cache
// gets back the capacity that filling it would have given it; none for other caches.
std::unique_ptr<LayerCache> with_capacity(LayerCache& cache) {
  if (cache.empty()) return nullptr;
  if (const auto* kv = dynamic_cast<const KVCache*>(&cache)) {
    return KVCache::from_columns(with_slack(kv->buffer()), kv->length());
  }
  if (const auto* quantized = dynamic_cast<const QuantizedKVCache*>(&cache)) {
    return QuantizedKVCache::from_columns(*with_slack(quantized->buffer()), quantized->length());
  }
  if (auto* list = dynamic_cast<CacheList*>(&cache)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      if (auto child = with_capacity(list->child(i))) list->replace(i, std::move(child));
    }
  }
  return nullptr;
}

nb::dict load(nb::handle file_name) {
  LoadedPromptCache loaded = load_prompt_cache_file(path_of(file_name));
  for (std::size_t i = 0; i < loaded.cache.size(); ++i) {
    if (auto layer = with_capacity(loaded.cache[i])) loaded.cache.replace(i, std::move(layer));
  }
  nb::dict result;
  result["cache"] = wrap_layers(std::move(loaded.cache));
  result["metadata"] = nb::cast(loaded.metadata);
  result["tokens"] = nb::cast(loaded.extension.tokens);
  result["model_fingerprint"] = nb::cast(loaded.extension.model_fingerprint);
  result["app_json"] = nb::cast(loaded.extension.app_json);
  result["layout"] = loaded.layout == PromptCacheLayout::legacy ? "legacy" : "current";
  return result;
}

}  // namespace

void bind_files(nb::module_& m) {
  m.def("save_prompt_cache", &save, "file_name"_a, "cache"_a, "metadata"_a.none() = nb::none(), nb::kw_only(),
        "tokens"_a.none() = nb::none(), "model_fingerprint"_a = "", "app_json"_a = "", "layout"_a = "current",
        "portable"_a = false);
  m.def("load_prompt_cache_file", &load, "file_name"_a);
}

}  // namespace reprise::python
