// What make_model refuses, and that it says what was wrong. Models are made in memory.
#include <gtest/gtest.h>

#include <functional>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/models/language_model.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

constexpr const char* kConfig = R"({"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1,
  "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10,
  "rms_norm_eps": 1e-5, "tie_word_embeddings": true})";

ModelFiles tiny_llama() {
  ModelFiles files;
  files.config_json = kConfig;
  const auto add = [&](const std::string& name, const mx::Shape& shape) {
    files.weights.insert(
        {name,
         mx::multiply(mx::random::normal(shape, mx::float32, mx::random::key(files.weights.size())), mx::array(0.2f))});
  };
  add("model.embed_tokens.weight", {10, 16});
  add("model.norm.weight", {16});
  const std::string layer = "model.layers.0.";
  add(layer + "input_layernorm.weight", {16});
  add(layer + "post_attention_layernorm.weight", {16});
  add(layer + "self_attn.q_proj.weight", {16, 16});
  add(layer + "self_attn.k_proj.weight", {8, 16});
  add(layer + "self_attn.v_proj.weight", {8, 16});
  add(layer + "self_attn.o_proj.weight", {16, 16});
  add(layer + "mlp.gate_proj.weight", {24, 16});
  add(layer + "mlp.up_proj.weight", {24, 16});
  add(layer + "mlp.down_proj.weight", {16, 24});
  return files;
}

void replace(std::string& text, const std::string& from, const std::string& to) {
  text.replace(text.find(from), from.size(), to);
}

void expect_refused(const std::function<void(ModelFiles&)>& damage, ErrorCode code, const std::string& word) {
  ModelFiles files = tiny_llama();
  damage(files);
  try {
    make_model(files);
    FAIL() << "accepted; expected a message with " << word;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(MakeModel, TinyLlamaRunsAndKnowsItself) {
  const auto model = make_model(tiny_llama());
  EXPECT_EQ(model->info().num_parameters, 160u + 16 + 16 + 16 + 256 + 128 + 128 + 256 + 3 * 384);
  auto cache = model->make_cache();
  const auto logits = model->forward(mx::array({1, 2, 3}, {1, 3}), cache);
  EXPECT_EQ(logits.shape(), (mx::Shape{1, 3, 10}));
  EXPECT_EQ(cache_length(cache), 3);
}

TEST(MakeModel, KeysAndValuesAreStoredAsAskedElseNarrow) {
  const auto stored = [](const ModelOptions& options) {
    const auto model = make_model(tiny_llama(), options);
    auto cache = model->make_cache();
    EXPECT_EQ(model->forward(mx::array({1, 2, 3}, {1, 3}), cache).dtype(), mx::float32);
    return std::get<DenseKV>(cache.at<AttentionCache>(0).keys_and_values()).values.dtype();
  };
  EXPECT_EQ(stored({}), mx::float16);
  for (mx::Dtype dtype : {mx::float32, mx::bfloat16, mx::float16}) EXPECT_EQ(stored({.kv_dtype = dtype}), dtype);
}

TEST(MakeModel, ADtypeThatIsNoFloatOfOursIsRefused) {
  for (mx::Dtype dtype : {mx::int32, mx::float64, mx::complex64}) {
    EXPECT_THROW(make_model(tiny_llama(), {.compute_dtype = dtype}), Error);
    EXPECT_THROW(make_model(tiny_llama(), {.kv_dtype = dtype}), Error);
  }
  EXPECT_NO_THROW(make_model(tiny_llama(), {.compute_dtype = mx::bfloat16}));
}

TEST(MakeModel, EveryDamageIsNamed) {
  expect_refused([](ModelFiles& f) { f.weights.erase("model.layers.0.mlp.up_proj.weight"); }, ErrorCode::corrupt_data,
                 "model.layers.0.mlp.up_proj.weight");
  expect_refused([](ModelFiles& f) { f.weights.insert_or_assign("model.norm.weight", mx::zeros({17})); },
                 ErrorCode::corrupt_data, "[17]");
  expect_refused(
      [](ModelFiles& f) {
        f.weights.insert({"model.layers.1.mlp.up_proj.weight", mx::zeros({24, 16})});
      },
      ErrorCode::corrupt_data, "model.layers.1.mlp.up_proj.weight");
  expect_refused([](ModelFiles& f) { f.weights.insert_or_assign("model.norm.weight", mx::zeros({16}, mx::int32)); },
                 ErrorCode::corrupt_data, "float");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "llama", "gopher"); }, ErrorCode::unsupported, "gopher");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "\"hidden_size\": 16,", ""); }, ErrorCode::corrupt_data,
                 "hidden_size");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "16", "\"16\""); }, ErrorCode::corrupt_data, "hidden_size");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "16", "-16"); }, ErrorCode::corrupt_data, "positive");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "1e-5", "-1"); }, ErrorCode::corrupt_data, "rms_norm_eps");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "true}", "true, \"hidden_act\": \"gelu\"}"); },
                 ErrorCode::unsupported, "gelu");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "true}", "true, \"max_position_embeddings\": 0}"); },
                 ErrorCode::corrupt_data, "max_position_embeddings");
  expect_refused(
      [](ModelFiles& f) {
        replace(f.config_json, "true}", "true, \"rope_scaling\": {\"type\": \"linear\", \"factor\": 0}}");
      },
      ErrorCode::invalid_argument, "factor");
  expect_refused([](ModelFiles& f) { f.config_json = "{"; }, ErrorCode::corrupt_data, "JSON");
  expect_refused(
      [](ModelFiles& f) { replace(f.config_json, "true}", "true, \"rope_scaling\": {\"type\": \"spiral\"}}"); },
      ErrorCode::unsupported, "spiral");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "true}", "true, \"rope_scaling\": 3}"); },
                 ErrorCode::corrupt_data, "rope_scaling");
  expect_refused(
      [](ModelFiles& f) {
        replace(f.config_json, "true}", "true, \"quantization_config\": {\"quant_method\": \"gptq\"}}");
      },
      ErrorCode::unsupported, "gptq");
  expect_refused(
      [](ModelFiles& f) {
        f.weights.insert({"model.layers.0.mlp.up_proj.scales", mx::zeros({24, 1})});
      },
      ErrorCode::corrupt_data, "model.layers.0.mlp.up_proj");
}

