// DeepSeek's checkpoints as they are published, and latents in every class of cache: what the kit has no folders for,
// since mlx-lm cannot quantise a latent cache.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/kernels/reference.h"
#include "reprise/storage/file_system.h"
#include "tests/models/model_kit.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;
using Json = nlohmann::json;

class DeepseekGolden : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(test::kit_folder() / "deepseek_v3")) GTEST_SKIP() << "no kit at " << test::kit_folder();
  }

  static ModelFiles files(const std::string& name) { return read_model_files(test::kit_folder() / name); }

  static void set(ModelFiles& files, const std::string& key, const Json& value) {
    Json config = Json::parse(files.config_json);
    config[key] = value;
    files.config_json = config.dump();
  }

  static mx::array logits(const ModelFiles& files) {
    const auto model = make_model(files, {.kv_dtype = mx::float32});
    auto cache = model->make_cache();
    return test::feed(*model, {{5, 3, 90, 17, 44, 2, 8, 61}}, cache);
  }

  static void expect_refused(const ModelFiles& files, ErrorCode code, const std::string& word) {
    try {
      make_model(files);
      ADD_FAILURE() << "accepted; expected a message with " << word;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  }
};

bool is_stored_in_fp8(const std::string& name) {
  return name.ends_with("proj.weight") || name.ends_with("kv_a_proj_with_mqa.weight");
}

// Every projection of the original checkpoint in fp8, a scale for each block of 16 · 16; `plain`: what they stand for.
struct Fp8Checkpoint {
  ModelFiles fp8;
  ModelFiles plain;
};

Fp8Checkpoint fp8_checkpoint(const ModelFiles& original) {
  Fp8Checkpoint made{original, original};
  for (const auto& [name, weight] : original.weights) {
    if (!is_stored_in_fp8(name)) continue;
    const int rows = (weight.shape(0) + 15) / 16, columns = (weight.shape(1) + 15) / 16;
    const mx::array scales =
        mx::add(mx::array(0.002f),
                mx::abs(mx::multiply(mx::random::normal({rows, columns}, mx::random::key(3)), mx::array(0.001f))));
    const mx::array each = mx::slice(mx::repeat(mx::repeat(scales, 16, 0), 16, 1), {0, 0}, weight.shape());
    const mx::array bytes = mx::to_fp8(mx::divide(weight, each));
    const mx::array back = mx::multiply(mx::from_fp8(bytes, mx::bfloat16), each);
    made.fp8.weights.insert_or_assign(name, bytes);
    made.fp8.weights.insert_or_assign(name + "_scale_inv", scales);
    made.plain.weights.insert_or_assign(name, mx::astype(back, mx::bfloat16));
  }
  Json config = Json::parse(original.config_json);
  config["quantization_config"] = {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {16, 16}}};
  made.fp8.config_json = config.dump();
  return made;
}

