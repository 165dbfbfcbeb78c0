#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "mlx/mlx.h"
#include "reprise/storage/gguf.h"
#include "reprise/storage/model_files.h"
#include "reprise/storage/safetensors.h"
#include "tests/storage/gguf_builder.h"
#include "tests/storage/test_files.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using json = nlohmann::json;
using testing::expect_error;
using testing::GgufBuilder;
using testing::TemporaryFolder;
using testing::write_text;

const std::filesystem::path kData = REPRISE_SOURCE_DIR "/tests/data/storage";

float float_at(const mx::array& array, std::size_t i) { return array.data<float>()[i]; }

mx::array to_float(const mx::array& array) {
  mx::array result = mx::contiguous(mx::astype(array, mx::float32));
  result.eval();
  return result;
}

struct Quantized {
  mx::array packed;
  mx::array scales;  // float32
  mx::array biases;
};

std::optional<Quantized> quantized(const ModelFiles& files, const std::string& name) {
  const std::string stem = name.substr(0, name.rfind('.'));
  const auto scales = files.weights.find(stem + ".scales");
  if (!name.ends_with(".weight") || scales == files.weights.end()) return std::nullopt;
  return Quantized{files.weights.at(name), to_float(scales->second), to_float(files.weights.at(stem + ".biases"))};
}

// As MLX itself unpacks it; groups of 16, which it does not know, from numbers that it unpacks.
mx::array unpacked(const Quantized& w, int columns) {
  const int rows = w.packed.shape(0);
  const int bits = w.packed.shape(1) * 32 / columns;
  const int groups = w.scales.shape(1);
  if (columns / groups == 32) return to_float(mx::dequantize(w.packed, w.scales, w.biases, 32, bits));
  const mx::Shape halves{rows, columns / 32};
  const auto numbers =
      mx::reshape(mx::dequantize(w.packed, mx::ones(halves), mx::zeros(halves), 32, bits), {rows, groups, -1});
  const auto each = [](const mx::array& x) { return mx::expand_dims(x, -1); };
  return to_float(mx::reshape(mx::add(mx::multiply(numbers, each(w.scales)), each(w.biases)), {rows, columns}));
}

mx::array unpacked(const ModelFiles& files, const std::string& name, int columns = 32) {
  const auto w = quantized(files, name);
  return w ? unpacked(*w, columns) : to_float(files.weights.at(name));
}

// A llama of one layer, 32 features, 2 heads, whose tensors are float32 but for `q_type`.
class TinyLlama : public GgufBuilder {
 public:
  explicit TinyLlama(std::uint32_t q_type = 0, const std::string& q_data = std::string(32 * 32 * 4, '\0')) {
    add_string("general.architecture", "llama");
    add_uint("llama.block_count", 1);
    add_uint("llama.embedding_length", 32);
    add_uint("llama.feed_forward_length", 32);
    add_uint("llama.attention.head_count", 2);
    add_float("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    const std::string row(32 * 4, '\1');
    add_tensor("token_embd.weight", {32, 2}, 0, row + row);
    add_tensor("blk.0.attn_q.weight", {32, 32}, q_type, q_data);
  }

  ModelFiles read() const {
    const TemporaryFolder folder;
    write_text(folder / "tiny.gguf", build());
    return read_model_files(folder / "tiny.gguf");
  }
};

// Scales of K types that are float16 are rounded once, each within 2^-11 of itself. All else is exact.
TEST(GgufModel, EveryTypeIsUnpackedAsGgmlDoes) {
  const ModelFiles files = read_model_files(kData / "tiny_llama.gguf");
  const Safetensors expected = read_safetensors(kData / "tiny_llama.expected.safetensors");
  const std::set<std::string> rounded = {"model.layers.1.self_attn.q_proj.weight",
                                         "model.layers.1.self_attn.k_proj.weight",
                                         "model.layers.1.self_attn.v_proj.weight",
                                         "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"};
  std::size_t num_quantized = 0;
  for (const auto& [name, want] : expected.tensors) {
    ASSERT_TRUE(files.weights.contains(name)) << name;
    const mx::array got = unpacked(files, name, want.shape(-1));
    ASSERT_EQ(got.shape(), want.shape()) << name;
    auto bound = mx::zeros_like(got);
    if (const auto w = quantized(files, name)) {
      ++num_quantized;
      if (rounded.contains(name)) {
        bound = mx::multiply(unpacked({w->packed, mx::abs(w->scales), mx::abs(w->biases)}, want.shape(-1)),
                             mx::array(0x1.001p-11f));
      }
    }
    bound.eval();
    float largest = 0.0f;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const float error = std::abs(float_at(got, i) - float_at(want, i));
      ASSERT_LE(error, float_at(bound, i)) << name << " at " << i;
      largest = std::max(largest, error);
    }
    EXPECT_EQ(largest > 0.0f, rounded.contains(name)) << name;
  }
  EXPECT_EQ(num_quantized, 14u);
  EXPECT_EQ(files.weights.size(), expected.tensors.size() + 2 * num_quantized);
}

