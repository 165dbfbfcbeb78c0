// `reprise inspect` on files of every kind.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "mlx/io.h"
#include "mlx/ops.h"
#include "mlx/random.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/apps/program.h"

namespace reprise::test {
namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const auto& word : words) EXPECT_NE(text.find(word), std::string::npos) << word << " in\n" << text;
}

// A cache file of two layers with `tokens` rows; returns its path.
std::string make_cache_file(const std::string& file, int tokens, const SaveOptions& options) {
  auto cache = make_kv_prompt_cache(2);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    const auto rows = mx::ones({1, 3, tokens, 8});
    cache.at<KVCache>(layer).update_and_fetch(rows, rows);
  }
  return save_prompt_cache(file, cache, {{"model", "some/model"}, {"note", "mine"}}, options);
}

TEST(Inspect, APromptCacheFile) {
  const TemporaryFolder folder;
  SaveOptions options;
  options.extension.tokens = Tokens{5, 6, 7};
  options.extension.model_fingerprint = "0123456789abcdef0123";
  options.extension.app_json =
      R"({"prompt":{"text":"Once upon a time"},"chat":{"messages":[{"role":"user","content":"Hello\nthere"}]}})";
  const auto file = make_cache_file(folder.file("cache.safetensors"), 3, options);
  const auto outcome = run_program({"inspect", file});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  expect_words(outcome.out, {"prompt cache", "current", "tokens         3\n", "3 ids", "2 x KVCache",
                             "1 x 3 x 3 x 8 float32", "some/model", "0123456789abcdef", "note = \"mine\"",
                             "Once upon a time", "1 messages", "\"Hello there\""});
}

std::unique_ptr<LayerCache> filled(std::unique_ptr<AttentionCache> cache, int tokens) {
  const auto rows = mx::ones({1, 1, tokens, 64});
  cache->update_and_fetch(rows, rows);
  return cache;
}

TEST(Inspect, LayersWithTheirNumbersAndTheChildrenOfLists) {
  const TemporaryFolder folder;
  PromptCache cache;
  for (int layer = 0; layer < 2; ++layer) cache.push_back(filled(std::make_unique<RotatingKVCache>(16, 4), 3));
  cache.push_back(filled(std::make_unique<KVCache>(), 3));
  auto inner =
      std::make_unique<CacheList>(filled(std::make_unique<QuantizedKVCache>(32, 8), 3), std::make_unique<MambaCache>());
  for (int slot = 0; slot < 2; ++slot) inner->at<MambaCache>(1).set(slot, mx::ones({1, 2}));
  cache.push_back(std::make_unique<CacheList>(filled(std::make_unique<ChunkedKVCache>(64), 3), std::move(inner)));
  const auto outcome = run_program({"inspect", save_prompt_cache(folder.file("cache.safetensors"), cache)});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  expect_words(outcome.out, {"layers         2 x RotatingKVCache, 1 x KVCache, 1 x CacheList\n",
                             "\n  0-1          RotatingKVCache, max_size 16, keep 4\n"
                             "  3            CacheList of 2\n"
                             "    3.0        ChunkedKVCache, chunk_size 64\n"
                             "    3.1        CacheList of 2\n"
                             "      3.1.0    QuantizedKVCache, 8 bits, groups of 32\n"
                             "      3.1.1    ArraysCache, 2 slots\n"});
}

TEST(Inspect, BatchesWithTheOffsetsOfTheirRows) {
  const TemporaryFolder folder;
  const auto growing = filled(std::make_unique<KVCache>(), 3), longer = filled(std::make_unique<KVCache>(), 7);
  const auto ring = filled(std::make_unique<RotatingKVCache>(8, 2), 3);
  const auto longer_ring = filled(std::make_unique<RotatingKVCache>(8, 2), 7);
  PromptCache cache;
  cache.push_back(merge_caches({growing.get(), longer.get()}));
  cache.push_back(merge_caches({ring.get(), longer_ring.get()})->to_quantized(64, 4));
  const auto outcome = run_program({"inspect", save_prompt_cache(folder.file("cache.safetensors"), cache)});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  expect_words(outcome.out,
               {"\n  0            BatchKVCache, 2 rows, offsets 3, 7\n"
                "  1            BatchQuantizedRotatingKVCache, max_size 8, keep 2, 4 bits, groups of 64, 2 rows, "
                "offsets 3, 7\n"});
}

TEST(Inspect, ALegacyFileAndOneWhoseRecordDoesNotFit) {
  const TemporaryFolder folder;
  const auto legacy = make_cache_file(folder.file("legacy.safetensors"), 4, {.layout = PromptCacheLayout::legacy});
  expect_words(run_program({"inspect", legacy}).out, {"legacy", "tokens         4\n", "token record   none"});
}

