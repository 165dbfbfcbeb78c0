#include "reprise/prefix/tiers/cache_leaves.h"

#include <type_traits>

#include "reprise/cache/cache_list.h"

namespace reprise {

namespace {

template <typename Layer>
void add_leaves(Layer& layer, std::vector<Layer*>& leaves) {
  using List = std::conditional_t<std::is_const_v<Layer>, const CacheList, CacheList>;
  if (auto* list = dynamic_cast<List*>(&layer)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) add_leaves<Layer>(list->child(i), leaves);
  } else {
    leaves.push_back(&layer);
  }
}

template <typename Leaf, typename Cache>
auto leaves_of_class(Cache& cache) {
  using Wanted = std::conditional_t<std::is_const_v<Cache>, const Leaf, Leaf>;
  std::vector<Wanted*> found;
  for (auto* leaf : leaves_of(cache)) {
    if (auto* wanted = dynamic_cast<Wanted*>(leaf)) found.push_back(wanted);
  }
  return found;
}

}  // namespace

std::vector<LayerCache*> leaves_of(PromptCache& cache) {
  std::vector<LayerCache*> leaves;
  for (std::size_t i = 0; i < cache.size(); ++i) add_leaves<LayerCache>(cache[i], leaves);
  return leaves;
}

std::vector<const LayerCache*> leaves_of(const PromptCache& cache) {
  std::vector<const LayerCache*> leaves;
  for (std::size_t i = 0; i < cache.size(); ++i) add_leaves<const LayerCache>(cache[i], leaves);
  return leaves;
}

std::vector<PagedKVCache*> paged_leaves(PromptCache& cache) { return leaves_of_class<PagedKVCache>(cache); }
std::vector<const PagedKVCache*> paged_leaves(const PromptCache& cache) { return leaves_of_class<PagedKVCache>(cache); }
std::vector<ArraysCache*> recurrent_leaves(PromptCache& cache) { return leaves_of_class<ArraysCache>(cache); }
std::vector<const ArraysCache*> recurrent_leaves(const PromptCache& cache) {
  return leaves_of_class<ArraysCache>(cache);
}

}  // namespace reprise
