#include "reprise/models/decoder.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/models/model_parts.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <typename... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

bool is_stateless(const LayerKind& kind) { return std::holds_alternative<Stateless>(kind); }

std::unique_ptr<LayerCache> make_layer_cache(const LayerKind& kind) {
  return std::visit(
      Overloaded{[](const FullAttention&) -> std::unique_ptr<LayerCache> { return std::make_unique<KVCache>(); },
                 [](const SlidingAttention& sliding) -> std::unique_ptr<LayerCache> {
                   return std::make_unique<RotatingKVCache>(sliding.window);
                 },
                 [](const ChunkedAttention& chunked) -> std::unique_ptr<LayerCache> {
                   return std::make_unique<ChunkedKVCache>(chunked.chunk_size);
                 },
                 [](const Recurrent& recurrent) -> std::unique_ptr<LayerCache> {
                   return std::make_unique<ArraysCache>(recurrent.slots);
                 },
                 [](const RecurrentAndAttention& both) -> std::unique_ptr<LayerCache> {
                   CacheList::Children children;
                   children.push_back(std::make_unique<ArraysCache>(both.slots));
                   children.push_back(std::make_unique<KVCache>());
                   return std::make_unique<CacheList>(std::move(children));
                 },
                 [](const Stateless&) -> std::unique_ptr<LayerCache> { return nullptr; }},
      kind);
}

// The parts of `cache` that a layer of this kind uses; what is not there, or of another class, stays null.
LayerStep caches_of(const LayerKind& kind, LayerCache& cache) {
  LayerStep step;
  if (std::holds_alternative<Recurrent>(kind)) {
    step.recurrent = dynamic_cast<ArraysCache*>(&cache);
  } else if (std::holds_alternative<RecurrentAndAttention>(kind)) {
    if (auto* list = dynamic_cast<CacheList*>(&cache); list != nullptr && list->num_children() == 2) {
      step.recurrent = dynamic_cast<ArraysCache*>(&list->child(0));
      step.attention = dynamic_cast<AttentionCache*>(&list->child(1));
    }
  } else {
    step.attention = dynamic_cast<AttentionCache*>(&cache);
  }
  return step;
}

// What is wrong with `cache` for a layer of this kind; empty: nothing.
std::string unfit(const LayerKind& kind, const LayerCache& cache) {
  const auto is_recurrent = [](const LayerCache& layer, int slots) {
    const auto* arrays = dynamic_cast<const ArraysCache*>(&layer);
    return arrays != nullptr && arrays->num_slots() == slots;
  };
  const auto is_attention = [](const LayerCache& layer) {
    return dynamic_cast<const AttentionCache*>(&layer) != nullptr;
  };
  if (const auto* recurrent = std::get_if<Recurrent>(&kind)) {
    return is_recurrent(cache, recurrent->slots) ? ""
                                                 : "an ArraysCache of " + std::to_string(recurrent->slots) + " slots";
  }
  if (const auto* both = std::get_if<RecurrentAndAttention>(&kind)) {
    const auto* list = dynamic_cast<const CacheList*>(&cache);
    const bool fits = list != nullptr && list->num_children() == 2 && is_recurrent(list->child(0), both->slots) &&
                      is_attention(list->child(1));
    return fits ? ""
                : "a CacheList of an ArraysCache of " + std::to_string(both->slots) + " slots and an attention cache";
  }
  if (const auto* chunked = std::get_if<ChunkedAttention>(&kind)) {
    const auto* attention = dynamic_cast<const AttentionCache*>(&cache);
    return attention != nullptr && attention->serves_chunks(chunked->chunk_size)
               ? ""
               : "a ChunkedKVCache of chunk size " + std::to_string(chunked->chunk_size) +
                     " or an attention cache that keeps all rows";
  }
  return is_attention(cache) ? "" : "an attention cache";
}

}  // namespace

DecoderModel::DecoderModel(ModelInfo info, DecoderParts parts)
    : LanguageModel(std::move(info)), parts_(std::move(parts)) {
  if (parts_.kinds.size() != parts_.layers.size()) {
    throw Error(ErrorCode::internal, "[DecoderModel] there must be one kind for each layer");
  }
}

PromptCache DecoderModel::make_cache() const {
  PromptCache cache;
  for (const LayerKind& kind : parts_.kinds) {
    if (!is_stateless(kind)) cache.push_back(make_layer_cache(kind));
  }
  return cache;
}

void DecoderModel::check_cache(const PromptCache& cache) const {
  const auto layers = static_cast<std::size_t>(std::count_if(
      parts_.kinds.begin(), parts_.kinds.end(), [](const LayerKind& kind) { return !is_stateless(kind); }));
  if (cache.size() != layers) {
    throw Error(ErrorCode::invalid_argument, "[LanguageModel::forward] the cache must have " + std::to_string(layers) +
                                                 " layers, but got " + std::to_string(cache.size()));
  }
  std::size_t i = 0;
  for (const LayerKind& kind : parts_.kinds) {
    if (is_stateless(kind)) continue;
    if (const std::string wanted = unfit(kind, cache[i]); !wanted.empty()) {
      throw Error(ErrorCode::invalid_argument, "[LanguageModel::forward] layer " + std::to_string(i) + " needs " +
                                                   wanted + ", but got " + cache[i].class_name());
    }
    ++i;
  }
}

