// What the keys of a config.json mean for layers and rotations, and which values are refused.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/language_model.h"
#include "reprise/models/model_parts.h"

namespace reprise::internal {
namespace {

using Kinds = std::vector<LayerKind>;

void expect_refused(const std::string& config, ErrorCode code, const std::string& word) {
  ModelFiles files;
  files.config_json = config;
  try {
    make_model(files);
    FAIL() << "accepted; expected a message with " << word;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

// The sizes that every architecture asks for first, and `more`.
std::string config_of(const std::string& model_type, const std::string& more) {
  return R"({"model_type": ")" + model_type +
         R"(", "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 2,
         "vocab_size": 10, )" +
         more + "}";
}

TEST(AttentionKinds, AWindowForEveryLayerIsThatOfSlidingWindow) {
  const Config config(R"({"num_hidden_layers": 2, "sliding_window": 5, "max_position_embeddings": 9})");
  EXPECT_EQ(same_attention_kinds(config), (Kinds{SlidingAttention{5}, SlidingAttention{5}}));
  EXPECT_EQ(upper_window_kinds(config), (Kinds{FullAttention{}, FullAttention{}}));
}

TEST(AttentionKinds, AWindowThatNoPositionExceedsIsNone) {
  const Config config(R"({"num_hidden_layers": 1, "sliding_window": 9, "max_position_embeddings": 9})");
  EXPECT_EQ(same_attention_kinds(config), Kinds{FullAttention{}});
}

TEST(AttentionKinds, UpperLayersSlideOnlyWhereTheWindowIsUsed) {
  const std::string sizes = R"({"num_hidden_layers": 3, "sliding_window": 5, "max_window_layers": 1,)";
  EXPECT_EQ(upper_window_kinds(Config(sizes + R"("use_sliding_window": true})")),
            (Kinds{FullAttention{}, SlidingAttention{5}, SlidingAttention{5}}));
  EXPECT_EQ(upper_window_kinds(Config(sizes + R"("use_sliding_window": false})")),
            (Kinds{FullAttention{}, FullAttention{}, FullAttention{}}));
}

TEST(AttentionKinds, LayerTypesSayMore) {
  const Config config(R"({"num_hidden_layers": 2, "sliding_window": 5, "use_sliding_window": true,
    "max_window_layers": 0, "layer_types": ["full_attention", "sliding_attention"]})");
  EXPECT_EQ(same_attention_kinds(config), (Kinds{FullAttention{}, SlidingAttention{5}}));
  EXPECT_EQ(upper_window_kinds(config), (Kinds{FullAttention{}, SlidingAttention{5}}));
}

TEST(ConfigRope, PartsByLayerTypeAreTakenByNameAndNotPassedOver) {
  const Config config(R"({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4, "rope_theta": 7},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3}}})");
  const RopeOptions full = config.rope(8, {.layer_type = "full_attention"});
  EXPECT_EQ(full.base, 7.0f);
  EXPECT_EQ(full.scaling->type, "linear");
  EXPECT_EQ(config.rope(8, {.layer_type = "sliding_attention"}).base, 3.0f);
  EXPECT_THROW(config.rope(8), Error);
}

TEST(ConfigRope, TheBaseOfAnArchitectureHoldsOnlyWithoutRopeTheta) {
  EXPECT_EQ(Config("{}").rope(8, {.base_otherwise = 5.0f}).base, 5.0f);
  EXPECT_EQ(Config(R"({"rope_theta": 3})").rope(8, {.base_otherwise = 5.0f}).base, 3.0f);
  EXPECT_EQ(Config(R"({"rope_parameters": {"rope_theta": 3}})").rope(8, {.base_otherwise = 5.0f}).base, 3.0f);
}

TEST(ConfigRope, PartOfAHeadRotatesByFactor) {
  EXPECT_EQ(Config("{}").rotary_dims(32), 32);
  EXPECT_EQ(Config("{}").rotary_dims(32, 0.5f), 16);
  EXPECT_EQ(Config(R"({"partial_rotary_factor": 0.75})").rotary_dims(32), 24);
  EXPECT_EQ(Config(R"({"rope_parameters": {"partial_rotary_factor": 0.5}})").rotary_dims(32), 16);
  EXPECT_EQ(Config(R"({"rope_parameters": {"partial_rotary_factor": 0.75}})").rotary_dims(32, 0.5f), 24);
  EXPECT_THROW(Config(R"({"partial_rotary_factor": 1.5})").rotary_dims(32), Error);
}

TEST(MakeModel, FlagsThatWouldChangeResultsAreRefusedByName) {
  const auto refused = [](const std::string& model_type, const std::string& more, const std::string& word) {
    SCOPED_TRACE(model_type);
    expect_refused(config_of(model_type, more), ErrorCode::unsupported, word);
  };
  refused("cohere2", R"("use_qk_norm": true)", "use_qk_norm");
  refused("cohere2", R"("use_parallel_block": false)", "use_parallel_block");
  refused("iquestcoder", R"("clip_qkv": 8)", "clip_qkv");
  refused("olmo2", R"("clip_qkv": 8)", "clip_qkv");
  refused("phi3", R"("attention_bias": true)", "attention_bias");
  refused("phi3", R"("rope_scaling": {"type": "llama3", "factor": 2})", "llama3");
  refused("smollm3", R"("use_sliding_window": true)", "use_sliding_window");
  refused("starcoder2", R"("hidden_act": "relu")", "relu");
  refused("starcoder2", R"("norm_type": "rms_norm")", "norm_type");
}

TEST(MakeModel, NumbersThatNoModelHasAreRefusedByName) {
  const auto refused = [](const std::string& model_type, const std::string& more, const std::string& word) {
    SCOPED_TRACE(model_type);
    expect_refused(config_of(model_type, more), ErrorCode::corrupt_data, word);
  };
  refused("granite", R"("residual_multiplier": 0)", "residual_multiplier");
  refused("ministral3", R"("rope_parameters": {"llama_4_scaling_beta": 0.1})", "original_max_position_embeddings");
  refused("ministral3", R"("rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 0})",
          "original_max_position_embeddings");
  refused("phi3", R"("partial_rotary_factor": 0)", "partial_rotary_factor");
  refused("smollm3", R"("no_rope_layers": [1])", "no_rope_layers");
  refused("smollm3", R"("no_rope_layer_interval": 0)", "no_rope_layer_interval");
}

}  // namespace
}  // namespace reprise::internal
