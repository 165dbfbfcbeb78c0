// A model's config.json, read by key with a default or a clear error. Private to `models`.
// Threads: immutable after construction; copies share the document.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reprise/nn/rope.h"
#include "reprise/nn/weight.h"

namespace reprise::internal {

// How one layer's weights are quantised; group_size and bits as in MLX.
struct QuantizationSpec {
  int group_size = 64;
  int bits = 4;
  std::optional<MicroscalingFormat> format = {};  // none: affine
};

// The exceptions that a config's `quantization` makes by layer path ("lm_head", "model.layers.0.self_attn.v_proj");
// none: kept dense. Everything else is told by the shapes of the stored weights.
using QuantizationOverrides = std::map<std::string, std::optional<QuantizationSpec>>;

struct RopeKeys {
  std::string layer_type = {};      // whose part is meant, where rope_parameters has one for each type of layer
  float base_otherwise = 10000.0f;  // where no rope_theta is
};

class Config {
 public:
  // Throws: corrupt_data when `json_text` is no JSON object.
  explicit Config(const std::string& json_text);

  // A member that must be there. Throws: corrupt_data, naming it, when it is absent or of another type or not positive.
  int require_positive_int(const std::string& key) const;
  float require_positive_float(const std::string& key) const;
  std::string require_string(const std::string& key) const;

  // A member that may be absent or null. Throws: corrupt_data when it is there with another type.
  std::optional<int> get_int(const std::string& key) const;
  // As get_int, but none also for "auto".
  std::optional<int> get_int_or_auto(const std::string& key) const;
  std::optional<float> get_float(const std::string& key) const;
  std::optional<bool> get_bool(const std::string& key) const;
  std::optional<bool> get_flag(const std::string& key) const;  // also a whole number, true unless it is 0
  std::optional<std::string> get_string(const std::string& key) const;
  std::vector<std::string> get_strings(const std::string& key) const;
  std::vector<int> get_ints(const std::string& key) const;
  std::vector<float> get_floats(const std::string& key) const;
  std::vector<bool> get_bools(const std::string& key) const;

  // A member that must be there and is an object ("text_config"), or none where it may be absent.
  Config require_object(const std::string& key) const;
  std::optional<Config> get_object(const std::string& key) const;
  bool has(const std::string& key) const;  // present and not null

  // From `rope_theta`, `rope_scaling`, `rope_traditional`, `max_position_embeddings`, or the newer `rope_parameters`.
  // Throws: unsupported when rope_parameters differ by layer type and have no part for keys.layer_type.
  RopeOptions rope(int dims, const RopeKeys& keys = {}) const;

  // How many of a head's features rotate, by `partial_rotary_factor`, here or in rope_parameters; none: by
  // `factor_otherwise`. Throws: corrupt_data for a factor outside (0, 1].
  int rotary_dims(int head_dim, float factor_otherwise = 1.0f) const;

  // What is absent here, or null, is what `json_text` has: a model type's defaults, which its configs leave out.
  Config with_defaults(const std::string& json_text) const;
  Config with_member(const std::string& key, int value) const;

  // From `quantization`, else `quantization_config`. Throws: unsupported for a method or mode that MLX does not have.
  QuantizationOverrides quantization_overrides() const;

 private:
  struct Document;
  explicit Config(std::shared_ptr<const Document> document) : document_(std::move(document)) {}
  std::shared_ptr<const Document> document_;
};

}  // namespace reprise::internal
