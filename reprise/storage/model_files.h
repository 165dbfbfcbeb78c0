// A model on disk, whatever its packaging, brought to one form: Hugging Face's config.json and weight names in MLX's
// layouts. A folder (config.json, model*.safetensors, tokenizer.json, …) or one .gguf file.
// Threads: free functions; arrays come back evaluated, so they may go to any thread.
// Owns: weights of a folder look into memory maps that live as long as the arrays.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "mlx/array.h"
#include "reprise/base/tokenizer_data.h"

namespace reprise {

using WeightMap = std::map<std::string, mlx::core::array>;

struct ModelFiles {
  std::filesystem::path path;  // as given
  // Text of config.json, always a JSON object: a bare Infinity (or transformers' {"__float__": "Infinity"}) has become
  // the largest float, NaN null. For GGUF: made from the metadata, with Hugging Face's keys (model_type "llama", …) and
  // a `quantization` member {group_size, bits, "<layer>": {group_size, bits} or false …} where tensors differ.
  std::string config_json;
  // Names as in mlx-lm's folders ("model.layers.0.self_attn.q_proj.weight", ".scales", ".biases"). GGUF's q and k rows
  // are put back into half-split order where llama.cpp's converter had permuted them (llama), and the 1 that it added
  // to Gemma's norms is taken off; its rope_freqs become "model.rope_freqs.weight" [head_dim / 2], which multiply the
  // denominators of rotation. GGUF's numbers stay as they are, in groups of 32 or (Q2_K, Q3_K, Q6_K) 16. Scales and
  // biases are float16: exact but for the K types, whose products of two are rounded once (float32 where float16 has no
  // number as large).
  WeightMap weights;
  // Both `tokenizer_json` and `gguf` are empty when there is no tokenizer (a folder without tokenizer.json).
  TokenizerData tokenizer;
  // SHA-256 hex over config, tokenizer and the tensors' names, dtypes, shapes and a sample of their bytes: tells one
  // model from another without reading all of it.
  std::string fingerprint;
};

// Throws: not_found (no such path; config.json or a shard, by the index or by its number, is missing: named),
// corrupt_data (damaged or truncated file; an index that names a tensor its shard lacks; a tensor in two shards),
// unsupported (GGUF architecture, tensor type or version: named; a folder with neither safetensors nor index), and what
// `beside_weights` throws. It is called once with the tokenizer, perhaps on another thread while the weights are read;
// it has returned when this function does.
ModelFiles read_model_files(const std::filesystem::path& path,
                            const std::function<void(const TokenizerData&)>& beside_weights = {});

}  // namespace reprise
