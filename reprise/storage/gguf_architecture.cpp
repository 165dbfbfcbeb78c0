#include "reprise/storage/gguf_architecture.h"

#include <algorithm>
#include <array>

#include "reprise/base/error.h"
#include "reprise/storage/system_error.h"

namespace reprise::internal {
namespace {

[[noreturn]] void unsupported(const std::string& what) {
  throw Error(ErrorCode::unsupported, "[read_model_files] " + what);
}

constexpr std::array<GgufName, 3> kModelNames{
    {{"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}}};

constexpr GgufName kRopeFactors{"rope_freqs", "model.rope_freqs"};  // llama's

constexpr std::array<GgufName, 8> kGatedLayer{{{"attn_norm", "input_layernorm"},
                                               {"attn_q", "self_attn.q_proj"},
                                               {"attn_k", "self_attn.k_proj"},
                                               {"attn_v", "self_attn.v_proj"},
                                               {"attn_output", "self_attn.o_proj"},
                                               {"ffn_gate", "mlp.gate_proj"},
                                               {"ffn_up", "mlp.up_proj"},
                                               {"ffn_down", "mlp.down_proj"}}};

constexpr std::array<GgufName, 1> kLlama{{{"ffn_norm", "post_attention_layernorm"}}};

constexpr std::array<GgufName, 3> kQwen3{{{"attn_q_norm", "self_attn.q_norm"},
                                          {"attn_k_norm", "self_attn.k_norm"},
                                          {"ffn_norm", "post_attention_layernorm"}}};

constexpr std::array<GgufName, 5> kGemma3{{{"attn_q_norm", "self_attn.q_norm"},
                                           {"attn_k_norm", "self_attn.k_norm"},
                                           {"post_attention_norm", "post_attention_layernorm"},
                                           {"ffn_norm", "pre_feedforward_layernorm"},
                                           {"post_ffw_norm", "post_feedforward_layernorm"}}};

constexpr std::array<GgufName, 6> kPhi3{{{"attn_norm", "input_layernorm"},
                                         {"attn_qkv", "self_attn.qkv_proj"},
                                         {"attn_output", "self_attn.o_proj"},
                                         {"ffn_norm", "post_attention_layernorm"},
                                         {"ffn_up", "mlp.gate_up_proj"},
                                         {"ffn_down", "mlp.down_proj"}}};

// Mistral's models are written as llama.
const std::array<GgufArchitecture, 5> kArchitectures{{
    {.name = "llama",
     .model_type = "llama",
     .common_names = kGatedLayer,
     .own_names = kLlama,
     .interleaves_heads = true},
    {.name = "qwen2", .model_type = "qwen2", .common_names = kGatedLayer, .own_names = kLlama},
    {.name = "qwen3", .model_type = "qwen3", .common_names = kGatedLayer, .own_names = kQwen3},
    {.name = "gemma3",
     .model_type = "gemma3_text",
     .common_names = kGatedLayer,
     .own_names = kGemma3,
     .norms_hold_one_more = true},
    {.name = "phi3", .model_type = "phi3", .common_names = {}, .own_names = kPhi3},
}};

const char* find_name(std::span<const GgufName> names, const std::string& gguf) {
  for (const GgufName& name : names) {
    if (gguf == name.gguf) return name.hugging_face;
  }
  return nullptr;
}

}  // namespace

const GgufArchitecture& find_gguf_architecture(const std::string& name) {
  const auto found = std::find_if(kArchitectures.begin(), kArchitectures.end(),
                                  [&](const GgufArchitecture& one) { return one.name == name; });
  if (found != kArchitectures.end()) return *found;
  std::string known;
  for (const GgufArchitecture& one : kArchitectures) known += (known.empty() ? "" : ", ") + std::string(one.name);
  unsupported("GGUF architecture must be one of " + known + ", but got " + printable(name));
}

std::optional<GgufConversion> gguf_conversion(const GgufTensor& tensor, const GgufArchitecture& architecture,
                                              const GgufHeads& heads) {
  const std::string& name = tensor.name;
  const std::string_view model_type = architecture.model_type;
  if (model_type == "phi3" && (name == "rope_factors_long.weight" || name == "rope_factors_short.weight")) {
    return std::nullopt;
  }
  const std::size_t last_dot = name.rfind('.');
  const std::string suffix = last_dot == std::string::npos ? "" : name.substr(last_dot);
  if (suffix == ".weight" || suffix == ".bias") {
    const std::string stem = name.substr(0, last_dot);
    if (stem == kRopeFactors.gguf && model_type == "llama") {
      return GgufConversion{&tensor, kRopeFactors.hugging_face + suffix};
    }
    if (const char* found = find_name(kModelNames, stem)) {
      return GgufConversion{.tensor = &tensor,
                            .name = found + suffix,
                            .holds_one_more = architecture.norms_hold_one_more && stem == "output_norm"};
    }
    const std::size_t part = stem.find('.', 4);
    if (stem.starts_with("blk.") && part != std::string::npos) {
      const std::string layer = stem.substr(4, part - 4);
      const std::string role = stem.substr(part + 1);
      const char* own = find_name(architecture.own_names, role);
      const char* found = own != nullptr ? own : find_name(architecture.common_names, role);
      if (found != nullptr && !layer.empty() && layer.find_first_not_of("0123456789") == std::string::npos) {
        GgufConversion conversion{.tensor = &tensor, .name = "model.layers." + layer + "." + found + suffix};
        if (architecture.interleaves_heads && role == "attn_q") conversion.heads = heads.queries;
        if (architecture.interleaves_heads && role == "attn_k") conversion.heads = heads.keys_values;
        conversion.holds_one_more = architecture.norms_hold_one_more && role.ends_with("norm");
        return conversion;
      }
    }
  }
  unsupported("tensor " + printable(name) + " has no place in architecture " + architecture.name);
}

const GgufTensor* find_tensor(const GgufHeader& header, const std::string& name) {
  for (const GgufTensor& tensor : header.tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

}  // namespace reprise::internal