TEST(GgufModel, TensorsKeepTheirPrecision) {
  const WeightMap weights = read_model_files(kData / "tiny_llama.gguf").weights;
  const std::string layer = "model.layers.0.";
  EXPECT_EQ(weights.at("model.norm.weight").dtype(), mx::float32);
  EXPECT_EQ(weights.at("lm_head.weight").dtype(), mx::float16);
  EXPECT_EQ(weights.at(layer + "mlp.down_proj.weight").dtype(), mx::bfloat16);
  EXPECT_EQ(weights.at(layer + "self_attn.q_proj.weight").dtype(), mx::uint32);
  // Q4_K and Q5_K: of the first layer, float16 does not hold the largest scales; the second's it rounds.
  EXPECT_EQ(weights.at(layer + "self_attn.q_proj.scales").dtype(), mx::float32);
  EXPECT_EQ(weights.at(layer + "self_attn.k_proj.biases").dtype(), mx::float32);
  EXPECT_EQ(weights.at("model.layers.1.self_attn.v_proj.scales").dtype(), mx::float16);
  EXPECT_EQ(weights.at("model.layers.1.mlp.up_proj.biases").dtype(), mx::float16);
  EXPECT_EQ(weights.at(layer + "self_attn.v_proj.scales").dtype(), mx::float16);  // Q8_0
  EXPECT_EQ(weights.at(layer + "self_attn.o_proj.biases").dtype(), mx::float16);  // Q4_0
  EXPECT_EQ(weights.at(layer + "mlp.gate_proj.scales").dtype(), mx::float16);     // Q4_1
}

