// The kit's tiny models, written as llama.cpp's converter writes them, are the folders' own models again.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/models/language_model.h"
#include "reprise/storage/model_files.h"
#include "tests/models/model_kit.h"
#include "tests/storage/gguf_builder.h"
#include "tests/storage/test_files.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using json = nlohmann::json;
using testing::GgufBuilder;

struct Case {
  const char* folder;
  const char* architecture;
};

const std::map<std::string, std::string> kRoles = {{"input_layernorm", "attn_norm"},
                                                   {"self_attn.q_proj", "attn_q"},
                                                   {"self_attn.k_proj", "attn_k"},
                                                   {"self_attn.v_proj", "attn_v"},
                                                   {"self_attn.qkv_proj", "attn_qkv"},
                                                   {"self_attn.q_norm", "attn_q_norm"},
                                                   {"self_attn.k_norm", "attn_k_norm"},
                                                   {"self_attn.o_proj", "attn_output"},
                                                   {"post_attention_layernorm", "ffn_norm"},
                                                   {"mlp.gate_proj", "ffn_gate"},
                                                   {"mlp.up_proj", "ffn_up"},
                                                   {"mlp.gate_up_proj", "ffn_up"},
                                                   {"mlp.down_proj", "ffn_down"},
                                                   {"model.embed_tokens", "token_embd"},
                                                   {"model.norm", "output_norm"},
                                                   {"lm_head", "output"}};
const std::map<std::string, std::string> kGemmaRoles = {{"post_attention_layernorm", "post_attention_norm"},
                                                        {"pre_feedforward_layernorm", "ffn_norm"},
                                                        {"post_feedforward_layernorm", "post_ffw_norm"}};

class Writer {
 public:
  Writer(std::string architecture, const ModelFiles& files)
      : architecture_(std::move(architecture)), config_(json::parse(files.config_json)) {
    heads_ = config_["num_attention_heads"];
    head_dim_ = config_.contains("head_dim") && !config_["head_dim"].is_null()
                    ? config_["head_dim"].get<int>()
                    : config_["hidden_size"].get<int>() / heads_;
    add_metadata();
    for (const auto& [name, weight] : files.weights) add_weight(name, weight);
  }

  std::string build() const { return file_.build(); }

 private:
  void add_count(const std::string& key, const char* from) {
    if (config_.contains(from) && !config_[from].is_null()) {
      file_.add_uint(architecture_ + "." + key, config_[from].get<std::uint32_t>());
    }
  }
  void add_number(const std::string& key, const char* from) {
    if (config_.contains(from)) file_.add_float(architecture_ + "." + key, config_[from].get<float>());
  }

  void add_metadata() {
    file_.add_string("general.architecture", architecture_);
    add_count("block_count", "num_hidden_layers");
    add_count("context_length", "max_position_embeddings");
    add_count("embedding_length", "hidden_size");
    add_count("feed_forward_length", "intermediate_size");
    add_count("attention.head_count", "num_attention_heads");
    add_count("attention.head_count_kv", "num_key_value_heads");
    add_count("attention.key_length", "head_dim");
    add_count("attention.value_length", "head_dim");
    add_count("attention.sliding_window", "sliding_window");
    add_count("attention.sliding_window_pattern", "sliding_window_pattern");
    add_number("attention.layer_norm_rms_epsilon", "rms_norm_eps");
    add_number("rope.freq_base", "rope_theta");
    const auto part = config_.value("partial_rotary_factor", 1.0f);
    file_.add_uint(architecture_ + ".rope.dimension_count",
                   static_cast<std::uint32_t>(part * static_cast<float>(head_dim_)));
    if (const json scaling = config_.value("rope_scaling", json()); !scaling.is_null()) add_scaling(scaling);
  }

  void add_vector(const std::string& name, const std::vector<float>& values) {
    std::string data;
    for (const float value : values) data += GgufBuilder::bytes_of(value);
    file_.add_tensor(name, {values.size()}, 0, data);
  }

  void add_scaling(const json& scaling) {
    const std::string type = scaling.contains("rope_type") ? scaling["rope_type"] : scaling["type"];
    const std::string prefix = architecture_ + ".rope.scaling.";
    if (type == "llama3") return add_vector("rope_freqs.weight", llama3_factors(scaling));
    if (type == "longrope") {
      add_vector("rope_factors_long.weight", scaling["long_factor"].get<std::vector<float>>());
      add_vector("rope_factors_short.weight", scaling["short_factor"].get<std::vector<float>>());
      const float original = config_["original_max_position_embeddings"];
      const float ratio = config_["max_position_embeddings"].get<float>() / original;
      file_.add_uint(prefix + "original_context_length", static_cast<std::uint32_t>(original));
      file_.add_float(prefix + "attn_factor", std::sqrt(1.0f + std::log(ratio) / std::log(original)));
      return;
    }
    file_.add_string(prefix + "type", type);
    file_.add_float(prefix + "factor", scaling["factor"]);
    if (scaling.contains("original_max_position_embeddings")) {
      file_.add_uint(prefix + "original_context_length", scaling["original_max_position_embeddings"]);
    }
    if (scaling.contains("beta_fast")) file_.add_float(prefix + "yarn_beta_fast", scaling["beta_fast"]);
    if (scaling.contains("beta_slow")) file_.add_float(prefix + "yarn_beta_slow", scaling["beta_slow"]);
  }

