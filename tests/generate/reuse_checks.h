// Warm equals cold: whatever a cache went through (fork, undo, edit, trim, file, batch), it answers as one that was
// computed from nothing.
#pragma once

#include <string>
#include <vector>

#include "reprise/generate/generate.h"
#include "tests/models/kit_checks.h"

namespace reprise::test {

struct ReuseSetting {
  std::string name;
  KVCacheOptions kv = {};
};
// Every kind of cache that options make of a model's own.
std::vector<ReuseSetting> reuse_settings();

// max|warm - cold| / max|cold| that is allowed: what sums in another order round, and what that moves where the
// weights' products or the stored rows are rounded.
double reuse_tolerance(const LanguageModel& model, const KVCacheOptions& kv);

// Feeds `ids` in pieces, the last of which takes the rest, as generate feeds: recorded, quantised as it goes.
void feed_recorded(const LanguageModel& model, RecordedCache& cache, std::span<const TokenId> ids,
                   const std::vector<int>& pieces, const KVCacheOptions& kv);

// The distance of what `warm` answers to some further tokens from what a cold cache of the same tokens does.
double distance_from_cold(const LanguageModel& model, const RecordedCache& warm, const KVCacheOptions& kv);

// Over caches and their records. Never throws.
void check_reuse_of_caches(const LanguageModel& model, const ReuseSetting& setting, const ReportOutcome& report);

// Through ChatSession: turns, fork, undo, another continuation, save and load. Never throws.
void check_reuse_of_chats(const LoadedModel& model, const ReuseSetting& setting, double tolerance,
                          const ReportOutcome& report);

// A kit model with a tokenizer of single characters and a plain chat template.
LoadedModel with_kit_tokenizer(std::unique_ptr<LanguageModel> model);

}  // namespace reprise::test
