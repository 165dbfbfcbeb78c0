// The small model, held against MLX's own GGUF reader.
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "mlx/mlx.h"
#include "reprise/storage/model_files.h"
#include "tests/storage/test_files.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

std::optional<std::filesystem::path> small_model() {
  const char* named = std::getenv("REPRISE_MODEL");
  const std::filesystem::path path =
      named != nullptr ? named : REPRISE_SOURCE_DIR "/.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  return std::filesystem::is_regular_file(path) ? std::optional(path) : std::nullopt;
}

const std::map<std::string, std::string> kNames{
    {"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"},       {"output", "lm_head"},
    {"attn_norm", "input_layernorm"},     {"attn_q", "self_attn.q_proj"},      {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},       {"attn_output", "self_attn.o_proj"}, {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},        {"ffn_up", "mlp.up_proj"},           {"ffn_down", "mlp.down_proj"}};

TEST(SmallModel, EveryTensorEqualsThatOfMlx) {
  const auto path = small_model();
  if (!path) GTEST_SKIP() << "no small model: set REPRISE_MODEL";
  const ModelFiles files = read_model_files(*path);
  const auto config = nlohmann::json::parse(files.config_json);
  const auto [tensors, metadata] = mx::load_gguf(path->string());
  ASSERT_EQ(files.weights.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    // "blk.N.role.kind" or "role.kind"
    std::string rest = name;
    std::string prefix;
    if (name.starts_with("blk.")) {
      const std::size_t dot = name.find('.', 4);
      prefix = "model.layers." + name.substr(4, dot - 4) + ".";
      rest = name.substr(dot + 1);
    }
    const std::string role = rest.substr(0, rest.find('.'));
    const std::string wanted_name = prefix + kNames.at(role) + rest.substr(rest.find('.'));
    ASSERT_TRUE(files.weights.contains(wanted_name)) << wanted_name;

    mx::array want = tensor;
    if (role == "attn_q" || role == "attn_k") {
      const int heads = config.at(role == "attn_q" ? "num_attention_heads" : "num_key_value_heads");
      const int half = want.shape(0) / heads / 2;
      const mx::Shape shape = want.shape();
      want = mx::reshape(mx::swapaxes(mx::reshape(want, {heads, half, 2, shape[1]}), 1, 2), shape);
    }
    want = mx::contiguous(want);
    want.eval();
    const mx::array& got = files.weights.at(wanted_name);
    ASSERT_EQ(got.dtype(), want.dtype()) << wanted_name;
    ASSERT_EQ(got.shape(), want.shape()) << wanted_name;
    ASSERT_EQ(std::memcmp(got.data<char>(), want.data<char>(), want.nbytes()), 0) << wanted_name;
  }
}

TEST(SmallModel, TheTokenizerIsThere) {
  const auto path = small_model();
  if (!path) GTEST_SKIP() << "no small model: set REPRISE_MODEL";
  const ModelFiles files = read_model_files(*path);
  const auto config = nlohmann::json::parse(files.config_json);
  ASSERT_TRUE(files.tokenizer.gguf);
  EXPECT_EQ(files.tokenizer.gguf->tokens.size(), config.at("vocab_size").get<std::size_t>());
  EXPECT_FALSE(files.tokenizer.chat_template.empty());
  ASSERT_FALSE(files.tokenizer.eos_token_ids.empty());
  EXPECT_EQ(files.tokenizer.eos_token_ids[0], config.at("eos_token_id").get<TokenId>());
}

}  // namespace
}  // namespace reprise