// Layers of one kind are in step: the first one's masks serve all. Asked before any of them is updated.
std::vector<LayerStep> DecoderModel::steps(PromptCache& cache, int N) const {
  std::vector<LayerStep> steps;
  std::size_t i = 0;
  for (std::size_t layer = 0; layer < parts_.kinds.size(); ++layer) {
    const LayerKind& kind = parts_.kinds[layer];
    if (is_stateless(kind)) {
      steps.emplace_back();
      continue;
    }
    LayerStep step = caches_of(kind, cache.at<LayerCache>(i++));
    const auto* chunked = std::get_if<ChunkedAttention>(&kind);
    if (auto* trimmed = chunked != nullptr ? dynamic_cast<FrontTrimmedCache*>(step.attention) : nullptr) {
      trimmed->maybe_trim_front();
    }
    const auto same = std::find(parts_.kinds.begin(), parts_.kinds.end(), kind) - parts_.kinds.begin();
    if (const auto first = static_cast<std::size_t>(same); first < layer) {
      step.mask = steps[first].mask;
      step.real_columns = steps[first].real_columns;
    } else if (chunked != nullptr) {
      step.mask = step.attention->make_chunk_mask(N, chunked->chunk_size);
    } else {
      const auto* sliding = std::get_if<SlidingAttention>(&kind);
      const MaskOptions options{.window = sliding != nullptr ? std::optional(sliding->window) : std::nullopt};
      if (step.attention != nullptr) step.mask = step.attention->make_mask(N, options);
      if (step.recurrent != nullptr) step.real_columns = {step.recurrent->make_mask(N), step.recurrent->lengths()};
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

mx::array DecoderModel::run(const mx::array& tokens, PromptCache& cache, std::vector<mx::array>* layer_outputs) const {
  check_tokens(tokens, info().vocab_size);
  check_cache(cache);
  const int N = tokens.shape(1);
  mx::array h = parts_.embed_tokens(tokens);
  if (parts_.embedding_scale != 1.0f) h = mx::multiply(h, mx::array(parts_.embedding_scale, h.dtype()));
  const std::vector<LayerStep> all = steps(cache, N);
  for (std::size_t i = 0; i < parts_.layers.size(); ++i) {
    h = parts_.layers[i]->forward(h, all[i]);
    if (all[i].recurrent != nullptr) all[i].recurrent->advance(N);
    if (layer_outputs != nullptr) layer_outputs->push_back(h);
  }
  return h;
}

std::vector<mx::array> DecoderModel::layer_outputs(const mx::array& tokens, PromptCache& cache) const {
  std::vector<mx::array> outputs;
  run(tokens, cache, &outputs);
  return outputs;
}

mx::array DecoderModel::forward(const mx::array& tokens, PromptCache& cache) const {
  const mx::array h = run(tokens, cache, nullptr);
  mx::array logits = project(h, parts_.norm, {parts_.lm_head ? *parts_.lm_head : parts_.embed_tokens.head()})[0];
  if (parts_.logit_scale != 1.0f) logits = mx::multiply(logits, mx::array(parts_.logit_scale, logits.dtype()));
  if (parts_.logit_softcap) {
    const mx::array cap(*parts_.logit_softcap, logits.dtype());
    logits = mx::multiply(mx::tanh(mx::divide(logits, cap)), cap);
  }
  return logits;
}

DecoderParts take_decoder_ends(WeightReader& weights, const Config& config, const DecoderEndsOptions& options) {
  const std::string head = options.prefix + "lm_head";
  const int V = config.require_positive_int("vocab_size");
  const int E = config.require_positive_int("hidden_size");
  const bool tied = config.get_bool("tie_word_embeddings").value_or(!weights.has(head + ".weight"));
  if (tied) weights.drop([&](const std::string& name) { return name.starts_with(head + "."); });
  const std::string norm = options.prefix + options.norm;
  DecoderParts parts{.embed_tokens = weights.take_embedding(options.prefix + options.embed_tokens, V, E),
                     .layers = {},
                     .kinds = {},
                     .norm = options.norm_kind == NormKind::rms
                                 ? Norm(weights.take_rms_norm(norm, E, options.norm_eps, options.norm_plus))
                                 : Norm(weights.take_layer_norm(norm, E, options.norm_eps))};
  if (!tied) parts.lm_head = weights.take_linear(head, V, E, false);
  return parts;
}

std::unique_ptr<LanguageModel> make_decoder(const Config& config, WeightReader& weights, DecoderParts parts) {
  return make_decoder(model_info(config, weights), weights, std::move(parts));
}

std::unique_ptr<LanguageModel> make_decoder(ModelInfo info, WeightReader& weights, DecoderParts parts) {
  weights.finish();
  return std::make_unique<DecoderModel>(std::move(info), std::move(parts));
}

}  // namespace reprise::internal
