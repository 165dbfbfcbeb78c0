// Models with recurrent layers against the outputs that mlx-lm 0.32.2 gave for the kit's tiny models: every scenario,
// the recurrent states, and batches, whose values are those of each row alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/kernels/reference.h"
#include "reprise/storage/file_system.h"
#include "tests/models/model_kit.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr double kTolerance = 1e-4;

// The batch class of `layer`, empty, with rows that begin after `padding` columns.
std::unique_ptr<LayerCache> padded(const LayerCache& layer, const std::vector<int>& padding) {
  if (const auto* arrays = dynamic_cast<const ArraysCache*>(&layer)) {
    return std::make_unique<ArraysCache>(arrays->num_slots(), padding);
  }
  if (const auto* list = dynamic_cast<const CacheList*>(&layer)) {
    CacheList::Children children;
    for (std::size_t i = 0; i < list->num_children(); ++i) children.push_back(padded(list->child(i), padding));
    return std::make_unique<CacheList>(std::move(children));
  }
  return std::make_unique<BatchKVCache>(padding);
}

struct Batch {
  std::vector<std::vector<int>> rows;
  std::vector<std::vector<int>> tokens;
  std::vector<int> left_padding;
  mx::array last;    // [3, V]
  mx::array decode;  // [6, 3, V]
};

class StateSpaceGolden : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    folder = test::kit_folder() / GetParam();
    expected = folder.filename() == "hf" ? folder.parent_path() : folder;
    if (!fs::exists(folder / "config.json")) GTEST_SKIP() << "no kit at " << folder;
    model = make_model(read_model_files(folder), {.kv_dtype = mx::float32});
    kit.emplace(test::read_kit(expected));
    json = Json::parse(read_file(expected / "expected.json"));
  }

  Batch batch() const {
    for (const Json& item : json.at("scenarios")) {
      if (item.at("id") != "batch") continue;
      return {item.at("rows"), item.at("tokens"), item.at("left_padding"), kit->arrays.at(item.at("last_logits")),
              kit->arrays.at(item.at("decode"))};
    }
    throw std::runtime_error("no batch");
  }

  // [rows, V]: each row's logits after its last of `ids`.
  mx::array feed(const std::vector<std::vector<int>>& ids, PromptCache& cache) const {
    std::vector<int> flat;
    for (const auto& row : ids) flat.insert(flat.end(), row.begin(), row.end());
    const int B = static_cast<int>(ids.size());
    const int L = static_cast<int>(ids.front().size());
    auto logits = model->forward(mx::array(flat.data(), {B, L}, mx::int32), cache);
    mx::eval(logits);
    return logits;
  }
  static mx::array column(const mx::array& logits, int row, int at) {
    return mx::slice(logits, {row, at, 0}, {row + 1, at + 1, logits.shape(2)});
  }
  static mx::array wanted(const Batch& batch, int row, int step) {
    const int V = batch.last.shape(1);
    if (step == 0) return mx::reshape(mx::slice(batch.last, {row, 0}, {row + 1, V}), {1, 1, V});
    return mx::slice(batch.decode, {step - 1, row, 0}, {step, row + 1, V});
  }
  // Decodes steps [first, last) for `rows` of the batch.
  void expect_decode(const Batch& batch, PromptCache& cache, const std::vector<int>& rows, int first = 0,
                     int last = 6) const {
    for (int step = first; step < last; ++step) {
      std::vector<std::vector<int>> ids;
      for (const int row : rows)
        ids.push_back({batch.tokens[static_cast<std::size_t>(row)][static_cast<std::size_t>(step)]});
      const auto logits = feed(ids, cache);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        EXPECT_LE(test::relative_error(column(logits, static_cast<int>(i), 0), wanted(batch, rows[i], step + 1)),
                  kTolerance)
            << "row " << rows[i] << ", step " << step;
      }
    }
  }

  PromptCache alone(const Batch& batch, int row) const {
    PromptCache cache = model->make_cache();
    feed({batch.rows[static_cast<std::size_t>(row)]}, cache);
    return cache;
  }

  fs::path folder;
  fs::path expected;
  std::unique_ptr<LanguageModel> model;
  std::optional<test::KitModel> kit;
  Json json;
};

TEST_P(StateSpaceGolden, EveryScenarioEqualsTheOracle) {
  const auto compare = [&](const char* how) {
    for (const auto& scenario : kit->scenarios) {
      for (const auto& run : scenario.runs) {
        SCOPED_TRACE(std::string(how) + " " + scenario.id + "/" + run.id);
        const auto result = test::run_kit(*model, scenario, run);
        EXPECT_LE(test::relative_error(result.logits, kit->arrays.at(run.logits)), run.tolerance);
        EXPECT_LE(test::relative_error(result.decode, kit->arrays.at(run.decode)), run.tolerance);
        ASSERT_EQ(result.after_decode.size(), run.after_decode.size());
        for (std::size_t i = 0; i < run.after_decode.size(); ++i) {
          EXPECT_EQ(result.after_decode[i].class_name, run.after_decode[i].class_name);
          EXPECT_EQ(result.after_decode[i].nbytes, run.after_decode[i].nbytes);
        }
      }
    }
  };
  compare("kernels");
  const kernels::reference::Scope scope;
  compare("reference");
}

