// Which loader builds which `model_type`: one line an architecture.
#include <algorithm>
#include <array>
#include <string_view>

#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/config.h"
#include "reprise/models/language_model.h"

namespace reprise {
namespace {

struct Architecture {
  std::string_view model_type;
  std::unique_ptr<LanguageModel> (*make)(const ModelFiles&, const ModelOptions&);
};

// One line each.
// clang-format off
constexpr std::array kArchitectures = {
    Architecture{"cohere2", internal::make_cohere2},
    Architecture{"deepseek_v2", internal::make_deepseek_v2},
    Architecture{"deepseek_v3", internal::make_deepseek_v3},
    Architecture{"falcon_h1", internal::make_falcon_h1},
    Architecture{"falcon_mamba", internal::make_mamba},
    Architecture{"gemma2", internal::make_gemma2},
    Architecture{"gemma3", internal::make_gemma3},
    Architecture{"gemma3_text", internal::make_gemma3_text},
    Architecture{"glm4", internal::make_glm4},
    Architecture{"gpt_oss", internal::make_gpt_oss},
    Architecture{"granite", internal::make_granite},
    Architecture{"iquestcoder", internal::make_llama},
    Architecture{"jamba", internal::make_jamba},
    Architecture{"joyai_llm_flash", internal::make_deepseek_v3},
    Architecture{"kimi_k2", internal::make_deepseek_v3},
    Architecture{"lfm2", internal::make_lfm2},
    Architecture{"lfm2_moe", internal::make_lfm2},
    Architecture{"llama", internal::make_llama},
    Architecture{"llama4", internal::make_llama4},
    Architecture{"llama4_text", internal::make_llama4_text},
    Architecture{"mamba", internal::make_mamba},
    Architecture{"mamba2", internal::make_mamba2},
    Architecture{"ministral3", internal::make_ministral3},
    Architecture{"mistral", internal::make_llama},
    Architecture{"mixtral", internal::make_mixtral},
    Architecture{"nemotron_h", internal::make_nemotron_h},
    Architecture{"olmo2", internal::make_olmo2},
    Architecture{"olmo3", internal::make_olmo3},
    Architecture{"phi3", internal::make_phi3},
    Architecture{"qwen2", internal::make_qwen2},
    Architecture{"qwen3", internal::make_qwen3},
    Architecture{"qwen3_5", internal::make_qwen3_5},
    Architecture{"qwen3_5_moe", internal::make_qwen3_5},
    Architecture{"qwen3_moe", internal::make_qwen3_moe},
    Architecture{"qwen3_next", internal::make_qwen3_next},
    Architecture{"recurrent_gemma", internal::make_recurrent_gemma},
    Architecture{"smollm3", internal::make_llama},
    Architecture{"starcoder2", internal::make_starcoder2},
    Architecture{"xverse", internal::make_llama},
};
// clang-format on

constexpr bool is_sorted_without_doubles() {
  for (std::size_t i = 1; i < kArchitectures.size(); ++i) {
    if (kArchitectures[i - 1].model_type >= kArchitectures[i].model_type) return false;
  }
  return true;
}
static_assert(is_sorted_without_doubles());

}  // namespace

std::unique_ptr<LanguageModel> make_model(const ModelFiles& files, const ModelOptions& options) {
  const std::string model_type = internal::Config(files.config_json).require_string("model_type");
  const auto* found = std::find_if(kArchitectures.begin(), kArchitectures.end(),
                                   [&](const Architecture& known) { return known.model_type == model_type; });
  if (found != kArchitectures.end()) return found->make(files, options);
  std::string known;
  for (const std::string& name : known_model_types()) known += (known.empty() ? "" : ", ") + name;
  throw Error(ErrorCode::unsupported,
              "[make_model] model_type must be one of " + known + ", but got '" + model_type + "'");
}

std::vector<std::string> known_model_types() {
  std::vector<std::string> names;
  for (const Architecture& known : kArchitectures) names.emplace_back(known.model_type);
  return names;
}

}  // namespace reprise