TEST(MakeModel, PackingIsReadFromTheShapesWhereTheConfigDoesNotNameTheLayer) {
  ModelFiles files = tiny_llama();
  replace(files.config_json, "\"hidden_size\": 16", "\"hidden_size\": 32, \"head_dim\": 8");
  replace(files.config_json, "true}", "true, \"quantization\": {\"group_size\": 64, \"bits\": 4}}");
  for (auto& [name, weight] : files.weights) {
    if (name.find("norm") != std::string::npos) weight = mx::ones({32});
    if (name.find("embed") != std::string::npos) weight = mx::ones({10, 32});
    if (name.find("gate") != std::string::npos || name.find("up_proj") != std::string::npos)
      weight = mx::ones({24, 32});
    if (name.find("down") != std::string::npos) weight = mx::ones({32, 24});
    if (name.find("q_proj") != std::string::npos) weight = mx::ones({16, 32});
    if (name.find("k_proj") != std::string::npos || name.find("v_proj") != std::string::npos)
      weight = mx::ones({8, 32});
    if (name.find("o_proj") != std::string::npos) weight = mx::ones({32, 16});
  }
  const auto parts = mx::quantize(mx::random::normal({10, 32}), 32, 8);
  files.weights.insert_or_assign("model.embed_tokens.weight", parts[0]);
  files.weights.insert_or_assign("model.embed_tokens.scales", parts[1]);
  files.weights.insert_or_assign("model.embed_tokens.biases", parts[2]);
  const auto model = make_model(files);
  EXPECT_NE(model->info().quantization.find("8-bit, groups of 32"), std::string::npos) << model->info().quantization;
}

TEST(MakeModel, ACacheOfAnotherModelIsRefusedUnchanged) {
  const auto model = make_model(tiny_llama());
  auto cache = make_kv_prompt_cache(2);
  EXPECT_THROW(model->forward(mx::array({1}, {1, 1}), cache), Error);
  EXPECT_EQ(cache_length(cache), 0);
  auto own = model->make_cache();
  EXPECT_THROW(model->forward(mx::array({1, 2}), own), Error) << "tokens without a batch axis";
  EXPECT_THROW(model->forward(mx::array({99999999}, {1, 1}), own), Error) << "an id that the model does not know";
  EXPECT_THROW(model->forward(mx::array({-1}, {1, 1}), own), Error);
  EXPECT_EQ(cache_length(own), 0);
}

