// mlx-lm ≤ 0.31: tensors `<layer>.<item>…`, all of them arrays; metadata `0.<layer>[.<i>…]` = text meta of a layer,
// `1.<user key>`, `2.<layer>` = class name.
#include <utility>

#include "reprise/base/error.h"
#include "reprise/cache/file_layout.h"
#include "reprise/cache/path_tree.h"
#include "reprise/cache/state_reader.h"

namespace reprise::internal {

namespace {

void encode(const State& state, const std::string& path, const std::string& class_name, Tensors& tensors) {
  if (const auto* list = state.as_list()) {
    for (std::size_t i = 0; i < list->size(); ++i) {
      encode((*list)[i], path + "." + std::to_string(i), class_name, tensors);
    }
  } else if (const auto* array = state.as_array()) {
    tensors.emplace(path, *array);
  } else {
    throw Error(ErrorCode::unsupported, "[save_prompt_cache] the legacy layout holds arrays only, but got " +
                                            describe(state) + " at " + path + " of a " + class_name +
                                            (state.is_null() ? " (it is empty)" : ""));
  }
}

void encode(const Meta& meta, const std::string& path, TextMap& metadata) {
  if (const auto* text = meta.as_string()) {
    metadata[path] = *text;
  } else {
    const auto& list = *meta.as_list();
    for (std::size_t i = 0; i < list.size(); ++i) encode(list[i], path + "." + std::to_string(i), metadata);
  }
}

// The path is one of a layer of the file and of something in it, or of the layer itself where `alone` allows that.
void check_layer(std::string_view name, std::string_view path, std::size_t num_layers, bool alone) {
  const auto [first, rest] = split_first(path);
  const std::optional<std::size_t> layer = parse_index(first);
  if (!layer || *layer >= num_layers) fail_path(name, "a name must begin with a layer of the file");
  if (!rest && !alone) fail_path(name, "a tensor must be named by its layer and item");
}

}  // namespace

FileContent encode_legacy(const std::vector<LayerRecord>& layers, const TextMap& user_metadata) {
  if (layers.empty()) {
    throw Error(ErrorCode::unsupported, "[save_prompt_cache] the legacy layout needs at least one layer, but got none");
  }
  FileContent content;
  content.metadata = user_entries(user_metadata, "1.");
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const std::string name = std::to_string(layer);
    encode(layers[layer].meta, "0." + name, content.metadata);
    content.metadata["2." + name] = layers[layer].class_name;
    encode(layers[layer].state, name, layers[layer].class_name, content.tensors);
  }
  return content;
}

ParsedFile parse_legacy(const Tensors& tensors, const TextMap& metadata) {
  ParsedFile file;
  file.layout = PromptCacheLayout::legacy;
  for (std::string& name : read_class_names(metadata, "2.")) file.layers.push_back({std::move(name), {}, {}});
  const std::size_t num_layers = file.layers.size();

  PathTree<std::string> metas;
  for (const auto& [key, value] : metadata) {
    const auto [part, rest] = split_first(key);
    if (!rest || (part != "0" && part != "1" && part != "2")) fail_path(key, "metadata must be in part 0, 1 or 2");
    if (part == "1") {
      file.user_metadata.emplace(*rest, value);
    } else if (part == "0") {
      check_layer(key, *rest, num_layers, true);
      metas.insert(key, value);
    }
  }
  PathTree<State> states;
  for (const auto& [name, tensor] : tensors) {
    check_layer(name, name, num_layers, false);
    states.insert(name, State(tensor));
  }
  for (std::size_t layer = 0; layer < num_layers; ++layer) {
    file.layers[layer].state = states.item(layer).convert<State>(
        std::to_string(layer), [](const State& leaf) { return leaf; },
        [](State::List items) { return State(std::move(items)); });
    file.layers[layer].meta = metas.item(0).item(layer).convert<Meta>(
        "0." + std::to_string(layer), [](const std::string& text) { return Meta(text); },
        [](Meta::List items) { return items.empty() ? Meta() : Meta(std::move(items)); });
  }
  return file;
}

}  // namespace reprise::internal
