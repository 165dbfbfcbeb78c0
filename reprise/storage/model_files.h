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
  // Names as in mlx-lm's folders ("model.layers.0.self_attn.q_proj.weight", ".scales", ".biases"). What llama.cpp's
  // converter changed is taken back: llama's permuted q and k rows, Gemma's norms + 1; rope_freqs, which multiply the
  // denominators of rotation, are "model.rope_freqs.weight" [head_dim / 2]. GGUF's scales and biases are float16
  // (float32 where they are too large), of groups of 32 or 16: exact, but the products of K types are rounded once.
  WeightMap weights;
  // Both `tokenizer_json` and `gguf` are empty when there is no tokenizer (a folder without tokenizer.json).
  TokenizerData tokenizer;
  // SHA-256 hex over config, tokenizer and the tensors' names, dtypes, shapes and a sample of their bytes: tells one
  // model from another without reading all of it. Models that differ in a few elements only may share it.
  std::string fingerprint;
};

// Throws: not_found (no such path; config.json or a shard, by the index or by its number, is missing: named),
// corrupt_data (damaged or truncated file; an index that names a tensor its shard lacks; a tensor in two shards),
// unsupported (GGUF architecture, tensor type or version: named; a folder with neither safetensors nor index), and what
// `beside_weights` throws. It is called once with the tokenizer, perhaps on another thread while the weights are read;
// it has returned when this function does.
ModelFiles read_model_files(const std::filesystem::path& path,
                            const std::function<void(const TokenizerData&)>& beside_weights = {});

// As `fingerprint`, but over all bytes of the tensors as they were read: for what outlives the process. Reads all of
// them, at about a GB a second.
std::string full_fingerprint(const ModelFiles& files);

}  // namespace reprise
