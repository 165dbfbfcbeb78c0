// model_reuse DIR [--only NAME…] [--part K/N] [--known] [--verbose]: for each model of the conformance kit, whether
// what its caches keep answers as what is computed from nothing: over the model's own caches, bounded and quantised
// ones. Exit status: 0 all passed, 1 a case failed, 2 nothing could be run as asked.
#include <iostream>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "tests/generate/reuse_checks.h"
#include "tests/models/replay_program.h"

namespace {

using namespace reprise;
using namespace reprise::test;

// What options cannot be applied to this model is refused before anything is computed.
bool is_refused(const LanguageModel& model, const ReuseSetting& setting) {
  try {
    plan_kv_cache(model, make_prompt_cache(model, setting.kv.max_kv_size), setting.kv);
    return false;
  } catch (const Error& error) {
    const bool is_said = error.code() == ErrorCode::unsupported || error.code() == ErrorCode::invalid_argument;
    if (!is_said || !setting.kv.kv_bits) throw;
    return true;
  }
}

void check_folder(const std::filesystem::path& folder, const ReportOutcome& report) {
  const auto files = read_model_files(folder);
  {
    const auto model =
        with_kit_tokenizer(make_model(files, {.compute_dtype = mlx::core::float32, .kv_dtype = mlx::core::float32}));
    for (const ReuseSetting& setting : reuse_settings()) {
      if (is_refused(*model.model, setting)) continue;
      check_reuse_of_caches(*model.model, setting, report);
      check_reuse_of_chats(model, setting, reuse_tolerance(*model.model, setting.kv), report);
    }
  }
  // As users run it on a CPU: keys and values in float16.
  const auto model = with_kit_tokenizer(make_model(files));
  check_reuse_of_chats(model, {"own dtypes", {}}, 1e-2, report);
}

}  // namespace

int main(int argc, char** argv) {
  return replay_folders("model_reuse", std::vector<std::string>(argv + 1, argv + argc), check_folder);
}
