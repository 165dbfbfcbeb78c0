// A causal language model: tokens in, logits out, everything it remembers in the caller's PromptCache.
// Threads: forward belongs to one thread at a time; weights are evaluated at load, so that thread may be any.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/dtype.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/models/adapter.h"
#include "reprise/storage/model_files.h"

namespace reprise {

// What is common to all architectures.
struct ModelInfo {
  std::string model_type = {};  // Hugging Face's word
  int num_hidden_layers = 0;
  int vocab_size = 0;
  int hidden_size = 0;
  std::optional<int> max_position_embeddings = {};
  std::string quantization = {};   // in a person's words: "4-bit, groups of 32", "none", "mixed (4-bit … )"
  std::size_t num_parameters = 0;  // weights counted unpacked
  std::size_t weights_nbytes = 0;  // as held in memory
};

class LanguageModel {
 public:
  virtual ~LanguageModel() = default;

  // tokens int32 [B, L] → logits [B, L, V] in the compute dtype; appends L tokens to every layer of `cache`.
  // Unevaluated: logits that nobody reads are never computed. Requires: ids in [0, V); those that are not yet evaluated
  // are not checked. Throws: invalid_argument for a cache of another model, or evaluated ids outside [0, V); the cache
  // is then unchanged.
  virtual mlx::core::array forward(const mlx::core::array& tokens, PromptCache& cache) const = 0;

  // Caches of the kinds that this architecture needs, empty.
  virtual PromptCache make_cache() const = 0;

  const ModelInfo& info() const { return info_; }

 protected:
  explicit LanguageModel(ModelInfo info) : info_(std::move(info)) {}

 private:
  ModelInfo info_;
};

// A tensor as a model's files hold it, by mlx-lm's name and in its layout.
struct StoredWeight {
  std::string name;
  mlx::core::array value;
  bool is_matrix = false;  // of a linear map, of experts or an embedding, not quantised: what quantisation is for
};

struct ModelOptions {
  // Dtype of activations. None: float32 on the CPU, the weights' own dtype on a GPU.
  std::optional<mlx::core::Dtype> compute_dtype = {};
  // Dtype in which caches that start empty store keys and values. None: float16 on the CPU, the compute dtype on a GPU.
  std::optional<mlx::core::Dtype> kv_dtype = {};
  std::shared_ptr<const Adapter> adapter = {};  // null: none
  // If given, receives every tensor that the model takes.
  std::vector<StoredWeight>* stored = nullptr;
};

// Builds the architecture that config_json's `model_type` names, and evaluates its weights.
// Throws: unsupported (model_type, quantisation mode, rope type: named), corrupt_data (a tensor is missing, has the
// wrong shape, or is left over: named; config.json is no JSON or lacks a member; an adapter that does not fit).
std::unique_ptr<LanguageModel> make_model(const ModelFiles& files, const ModelOptions& options = {});

// The model types that make_model knows.
std::vector<std::string> known_model_types();

// What make_prompt_cache gave one layer.
struct LayerCacheChoice {
  std::string cache;     // in a person's words: "RotatingKVCache(128, keep 4)"
  bool bounded = false;  // by max_kv_size; otherwise the layer has the model's own kind
};

// The model's own kinds of caches. mlx-lm's name. With `max_kv_size` every layer that would keep all rows becomes a
// RotatingKVCache(max_kv_size, keep = 4), also inside a CacheList; layers that are bounded or recurrent keep theirs.
// `choices`, if given, receives one entry per layer. Throws: invalid_argument for a max_kv_size of 4 or less.
PromptCache make_prompt_cache(const LanguageModel& model, std::optional<int> max_kv_size = {},
                              std::vector<LayerCacheChoice>* choices = nullptr);

// A layer's cache in a person's words: class, and what bounds or narrows it ("QuantizedKVCache(8 bits, groups of 64)").
std::string describe_cache(const LayerCache& cache);

}  // namespace reprise
