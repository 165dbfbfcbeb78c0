// The model conformance kit's format: folders with expected.json and expected.safetensors beside a tiny model.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "reprise/models/language_model.h"

namespace reprise::test {

struct KitCache {
  std::string class_name;
  int offset = 0;
  std::size_t nbytes = 0;
};

struct KitRun {
  std::string id;
  std::vector<int> chunks;
  std::string logits;  // names of arrays
  std::string decode;
  int first_row = 0;  // prompt positions that `logits` holds
  int last_row = 0;
  std::vector<int> tokens;
  double tolerance = 0;
  std::optional<KVQuantization> convert = {};  // each cache is quantised so after the prompt
  std::vector<KitCache> after_prefill;
  std::vector<KitCache> after_decode;
  nlohmann::json facts_after_prefill = {};  // all that the kit says of the caches; see cache_facts.h
  nlohmann::json facts_after_decode = {};
};

struct KitScenario {
  std::string id;
  std::vector<int> prompt;
  std::vector<KitRun> runs;
  std::string f32_logits;  // float32 reference of a narrow model; empty otherwise
  std::string f32_decode;
  // Caches that are given to the model in place of its own, one per layer; null: its own.
  std::function<std::unique_ptr<LayerCache>()> make_layer = {};
  bool has_quantised_caches = false;  // from the first token, or after the prompt
};

// Rows of unequal length; what is expected of each is what it gives alone.
struct KitBatch {
  std::string id;
  std::vector<std::vector<int>> rows;    // prompts
  std::vector<std::vector<int>> tokens;  // greedy, one more than decode has
  std::string last_logits;               // [rows, V]
  std::string decode;                    // [tokens - 1, rows, V]
  double tolerance = 0;
};

struct KitModel {
  std::filesystem::path folder;
  std::string dtype;
  std::vector<KitScenario> scenarios;  // those of one sequence
  std::map<std::string, mlx::core::array> arrays;
  std::vector<KitBatch> batches = {};
  std::string layer_outputs = {};  // [layers, E] at the last position of the first scenario's prompt; may be empty
  std::vector<std::string> states =
      {};  // debug.state.<layer>.<sub-cache>.<entry>, after the first scenario's first run

  // Throws: std::runtime_error, naming it, where the kit has no such array.
  const mlx::core::array& array(const std::string& name) const;
};

// Where the kit is: $REPRISE_TEST_DATA/models, else ../shared/models beside the checkout, else the committed subset.
std::filesystem::path kit_folder();

// Throws: std::exception for what is missing, damaged, or does not fit together.
KitModel read_kit(const std::filesystem::path& folder);

// max|a - b| / max|b| over the whole array.
double relative_error(const mlx::core::array& got, const mlx::core::array& want);

// tokens [B, L] → logits [B, L, V], evaluated.
mlx::core::array feed(const LanguageModel& model, const std::vector<std::vector<int>>& rows, PromptCache& cache);

// Feeds the run's chunks, then its tokens one at a time.
struct KitResult {
  mlx::core::array logits;  // [last_row - first_row, V]
  mlx::core::array decode;  // [12, V]
  std::vector<KitCache> after_prefill;
  std::vector<KitCache> after_decode;
  nlohmann::json facts_after_prefill = {};
  nlohmann::json facts_after_decode = {};
  PromptCache cache = {};  // as it ended
};
KitResult run_kit(const LanguageModel& model, const KitScenario& scenario, const KitRun& run);

}  // namespace reprise::test
