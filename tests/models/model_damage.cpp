// model_damage DIR [--only NAME…] [--part K/N] [--known] [--verbose]: for each model of the conformance kit, each
// member of its config.json in turn becomes another number, another type, or is gone. What then comes is an Error or a
// model that runs: no crash, no hang, no foreign exception. Exit status: 0 all passed, 1 a case failed, 2 nothing could
// be run as asked.
#include <ctime>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/storage/model_files.h"
#include "tests/models/replay_program.h"

namespace {

using namespace reprise;
using namespace reprise::test;
namespace mx = mlx::core;
using Json = nlohmann::json;
using Pointer = Json::json_pointer;

constexpr double kMostSeconds = 20;     // of processor time, for one tiny model
constexpr std::size_t kMostPlaces = 3;  // of a list's items, so many are damaged

// Every member, those of objects and the first items of lists.
void find_places(const Json& json, const Pointer& at, std::vector<Pointer>& places) {
  if (!at.empty()) places.push_back(at);
  if (json.is_object()) {
    for (const auto& [key, value] : json.items()) find_places(value, at / key, places);
  } else if (json.is_array()) {
    for (std::size_t i = 0; i < std::min(json.size(), kMostPlaces); ++i) find_places(json[i], at / i, places);
  }
}

struct Damage {
  std::string what;
  Json config;
};

std::vector<Damage> damages(const Json& config) {
  std::vector<Pointer> places;
  find_places(config, Pointer(), places);
  std::vector<Damage> all;
  for (const Pointer& place : places) {
    if (place == "/model_type"_json_pointer) continue;
    const Json& value = config.at(place);
    std::vector<Json> others = {nullptr, "word", Json::array(), Json::object()};
    if (value.is_number()) {
      for (const Json& number : {Json(0), Json(-1), Json(1), Json(7), Json(2147483647), Json(1e18), Json(0.5)}) {
        others.push_back(number);
      }
    } else if (value.is_boolean()) {
      others.emplace_back(!value.get<bool>());
    } else {
      others.emplace_back(3);
    }
    if (value.is_array() && value.size() > 1) {
      others.push_back(value);
      others.back().erase(others.back().size() - 1);
    }
    for (const Json& other : others) {
      if (other == value) continue;
      all.push_back({place.to_string() + " = " + other.dump(), config});
      all.back().config[place] = other;
    }
    if (config.at(place.parent_pointer()).is_object()) {
      all.push_back({place.to_string() + " is gone", config});
      all.back().config[place.parent_pointer()].erase(place.back());
    }
  }
  return all;
}

// Empty: as it should be.
std::string failure_of(const ModelFiles& files) {
  std::unique_ptr<LanguageModel> model;
  try {
    model = make_model(files, {.compute_dtype = mx::float32, .kv_dtype = mx::float32});
  } catch (const Error& error) {
    return error.code() == ErrorCode::internal ? std::string("an internal error: ") + error.what() : "";
  } catch (const std::exception& error) {
    return std::string("a foreign exception: ") + error.what();
  }
  try {
    PromptCache cache = model->make_cache();
    for (const auto& ids : {std::vector<int>{1, 2, 3, 4, 5}, {6}, {7, 8}}) feed(*model, {ids}, cache);
  } catch (const std::exception& error) {
    return std::string("it is made, but does not run: ") + error.what();
  }
  return "";
}

void check_folder(const std::filesystem::path& folder, const ReportOutcome& report) {
  ModelFiles files = read_model_files(folder);
  for (const Damage& damage : damages(Json::parse(files.config_json))) {
    files.config_json = damage.config.dump();
    const std::clock_t begin = std::clock();
    KitOutcome outcome{damage.what, failure_of(files), 0};
    outcome.error = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    if (outcome.failure.empty() && outcome.error > kMostSeconds) outcome.failure = "it takes too long";
    report(outcome);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return replay_folders("model_damage", std::vector<std::string>(argv + 1, argv + argc), check_folder);
}
