// Rotary position embeddings (Su et al., https://arxiv.org/abs/2104.09864) with the context-length scalings in use.
// Frequencies are computed once, at construction, in float32.
// Threads: immutable after construction; its arrays are evaluated, so any thread may apply it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "reprise/kernels/rope.h"
#include "reprise/nn/keys_values.h"

namespace reprise {

// `rope_scaling` of a config.json, Hugging Face's keys. A member that is absent takes its type's default.
struct RopeScaling {
  std::string type = "default";  // `type`, else `rope_type`
  std::optional<float> factor = {};
  std::optional<float> low_freq_factor = {};
  std::optional<float> high_freq_factor = {};
  std::optional<int> original_max_position_embeddings = {};
  std::optional<float> beta_fast = {};
  std::optional<float> beta_slow = {};
  std::optional<float> mscale = {};
  std::optional<float> mscale_all_dim = {};
  std::optional<float> attention_factor = {};  // yarn, longrope: scales rotated features, instead of what they compute
  std::optional<float> partial_rotary_factor = {};
  std::optional<float> long_mscale = {};
  std::vector<float> long_factor = {};  // one value for all pairs, or dims / 2
  std::vector<int> mrope_section = {};
  // Type "freq_factors" (GGUF's rope_freqs tensor): dims / 2 factors that multiply the frequencies' denominators.
  std::vector<float> freq_factors = {};
};

struct RopeOptions {
  int dims = 0;              // features rotated; those after it pass through
  float base = 10000.0f;     // `rope_theta`
  bool traditional = false;  // pairs (2i, 2i+1) instead of (i, i + dims/2)
  std::optional<RopeScaling> scaling = {};
  std::optional<int> max_position_embeddings = {};
};

struct RotateOptions {
  float scale = 1.0f;    // multiplies positions, besides what the type does
  bool inverse = false;  // takes the rotation at the same positions back, and what the type scales x by
};

class Rope {
 public:
  // Throws: unsupported for an unknown type (named); invalid_argument for options that its type lacks or contradicts.
  explicit Rope(const RopeOptions& options);

  // x [B, heads, L, D]; token t of row b is at offset (or offset[b]) + t. Returns: the same shape and dtype.
  // Throws: invalid_argument for another rank, D < dims, or offsets that are not [B].
  mlx::core::array operator()(const mlx::core::array& x, const Offset& offset, const RotateOptions& options = {}) const;

  // The same rotation as kernels take it. Null for type "dynamic", whose frequencies depend on the length.
  const kernels::RopeParams* kernel_params() const { return kernel_params_ ? &*kernel_params_ : nullptr; }

 private:
  int dims_;
  bool traditional_;
  float scale_ = 1.0f;                     // multiplies positions
  float input_scale_ = 1.0f;               // multiplies x[…, :dims] first
  std::optional<float> base_;              // exactly one of base_ and freqs_ is set
  std::optional<mlx::core::array> freqs_;  // float32 [dims / 2], denominators of the angle
  struct Dynamic {
    float base;
    float factor;
    int max_position_embeddings;
  };
  std::optional<Dynamic> dynamic_;
  std::optional<kernels::RopeParams> kernel_params_;
};

// The scale of attention's scores under YaRN, where not the rotated features alone carry its magnitude (DeepSeek):
// `scale` times the magnitude of mscale_all_dim squared. `scale` itself for type "default" or without mscale_all_dim.
float apply_yarn_mscale(float scale, const RopeScaling& scaling);

}  // namespace reprise
