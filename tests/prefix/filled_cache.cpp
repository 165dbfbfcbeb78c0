#include "tests/prefix/filled_cache.h"

#include <algorithm>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/cache/cache_list.h"

namespace reprise::test {

namespace mx = mlx::core;

namespace {

constexpr int kHeads = 2;
constexpr int kFeatures = 32;

// [1, kHeads, L, features]: different for every layer, head, token, position and feature.
mx::array rows(std::span<const TokenId> tokens, int begin, int layer, int features) {
  std::vector<float> numbers;
  for (int head = 0; head < kHeads; ++head) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const int position = begin + static_cast<int>(i);
      for (int f = 0; f < features; ++f) {
        numbers.push_back(static_cast<float>(tokens[i] % 97) + 0.01f * static_cast<float>(position % 89) +
                          10.0f * static_cast<float>(layer * kHeads + head) + static_cast<float>(f) * 0.5f);
      }
    }
  }
  return mx::array(numbers.begin(), {1, kHeads, static_cast<int>(tokens.size()), features}, mx::float32);
}

// Rows [begin, end) of one layer as arrays.
std::vector<mx::array> rows_of(const PagedKVCache& layer, int begin, int end) {
  const auto cut = [&](const mx::array& array) {
    return mx::slice(array, {0, 0, begin - layer.first_row(), 0},
                     {1, array.shape(1), end - layer.first_row(), array.shape(3)});
  };
  const KeysValues stored = layer.keys_and_values();
  if (const auto* dense = std::get_if<DenseKV>(&stored)) return {cut(dense->keys), cut(dense->values)};
  const auto& packed = std::get<QuantizedKV>(stored);
  return {cut(packed.keys.packed),   cut(packed.keys.scales),   cut(packed.keys.biases),
          cut(packed.values.packed), cut(packed.values.scales), cut(packed.values.biases)};
}

bool same(const mx::array& a, const mx::array& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() && mx::array_equal(a, b).item<bool>();
}

}  // namespace

PromptCache make_form(const std::shared_ptr<PagePool>& pool, const FormOptions& options) {
  const auto paged = [&](kernels::PagedVisibility visibility) {
    return std::make_unique<PagedKVCache>(pool, visibility, options.quantization);
  };
  PromptCache form;
  form.push_back(paged({}));
  form.push_back(paged({.window = 70, .chunk = 0}));
  if (options.recurrent) {
    form.push_back(std::make_unique<CacheList>(std::make_unique<ArraysCache>(3), paged({.window = 0, .chunk = 128})));
  } else {
    form.push_back(paged({.window = 0, .chunk = 128}));
  }
  return form;
}

void fill(PromptCache& cache, std::span<const TokenId> tokens) {
  const auto paged = paged_leaves(cache);
  const int begin = *paged.front()->position();
  const auto more = tokens.subspan(static_cast<std::size_t>(begin));
  if (more.empty()) return;
  for (std::size_t i = 0; i < paged.size(); ++i) {
    const int layer = static_cast<int>(i);
    paged[i]->update_and_fetch(rows(more, begin, layer, kFeatures), rows(more, begin, layer + 5, 2 * kFeatures));
  }
  for (ArraysCache* state : recurrent_leaves(cache)) {
    int sum = 0;
    for (const TokenId token : tokens) sum = (sum * 31 + token) % 65521;
    state->set(0, mx::full({1, 3, 4}, static_cast<float>(sum), mx::float32));
    state->set(1, mx::full({1, 2}, static_cast<float>(tokens.back()), mx::float16));
  }
  cache.eval();
}

Tokens counted_tokens(int count, int first) {
  Tokens tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(first + i);
  return tokens;
}

std::string difference(const PromptCache& got, const PromptCache& want) {
  const auto got_paged = paged_leaves(got);
  const auto want_paged = paged_leaves(want);
  if (got_paged.size() != want_paged.size()) return "number of layers";
  for (std::size_t i = 0; i < got_paged.size(); ++i) {
    const std::string name = "attention layer " + std::to_string(i);
    if (got_paged[i]->position() != want_paged[i]->position()) return name + ": position";
    const int begin = std::max(got_paged[i]->first_row(), want_paged[i]->first_row());
    const int end = *got_paged[i]->position();
    const auto a = rows_of(*got_paged[i], begin, end);
    const auto b = rows_of(*want_paged[i], begin, end);
    for (std::size_t part = 0; part < std::max(a.size(), b.size()); ++part) {
      if (a.size() != b.size() || !same(a[part], b[part])) return name + ": rows, part " + std::to_string(part);
    }
  }
  const auto got_states = recurrent_leaves(got);
  const auto want_states = recurrent_leaves(want);
  if (got_states.size() != want_states.size()) return "number of recurrent layers";
  for (std::size_t i = 0; i < got_states.size(); ++i) {
    for (int slot = 0; slot < want_states[i]->num_slots(); ++slot) {
      const auto a = got_states[i]->get(slot);
      const auto b = want_states[i]->get(slot);
      if (a.has_value() != b.has_value() || (a && !same(*a, *b))) return "slot " + std::to_string(slot);
    }
  }
  return "";
}

}  // namespace reprise::test
