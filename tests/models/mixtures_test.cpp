// Mixtures of experts and their quantised weights: what make_model takes and what it refuses, by name. Models are made
// in memory.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/models/language_model.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

constexpr const char* kConfig = R"({"model_type": "gpt_oss", "hidden_size": 32, "num_hidden_layers": 2,
  "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 10,
  "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 4, "tie_word_embeddings": true})";

// Its experts as mlx-lm stores them, in `mode`.
ModelFiles tiny_gpt_oss(const std::string& mode = "mxfp4") {
  ModelFiles files;
  files.config_json = kConfig;
  const auto random = [&](const mx::Shape& shape) {
    return mx::multiply(mx::random::normal(shape, mx::float32, mx::random::key(files.weights.size())), mx::array(0.2f));
  };
  const auto add = [&](const std::string& name, const mx::Shape& shape) {
    files.weights.insert({name, random(shape)});
  };
  const auto add_map = [&](const std::string& name, int out, int in) {
    add(name + ".weight", {out, in});
    add(name + ".bias", {out});
  };
  const auto add_experts = [&](const std::string& name, int out, int in) {
    const auto parts = mx::quantize(random({3, out, in}), {}, {}, mode);
    files.weights.insert({name + ".weight", parts[0]});
    files.weights.insert({name + ".scales", parts[1]});
    add(name + ".bias", {3, out});
  };
  add("model.embed_tokens.weight", {10, 32});
  add("model.norm.weight", {32});
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    add(layer + "input_layernorm.weight", {32});
    add(layer + "post_attention_layernorm.weight", {32});
    add_map(layer + "self_attn.q_proj", 32, 32);
    add_map(layer + "self_attn.k_proj", 16, 32);
    add_map(layer + "self_attn.v_proj", 16, 32);
    add_map(layer + "self_attn.o_proj", 32, 32);
    add(layer + "self_attn.sinks", {2});
    add_map(layer + "mlp.router", 3, 32);
    add_experts(layer + "mlp.experts.gate_proj", 64, 32);
    add_experts(layer + "mlp.experts.up_proj", 64, 32);
    add_experts(layer + "mlp.experts.down_proj", 32, 64);
  }
  return files;
}

void replace(std::string& text, const std::string& from, const std::string& to) {
  text.replace(text.find(from), from.size(), to);
}

mx::array logits_of(const ModelFiles& files) {
  const auto model = make_model(files, {.kv_dtype = mx::float32});
  auto cache = model->make_cache();
  auto logits = model->forward(mx::array({1, 2, 3, 4, 5, 6}, {1, 6}), cache);
  mx::eval(logits);
  return logits;
}

double difference(const mx::array& a, const mx::array& b) {
  return static_cast<double>(mx::divide(mx::max(mx::abs(mx::subtract(a, b))), mx::max(mx::abs(b))).item<float>());
}

void expect_refused(const std::function<void(ModelFiles&)>& damage, ErrorCode code, const std::string& word) {
  ModelFiles files = tiny_gpt_oss();
  damage(files);
  try {
    make_model(files);
    FAIL() << "accepted; expected a message with " << word;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(Mixtures, EveryFormatGivesWhatItsUnpackedWeightsGive) {
  for (const std::string mode : {"mxfp4", "mxfp8", "nvfp4"}) {
    SCOPED_TRACE(mode);
    const ModelFiles files = tiny_gpt_oss(mode);
    ModelFiles dense = files;
    for (const auto& [name, weight] : files.weights) {
      const std::string path = name.substr(0, name.rfind('.'));
      if (!name.ends_with(".scales")) continue;
      dense.weights.erase(name);
      dense.weights.insert_or_assign(path + ".weight", mx::dequantize(files.weights.at(path + ".weight"), weight, {},
                                                                      {}, {}, mode, {}, mx::float32));
    }
    EXPECT_LT(difference(logits_of(files), logits_of(dense)), 1e-3);
    EXPECT_NE(make_model(files)->info().quantization.find(mode), std::string::npos);
    EXPECT_LT(make_model(files)->info().weights_nbytes, make_model(dense)->info().weights_nbytes);
  }
}

TEST(Mixtures, AModeMayBeNamedForAllLayersOrForOneAmongAffineOnes) {
  const auto want = logits_of(tiny_gpt_oss());
  for (const std::string named :
       {R"("quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"})", R"("quantization": {"mode": "mxfp4"})",
        R"("quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})",
        R"("quantization": {"group_size": 64, "bits": 8,
            "model.layers.0.mlp.experts.gate_proj": {"mode": "mxfp4"}})"}) {
    ModelFiles files = tiny_gpt_oss();
    replace(files.config_json, "true}", "true, " + named + "}");
    EXPECT_EQ(difference(logits_of(files), want), 0.0) << named;
  }
  // An affine layer among them.
  ModelFiles files = tiny_gpt_oss();
  const auto parts = mx::quantize(files.weights.at("model.layers.1.mlp.router.weight"), 32, 8);
  files.weights.insert_or_assign("model.layers.1.mlp.router.weight", parts[0]);
  files.weights.insert_or_assign("model.layers.1.mlp.router.scales", parts[1]);
  files.weights.insert_or_assign("model.layers.1.mlp.router.biases", parts[2]);
  replace(files.config_json, "true}",
          R"(true, "quantization": {"mode": "mxfp4", "model.layers.1.mlp.router": {"group_size": 32, "bits": 8}}})");
  EXPECT_LT(difference(logits_of(files), want), 0.05);
}

