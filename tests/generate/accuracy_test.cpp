// How far the kernels are from float32 on real weights: logits, and the perplexity of a fixed text. The reference is
// made of MLX's operations, with keys and values in float32.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "mlx/mlx.h"
#include "reprise/generate/loaded_model.h"
#include "reprise/kernels/reference.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;

std::optional<fs::path> small_model() {
  if (const char* path = std::getenv("REPRISE_MODEL")) return path;
  const fs::path fetched = fs::path(REPRISE_SOURCE_DIR) / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (fs::exists(fetched)) return fetched;
  return {};
}

std::string passage() {
  std::ifstream file(fs::path(REPRISE_SOURCE_DIR) / "tests/data/text/passage.txt");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

constexpr int kTokens = 200;  // MLX's own operations take their time
constexpr int kPromptChunk = 128;
constexpr int kDecoded = 24;  // the last tokens are fed one by one

struct Outcome {
  mx::array logits;  // [L, V]
  double perplexity;
};

// Teacher-forced: what each token made of the model's guess at it.
Outcome run(const LanguageModel& model, const Tokens& ids) {
  auto cache = model.make_cache();
  std::vector<mx::array> parts;
  const int prompt = static_cast<int>(ids.size()) - kDecoded;
  for (int at = 0; at < static_cast<int>(ids.size());) {
    const int n = at < prompt ? std::min(kPromptChunk, prompt - at) : 1;
    parts.push_back(mx::astype(model.forward(mx::array(ids.data() + at, {1, n}, mx::int32), cache), mx::float32));
    mx::eval(parts.back());
    at += n;
  }
  const auto logits = mx::squeeze(mx::concatenate(parts, 1), 0);
  const int last = logits.shape(0) - 1;
  const auto guesses = mx::slice(logits, {0, 0}, {last, logits.shape(1)});
  const mx::array next(ids.data() + 1, {last, 1}, mx::int32);
  const auto surprise = mx::subtract(mx::logsumexp(guesses, -1, true), mx::take_along_axis(guesses, next, -1));
  return {logits, std::exp(mx::mean(mx::astype(surprise, mx::float64)).item<double>())};
}

// The worst row's max|a - b| / max|b|.
double error(const mx::array& got, const mx::array& want) {
  const auto difference = mx::max(mx::abs(mx::subtract(got, want)), -1);
  return static_cast<double>(mx::max(mx::divide(difference, mx::max(mx::abs(want), -1))).item<float>());
}

TEST(Accuracy, LogitsAndPerplexityAreThoseOfFloat32) {
  const auto path = small_model();
  if (!path) GTEST_SKIP() << "no small model: set REPRISE_MODEL or let ./run fetch it";
  const auto wide = load(*path, {.model = {.kv_dtype = mx::float32}});
  const auto narrow = load(*path, {.model = {.kv_dtype = mx::float16}});
  Tokens ids = wide.tokenizer.encode(passage());
  ASSERT_GE(ids.size(), static_cast<std::size_t>(kTokens));
  ids.resize(kTokens);
  const Outcome want = [&] {
    const kernels::reference::Scope scope;
    return run(*wide.model, ids);
  }();
  struct Case {
    const char* name;
    const LanguageModel& model;
    double tolerance;
  };
  for (const auto& [name, model, tolerance] :
       {Case{"float32 keys and values", *wide.model, 1e-3}, Case{"float16 keys and values", *narrow.model, 5e-3}}) {
    SCOPED_TRACE(name);
    const Outcome got = run(model, ids);
    const double distance = error(got.logits, want.logits);
    EXPECT_LE(distance, tolerance);
    EXPECT_NEAR(got.perplexity, want.perplexity, 1e-3 * want.perplexity);
    std::printf("%s: logits %.2e from float32; perplexity %.5f, float32 %.5f (%+.4f %%)\n", name, distance,
                got.perplexity, want.perplexity, 100.0 * (got.perplexity / want.perplexity - 1.0));
  }
}

}  // namespace
}  // namespace reprise
