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
#include "reprise/cache/prompt_cache_file.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace reprise::python {

namespace {

// Text, or whatever names a path. Throws: TypeError.
std::string path_of(nb::handle file_name) {
  const nb::object path = nb::steal(PyOS_FSPath(file_name.ptr()));
  if (!path.is_valid()) nb::raise_python_error();
  const nb::object bytes =
      nb::steal(PyUnicode_Check(path.ptr()) ? PyUnicode_EncodeFSDefault(path.ptr()) : path.inc_ref().ptr());
  if (!bytes.is_valid()) nb::raise_python_error();
  return {PyBytes_AsString(bytes.ptr()), static_cast<std::size_t>(PyBytes_Size(bytes.ptr()))};
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

nb::dict load(nb::handle file_name) {
  LoadedPromptCache loaded = load_prompt_cache_file(path_of(file_name));
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
