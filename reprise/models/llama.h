// The Llama family: Llama 2 and 3.x, SmolLM2, Mistral, with sliding windows where the config names them. Private to
// `models`. Grattafiori et al., https://arxiv.org/abs/2407.21783.
#pragma once

#include <memory>

#include "reprise/models/language_model.h"

namespace reprise::internal {

// Throws: as make_model.
std::unique_ptr<LanguageModel> make_llama(const ModelFiles& files, const ModelOptions& options);

}  // namespace reprise::internal