TEST(Inspect, DamageIsOneErrorThatNamesTheFile) {
  const TemporaryFolder folder;
  const auto whole = make_cache_file(folder.file("cache.safetensors"), 3, {});
  const auto size = fs::file_size(whole);
  for (const auto kept : {std::uintmax_t{0}, std::uintmax_t{7}, std::uintmax_t{100}, size - 1}) {
    const auto cut = folder.file("cut.safetensors");
    fs::copy_file(whole, cut, fs::copy_options::overwrite_existing);
    fs::resize_file(cut, kept);
    const auto outcome = run_program({"inspect", cut});
    EXPECT_EQ(outcome.exit_code, 1) << kept;
    EXPECT_EQ(outcome.out, "") << kept;
    EXPECT_EQ(count_lines(outcome.err), 1) << outcome.err;
    expect_words(outcome.err, {"cut.safetensors"});
  }
  for (const auto& name : {folder.file("nothing"), folder.file("nothing.gguf")}) {
    EXPECT_EQ(run_program({"inspect", name}).exit_code, 1);
  }
  std::ofstream(folder.file("text.txt")) << "hello";
  EXPECT_EQ(run_program({"inspect", folder.file("text.txt")}).exit_code, 1);
  std::ofstream(folder.file("bad.gguf")) << "GGUF and then nothing sensible at all";
  EXPECT_EQ(run_program({"inspect", folder.file("bad.gguf")}).exit_code, 1);
}

TEST(Inspect, AModelFolderWithQuantisedWeights) {
  const TemporaryFolder folder;
  const auto weights = mx::quantize(mx::random::normal({64, 128}), 32, 4);
  mx::save_safetensors(folder.file("model.safetensors"),
                       {{"model.layers.0.mlp.up_proj.weight", weights[0]},
                        {"model.layers.0.mlp.up_proj.scales", weights[1]},
                        {"model.layers.0.mlp.up_proj.biases", weights[2]},
                        {"model.norm.weight", mx::ones({128})}},
                       {{"format", "mlx"}});
  std::ofstream(folder.file("config.json"))
      << R"({"model_type":"llama","architectures":["LlamaForCausalLM"],"num_hidden_layers":1,"hidden_size":128,
             "num_attention_heads":4,"num_key_value_heads":2,"intermediate_size":64,"max_position_embeddings":2048,
             "vocab_size":300,"quantization":{"group_size":32,"bits":4}})";
  std::ofstream(folder.file("tokenizer_config.json")) << R"({"chat_template":"{{ messages }}"})";
  const auto outcome = run_program({"inspect", folder.file("")});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  expect_words(outcome.out, {"llama (LlamaForCausalLM)", "1 layers", "hidden size 128", "4 heads",
                             "2 of keys and values", "2048 tokens", "300 tokens", "parameters     8320\n",
                             "4-bit, groups of 32", "MISSING", "chat template  yes"});
  expect_words(run_program({"inspect", folder.file("model.safetensors")}).out, {"not a prompt cache", "4 tensors"});

  std::ofstream(folder.file("config.json")) << R"({"model_type":"made_up"})";
  expect_words(run_program({"inspect", folder.file("")}).out, {"made_up: this version cannot run it"});
  std::ofstream(folder.file("config.json")) << "{";
  EXPECT_EQ(run_program({"inspect", folder.file("")}).exit_code, 1);
  fs::remove(folder.file("config.json"));
  expect_words(run_program({"inspect", folder.file("")}).err, {"config.json"});
}

TEST(Inspect, PipesAndDevicesAreRefusedAtOnce) {
  const TemporaryFolder folder;
  for (const char* name : {"pipe", "pipe.safetensors", "pipe.gguf"}) {
    ASSERT_EQ(::mkfifo(folder.file(name).c_str(), 0600), 0);
    const auto outcome = run_program({"inspect", folder.file(name)});
    EXPECT_EQ(outcome.exit_code, 1);
    expect_words(outcome.err, {"regular file", name});
  }
  expect_words(run_program({"inspect", "/dev/zero"}).err, {"regular file"});
  fs::create_directory(folder.file("model"));
  ASSERT_EQ(::mkfifo(folder.file("model/config.json").c_str(), 0600), 0);
  expect_words(run_program({"inspect", folder.file("model")}).err, {"regular file", "config.json"});
}

TEST(Inspect, AFolderAsLoadingReadsIt) {
  const TemporaryFolder folder;
  mx::save_safetensors(folder.file("model.safetensors"), {{"w", mx::ones({2, 2})}});
  std::ofstream(folder.file("config.json"))
      << R"({"model_type":"llama","num_hidden_layers":3,"limit":[-Infinity,NaN]})";
  const auto outcome = run_program({"inspect", folder.file("")});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  expect_words(outcome.out, {"llama", "3 layers"});
  std::ofstream(folder.file("config.json")) << "{}";
  for (const char* shard : {"\"../model.safetensors\"", "\"/dev/zero\"", "\"..\"", "\"\"", "7"}) {
    std::ofstream(folder.file("model.safetensors.index.json")) << R"({"weight_map":{"w":)" << shard << "}}";
    const auto refused = run_program({"inspect", folder.file("")});
    EXPECT_EQ(refused.exit_code, 1) << shard;
    expect_words(refused.err, {"of this folder"});
  }
}

TEST(Inspect, AGgufModel) {
  REPRISE_NEED_MODEL(model);
  if (fs::path(model).extension() != ".gguf") GTEST_SKIP() << "the model is no .gguf file";
  const auto outcome = run_program({"inspect", model});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  expect_words(outcome.out,
               {"GGUF file", "architecture", "layers", "parameters", "million", "tokenizer", "chat template"});
}

}  // namespace
}  // namespace reprise::test
