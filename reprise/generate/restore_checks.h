// Whether what a chat file holds can go on with the model at hand: asked before anything is replaced. Private to
// `generate`. Threads: free functions; the model is only read.
#pragma once

#include <optional>
#include <string>

#include "reprise/generate/chat_file.h"
#include "reprise/generate/generate.h"
#include "reprise/generate/loaded_model.h"

namespace reprise::internal {

struct CacheMisfit {
  std::string what;
  bool other_dtype = false;  // the file is sound, but keeps its rows in another dtype
};

// Layers, classes (those that `options` give rise to), shapes, dtype, record. Returns: what is wrong, or none. Cost:
// builds one step's graph or two, computes nothing.
std::optional<CacheMisfit> misfit(const LoadedModel& model, const RecordedCache& cache, const KVCacheOptions& options);

// Ids, logit bias, texts against ids, tools and template variables. Returns: what is wrong, or none.
std::optional<std::string> misfit(const LoadedModel& model, const SavedChat& chat);

}  // namespace reprise::internal
