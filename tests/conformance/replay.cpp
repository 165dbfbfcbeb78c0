#include "tests/conformance/replay.h"

#include "tests/conformance/compare.h"
#include "tests/conformance/corrections.h"
#include "tests/conformance/driver.h"
#include "tests/conformance/functions.h"

namespace reprise::conformance {

namespace {

std::optional<Failure> replay_file_head(const Json& test_case, const Family& family, Driver& driver) {
  const Json& expect = test_case.at("expect");
  const Observation got = driver.load(family.folder / "prompt_cache_files" / test_case["file"].get<std::string>());
  if (const auto differences = compare(got, expect, family); !differences.empty()) {
    return Failure{std::nullopt, "load: " + differences[0]};
  }
  if (expect.value("error", false)) return std::nullopt;
  const Json layers = expect.value("layers", Json::array());
  if (expect.contains("layers") && got.scalars.at("classes").size() != layers.size()) {
    return Failure{std::nullopt, "load: got " + std::to_string(got.scalars.at("classes").size()) + " layers, want " +
                                     std::to_string(layers.size())};
  }
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const std::string slot = "l" + std::to_string(layer);
    const Json after = layers[layer].value("after", Json::object());
    const auto differences = compare_scalars(driver.observe_slot(slot), after, false, slot);
    if (!differences.empty()) return Failure{std::nullopt, "load: " + differences[0]};
  }
  return std::nullopt;
}

std::optional<Failure> replay_unguarded(const Json& test_case, const Family& family) {
  if (test_case.contains("fn")) {
    const auto differences = compare(call_function(test_case, family), test_case.at("expect"), family);
    if (differences.empty()) return std::nullopt;
    return Failure{std::nullopt, test_case["fn"].get<std::string>() + ": " + differences[0]};
  }
  Driver driver(family);
  if (test_case.contains("file")) {
    if (auto failure = replay_file_head(test_case, family, driver)) return failure;
  } else {
    driver.start(test_case);
  }
  const Json steps = test_case.value("steps", Json::array());
  if (steps.empty() && !test_case.contains("file")) return Failure{std::nullopt, "a case without steps"};
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Observation got = driver.step(steps[i]);
    const auto differences = compare(got, expectation(test_case, i), family);
    if (!differences.empty()) return Failure{i, steps[i].at("op").get<std::string>() + ": " + differences[0]};
  }
  return std::nullopt;
}

}  // namespace

std::optional<Failure> replay(const Json& test_case, const Family& family) {
  try {
    return replay_unguarded(test_case, family);
  } catch (const std::exception& error) {
    return Failure{std::nullopt, error.what()};
  }
}

}  // namespace reprise::conformance
