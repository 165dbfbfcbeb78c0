// A folder of the kit against our model of it: every run, one outcome each.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "reprise/models/language_model.h"
#include "tests/models/model_kit.h"

namespace reprise::test {

// How the model is built and how near it must come.
struct KitMode {
  enum class Kind {
    reference,  // operations made of MLX's, float32: the kit's own tolerances
    kernels,    // ours, float32: products with quantised weights round what they multiply, so those may be further off
    narrow,     // the reference in the weights' own narrow dtype, against the oracle's values in it
  };
  Kind kind;
  std::string name;
};
// Those that say something about a folder: narrow only where its dtype is.
std::vector<KitMode> modes_for(const KitModel& kit);

struct KitOutcome {
  std::string name;     // "scenario/run"
  std::string failure;  // empty: as expected
  double error = 0;     // the largest relative one seen
};
using ReportOutcome = std::function<void(const KitOutcome&)>;

// The first difference of `got` from `want`, with the worst element; empty when within `tolerance` of max|want|.
// `error` grows to the relative error found.
std::string difference(const std::string& what, const mlx::core::array& got, const mlx::core::array& want,
                       double tolerance, double* error);

// What a mode allows where the kit allows `tolerance`.
double allowed(double tolerance, const KitMode& mode, const LanguageModel& model);

// The model of `folder` (the kit's, or its hf/) in a mode. While a reference mode runs, a kernels::reference::Scope
// must live. Throws: as make_model.
std::unique_ptr<LanguageModel> make_kit_model(const std::filesystem::path& folder, const KitModel& kit,
                                              const KitMode& mode);

// Every run of `scenarios`. Never throws.
void check_sequences(const LanguageModel& model, const KitModel& kit, const std::vector<KitScenario>& scenarios,
                     const KitMode& mode, const ReportOutcome& report);

// Every batch in every way that batches come about. Never throws.
void check_batches(const LanguageModel& model, const KitModel& kit, const KitMode& mode, const ReportOutcome& report);

}  // namespace reprise::test
