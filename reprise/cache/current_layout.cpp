// mlx-lm ≥ 0.32: tensors `<layer>.<item>…`; metadata `0.<user key>`, `1.<layer>` = class name, `2.0` = the sentinel and
// `2.<k>.0`, `2.<k>.1` = name and kind of each tensor that stands for something else.
#include <utility>

#include "reprise/cache/file_layout.h"
#include "reprise/cache/leaf_codec.h"
#include "reprise/cache/path_tree.h"

namespace reprise::internal {

namespace {

struct Kind {
  std::string tensor;
  std::string kind;
};

void encode(const State& state, const std::string& path, FileContent& content, std::vector<Kind>& kinds) {
  if (const auto* list = state.as_list()) {
    for (std::size_t i = 0; i < list->size(); ++i) encode((*list)[i], path + "." + std::to_string(i), content, kinds);
    return;
  }
  EncodedLeaf leaf = encode_leaf(state);
  if (leaf.kind) kinds.push_back({path, leaf.kind});
  content.tensors.emplace(path, std::move(leaf.tensor));
}

// Tensor name → kind, from the pairs `<k>.0` and `<k>.1` of part 2.
std::map<std::string, std::string> read_kinds(const TextMap& metadata, const Tensors& tensors) {
  PathTree<std::string> tree;
  for (const auto& [key, value] : metadata) {
    if (key.starts_with("2.") && key != kSentinelKey) tree.insert(key, value);
  }
  std::map<std::string, std::string> kinds;
  for (const auto& [k, pair] : tree.item(2).items()) {
    const auto& members = pair.items();
    const bool is_pair = members.size() == 2 && members.contains(0) && members.contains(1) && members.at(0).leaf() &&
                         members.at(1).leaf();
    const std::string where = "2." + std::to_string(k);
    if (!is_pair) fail_path(where, "a kind must be a pair of tensor name and kind");
    const std::string& tensor = *members.at(0).leaf();
    if (!tensors.contains(tensor)) fail_path(tensor, "a kind must name a tensor of the file");
    if (!kinds.emplace(tensor, *members.at(1).leaf()).second) fail_path(tensor, "a tensor must have one kind");
  }
  return kinds;
}

}  // namespace

FileContent encode_current(const std::vector<LayerRecord>& layers, const TextMap& user_metadata) {
  FileContent content;
  std::vector<Kind> kinds;
  content.metadata = user_entries(user_metadata, "0.");
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const std::string name = std::to_string(layer);
    content.metadata["1." + name] = layers[layer].class_name;
    encode(layers[layer].state, name, content, kinds);
  }
  content.metadata[kSentinelKey] = "";
  for (std::size_t k = 0; k < kinds.size(); ++k) {
    const std::string pair = "2." + std::to_string(k + 1);
    content.metadata[pair + ".0"] = kinds[k].tensor;
    content.metadata[pair + ".1"] = kinds[k].kind;
  }
  return content;
}

ParsedFile parse_current(const Tensors& tensors, const TextMap& metadata) {
  ParsedFile file;
  file.layout = PromptCacheLayout::current;
  file.sentinel = metadata.at(kSentinelKey);
  for (const auto& [key, value] : metadata) {
    const auto [part, rest] = split_first(key);
    if (!rest || (part != "0" && part != "1" && part != "2")) fail_path(key, "metadata must be in part 0, 1 or 2");
    if (part == "0") file.user_metadata.emplace(*rest, value);
  }
  for (std::string& name : read_class_names(metadata, "1.")) file.layers.push_back({std::move(name), {}, {}});

  const auto kinds = read_kinds(metadata, tensors);
  PathTree<State> states;
  for (const auto& [name, tensor] : tensors) {
    const auto [first, rest] = split_first(name);
    const std::optional<std::size_t> layer = parse_index(first);
    if (!layer || !rest) fail_path(name, "a tensor must be named by its layer and item");
    if (*layer >= file.layers.size()) {
      file.extra.emplace(name, tensor);
      continue;
    }
    const auto kind = kinds.find(name);
    states.insert(name, kind == kinds.end() ? State(tensor) : decode_leaf(name, kind->second, tensor));
  }
  for (std::size_t layer = 0; layer < file.layers.size(); ++layer) {
    file.layers[layer].state = states.item(layer).convert<State>(
        std::to_string(layer), [](const State& leaf) { return leaf; },
        [](State::List items) { return State(std::move(items)); });
  }
  return file;
}

}  // namespace reprise::internal