  // What multiplies each denominator: 1 for short waves, `factor` for long ones, between them a mean of frequencies.
  std::vector<float> llama3_factors(const json& scaling) const {
    const double base = config_["rope_theta"];
    const double factor = scaling["factor"];
    const double low = scaling["low_freq_factor"];
    const double high = scaling["high_freq_factor"];
    const double context = scaling["original_max_position_embeddings"];
    std::vector<float> factors;
    for (int i = 0; i < head_dim_ / 2; ++i) {
      const double turns = context / (2 * std::numbers::pi * std::pow(base, 2.0 * i / head_dim_));
      const double smooth = std::clamp((turns - low) / (high - low), 0.0, 1.0);
      factors.push_back(static_cast<float>(1.0 / ((1.0 - smooth) / factor + smooth)));
    }
    return factors;
  }

  // model.layers.3.self_attn.q_proj.weight → blk.3.attn_q.weight, its rows as the converter orders them.
  void add_weight(const std::string& name, const mx::array& weight) {
    std::string stem = name.substr(0, name.rfind('.'));
    const std::string suffix = name.substr(name.rfind('.'));
    std::string layer;
    if (stem.starts_with("model.layers.")) {
      const std::size_t part = stem.find('.', 13);
      layer = "blk." + stem.substr(13, part - 13) + ".";
      stem = stem.substr(part + 1);
    }
    std::string role;
    const bool is_gemma = architecture_ == "gemma3";
    if (is_gemma && kGemmaRoles.contains(stem)) {
      role = kGemmaRoles.at(stem);
    } else {
      role = kRoles.at(stem);
    }
    mx::array values = mx::astype(weight, mx::float32);
    if (is_gemma && role.ends_with("norm")) values = mx::add(values, mx::array(1.0f));
    if (architecture_ == "llama" && (role == "attn_q" || role == "attn_k")) values = interleaved(values);
    values = mx::contiguous(values);
    values.eval();
    std::vector<std::uint64_t> dims(values.shape().rbegin(), values.shape().rend());
    file_.add_tensor(layer + role + suffix, dims, 0,
                     std::string(reinterpret_cast<const char*>(values.data<float>()), values.nbytes()));
  }

  mx::array interleaved(const mx::array& rows) const {
    const int in = rows.ndim() == 2 ? rows.shape(1) : 1;
    const auto heads = mx::reshape(rows, {-1, 2, head_dim_ / 2, in});
    return mx::reshape(mx::swapaxes(heads, 1, 2), rows.shape());
  }

  std::string architecture_;
  json config_;
  int heads_ = 0;
  int head_dim_ = 0;
  GgufBuilder file_;
};

mx::array logits_of(const ModelFiles& files) {
  const auto model = make_model(files, {.kv_dtype = mx::float32});
  PromptCache cache = model->make_cache();
  std::vector<int> ids;
  for (int i = 0; i < 40; ++i) ids.push_back((i * 37 + 11) % 96);
  auto whole = test::feed(*model, {ids}, cache);
  auto next = test::feed(*model, {{5}}, cache);
  return mx::concatenate({whole, next}, 1);
}

class GgufOfTheKit : public ::testing::TestWithParam<Case> {};

TEST_P(GgufOfTheKit, GivesTheLogitsOfTheFolder) {
  const auto folder = test::kit_folder() / GetParam().folder;
  if (!std::filesystem::exists(folder / "config.json")) GTEST_SKIP() << "no kit at " << folder;
  ModelFiles files = read_model_files(folder);
  json config = json::parse(files.config_json);
  const auto known = known_model_types();
  if (std::find(known.begin(), known.end(), config["model_type"]) == known.end()) {
    GTEST_SKIP() << "no architecture " << config["model_type"];
  }
  // GGUF has no place for it: it is what the head's size gives.
  if (config.contains("query_pre_attn_scalar")) config["query_pre_attn_scalar"] = config["head_dim"];
  files.config_json = config.dump();

  const testing::TemporaryFolder written;
  testing::write_text(written / "tiny.gguf", Writer(GetParam().architecture, files).build());
  const ModelFiles again = read_model_files(written / "tiny.gguf");
  const mx::array want = logits_of(files);
  const mx::array got = logits_of(again);
  ASSERT_EQ(got.shape(), want.shape());
  // Base and factors of rotation have passed through float32; 1 was added to Gemma's norms and taken off again.
  EXPECT_LT(test::relative_error(got, want), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Folders, GgufOfTheKit,
                         ::testing::Values(Case{"llama", "llama"}, Case{"llama_bias_tied", "llama"},
                                           Case{"llama_rope_linear", "llama"}, Case{"llama_rope_llama3", "llama"},
                                           Case{"llama_rope_yarn", "llama"}, Case{"mistral", "llama"},
                                           Case{"qwen2", "qwen2"}, Case{"qwen3", "qwen3"},
                                           Case{"gemma3_text", "gemma3"}, Case{"phi3_plain", "phi3"},
                                           Case{"phi3_longrope", "phi3"}),
                         [](const auto& test) { return std::string(test.param.folder); });

}  // namespace
}  // namespace reprise