TEST_F(DeepseekGolden, Fp8CheckpointsAreWhatTheirBlocksStandFor) {
  const Fp8Checkpoint made = fp8_checkpoint(files("deepseek_v3/hf"));
  EXPECT_LT(test::relative_error(logits(made.fp8), logits(made.plain)), 1e-6);
  // The blocks matter: with the default of 128 the scales do not fit.
  ModelFiles wrong = made.fp8;
  set(wrong, "quantization_config", {{"quant_method", "fp8"}});
  expect_refused(wrong, ErrorCode::corrupt_data, "scales of");
  set(wrong, "quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {1 << 30, 16}}});
  expect_refused(wrong, ErrorCode::corrupt_data, "weight_block_size");
  wrong = made.fp8;
  set(wrong, "quantization_config", {{"quant_method", "gptq"}});
  expect_refused(wrong, ErrorCode::unsupported, "gptq");
  wrong = made.fp8;
  wrong.weights.erase("model.layers.0.mlp.up_proj.weight");
  expect_refused(wrong, ErrorCode::corrupt_data, "model.layers.0.mlp.up_proj.weight");
  wrong = made.fp8;
  wrong.weights.insert_or_assign("model.layers.0.mlp.up_proj.weight", mx::zeros({64, 40}));
  expect_refused(wrong, ErrorCode::corrupt_data, "F8_E4M3");
}

TEST_F(DeepseekGolden, PackedIntegersCountFromEight) {
  ModelFiles original = files("deepseek_v3_q4"), expected = original;
  const std::string stacked = "model.layers.1.mlp.switch_mlp.";
  for (const std::string map : {"gate_proj", "up_proj", "down_proj"}) {
    const mx::array packed = original.weights.at(stacked + map + ".weight");
    const mx::array scales = original.weights.at(stacked + map + ".scales");
    expected.weights.insert_or_assign(stacked + map + ".biases", mx::multiply(scales, mx::array(-8.0f)));
    for (int expert = 0; expert < packed.shape(0); ++expert) {
      const std::string path = "model.layers.1.mlp.experts." + std::to_string(expert) + "." + map;
      const auto one = [&](const mx::array& all) { return mx::contiguous(mx::take(all, expert, 0)); };
      original.weights.insert_or_assign(path + ".weight_packed", mx::view(one(packed), mx::int32));
      original.weights.insert_or_assign(path + ".weight_scale", one(scales));
      original.weights.insert_or_assign(path + ".weight_shape",
                                        mx::array({packed.shape(1), packed.shape(2) * 8}, {2}, mx::int64));
    }
    for (const char* part : {".weight", ".scales", ".biases"}) original.weights.erase(stacked + map + part);
  }
  Json config = Json::parse(original.config_json);
  config.erase("quantization");
  config["quantization_config"] = {{"quant_method", "compressed-tensors"}};
  original.config_json = config.dump();
  EXPECT_LT(test::relative_error(logits(original), logits(expected)), 1e-6);
  original.weights.insert_or_assign("model.layers.1.mlp.experts.0.up_proj.weight_shape",
                                    mx::array({32, 32}, {2}, mx::int64));
  expect_refused(original, ErrorCode::unsupported, "4 bits");
}

TEST_F(DeepseekGolden, AQuantisedKvBProjIsSplitToo) {
  ModelFiles packed = files("deepseek_v3/hf"), dense = packed;
  for (const char* layer : {"0", "1"}) {
    const std::string name = std::string("model.layers.") + layer + ".self_attn.kv_b_proj";
    const auto parts = mx::quantize(packed.weights.at(name + ".weight"), 32, 8);
    packed.weights.insert_or_assign(name + ".weight", parts[0]);
    packed.weights.insert_or_assign(name + ".scales", parts[1]);
    packed.weights.insert_or_assign(name + ".biases", parts[2]);
    dense.weights.insert_or_assign(name + ".weight", mx::dequantize(parts[0], parts[1], parts[2], 32, 8));
  }
  EXPECT_LT(test::relative_error(logits(packed), logits(dense)), 2e-2);
}

TEST_F(DeepseekGolden, LayersThatOnlyPredictFurtherTokensAreDropped) {
  ModelFiles more = files("deepseek_v3/hf");
  more.weights.insert({"model.layers.2.eh_proj.weight", mx::zeros({4, 4})});
  more.weights.insert({"model.layers.61.shared_head.norm.weight", mx::zeros({4})});
  EXPECT_EQ(test::relative_error(logits(more), logits(files("deepseek_v3/hf"))), 0.0);
  more.weights.insert({"model.layers.1.eh_proj.weight", mx::zeros({4, 4})});
  expect_refused(more, ErrorCode::corrupt_data, "model.layers.1.eh_proj.weight");
}

TEST_F(DeepseekGolden, VariantsThatWouldChangeResultsAreRefusedByName) {
  const auto with = [](const std::string& name, const std::string& key, const Json& value) {
    ModelFiles changed = files(name);
    set(changed, key, value);
    return changed;
  };
  expect_refused(with("deepseek_v3", "topk_method", "greedy"), ErrorCode::unsupported, "greedy");
  expect_refused(with("deepseek_v3", "scoring_func", "softmax"), ErrorCode::unsupported, "softmax");
  expect_refused(with("deepseek_v3", "n_group", 3), ErrorCode::corrupt_data, "n_group");
  expect_refused(with("deepseek_v3", "n_group", 4), ErrorCode::corrupt_data, "n_group");
  expect_refused(with("deepseek_v3", "topk_group", 3), ErrorCode::corrupt_data, "topk_group");
  expect_refused(with("deepseek_v3", "num_experts_per_tok", 5), ErrorCode::corrupt_data, "num_experts_per_tok");
  expect_refused(with("deepseek_v3", "kv_lora_rank", 0), ErrorCode::corrupt_data, "kv_lora_rank");
  expect_refused(with("deepseek_v3", "v_head_dim", 25), ErrorCode::corrupt_data, "unembed_out");
  expect_refused(with("deepseek_v3/hf", "v_head_dim", 25), ErrorCode::corrupt_data, "kv_b_proj");
  expect_refused(with("deepseek_v3", "num_attention_heads", 1 << 30), ErrorCode::corrupt_data, "too large");
  expect_refused(with("deepseek_v3", "n_shared_experts", 1 << 30), ErrorCode::corrupt_data, "n_shared_experts");
  expect_refused(with("deepseek_v3", "moe_layer_freq", 0), ErrorCode::corrupt_data, "moe_layer_freq");
  expect_refused(with("deepseek_v2", "topk_method", "noaux_tc"), ErrorCode::unsupported, "noaux_tc");
  expect_refused(with("deepseek_v2", "norm_topk_prob", true), ErrorCode::unsupported, "norm_topk_prob");
  for (const char* name : {"kimi_k2", "joyai_llm_flash"}) {
    EXPECT_EQ(test::relative_error(logits(with("deepseek_v3", "model_type", name)), logits(files("deepseek_v3"))), 0.0);
  }
}

TEST_F(DeepseekGolden, GroupsLimitTheExpertsOfV2) {
  ModelFiles limited = files("deepseek_v2");
  set(limited, "topk_method", "group_limited_greedy");
  set(limited, "n_group", 3);
  set(limited, "topk_group", 3);
  EXPECT_EQ(test::relative_error(logits(limited), logits(files("deepseek_v2"))), 0.0);
  set(limited, "topk_group", 1);
  EXPECT_GT(test::relative_error(logits(limited), logits(files("deepseek_v2"))), 1e-3);
}

using MakeLayer = std::function<std::unique_ptr<LayerCache>()>;

// The logits of a prompt and of what follows it, [n, V].
mx::array run(const LanguageModel& model, const std::vector<int>& ids, const std::vector<int>& pieces,
              const MakeLayer& make, bool fork_between = false) {
  PromptCache cache = model.make_cache();
  for (std::size_t i = 0; make && i < cache.size(); ++i) cache.replace(i, make());
  std::vector<mx::array> parts;
  auto at = ids.begin();
  for (const int n : pieces) {
    if (fork_between) {
      PromptCache fork = cache.fork();
      test::feed(model, {{1, 2, 3}}, fork);  // another way, of which nothing may be seen
    }
    parts.push_back(mx::squeeze(test::feed(model, {std::vector<int>(at, at + n)}, cache), 0));
    at += n;
  }
  return mx::concatenate(parts, 0);
}

std::vector<int> some_ids(int count) {
  std::vector<int> ids;
  for (int i = 0; i < count; ++i) ids.push_back((i * i * 7 + i * 13 + 5) % 96);
  return ids;
}

// The relative error that three quarters of the positions stay below: where two experts are nearly as good, a position
// may get the other one.
double usual_error(const mx::array& got, const mx::array& want) {
  const mx::array error = mx::divide(mx::max(mx::abs(mx::subtract(got, want)), -1), mx::max(mx::abs(want)));
  return static_cast<double>(mx::take(mx::sort(error), want.shape(0) * 3 / 4).item<float>());
}

// mlx-lm fails here. Latents of 8 bits are near, of 4 bits further; whatever way they came, they are the same.
TEST_F(DeepseekGolden, LatentsMayBeQuantisedAndWarmIsCold) {
  const kernels::reference::Scope scope;
  const std::vector<int> ids = some_ids(40);
  for (const char* name : {"deepseek_v3", "deepseek_v3_q4", "deepseek_v2"}) {
    const auto model = make_model(files(name), {.kv_dtype = mx::float32});
    const mx::array dense = run(*model, ids, {40}, {});
    double finer = 0;
    for (const int bits : {8, 4}) {
      SCOPED_TRACE(std::string(name) + " " + std::to_string(bits));
      const MakeLayer quantized = [bits] { return std::make_unique<QuantizedKVCache>(32, bits); };
      const mx::array cold = run(*model, ids, {40}, quantized);
      const double error = usual_error(cold, dense);
      EXPECT_GT(error, finer);
      EXPECT_LT(error, bits == 8 ? 2e-2 : 0.35);
      finer = error;
      // A rounding that falls the other way moves a latent by a step.
      const double step = bits == 8 ? 2e-3 : 1e-2;
      EXPECT_LT(test::relative_error(run(*model, ids, {13, 1, 1, 20, 5}, quantized), cold), step);
      EXPECT_LT(test::relative_error(run(*model, ids, {13, 1, 1, 20, 5}, quantized, true), cold), step);
      EXPECT_LT(test::relative_error(run(*model, ids, std::vector<int>(40, 1), quantized), cold), step);
      const MakeLayer ring = [bits] { return std::make_unique<QuantizedRotatingKVCache>(64, 4, 32, bits); };
      EXPECT_LT(test::relative_error(run(*model, ids, {13, 1, 26}, ring), cold), step);
    }
  }
}

TEST_F(DeepseekGolden, ALatentCacheIsQuantisedOnItsWayAndTrimmed) {
  const std::vector<int> ids = some_ids(40);
  const auto model = make_model(files("deepseek_v3"), {.kv_dtype = mx::float32});
  const mx::array dense = run(*model, ids, {40}, {});
  PromptCache cache = model->make_cache();
  test::feed(*model, {std::vector<int>(ids.begin(), ids.begin() + 30)}, cache);
  maybe_quantize_kv_cache(cache, 0, 32, 8);
  EXPECT_EQ(cache[0].class_name(), "QuantizedKVCache");
  test::feed(*model, {{9, 9, 9}}, cache);
  EXPECT_EQ(trim_prompt_cache(cache, 3), 3);
  const mx::array rest = mx::squeeze(test::feed(*model, {std::vector<int>(ids.begin() + 30, ids.end())}, cache), 0);
  EXPECT_LT(usual_error(rest, mx::slice(dense, {30, 0}, dense.shape())), 1e-2);
}

TEST_F(DeepseekGolden, EveryCacheThatKeepsAllRowsGivesTheSame) {
  const std::vector<int> ids = some_ids(40);
  const auto model = make_model(files("deepseek_v3"), {.kv_dtype = mx::float32});
  const mx::array expected = run(*model, ids, {40}, {});
  const std::vector<MakeLayer> makers = {
      [] { return std::make_unique<ConcatenateKVCache>(); }, [] { return std::make_unique<RotatingKVCache>(64); },
      [] { return std::make_unique<RotatingKVCache>(64, 4); }, [] { return std::make_unique<KVCache>(); }};
  for (const MakeLayer& make : makers) {
    EXPECT_LT(test::relative_error(run(*model, ids, {40}, make), expected), 1e-5);
    EXPECT_LT(test::relative_error(run(*model, ids, {7, 1, 1, 25, 6}, make), expected), 1e-4);
  }
}

TEST_F(DeepseekGolden, LatentsAreStoredInHalfPrecisionUnlessAskedOtherwise) {
  const auto model = make_model(files("deepseek_v3"), {});
  auto cache = model->make_cache();
  test::feed(*model, {{1, 2, 3}}, cache);
  const auto stored = std::get<DenseKV>(cache.at<AttentionCache>(0).keys_and_values());
  EXPECT_EQ(stored.keys.dtype(), mx::float16);
  EXPECT_EQ(stored.keys.shape(), (mx::Shape{1, 1, 3, 32}));
  EXPECT_EQ(stored.values.shape(), (mx::Shape{1, 1, 3, 32}));
  const std::vector<int> ids = some_ids(40);
  const auto wide = make_model(files("deepseek_v3"), {.kv_dtype = mx::float32});
  EXPECT_LT(test::relative_error(run(*model, ids, {20, 1, 19}, {}), run(*wide, ids, {40}, {})), 1e-2);
}

}  // namespace
}  // namespace reprise
