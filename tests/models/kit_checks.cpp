#include "tests/models/kit_checks.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "mlx/mlx.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/models/decoder.h"
#include "tests/models/cache_facts.h"

namespace reprise::test {

namespace mx = mlx::core;
namespace fs = std::filesystem;

namespace {

using Kind = KitMode::Kind;

// Of a product with quantised weights whose input is rounded to 8 bits a group, over a whole tiny model.
constexpr double kRoundedProducts = 1e-3;

// Of a group of 8-bit keys or values whose largest one, from which its step is made, rounds the other way because sums
// came in another order.
constexpr double kRoundedRows = 4e-3;

bool rounds_inputs(const KitMode& mode, const LanguageModel& model) {
  return mode.kind == Kind::kernels && model.info().quantization != "none";
}

bool is_narrow(const KitModel& kit) { return kit.dtype != "float32"; }

std::string text_of(const mx::Shape& shape) {
  std::string text = "[";
  for (const int n : shape) text += (text.size() > 1 ? "," : "") + std::to_string(n);
  return text + "]";
}

std::string place(std::size_t index, const mx::Shape& shape) {
  mx::Shape at(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    const auto n = static_cast<std::size_t>(shape[axis]);
    at[axis] = static_cast<int>(index % n);
    index /= n;
  }
  return text_of(at);
}

// Which layer's output is the first to be off, over the first scenario's prompt. Text to append to a failure.
std::string first_wrong_layer(const LanguageModel& model, const KitModel& kit, double tolerance) {
  const auto* decoder = dynamic_cast<const internal::DecoderModel*>(&model);
  if (decoder == nullptr || kit.layer_outputs.empty()) return "";
  const KitScenario& scenario = kit.scenarios.front();
  PromptCache cache = model.make_cache();
  const int L = static_cast<int>(scenario.prompt.size());
  const auto outputs = decoder->layer_outputs(mx::array(scenario.prompt.data(), {1, L}, mx::int32), cache);
  const mx::array& want = kit.array(kit.layer_outputs);
  if (want.ndim() != 2 || want.shape(0) != static_cast<int>(outputs.size())) {
    return "; the model has " + std::to_string(outputs.size()) + " layers, the kit " + text_of(want.shape());
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const mx::array& h = outputs[i];
    const auto last = mx::reshape(mx::slice(h, {0, L - 1, 0}, {1, L, h.shape(2)}), {h.shape(2)});
    const std::string what = "layer " + std::to_string(i);
    double error = 0;
    const auto text = difference(what, last, mx::take(want, static_cast<int>(i), 0), tolerance, &error);
    if (!text.empty()) return "; first layer that is off (" + scenario.id + "): " + text;
  }
  return "; all layers are right (" + scenario.id + ")";
}

std::vector<int> greedy(const mx::array& last_prompt_row, const mx::array& decode) {
  auto ids = mx::astype(mx::argmax(mx::concatenate({last_prompt_row, decode}, 0), -1), mx::int32);
  mx::eval(ids);
  return {ids.data<int>(), ids.data<int>() + ids.size()};
}

const ArraysCache& recurrent_cache(const PromptCache& cache, std::size_t layer, std::size_t child) {
  if (layer >= cache.size()) throw std::runtime_error("a state of a layer that is not there");
  const LayerCache* found = &cache[layer];
  if (const auto* list = dynamic_cast<const CacheList*>(found)) found = &list->child(child);
  const auto* arrays = dynamic_cast<const ArraysCache*>(found);
  if (arrays == nullptr) throw std::runtime_error("a state of a layer that has a " + found->class_name());
  return *arrays;
}

std::string differing_state(const KitModel& kit, const PromptCache& cache, double tolerance, double* error) {
  for (const std::string& name : kit.states) {
    unsigned layer = 0, child = 0;
    int slot = 0;
    if (std::sscanf(name.c_str(), "debug.state.%u.%u.%d", &layer, &child, &slot) != 3) {
      throw std::runtime_error("\"" + name + "\" names no state");
    }
    const auto got = recurrent_cache(cache, layer, child).get(slot);
    if (!got) return name + " is not set";
    if (auto text = difference(name, *got, kit.array(name), tolerance, error); !text.empty()) return text;
  }
  return "";
}

class SequenceCheck {
 public:
  SequenceCheck(const LanguageModel& model, const KitModel& kit, const KitMode& mode)
      : model_(model), kit_(kit), mode_(mode) {}

