#include "reprise/generate/recorded_cache.h"

#include <algorithm>
#include <optional>

namespace reprise {

namespace {

// The record of the first `size` tokens.
void cut_record(RecordedCache& cache, std::size_t size) {
  auto surplus = static_cast<int>(cache.tokens.size() - size);
  cache.tokens.resize(size);
  while (surplus > 0 && !cache.pieces.empty()) {
    const int cut = std::min(surplus, cache.pieces.back());
    surplus -= cut;
    cache.pieces.back() -= cut;
    if (cache.pieces.back() == 0) cache.pieces.pop_back();
  }
}

// Returns: the position reached, at most `to`; none when nothing changed.
std::optional<int> go_back(PromptCache& cache, int from, int to, Snapshots* snapshots) {
  if (snapshots != nullptr) {
    auto reached = snapshots->rewind(cache, to);
    snapshots->forget_after(to);
    return reached;
  }
  if (!can_trim_prompt_cache(cache, from - to)) return {};
  trim_prompt_cache(cache, from - to);
  return to;
}

}  // namespace

void keep_common_prefix(const LanguageModel& model, RecordedCache& cache, std::span<const TokenId> ids,
                        const KVCacheOptions& options, Snapshots* snapshots) {
  const Tokens& record = cache.tokens;
  // A turn that failed may have left snapshots of more than is recorded.
  if (snapshots != nullptr) snapshots->forget_after(static_cast<int>(record.size()));
  const auto differ = std::mismatch(record.begin(), record.end(), ids.begin(), ids.end()).first;
  const auto common = std::min(static_cast<std::size_t>(differ - record.begin()), ids.size() - 1);
  if (common == record.size()) return;
  const auto reached = go_back(cache.cache, static_cast<int>(record.size()), static_cast<int>(common), snapshots);
  if (reached) {
    cut_record(cache, static_cast<std::size_t>(*reached));
  } else {
    cache = {make_prompt_cache(model, options.max_kv_size), {}};
  }
}

}  // namespace reprise