// The layout in which the maps' outputs alternate, and inputs come first.
TEST(Mixtures, OriginalExpertsThatAreNotQuantisedAreTurned) {
  ModelFiles files = tiny_gpt_oss();
  ModelFiles original = files;
  for (const std::string layer : {"model.layers.0.mlp.experts.", "model.layers.1.mlp.experts."}) {
    const auto take = [&](const std::string& map) {
      const auto weight =
          mx::dequantize(files.weights.at(layer + map + ".weight"), files.weights.at(layer + map + ".scales"), {}, {},
                         {}, "mxfp4", {}, mx::float32);
      const auto bias = files.weights.at(layer + map + ".bias");
      for (const char* part : {".weight", ".scales", ".bias"}) original.weights.erase(layer + map + part);
      return std::pair(mx::swapaxes(weight, -1, -2), bias);
    };
    const auto [gate, gate_bias] = take("gate_proj");
    const auto [up, up_bias] = take("up_proj");
    const auto [down, down_bias] = take("down_proj");
    original.weights.insert({layer + "gate_up_proj", mx::reshape(mx::stack({gate, up}, -1), {3, 32, 128})});
    original.weights.insert({layer + "gate_up_proj_bias", mx::reshape(mx::stack({gate_bias, up_bias}, -1), {3, 128})});
    original.weights.insert({layer + "down_proj", down});
    original.weights.insert({layer + "down_proj_bias", down_bias});
  }
  EXPECT_LT(difference(logits_of(original), logits_of(files)), 1e-3);
}

TEST(Mixtures, EveryDamageIsNamed) {
  const std::string experts = "model.layers.0.mlp.experts.";
  expect_refused([](ModelFiles& f) { replace(f.config_json, "tok\": 2", "tok\": 4"); }, ErrorCode::corrupt_data,
                 "num_experts_per_tok");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "experts\": 3", "experts\": 0"); }, ErrorCode::corrupt_data,
                 "num_local_experts");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "experts\": 3", "experts\": 4"); }, ErrorCode::corrupt_data,
                 "[4, 64, 4]");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "true}", "true, \"swiglu_limit\": -1}"); },
                 ErrorCode::corrupt_data, "swiglu_limit");
  expect_refused([](ModelFiles& f) { replace(f.config_json, "window\": 4", "window\": 0"); }, ErrorCode::corrupt_data,
                 "sliding_window");
  expect_refused([&](ModelFiles& f) { f.weights.erase(experts + "up_proj.bias"); }, ErrorCode::corrupt_data,
                 "up_proj.bias");
  expect_refused(
      [&](ModelFiles& f) {
        f.weights.insert_or_assign(experts + "up_proj.scales", mx::zeros({3, 64, 1}));
      },
      ErrorCode::corrupt_data, "up_proj");
  expect_refused(
      [&](ModelFiles& f) {
        f.weights.insert_or_assign(experts + "up_proj.scales", mx::zeros({3, 64, 4}, mx::uint8));
      },
      ErrorCode::corrupt_data, "up_proj");
  expect_refused(
      [](ModelFiles& f) { replace(f.config_json, "true}", "true, \"quantization\": {\"mode\": \"mxfp6\"}}"); },
      ErrorCode::unsupported, "mxfp6");
  expect_refused(
      [](ModelFiles& f) {
        replace(f.config_json, "true}", "true, \"quantization\": {\"mode\": \"nvfp4\", \"bits\": 8}}");
      },
      ErrorCode::corrupt_data, "nvfp4");
  for (const mx::Shape& shape : {mx::Shape{3, 128, 1, 15}, mx::Shape{3, 16}, mx::Shape{16}}) {
    expect_refused(
        [&](ModelFiles& f) {
          f.weights.insert({experts + "gate_up_proj_blocks", mx::zeros(shape, mx::uint8)});
        },
        ErrorCode::corrupt_data, "gate_up_proj_blocks");
  }
}

}  // namespace
}  // namespace reprise
