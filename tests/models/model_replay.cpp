// model_replay DIR [--only NAME…] [--part K/N] [--known] [--verbose]: runs tiny models in the conformance kit's format,
// one folder a model, and tells where we differ from the outputs stored beside them. DIR may be one such folder itself.
// Exit status: 0 all passed, 1 a case failed, 2 nothing could be run as asked.
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "mlx/dtype.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/layer_cache.h"
#include "reprise/kernels/reference.h"
#include "reprise/nn/keys_values.h"
#include "reprise/storage/model_files.h"
#include "tests/models/replay_program.h"

namespace {

using namespace reprise;
using namespace reprise::test;
namespace fs = std::filesystem;

void run(const fs::path& folder, const KitModel& kit, const KitMode& mode, const ReportOutcome& report) {
  const auto model = make_kit_model(folder, kit, mode);
  const bool is_hf = folder != kit.folder;  // other names and layouts of the same weights: one scenario tells
  check_sequences(*model, kit, is_hf ? std::vector{kit.scenarios.front()} : kit.scenarios, mode, report);
  if (!is_hf) check_batches(*model, kit, mode, report);
}

bool is_stored_in(mlx::core::Dtype dtype, const LayerCache& cache) {
  if (const auto* list = dynamic_cast<const CacheList*>(&cache)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      if (!is_stored_in(dtype, list->child(i))) return false;
    }
    return true;
  }
  const auto* attention = dynamic_cast<const AttentionCache*>(&cache);
  return attention == nullptr || std::get<DenseKV>(attention->keys_and_values()).keys.dtype() == dtype;
}

// Outputs hardly tell whether a layer stores keys and values in the dtype asked for.
void check_kv_dtype(const fs::path& folder, const KitModel& kit, const ReportOutcome& report) {
  KitOutcome outcome{"kv_dtype", "", 0};
  try {
    const auto model = make_model(read_model_files(folder), {.kv_dtype = mlx::core::float16});
    PromptCache cache = model->make_cache();
    feed(*model, {kit.scenarios.front().prompt}, cache);
    for (std::size_t i = 0; i < cache.size() && outcome.failure.empty(); ++i) {
      if (!is_stored_in(mlx::core::float16, cache[i])) {
        outcome.failure = "layer " + std::to_string(i) + " must store float16, as the options ask, but does not";
      }
    }
  } catch (const std::exception& error) {
    outcome.failure = error.what();
  }
  report(outcome);
}

void check_folder(const fs::path& folder, const ReportOutcome& report) {
  const KitModel kit = read_kit(folder);
  if (kit.scenarios.empty()) throw std::runtime_error("expected.json has no scenario of one sequence");
  check_kv_dtype(folder, kit, report);
  std::vector<fs::path> layouts = {folder};
  if (fs::exists(folder / "hf")) layouts.push_back(folder / "hf");
  for (const KitMode& mode : modes_for(kit)) {
    std::optional<kernels::reference::Scope> scope;
    if (mode.kind != KitMode::Kind::kernels) scope.emplace();
    for (const fs::path& layout : layouts) {
      const std::string prefix = layout == folder ? "" : "hf ";
      const auto tell = [&](KitOutcome outcome) {
        outcome.name = prefix + outcome.name + (outcome.name.empty() ? "" : " ") + "(" + mode.name + ")";
        report(outcome);
      };
      try {
        run(layout, kit, mode, tell);
      } catch (const std::exception& error) {
        tell({"", error.what(), 0});
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return replay_folders("model_replay", std::vector<std::string>(argv + 1, argv + argc), check_folder);
}
