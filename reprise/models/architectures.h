// The loaders of all architectures, one line each. Private to `models`.
#pragma once

#include <memory>

#include "reprise/models/language_model.h"

namespace reprise::internal {

// Each: throws as make_model.
std::unique_ptr<LanguageModel> make_cohere2(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_falcon_h1(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_gemma2(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_gemma3(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_gemma3_text(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_glm4(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_gpt_oss(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_granite(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_jamba(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_lfm2(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_llama(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_nemotron_h(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_mamba(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_mamba2(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_ministral3(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_mixtral(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_olmo2(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_olmo3(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_phi3(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_qwen2(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_qwen3(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_qwen3_5(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_qwen3_moe(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_qwen3_next(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_recurrent_gemma(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_starcoder2(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_deepseek_v2(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_deepseek_v3(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_llama4(const ModelFiles& files, const ModelOptions& options);
std::unique_ptr<LanguageModel> make_llama4_text(const ModelFiles& files, const ModelOptions& options);

}  // namespace reprise::internal