  std::string failure(const KitScenario& scenario, const KitRun& run, double* error) {
    double tolerance = allowed(run.tolerance, mode_, model_);
    const bool rounds_rows = mode_.kind == Kind::kernels && scenario.id.starts_with("kv");
    if (rounds_rows) tolerance = std::max(tolerance, kRoundedRows);
    const KitResult result = run_kit(model_, scenario, run);
    const bool has_reference = is_narrow(kit_) && mode_.kind != Kind::narrow && !scenario.f32_logits.empty();
    const mx::array& logits = kit_.array(has_reference ? scenario.f32_logits : run.logits);
    const mx::array& decode = kit_.array(has_reference ? scenario.f32_decode : run.decode);
    if (auto text = difference("logits", result.logits, logits, tolerance, error); !text.empty()) {
      return text + layer_text();
    }
    const auto stored = is_narrow(kit_) && mode_.kind != Kind::narrow ? StoredAs::another_dtype : StoredAs::the_oracle;
    if (auto text = differing_fact(result.facts_after_prefill, run.facts_after_prefill, stored); !text.empty()) {
      return "caches after prefill: " + text;
    }
    if (auto text = difference("decode", result.decode, decode, tolerance, error); !text.empty()) {
      return text + layer_text();
    }
    if (auto text = differing_fact(result.facts_after_decode, run.facts_after_decode, stored); !text.empty()) {
      return "caches after decode: " + text;
    }
    if (!is_narrow(kit_)) {
      const int rows = result.logits.shape(0);
      const auto last = mx::slice(result.logits, {rows - 1, 0}, result.logits.shape());
      if (greedy(last, result.decode) != run.tokens) return "greedy tokens differ from the kit's";
    }
    if (scenario.id == kit_.scenarios.front().id && run.id == scenario.runs.front().id) {
      return differing_state(kit_, result.cache, tolerance, error);
    }
    return "";
  }

 private:
  const std::string& layer_text() {
    if (!layer_text_) {
      const double tolerance = kit_.scenarios.front().runs.front().tolerance;
      layer_text_ = first_wrong_layer(model_, kit_, allowed(tolerance, mode_, model_));
    }
    return *layer_text_;
  }

  const LanguageModel& model_;
  const KitModel& kit_;
  const KitMode& mode_;
  std::optional<std::string> layer_text_;
};

}  // namespace

std::vector<KitMode> modes_for(const KitModel& kit) {
  std::vector<KitMode> modes = {{Kind::reference, "reference"}, {Kind::kernels, "kernels"}};
  if (is_narrow(kit)) modes.push_back({Kind::narrow, kit.dtype});
  return modes;
}

double allowed(double tolerance, const KitMode& mode, const LanguageModel& model) {
  return rounds_inputs(mode, model) ? std::max(tolerance, kRoundedProducts) : tolerance;
}

std::string difference(const std::string& what, const mx::array& got, const mx::array& want, double tolerance,
                       double* error) {
  if (got.shape() != want.shape()) {
    return what + ": got shape " + text_of(got.shape()) + ", want " + text_of(want.shape());
  }
  if (got.size() == 0) return "";
  const auto a = mx::contiguous(mx::astype(got, mx::float32));
  const auto b = mx::contiguous(mx::astype(want, mx::float32));
  const auto distance = mx::abs(mx::subtract(a, b));
  const auto bad = mx::logical_not(mx::isfinite(distance));
  const auto worst = mx::argmax(mx::where(bad, mx::array(1e30f), distance));
  const auto largest = mx::max(mx::abs(b));
  mx::eval({a, b, worst, largest, distance});
  const auto index = static_cast<std::size_t>(mx::array(worst).item<std::uint32_t>());
  const double relative =
      static_cast<double>(distance.data<float>()[index]) / static_cast<double>(mx::array(largest).item<float>());
  if (relative <= tolerance) {
    *error = std::max(*error, relative);
    return "";
  }
  std::ostringstream text;
  text << what << ": at " << place(index, a.shape()) << " got " << a.data<float>()[index] << ", want "
       << b.data<float>()[index] << ": " << relative << " of the largest, allowed " << tolerance;
  return text.str();
}

std::unique_ptr<LanguageModel> make_kit_model(const fs::path& folder, const KitModel& kit, const KitMode& mode) {
  // The oracle stores keys and values as they come.
  ModelOptions options{.compute_dtype = mx::float32, .kv_dtype = mx::float32};
  if (mode.kind == Kind::narrow) {
    const auto dtype = kit.dtype == "bfloat16" ? mx::bfloat16 : mx::float16;
    options = {.compute_dtype = dtype, .kv_dtype = dtype};
  }
  return make_model(read_model_files(folder), options);
}

void check_sequences(const LanguageModel& model, const KitModel& kit, const std::vector<KitScenario>& scenarios,
                     const KitMode& mode, const ReportOutcome& report) {
  SequenceCheck check(model, kit, mode);
  for (const KitScenario& scenario : scenarios) {
    // A rounding that falls the other way moves a stored number by a whole step, which the oracle's outputs do not tell
    // from an error.
    if (scenario.has_quantised_caches && rounds_inputs(mode, model)) continue;
    for (const KitRun& run : scenario.runs) {
      KitOutcome outcome{scenario.id + "/" + run.id, "", 0};
      try {
        outcome.failure = check.failure(scenario, run, &outcome.error);
      } catch (const std::exception& error) {
        outcome.failure = error.what();
      }
      report(outcome);
    }
  }
}

}  // namespace reprise::test
