// The GGUF architectures that are read: how llama.cpp names and lays out their tensors, and what Hugging Face has
// instead. Private to storage.
// Threads: free functions over constants.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "reprise/storage/gguf.h"
#include "reprise/storage/gguf_weights.h"

namespace reprise::internal {

struct GgufName {
  const char* gguf;
  const char* hugging_face;
};

struct GgufArchitecture {
  const char* name;                        // `general.architecture`, and the first part of its metadata keys
  const char* model_type;                  // Hugging Face's
  std::span<const GgufName> common_names;  // of a layer's tensors, as other architectures have them
  std::span<const GgufName> own_names;
  // The rows of each head of q and k lie as pairs that rotate together.
  bool interleaves_heads = false;
  // The norms' weights are stored with 1 added: Hugging Face's models add it when they run.
  bool norms_hold_one_more = false;
};

// Throws: unsupported (named).
const GgufArchitecture& find_gguf_architecture(const std::string& name);

struct GgufHeads {
  int queries;
  int keys_values;
};

// "blk.7.attn_q.weight" → "model.layers.7.self_attn.q_proj.weight", and how to convert it. None for a tensor that
// belongs into the config (rope factors). Throws: unsupported for a tensor that has no place.
std::optional<GgufConversion> gguf_conversion(const GgufTensor& tensor, const GgufArchitecture& architecture,
                                              const GgufHeads& heads);

const GgufTensor* find_tensor(const GgufHeader& header, const std::string& name);

}  // namespace reprise::internal
