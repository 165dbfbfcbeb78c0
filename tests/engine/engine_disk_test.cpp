// Engines, one after another, over one cache folder.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/engine/engine.h"
#include "reprise/storage/safetensors.h"
#include "tests/engine/runner_run.h"
#include "tests/generate/fake_model.h"
#include "tests/models/model_kit.h"

namespace reprise::test {
namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;

constexpr int kToken = 48;  // whose row of the embedding lies between the pieces that a fingerprint samples
const char* const kEmbedding = "model.embed_tokens.weight";

class EngineOnDisk : public testing::Test {
 protected:
  EngineOnDisk() {
    std::string name = fs::temp_directory_path() / "reprise_engine_XXXXXX";
    folder = ::mkdtemp(name.data());
    std::mt19937 random(5);
    prompt = random_tokens(random, 100, 90);
    prompt[20] = kToken;
  }
  ~EngineOnDisk() override { fs::remove_all(folder); }

  // A model of the kit whose embedding of kToken is multiplied.
  LoadedModel load_kit(const std::string& name, float factor, bool full_fingerprint = true) const {
    const fs::path path = folder / name;
    fs::copy(kit_folder() / "llama_sliding", path);
    const fs::path file = path / "model.safetensors";
    auto tensors = read_safetensors(file).tensors;
    const mx::array embedding = tensors.at(kEmbedding);
    const int rows = embedding.shape(0);
    const mx::array chosen = mx::reshape(mx::equal(mx::arange(rows), mx::array(kToken)), {rows, 1});
    const mx::array scaled =
        mx::where(chosen, mx::astype(mx::multiply(embedding, mx::array(factor)), embedding.dtype()), embedding);
    tensors.insert_or_assign(kEmbedding, mx::contiguous(scaled));
    fs::remove(file);
    write_safetensors(file, tensors, {});
    std::ofstream(path / "tokenizer.json") << tokenizer_json();
    return load(
        path, {.model = {.compute_dtype = mx::float32, .kv_dtype = mx::float32}, .full_fingerprint = full_fingerprint});
  }

  // By an engine of its own.
  GenerationResult answer(const LoadedModel& model) const {
    Engine engine(model, {.cache_dir = folder / "cache"});
    return engine.submit({.prompt = prompt, .max_tokens = 8, .ignore_eos = true}).wait();
  }

  fs::path folder;
  Tokens prompt;
};

double distance(const GenerationResult& got, const Answer& want) {
  return distance(Answer{.tokens = got.tokens, .logprobs = got.logprobs}, want);
}

TEST_F(EngineOnDisk, OneModelsRowsAreNotServedToOneThatDiffersInARow) {
  const LoadedModel one = load_kit("one", 1.0f);
  const LoadedModel other = load_kit("other", -3.0f);
  ASSERT_EQ(one.fingerprint, other.fingerprint) << "a sample does not tell them apart";
  ASSERT_GT(distance(answer_alone(*one.model, prompt, 8), answer_alone(*other.model, prompt, 8)), kClose);
  EXPECT_LT(distance(answer(one), answer_alone(*one.model, prompt, 8)), kClose);
  const GenerationResult of_other = answer(other);
  EXPECT_EQ(of_other.stats.cached_tokens, 0);
  EXPECT_LT(distance(of_other, answer_alone(*other.model, prompt, 8)), kClose);
  EXPECT_EQ(answer(one).stats.cached_tokens, 99) << "its own are there";
  EXPECT_EQ(answer(load_kit("copy", 1.0f)).stats.cached_tokens, 99) << "so they are for a copy of it";
}

TEST_F(EngineOnDisk, AModelWhoseWeightsAreNotAllHashedIsRefused) {
  const LoadedModel model = load_kit("model", 1.0f, false);
  EXPECT_EQ(model.full_fingerprint, "");
  try {
    answer(model);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::failed_precondition);
    EXPECT_NE(std::string(error.what()).find("LoadOptions::full_fingerprint"), std::string::npos) << error.what();
  }
  EXPECT_FALSE(fs::exists(folder / "cache"));
}

}  // namespace
}  // namespace reprise::test
