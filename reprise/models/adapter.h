// Fine-tuned adapters in mlx-lm's format: a folder with adapter_config.json and adapters.safetensors. Low-rank ones
// (LoRA, Hu et al., https://arxiv.org/abs/2106.09685; DoRA, Liu et al., https://arxiv.org/abs/2402.09353) are added to
// the layers they name, "full" ones replace weights.
// Threads: values, immutable.
#pragma once

#include <filesystem>
#include <string>

#include "reprise/storage/model_files.h"

namespace reprise {

struct Adapter {
  enum class Kind { lora, dora, full };
  Kind kind = Kind::lora;
  float scale = 1.0f;  // multiplies the low-rank product
  // By mlx-lm's names: "model.layers.3.self_attn.q_proj.lora_a" [in, rank], ".lora_b" [rank, out], ".m" [out] (DoRA);
  // of experts [experts, rank, in] and [experts, out, rank]; of an embedding [V, rank] and [rank, E].
  WeightMap weights = {};
  std::string fingerprint = {};  // SHA-256 hex over the config and all weights
};

// Throws: not_found (the folder or one of its two files), corrupt_data (damaged files; no scale; nothing in it),
// unsupported (another fine_tune_type: named).
Adapter read_adapter(const std::filesystem::path& folder);

}  // namespace reprise
