#include "reprise/engine/cache_sizes.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "mlx/ops.h"
#include "mlx/utils.h"
#include "reprise/prefix/tiers/cache_leaves.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// Layers of one layout that follow one another are said once, with their number.
std::string layouts_in_words(const std::vector<kernels::PageLayout>& layouts) {
  std::ostringstream text;
  for (auto first = layouts.begin(); first != layouts.end();) {
    const auto next = std::find_if(first, layouts.end(), [&](const auto& other) { return !(other == *first); });
    text << (first == layouts.begin() ? "" : ",") << next - first << "x" << first->kv_heads << "x" << first->key_size
         << "+" << first->value_size << ":" << first->dtype;
    if (first->quantization) text << ":" << first->quantization->bits << "/" << first->quantization->group_size;
    first = next;
  }
  return text.str();
}

}  // namespace

// A page more for each layer: who goes on in a page that another has appended to copies it first.
std::size_t CacheSizes::bytes_of(int tokens) const {
  const auto count = static_cast<std::size_t>((std::max(tokens, 0) + kernels::kPageRows - 1) / kernels::kPageRows + 1);
  std::size_t bytes = live_state_nbytes();
  for (const kernels::PageLayout& layout : pages) bytes += count * layout.nbytes();
  return bytes;
}

CacheSizes sizes_of(const LanguageModel& model, const PromptCache& form) {
  PromptCache cache = form.fork();
  const mx::array logits = model.forward(mx::zeros({1, 1}, mx::int32), cache);
  CacheSizes sizes;
  std::ostringstream text;
  text << "logits=" << logits.dtype();
  for (const PagedKVCache* layer : paged_leaves(std::as_const(cache))) {
    sizes.pages.push_back(layer->layout().value());
  }
  for (const ArraysCache* layer : recurrent_leaves(std::as_const(cache))) sizes.state_nbytes += layer->nbytes();
  sizes.dtypes = text.str();
  return sizes;
}

std::string space_of(const std::string& fingerprint, const CacheSizes& sizes,
                     const std::optional<KVQuantization>& quantization, int block_size) {
  std::string text = fingerprint + "|rows_version=" + std::to_string(kRowsVersion) + "|" + sizes.dtypes +
                     "|state=" + std::to_string(sizes.state_nbytes) + "|layers=" + layouts_in_words(sizes.pages) +
                     "|pages=" + std::to_string(kernels::kPageRows) + "|block=" + std::to_string(block_size);
  if (quantization) {
    text += "|bits=" + std::to_string(quantization->bits) + "|group=" + std::to_string(quantization->group_size);
  }
  return text;
}

}  // namespace reprise::internal
