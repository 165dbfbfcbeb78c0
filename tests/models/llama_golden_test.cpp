// The Llama family against the outputs that mlx-lm 0.32.2 gave for the kit's tiny models.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/kernels/reference.h"
#include "tests/models/model_kit.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;

void expect_same(const std::vector<test::KitCache>& got, const std::vector<test::KitCache>& want, bool same_dtype) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].class_name, want[i].class_name) << "layer " << i;
    EXPECT_EQ(got[i].offset, want[i].offset) << "layer " << i;
    if (same_dtype) {
      EXPECT_EQ(got[i].nbytes, want[i].nbytes) << "layer " << i;
    }
  }
}

std::vector<int> greedy(const mx::array& last_prompt_row, const mx::array& decode) {
  auto ids = mx::argmax(mx::concatenate({last_prompt_row, decode}, 0), -1);
  std::vector<int> tokens;
  for (int i = 0; i < ids.shape(0); ++i) tokens.push_back(static_cast<int>(mx::take(ids, i).item<std::uint32_t>()));
  return tokens;
}

class LlamaGolden : public testing::TestWithParam<const char*> {
 protected:
  // "hf" beneath a folder holds the same weights as the original checkpoint lays them out.
  void SetUp() override {
    folder = test::kit_folder() / GetParam();
    expected = folder.filename() == "hf" ? folder.parent_path() : folder;
    if (!fs::exists(folder / "config.json")) GTEST_SKIP() << "no kit at " << folder;
  }

  // `tolerance`: by scenario and run; none: left out.
  void compare(const std::function<std::optional<double>(const test::KitScenario&, const test::KitRun&)>& tolerance) {
    const auto kit = test::read_kit(expected);
    // The oracle stores keys and values as they come.
    const auto model = make_model(read_model_files(folder), {.kv_dtype = mx::float32});
    ASSERT_FALSE(kit.scenarios.empty());
    for (const auto& scenario : kit.scenarios) {
      for (const auto& run : scenario.runs) {
        const auto most = tolerance(scenario, run);
        if (!most) continue;
        SCOPED_TRACE(scenario.id + "/" + run.id);
        const auto result = test::run_kit(*model, scenario, run);
        const bool narrow = kit.dtype != "float32";
        const bool has_reference = narrow && !scenario.f32_logits.empty();
        const auto& logits = kit.arrays.at(has_reference ? scenario.f32_logits : run.logits);
        const auto& decode = kit.arrays.at(has_reference ? scenario.f32_decode : run.decode);
        EXPECT_LE(test::relative_error(result.logits, logits), *most);
        EXPECT_LE(test::relative_error(result.decode, decode), *most);
        expect_same(result.after_prefill, run.after_prefill, !narrow);
        expect_same(result.after_decode, run.after_decode, !narrow);
        if (!narrow) {
          const auto last = mx::slice(result.logits, {result.logits.shape(0) - 1, 0}, result.logits.shape());
          EXPECT_EQ(greedy(last, result.decode), run.tokens);
        }
      }
    }
  }

  fs::path folder;
  fs::path expected;
};

TEST_P(LlamaGolden, EveryScenarioEqualsTheOracle) {
  const kernels::reference::Scope scope;
  compare([](const auto&, const test::KitRun& run) { return run.tolerance; });
}

// Sums in another order: where keys and values are quantised, one that lies between two steps, or a group's largest
// one, which its step is made from, may round the other way. Products with quantised weights round their input besides;
// with quantised keys and values that is no longer told from an error.
TEST_P(LlamaGolden, KernelsStayCloseToTheOracle) {
  const bool is_quantised = std::string(GetParam()).find("_q") != std::string::npos;
  compare([&](const test::KitScenario& scenario, const test::KitRun& run) -> std::optional<double> {
    if (!is_quantised) return scenario.id.starts_with("kv") ? std::max(run.tolerance, 4e-3) : run.tolerance;
    if (scenario.id.starts_with("kv")) return {};
    return std::max(run.tolerance, 1e-3);
  });
}

INSTANTIATE_TEST_SUITE_P(Kit, LlamaGolden,
                         testing::Values("gemma2", "gemma3", "gemma3/hf", "gemma3_text", "gemma3_text_bf16", "llama",
                                         "llama_bf16", "llama_bf16_q4", "llama_bias_tied", "llama_bias_tied/hf",
                                         "llama_q4_g64", "llama_q8_g32", "llama_q_mixed", "llama_rope_linear",
                                         "llama_rope_llama3", "llama_rope_yarn", "llama_sliding", "mistral"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           for (char& c : name) c = c == '/' ? '_' : c;
                           return name;
                         });

constexpr const char* kDense[] = {
    "cohere2",
    "granite",
    "ministral3",
    "olmo2",
    "olmo3",
    "phi3_longrope",
    "phi3_plain",
    "qwen2",
    "qwen2_q4_g32_tied",
    "qwen3",
    "qwen3_rope_parameters",
    "smollm3",
    "starcoder2",
};
INSTANTIATE_TEST_SUITE_P(Dense, LlamaGolden, testing::ValuesIn(kDense),
                         [](const auto& instance) { return std::string(instance.param); });

TEST(LlamaModel, LayerTypesGiveTheirLayersARingOfTheWindow) {
  const fs::path folder = test::kit_folder() / "llama_sliding";
  if (!fs::exists(folder)) GTEST_SKIP() << "no kit at " << folder;
  const auto cache = make_prompt_cache(*make_model(read_model_files(folder)), 16);
  ASSERT_EQ(cache.size(), 3u);
  EXPECT_EQ(describe_cache(cache[0]), "RotatingKVCache(9)");
  EXPECT_EQ(describe_cache(cache[1]), "RotatingKVCache(16, keep 4)");
  EXPECT_EQ(describe_cache(cache[2]), "RotatingKVCache(9)");
}

}  // namespace
}  // namespace reprise