TEST(MakeModel, M8TokenByTokenEqualsOnePassForAnyChunking) {
  const auto model = make_model(tiny_llama());
  const std::vector<int> ids = {1, 7, 3, 3, 9, 0, 4, 2, 8, 5};
  const auto feed = [&](const std::vector<int>& chunks) {
    auto cache = model->make_cache();
    std::vector<mx::array> parts;
    int at = 0;
    for (int n : chunks) {
      parts.push_back(model->forward(mx::array(ids.data() + at, {1, n}, mx::int32), cache));
      at += n;
    }
    return mx::concatenate(parts, 1);
  };
  const auto one_pass = feed({10});
  for (const auto& chunks : {std::vector<int>{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {3, 1, 6}, {9, 1}, {1, 9}}) {
    EXPECT_LT(mx::max(mx::abs(mx::subtract(feed(chunks), one_pass))).item<float>(), 1e-5f);
  }
}

TEST(MakeModel, MistralsWindowHoldsForEveryLayerAndHidesWhatIsBeforeIt) {
  ModelFiles files = tiny_llama();
  replace(files.config_json, "\"llama\"", "\"mistral\"");
  const auto open = make_model(files);
  replace(files.config_json, "true}", "true, \"sliding_window\": 4}");
  const auto windowed = make_model(files);
  EXPECT_EQ(describe_cache(windowed->make_cache()[0]), "RotatingKVCache(4)");
  const auto last = [](const LanguageModel& model, const std::vector<int>& ids, int chunk) {
    auto cache = model.make_cache();
    mx::array logits = mx::zeros({1});
    for (int at = 0; at < static_cast<int>(ids.size()); at += chunk) {
      const int n = std::min(chunk, static_cast<int>(ids.size()) - at);
      logits = model.forward(mx::array(ids.data() + at, {1, n}, mx::int32), cache);
      logits = mx::slice(logits, {0, n - 1, 0}, {1, n, 10});
    }
    return logits;
  };
  const std::vector<int> ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2};
  // One layer: the last token sees the window and nothing else, whatever came before it.
  const std::vector<int> others = {9, 9, 9, 9, 9, 9, 9, 8, 9, 1, 2};
  const auto difference = [](const mx::array& a, const mx::array& b) {
    return mx::max(mx::abs(mx::subtract(a, b))).item<float>();
  };
  for (int chunk : {1, 3, 4, 11}) {
    EXPECT_LT(difference(last(*windowed, ids, chunk), last(*windowed, ids, 11)), 1e-5f) << chunk;
    EXPECT_LT(difference(last(*windowed, ids, chunk), last(*windowed, others, chunk)), 1e-5f) << chunk;
  }
  EXPECT_GT(difference(last(*open, ids, 11), last(*windowed, ids, 11)), 1e-4f);
  const std::vector<int> within = {1, 2, 3, 4};
  EXPECT_LT(difference(last(*open, within, 4), last(*windowed, within, 2)), 1e-5f);
}

TEST(MakeModel, WindowsThatMakeNoSenseAreRefusedByName) {
  const auto with = [](const std::string& members) {
    return [members](ModelFiles& f) { replace(f.config_json, "true}", "true, " + members + "}"); };
  };
  const std::string sliding = "\"layer_types\": [\"sliding_attention\"]";
  expect_refused(with(sliding), ErrorCode::corrupt_data, "sliding_window");
  expect_refused(with(sliding + ", \"sliding_window\": 0"), ErrorCode::corrupt_data, "sliding_window");
  expect_refused(with("\"layer_types\": [\"full_attention\", \"full_attention\"]"), ErrorCode::corrupt_data,
                 "layer_types");
  expect_refused(with("\"layer_types\": [\"chunked_attention\"]"), ErrorCode::unsupported, "chunked_attention");
}

TEST(MakeModel, RowsInStepEqualEachRowAlone) {
  const auto model = make_model(tiny_llama());
  auto both = model->make_cache();
  const auto batch = model->forward(mx::array({1, 2, 3, 7, 8, 9}, {2, 3}), both);
  auto alone = model->make_cache();
  const auto second = model->forward(mx::array({7, 8, 9}, {1, 3}), alone);
  EXPECT_LT(mx::max(mx::abs(mx::subtract(mx::take(batch, mx::array({1}), 0), second))).item<float>(), 1e-5f);
}

}  // namespace
}  // namespace reprise
