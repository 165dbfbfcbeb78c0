// The driver's steps on whole states: reading, restoring, files, lists.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <optional>
#include <stdexcept>

#include "reprise/base/error.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/registry.h"
#include "tests/conformance/compare.h"
#include "tests/conformance/driver.h"

namespace reprise::conformance {

namespace {

void note(Observation& out, const std::string& what, const std::string& difference) {
  if (!difference.empty()) out.defects.push_back(what + " is not as it must be: " + difference);
}

// A folder that goes away with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> counter = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("conformance_replay." + std::to_string(reinterpret_cast<std::uintptr_t>(this)) + "." +
             std::to_string(counter++));
    if (!std::filesystem::create_directory(path_)) throw std::runtime_error("cannot create " + path_.string());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string file(const char* name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

void compare_caches(Observation& out, const std::string& what, const PromptCache& got, const PromptCache& want) {
  if (got.size() != want.size()) {
    out.defects.push_back(what + ": got " + std::to_string(got.size()) + " layers");
    return;
  }
  for (std::size_t i = 0; i < got.size(); ++i)
    note(out, what, compare_states(got[i].saved_state(), want[i].saved_state()));
}

// Children out of step (no model makes such) are trimmed by their common minimum here, where mlx-lm trims each by what
// it has and answers with the last one's count. For those the driver checks our answer, then does what was recorded, so
// that the rest of the case can run.
bool out_of_step(const CacheList& list) {
  for (std::size_t i = 1; i < list.num_children(); ++i) {
    if (list[i].length() != list[0].length()) return true;
  }
  return false;
}

std::string difference_to_common_trim(const CacheList& got, const CacheList& before, int n, int result) {
  int common = n;
  for (std::size_t i = 0; i < before.num_children(); ++i) common = std::min(common, before[i].length());
  if (result != common) return "got " + std::to_string(result) + ", want " + std::to_string(common);
  for (std::size_t i = 0; i < before.num_children(); ++i) {
    if (got[i].length() != before[i].length() - common) return "child " + std::to_string(i) + " was trimmed otherwise";
  }
  return "";
}

}  // namespace

void Driver::read_state(const Json& step, Observation& out) {
  const LayerCache& cache = target(step);
  out.state = cache.state();
  if (!step.value("expect", Json::object()).contains("state_v1")) return;
  out.legacy_state = cache.legacy_state();
  out.legacy_meta = cache.legacy_meta();
  const auto restored = cache_from_legacy(cache.class_name(), *out.legacy_state, *out.legacy_meta);
  note(out, "the legacy pair", compare_states(restored->legacy_state(), *out.legacy_state));
}

void Driver::reload(const Json& step, Observation& out) {
  if (step.contains("path")) throw std::runtime_error("not supported: reload of a child");
  Slot& entry = slot_of(step);
  const State before = entry.cache->state();
  entry.cache = cache_from_state(entry.cache->class_name(), before);
  note(out, "reload", compare_states(entry.cache->state(), before));
  // Its columns are all that tells the offset, so its state is cut to its rows.
  entry.own_capacity |= entry.cache->class_name() == "ConcatenateKVCache";
}

PromptCache Driver::fork_slots(const Json& names) {
  PromptCache cache;
  for (const Json& name : names) cache.push_back(slot(name).cache->fork());
  return cache;
}

void Driver::trim_list(const Json& step, Observation& out) {
  const int n = step.at("n");
  PromptCache cache = fork_slots(step.at("list"));
  PromptCache recorded = cache.fork();
  out.scalars["can_trim"] = can_trim_prompt_cache(cache);
  const int result = trim_prompt_cache(cache, n);
  out.scalars["result"] = result;

  auto* list = recorded.size() == 1 ? dynamic_cast<CacheList*>(&recorded[0]) : nullptr;
  if (list && list->is_trimmable() && out_of_step(*list)) {
    const auto& trimmed = dynamic_cast<const CacheList&>(cache[0]);
    note(out, "trim", difference_to_common_trim(trimmed, *list, n, result));
    for (std::size_t i = 0; i < list->num_children(); ++i) out.scalars["result"] = list->child(i).trim(n);
    cache = std::move(recorded);
  }
  for (std::size_t i = 0; i < cache.size(); ++i) slot(step["list"][i]).cache = cache[i].fork();
}

void Driver::save_load(const Json& step, Observation& out) {
  const Json& names = step.at("list");
  const PromptCache cache = fork_slots(names);
  const auto metadata = step.value("metadata", Json::object()).get<std::map<std::string, std::string>>();
  const TemporaryFolder folder;

  const std::string file = save_prompt_cache(folder.file("cache"), cache, metadata);
  LoadedPromptCache loaded = load_prompt_cache_file(file);
  std::filesystem::remove(file);
  compare_caches(out, "save and load", loaded.cache, cache);

  SaveOptions options;
  options.layout = PromptCacheLayout::legacy;
  std::optional<std::string> legacy_file;  // none: the layout has no place for something
  try {
    legacy_file = save_prompt_cache(folder.file("legacy"), cache, metadata, options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
  }
  if (legacy_file) {
    const LoadedPromptCache legacy = load_prompt_cache_file(*legacy_file);
    compare_caches(out, "save and load in the legacy layout", legacy.cache, cache);
    if (legacy.metadata != metadata) out.defects.push_back("the legacy layout changed the metadata");
  }

  out.scalars["metadata"] = loaded.metadata;
  out.scalars["result"] = loaded.cache.size();
  for (std::size_t i = 0; i < loaded.cache.size(); ++i)
    slots_[names[i].get<std::string>()] = {loaded.cache[i].fork(), true};
}

}  // namespace reprise::conformance