TEST(GgufModel, TheConfigHasHuggingFacesKeys) {
  const json config = json::parse(read_model_files(kData / "tiny_llama.gguf").config_json);
  const auto spec = [](int bits, int group_size = 32) { return json{{"group_size", group_size}, {"bits", bits}}; };
  json quantization = spec(5);
  quantization["model.embed_tokens"] = spec(8);
  for (const char* module : {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"}) {
    quantization["model.layers.0." + std::string(module)] = spec(4);
  }
  quantization["model.layers.0.self_attn.v_proj"] = spec(8);
  quantization["model.layers.0.mlp.down_proj"] = false;
  quantization["model.layers.1.self_attn.q_proj"] = spec(2, 16);
  quantization["model.layers.1.self_attn.k_proj"] = spec(3, 16);
  quantization["model.layers.1.self_attn.v_proj"] = spec(4);
  quantization["model.layers.1.mlp.up_proj"] = spec(6, 16);
  quantization["lm_head"] = false;
  EXPECT_EQ(config, (json{{"model_type", "llama"},
                          {"hidden_size", 256},
                          {"num_hidden_layers", 2},
                          {"intermediate_size", 32},
                          {"num_attention_heads", 2},
                          {"num_key_value_heads", 1},
                          {"head_dim", 16},
                          {"rms_norm_eps", double{1e-5f}},
                          {"rope_theta", 500000.0},
                          {"max_position_embeddings", 128},
                          {"vocab_size", 8},
                          {"tie_word_embeddings", false},
                          {"attention_bias", true},
                          {"bos_token_id", 1},
                          {"eos_token_id", 2},
                          {"quantization", quantization}}));
}

TEST(GgufModel, WithoutAHeadTheEmbeddingsAreTied) {
  const json config = json::parse(TinyLlama().read().config_json);
  EXPECT_EQ(config["tie_word_embeddings"], true);
  EXPECT_EQ(config["num_key_value_heads"], 2);
  EXPECT_EQ(config["rope_theta"], 10000.0);
  EXPECT_FALSE(config.contains("head_dim"));
  EXPECT_FALSE(config.contains("quantization"));
  EXPECT_FALSE(config.contains("eos_token_id"));
}

TEST(GgufModel, TheTokenizersFieldsAreVerbatim) {
  const TokenizerData data = read_model_files(kData / "tiny_llama.gguf").tokenizer;
  ASSERT_TRUE(data.gguf);
  EXPECT_EQ(data.tokenizer_json, "");
  EXPECT_EQ(data.gguf->model, "llama");
  EXPECT_EQ(data.gguf->pre, "default");
  EXPECT_EQ(data.gguf->tokens.size(), 8u);
  EXPECT_EQ(data.gguf->tokens[4], "\u2581a");
  EXPECT_EQ(data.gguf->scores, (std::vector<float>{0, 0, 0, 0, -1.0f, -2.0f, -0.5f, 0}));
  EXPECT_EQ(data.gguf->token_types, (std::vector<int>{2, 3, 3, 6, 1, 1, 1, 3}));
  EXPECT_TRUE(data.gguf->merges.empty());
  EXPECT_EQ(data.gguf->add_bos_token, true);
  EXPECT_EQ(data.gguf->add_space_prefix, false);
  EXPECT_EQ(data.gguf->add_eos_token, std::nullopt);
  EXPECT_EQ(data.gguf->unknown_token_id, 0);
  EXPECT_EQ(data.bos_token_id, 1);
  EXPECT_EQ(data.eos_token_ids, (std::vector<TokenId>{2, 7}));
  EXPECT_EQ(data.bos_token, "<s>");
  EXPECT_EQ(data.eos_token, "</s>");
  EXPECT_EQ(data.unk_token, "<unk>");
  EXPECT_EQ(data.pad_token, "");
  EXPECT_EQ(data.chat_template, "{{ messages[0].content }}");
}

TEST(GgufModel, AFileWithoutATokenizerLoads) {
  const TokenizerData data = TinyLlama().read().tokenizer;
  EXPECT_FALSE(data.gguf);
  EXPECT_TRUE(data.tokenizer_json.empty());
}

// 32 rows of one Q8_0 block each, all with scale `d` (float16 bits) and numbers 0, 1, 2, ….
std::string q8_rows(std::uint16_t d) {
  std::string rows;
  for (int row = 0; row < 32; ++row) {
    rows += GgufBuilder::bytes_of(d);
    for (int i = 0; i < 32; ++i) rows += static_cast<char>(i - 16);
  }
  return rows;
}

TEST(GgufModel, AScaleTooLargeForAFloat16BiasGetsFloat32) {
  const std::string scales = "model.layers.0.self_attn.q_proj.scales";
  const std::string weight = "model.layers.0.self_attn.q_proj.weight";
  for (const auto& [d, value] : std::map<std::uint16_t, float>{
           {0x5ffeu, 511.5f}, {0x6000u, 512.0f}, {0x7bffu, 65504.0f}, {0xe000u, -512.0f}, {0x0001u, 0x1p-24f}}) {
    const ModelFiles files = TinyLlama(gguf_type::q8_0, q8_rows(d)).read();
    const bool fits = std::abs(value) < 512.0f;
    EXPECT_EQ(files.weights.at(scales).dtype(), fits ? mx::float16 : mx::float32) << value;
    const mx::array got = unpacked(files, weight);
    for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(float_at(got, i), value * (static_cast<float>(i) - 16.0f)) << value;
  }
}

TEST(GgufModel, Iq4NlIsEightBitsWithTheSameWeights) {
  std::string rows;
  for (int row = 0; row < 32; ++row) {
    rows += GgufBuilder::bytes_of(std::uint16_t{0x3800});  // 0.5
    for (int i = 0; i < 16; ++i) rows += static_cast<char>(i | (15 - i) << 4);
  }
  const mx::array got = unpacked(TinyLlama(gguf_type::iq4_nl, rows).read(), "model.layers.0.self_attn.q_proj.weight");
  constexpr int kNumbers[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  for (std::size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(float_at(got, i), 0.5f * static_cast<float>(kNumbers[i]));
    EXPECT_EQ(float_at(got, 16 + i), 0.5f * static_cast<float>(kNumbers[15 - i]));
  }
}

TEST(GgufModel, RowsOfQueriesAreHalvesAgain) {
  std::string data;
  for (int row = 0; row < 32; ++row) {
    for (int i = 0; i < 32; ++i) data += GgufBuilder::bytes_of(static_cast<float>(row));
  }
  const mx::array got = TinyLlama(0, data).read().weights.at("model.layers.0.self_attn.q_proj.weight");
  // Head 0 of 16 rows: the file has 0 8 1 9 2 10 … of what it should be, so the even rows come first.
  for (std::size_t row = 0; row < 8; ++row) {
    EXPECT_EQ(float_at(got, row * 32), static_cast<float>(2 * row));
    EXPECT_EQ(float_at(got, (row + 8) * 32), static_cast<float>(2 * row + 1));
    EXPECT_EQ(float_at(got, (row + 16) * 32), static_cast<float>(16 + 2 * row));
  }
}

TEST(GgufModel, WhatIsNotSupportedIsNamed) {
  const auto refused = [](const std::string& text, const GgufBuilder& file) {
    const TemporaryFolder folder;
    write_text(folder / "tiny.gguf", file.build());
    expect_error(ErrorCode::unsupported, text, [&] { read_model_files(folder / "tiny.gguf"); });
  };
  refused("\"blk.0.attn_q.weight\" is Q8_1", TinyLlama(9, std::string(32 * 36, 'x')));

  GgufBuilder other;
  other.add_string("general.architecture", "bloom");
  refused("qwen2, qwen3, gemma3, phi3, but got \"bloom\"", other);

  const auto refused_entry = [&](const std::string& text, const auto& add) {
    TinyLlama file;
    add(file);
    refused(text, file);
  };
  refused_entry("mixtures of experts", [](TinyLlama& file) { file.add_uint("llama.expert_count", 8); });
  refused_entry("several parts", [](TinyLlama& file) { file.add_uint("split.count", 2); });
  refused_entry("llama.attention.scale", [](TinyLlama& file) { file.add_float("llama.attention.scale", 0.5f); });
  refused_entry("part of each head", [](TinyLlama& file) { file.add_uint("llama.rope.dimension_count", 8); });
  refused_entry("key and value", [](TinyLlama& file) { file.add_uint("llama.attention.value_length", 8); });
  refused_entry("differs between layers", [](TinyLlama& file) {
    file.add_array("llama.attention.head_count_kv", 4, 2, GgufBuilder::bytes_of(1u) + GgufBuilder::bytes_of(2u));
  });
  refused_entry("\"strange\"", [](TinyLlama& file) {
    file.add_string("llama.rope.scaling.type", "strange");
    file.add_float("llama.rope.scaling.factor", 2.0f);
  });
  refused_entry("\"blk.0.attn_what.weight\" has no place",
                [](TinyLlama& file) { file.add_tensor("blk.0.attn_what.weight", {1}, 0, "xxxx"); });
  refused_entry("\"blk.x.attn_q.weight\" has no place",
                [](TinyLlama& file) { file.add_tensor("blk.x.attn_q.weight", {1}, 0, "xxxx"); });
  refused_entry("only weight matrices",
                [](TinyLlama& file) { file.add_tensor("blk.0.attn_q.bias", {32}, 2, std::string(18, 'x')); });
}

TEST(GgufModel, WrongMetadataIsNamedWithTheFile) {
  const auto corrupt = [](const std::string& text, const auto& add) {
    const TemporaryFolder folder;
    TinyLlama file;
    add(file);
    write_text(folder / "tiny.gguf", file.build());
    expect_error(ErrorCode::corrupt_data, text, [&] { read_model_files(folder / "tiny.gguf"); });
    expect_error(ErrorCode::corrupt_data, "tiny.gguf", [&] { read_model_files(folder / "tiny.gguf"); });
  };
  corrupt("llama.rope.freq_base must be a number",
          [](TinyLlama& file) { file.add_string("llama.rope.freq_base", "x"); });
  corrupt("tokenizer.ggml.model must be a string", [](TinyLlama& file) { file.add_uint("tokenizer.ggml.model", 1); });
  corrupt("head_count_kv must be a whole number",
          [](TinyLlama& file) { file.add_raw("llama.attention.head_count_kv", 5, GgufBuilder::bytes_of(-1)); });
  corrupt("do not divide into 3 heads", [](TinyLlama& file) {
    file.add_uint("llama.attention.head_count_kv", 3);
    file.add_tensor("blk.0.attn_k.weight", {32, 32}, 0, std::string(4096, '\0'));
  });
  corrupt("must be below 2, but got 5", [](TinyLlama& file) {
    file.add_string("tokenizer.ggml.model", "gpt2");
    file.add_strings("tokenizer.ggml.tokens", {"a", "b"});
    file.add_uint("tokenizer.ggml.bos_token_id", 5);
  });
  corrupt("differ in number", [](TinyLlama& file) {
    file.add_string("tokenizer.ggml.model", "gpt2");
    file.add_strings("tokenizer.ggml.tokens", {"a", "b"});
    file.add_array("tokenizer.ggml.token_type", 5, 1, GgufBuilder::bytes_of(1));
  });

  const TemporaryFolder folder;
  GgufBuilder empty;
  empty.add_string("general.architecture", "llama");
  write_text(folder / "tiny.gguf", empty.build());
  expect_error(ErrorCode::corrupt_data, "llama.attention.head_count is missing",
               [&] { read_model_files(folder / "tiny.gguf"); });
}

TEST(GgufModel, RopeScalingHasHuggingFacesKeys) {
  TinyLlama linear;
  linear.add_string("llama.rope.scaling.type", "linear");
  linear.add_float("llama.rope.scaling.factor", 4.0f);
  EXPECT_EQ(json::parse(linear.read().config_json)["rope_scaling"],
            (json{{"rope_type", "linear"}, {"type", "linear"}, {"factor", 4.0}}));

  TinyLlama old;
  old.add_float("llama.rope.scale_linear", 2.0f);
  EXPECT_EQ(json::parse(old.read().config_json)["rope_scaling"]["factor"], 2.0);

  TinyLlama yarn;
  yarn.add_string("llama.rope.scaling.type", "yarn");
  yarn.add_float("llama.rope.scaling.factor", 8.0f);
  yarn.add_uint("llama.rope.scaling.original_context_length", 4096);
  EXPECT_EQ(
      json::parse(yarn.read().config_json)["rope_scaling"],
      (json{{"rope_type", "yarn"}, {"type", "yarn"}, {"factor", 8.0}, {"original_max_position_embeddings", 4096}}));

  TinyLlama none;
  none.add_string("llama.rope.scaling.type", "none");
  EXPECT_FALSE(json::parse(none.read().config_json).contains("rope_scaling"));

  TinyLlama both;
  both.add_string("llama.rope.scaling.type", "linear");
  both.add_float("llama.rope.scaling.factor", 4.0f);
  both.add_tensor("rope_freqs.weight", {8}, 0, std::string(32, '\1'));
  expect_error(ErrorCode::unsupported, "beside rope_freqs", [&] { both.read(); });
}

TEST(GgufModel, TheFingerprintTellsModelsApart) {
  const std::string fingerprint = TinyLlama().read().fingerprint;
  EXPECT_EQ(fingerprint.size(), 64u);
  EXPECT_EQ(TinyLlama().read().fingerprint, fingerprint);

  std::string data(32 * 32 * 4, '\0');
  data.back() = 1;
  EXPECT_NE(TinyLlama(0, data).read().fingerprint, fingerprint);
  EXPECT_NE(TinyLlama(1, data.substr(0, 2048)).read().fingerprint, fingerprint);
  TinyLlama config;
  config.add_uint("llama.context_length", 5);
  EXPECT_NE(config.read().fingerprint, fingerprint);
  TinyLlama tokenizer;
  tokenizer.add_string("tokenizer.chat_template", "x");
  EXPECT_NE(tokenizer.read().fingerprint, fingerprint);
}

TEST(GgufModel, AFileThatIsNoModelIsRefused) {
  const TemporaryFolder folder;
  write_text(folder / "a.gguf", "not a model");
  write_text(folder / "a.txt", "not a model");
  expect_error(ErrorCode::corrupt_data, "a.gguf", [&] { read_model_files(folder / "a.gguf"); });
  expect_error(ErrorCode::unsupported, "a.txt", [&] { read_model_files(folder / "a.txt"); });
  expect_error(ErrorCode::not_found, "nothing", [&] { read_model_files(folder / "nothing"); });
}

// Reads every byte of every array: a sanitizer, or the system, tells when one is not there.
std::uint64_t sum_of_bytes(const WeightMap& weights) {
  std::uint64_t sum = 0;
  for (const auto& [name, array] : weights) {
    const auto* bytes = array.data<unsigned char>();
    for (std::size_t i = 0; i < array.nbytes(); ++i) sum += bytes[i];
  }
  return sum;
}

TEST(GgufModel, EveryTruncationIsAnError) {
  const TemporaryFolder folder;
  TinyLlama tiny;
  tiny.add_string("tokenizer.ggml.model", "gpt2");
  tiny.add_strings("tokenizer.ggml.tokens", {"a", "b"});
  const std::string file = tiny.build();
  const std::filesystem::path cut = folder / "cut.gguf";
  for (std::size_t length = 0; length < file.size(); ++length) {
    write_text(cut, file.substr(0, length));
    expect_error(ErrorCode::corrupt_data, "cut.gguf", [&] { read_model_files(cut); });
  }
}

TEST(GgufModel, EveryFlippedByteGivesAnErrorOrAWholeModel) {
  const TemporaryFolder folder;
  const std::string file = testing::read_text(kData / "tiny_llama.gguf");
  const std::size_t head_bytes = parse_gguf(std::as_bytes(std::span(file)), file.size()).data_offset;
  std::uint64_t sum = 0;
  int errors = 0;
  for (std::size_t at = 0; at < head_bytes; ++at) {
    for (const int flip : {0x01, 0x40, 0xff}) {
      std::string damaged = file;
      damaged[at] = static_cast<char>(damaged[at] ^ flip);
      write_text(folder / "damaged.gguf", damaged);
      try {
        const ModelFiles files = read_model_files(folder / "damaged.gguf");
        EXPECT_TRUE(json::parse(files.config_json).is_object());
        sum += sum_of_bytes(files.weights);
      } catch (const Error& error) {
        EXPECT_NE(error.code(), ErrorCode::internal) << error.what();
        ++errors;
      }
    }
  }
  EXPECT_GT(sum, 0u);
  EXPECT_GT(errors, 1000);
}

}  // namespace
}  // namespace reprise
