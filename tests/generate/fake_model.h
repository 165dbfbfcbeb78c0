// A language model whose cache rows can be read back: the key row of a token is its id, and the next token is a fixed
// function of the token and its position. With a tokenizer of single letters and a plain chat template.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/generate/generate.h"

namespace reprise::test {

constexpr int kLayers = 2;
// Letters a … z are ids 0 … 25, then space, then the special tokens.
enum SpecialId { space_id = 26, bos_id, user_id, assistant_id, system_id, end_id, vocab_size };

// The keys as numbers, quantised or not.
inline mlx::core::array dense_keys(const KeysValues& stored) {
  if (const auto* dense = std::get_if<DenseKV>(&stored)) return dense->keys;
  const auto& quantized = std::get<QuantizedKV>(stored);
  const auto& keys = quantized.keys;
  return mlx::core::dequantize(keys.packed, keys.scales, keys.biases, quantized.quantization.group_size,
                               quantized.quantization.bits);
}

class FakeModel final : public LanguageModel {
 public:
  explicit FakeModel(std::optional<int> positions = {})
      : LanguageModel({.model_type = "fake",
                       .num_hidden_layers = kLayers,
                       .vocab_size = vocab_size,
                       .max_position_embeddings = positions}) {}

  // Which id follows `id` at `position`.
  std::function<int(int id, int position)> next = [](int id, int position) { return (id * 7 + position * 3 + 1) % 26; };
  // Called before layer `layer` of a forward over L tokens stores anything; may throw.
  std::function<void(int layer, int L)> before_layer = [](int, int) {};
  float logit = 10.0f;  // of the token that follows; the others have 0
  mutable int tokens_processed = 0;
  int head_size = 1;
  std::function<std::unique_ptr<LayerCache>(int layer)> make_layer = [](int) { return std::make_unique<KVCache>(); };
  // How much the logits depend on the rows that the last layer shows.
  float row_weight = 0.0f;

  mlx::core::array forward(const mlx::core::array& tokens, PromptCache& cache) const override {
    namespace mx = mlx::core;
    const int L = tokens.shape(1);
    tokens_processed += L;
    const int offset = std::get<int>(cache.at<AttentionCache>(0).offset());
    const auto rows =
        mx::broadcast_to(mx::reshape(mx::astype(tokens, mx::float32), {1, 1, L, 1}), {1, 1, L, head_size});
    std::vector<KeysValues> stored;
    for (int i = 0; i < kLayers; ++i) {
      before_layer(i, L);
      stored.push_back(cache.at<AttentionCache>(static_cast<std::size_t>(i)).update_and_fetch(rows, rows));
    }
    // A table per position keeps `next` out of the graph, so that steps can be built before their token is known.
    std::vector<float> table(static_cast<std::size_t>(L * vocab_size * vocab_size), 0.0f);
    for (int t = 0; t < L; ++t) {
      for (int id = 0; id < vocab_size; ++id) {
        table[static_cast<std::size_t>((t * vocab_size + id) * vocab_size + next(id, offset + t))] = logit;
      }
    }
    const mx::array logits(table.begin(), {L, vocab_size, vocab_size}, mx::float32);
    const auto picked = mx::take_along_axis(logits, mx::reshape(mx::astype(tokens, mx::int32), {L, 1, 1}), 1);
    auto result = mx::reshape(picked, {1, L, vocab_size});
    if (row_weight > 0.0f) {
      const auto sum = mx::sum(dense_keys(stored.back()));
      const auto steps = mx::multiply(mx::arange(1, vocab_size + 1, mx::float32), mx::array(0.1f));
      result = mx::add(result, mx::multiply(mx::cos(mx::multiply(sum, steps)), mx::array(row_weight)));
    }
    return result;
  }

  PromptCache make_cache() const override {
    PromptCache cache;
    for (int i = 0; i < kLayers; ++i) cache.push_back(make_layer(i));
    return cache;
  }
};

inline std::string tokenizer_json() {
  std::string vocab;
  for (int i = 0; i < 26; ++i)
    vocab += std::string("\"") + static_cast<char>('a' + i) + "\":" + std::to_string(i) + ",";
  vocab += "\"\\u0120\":26";
  std::string added;
  int id = bos_id;
  for (const char* text : {"<s>", "<user>", "<assistant>", "<system>", "<end>"}) {
    added += std::string(id == bos_id ? "" : ",") + "{\"id\":" + std::to_string(id) + ",\"content\":\"" + text +
             "\",\"special\":true,\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false}";
    vocab += std::string(",\"") + text + "\":" + std::to_string(id++);
  }
  return "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[" + added +
         "],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":"
         "true,"
         "\"use_regex\":false},\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
         "\"trim_offsets\":true,\"use_regex\":false},\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
         "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,"
         "\"vocab\":{" +
         vocab + "},\"merges\":[]}}";
}

constexpr const char* kPlainTemplate =
    "<s>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role != 'assistant' or not loop.last or "
    "add_generation_prompt %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

// The model is owned by the result; `model` points to it for scripting.
struct Fake {
  LoadedModel loaded;
  FakeModel* model;
};

inline Fake make_fake(const std::string& chat_template = kPlainTemplate, std::optional<int> positions = {}) {
  TokenizerData data;
  data.tokenizer_json = tokenizer_json();
  data.chat_template = chat_template;
  data.eos_token_ids = {end_id};
  data.eos_token = "<end>";
  data.bos_token = "<s>";
  auto model = std::make_unique<FakeModel>(positions);
  FakeModel* raw = model.get();
  return {{.path = "fake",
           .fingerprint = "fake-1",
           .model = std::move(model),
           .tokenizer = Tokenizer(data),
           .chat_template = ChatTemplate(data),
           .tokenizer_config_json = "{}"},
          raw};
}

// The ids of a layer's rows by position, those that a ring always keeps first.
inline Tokens row_ids(const LayerCache& cache) {
  namespace mx = mlx::core;
  const auto& layer = dynamic_cast<const AttentionCache&>(cache);
  if (layer.empty() || layer.length() == 0) return {};
  KeysValues stored = layer.keys_and_values();
  if (const auto* ring = dynamic_cast<const internal::RingCache*>(&cache))
    stored = ring->temporal_columns()->keys_values();
  auto keys = dense_keys(stored);
  keys = mx::slice(keys, {0, 0, 0, 0}, {1, 1, keys.shape(2), 1});
  auto rows = mx::contiguous(mx::astype(mx::round(keys), mx::int32));
  mx::eval(rows);
  return Tokens(rows.data<int>(), rows.data<int>() + rows.size());
}

// The ids that the cache's rows hold, read from every layer. Throws when layers differ.
inline Tokens stored_ids(const RecordedCache& cache) {
  Tokens ids;
  for (std::size_t i = 0; i < cache.cache.size(); ++i) {
    Tokens of_layer = row_ids(cache.cache[i]);
    if (i == 0) ids = of_layer;
    if (of_layer != ids) throw Error(ErrorCode::internal, "layers hold different rows");
  }
  return ids;
}

}  // namespace reprise::test
