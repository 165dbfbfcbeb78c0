// A model on disk, whatever its packaging, brought to one form: Hugging Face's config.json and weight names in MLX's
// layouts. A folder (config.json, model*.safetensors, tokenizer.json, …) or one .gguf file.
// Threads: free functions; arrays come back evaluated, so they may go to any thread.
// Owns: weights of a folder look into memory maps that live as long as the arrays.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "mlx/array.h"
#include "reprise/base/tokenizer_data.h"

namespace reprise {

using WeightMap = std::map<std::string, mlx::core::array>;

struct ModelFiles {
  std::filesystem::path path;  // as given
  // Text of config.json. For GGUF: made from the metadata, with Hugging Face's keys (model_type "llama", …) and a
  // `quantization` member {group_size, bits, "<layer>": {group_size, bits} or false …} where tensors differ.
  std::string config_json;
  // Names as in mlx-lm's folders ("model.layers.0.self_attn.q_proj.weight", ".scales", ".biases"). GGUF's q and k rows
  // are put back into half-split order.
  WeightMap weights;
  TokenizerData tokenizer;
  // SHA-256 hex over config, tokenizer and the tensors' names, dtypes, shapes and a sample of their bytes: tells one
  // model from another without reading all of it.
  std::string fingerprint;
};

// Throws: not_found (no such path; config.json, tokenizer.json or a shard named in the index is missing: named),
// corrupt_data (damaged or truncated file; an index that names a tensor its shard lacks), unsupported (GGUF
// architecture, tensor type or version: named; a folder with neither safetensors nor index).
ModelFiles read_model_files(const std::filesystem::path& path);

}  // namespace reprise