TEST_P(StateSpaceGolden, RecurrentStatesEqualTheOracles) {
  const auto& scenario = kit->scenarios.front();
  PromptCache cache = model->make_cache();
  feed({scenario.prompt}, cache);
  for (std::size_t i = 0; i + 1 < scenario.runs.front().tokens.size(); ++i)
    feed({{scenario.runs.front().tokens[i]}}, cache);
  const auto& names = json.at("debug").at("states");
  ASSERT_FALSE(names.empty());
  for (const std::string name : names) {
    // debug.state.<layer>.<sub-cache>.<entry>
    int layer = 0, child = 0, slot = 0;
    ASSERT_EQ(std::sscanf(name.c_str(), "debug.state.%d.%d.%d", &layer, &child, &slot), 3);
    auto& of_layer = cache.at<LayerCache>(static_cast<std::size_t>(layer));
    auto* list = dynamic_cast<CacheList*>(&of_layer);
    auto* arrays = list != nullptr ? &list->at<ArraysCache>(0) : dynamic_cast<ArraysCache*>(&of_layer);
    ASSERT_NE(arrays, nullptr) << name;
    EXPECT_LE(test::relative_error(*arrays->get(slot), kit->arrays.at(name)), kTolerance) << name;
  }
}

TEST_P(StateSpaceGolden, LeftPaddedRowsEqualRowsAlone) {
  const Batch b = batch();
  for (const int chunk : {100, 5, 1}) {
    SCOPED_TRACE(chunk);
    PromptCache cache = model->make_cache();
    for (std::size_t i = 0; i < cache.size(); ++i) cache.replace(i, padded(cache[i], b.left_padding));
    auto ids = b.rows;
    for (std::size_t row = 0; row < ids.size(); ++row)
      ids[row].insert(ids[row].begin(), static_cast<std::size_t>(b.left_padding[row]), 0);
    const int L = static_cast<int>(ids.front().size());
    for (int at = 0; at < L; at += chunk) {
      const int end = std::min(L, at + chunk);
      std::vector<std::vector<int>> part;
      for (const auto& row : ids) part.emplace_back(row.begin() + at, row.begin() + end);
      const auto logits = feed(part, cache);
      for (int row = 0; end == L && row < 3; ++row) {
        EXPECT_LE(test::relative_error(column(logits, row, end - at - 1), wanted(b, row, 0)), kTolerance) << row;
      }
    }
    expect_decode(b, cache, {0, 1, 2});
  }
}

TEST_P(StateSpaceGolden, RightPaddedRowsEqualRowsAlone) {
  const Batch b = batch();
  for (const int chunk : {100, 5, 1}) {
    SCOPED_TRACE(chunk);
    const PromptCache empty = model->make_cache();
    PromptCache cache = merge_prompt_caches({&empty, &empty, &empty});
    auto ids = b.rows;
    std::size_t most = 0;
    BatchPrompt prompt;
    for (const auto& row : ids) most = std::max(most, row.size());
    for (auto& row : ids) {
      prompt.lengths.push_back(static_cast<int>(row.size()));
      prompt.right_padding.push_back(static_cast<int>(most - row.size()));
      row.resize(most, 0);
    }
    prepare_prompt_cache(cache, prompt);
    const int L = static_cast<int>(most);
    for (int at = 0; at < L; at += chunk) {
      const int end = std::min(L, at + chunk);
      std::vector<std::vector<int>> part;
      for (const auto& row : ids) part.emplace_back(row.begin() + at, row.begin() + end);
      const auto logits = feed(part, cache);
      for (int row = 0; row < 3; ++row) {
        const int last = prompt.lengths[static_cast<std::size_t>(row)] - 1;
        if (last < at || last >= end) continue;
        EXPECT_LE(test::relative_error(column(logits, row, last - at), wanted(b, row, 0)), kTolerance) << row;
      }
    }
    finalize_prompt_cache(cache);
    expect_decode(b, cache, {0, 1, 2});
  }
}

TEST_P(StateSpaceGolden, RowsThatJoinLaterEqualRowsAlone) {
  const Batch b = batch();
  const PromptCache first = alone(b, 0);
  const PromptCache second = alone(b, 1);
  const PromptCache third = alone(b, 2);
  PromptCache cache = merge_prompt_caches({&second, &first});
  expect_decode(b, cache, {1, 0}, 0, 1);
  PromptCache late = merge_prompt_caches({&third});
  expect_decode(b, late, {2}, 0, 1);
  extend_prompt_cache(cache, late);
  expect_decode(b, cache, {1, 0, 2}, 1, 3);
  filter_prompt_cache(cache, {2, 0});
  expect_decode(b, cache, {2, 1}, 3, 6);
}

TEST_P(StateSpaceGolden, AForkGoesOnAsIfNothingHadHappened) {
  const auto& scenario = kit->scenarios.front();
  const auto& run = scenario.runs.front();
  PromptCache cache = model->make_cache();
  const std::vector<int> start(scenario.prompt.begin(), scenario.prompt.begin() + 9);
  const std::vector<int> rest(scenario.prompt.begin() + 9, scenario.prompt.end());
  feed({start}, cache);
  PromptCache fork = fork_prompt_cache(cache);
  feed({{3, 4, 5}}, cache);
  const auto logits = feed({rest}, fork);
  const auto& all = kit->arrays.at(run.logits);
  EXPECT_LE(test::relative_error(logits, mx::reshape(mx::slice(all, {9, 0}, all.shape()), logits.shape())),
            run.tolerance);
}

INSTANTIATE_TEST_SUITE_P(Kit, StateSpaceGolden,
                         testing::Values("falcon_h1", "falcon_h1/hf", "falcon_mamba", "jamba", "jamba/hf", "mamba",
                                         "mamba/hf", "mamba2", "mamba2/hf"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           for (char& c : name) c = c == '/' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace reprise
