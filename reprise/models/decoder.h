// A decoder: embedding, layers one after the other, a last norm, a head. What differs between architectures is the
// layer; which cache a layer has and how it is masked is data. Private to `models`.
// Threads: as LanguageModel.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/layer_cache.h"
#include "reprise/models/config.h"
#include "reprise/models/language_model.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/linear.h"
#include "reprise/nn/norms.h"
#include "reprise/nn/short_conv.h"

namespace reprise::internal {

// Which cache a layer has.
struct FullAttention {  // KVCache
  bool operator==(const FullAttention&) const = default;
};
struct SlidingAttention {  // RotatingKVCache
  int window;
  bool operator==(const SlidingAttention&) const = default;
};
struct ChunkedAttention {  // ChunkedKVCache; attention does not cross the multiples of chunk_size
  int chunk_size;
  bool operator==(const ChunkedAttention&) const = default;
};
struct Recurrent {  // ArraysCache
  int slots;
  bool operator==(const Recurrent&) const = default;
};
struct RecurrentAndAttention {  // CacheList of an ArraysCache and a KVCache
  int slots;
  bool operator==(const RecurrentAndAttention&) const = default;
};
struct Stateless {  // no cache at all: the layer has no place in the prompt cache
  bool operator==(const Stateless&) const = default;
};
using LayerKind =
    std::variant<FullAttention, SlidingAttention, ChunkedAttention, Recurrent, RecurrentAndAttention, Stateless>;

// One layer's view of one step. Only what its kind has is set.
struct LayerStep {
  AttentionCache* attention = nullptr;
  ArraysCache* recurrent = nullptr;
  Mask mask = NoMask{};           // for attention
  RealColumns real_columns = {};  // for recurrence

  AttentionCache& attention_cache() const { return *attention; }
  ArraysCache& recurrent_cache() const { return *recurrent; }
};

class DecoderLayer {
 public:
  virtual ~DecoderLayer() = default;

  // h [B, L, E] → [B, L, E]; appends L tokens to the step's caches. The decoder advances paddings of recurrent caches
  // afterwards: a layer does not.
  virtual mlx::core::array forward(const mlx::core::array& h, const LayerStep& step) const = 0;
};

// `layer` as one: any aggregate with that method.
template <typename Layer>
std::unique_ptr<DecoderLayer> make_layer(Layer layer) {
  struct Holder final : DecoderLayer {
    explicit Holder(Layer held) : layer(std::move(held)) {}
    mlx::core::array forward(const mlx::core::array& h, const LayerStep& step) const override {
      return layer.forward(h, step);
    }
    Layer layer;
  };
  return std::make_unique<Holder>(std::move(layer));
}

struct DecoderParts {
  Embedding embed_tokens;
  std::vector<std::unique_ptr<DecoderLayer>> layers;
  std::vector<LayerKind> kinds;  // as many as layers
  Norm norm;
  std::optional<Linear> lm_head = {};       // none: tied to the embedding
  float embedding_scale = 1.0f;             // multiplies embeddings
  float logit_scale = 1.0f;                 // multiplies logits
  std::optional<float> logit_softcap = {};  // c: logits become c · tanh(logits / c)
};

class DecoderModel final : public LanguageModel {
 public:
  // Requires: as many kinds as layers.
  DecoderModel(ModelInfo info, DecoderParts parts);

  mlx::core::array forward(const mlx::core::array& tokens, PromptCache& cache) const override;
  PromptCache make_cache() const override;

  // The output of every layer [B, L, E], for finding the first one that is wrong. Appends to `cache`, as forward does.
  std::vector<mlx::core::array> layer_outputs(const mlx::core::array& tokens, PromptCache& cache) const;

 private:
  mlx::core::array run(const mlx::core::array& tokens, PromptCache& cache,
                       std::vector<mlx::core::array>* layer_outputs) const;
  void check_cache(const PromptCache& cache) const;
  std::vector<LayerStep> steps(PromptCache& cache, int N) const;

  DecoderParts parts_;
};

enum class NormKind { rms, layer };

struct DecoderEndsOptions {
  std::string prefix = {};  // "language_model."
  float norm_eps = 1e-6f;
  float norm_plus = 0.0f;  // as WeightReader::take_rms_norm
  std::string embed_tokens = "model.embed_tokens";
  std::string norm = "model.norm";
  NormKind norm_kind = NormKind::rms;
};
// All parts but the layers and their kinds, by mlx-lm's names, each after the prefix; lm_head unless the config or its
// absence ties it to the embedding. Before or after the layers are taken.
DecoderParts take_decoder_ends(WeightReader& weights, const Config& config, const DecoderEndsOptions& options);

// The model, once every weight is taken; by default with model_info(config, weights). Throws: as WeightReader::finish;
// corrupt_data for impossible sizes.
std::unique_ptr<LanguageModel> make_decoder(const Config& config, WeightReader& weights, DecoderParts parts);
std::unique_ptr<LanguageModel> make_decoder(ModelInfo info, WeightReader& weights, DecoderParts parts);

}  // namespace reprise::internal
